"""Mistakes of a user, as data: what is wrong, where, the value, and what is allowed.

`str()` of an error has one line per mistake. That is the only place that writes them.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Self

shown = reprlib.repr  # of a value in a message: as Python writes it, but cut if it is long
ABSENT: Final = ...  # in place of a value; it stays the same object between processes
# What is wrong with a value or a key. What does not begin with "is" is a sentence of its own.
REFUSED, UNKNOWN, MISSING = "is refused", "is unknown", "is missing"
KeyPath = tuple[str | int, ...]  # keys from the outermost section to the value; numbers are places


def one_line(text: str, limit: int | None = None) -> str:
    """Escapes what would act on a terminal or begin a line, and cuts the text: another machine may
    have written it."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit]
    )[:limit]


@dataclass(frozen=True)
class Mistake:
    """One mistake of a user."""

    what: str = REFUSED
    path: KeyPath = ()
    value: object = ABSENT
    allowed: str = ""
    meant: str = ""  # the allowed word that is closest
    source: str = ""  # the file, function or command that the keys belong to

    def __str__(self) -> str:
        keys = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)
        name = "".join(keys).removeprefix(".")
        in_yaml = self.source.endswith(".yaml") and isinstance(self.value, bool | None)
        value = "" if self.value is ABSENT else (json.dumps if in_yaml else shown)(self.value)
        subject = " = ".join(part for part in (name, value) if part)
        joint = " " if self.what.startswith("is ") else ": "
        line = f"{subject}{joint}{self.what}" if subject else self.what
        line += f" (did you mean {self.meant!r}?)" if self.meant else ""
        line += f"; allowed: {self.allowed}" if self.allowed else ""
        return one_line(f"{self.source}: {line}" if self.source else line)


class UserError(ValueError):
    """Bad input: one mistake or several. `UserError("a sentence")` has no key and no value.

    Every command line prints it without a traceback and exits with code 2.
    """

    mistakes: tuple[Mistake, ...]

    def __init__(
        self,
        what: str = REFUSED,
        *,
        path: KeyPath = (),
        value: object = ABSENT,
        allowed: str = "",
        meant: str = "",
    ) -> None:
        super().__init__(what)
        self.mistakes = (Mistake(what, path, value, allowed, meant),)

    def __str__(self) -> str:
        return "\n".join(map(str, self.mistakes))

    @classmethod
    def from_mistakes(cls, mistakes: Iterable[Mistake]) -> Self:
        """One error with all of these mistakes, each of them once."""
        error = cls()
        error.mistakes = tuple({str(mistake): mistake for mistake in mistakes}.values())
        return error

    def changed(self, change: Callable[[Mistake], Mistake]) -> Self:
        """The same kind of error with other mistakes."""
        # No copy.copy: where dask is imported, the two would share their mistakes.
        error = type(self).__new__(type(self), *self.args)
        vars(error).update(vars(self), mistakes=tuple(map(change, self.mistakes)))
        return error

    def below(self, *path: str | int, source: str = "") -> Self:
        """The same with these keys before its own; `source`: what they are keys of."""
        return self.changed(
            lambda mistake: replace(
                mistake, path=(*path, *mistake.path), source=source or mistake.source
            )
        )


class PublicError(UserError):
    """An error whose words may leave this machine: a path stands in `Mistake.source` alone."""

    def without_source(self) -> str:
        """Returns the words that may leave."""
        return str(self.changed(lambda mistake: replace(mistake, source="")))


class NonFiniteError(PublicError):
    """A loss, an update or a client's memory stopped being finite. The message names client and
    round."""


@contextmanager
def located(*path: str | int, source: str = "") -> Iterator[None]:
    """UserErrors inside get these keys before their own; `source`: what they are keys of."""
    try:
        yield
    except UserError as error:
        raise error.below(*path, source=source) from error.__cause__


@contextmanager
def together(
    source: str = "", kind: type[UserError] = UserError
) -> Iterator[Callable[..., AbstractContextManager[None]]]:
    """Yields `located`, which now collects. At the end, all UserErrors are raised as one."""
    mistakes: list[Mistake] = []

    @contextmanager
    def collected(*path: str | int) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            mistakes.extend(error.below(*path, source=source).mistakes)

    yield collected
    if mistakes:
        raise kind.from_mistakes(mistakes)


def closest(word: object, allowed: Iterable[str], least: float = 0.6) -> str:
    """The allowed word that is closest to `word`, or "" if none is close.

    Upper and lower case count as the same. `least`: how alike the two must be, 1 for the same word.
    """
    names = {name.casefold(): name for name in allowed}
    close = difflib.get_close_matches(str(word).casefold(), names, n=1, cutoff=least)
    return names[close[0]] if close else ""


def among(word: object, names: Iterable[str], also: str = "", most: int = 8) -> dict[str, Any]:
    """`allowed` and `meant` of a mistake where `word` is none of the names.

    If one name is close, only the first `most` are listed. `also`: what else is allowed.
    """
    listed = list(names)
    if (meant := closest(word, listed)) and len(listed) > most:
        listed[most:] = [f"... ({len(listed)} in all)"]
    return {"allowed": ", ".join(listed + [also] * bool(also)) or "none", "meant": meant}


def known(kind: str, name: object, allowed: Iterable[str]) -> str:
    """`name`, if it is one of `allowed`. UserError with the nearest match otherwise."""
    names = list(allowed)
    if isinstance(name, str) and name in names:
        return name
    raise UserError(
        f"{kind} {shown(name)} is unknown",
        **among(name, names),
    )
