"""A method that trains on the test set, which none of ours does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import Component, Needs, Public


@dataclass(frozen=True)
class Peek(Component):
    """Asks for the test set, and leaves it alone."""

    name: ClassVar[str] = "peek"
    needs: ClassVar[Needs] = Needs(public=Public.TEST_SET)
