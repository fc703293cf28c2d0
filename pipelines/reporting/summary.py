"""Numbers of the report: means and spreads over seeds, ranks, differences to FedAvg seed by
seed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pandas as pd

from fedml_noniid.core.errors import UserError
from fedml_noniid.metrics import METRICS, Metric, metric_of
from fedml_noniid.pipelines.experiment.results import METRIC, RERUN, ItemResult, table

LAST_ROUNDS = 5
BASELINE = "fedavg"
MAJORITY, LOCAL_MAJORITY = "majority class", "local majority class"
TINY = 1e-9  # far below one test sample: two accuracies that differ by less are equal
PUBLIC_MARKS = {"labelled": "†", "unlabelled": "‡"}


class Spread(NamedTuple):
    """Mean and sample standard deviation (n - 1 in the denominator) over `n` seeds; no `std` for
    one seed."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True, eq=False)
class MethodSummary:
    """One recipe on one scenario. Accuracies are fractions in [0, 1], traffic is in bytes.

    `runs` has a row per seed and the columns of `measured`, NaN where a number is not known. The
    user's metrics are in the columns that begin with METRIC.
    `spreads` has the same columns, but for those without a number.
    """

    recipe: str
    composition: str
    rounds: int
    runs: pd.DataFrame
    spreads: Mapping[str, Spread]
    weights: Mapping[int, str]  # SHA-256 of the final weights, by seed
    predictions: Mapping[int, str]  # SHA-256 of the predictions on the test set, by seed
    one_class: tuple[int, ...]  # seeds on which the model names one class for all test samples
    # By more than one test sample, in the mean over seeds; True if not known.
    is_above_majority: bool
    public: str  # the public split as it sees it: "labelled", "unlabelled", or ""
    leak: str  # how it sees the test set, in words, or ""
    no_effect: str  # why it changes nothing here, or ""
    federated: bool
    remark: str  # what a reader of its accuracies must know, or ""
    rank: int = 0  # from 1; 0 for a method that is not compared, or no better than a constant
    cohorts: str = ""  # that a method chooses the clients of each round, or ""
    other_test: bool = False  # whether its clients test models of their own, unlike the others'

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that have ended, ascending."""
        return tuple(self.runs.index)

    @property
    def final(self) -> Spread:
        """Test accuracy, or another main metric, after the last round."""
        return self.spreads["final"]

    @property
    def metrics(self) -> dict[str, Spread]:
        """The user's metrics by name."""
        return {
            column.removeprefix(METRIC): spread_
            for column, spread_ in self.spreads.items()
            if column.startswith(METRIC)
        }

    @property
    def compared(self) -> bool:
        """Whether it can have a rank: it is federated, has not seen the test set, and has the test
        of the others."""
        return self.federated and not self.leak and not self.other_test

    @property
    def is_constant(self) -> bool:
        """Whether it is no better than a constant answer, or names one class only on a seed."""
        return bool(self.one_class) or not self.is_above_majority

    @property
    def label(self) -> str:
        """The recipe's name, with a mark if it sees public data or the test set, chooses its
        clients, or names one class only."""
        seen = "LEAK" if self.leak else PUBLIC_MARKS.get(self.public, "")
        chosen, one_class = self.cohorts and "§", "ONE CLASS" if self.one_class else ""
        return " ".join(filter(None, [self.recipe, seen, chosen, one_class]))


@dataclass(frozen=True, eq=False)
class ScenarioSummary:
    """The methods of one scenario: the compared ones, best mean first, then the others."""

    name: str
    methods: tuple[MethodSummary, ...]
    baseline: MethodSummary | None
    majority: Mapping[str, Spread]  # accuracy of a constant answer, by its name
    results: tuple[ItemResult, ...]
    missing: tuple[str, ...]  # items of params.yaml without a result
    test_samples: int | None  # None if nothing is evaluated
    main: str = "accuracy"  # the name of the main metric
    one_test: bool = False  # whether clients' own models have the test set of models for all

    @property
    def metric(self) -> Metric:
        """How the main metric is written."""
        return metric_of(self.main)

    @property
    def step(self) -> float:
        """What one test sample makes of the accuracy; 0 if that is not known, or not the metric."""
        return 1 / self.test_samples if self.test_samples and self.main == "accuracy" else 0.0

    @property
    def site_step(self) -> float:
        """What one test sample of a site makes of the mean over sites, on average over the samples;
        0 as in `step`."""
        tests = [run.site_tests for run in self.results if run.site_scores]
        return 1 / min(tests) if tests and self.step else 0.0

    @property
    def has_site_tests(self) -> bool:
        """Whether sites have test samples that are the same for all methods."""
        return any(run.site_scores for run in self.results)

    @property
    def others(self) -> list[str]:
        """Metrics beside the main one, where that is not the accuracy."""
        known = {column for method in self.methods for column in method.spreads}
        return [] if self.main == "accuracy" else [name for name in METRICS if name in known]

    @property
    def best(self) -> MethodSummary | None:
        """The method with the best mean of those without a warning."""
        return next((method for method in self.methods if method.rank), None)


def spread(values: Iterable[float]) -> Spread | None:
    """None for no values."""
    known = list(values)
    if not known:
        return None
    std = statistics.stdev(known) if len(known) > 1 else None
    return Spread(statistics.fmean(known), std, len(known))


def scenario(
    name: str,
    results: Sequence[ItemResult],
    recipes: Sequence[str],
    seeds: Sequence[int],
    n_tested: int | None = None,
) -> ScenarioSummary | None:
    """Sums up the results of one scenario for the named recipes and seeds.

    None if none of them has finished.

    `n_tested`: the size of the test set. Without it, the files of the results have it.
    """
    present = [
        run
        for run in results
        if run.scenario == name and run.recipe in recipes and run.seed in seeds and run.tested
    ]
    if not present:
        return None
    by_recipe = {recipe: [run for run in present if run.recipe == recipe] for recipe in recipes}
    by_recipe = {recipe: runs for recipe, runs in by_recipe.items() if runs}
    # An entry of another name may be plain FedAvg too.
    plain = [recipe for recipe, runs in by_recipe.items() if runs[0].composition == BASELINE]
    base = BASELINE if BASELINE in plain else next(iter(plain), None)
    baseline = None if base is None else measured(by_recipe[base])["final"]
    n_tested, main = n_tested or test_samples(present), present[0].main
    step = 1 / n_tested if n_tested and main == "accuracy" else 0.0
    one_test = all(_is_whole_test(run, n_tested) for run in present)
    own = {
        recipe: not one_test and bool(_tag(runs[0], "own_models"))
        for recipe, runs in by_recipe.items()
    }
    methods = _ranked(
        [
            replace(
                _summed_up(
                    runs,
                    None if recipe == base or own[recipe] != own.get(base or "") else baseline,
                    step,
                ),
                other_test=own[recipe] and not all(own.values()),
            )
            for recipe, runs in by_recipe.items()
        ]
    )
    ended = {(run.recipe, run.seed) for run in present}
    return ScenarioSummary(
        name=name,
        methods=methods,
        baseline=next((method for method in methods if method.recipe == base), None),
        majority=_majority(present),
        results=tuple(present),
        missing=tuple(
            f"{name}-{recipe}-{seed}"
            for recipe in recipes
            for seed in seeds
            if (recipe, seed) not in ended
        ),
        test_samples=n_tested,
        main=main,
        one_test=one_test,
    )


def courses(runs: Iterable[ItemResult]) -> pd.DataFrame:
    """The main metric on the test set by round (line) and seed (column); NaN: not measured."""
    by_seed = {
        run.seed: {int(row["round"]): row[f"test_{run.main}"] for row in run.rows} for run in runs
    }
    return pd.DataFrame(by_seed).sort_index()


def measured(runs: Sequence[ItemResult], baseline: pd.Series | None = None) -> pd.DataFrame:
    """The numbers of runs of one recipe, a row per seed; NaN: not known.

    `baseline`: FedAvg's accuracy after the last round by seed. Accuracies are fractions, traffic
    is in bytes.
    """
    rows = {}
    for run in sorted(runs, key=lambda run: run.seed):
        accuracy, metrics = run.tested, run.evaluation
        further = {} if run.main == "accuracy" else {name: metrics.get(name) for name in METRICS}
        further.pop(run.main, None)
        scores = run.site_scores.values()
        traffic = [row["bytes_up"] + row["bytes_down"] for row in run.rows]
        rows[run.seed] = {
            "final": accuracy[-1],
            "last_5_rounds": statistics.fmean(accuracy[-LAST_ROUNDS:]),
            "best": max(accuracy),
            "majority_accuracy": metrics.get("majority_accuracy"),
            "balanced_accuracy": metrics.get("balanced_accuracy"),
            "macro_f1": metrics.get("macro_f1") if run.main == "accuracy" else None,
            "classes_named": metrics.get("classes_named"),
            "worst_client": min(run.client_scores, default=None),
            "site_mean": statistics.fmean(scores) if scores else None,
            "noisy_test": metrics.get(f"{run.main}_noisy"),
            "traffic_round_bytes": statistics.fmean(traffic),
            "traffic_total_bytes": sum(traffic),
            **further,
            **{name: value for name, value in metrics.items() if name.startswith(METRIC)},
        }
    frame = pd.DataFrame.from_dict(rows, orient="index", dtype=float)
    if baseline is not None:
        frame["vs_baseline"] = frame["final"] - baseline
    return frame


def _summed_up(
    runs: Sequence[ItemResult], baseline: pd.Series | None, step: float
) -> MethodSummary:
    """Sums up one recipe's results; `_ranked` sets the rank. `step`: one test sample."""
    first, frame = runs[0], measured(runs, baseline)
    spreads = {column: spread(frame[column].dropna().tolist()) for column in frame}
    above = spread((frame["final"] - frame["majority_accuracy"]).dropna().tolist())
    about = (
        _tag(first, "own_models"),
        _private(runs),
        _stopped(runs),
        _tag(first, "clock"),
        _tag(first, "attack"),
    )
    return MethodSummary(
        recipe=first.recipe,
        composition=first.composition,
        rounds=max(len(run.rows) for run in runs),
        runs=frame,
        spreads={column: spread_ for column, spread_ in spreads.items() if spread_},
        weights={run.seed: run.tags["weights_sha256"] for run in runs},
        predictions={
            run.seed: run.evaluation["predictions_sha256"]
            for run in runs
            if "predictions_sha256" in run.evaluation
        },
        one_class=tuple(frame.index[frame["classes_named"] == 1]),
        is_above_majority=above is None or above.mean > step + TINY,
        public=_tag(first, "public"),
        leak=_tag(first, "leak"),
        no_effect=_tag(first, "no_effect"),
        federated=first.tags.get("federated", "yes") == "yes",
        remark="; ".join(filter(None, about)),
        cohorts=_tag(first, "cohorts"),
    )


def _ranked(methods: Sequence[MethodSummary]) -> tuple[MethodSummary, ...]:
    """Best mean final accuracy first, then the methods that are not compared.

    Equal means share a rank. A method that is no better than a constant answer has none.
    """
    ordered = sorted(methods, key=lambda method: (not method.compared, -method.final.mean))
    means = [method.final.mean for method in ordered if method.compared and not method.is_constant]
    return tuple(
        replace(method, rank=means.index(method.final.mean) + 1)
        if method.compared and not method.is_constant
        else method
        for method in ordered
    )


def test_samples(results: Iterable[ItemResult]) -> int | None:
    """The size of the test set, from the first evaluation; None without one.

    All runs of an experiment have the same test set.
    """
    files = (path for result in results for path in result.files)
    path = next((path for path in files if path.stem in ("per_class", "per_target")), None)
    if path is None:
        return None
    try:
        if path.stem == "per_target":  # each line has all samples
            return int(table(path)[0]["samples"])
        return sum(int(row["samples"]) for row in table(path))
    except (KeyError, ValueError):
        raise UserError(f"{path}: has no column samples of whole numbers; {RERUN}") from None


def _is_whole_test(run: ItemResult, n_tested: int | None) -> bool:
    """Whether the sites' own test samples are together the test set, and all sites are tested."""
    is_whole = bool(run.site_scores) and run.site_tests == n_tested
    missing = (run.params.get(f"scenario.{key}") for key in ("availability", "devices"))
    return is_whole and not any(missing)


def _majority(results: Sequence[ItemResult]) -> dict[str, Spread]:
    """The accuracy of always naming the most frequent class: of all training data, or of each
    client's data."""
    by_seed: dict[str, dict[int, float]] = {}
    for run in results:
        if "majority_accuracy" in run.evaluation:
            name = LOCAL_MAJORITY if _tag(run, "own_models") else MAJORITY
            by_seed.setdefault(name, {})[run.seed] = run.evaluation["majority_accuracy"]
    return {
        name: shares
        for name, accuracies in by_seed.items()
        if (shares := spread(accuracies.values()))
    }


def _tag(result: ItemResult, name: str) -> str:
    """A tag of the item; "" for "none"."""
    value = result.tags.get(name, "none")
    return "" if value == "none" else value


def _private(runs: Sequence[ItemResult]) -> str:
    """The largest epsilon of the runs after the last round, and what it leaves out; "" without."""
    notes = []
    for note in filter(None, _tag(runs[0], "privacy").split("; ")):
        unit = note.split()[1]
        largest = max(run.rows[-1][f"epsilon_per_{unit}"] for run in runs)
        notes.append(f"epsilon {largest:.4g} {note}")
    if not notes:
        return ""
    return (
        f"{', '.join(notes)}, for the one with the most releases, without amplification; not "
        "covered: numbers of samples and steps, losses, tests on own samples. Anyone who "
        "knows the seed of a simulation can draw its noise again"
    )


def _stopped(runs: Sequence[ItemResult]) -> str:
    """How many runs a callback has stopped, and after which rounds; "" for none."""
    rounds = [str(len(run.rows)) for run in runs if _tag(run, "stopped")]
    if not rounds:
        return ""
    return f"{len(rounds)} of {len(runs)} runs stopped early, after round {', '.join(rounds)}"
