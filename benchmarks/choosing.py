"""How good is `noniid choose`? Its answer against the exhaustive search, the method that is best on
average, and tuned FedAvg: `python -m benchmarks choose` writes docs/results/choose*.

The example of README.md is chosen for over 20 sets of seeds, and each answer is compared with the
exhaustive search over the same values.

Everything is trained by the stages' own code, so each run is an item of a store: an interrupted
measurement goes on where it was, and both searches share what both train.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from sklearn import datasets

from benchmarks import report
from benchmarks.machine import Watch
from fedml_noniid.data.files import write_whole
from fedml_noniid.pipelines.experiment import config, results
from fedml_noniid.pipelines.experiment.config import ChooseSettings, Config, MachineSettings
from fedml_noniid.pipelines.experiment.search import BASE, Point, Request, Search, Trial, choosing
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.reporting.comparison import evidence, paired
from fedml_noniid.pipelines.reporting.decision import RECIPES, Decision
from fedml_noniid.pipelines.stages import prepare
from fedml_noniid.pipelines.stages.tune import measured
from fedml_noniid.pipelines.verbs import init
from fedml_noniid.pipelines.verbs.choose import choose

DATA: dict[str, dict[str, Any]] = {
    "digits": {"name": "digits"},
    "mnist": {"name": "mnist", "samples": 2000},
    "cifar10": {"name": "cifar10", "samples": 2000, "size": [16, 16]},
}
# Small tables, and the fraction of their training samples that is held out for validation.
TABLES = {"patients": 0.1, "wine": 0.3, "diabetes": 0.2, "few": 0.1, "rare": 0.1, "many": 0.1}
SKEWS: dict[str, dict[str, Any]] = {
    "owner": {"partition": "natural", "clients": 6},
    "label": {"partition": "dirichlet", "clients": 20, "alpha": 0.1},
    "feature": {"partition": "iid", "clients": 20, "rotation": {"degrees": [0, 90, 180, 270]}},
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
    "evaluate_every": 8,
}
MACHINE = {"processes": 1}
TRUTH = [3000, 3001, 3002, 3003, 3004]  # seeds that no search has seen
SETS = 20  # sets of seeds for the example of README.md
CHOOSE, LEADER, SEARCH = "choose", "leader of the search", "exhaustive search"
AVERAGE, FEDAVG = "best on average elsewhere", "tuned FedAvg"
POLICIES = (CHOOSE, LEADER, SEARCH, AVERAGE, FEDAVG)
NAMES = [
    *(f"{name}-owner" for name in TABLES),
    *(f"digits-{skew}" for skew in ("label", "feature", "noisy", "sampled")),
    "mnist-label",
    "mnist-sampled",
    "cifar10-label",
]
OF_PAGE = "choose", "choose-finals", "choose-values", "choose-example"
EXAMPLE = re.compile(r"<<'PYTHON'\n(.*?)PYTHON\n.*--methods (\S+)", re.DOTALL)  # of README.md


class Measured(NamedTuple):
    """One scenario. Trials and points by the name of their entry."""

    name: str
    decision: Decision
    searched: Mapping[str, Trial]  # of the exhaustive search
    truth: Mapping[str, float]  # mean test accuracy on TRUTH, of the points that a policy may take
    runs: pd.DataFrame  # a line for each evaluated round

    def tuned(self, recipe: str) -> Point:
        """The best point of a recipe by the exhaustive search."""
        return best(self.searched, recipe)


def best(searched: Mapping[str, Trial], recipe: str | None = None) -> Point:
    """The best point, or that of a recipe."""
    own = [one for one in searched.values() if recipe in (None, one.point.recipe)]
    return min(own, key=lambda one: one.rank).point


def write(work: Path, raw: Path) -> str:
    """Measures, and writes the page, which it returns, and its tables.

    `raw`: the folder of MNIST's and CIFAR-10's files. What is trained stays in `work`.
    """
    watch = Watch()
    measurements = [measure(name, work, raw) for name in NAMES]
    tables = {
        "choose": of_policies(measurements),
        "choose-finals": of_finals(measurements),
        "choose-values": pd.concat([values_of(one) for one in measurements]),
        "choose-example": example(work),
        "choose-runs": pd.concat([one.runs for one in measurements]),
    }
    return report.write(report.RESULTS, "choose", context_of(tables, watch.line()), tables)


def table(name: str) -> pd.DataFrame:
    """One of TABLES: classes in `label`, and owners whose first feature differs.

    `patients`, `wine` and `diabetes` are scikit-learn's; the progress of diabetes is cut into three
    classes. The others are made: four classes, two of which one is rare, ten.
    """
    if name in ("patients", "wine", "diabetes"):
        source = {"patients": "breast_cancer"}.get(name, name)
        frame = getattr(datasets, f"load_{source}")(as_frame=True).frame
        label = frame.pop("target")
        label = pd.qcut(label, 3, labels=False) if name == "diabetes" else label
    else:
        samples, classes, weights = {
            "few": (1000, 4, None),
            "rare": (1250, 2, [0.85]),
            "many": (1800, 10, None),
        }[name]
        x, label = datasets.make_classification(
            samples,
            n_informative=8,
            n_classes=classes,
            weights=weights,
            flip_y=0.05,
            random_state=0,
        )
        frame = pd.DataFrame(x.round(5)).add_prefix("x")
    order = frame.iloc[:, 0].rank(pct=True) * 3.9 + np.arange(len(frame)) % 3
    return frame.assign(label=label, owner=order.astype(int))


def settings_of(name: str, work: Path, raw: Path) -> dict[str, Any]:
    """The content of a scenario's params.yaml."""
    data, _, skew = name.partition("-")
    if data in TABLES:
        folder = work / data
        folder.mkdir(parents=True, exist_ok=True)
        table(data).to_csv(folder / "table.csv", index=False)
        source: dict[str, Any] = {"name": "table", "root": str(folder), "file": "table.csv"}
        source |= {"label": "label", "owner": "owner", "validation": TABLES[data]}
    else:
        source = {"root": str(raw), "validation": 0.1, **DATA[data]}
    return {
        "experiment": name,
        "data": {**source, "public": 0},
        "scenario_names": [skew],
        "scenarios": {skew: SKEWS[skew]},
        "recipe_names": list(RECIPES),
        "recipes": {recipe: {} for recipe in RECIPES},
        "seeds": TRUTH,
        "train": TRAIN,
        "machine": MACHINE,
    }


def trained(place: Workspace, plan: Search, request: Request, split: str) -> dict[str, Trial]:
    """Entry -> its results on a split, without what diverged."""
    answers = measured(place, plan, request)
    scores = {point.entry: plan.scores(point, answers, split) for point in request.points}
    return {
        point.entry: Trial.from_scores(request, point, scores[point.entry])
        for point in request.points
        if scores[point.entry]
    }


def searched(place: Workspace, plan: Search, decision: Decision) -> dict[str, Trial]:
    """The exhaustive search over all values that were tried."""
    points = {trial.point.entry: trial.point for trial in decision.result.trials}
    rounds = plan.settings.train.rounds
    request = Request("exhaustive search", tuple(points.values()), tuple(plan.seeds), rounds)
    return trained(place, plan, request, "validation")


def measure(name: str, work: Path, raw: Path) -> Measured:
    """Runs `choose`, the exhaustive search, and the truth of what a policy may take."""
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / config.FILE, yaml.safe_dump(settings_of(name, work, raw)))
    place = Workspace(folder, work, work / name.partition("-")[0])
    settings = config.load(folder)
    if not place.dataset(settings.data.name).is_file():
        prepare.run(place)
    decision, plan = choose(place, settings), choosing(settings)
    search = searched(place, plan, decision)
    runs = runs_of(place, name, "search")
    wanted = [best(search, recipe) for recipe in RECIPES] + [leader(decision)]
    wanted += [one.trial.point for one in (decision.base, *decision.finalists)]
    points = {point.entry: point for point in wanted}
    request = Request("truth", tuple(points.values()), tuple(TRUTH), TRAIN["rounds"])
    truth = trained(place, plan, request, "test")
    means = {entry: trial.metric for entry, trial in truth.items()}
    runs = pd.concat([runs, runs_of(place, name, "truth")])
    return Measured(name, decision, search, means, runs)


def leader(decision: Decision) -> Point:
    """The point that was ahead on the validation split before the final."""
    return decision.result.finals[0].point


def example(work: Path) -> pd.DataFrame:
    """README.md's own example over sets of seeds: a line for each set and recipe."""
    folder = work / "example"
    folder.mkdir(parents=True, exist_ok=True)
    code = EXAMPLE.search((report.RESULTS.parents[1] / "README.md").read_text())
    assert code is not None, "README.md has the example"
    subprocess.run([sys.executable, "-c", code[1]], cwd=folder, check=True)
    columns = {"label": "diagnosis", "owner": "hospital"}
    options = init.StudyOptions(
        data=str(folder / "patients.csv"), columns=columns, methods=code[2].split(",")
    )
    if not (folder / config.FILE).is_file():
        init.make(folder, init.planned(folder, options)[0])
    settings, place = config.load(folder), Workspace(folder, work, work / "example")
    prepare.run(place)
    return pd.concat([_example(place, settings, number) for number in range(SETS)])


def _example(place: Workspace, settings: Config, number: int) -> pd.DataFrame:
    first, fresh = 1000 + 10 * number, 2000 + 10 * number
    seeds = ChooseSettings(seeds=[*range(first, first + 3)], fresh=[*range(fresh, fresh + 5)])
    settings = settings.model_copy(
        update={"choose": seeds, "machine": MachineSettings(processes=MACHINE["processes"])}
    )
    decision, plan = choose(place, settings), choosing(settings)
    frame = _values(decision, searched(place, plan, decision))
    final = pd.DataFrame(decision.table)[["recipe", "difference", "low", "high", "taken"]]
    frame = frame.merge(final, how="left", on="recipe")
    rounds = {"rounds": decision.rounds, "rounds_exhaustive": decision.exhaustive}
    return frame.assign(set=number, first_seed=first, **rounds)


def values_of(one: Measured) -> pd.DataFrame:
    """A line for each recipe of a scenario: the values by `choose` and by the exhaustive search."""
    return _values(one.decision, one.searched).assign(scenario=one.name)


def _values(decision: Decision, search: Mapping[str, Trial]) -> pd.DataFrame:
    result, lines = decision.result, []
    for recipe in dict.fromkeys(trial.point.recipe for trial in result.finals):
        ours, theirs = result.ranked(recipe)[0].point, best(search, recipe)
        lines.append(
            {
                "recipe": recipe,
                "choose": ours.words,
                "exhaustive": theirs.words,
                "is_same": ours == theirs,
                "loss_above": search[ours.entry].loss - search[theirs.entry].loss,
                "tried": len(result.ranked(recipe)),
            }
        )
    return pd.DataFrame(lines)


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


def of_policies(measurements: Sequence[Measured]) -> pd.DataFrame:
    """A line for each scenario and policy: what it takes, its test accuracy on TRUTH (a fraction; 0
    if it diverged there), and the rounds that are trained to find it."""
    lines = []
    for one in measurements:
        decision = one.decision
        final = decision.rounds - decision.result.rounds
        search = decision.exhaustive - final

        def alone(recipe: str, one: Measured = one, search: int = search) -> tuple[Point, int]:
            own = len(one.decision.result.ranked(recipe))
            return one.tuned(recipe), search * own // candidates(one.decision)

        taken = {
            CHOOSE: (decision.taken, decision.rounds),
            LEADER: (leader(decision), decision.result.rounds),
            SEARCH: (best(one.searched), search),
            AVERAGE: alone(best_elsewhere(one, measurements)),
            FEDAVG: alone(BASE),
        }
        lines += [
            {
                "scenario": one.name,
                "policy": policy,
                "recipe": point.recipe,
                "values": point.words,
                "test": one.truth.get(point.entry, 0.0),
                "rounds": rounds,
                "samples": decision.samples,
            }
            for policy, (point, rounds) in taken.items()
        ]
    return pd.DataFrame(lines)


def candidates(decision: Decision) -> int:
    """How many points were tried."""
    return len({trial.point.entry for trial in decision.result.trials})


def best_elsewhere(one: Measured, measurements: Sequence[Measured]) -> str:
    """The recipe that is best on average over the other scenarios, tuned in each."""

    def mean(recipe: str) -> float:
        others = [other for other in measurements if other is not one]
        return statistics.fmean(other.truth.get(other.tuned(recipe).entry, 0.0) for other in others)

    return max(RECIPES, key=mean)


def of_finals(measurements: Sequence[Measured]) -> pd.DataFrame:
    """A line for each comparison of a final: its interval, and the same difference on TRUTH."""
    return pd.DataFrame(
        [
            {
                "scenario": one.name,
                "recipe": final.trial.point.recipe,
                "difference": final.difference,
                "low": final.low,
                "high": final.high,
                "truth": one.truth.get(final.trial.point.entry, 0.0)
                - one.truth.get(one.decision.base.trial.point.entry, 0.0),
                "taken": final.trial.point == one.decision.taken,
                "sentence": one.decision.sentence,
            }
            for one in measurements
            for final in one.decision.finalists
        ]
    )


def context_of(tables: Mapping[str, pd.DataFrame], machine_line: str) -> dict[str, Any]:
    """Returns what the page says, of the tables alone. Differences are means over scenarios."""
    policies, finals, values, of_example = (tables[name] for name in OF_PAGE)
    small = policies["scenario"].str.partition("-")[0].isin(TABLES)
    named = policies.assign(took=policies["recipe"] + " (" + policies["values"] + ")")
    sentences = finals.groupby("scenario")["sentence"].first()
    scenarios = [
        {
            "name": name,
            "samples": own["samples"].iloc[0],
            "took": own.set_index("policy")["took"].to_dict(),
            "test": {p: f"{100 * x:.2f}" for p, x in zip(own["policy"], own["test"], strict=True)},
            "sentence": sentences[name],
        }
        for name, own in named.groupby("scenario", sort=False)
    ]
    fedprox = of_example[of_example["recipe"] == "fedprox"]
    return {
        "groups": {"All scenarios": rows_of(policies), "Small tables": rows_of(policies[small])},
        "scenarios": scenarios,
        "policies": POLICIES,
        "held": int(finals["truth"].between(finals["low"], finals["high"]).sum()),
        "claims": len(finals),
        "won": finals.loc[finals["taken"], "scenario"].nunique(),
        "gains": int((finals.loc[finals["taken"], "truth"] > 0).sum()),
        "same": int(values["is_same"].sum()),
        "values": len(values),
        "example": of_example.groupby("recipe")["is_same"].agg(["sum", "size"]).to_dict("index"),
        "sets": of_example["set"].nunique(),
        "below": int((fedprox["high"] < 0).sum()),
        "cost": f"{100 * of_example['rounds'].sum() / of_example['rounds_exhaustive'].sum():.0f} %",
        "machine": machine_line,
        "recipes": RECIPES,
        "train": TRAIN,
        "tables": TABLES,
        "skews": SKEWS,
        "truth": TRUTH,
    }


def rows_of(policies: pd.DataFrame) -> list[dict[str, str]]:
    """The table of the policies."""
    tests = policies.pivot(index="scenario", columns="policy", values="test")
    rounds = policies.pivot(index="scenario", columns="policy", values="rounds").mean()

    def against(policy: str, other: str) -> str:
        ours, theirs = ((100 * tests[name]).to_dict() for name in (policy, other))
        words = evidence(paired("", ours, theirs, 0.0), unit=" points", over="scenarios")
        return "" if policy == other else words

    return [
        {
            "policy": policy,
            "test": f"{100 * tests[policy].mean():.2f}",
            "search": against(policy, SEARCH),
            "fedavg": against(policy, FEDAVG),
            "cost": f"{100 * rounds[policy] / rounds[SEARCH]:.0f} %",
        }
        for policy in POLICIES
    ]
