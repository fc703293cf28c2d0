"""A sum of silos' vectors gives the bits of the sum of their replies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import Setting
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.sums import weighted_mean, weighted_sum
from fedml_noniid.core.trees import Tree
from fedml_noniid.engines.packing import flatten, stack
from fedml_noniid.engines.streaming import Weighing
from fedml_noniid.governance.secure import vectors
from fedml_noniid.plugins import registry

N = [3.0, 1.0, 400.0, 17.0]


def drawn(k: int, dtype: torch.dtype) -> Tree:
    """A silo's reply, with numbers of 1e-8 to 1."""
    generator = torch.Generator().manual_seed(k)

    def numbers(*shape: int) -> Tensor:
        size = 10 ** (-8 * torch.rand(shape, generator=generator, dtype=torch.float64))
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return (size * sign).to(dtype)

    return {
        "deltas": {"w": numbers(5, 40), "b": numbers(7)},
        "buffers": {"mean": numbers(7), "seen": torch.tensor(k)},
        "upload": {"scaffold": {"dc": {"w": numbers(5, 40)}}, "other": {"v": numbers(3)}},
        "n": torch.tensor(N[k]),
    }


def recipe(name: str, **methods: object) -> Algorithm:
    return registry.build(name, methods, Setting(4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("algorithm", "job", "plain"),
    [
        (recipe("scaffold", scaffold={"weights": "size"}), "train", ("scaffold",)),
        (recipe("scaffold"), "train", ("scaffold", "other")),
        (recipe("fedavg"), "train", ()),
        (recipe("fed3r"), "statistics", ("scaffold", "other")),
    ],
)
def test_the_sum_of_vectors_is_that_of_replies(
    algorithm: Algorithm, job: str, plain: tuple[str, ...], dtype: torch.dtype
) -> None:
    """`plain`: uploads that have the weight 1. One silo's tensors reach to 1e5 and 1e9."""
    replies = [drawn(k, dtype) for k in range(4)]
    replies[1]["deltas"]["b"] *= 1e5
    replies[2]["upload"]["scaffold"]["dc"]["w"] *= 1e9
    by, whole = Weighing.from_recipe(algorithm, job), stack(replies)
    flat = [flatten(reply) for reply in replies]
    own = [vectors.levels(leaves) for leaves in flat]
    there = vectors.together(torch.stack(own))
    parts = [vectors.packed(*one, by, sum(N), there, 4) for one in zip(flat, own, strict=True)]
    assert {len(part) for part in parts} == {sum(size for _, size in vectors.parts(flat[0], there))}
    found = vectors.sums(torch.stack(parts).sum(0), replies[0], by, there, whole["n"])
    ones = len(plain) == 2
    omega = torch.ones(4) if ones else whole["n"]
    for part in ("deltas", "buffers"):
        for of in (weighted_mean, weighted_sum):
            assert_equal(of(omega, found[part]), of(omega, whole[part]))
    for name, tree in whole["upload"].items():
        weights = None if name in plain else whole["n"]
        assert_equal(weighted_mean(weights, found["upload"][name]), weighted_mean(weights, tree))


def assert_equal(a: Tree, b: Tree) -> None:
    for key, leaf in b.items():
        if isinstance(leaf, dict):
            assert_equal(a[key], leaf)
        else:
            assert torch.equal(a[key], leaf) and a[key].dtype == leaf.dtype


def test_a_silo_refuses_to_add_what_a_plain_upload_may_not_have() -> None:
    """Beyond 2^30. The server reads the words: they are the same, whatever the number is."""
    reply, words = drawn(0, torch.float64), set[str]()
    for value in (1.01 * 2.0**30, -1e38, torch.nan, torch.inf):
        reply["upload"]["other"]["v"][1] = value
        with pytest.raises(UserError, match=r"'upload/other/v' .* can't be added up") as error:
            vectors.levels(flatten(reply))
        words.add(str(error.value))
    assert len(words) == 1
    reply["upload"]["other"]["v"][1] = -(2.0**30)
    assert vectors.levels(flatten(reply)).tolist().count(1) == 1
