"""FedNLR's figures and example 1: what they say, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from torch import Tensor

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.reporting.figures import Values
from research.papers.fednlr import example
from research.report import build
from research.runs import Measured
from research.studies import DIVERGED
from research.targets import Built, of_targets
from tests.pipelines.small import ROOT
from tests.research import by_hand
from tests.research.by_hand import clients, diverged, is_picture, paper, rows, run


@pytest.mark.parametrize(("name", "rounds"), [("nlr-tab1", 5), ("nlr-tab2", 5), ("nlr-tab3", 30)])
def test_cells_are_means_of_the_last_rounds_but_for_ccvr_s(name: str, rounds: int) -> None:
    """CCVR trains its classifier once, after the last round: a mean over rounds would be
    FedAvg's."""
    spec = of_targets("fednlr", ROOT)[name].spec
    for row, own in spec["rows"].items():
        assert own.get("statistic", spec["statistic"]) == (
            "final" if row == "CCVR" else f"last{rounds}"
        )


# The pictures, on results made by hand.
# --------------------------------------------------------------------------------------------------


STUDY = """\
    what: a study
    data: {name: digits, validation: 0, public: 0}
    scenarios: {near: {partition: iid, clients: 2}}
    seeds: [0, 1, 2]
    train: {model: mlp, rounds: 2, epochs: 1, batch_size: 50, lr: 0.1}
"""


def at_hand(root: Path, names: Sequence[str], studies: Sequence[str] = ("one",)) -> Path:
    """A paper whose studies have these recipes; size smoke leaves out `other`."""
    entries = ", ".join(f"{name}: {{recipe: fedavg}}" for name in names)
    wanted = ", ".join(name for name in names if name != "other")
    text = "studies:\n"
    for one in studies:
        text += f"  {one}:\n{STUDY}    recipes: {{{entries}}}\n"
        text += f"    smoke: {{recipe_names: [{wanted}]}}\n"
    return paper(root, params=text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A paper with recipes a and b."""
    return at_hand(tmp_path, "ab")


def made(root: Path, kind: str, spec: str) -> Built:
    """A figure from its entry in targets.yaml."""
    reported = {"columns": ["x", "y"], "rows": {"Line": [0.5, None]}}
    return by_hand.built(root, kind, YAML(typ="safe").load(spec), "fednlr", reported)


def percent(root: Path, recipe: str, values: Mapping[int, float], study: str = "one") -> None:
    """Runs whose last two rounds have these means, by seed; the round before them was better."""
    for seed, value in values.items():
        run(root, "near", recipe, seed, [0.999, (value - 5) / 100, (value + 5) / 100], study)


# Two seeds confirm nothing here.
CONFIRMED = "; paired t tests over seeds, with Holm's adjustment for {}, confirm 0"
RATES = """\
statistic: last2
scenario: near
methods: {FedAvg: a, FedNLR: b}
rates: {0.01: {study: slow}, 0.1: {study: fast}}
"""


def test_gains_at_learning_rates_with_their_intervals(tmp_path: Path) -> None:
    """At 0.01: 53 - 50 = 3 and 41 - 40 = 1, so 2 with a deviation of 2 / sqrt(2) = 1.41.

    Half an interval is 12.706 times 1, and 12.706 times 2. At 0.1: 3 and 39 - 40 = -1, so 1 with 4
    / sqrt(2) = 2.83. Seed 2 has FedNLR alone: in its mean, not in the gain.
    """
    root = at_hand(tmp_path, "ab", ("slow", "fast"))
    percent(root, "a", {0: 50, 1: 40}, "slow")
    percent(root, "b", {0: 53, 1: 41}, "slow")
    percent(root, "a", {0: 50, 1: 40}, "fast")
    percent(root, "b", {0: 53, 1: 39, 2: 70}, "fast")
    built = made(root, "learning_rates", RATES)
    assert built.table == [
        ["learning rate", "FedAvg, %", "FedNLR, %", "FedNLR - FedAvg"],
        ["0.01", "45.00 ± 7.07", "47.00 ± 8.49", "+2.00 ± 1.41"],
        [
            "0.1",
            "45.00 ± 7.07",
            "54.00 ± 15.52",
            "+1.00 ± 2.83",
        ],  # 53, 39, 70: sqrt((1 + 225 + 256) / 2)
    ]
    assert built.sentences == (
        (
            "At 0.01 FedNLR less FedAvg is +2.00 points, 95 % interval -10.71 to +14.71 over 2 "
            "seeds: undecided."
        ),
        (
            "At 0.1 FedNLR less FedAvg is +1.00 points, 95 % interval -24.41 to +26.41 over 2 "
            "seeds: undecided."
        ),
    )
    assert built.missing == () and is_picture(built)
    found = {
        (r["learning_rate"], r["method"], r["seed"]): float(r["accuracy"]) for r in rows(built)
    }
    assert len(found) == 9 and found["0.1", "FedNLR", "2"] == pytest.approx(70)


def test_a_method_that_diverges_on_one_seed_is_not_compared_by_the_others(tmp_path: Path) -> None:
    root = at_hand(tmp_path, "ab", ("slow", "fast"))
    percent(root, "a", {0: 50, 1: 40}, "fast")
    percent(root, "b", {1: 90}, "fast")
    diverged(root, "near-b-0", study="fast")
    built = made(root, "learning_rates", RATES)
    assert built.table[2] == ["0.1", "45.00 ± 7.07", "90.00; 1 of 2 seeds diverges", "-"]
    assert built.sentences == () and built.missing == ("0.01, FedAvg", "0.01, FedNLR")
    assert {r["method"] for r in rows(built)} == {"FedAvg"}


RATIOS = """\
study: one
scenario: near
statistic: last2
baseline: a
settings: {P: b, Q: c, R: d, S: other}
"""


def test_gains_by_setting_of_mu(tmp_path: Path) -> None:
    """P: 52 - 50 = 2 and 44 - 40 = 4; Q: -1 on both seeds; R diverges on one of them; S is not run
    at this size."""
    root = at_hand(tmp_path, ["a", "b", "c", "d", "other"])
    percent(root, "a", {0: 50, 1: 40})
    percent(root, "b", {0: 52, 1: 44})
    percent(root, "c", {0: 49, 1: 39})
    percent(root, "d", {1: 99})
    diverged(root, "near-d-0")
    built = made(root, "ratios", RATIOS)
    assert built.table == [
        ["setting of mu", "accuracy, %", "gain over FedAvg"],
        ["FedAvg", "45.00 ± 7.07", "-"],
        ["P", "48.00 ± 5.66", "+3.00 ± 1.41"],
        ["Q", "44.00 ± 7.07", "-1.00 ± 0.00"],
        ["R", "99.00; 1 of 2 seeds diverges", "-"],
        ["S", "not run at this size", "-"],
    ]
    assert built.sentences == (
        f"1 of 2 settings have a higher mean than FedAvg{CONFIRMED.format(2)}.",
        "The highest is P (+3.00 ± 1.41), the lowest Q (-1.00 ± 0.00).",
    )
    assert built.missing == () and is_picture(built)
    assert [(r["setting"], r["seed"]) for r in rows(built)] == [
        (s, n) for s in ("FedAvg", "P", "Q") for n in "01"
    ]


LAYERS = """\
study: one
scenario: near
statistic: last2
baseline: a
layers: [conv1, conv2, fc1, fc2]
ratios: {1.5: "150", 2: "200"}
"""
POINTS = [
    "conv1-150",
    "conv1-200",
    "conv2-150",
    "conv2-200",
    "fc1-150",
]  # nothing of fc2 at this size


def test_accuracy_by_scaled_layer(tmp_path: Path) -> None:
    """FedAvg 50.

    conv1: 51, 49; conv2: 56, 52; fc1: 50, which is not above it. conv2 moves by 4, conv1 by 2.
    """
    root = at_hand(tmp_path, ["a", *POINTS])
    percent(root, "a", {0: 49, 1: 51})
    for recipe, value in zip(POINTS, (51, 49, 56, 52, 50), strict=True):
        percent(root, recipe, {0: value - 1, 1: value + 1})
    built = made(root, "layers", LAYERS)
    assert built.table == [
        ["layer", "mu 1.5", "mu 2"],
        ["conv1", "51.00 ± 1.41", "49.00 ± 1.41"],
        ["conv2", "56.00 ± 1.41", "52.00 ± 1.41"],
        ["fc1", "50.00 ± 1.41", "not run at this size"],
    ]
    assert built.sentences == (
        "3 of 5 points are above FedAvg (50.00 %).",
        "Above it: mu 1.5 in 2 of 3 layers, mu 2 in 1 of 2 layers.",
        (
            "The choice of mu moves the accuracy most in conv2 (by 4.00 points), least in conv1 "
            "(2.00)."
        ),
    )
    assert built.missing == () and is_picture(built)
    found = {(r["layer"], r["mu"], r["seed"]): float(r["accuracy"]) for r in rows(built)}
    assert len(found) == 12 and found["conv2", "2", "1"] == pytest.approx(53)
    assert found["FedAvg", "", "0"] == pytest.approx(49)


TEMPERATURE = """\
study: one
scenario: near
methods: {A: a, B: b, C: other}
"""


def temperatures(**layers: Sequence[Sequence[float]]) -> dict[str, Tensor]:
    values = {
        f"fednlr/T/{name}": torch.tensor(t, dtype=torch.float32) for name, t in layers.items()
    }
    ratios = {f"fednlr/mu/{name}": torch.full((2, 2), 1.25) for name in layers}
    return {"round/clients": torch.tensor([[0, 1], [1, 0]])} | values | ratios


def test_temperatures_by_layer(tmp_path: Path) -> None:
    """Rounds are lines.

    conv1: mean 10 / 4, last round 2 and 4, sqrt(2); conv2: 24 / 4, 5 and 9, sqrt(8); fc1: 1.
    """
    root = at_hand(tmp_path, ["a", "b", "other"])
    recorded = temperatures(fc1=[[1, 1], [1, 1]], conv2=[[5, 5], [5, 9]], conv1=[[1, 3], [2, 4]])
    run(root, "near", "a", 0, [0.5, 0.5], recorded=recorded)
    built = made(root, "temperature", TEMPERATURE)
    assert built.table[1:] == [
        ["A", "conv1", "1.250", "2.5", "1", "4", "1.41"],
        ["A", "conv2", "1.250", "6", "5", "9", "2.83"],
        ["A", "fc1", "1.250", "1", "1", "1", "0"],
    ]
    assert built.sentences == (
        (
            "A: the highest temperature is that of conv2, layer 2 of 3 (6 on average), the lowest "
            "that of fc1 (1)."
        ),
    )
    assert built.missing == ("B",), "C is not run at this size"
    assert is_picture(built) and len(rows(built)) == 3 * 2 * 2
    assert rows(built)[2] == {
        "method": "A",
        "layer": "conv1",
        "round": "2",
        "client_index": "0",
        "T": "2.0",
    }


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
    assert (
        float(rows(built)[1]["c2_after"]) == pytest.approx(0.4)
        and rows(built)[1]["method"] == "FedNLR"
    )
    assert built.printed == [["", "x", "y"], ["Line", "0.5", ""]]


def test_activations_with_parts_missing_and_of_a_method_that_diverges(root: Path) -> None:
    assert made(root, "activations", ACTIVATIONS).missing == ("FedAvg", "FedNLR")
    run(root, "near", "a", 0, [0.7, 0.2], recorded=observed(FEDAVG))
    assert made(root, "activations", ACTIVATIONS) == Built((), {}, (), ("FedNLR",))
    diverged(root, "near-b-0")
    assert made(root, "activations", ACTIVATIONS).sentences == ("FedNLR diverges.",)
    (by_hand.folder(root) / DIVERGED).unlink()
    run(root, "near", "b", 1, [0.7, 0.2], recorded=observed(FEDNLR))
    assert made(root, "activations", ACTIVATIONS).missing == ("a seed of both",)


def test_activations_of_different_models_are_not_compared(root: Path) -> None:
    other = [[x + 0.001 for x in line] for line in BEFORE]
    run(root, "near", "a", 0, [0.7, 0.2], recorded=observed(FEDAVG))
    run(root, "near", "b", 0, [0.7, 0.3], recorded=observed(FEDNLR, other))
    clients(root, "near", 0, [[0, 0, 7], [7, 0, 0]])
    assert (
        made(root, "activations", ACTIVATIONS)
        .sentences[1]
        .endswith(
            ": the methods do not start from the same model, so that nothing can be compared."
        )
    )


def test_activations_want_clients_with_one_class(root: Path) -> None:
    run(root, "near", "a", 0, [0.7, 0.2], recorded=observed(FEDAVG))
    run(root, "near", "b", 0, [0.7, 0.3], recorded=observed(FEDNLR))
    clients(root, "near", 0, [[0, 0, 7], [3, 4, 0]])
    with pytest.raises(UserError, match="client 1 has 2 classes"):
        made(root, "activations", ACTIVATIONS)


# Example 1, by differences of the loss.
# --------------------------------------------------------------------------------------------------


CENTRES = np.array([[1, 1 / 3], [1 / 3, 1]])  # of classes 1 and 2, as example 1 has them
START = np.concatenate(
    [CENTRES.flatten(), (CENTRES @ CENTRES).flatten()]
)  # eq. 2 with A = 1, CENTRES is symmetric


def network(w: Values, x: Values) -> tuple[Values, Values]:
    """ReLU(W x) and softmax(V ReLU(W x)); `w` holds W, then V."""
    h = np.maximum(w[:4].reshape(2, 2) @ x, 0)
    score = np.exp(w[4:].reshape(2, 2) @ h)
    return h, np.asarray(score / score.sum())


def stepped(label: int, factors: Values | None = None) -> Values:
    """The weights after a step of 0.5 against central differences of -log p of `label` at its
    centre."""
    gradient, eps = np.zeros(8), 1e-5
    for i, unit in enumerate(np.eye(8)):
        up, down = (
            -math.log(network(START + s * eps * unit, CENTRES[label])[1][label]) for s in (1, -1)
        )
        gradient[i] = (up - down) / (2 * eps)
    return np.asarray(START - 0.5 * gradient * (1 if factors is None else factors))


def flat(weights: example.Weights) -> Values:
    return np.concatenate([weights.hidden.flatten(), weights.classes.flatten()])


def nlr_factors() -> Values:
    """Eqs. 14-17 on client 1: mu_l = 1 + 0.45 l / 2 + 0.3 log10 2.

    Of two neurons the more active one has 2 mu / (1 + mu), the other one 2 / (1 + mu). In both
    layers that is the first: hidden 10/9 against 2/3, scores 136/81 against 40/27.
    """
    found = []
    for l in (1, 2):  # noqa: E741, the paper's letter
        mu = 1 + 0.45 * l / 2 + 0.3 * math.log10(2)
        found += [2 * mu / (1 + mu)] * 2 + [2 / (1 + mu)] * 2  # a row of two weights per neuron
    return np.array(found)


def test_example_1_gives_eq_9() -> None:
    before, after = network(START, CENTRES[1]), network(stepped(0), CENTRES[1])
    assert [f"{x:.2f}" for x in (*before[0], *before[1])] == ["0.67", "1.11", "0.45", "0.55"]
    assert [f"{x:.2f}" for x in (*after[0], *after[1])] == ["0.73", "1.04", "0.63", "0.37"]


@pytest.mark.parametrize("client", [0, 1])
def test_example_1_s_steps_are_those_of_the_loss_s_differences(client: int) -> None:
    np.testing.assert_allclose(flat(example.trained(client)), stepped(client), atol=1e-9)


def test_example_1_s_step_with_fednlr_s_rates() -> None:
    np.testing.assert_allclose(
        flat(example.trained(0, nlr_rates=True)), stepped(0, nlr_factors()), atol=1e-9
    )


def test_figure_1_says_what_the_differences_say() -> None:
    built = build(of_targets("fednlr", ROOT)["nlr-fig1"], Measured("fednlr", "smoke", ROOT))
    start = network(START, CENTRES[1])[0][1]
    plain, own = (
        network(w, CENTRES[1])[0][1] - start for w in (stepped(0), stepped(0, nlr_factors()))
    )
    assert plain < own < 0, "both lower the bound neuron, FedNLR less"
    assert built.sentences == (
        "8 of 8 numbers are those that eq. 9 prints, to two decimals.",
        (
            f"The neuron that is bound to class 2 changes by {plain:+.4f} with FedAvg and by "
            f"{own:+.4f} with FedNLR."
        ),
    )
    assert [line[1][-6:] + line[2][-6:] for line in built.table[1:]] == [
        "(0.67)(0.73)",
        "(1.11)(1.04)",
        "(0.45)(0.63)",
        "(0.55)(0.37)",
    ]
    assert built.missing == ()
