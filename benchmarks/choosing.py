"""How good is `noniid choose`? Its answer against the exhaustive search, the method that is best on
average, and tuned FedAvg, over 18 scenarios: `python -m benchmarks choose` writes
docs/results/choose.*.

Everything is trained by the stages' own code, so each run is an item of a store: an interrupted
measurement goes on where it was, and the exhaustive search and the race share what both train.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from benchmarks import machine
from benchmarks.report import render
from fedml_noniid.pipelines.experiment import config, results, tuning
from fedml_noniid.pipelines.experiment.tuning import Point
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.reporting.comparison import evidence, paired
from fedml_noniid.pipelines.stages import prepare
from fedml_noniid.pipelines.stages.tune import measured
from fedml_noniid.pipelines.tools import racing
from fedml_noniid.pipelines.tools.choose import choose
from fedml_noniid.pipelines.tools.racing import TEST, VALIDATION, Decision
from fedml_noniid.plugins.data.files import write_whole

DATA: dict[str, dict[str, Any]] = {
    "digits": {"name": "digits"},
    "mnist": {"name": "mnist", "samples": 2000},
    "cifar10": {"name": "cifar10", "samples": 2000, "size": [16, 16]},
}
SKEWS: dict[str, dict[str, Any]] = {
    "label": {"partition": "dirichlet", "clients": 20, "alpha": 0.1},
    "feature": {"partition": "iid", "clients": 20, "rotation": {"degrees": [0, 90, 180, 270]}},
    "quantity": {"partition": "quantity", "clients": 20, "beta": 0.5, "min_size": 5},
    "shards": {"partition": "shards", "clients": 20, "classes_per_client": 2},
    "noisy": {
        "partition": "dirichlet",
        "clients": 20,
        "alpha": 0.5,
        "label_noise": {"rate": 0.3},
    },
    "sampled": {"partition": "dirichlet", "clients": 50, "alpha": 0.3, "participation": 0.1},
}
TRAIN: dict[str, Any] = {
    "model": "mlp",
    "rounds": 32,
    "epochs": 1,
    "batch_size": 20,
    "optimizer": "sgd",
    "lr": 0.1,
    "evaluate_every": 4,
}
TRUTH = [3000, 3001, 3002, 3003, 3004]  # seeds that neither the race nor the search has seen
CHOOSE, LEADER, SEARCH = "choose", "leader of the race", "exhaustive search"
AVERAGE, FEDAVG = "best on average elsewhere", "tuned FedAvg"
POLICIES = (CHOOSE, LEADER, SEARCH, AVERAGE, FEDAVG)
NAMES = [f"{data}-{skew}" for data in DATA for skew in SKEWS]
FOLDER = Path("docs") / "results"


class Trained(NamedTuple):
    """Entry -> mean accuracy after the last round, without what diverged; and all rounds."""

    means: dict[str, float]
    runs: pd.DataFrame


class Measured(NamedTuple):
    """One scenario. Points by the name of their entry."""

    name: str
    decision: Decision
    points: Mapping[str, Point]
    searched: Mapping[str, float]  # validation accuracy of the search; without diverged points
    truth: Mapping[str, float]  # mean test accuracy on TRUTH, of the points that a policy may take
    runs: pd.DataFrame  # a line for each evaluated round

    def tuned(self, recipe: str) -> Point:
        """The point of a recipe that the search likes best."""
        own = [self.points[entry] for entry in self.searched if self.points[entry].recipe == recipe]
        return max(own, key=lambda point: self.searched[point.entry])


def write(root: Path, work: Path, raw: Path, only: Sequence[str] = ()) -> str:
    """Measures, and writes the page and its tables, which it returns as text.

    `raw`: the folder of MNIST's and CIFAR-10's files. What is trained stays in `work`. `only`:
    scenarios to measure, without a page.
    """
    watch = machine.Watch()
    found = [measure(name, work, raw) for name in only or NAMES]
    if only:
        return ""
    policies, finals = of_policies(found), of_finals(found)
    tables = {
        "choose.csv": policies,
        "choose-finals.csv": finals,
        "choose-runs.csv": pd.concat([one.runs for one in found]),
    }
    for name, frame in tables.items():
        write_whole(root / FOLDER / name, frame.to_csv(index=False, lineterminator="\n"))
    page = page_of(policies, finals, machine.line(watch.found()))
    write_whole(root / FOLDER / "choose.md", page)
    return page


def settings_of(name: str, raw: Path) -> dict[str, Any]:
    """The content of a scenario's params.yaml."""
    data, _, skew = name.partition("-")
    return {
        "experiment": name,
        "data": {**DATA[data], "root": str(raw), "validation": 0.1, "public": 0},
        "scenario_names": [skew],
        "scenarios": {skew: SKEWS[skew]},
        "recipe_names": list(racing.RECIPES),
        "recipes": {recipe: {} for recipe in racing.RECIPES},
        "seeds": TRUTH,
        "train": TRAIN,
    }


def measure(name: str, work: Path, raw: Path) -> Measured:
    """Runs the race, the exhaustive search, and the truth of what a policy may take."""
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / config.FILE, yaml.safe_dump(settings_of(name, raw)))
    place = Workspace(folder, work, work / name.partition("-")[0])
    settings = config.load(folder)
    if not place.dataset(settings.data.name).is_file():
        prepare.run(place)
    decision = choose(place, settings)
    points = {point.entry: point for point in racing.tried(settings)}
    scenario, seeds = racing.scenario_of(settings), racing.of(settings).seeds

    def trained(what: str, wanted: Sequence[Point], seeds: Sequence[int], split: str) -> Trained:
        laid = tuning.laid_out(settings, wanted, what, scenario, seeds)
        accuracies = measured(place, laid, f"{name}, {what}", f"{split}_accuracy")
        means = {entry: statistics.fmean(found) for entry, found in accuracies.items() if found}
        return Trained(means, runs_of(place, name, what))

    search = trained("search", list(points.values()), seeds, VALIDATION)
    one = Measured(name, decision, points, search.means, {}, search.runs)
    wanted = [one.tuned(recipe) for recipe in racing.RECIPES]
    of_race = [leader(one), decision.base.point, *(final.point for final in decision.finals)]
    wanted += [point for point in of_race if point not in wanted]
    truth = trained("truth", wanted, TRUTH, TEST)
    return one._replace(truth=truth.means, runs=pd.concat([search.runs, truth.runs]))


def leader(one: Measured) -> Point:
    """The point that was ahead on the validation split when the race went into its final."""
    last = one.decision.heats[-1].heat
    return next(ran.point for ran in one.decision.heats if ran.heat == last)


def runs_of(place: Workspace, name: str, what: str) -> pd.DataFrame:
    """The evaluated rounds of the runs that lie in `place`."""
    lines = [
        {
            "scenario": name,
            "for": what,
            "recipe": run.composition,
            "lr": run.params["train.lr"],
            "seed": run.seed,
            "round": int(row["round"]),
            "validation": round(row["validation_accuracy"], 4),
            "test": round(row["test_accuracy"], 4),
        }
        for run in results.read(place.root, place.repository)
        for row in run.rows
        if row["test_accuracy"] == row["test_accuracy"]
    ]
    return pd.DataFrame(lines)


def of_policies(found: Sequence[Measured]) -> pd.DataFrame:
    """A line for each scenario and policy: what it takes, its test accuracy on TRUTH (a fraction),
    and the rounds that are trained to find it."""
    rounds = TRAIN["rounds"]
    lines = []
    for one in found:
        decision, best = one.decision, max(one.searched, key=lambda entry: one.searched[entry])
        finals = 1 + len(decision.finals) + len(decision.diverged)
        final = finals * len(decision.base.accuracies) * rounds
        search = decision.exhaustive - final
        alone = search // len(racing.RECIPES)  # the values of one recipe
        taken = {
            CHOOSE: (decision.taken, decision.rounds),
            LEADER: (leader(one), decision.rounds - final),
            SEARCH: (one.points[best], search),
            AVERAGE: (one.tuned(best_elsewhere(one, found)), alone),
            FEDAVG: (one.tuned(racing.BASE), alone),
        }
        lines += [
            {
                "scenario": one.name,
                "policy": policy,
                "recipe": point.recipe,
                "values": point.words,
                "test": one.truth[point.entry],
                "rounds": trained,
            }
            for policy, (point, trained) in taken.items()
        ]
    return pd.DataFrame(lines)


def best_elsewhere(one: Measured, found: Sequence[Measured]) -> str:
    """The recipe that is best on average over the other scenarios, tuned in each."""

    def mean(recipe: str) -> float:
        others = [other for other in found if other is not one]
        return statistics.fmean(other.truth[other.tuned(recipe).entry] for other in others)

    return max(racing.RECIPES, key=mean)


def of_finals(found: Sequence[Measured]) -> pd.DataFrame:
    """A line for each comparison of a final: its interval, and the same difference on TRUTH."""
    return pd.DataFrame(
        [
            {
                "scenario": one.name,
                "recipe": final.point.recipe,
                "difference": final.difference,
                "low": final.low,
                "high": final.high,
                "truth": one.truth[final.point.entry] - one.truth[one.decision.base.point.entry],
                "taken": final.point == one.decision.taken,
                "sentence": one.decision.sentence,
            }
            for one in found
            for final in one.decision.finals
        ]
    )


def page_of(policies: pd.DataFrame, finals: pd.DataFrame, machine_line: str) -> str:
    """The page, of the two tables alone. Differences are means over scenarios."""
    tests = policies.pivot(index="scenario", columns="policy", values="test")
    rounds = policies.pivot(index="scenario", columns="policy", values="rounds").mean()

    def against(policy: str, other: str) -> str:
        ours, theirs = ((100 * tests[name]).to_dict() for name in (policy, other))
        words = evidence(paired("", ours, theirs, 0.0), unit=" points", over="scenarios")
        return "" if policy == other else words

    rows = [
        {
            "policy": policy,
            "test": f"{100 * tests[policy].mean():.2f}",
            "search": against(policy, SEARCH),
            "fedavg": against(policy, FEDAVG),
            "cost": f"{100 * rounds[policy] / rounds[SEARCH]:.0f} %",
        }
        for policy in POLICIES
    ]
    took = policies.assign(took=policies["recipe"] + " (" + policies["values"] + ")")
    named = took.pivot(index="scenario", columns="policy", values="took")
    sentences = finals.groupby("scenario")["sentence"].first()
    scenarios = [
        {
            "name": name,
            "took": named.loc[name].to_dict(),
            "test": {key: f"{100 * value:.2f}" for key, value in tests.loc[name].items()},
            "sentence": sentences[name],
        }
        for name in policies["scenario"].unique()
    ]
    rates = sorted(set(policies["values"]), key=lambda values: float(values.split()[1]))
    tuned = policies.loc[policies["policy"] == FEDAVG, "values"]
    about = {
        "rows": rows,
        "scenarios": scenarios,
        "policies": POLICIES,
        "held": int(finals["truth"].between(finals["low"], finals["high"]).sum()),
        "claims": len(finals),
        "won": finals.loc[finals["taken"], "scenario"].nunique(),
        "gains": int((finals.loc[finals["taken"], "truth"] > 0).sum()),
        "ends": int(tuned.isin([rates[0], rates[-1]]).sum()),
        "machine": machine_line,
    }
    settings = {"recipes": racing.RECIPES, "train": TRAIN, "data": DATA, "skews": SKEWS}
    return render("choose.md.j2", about | settings | {"truth": TRUTH})
