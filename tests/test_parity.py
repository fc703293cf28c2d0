"""The vectorized engine equals the sequential one, for every recipe of the table."""

from __future__ import annotations

import pytest
import torch

from fedml_noniid.contract import checks
from tests import federation
from tests.recipe_table import ALONE, EVERY
from tests.walks import thinned

# Every recipe where it is hardest; a method by itself in float32 too.
WAYS = [
    *((entry, True, torch.float64) for entry in EVERY if "+" not in entry),
    *thinned(((entry, True, torch.float64) for entry in EVERY if "+" in entry), 0, 12),
    *thinned(((entry, False, torch.float32) for entry in ALONE), 0, 8),
]


def test_the_table_is_not_small() -> None:
    assert len(EVERY) >= 60


@pytest.mark.parametrize(
    ("entry", "batch_norm", "dtype"),
    WAYS,
    ids=lambda value: {True: "norm", False: "plain"}.get(value, str(value)),
)
def test_rounds_on_ragged_clients(entry: str, batch_norm: bool, dtype: torch.dtype) -> None:
    rounds = federation.ROUNDS if entry in ALONE else 2
    checks.engines_agree(*EVERY[entry], dtype, batch_norm, rounds)


@pytest.fixture(scope="module")
def images() -> federation.Federation:
    return federation.images()


@pytest.mark.parametrize("entry", thinned(ALONE, 1, 8))
def test_convolutions_and_what_is_recorded(entry: str, images: federation.Federation) -> None:
    recipe, settings = ALONE[entry]
    if recipe == "fednlr" and "mu" in settings["fednlr"]:
        settings = {"fednlr": settings["fednlr"] | {"mu": "fc1=3 conv2=2"}}
    checks.engines_agree_on_images(recipe, settings, images)
