"""Walks over the table of recipes: a part of each is quick, so that `make test` takes minutes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def thinned(cases: Iterable[object], turn: int = 0, every: int = 3) -> list[object]:
    """Parameters of a test: one of each `every` consecutive cases, the others marked slow.

    Its position rotates from group to group, and begins at `turn`: with as many variants as
    `every`, each recipe has one, and not always the same. Walks of one table take different turns,
    so that each recipe goes through some of them.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if (number + number // every) % every == turn else pytest.mark.slow,
        )
        for number, case in enumerate(cases)
    ]
