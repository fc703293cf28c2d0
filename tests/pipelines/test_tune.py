"""Tuning: equal budgets, the validation split alone decides, and params.yaml says what was done."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment import cache, config, search
from fedml_noniid.pipelines.experiment.config import Config
from fedml_noniid.pipelines.experiment.search import Point, Request, Result, Trial
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import prepare
from fedml_noniid.pipelines.stages import tune as stage
from fedml_noniid.pipelines.stages.tune import tune

ROOT = Path(__file__).parents[2]
PARAMS = """\
# A comment at the top.
experiment: small
data: {name: digits, root: data/raw, validation: 0.1, public: 0, size: null}
scenario_names: [skewed]
scenarios:
  skewed: {partition: dirichlet, clients: 3, alpha: 0.5}   # strong skew
recipe_names: [fedavg, pull, scaffold]
recipes:             # what is compared
  fedavg:            # the empty one
  pull: {recipe: fedprox, fedprox: {mu: 0.5}, train: {weight_decay: 0.001}}  # another name
  scaffold: {}
seeds: [0, 1]
train:
  model: mlp
  model_options: {hidden: 8}
  rounds: 1
  epochs: 1
  batch_size: 50
  lr: 1e-1
  momentum: null
machine:
  checkpoint_every: 1   # every round
tune:
  trials: 2
  seeds: [100]
  recipes: [fedavg, pull]
  grid: {train: {lr: [0.001, 0.2]}, fedprox: {mu: [0, 0.1, 1]}}
deploy: {recipe: fedavg, scenario: skewed, seed: 0, silos: 2, rounds: 1}
"""
GRID = {"train": {"lr": [0.001, 0.2]}, "fedprox": {"mu": [0, 0.1, 1]}}


def settings(root: Path, text: str = PARAMS, **tune: object) -> Config:
    """The experiment in `root`, with other values in its section `tune`; None takes a key away."""
    (root / config.FILE).write_text(text)
    found = config.read_yaml(root / config.FILE)
    found["tune"] = {
        key: value for key, value in (found["tune"] | tune).items() if value is not None
    }
    return config.checked(found, config.FILE)


@pytest.fixture
def of(tmp_path: Path) -> Config:
    """The experiment as it stands."""
    return settings(tmp_path)


Tuning = tuple[dict[str, config.Tuned], list[str]]


def points(experiment: Config) -> Mapping[str, Sequence[Point]]:
    """What each recipe tries."""
    return search.tuning(experiment).points


def values(points: Sequence[Point]) -> list[tuple[object, object]]:
    """The learning rate and mu of each point."""
    return [(one.values["train"]["lr"], one.values.get("fedprox", {}).get("mu")) for one in points]


@pytest.mark.parametrize("seed", [100, 101, 102])
def test_every_recipe_has_the_same_number_of_trials_and_no_value_is_left_out(
    tmp_path: Path, seed: int
) -> None:
    """Two of two points, and two of six: both learning rates, two of the mu.

    Six trials keep the points of two.
    """
    found = points(settings(tmp_path, seeds=[seed]))
    assert [len(points) for points in found.values()] == [2, 2]
    assert {lr for lr, _ in values(found["pull"])} == {0.001, 0.2} and len(
        {mu for _, mu in values(found["pull"])}
    ) == 2
    more = points(settings(tmp_path, seeds=[seed], trials=3, recipes=["pull"]))["pull"]
    assert set(values(found["pull"])) < set(values(more)) and {mu for _, mu in values(more)} == {
        0,
        0.1,
        1,
    }


def test_a_point_has_the_other_values_of_its_entry(of: Config, tmp_path: Path) -> None:
    found = points(of)
    every = tuple(p for own in found.values() for p in own)
    laid = search.tuning(of).laid_out(Request("", every, (100,), 1))
    assert laid.seeds == [100] and laid.recipe_names == [
        point.entry for own in found.values() for point in own
    ]
    for point in found["pull"]:
        entry = laid.recipes[point.entry]
        assert laid.composition(point.entry) == "fedprox" and entry.settings == {
            "fedprox": point.values["fedprox"]
        }
        train = laid.train_of(point.entry)
        assert (train.lr, train.weight_decay, train.rounds) == (
            point.values["train"]["lr"],
            0.001,
            1,
        )
    # The name of a point goes by its values, so that a larger grid trains only what is new.
    larger = settings(tmp_path, trials=None, grid={**GRID, "train": {"lr": [0.05, 0.001, 0.2]}})
    assert {point.entry for point in found["pull"]} < {
        point.entry for point in points(larger)["pull"]
    }


TUNE = PARAMS[PARAMS.index("tune:") : PARAMS.index("deploy:")]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("trials: 2", "trials: 4", "tune.grid: fedavg has 2 points, 2 fewer than tune.trials = 4"),
        ("  trials: 2\n", "", ""),
        (TUNE, "tune: {seeds: [100], grid: {train: {lr: [1]}}}\n", "tune.grid: has one point for"),
        ("validation: 0.1", "validation: 0", "data.validation: 0 leaves no samples to choose on"),
        (TUNE, "", "tune is missing: what to try; for example tune:"),
    ],
)
def test_what_tuning_needs(tmp_path: Path, old: str, new: str, words: str) -> None:
    """Without trials every point; a method's values only where the recipe has that method."""
    (tmp_path / config.FILE).write_text(PARAMS.replace(old, new))
    if words:
        with pytest.raises(UserError, match=rf"^params\.yaml: {re.escape(words)}.*$"):
            points(config.load(tmp_path))
    else:
        grids = points(config.load(tmp_path))
        assert values(grids["fedavg"]) == [(0.001, None), (0.2, None)]
        assert values(grids["pull"]) == [(lr, mu) for lr in (0.001, 0.2) for mu in (0, 0.1, 1)]
        assert grids["pull"][1].description == "lr 0.001, fedprox.mu 0.1"


def outcome(of: Config, scores: Mapping[int, Sequence[tuple[float, float]]]) -> Result:
    """The result of a search with these losses and accuracies of the points of recipe pull by
    place, and (2.5, 0.1) of all others."""

    def trial(point: Point, by_seed: Sequence[tuple[float, float]]) -> Trial:
        return Trial.from_scores(Request("rung 1", (), (), 1), point, by_seed)

    every = points(of)
    default = [(2.5, 0.1)]
    own = [trial(p, scores.get(place, default)) for place, p in enumerate(every["pull"])]
    others = [trial(p, default) for name in every if name != "pull" for p in every[name]]
    return Result((*own, *others), (), 0)


def record(of: Config, scores: Mapping[int, Sequence[tuple[float, float]]]) -> config.Tuned:
    """The record of recipe pull."""
    return search.record(search.tuning(of), outcome(of, scores), "pull", 144)


def test_the_least_mean_loss_wins_then_the_accuracy_and_a_diverged_trial_never(
    tmp_path: Path,
) -> None:
    of = settings(tmp_path, trials=None)
    scores = {
        1: ((0.5, 0.7), (0.7, 0.7)),  # mean loss 0.6
        2: (),
        3: ((0.6, 0.8), (0.6, 0.8)),  # the same loss, more accurate
        4: ((0.9, 0.99), (0.9, 0.99)),  # the most accurate of all
    }
    result = outcome(of, scores)
    order = [trial.point for trial in result.ranked("pull")]
    every = points(of)["pull"]
    assert order[:3] == [every[3], every[1], every[4]] and order[-1] == every[2]
    wanted = {
        "chosen": {"train": {"lr": 0.2}, "fedprox": {"mu": 0}},
        "tried": GRID,
        "metric": "accuracy",
        "loss": 0.6,
        "validation": 0.8,
        "runner_up": 0.7,
        "trials": 6,
        "extended": 0,
        "diverged": 1,
        "samples": 144,
        "scenario": "skewed",
        "seeds": [100],
    }
    assert record(of, scores).model_dump(include=set(wanted)) == wanted


def pull(mu: float, **train: float) -> dict[str, Any]:
    """Another entry for recipe pull."""
    return {"recipes": {"pull": {"recipe": "fedprox", "fedprox": {"mu": mu}, "train": train}}}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (pull(mu=0.2, weight_decay=0.001), True),
        (pull(mu=0.5, weight_decay=0.001, lr=9), True),
        (pull(mu=0.5), False),
        ({"train": {"rounds": 2}}, False),
        ({"train": {"lr": 0.3, "threads": 2, "device": "cpu"}}, True),
        ({"data": {"public": 10}}, False),
        ({"scenarios": {"skewed": {"partition": "iid", "clients": 3}}}, False),
        ({"seeds": [0, 1, 2]}, True),
    ],
)
def test_the_hash_of_what_was_tuned_on(
    of: Config, tmp_path: Path, change: dict[str, dict[str, Any]], same: bool
) -> None:
    """All settings that choose values, but not the chosen values themselves, seeds, or how a
    machine computes."""
    tuned, content = record(of, {}), config.read_yaml(tmp_path / config.FILE)
    merged = {k: content[k] | new if isinstance(new, dict) else new for k, new in change.items()}
    now = config.checked(content | merged, config.FILE)
    assert (search.fingerprint(now, "pull", tuned.chosen, tuned.scenario) == tuned.settings) is same


def test_the_chosen_values_are_written_beside_the_others_and_comments_stay(
    of: Config, tmp_path: Path
) -> None:
    aliased = PARAMS.replace("train: {weight_decay: 0.001}", "train: *own")
    aliased = aliased.replace("  scaffold: {}", "  scaffold: {train: *own}")
    first = "  moon: {train: &own {weight_decay: 0.001}}\n"
    aliased = aliased.replace("  fedavg:  ", f"{first}  fedavg:  ")
    (tmp_path / config.FILE).write_text(aliased)
    plan, result = search.tuning(of), outcome(of, {1: [(0.5, 0.5)]})
    point = result.ranked("fedavg")[0].point
    found = {name: search.record(plan, result, name, 144) for name in ("pull", "fedavg")}
    stage.write(tmp_path, found)
    text = (tmp_path / config.FILE).read_text()
    for comment in re.findall(r"#.*", PARAMS):
        assert comment in text
    head, tail = aliased.partition("  fedavg:  ")[0], PARAMS[PARAMS.index("seeds: [0, 1]") :]
    assert text.startswith(head) and text.endswith(tail), "nothing else changes"
    now = config.load(tmp_path)
    assert (
        now.recipes["fedavg"].values == point.values
        and now.recipes["fedavg"].tuned == found["fedavg"]
    )
    assert now.recipes["pull"].values == {
        "train": found["pull"].chosen["train"] | {"weight_decay": 0.001},
        "fedprox": found["pull"].chosen["fedprox"],
    }
    assert now.recipes["pull"].recipe == "fedprox"
    assert now.recipes["scaffold"].values == {"train": {"weight_decay": 0.001}}, "it was an alias"
    records = (tmp_path / config.RECORDS).read_text()
    stage.write(tmp_path, {"pull": found["pull"]})
    assert (tmp_path / config.FILE).read_text() == text, "once more changes nothing"
    assert (tmp_path / config.RECORDS).read_text() == records, "also of another recipe"


def test_a_record_in_params_yaml_and_a_wrong_one_are_refused(of: Config, tmp_path: Path) -> None:
    (tmp_path / config.FILE).write_text(PARAMS)
    (tmp_path / config.RECORDS).write_text("pull: {trials: many}\nanother: {}\n")
    with pytest.raises(UserError, match=r"tuned\.yaml: pull\.trials = 'many'"):
        config.load(tmp_path)
    (tmp_path / config.RECORDS).unlink()
    tuned = record(of, {}).model_dump_json()
    (tmp_path / config.FILE).write_text(
        PARAMS.replace("scaffold: {", f"scaffold: {{tuned: {tuned}, ")
    )
    with pytest.raises(UserError, match=r"recipes\.scaffold\.tuned is refused; allowed: such rec"):
        config.load(tmp_path)


def items(root: Path) -> dict[Path, int]:
    """The trained items of the store and the time when they were."""
    return {path: path.stat().st_mtime_ns for path in (root / cache.STORE).glob("*/run.json")}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tuning]:
    """The small experiment, tuned."""
    root = tmp_path_factory.mktemp("tuned")
    (root / config.FILE).write_text(PARAMS)
    place = Workspace.from_environment(root, {})
    prepare.run(place)
    return root, tune(place, config.load(root))


def test_validation_loss_decides(tuned: tuple[Path, Tuning]) -> None:
    """The trial with the least validation loss in its own run.json is chosen and written down. The
    grid was extended where it was at an edge."""
    root, (records, notes) = tuned
    runs = [json.loads(path.read_text()) for path in items(root)]
    for name, record in records.items():
        method = "fedprox" if name == "pull" else name
        own = [run for run in runs if run["composition"] == method]
        best = min(own, key=lambda run: run["final"]["validation_loss"])
        assert record.chosen["train"]["lr"] == best["params"]["train.lr"]
        assert record.chosen.get("fedprox", {}).get("mu") == best["params"].get("fedprox.mu")
        assert record.loss == round(best["final"]["validation_loss"], 6)
        assert record.validation == round(best["final"]["validation_accuracy"], 6)
        assert record.extended > 0 and record.trials == len(own) == 2 + record.extended
        assert any(f"{name}: the best was at an edge of the grid" in note for note in notes)
    loaded = config.load(root).recipes
    assert {name: entry.tuned for name, entry in loaded.items()} == {**records, "scaffold": None}
    assert not (root / "runs").exists() and not (root / "report").exists()


def test_nothing_is_trained_twice(tuned: tuple[Path, Tuning]) -> None:
    """Though params.yaml now has other values, and the folder of the trials is gone.

    More trials train the new ones.
    """
    root, (records, notes) = tuned
    before, text = items(root), (root / config.FILE).read_text()
    assert len(before) == sum(record.trials for record in records.values())
    shutil.rmtree(root / "tune")
    assert tune(Workspace.from_environment(root, {}), config.load(root)) == (records, notes)
    assert items(root) == before and (root / config.FILE).read_text() == text
    (root / config.FILE).write_text(
        text.replace("trials: 2\n  seeds", "trials: 3\n  seeds").replace(
            "[0.001, 0.2]}, f", "[0.001, 0.05, 0.2]}, f"
        )
    )
    tune(Workspace.from_environment(root, {}), config.load(root))
    assert before.items() <= items(root).items()
