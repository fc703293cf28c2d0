"""What SCAFFOLD, FedDC and FedDyn promise whatever the numbers are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.methods import by_hand as hand
from tests.methods import convex

UNIFORM, BY_SIZE = np.full(3, 1 / 3), np.array(hand.SIZES) / 6


@pytest.mark.parametrize(
    ("recipe", "settings", "p"),
    [
        ("scaffold", {}, UNIFORM),
        ("scaffold_i", {}, UNIFORM),
        ("feddc", {"alpha": 0.3}, UNIFORM),
        ("feddyn", {"alpha": 1.0}, UNIFORM),
        ("feddyn_authors", {"alpha": 1.0}, BY_SIZE),
    ],
)
def test_their_fixed_point_is_the_minimiser(
    recipe: str, settings: dict[str, object], p: hand.Array
) -> None:
    """Of the mean loss over clients, or in the authors' form of FedDyn over samples."""
    wanted = convex.minimiser(*p)
    found = convex.run(recipe, settings, 12, epochs=3)
    assert convex.distance(found, wanted) < 1e-2 * convex.distance(convex.START, wanted)


def test_fedavg_stops_elsewhere() -> None:
    """So the fixed point is the merit of the methods; and the two minimisers are apart."""
    found = convex.run("fedavg", {}, 12, epochs=3)
    clients, samples = convex.minimiser(*UNIFORM), convex.minimiser(*BY_SIZE)
    assert min(convex.distance(found, clients), convex.distance(found, samples)) > 0.1
    assert convex.distance(clients, samples) > 0.1
