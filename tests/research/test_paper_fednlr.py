"""FedNLR's figures 1 and 3 and table 4: what they say, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML
from torch import Tensor

from fedml_noniid.core.errors import UserError
from research.report import build
from research.runs import Measured
from research.targets import Built, of_targets
from tests.pipelines.small import ROOT
from tests.research import by_hand
from tests.research.by_hand import clients, diverged, is_picture, rows, run


@pytest.mark.parametrize(("name", "rounds"), [("nlr-tab1", 5), ("nlr-tab2", 5), ("nlr-tab3", 30)])
def test_cells_are_means_of_the_last_rounds_but_for_ccvr_s(name: str, rounds: int) -> None:
    """CCVR trains its classifier once, after the last round: a mean over rounds would be
    FedAvg's."""
    spec = of_targets("fednlr", ROOT)[name].spec
    for row, own in spec["rows"].items():
        wanted = "final" if row == "CCVR" else f"last{rounds}"
        assert own.get("statistic", spec["statistic"]) == wanted


def test_example_1_is_that_of_eq_9() -> None:
    """With (1, 1/3) of client 1, its activations are h = (10/9, 2/3), the scores 136/81 and 40/27,
    the second probability p. The gradient of neuron 2's activation is p (10/9 - 2/3), and the
    inputs of the classes have the product 2/3. FedNLR's rates are mu and 1 times 2 / (1 + mu).

    The columns are before, after client 1, change, with FedNLR, change.
    """
    built = build(of_targets("fednlr", ROOT)["nlr-fig1"], Measured("fednlr", "smoke", ROOT))
    assert built.sentences == ("8 of 8 numbers are the paper's.",)
    p = 1 / (1 + math.exp(136 / 81 - 40 / 27))
    fall = 0.5 * p * (10 / 9 - 2 / 3) * 2 / 3
    mu = 1 + 0.45 / 2 + 0.3 * math.log10(2)
    of_nlr = fall * 2 / (1 + mu)
    after = f"{10 / 9 - of_nlr:.2f}"
    assert built.table[2][1:] == ["1.11", "1.04", f"{-fall:+.4f}", after, f"{-of_nlr:+.4f}"]
    assert [row[1:3] for row in built.table[1:]] == [
        ["0.67", "0.73"],
        ["1.11", "1.04"],
        ["0.45", "0.63"],
        ["0.55", "0.37"],
    ]


# The pictures, on results made by hand.
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A paper whose size smoke leaves out d."""
    smoke = "smoke: {recipe_names: [a, b, c], "
    return by_hand.paper(tmp_path, params=by_hand.PARAMS.replace("smoke: {", smoke))


def made(root: Path, kind: str, spec: str) -> Built:
    """A figure from its entry in targets.yaml."""
    reported = {"columns": ["x", "y"], "rows": {"Line": [0.5, None]}}
    return by_hand.built(root, kind, YAML(typ="safe").load(spec), "fednlr", reported)


TEMPERATURE = """\
study: one
scenario: near
methods: {A: a, B: b, C: d}
"""


def temperatures(**layers: Sequence[Sequence[float]]) -> dict[str, Tensor]:
    """What FedNLR records in two rounds of two clients."""
    values = {f"fednlr/T/{name}": torch.tensor(t).float() for name, t in layers.items()}
    ratios = {f"fednlr/mu/{name}": torch.full((2, 2), 1.25) for name in layers}
    return {"round/clients": torch.tensor([[0, 1], [1, 0]])} | values | ratios


def test_temperatures_by_layer(root: Path) -> None:
    """Rounds are lines.

    conv1: mean 10 / 4, last round 2 and 4, sqrt(2); conv2: 24 / 4, 5 and 9, sqrt(8); fc1: 1.
    """
    recorded = temperatures(fc1=[[1, 1], [1, 1]], conv2=[[5, 5], [5, 9]], conv1=[[1, 3], [2, 4]])
    run(root, "near", "a", 0, [0.5, 0.5], recorded=recorded)
    built = made(root, "temperature", TEMPERATURE)
    assert built.table[1:] == [
        ["A", "conv1", "1.250", "2.5", "1", "4", "1.41"],
        ["A", "conv2", "1.250", "6", "5", "9", "2.83"],
        ["A", "fc1", "1.250", "1", "1", "1", "0"],
    ]
    assert built.sentences == (
        "A: the highest temperature is that of conv2, layer 2 of 3 (6 on average), the lowest "
        "that of fc1 (1).",
    )
    assert built.missing == ("B",), "C is not run at this size"
    assert is_picture(built) and len(rows(built)) == 3 * 2 * 2
    assert [*rows(built)[2].values()] == ["A", "conv1", "2", "0", "2.0"]


ACTIVATIONS = """\
study: one
scenario: near
methods: {FedAvg: a, FedNLR: b}
clients: [0, 1]
"""
# Of client 0 in the last round; lines are classes, columns neurons.
BEFORE = [[0.5, 0.2, 0.0, 0.9, 0.8], [0.1, 0.2, 0.0, 0.3, 0.4], [0.3, 0.1, 0.0, 1.0, 0.0]]


def observed(
    after: Sequence[float], before: Sequence[Sequence[float]] = BEFORE
) -> dict[str, Tensor]:
    """Two rounds, two clients, three classes, five neurons; `after` is of class 0.

    What is not to be read is 9.

    Client 0 stands second in the last round.
    """
    shape = (2, 2, 3, 5)
    found = {"before": torch.full(shape, 9.0), "after": torch.full(shape, 9.0)}
    found["before"][1, 1], found["after"][1, 1, 0] = torch.tensor(before), torch.tensor(after)
    bound = torch.ones(shape, dtype=torch.bool)
    bound[1, 1] = False
    bound[1, 1, 2, 3] = True
    clients = torch.tensor([[0, 1], [1, 0]])
    return {"round/clients": clients, "fednlr/bound": bound} | {
        f"fednlr/{key}": x for key, x in found.items()
    }


FEDAVG, FEDNLR = [0.3, 0.1, 0.0, 0.95, 0.9], [0.4, 0.1, 0.0, 0.9, 0.84]


def test_activations_of_bound_neurons(root: Path) -> None:
    """C-1 has class 2, C-2 class 0.

    Neurons 1 and 5 are bound to class 0, neuron 4 to class 2; 2 ties, 3 is dead.

    FedAvg: 0.3 - 0.5 = -0.2 and 0.9 - 0.8 = +0.1, mean -0.05. FedNLR: -0.1 and +0.04, mean -0.03.
    More active on class 0 than on class 2 are neurons 1, 5 and 2, which goes from 0.2 to 0.1: means
    -0.2 / 3 and -0.16 / 3.
    """
    run(root, "near", "a", 0, [0.7, 0.2], recorded=observed(FEDAVG))
    run(root, "near", "b", 0, [0.7, 0.3], recorded=observed(FEDNLR))
    clients(root, "near", 0, [[0, 0, 7], [7, 0, 0]])
    built = made(root, "activations", ACTIVATIONS)
    assert built.table[1:] == [
        ["1", "0.30", "0.50*", "0.30*", "-0.200", "0.40*", "-0.100"],
        ["2", "0.10", "0.20", "0.10", "", "0.10", ""],
        ["3", "0.00", "0.00", "0.00", "", "0.00", ""],
        ["4", "1.00*", "0.90", "0.95", "", "0.90", ""],
        ["5", "0.00", "0.80*", "0.90*", "+0.100", "0.84*", "+0.040"],
    ]
    assert built.sentences == (
        "Shown is seed 0.",
        "Seed 0 (classes 2 and 0, accuracy before the round 70.0%): on C-2, 2 neurons bound to "
        "its class: on average "
        "-0.050 by FedAvg (1 fall) and -0.030 by FedNLR (1 fall), less with FedNLR; on C-2, 3 "
        "neurons more active "
        "there than on C-1: on average -0.067 by FedAvg (2 fall) and -0.053 by FedNLR (2 fall), "
        "less with FedNLR. By "
        "definition 1, sample by sample, 1 of 5 neurons are bound to any class.",
    )
    assert built.missing == ()
    assert [r["bound_to"] for r in rows(built)] == ["0", "0", "", "", "", "", "2", "2", "0", "0"]
    assert built.printed == [["", "x", "y"], ["Line", "0.5", ""]]


def test_activations_that_can_t_be_compared(root: Path) -> None:
    """With parts missing, of a method that diverges, of other models, of clients with two
    classes."""
    assert made(root, "activations", ACTIVATIONS).missing == ("FedAvg", "FedNLR")
    run(root, "near", "a", 0, [0.7, 0.2], recorded=observed(FEDAVG))
    assert made(root, "activations", ACTIVATIONS) == Built((), {}, (), ("FedNLR",))
    diverged(root, "near-b-0")
    assert made(root, "activations", ACTIVATIONS).sentences == ("FedNLR diverges.",)
    diverged(root)
    run(root, "near", "b", 1, [0.7, 0.2], recorded=observed(FEDNLR))
    assert made(root, "activations", ACTIVATIONS).missing == ("a seed of both",)
    other = [[x + 0.001 for x in line] for line in BEFORE]
    run(root, "near", "b", 0, [0.7, 0.3], recorded=observed(FEDNLR, other))
    clients(root, "near", 0, [[0, 0, 7], [7, 0, 0]])
    words = ": the methods do not start from the same model, so that nothing can be compared."
    assert made(root, "activations", ACTIVATIONS).sentences[1].endswith(words)
    clients(root, "near", 0, [[0, 0, 7], [3, 4, 0]])
    with pytest.raises(UserError, match="client 1 has 2 classes"):
        made(root, "activations", ACTIVATIONS)
