"""The partition of NIID-Bench and Flower, and SCAFFOLD as these and FedBench have it, against
arithmetic by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from fedml_noniid.core.options import RecipeError
from fedml_noniid.own_code import function_of
from tests.methods import by_hand as hand
from tests.methods.conftest import engine as engine

MOMENTUM = 0.9
RESULTS = Path(__file__).resolve().parents[2] / "research" / "results"
LABELS = np.repeat(np.arange(10), 5000)


def drawn(generator: str, draw: int) -> list[np.ndarray]:
    return function_of("partition", "niid_bench:dirichlet", {})(
        LABELS, 10, generator=generator, draw=draw
    )


@pytest.mark.parametrize(
    ("generator", "draw", "sizes"),
    [
        ("flower", 42, [1785, 5453, 5426, 5263, 7013, 5062, 5051, 6092, 5142, 3713]),
        ("niid_bench", 0, [5307, 3688, 4435, 5047, 5189, 3803, 5202, 4325, 8078, 4926]),
        ("niid_bench", 1, [5936, 4204, 5805, 5297, 4988, 5343, 7495, 5158, 1980, 3794]),
    ],
)
def test_the_counts_are_those_of_the_codes(generator: str, draw: int, sizes: list[int]) -> None:
    """The sizes are of a script of its own, which counts and holds no sample."""
    parts = drawn(generator, draw)
    assert [len(part) for part in parts] == sizes
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


def test_the_draws_of_the_page_are_those_of_the_codes() -> None:
    """niid-bench-draws.csv: samples by client and class."""
    with (RESULTS / "niid-bench-draws.csv").open() as file:
        rows = list(csv.DictReader(file))
    for code, draw in (("flower", 42), ("niid_bench", 0), ("niid_bench", 1), ("niid_bench", 2)):
        printed = [row for row in rows if (row["code"], row["draw"]) == (code, str(draw))]
        for row, part in zip(printed, drawn(code, draw), strict=True):
            assert [int(row[f"class_{c}"]) for c in range(10)] == np.bincount(
                LABELS[part], minlength=10
            ).tolist()


def test_the_network_has_the_weights_that_the_papers_code_counts() -> None:
    for shape, expected in (((3, 32, 32), 62_006), ((1, 28, 28), 44_426)):
        one, last = (
            function_of("model", f"niid_bench:{name}", {})(10, shape)
            for name in ("LeNet", "LeNetChannelsLast")
        )
        assert sum(leaf.numel() for leaf in one.parameters()) == expected
        last.load_state_dict(one.state_dict())
        x = torch.rand(2, *shape)
        torch.testing.assert_close(last(x), one(x), rtol=1e-5, atol=1e-6)


class Reference:
    """Algorithm 1 with option II, whose correction is a step behind that of SGD with momentum."""

    def __init__(self, start: str, divisor: str) -> None:
        self.w, self.divisor = hand.W0, divisor
        first = hand.W0 if start == "network" else hand.zeros()
        self.c, self.c_i = first, [first] * 3

    def round(self, cohort: tuple[int, ...], batches: list[list[hand.Array]]) -> None:
        steps = len(batches[0])  # of all the client's samples, so their order does not matter
        trained, changes = [], []
        for i in cohort:
            y, v = self.w, hand.zeros()
            correction = hand.each(np.subtract, self.c, self.c_i[i])
            for _ in range(steps):
                g = hand.gradient(y, hand.X[hand.CLIENTS[i]], hand.Y[hand.CLIENTS[i]])
                v = hand.each(lambda v, g: MOMENTUM * v + g, v, g)
                y = hand.each(lambda y, v, b: y - hand.LR * (v + b), y, v, correction)
            mean = hand.each(lambda x, y: (x - y) / (steps * hand.LR), self.w, y)
            changes.append(hand.each(np.subtract, mean, self.c))  # c_i+ - c_i
            self.c_i[i] = hand.each(np.add, self.c_i[i], changes[-1])
            trained.append(y)
        equal = {"clients": [1 / 3] * len(cohort), "cohort": hand.shares(cohort, [1.0] * 3)}
        p = equal.get(self.divisor, hand.shares(cohort))
        self.c = hand.each(np.add, self.c, hand.average(p, changes))
        self.w = hand.average(hand.shares(cohort), trained)


@pytest.mark.parametrize("cohort", [2, 3])
@pytest.mark.parametrize("start", ["zero", "network"])
@pytest.mark.parametrize("divisor", ["clients", "cohort", "samples"])
def test_scaffold_with_momentum(start: str, divisor: str, cohort: int, engine: str) -> None:
    name = "scaffold_flower" if divisor == "samples" else "scaffold_authors"
    settings = {name: {"start": start} | ({} if divisor == "samples" else {"divisor": divisor})}
    ran = hand.run(name, settings, engine=engine, rounds=3, cohort=cohort, momentum=MOMENTUM)
    reference = Reference(start, divisor)
    ran.replay(reference)
    hand.same(ran.outcome.params, reference.w)


@pytest.mark.parametrize("rounds", [1, 3])
def test_fedbenchs_c_points_back_to_the_first_model(rounds: int, engine: str) -> None:
    """c = (x_t - x_0) / (K eta): a round's corrections together lead back to x_0."""
    ran = hand.run("scaffold_fedbench", engine=engine, rounds=rounds, momentum=MOMENTUM)
    c = ran.state("scaffold_fedbench")["c"]
    for name, leaf in ran.outcome.params.items():
        expected = (leaf.numpy() - hand.W0[name]) / (2 * hand.LR)
        np.testing.assert_allclose(c[name].numpy(), expected, rtol=1e-9, atol=1e-12)


def test_another_optimiser_is_refused() -> None:
    with pytest.raises(RecipeError, match="scaffold_authors: optimizer = 'adam'; allowed: sgd"):
        hand.run("scaffold_authors", optimizer="adam")
