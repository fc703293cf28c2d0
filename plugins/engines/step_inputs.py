"""What the steps of local training read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fedml_noniid.plugins.core.data import Pass
from fedml_noniid.plugins.core.trees import Params


class StepInputs(NamedTuple):
    """Holds what the steps of local training read, and where their result goes."""

    steps: Pass
    drawn: Iterator[Params]  # what the network draws, step by step
    out: Params | None  # memory that the trained parameters may take
