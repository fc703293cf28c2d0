"""Mistakes of a user, explained in one line."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

shown = reprlib.repr  # of a value in a message: as Python writes it, but cut if it is long


class UserError(ValueError):
    """Bad input. The message is one line: what is wrong, where (file, key, value), what is allowed.

    Every command line prints it without a traceback and exits with code 2.
    """


class NonFiniteError(UserError):
    """A loss or an update stopped being finite. The message names client and round."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the allowed word that is closest to `word`, or `""` if none is
    close.

    Upper and lower case count as the same.
    """
    close = difflib.get_close_matches(
        word.casefold(), found := {name.casefold(): name for name in allowed}, n=1
    )
    return f" (did you mean {found[close[0]]!r}?)" if close else ""
