"""Choosing: who goes on, what the final says, how often it errs, and that nothing runs twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats

import fedml_noniid as nd
from fedml_noniid.pipelines.experiment import cache, config
from fedml_noniid.pipelines.experiment.config import Config
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import prepare
from fedml_noniid.pipelines.tools import choose as stage
from fedml_noniid.pipelines.tools import racing
from fedml_noniid.pipelines.tools.racing import TEST, VALIDATION, Accuracies, Decision, Heat
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.engines.simulation import drive

# A warning of mlflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

CHOOSE: dict[str, Any] = {"seeds": [100, 101, 102], "fresh": [200, 201, 202]}
CONTENT: dict[str, Any] = {
    "experiment": "small",
    "data": {"name": "digits", "root": "data/raw", "validation": 0.1, "public": 0},
    "scenario_names": ["skewed"],
    "scenarios": {"skewed": {"partition": "dirichlet", "clients": 3, "alpha": 0.5}},
    "recipe_names": ["scaffold", "pull", "plain"],
    "recipes": {
        "scaffold": {},
        "pull": {"recipe": "fedprox", "fedprox": {"mu": 0.5}},
        "plain": {"recipe": "fedavg", "train": {"weight_decay": 0.001}},
    },
    "seeds": [0, 1],
    "train": {
        "model": "mlp",
        "model_options": {"hidden": 8},
        "rounds": 10,
        "epochs": 1,
        "batch_size": 50,
        "lr": 0.1,
    },
    "choose": CHOOSE,
}


def settings(**changes: Any) -> Config:
    """The experiment with other values of its sections."""
    content = {
        key: {**value, **changes[key]} if isinstance(changes.get(key), Mapping) else value
        for key, value in CONTENT.items()
    }
    lists = {key: value for key, value in changes.items() if not isinstance(value, Mapping)}
    return config.checked(content | lists, config.FILE)


def raced(
    of: Config, accuracy: Callable[[Heat, str, int], float | None]
) -> tuple[Decision, list[Heat]]:
    """The race, and its heats, where `accuracy` of (heat, "recipe lr", seed) is given."""
    heats = []

    def answer(heat: Heat) -> Accuracies:
        heats.append(heat)
        found = {}
        for point in heat.points:
            key = f"{point.recipe} {point.values['train']['lr']}"
            reached = [accuracy(heat, key, seed) for seed in heat.seeds]
            whole = [value for value in reached if value is not None]
            found[point.entry] = whole if len(whole) == len(reached) else []
        return found

    return drive(racing.race(of, 1000), answer), heats


def test_heats_grow_and_the_worst_drop_out_but_never_fedavg() -> None:
    """Nine candidates, five, four: the best third and the best of each; rounds double, a seed is
    added."""
    level = {"scaffold": 0.9, "pull": 0.8, "plain": 0.5}
    decision, heats = raced(
        settings(), lambda heat, key, seed: level[key.split()[0]] + 0.01 * ("0.1" in key.split())
    )
    assert [(heat.rounds, heat.seeds, heat.split) for heat in heats] == [
        (3, (100,), VALIDATION),
        (5, (100, 101), VALIDATION),
        (10, (100, 101, 102), VALIDATION),
        (10, (200, 201, 202), TEST),
    ]
    names = [[f"{p.recipe} {p.words}" for p in heat.points] for heat in heats]
    assert sorted(names[0]) == sorted(
        f"{name} lr {lr}" for name in level for lr in (0.033, 0.1, 0.3)
    )
    assert names[1] == [
        "scaffold lr 0.1",
        "scaffold lr 0.033",
        "scaffold lr 0.3",
        "pull lr 0.1",
        "plain lr 0.1",
    ]
    assert names[2] == ["scaffold lr 0.1", "scaffold lr 0.033", "pull lr 0.1", "plain lr 0.1"]
    assert names[3] == ["plain lr 0.1", "scaffold lr 0.1", "pull lr 0.1"]
    assert decision.rounds == 9 * 3 + 5 * 2 * 5 + 4 * 3 * 10 + 3 * 3 * 10
    assert decision.exhaustive == 9 * 3 * 10 + 3 * 3 * 10
    frame = racing.frame_of_heats(decision)
    assert frame.groupby("heat", sort=False)["goes_on"].sum().tolist() == [5, 4, 3]


def test_the_intervals_of_the_final_are_those_of_paired_t_tests_for_all_together() -> None:
    tests = {
        "plain": {200: 0.50, 201: 0.60, 202: 0.55},
        "pull": {200: 0.61, 201: 0.70, 202: 0.67},
        "scaffold": {200: 0.52, 201: 0.58, 202: 0.60},
    }
    level = {"plain": 0.5, "pull": 0.6, "scaffold": 0.7}

    def accuracy(heat: Heat, key: str, seed: int) -> float:
        name = key.split()[0]
        return tests[name][seed] if heat.split == TEST else level[name]

    decision, _ = raced(settings(choose={"eta": 2}), accuracy)
    assert [final.point.recipe for final in decision.finals] == ["scaffold", "pull"]
    base = np.array([*tests["plain"].values()])
    for final in decision.finals:
        gaps = np.array([*tests[final.point.recipe].values()]) - base
        wanted = scipy.stats.t.interval(0.975, 2, gaps.mean(), scipy.stats.sem(gaps))
        assert (final.low, final.high) == pytest.approx(wanted, abs=1e-12)
    pull = decision.finals[1]
    assert pull.low > 0 > decision.finals[0].low
    assert decision.taken == pull.point
    assert decision.sentence.startswith(
        f"Take pull (lr 0.033): {100 * pull.low:.2f} to {100 * pull.high:.2f} points over plain"
    )


@pytest.mark.parametrize(("gain", "least", "most"), [(0.0, 0, 0.06), (0.07, 0.9, 1)])
def test_how_often_it_leaves_fedavg(gain: float, least: float, most: float) -> None:
    """Many races with noise: without any gain it leaves FedAvg in at most about 5 %, though it
    takes the best of several; a gain of two deviations of a difference is found."""
    of = settings(choose={"fresh": [*range(200, 208)]})
    generator, left, races = np.random.default_rng(0), 0, 300
    for _ in range(races):

        def accuracy(heat: Heat, key: str, seed: int) -> float:
            return 0.7 + gain * key.startswith("scaffold") + 0.025 * generator.standard_normal()

        decision, _ = raced(of, accuracy)
        left += decision.taken != decision.base.point
    slack = 2 * math.sqrt(0.05 * 0.95 / races)
    assert least <= left / races <= most + slack * (gain == 0)


def test_what_diverges_drops_out_and_is_named() -> None:
    def accuracy(heat: Heat, key: str, seed: int) -> float | None:
        if key == "plain 0.3" or (key.startswith("pull") and heat.split == TEST and seed == 201):
            return None
        return {"pull": 0.9, "scaffold": 0.8, "plain": 0.5}[key.split()[0]]

    decision, heats = raced(settings(choose={"eta": 2}), accuracy)
    assert "plain lr 0.3" not in [f"{p.recipe} {p.words}" for p in heats[1].points]
    assert [point.recipe for point in decision.diverged] == ["pull"]
    assert "pull (lr 0.033) diverged on fresh seeds." in decision.text
    assert decision.taken.recipe == "scaffold" and len(decision.finals) == 1
    with pytest.raises(UserError, match="FedAvg diverged at all of its values"):
        raced(settings(), lambda heat, key, seed: None if key.startswith("plain") else 0.5)


def test_equal_accuracies_show_no_more_than_the_test_set_can() -> None:
    """Three seeds of 1,000 test samples: a sample on one seed is the least deviation."""
    decision, _ = raced(settings(), lambda heat, key, seed: 0.5)
    assert decision.taken == decision.base.point
    half = scipy.stats.t.ppf(1 - 0.025 / 2, 2) * 0.001 / 3
    assert decision.finals[0].high == pytest.approx(half) and decision.finals[0].difference == 0
    assert f"no other is more than {100 * half:.2f} points better" in decision.sentence


def test_a_drift_keeps_its_rounds() -> None:
    drift = {"at": 8, "swap": [[1, 2]]}
    of = settings(scenarios={"skewed": CONTENT["scenarios"]["skewed"] | {"drift": drift}})
    _, heats = raced(of, lambda heat, key, seed: 0.5)
    assert {heat.rounds for heat in heats} == {10}


def test_fedavg_takes_part_though_it_is_not_named() -> None:
    of = settings(recipe_names=["scaffold"], choose=CHOOSE | {"recipes": ["scaffold"]})
    assert [point.recipe for point in racing.tried(of)] == ["plain"] * 3 + ["scaffold"] * 3
    entries = {"scaffold": {}}
    alone = settings(recipe_names=["scaffold"])
    alone = alone.model_copy(update={"recipes": {"scaffold": alone.recipes["scaffold"]}})
    assert [p.recipe for p in racing.tried(alone)] == ["fedavg"] * 3 + [*entries] * 3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data": {"validation": 0}}, "data.validation: 0 leaves no samples to choose on"),
        (
            {"recipes": {"scaffold": {"recipe": "fedbn"}}},
            "recipes.scaffold: scaffold can't be chosen: each client has",
        ),
        (
            {"recipes": {"scaffold": {"recipe": "centralised"}}},
            "scaffold can't be chosen: it is not federated",
        ),
        (
            {"recipe_names": ["plain"], "choose": {"grid": {"train": {"lr": [0.1]}}}},
            "there is one candidate",
        ),
        ({"choose": {"seeds": [0]}}, "choose.seeds: 0 is refused, as `seeds` has it too"),
        ({"choose": {"fresh": [100, 3]}}, "choose.fresh: 100 is named twice"),
        ({"choose": {"fresh": [3]}}, "choose.fresh = [3] is refused; allowed: two seeds or more"),
        ({"choose": {"grid": {"train": {"lr": ["x"]}}}}, "choose.grid.train.lr"),
        ({"choose": {"recipes": ["scafold"]}}, "did you mean 'scaffold'"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        racing.tried(settings(**changes))
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decision]:
    """A small race that was interrupted in its second heat, and went on."""
    root = tmp_path_factory.mktemp("chosen")
    nd_yaml(root, CONTENT)
    place = Workspace.of(root, {})
    prepare.run(place)
    calls = []

    def interrupted(*args: Any) -> dict[str, tuple[float, ...]]:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    real = stage.measured
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "measured", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stage.choose(place, config.load(root))
    before = items(root)
    assert len(before) == 9 and not (root / "choose/final.csv").exists()
    decision = stage.choose(place, config.load(root))
    assert {path: items(root)[path] for path in before} == before, (
        "the first heat did not run again"
    )
    return root, decision


def nd_yaml(root: Path, content: Mapping[str, Any]) -> None:
    """Writes params.yaml."""
    import yaml

    (root / config.FILE).write_text(yaml.safe_dump(dict(content)))


def items(root: Path) -> dict[Path, int]:
    """The trained items of the store and the time when they were."""
    return {path: path.stat().st_mtime_ns for path in (root / cache.STORE).glob("*/run.json")}


def test_nothing_is_trained_twice(chosen: tuple[Path, Decision]) -> None:
    root, decision = chosen
    before, table = items(root), (root / "choose/heats.csv").read_bytes()
    assert (
        len(before)
        == sum(len(heat) for heat in heats_of(decision))
        + len([decision.base, *decision.finals]) * 3
    )
    again = stage.choose(Workspace.of(root, {}), config.load(root))
    assert items(root) == before and again == decision
    assert (root / "choose/heats.csv").read_bytes() == table
    assert (root / config.FILE).exists() and not (root / "runs").exists()


def heats_of(decision: Decision) -> Sequence[list[str]]:
    """Of each heat, a name for each of its runs."""
    runs: dict[str, list[str]] = {}
    for ran in decision.heats:
        runs.setdefault(ran.heat, []).extend([ran.point.entry] * ran.seeds)
    return [*runs.values()]


def test_python_chooses_the_same(chosen: tuple[Path, Decision]) -> None:
    _, decision = chosen
    train = {**CONTENT["train"]}
    choice = nd.choose(
        nd.load("digits"),
        {name: CONTENT["recipes"][name] for name in CONTENT["recipe_names"]},
        race=CHOOSE,
        progress=False,
        partition="dirichlet",
        clients=3,
        alpha=0.5,
        **train,
    )
    assert repr(choice) == decision.text
    pd.testing.assert_frame_equal(choice.heats, racing.frame_of_heats(decision))
    pd.testing.assert_frame_equal(choice.final, racing.frame_of_final(decision))
    assert choice.recipe == decision.taken.recipe and choice.sentence in repr(choice)
    with pytest.raises(UserError, match="'eat' is unknown"):
        nd.choose(nd.load("digits"), race={"eat": 2}, partition="dirichlet", clients=3, alpha=0.5)


def test_numbers_are_chosen_by_r2() -> None:
    """A loss without classes has another main metric, higher where a model is better."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((240, 4)).astype("float32")
    y = x @ np.array([1.0, -2.0, 0.5, 0.0], dtype="float32")
    choice = nd.choose(
        nd.from_arrays(x[:200], y[:200], x[200:], y[200:]),
        ["scaffold"],
        race={"seeds": [10], "fresh": [20, 21], "grid": {"train": {"lr": [0.001, 0.05]}}},
        progress=False,
        partition="iid",
        clients=4,
        rounds=5,
        loss="mse",
        model="logistic_regression",
    )
    assert choice.values == {"train": {"lr": 0.05}}
    assert choice.final["test_r2"].min() > 0.9 and "R²" in repr(choice)
