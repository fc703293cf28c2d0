"""Choosing: who goes on, what the final says, how often it errs, and that nothing runs twice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import yaml
from hypothesis import given
from hypothesis import settings as of_hypothesis
from hypothesis import strategies as st
from safetensors.torch import load

import fedml_noniid as nd
from fedml_noniid.core.errors import UserError
from fedml_noniid.engines.simulation import drive
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.config import Config
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.owner_scores import scores_of_owners
from fedml_noniid.pipelines.experiment.search import Answers, Request, Result, Search, choosing
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.reporting.decision import Decision, decide
from fedml_noniid.pipelines.stages import prepare
from fedml_noniid.pipelines.verbs import choose as stage

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
# (request, recipe, lr, seed) -> (loss, accuracy) on both splits; None: it diverged
Score = Callable[[Request, str, float, int], "tuple[float, float] | None"]
GRID = (0.033, 0.1, 0.3)


def settings(**changes: Any) -> Config:
    """The experiment with other values of its sections."""
    content = {
        key: {**value, **changes[key]} if isinstance(changes.get(key), Mapping) else value
        for key, value in CONTENT.items()
    }
    lists = {key: value for key, value in changes.items() if not isinstance(value, Mapping)}
    return config.checked(content | lists, config.FILE)


def decided(experiment: Config, score: Score) -> tuple[Decision, list[Request]]:
    """The decision and all that was requested, where `score` stands in place of training."""
    requests = []

    def answer(request: Request) -> Answers:
        requests.append(request)
        answers = {}
        for point in request.points:
            lr = point.values["train"]["lr"]
            scores = [score(request, point.recipe, lr, seed) for seed in request.seeds]
            finals = [
                {f"{split}_loss": one[0], f"{split}_accuracy": one[1]}
                for one in scores
                if one is not None
                for split in ("test" if request.name == "final" else "validation",)
            ]
            answers[point.entry] = finals if len(finals) == len(scores) else []
        return answers

    return drive(decide(choosing(experiment), 144, 1000), answer), requests


def best_at(best: float, recipe: str = "", bonus: float = 0.0) -> Score:
    """A loss that is least at one step size, for all recipes and seeds; one recipe is better."""

    def score(request: Request, name: str, lr: float, seed: int) -> tuple[float, float]:
        loss = 1 + abs(math.log(lr / best)) - bonus * (name == recipe)
        return loss, 0.9 + bonus * (name == recipe)

    return score


def named(request: Request) -> set[str]:
    """`pull 0.1` for each point."""
    return {f"{point.recipe} {point.values['train']['lr']}" for point in request.points}


def test_all_recipes_advance_equally_many_values_and_nothing_is_trained_twice() -> None:
    """The best of nine candidates is in the middle: two of each recipe go on, and each rung asks
    only for seeds that it lacks. The final has fresh seeds."""
    decision, requests = decided(settings(), best_at(0.11))
    assert [(one.name, one.seeds, one.rounds) for one in requests] == [
        ("rung 1", (100, 101), 10),
        ("rung 2", (102,), 10),
        ("final", (200, 201, 202), 10),
    ]
    recipes = ("scaffold", "pull", "plain")
    assert named(requests[0]) == {f"{name} {lr}" for name in recipes for lr in GRID}
    assert named(requests[1]) == {f"{name} {lr}" for name in recipes for lr in (0.1, 0.3)}
    assert named(requests[2]) == {f"{name} 0.1" for name in recipes}
    assert decision.rounds == 9 * 2 * 10 + 6 * 10 + 3 * 3 * 10
    assert decision.exhaustive == 9 * 3 * 10 + 3 * 3 * 10
    frame = pd.DataFrame(decision.result.table("accuracy"))
    assert frame.groupby("rung", sort=False)["goes_on"].sum().tolist() == [6, 3]


def test_all_ties_keep_all_and_extend_nothing() -> None:
    """The accuracies tie in README's example. A tie in accuracy is no tie in loss."""
    decision, requests = decided(settings(), lambda *_: (0.5, 43 / 46))
    assert all(len(request.points) == 9 for request in requests[:-1])
    assert not decision.result.extended and decision.taken == decision.base.trial.point
    decision, _ = decided(settings(), lambda r, name, lr, seed: (1 + (lr - 0.1) ** 2, 43 / 46))
    for name in ("plain", "pull", "scaffold"):
        assert decision.result.ranked(name)[0].point.values == {"train": {"lr": 0.1}}
    one_of = "46 validation samples: one of them is 2.17 points of accuracy."
    assert one_of in decision._replace(samples=46).text
    assert "validation samples: one" not in decision._replace(samples=100).text


def test_a_value_drops_out_if_it_is_worse_by_more_than_a_standard_error() -> None:
    """Gaps to the best of (0.1, 0.5): mean 0.3, standard error 0.2, so worse. Of (-0.1, 0.5): mean
    0.2, standard error 0.3, so it goes on, and as many of the other recipes."""
    gaps = {("pull", 0.033): (0.1, 0.5), ("plain", 0.033): (-0.1, 0.5)}

    def score(request: Request, name: str, lr: float, seed: int) -> tuple[float, float]:
        pair = gaps.get((name, lr), (0.9, 0.9) if lr == 0.033 else (0.0, 0.0))
        return 1 + pair[seed % 2] + 0.01 * (lr == 0.3), 0.5

    alone = settings(recipe_names=["pull", "plain"], choose={"recipes": ["plain"]})
    assert named(decided(alone, score)[1][1]) == {f"plain {lr}" for lr in GRID}
    gaps["plain", 0.033] = (0.1, 0.5)
    assert named(decided(alone, score)[1][1]) == {"plain 0.1", "plain 0.3"}
    gaps["plain", 0.033] = (-0.1, 0.5)
    assert len(decided(settings(), score)[1][1].points) == 9


def test_one_seed_has_no_standard_error_and_trains_all_in_full() -> None:
    _, requests = decided(settings(choose={"seeds": [100]}), best_at(0.1))
    assert [(one.name, len(one.points), one.rounds) for one in requests] == [
        ("rung 1", 9, 10),
        ("final", 3, 10),
    ]


@pytest.mark.parametrize(
    ("best", "added"),
    [
        (0.1, []),
        (0.02, [0.0109]),
        (0.005, [0.0109, 0.0036]),
        (0.8, [0.9, 2.7]),
        (50, [0.9, 2.7]),
    ],
)
def test_a_best_value_at_an_edge_extends_the_grid_at_most_twice(
    best: float, added: list[float]
) -> None:
    """By the ratio of the last two values. The text says it, and what is still at an edge."""
    decision, _ = decided(settings(), best_at(best))
    for name in ("plain", "pull", "scaffold"):
        new = [p.values["train"]["lr"] for p in decision.result.extended if p.recipe == name]
        assert new == added
        line = f"{name}: the best was at an edge of the grid; tried beyond it:"
        assert (line in decision.text) == bool(added)
        still = f"{name}: lr 2.7 is the largest that was tried"
        assert (still in decision.text) == (best == 50)


def searched(loss: Callable[[float, float], float], **choose: Any) -> Result:
    """The result of a search where `loss` of the number of `train` and of mu stands in place of
    training."""

    def answer(request: Request) -> Answers:
        answers = {}
        for point in request.points:
            (number,) = point.values["train"].values()
            mu = point.values.get("fedprox", {}).get("mu", 1.0)
            final = {"validation_loss": loss(number, mu), "validation_accuracy": 0.5}
            answers[point.entry] = [final] * len(request.seeds)
        return answers

    return drive(choosing(settings(choose=choose)).run(), answer)


def test_a_recipe_with_more_numbers_gets_no_more_points() -> None:
    """Both numbers of `pull` and the one of the others are best at an edge: two points each."""
    grid = {"train": {"lr": [0.1, 0.3]}, "fedprox": {"mu": [0.1, 1.0]}}
    result = searched(lambda lr, mu: 1 / lr + 1 / mu, grid=grid)
    assert {(point.recipe, point.description) for point in result.extended} == {
        *((name, f"lr {lr}") for name in ("plain", "scaffold") for lr in (0.9, 2.7)),
        ("pull", "lr 0.9, fedprox.mu 1.0"),
        ("pull", "lr 0.3, fedprox.mu 10.0"),
    }


def test_only_values_that_a_recipe_takes_extend_its_grid() -> None:
    """mu is at least 0 and momentum below 1: the next numbers beyond would be -0.1 and 1.8."""
    grid = {"train": {"momentum": [0.0, 0.9]}, "fedprox": {"mu": [0.0, 0.1, 1.0]}}
    result = searched(lambda momentum, mu: 1 - momentum + mu, grid=grid, recipes=["pull"])
    assert not result.extended
    assert result.ranked("pull")[0].point.description == "momentum 0.9, fedprox.mu 0.0"
    assert result.notes(["pull"], "accuracy", 144) == [
        "pull: momentum 0.9 is the largest that was tried; a wider `grid` may find better ones.",
        "pull: fedprox.mu 0.0 is the smallest that was tried; a wider `grid` may find better ones.",
    ]


@of_hypothesis(max_examples=40, deadline=None)
@given(
    names=st.permutations(CONTENT["recipe_names"]),
    grid=st.permutations(GRID),
    seed=st.integers(0, 1000),
    levels=st.integers(1, 40),
)
def test_the_order_of_recipes_and_values_changes_no_answer(
    names: Sequence[str], grid: Sequence[float], seed: int, levels: int
) -> None:
    """Losses and accuracies have few levels, so that they tie often."""

    def score(request: Request, name: str, lr: float, of_seed: int) -> tuple[float, float]:
        draw = np.random.default_rng([seed, of_seed, int(1e6 * lr), *name.encode()])
        loss, accuracy = draw.integers(1, levels + 1, 2) / levels
        return float(loss), float(accuracy)

    first, requests = decided(settings(choose={"grid": {"train": {"lr": [*GRID]}}}), score)
    changed = settings(recipe_names=names, choose={"grid": {"train": {"lr": [*grid]}}})
    again, others = decided(changed, score)
    assert again.text == first.text and again.taken == first.taken
    assert [named(one) for one in others] == [named(one) for one in requests]
    first_of = next(one for one in requests if one.name == "rung 2")
    advanced = Counter(point.recipe for point in first_of.points)
    tried = Counter(one.point.recipe for one in first.result.trials if one.rung == "rung 1")
    most = max(advanced.values())
    assert most >= 2 and advanced == {name: min(most, tried[name]) for name in names}


def test_the_intervals_of_the_final_are_those_of_paired_t_tests_for_all_together() -> None:
    tests = {
        "plain": {200: 0.50, 201: 0.60, 202: 0.55},
        "pull": {200: 0.61, 201: 0.70, 202: 0.67},
        "scaffold": {200: 0.52, 201: 0.58, 202: 0.60},
    }
    level = {"plain": 0.5, "pull": 0.4, "scaffold": 0.3}

    def score(request: Request, name: str, lr: float, seed: int) -> tuple[float, float]:
        tested = tests[name][seed] if request.name == "final" else 0.5
        return level[name] + abs(lr - 0.1), tested

    decision, _ = decided(settings(), score)
    assert [one.trial.point.recipe for one in decision.finalists] == ["scaffold", "pull"]
    base = np.array([*tests["plain"].values()])
    for one in decision.finalists:
        gaps = np.array([*tests[one.trial.point.recipe].values()]) - base
        wanted = scipy.stats.t.interval(0.975, 2, gaps.mean(), scipy.stats.sem(gaps))
        assert (one.low, one.high) == pytest.approx(wanted, abs=1e-12)
    pull = decision.finalists[1]
    assert pull.low > 0 > decision.finalists[0].low
    assert decision.taken == pull.trial.point
    assert decision.sentence.startswith(
        f"Take pull (lr 0.1): {100 * pull.low:.2f} to {100 * pull.high:.2f} points over plain"
    )


def test_what_diverges_drops_out_and_is_named() -> None:
    def score(request: Request, name: str, lr: float, seed: int) -> tuple[float, float] | None:
        if name == "plain" and lr == 0.3:
            return None
        if name == "pull" and request.name == "final" and seed == 201:
            return None
        return {"pull": 0.1, "scaffold": 0.2, "plain": 0.5}[name] + abs(lr - 0.1), 0.5

    decision, requests = decided(settings(), score)
    assert "plain 0.3" not in named(requests[1])
    assert [point.recipe for point in decision.diverged] == ["pull"]
    assert "pull (lr 0.1) diverged on fresh seeds." in decision.text
    assert [one.trial.point.recipe for one in decision.finalists] == ["scaffold"]
    lost = decided(settings(), lambda r, name, *_: None if name == "pull" else (0.5, 0.5))[0]
    assert "Not compared: pull (diverged)." in lost.text
    with pytest.raises(UserError, match="choose: no value of plain is left, as all"):
        decided(settings(), lambda r, name, *_: None if name == "plain" else (0.5, 0.5))
    with pytest.raises(UserError, match=r"choose: plain \(lr 0.1\) diverged on fresh seeds"):
        decided(
            settings(),
            lambda r, name, lr, seed: None if seed == 202 else (abs(lr - 0.1), 0.5),
        )


def test_equal_accuracies_show_no_more_than_the_test_set_can() -> None:
    """Three seeds of 1,000 test samples: a sample on one seed is the least deviation."""
    decision, _ = decided(settings(), lambda *_: (0.5, 0.5))
    assert decision.taken == decision.base.trial.point
    half = scipy.stats.t.ppf(1 - 0.025 / 2, 2) * 0.001 / 3
    first = decision.finalists[0]
    assert first.high == pytest.approx(half) and first.difference == 0
    assert f"is more than {100 * half:.2f} points better" in decision.sentence


def test_fedavg_takes_part_though_it_is_not_named() -> None:
    def recipes(search: Search) -> dict[str, int]:
        return {name: len(points) for name, points in search.points.items()}

    experiment = settings(recipe_names=["scaffold"], choose=CHOOSE | {"recipes": ["scaffold"]})
    assert recipes(choosing(experiment)) == {"scaffold": 3, "plain": 3}
    alone = settings(recipe_names=["scaffold"])
    alone = alone.model_copy(update={"recipes": {"scaffold": alone.recipes["scaffold"]}})
    assert recipes(choosing(alone)) == {"scaffold": 3, "fedavg": 3}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data": {"validation": 0}}, "data.validation: 0 leaves no samples to choose on"),
        (
            {"recipes": {"scaffold": {"recipe": "fedbn"}}},
            "scaffold can't be chosen: each client has a model of its own, and with partition "
            "'dirichlet' the validation samples are no client's",
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
        choosing(settings(**changes))
    assert told in str(error.value) and "\n" not in str(error.value)


SITES = ["north", "south", "west"]
OF_SITES: dict[str, Any] = {"rounds": 4, "epochs": 2, "lr": 0.3, "model": "mlp"}
SEARCH = {"seeds": [10, 11], "fresh": [20, 21], "grid": {"train": {"lr": [0.3]}}}


def table_of_sites() -> pd.DataFrame:
    """The labels of the last site say the opposite of its values."""
    value, site = np.random.default_rng(0).normal(size=300).round(3), np.arange(300) % 3
    ill = np.where((value > 0) != (site == 2), "yes", "no")
    return pd.DataFrame({"value": value, "site": np.array(SITES)[site], "ill": ill})


@pytest.fixture(scope="module")
def of_sites() -> nd.Data:
    return nd.from_frame(table_of_sites(), label="ill", owner="site")


@pytest.mark.parametrize(("recipe", "clients"), [("fedavg", 3), ("finetune", 2)])
def test_each_client_is_judged_on_the_samples_of_its_owner(
    of_sites: nd.Data, recipe: str, clients: int
) -> None:
    """By the predictions of each client's model, row by row; two of three owners are clients."""
    split = nd.partition(of_sites, "natural", clients=clients, validation=0.2, seed=3)
    result = nd.run(recipe, split, seeds=[3], progress=False, **OF_SITES)
    dataset = of_sites.dataset
    unit, indices = result.settings.units()[0], split.indices
    item = Item.from_parts(result.settings, unit, dataset, indices).ended(4)
    scores = scores_of_owners(item, load(result.files[3].run["model.safetensors"]))
    train = dataset.train_x[indices.validation], dataset.train_y[indices.validation]
    assert dataset.train_owner is not None and dataset.test_owner is not None
    parts = {
        "validation": (*train, dataset.train_owner[indices.validation]),
        "test": (dataset.test_x, dataset.test_y, dataset.test_owner),
    }
    for part, (x, y, owner) in parts.items():
        right = []
        for k, mine in enumerate(indices.clients):
            rows = owner == dataset.train_owner[mine[0]]
            model = result.model(client=None if recipe == "fedavg" else k)
            right += (model(x[rows]).argmax(1) == y[rows]).tolist()
        assert (len(right) == len(x)) is (clients == 3)
        assert scores[f"{part}_accuracy"] == pytest.approx(np.mean(right))


def test_a_head_per_site_is_chosen_alike_by_python_and_the_command(
    of_sites: nd.Data, tmp_path: Path
) -> None:
    recipes, scenario = ["fedavg", "fedper"], {"partition": "natural", "clients": 3}
    choice = nd.choose(
        of_sites, recipes, search=SEARCH, progress=False, validation=0.2, **scenario, **OF_SITES
    )
    table_of_sites().to_csv(tmp_path / "sites.csv", index=False)
    source = {"name": "table", "root": ".", "file": "sites.csv", "label": "ill", "owner": "site"}
    content = CONTENT | {
        "data": {**source, "validation": 0.2, "public": 0},
        "scenario_names": ["sites"],
        "scenarios": {"sites": scenario},
        "recipe_names": recipes,
        "recipes": {name: {} for name in recipes},
        "train": {**OF_SITES, "batch_size": 32},
        "choose": SEARCH,
    }
    (tmp_path / config.FILE).write_text(yaml.safe_dump(content))
    place = Workspace.from_environment(tmp_path, {})
    prepare.run(place)
    decision = stage.choose(place, config.load(tmp_path))
    assert decision.text == repr(choice) and decision.samples == 48
    rungs = pd.DataFrame(decision.result.table("accuracy"))
    pd.testing.assert_frame_equal(choice.rungs, rungs)
    assert choice.recipe == "fedper" and choice.final.difference[1] > 0.2
    end = "That is a head per site. All were judged on the sites' own samples."
    assert choice.sentence.endswith(end)


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        ("scaffold", "one common model"),
        ("finetune", "a common model, fine-tuned at each site"),
        ("scaffold+ditto", "a model per site"),
        ("fedper", "a head per site"),
        ("fedbn", "own parameters (norms) per site"),
    ],
)
def test_what_a_site_gets_is_said(recipe: str, model: str) -> None:
    natural = {"skewed": {"partition": "natural", "clients": 3}}
    entry = {"pull": {"recipe": recipe}}
    search = choosing(
        config.checked(
            CONTENT | {"scenarios": natural, "recipe_names": ["pull"], "recipes": entry},
            config.FILE,
        )
    )
    assert search.models == {"pull": model, "fedavg": "one common model"}
    assert search.is_by_owner is (recipe != "scaffold")
