"""Tuning: equal budgets, the validation split alone decides, and params.yaml says what was done."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedml_noniid.pipelines.experiment import cache, config, provenance, tuning
from fedml_noniid.pipelines.experiment.config import Config
from fedml_noniid.pipelines.experiment.results import table
from fedml_noniid.pipelines.experiment.tuning import Point, Trial
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import prepare
from fedml_noniid.pipelines.stages.tune import Choice, tune
from fedml_noniid.plugins.core.errors import UserError

# A warning of mlflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

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


def values(points: Sequence[Point]) -> list[tuple[object, object]]:
    """The learning rate and mu of each point."""
    return [(one.values["train"]["lr"], one.values.get("fedprox", {}).get("mu")) for one in points]


def test_the_points_of_whole_grids(tmp_path: Path) -> None:
    """Without trials every point; a method's values only where the recipe has that method."""
    found = tuning.points(settings(tmp_path, trials=None))
    assert values(found["fedavg"]) == [(0.001, None), (0.2, None)]
    assert values(found["pull"]) == [(lr, mu) for lr in (0.001, 0.2) for mu in (0, 0.1, 1)]
    assert [point.words for point in found["pull"]][1] == "lr 0.001, fedprox.mu 0.1"


@pytest.mark.parametrize("seed", [100, 101, 102])
def test_every_recipe_has_the_same_number_of_trials_and_no_value_is_left_out(
    tmp_path: Path, seed: int
) -> None:
    """Two of two points, and two of six: both learning rates, two of the mu.

    Six trials keep the points of two.
    """
    found = tuning.points(settings(tmp_path, seeds=[seed]))
    assert [len(points) for points in found.values()] == [2, 2]
    assert {lr for lr, _ in values(found["pull"])} == {0.001, 0.2} and len(
        {mu for _, mu in values(found["pull"])}
    ) == 2
    more = tuning.points(settings(tmp_path, seeds=[seed], trials=3, recipes=["pull"]))["pull"]
    assert set(values(found["pull"])) < set(values(more)) and {mu for _, mu in values(more)} == {
        0,
        0.1,
        1,
    }


def test_a_point_has_the_other_values_of_its_entry(of: Config, tmp_path: Path) -> None:
    found = tuning.points(of)
    laid = tuning.laid_out(of, [p for own in found.values() for p in own], "tune", "skewed", [100])
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
        point.entry for point in tuning.points(larger)["pull"]
    }


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"trials": 4},
            (
                "fedavg has 2 points (lr), 2 fewer than tune.trials = 4; add values, or lower "
                "tune.trials"
            ),
        ),
        (
            {"recipes": ["scaffold"], "grid": {"fedprox": {"mu": [1, 0.5]}}},
            "scaffold has 1 points (no key), 1 fewer than",
        ),
        (
            {"trials": None, "grid": {"train": {"lr": [0.1]}}},
            "tune.grid has one point for each recipe",
        ),
    ],
)
def test_unequal_budgets_are_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        tuning.points(settings(tmp_path, **changes))
    assert str(error.value).startswith("params.yaml: tune.grid") and told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "validation: 0.1",
            "validation: 0",
            "tune: data.validation = 0 leaves no samples to choose values on",
        ),
        (
            PARAMS[PARAMS.index("tune:") : PARAMS.index("deploy:")],
            "",
            "tune is missing: what to try; for example tune:",
        ),
    ],
)
def test_what_tuning_needs(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in PARAMS
    (tmp_path / config.FILE).write_text(PARAMS.replace(old, new))
    with pytest.raises(UserError, match=re.escape(f"params.yaml: {told}")):
        tuning.points(config.load(tmp_path))


def trials(of: Config, accuracies: Mapping[int, Sequence[float]]) -> list[Trial]:
    """The trials of recipe pull with these accuracies by seed; the others end with 0.1."""
    return [
        Trial(point, tuple(accuracies.get(place, (0.1,))))
        for place, point in enumerate(tuning.points(of)["pull"])
    ]


def test_the_best_mean_wins_the_first_of_the_grid_a_tie_and_a_diverged_trial_never(
    tmp_path: Path,
) -> None:
    of = settings(tmp_path, trials=None)
    found = trials(of, {1: (0.5, 0.7), 2: (), 3: (0.6, 0.6), 4: (0.9, 0.2)})
    order = tuning.ranked(found)
    assert order[:3] == [found[1], found[3], found[4]] and order[-1] == found[2]
    record = tuning.record(of, found, 144)
    wanted = {
        "chosen": {"train": {"lr": 0.001}, "fedprox": {"mu": 0.1}},
        "tried": GRID,
        "metric": "accuracy",
        "validation": 0.6,
        "runner_up": 0.6,
        "trials": 6,
        "diverged": 1,
        "samples": 144,
        "scenario": "skewed",
        "seeds": [100],
    }
    assert record.model_dump(include=set(wanted)) == wanted


def test_values_are_not_written_if_all_trials_diverge(of: Config) -> None:
    with pytest.raises(UserError, match="all 2 trials of pull diverged"):
        tuning.record(of, trials(of, {0: (), 1: ()}), 144)


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
    record = tuning.record(of, trials(of, {}), 144)
    content = config.read_yaml(tmp_path / config.FILE)
    for key, part in change.items():
        content[key] = content[key] | part if isinstance(part, dict) else part
    now = config.checked(content, config.FILE)
    assert (
        tuning.fingerprint(now, "pull", record.chosen, record.scenario) == record.settings
    ) is same


def test_the_chosen_values_are_written_beside_the_others_and_comments_stay(
    of: Config, tmp_path: Path
) -> None:
    own = "train: {weight_decay: 0.001}"
    aliased = PARAMS.replace(own, own.replace("{", "&own {")).replace(
        "  scaffold: {}", "  scaffold: {train: *own}"
    )
    (tmp_path / config.FILE).write_text(aliased)
    point = tuning.points(of)["fedavg"][1]
    found = {"pull": tuning.record(of, trials(of, {1: (0.5,)}), 144)}
    found["fedavg"] = tuning.record(
        of, [Trial(point, (0.7,)), Trial(tuning.points(of)["fedavg"][0], (0.6,))], 144
    )
    tuning.write(tmp_path, found)
    text = (tmp_path / config.FILE).read_text()
    for comment in re.findall(r"#.*", PARAMS):
        assert comment in text
    head, tail = PARAMS.partition("  fedavg:  ")[0], PARAMS[PARAMS.index("seeds: [0, 1]") :]
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
    tuning.write(tmp_path, found)
    assert (tmp_path / config.FILE).read_text() == text, "once more changes nothing"


def test_how_values_were_chosen_changes_the_report_only(of: Config) -> None:
    record = tuning.record(of, trials(of, {}), 144)
    entry = of.recipes["pull"].model_copy(update={"tuned": record})
    other = of.model_copy(update={"recipes": of.recipes | {"pull": entry}, "tune": None})
    before, after = provenance.plan(of), provenance.plan(other)
    assert [stage for stage in before if before[stage] != after[stage]] == ["report"]


def items(root: Path) -> dict[Path, int]:
    """The trained items of the store and the time when they were."""
    return {path: path.stat().st_mtime_ns for path in (root / cache.STORE).glob("*/run.json")}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Choice]]:
    """The small experiment, tuned."""
    root = tmp_path_factory.mktemp("tuned")
    (root / config.FILE).write_text(PARAMS)
    place = Workspace.of(root, {})
    prepare.run(place)
    return root, tune(place, config.load(root))


def test_validation_decides(tuned: tuple[Path, dict[str, Choice]]) -> None:
    """The trial with the highest validation accuracy in its own run.json is chosen and written
    down."""
    root, choices = tuned
    now = config.load(root)
    for recipe, choice in choices.items():
        final = {}
        for trial in choice.trials:
            run = json.loads(
                (root / f"tune/runs/skewed-{trial.point.entry}-100/run.json").read_text()
            )
            final[trial.point.entry] = run["final"]["validation_accuracy"]
            assert run["params"]["train.lr"] == trial.point.values["train"]["lr"]
            assert trial.mean == run["final"]["validation_accuracy"]
        best = max(final, key=lambda entry: final[entry])
        assert choice.trials[0].point.entry == best and choice.tuned.validation == round(
            final[best], 6
        )
        assert choice.tuned.samples == 144 and now.recipes[recipe].tuned == choice.tuned
        assert choice.tuned.chosen["train"] == {"lr": 0.2}, (
            "a hundredth of the other rate hardly learns in a round"
        )
        assert {
            (recipe, str(rank), trial.point.words, "100", f"{final[trial.point.entry]:.6g}")
            for rank, trial in enumerate(choice.trials, 1)
        } < {tuple(line.values()) for line in table(root / "tune/trials.csv")}
    assert now.recipes["scaffold"].tuned is None
    assert not (root / "runs").exists() and not (root / "report").exists()


def test_nothing_is_trained_twice(tuned: tuple[Path, dict[str, Choice]]) -> None:
    """Though params.yaml now has other values, and the folder of the trials is gone.

    More trials train the new ones.
    """
    root, choices = tuned
    before, text = items(root), (root / config.FILE).read_text()
    assert len(before) == 4
    shutil.rmtree(root / "tune")
    assert tune(Workspace.of(root, {}), config.load(root)) == choices
    assert items(root) == before and (root / config.FILE).read_text() == text
    (root / config.FILE).write_text(
        text.replace("trials: 2\n  seeds", "trials: 3\n  seeds").replace(
            "[0.001, 0.2]}, f", "[0.001, 0.05, 0.2]}, f"
        )
    )
    tune(Workspace.of(root, {}), config.load(root))
    assert before.items() <= items(root).items() and len(items(root)) <= 4 + 4
