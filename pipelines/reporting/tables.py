"""The report's tables: the numbers of a scenario as cells of text, and unrounded for files."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import pandas as pd

from fedml_noniid.core.errors import one_line
from fedml_noniid.data.owners import order_of
from fedml_noniid.metrics import Metric, metric_of
from fedml_noniid.pipelines.experiment.results import METRIC
from fedml_noniid.pipelines.reporting.comparison import Comparison, against, on_sites
from fedml_noniid.pipelines.reporting.summary import (
    BASELINE,
    TINY,
    MethodSummary,
    ScenarioSummary,
    courses,
)
from fedml_noniid.pipelines.reporting.text import (
    MIB,
    NONE,
    in_unit,
    mib,
    percent,
    plus_minus,
    points,
    short,
)

# Columns of `MethodSummary.runs` in summary.csv, each with these parts.
COLUMNS = (
    "final",
    "last_5_rounds",
    "best",
    "majority_accuracy",
    "balanced_accuracy",
    "macro_f1",
    "vs_baseline",
    "worst_client",
    "noisy_test",
    "traffic_round_bytes",
    "traffic_total_bytes",
)
PARTS = ("mean", "std", "seeds")
TESTS = ("low", "high", "p", "p_holm")  # parts of a comparison in summary.csv
MAX_SITES = 40  # rows of the table by client
MAX_NAMES = 10  # sites in a sentence
SAME = "same predictions"  # in place of a difference
BRIEF = ("last round, ", "vs ", "worst client, ")  # begin titles of `in_brief`
COMPARED = ("method", "difference", "interval", "t test, p", "Holm, p", "higher", "verdict")


def cells(scenario: ScenarioSummary) -> list[list[str]]:
    """The table as text, the header and then the best method first: accuracies in %, differences in
    points.

    The last rows are constant answers.
    """
    rows = _rows(scenario)
    return [[*rows[0]], *([*row.values()] for row in rows)]


def _rows(scenario: ScenarioSummary) -> list[dict[str, str]]:
    """Its lines by the title of their column."""
    with_best, with_base = (
        against(scenario, other) for other in (scenario.best, scenario.baseline)
    )
    rows = [
        _row(scenario, method, with_best.get(method.recipe), with_base.get(method.recipe))
        for method in scenario.methods
    ]
    final = f"last round, {_title(scenario.main)}"
    return rows + [
        dict.fromkeys(rows[0], NONE) | {"method": name, final: percent(value)}
        for name, value in scenario.majority.items()
    ]


def _title(name: str) -> str:
    """A metric in the title of a column: the unit, and the name if it is not the accuracy."""
    metric = metric_of(name)
    return "%" if name == "accuracy" else f"{metric.label}{metric.unit}"


def by_site(scenario: ScenarioSummary) -> list[list[str]]:
    """The mean score of each owner's client over the seeds, by method, as text; in the order of the
    names.

    Empty where clients have no names. Of many owners, those with the lowest scores.
    """
    sites, recipes = _sites(scenario), [method.recipe for method in scenario.methods]
    if sites.empty:
        return []
    means = _mean_scores(scenario)
    by_name = sites.drop_duplicates(["name", "seed"], keep="last").groupby("name")
    numbers = by_name[["samples", "tests"]].mean().assign(seeds=by_name.size())
    worst = [*means.min(axis=1).nsmallest(MAX_SITES).index]
    rows = []
    for name in (worst[k] for k in order_of(worst)):
        about = (f"{number:.0f}" for number in numbers.loc[name])
        scores = (_number(score, scenario.metric) for score in means.loc[name, recipes])
        rows.append([one_line(name), *about, *scores])
    return [["client", "samples", "tests", "seeds", *recipes], *rows]


def _sites(scenario: ScenarioSummary) -> pd.DataFrame:
    """A line for each run and each named owner with test samples."""
    lines = [
        (run.recipe, run.seed, name, *site)
        for run in scenario.results
        for name, site in run.sites.items()
    ]
    return pd.DataFrame(lines, columns=["recipe", "seed", "name", "samples", "tests", "score"])


def _mean_scores(scenario: ScenarioSummary, lines: Sequence[str] = ("name",)) -> pd.DataFrame:
    """Mean scores by owner (line), or by these `lines`, and recipe (column); NaN: not known."""
    recipes = [method.recipe for method in scenario.methods]
    table = _sites(scenario).pivot_table("score", [*lines], "recipe", sort=False)
    return table.reindex(columns=recipes)


def _number(value: float, metric: Metric) -> str:
    """A number as shown; NaN: not known."""
    return NONE if pd.isna(value) else metric.number(value)


def site_tests(scenario: ScenarioSummary) -> list[list[str]]:
    """All methods on the sites' own test samples, as text, the best mean over sites first.

    Empty where these samples are not the same for all methods.
    """
    if not scenario.has_site_tests:
        return []
    comparisons, means = on_sites(scenario), _mean_scores(scenario)
    metric = scenario.metric
    base = scenario.baseline.recipe if scenario.baseline else BASELINE
    tested = [method for method in scenario.methods if "site_mean" in method.spreads]
    rows = []
    for method in sorted(tested, key=lambda method: -method.spreads["site_mean"].mean):
        comparison, cells_of_test = comparisons.get(method.recipe), [NONE] * 6
        if comparison is not None:
            cells_of_test = _numbers(comparison, metric, method.is_constant)[1:]
        mean, worst = in_unit(method.spreads["site_mean"], metric), _worst(scenario, means, method)
        rows.append([method.label, mean, *cells_of_test, worst])
    title = f"mean over sites, {_title(scenario.main)}"
    return [["method", title, f"vs {base}", *COMPARED[2:], "worst site"], *rows]


def unseen_sites(scenario: ScenarioSummary, others: Sequence[ScenarioSummary]) -> list[list[str]]:
    """The sites that took no part by method, as text; empty if all did.

    `others`: scenarios in which they may have taken part.
    """
    lines = [
        (name, run.recipe, site.samples, site.majority, site.accuracy, run.tested[-1])
        for run in scenario.results
        for name, site in run.unseen.items()
    ]
    scores = [
        (name, run.recipe, score)
        for other in others
        if other is not scenario
        for run in other.results
        for name, score in run.site_scores.items()
    ]
    if not lines:
        return []
    key = ["name", "recipe"]
    here = pd.DataFrame(lines, columns=[*key, "samples", "majority", "zero_shot", "others"])
    there = pd.DataFrame(scores, columns=[*key, "with it"]).groupby(key).mean()
    means = here.groupby(key, sort=False).mean().join(there)
    recipes = [method.recipe for method in scenario.methods]
    rows = [["site", "rows", "method", "majority, %", "zero-shot, %", "others, %"]]
    rows[0].append("where it took part, %")
    for name, recipe in itertools.product(here["name"].unique(), recipes):
        if (name, recipe) in means.index:
            samples, *numbers = means.loc[(name, recipe)]
            shown = (_number(number, scenario.metric) for number in numbers)
            rows.append([one_line(name), f"{samples:.0f}", recipe, *shown])
    return rows


def site_changes(scenario: ScenarioSummary) -> list[tuple[str, str, str]]:
    """(recipe, sites on which it is above the baseline, sites on which it is below), as text: mean
    differences over the seeds that both have, the largest first."""
    scores, rows = _mean_scores(scenario, ("name", "seed")), []
    base = scenario.baseline.recipe if scenario.baseline else BASELINE
    for recipe in on_sites(scenario):
        gains = (scores[recipe] - scores[base]).groupby("name").mean()
        gains = gains.sort_values(key=lambda gain: -gain.abs(), kind="stable")
        above, below = ([*gains.index[sign * gains > TINY]] for sign in (1, -1))
        rows.append((recipe, _listed(above), _listed(below)))
    return rows


def _listed(names: Sequence[str]) -> str:
    """`2 (site 1, site 2)`; the number alone for none, and no more names than MAX_NAMES."""
    shown = [short(name) for name in names[:MAX_NAMES]]
    if names[MAX_NAMES:]:
        shown.append(f"and {len(names) - MAX_NAMES} more")
    return f"{len(names)} ({', '.join(shown)})" if names else "0"


def _worst(scenario: ScenarioSummary, means: pd.DataFrame, method: MethodSummary) -> str:
    """The owner with the lowest mean score over the seeds, and the score; "" without any.

    `means`: of `_mean_scores`.
    """
    scores = means[method.recipe].dropna()
    if scores.empty:
        return ""
    name = scores.idxmin()
    client = f"client {name}" if name.isdecimal() else short(name)
    return f"{client}: {scenario.metric.number(scores[name])}"


def in_brief(scenario: ScenarioSummary) -> list[list[str]]:
    """The columns of `cells` that answer which method is best, with the verdicts against the
    baseline.

    The worst client is that with the lowest mean in `by_site`, if clients have names.
    """
    rows = _rows(scenario)
    header = [t for t in rows[0] if t in ("method", "seeds") or t.startswith(BRIEF)]
    _, _, against_base, worst, _ = header
    tables, means = compared(scenario)[: scenario.baseline is not None], _mean_scores(scenario)
    verdicts = {line[0]: line[-1] for _, table in tables for line in table[1:]}
    for method, row in zip(scenario.methods, rows, strict=False):  # then the constant answers
        if method.recipe in verdicts and row[against_base] != SAME:
            row[against_base] += f", {verdicts[method.recipe]}"
        row[worst] = _worst(scenario, means, method) or row[worst]
    body = [[row[title] for title in header] for row in rows]
    header[3] = worst if means.empty else worst.replace("client", "on own tests")
    return [header, *body]


def _row(
    scenario: ScenarioSummary,
    method: MethodSummary,
    best: Comparison | None,
    with_base: Comparison | None,
) -> dict[str, str]:
    """A method's cells by the title of their column.

    The noisy test has a column only where clients have noise; each metric of the user has one.
    `best`: against the best mean; `with_base`: against the baseline.
    """
    base, numbers, title = scenario.baseline, method.spreads, _title(scenario.main)
    is_equal = with_base is not None and (with_base.same or with_base.same_predictions)

    def cell(column: str, sign: str = "") -> str:
        return in_unit(numbers.get(column), scenario.metric, sign)

    noisy = any("noisy_test" in other.spreads for other in scenario.methods)
    return {
        "method": method.label,
        f"last round, {title}": cell("final"),
        f"last 5, {title}": cell("last_5_rounds"),
        **_beside(scenario, method),
        "rank": f"{method.rank}{best.mark if best else ''}" if method.rank else NONE,
        f"vs {base.recipe if base else BASELINE}": (
            SAME if is_equal else cell("vs_baseline", sign="+")
        ),
        f"worst client, {title}": cell("worst_client"),
        **({f"noisy test, {title}": cell("noisy_test")} if noisy else {}),
        **{name: plus_minus(method.metrics.get(name), 4) for name in _own_metrics(scenario)},
        "MiB total": mib(numbers["traffic_total_bytes"].mean),
        "seeds": str(len(method.seeds)),
    }


def _beside(scenario: ScenarioSummary, method: MethodSummary) -> dict[str, str]:
    """The cells of the metrics beside the main one."""
    numbers = method.spreads
    if scenario.main == "accuracy":
        return {
            "balanced, %": percent(numbers.get("balanced_accuracy")),
            "macro-F1, %": percent(numbers.get("macro_f1")),
        }
    return {_title(name): in_unit(numbers.get(name), metric_of(name)) for name in scenario.others}


def _own_metrics(scenario: ScenarioSummary) -> list[str]:
    """The names of the user's metrics."""
    return [*dict.fromkeys(name for method in scenario.methods for name in method.metrics)]


def compared(scenario: ScenarioSummary) -> list[tuple[str, list[list[str]]]]:
    """(the other method, table as text) of the comparisons with the baseline and with the best
    method."""
    constant = {method.recipe for method in scenario.methods if method.is_constant}
    tables = []
    for other in dict.fromkeys(filter(None, (scenario.baseline, scenario.best))):
        tests = against(scenario, other).values()
        rows = [_numbers(test, scenario.metric, test.recipe in constant) for test in tests]
        tables += [(other.recipe, [[*COMPARED], *rows])] if rows else []
    return tables


def _numbers(comparison: Comparison, metric: Metric, is_constant: bool) -> list[str]:
    """A comparison's cells. A method that is no better than a constant answer is not praised."""
    verdict = comparison.verdict
    if is_constant and verdict == "better":
        verdict = "above, but with a warning"
    if not comparison.differences:
        return [comparison.recipe, *[NONE] * 5, verdict]
    ends = comparison.interval
    interval = " to ".join(points(end, metric) for end in ends) if ends else NONE
    ps = (
        NONE if p is None else f"{p:.3f}" if p >= 0.001 else "<0.001"
        for p in (comparison.p, comparison.holm_p)
    )
    higher = f"{comparison.higher} of {len(comparison.differences)}"
    return [comparison.recipe, points(comparison.mean, metric), interval, *ps, higher, verdict]


def summary_csv(scenarios: Iterable[ScenarioSummary]) -> str:
    """Every number of the tables, unrounded: accuracies as fractions, traffic in bytes; empty where
    unknown."""
    rows = []
    for scenario in scenarios:
        with_others = {
            "vs_baseline": against(scenario, scenario.baseline),
            "vs_best": against(scenario, scenario.best),
        }
        site_columns = ["site_mean"] if scenario.has_site_tests else []
        if site_columns:
            with_others["sites_vs_baseline"] = on_sites(scenario)
        for method in scenario.methods:
            row: dict[str, Any] = {
                **({} if scenario.main == "accuracy" else {"metric": scenario.main}),
                "scenario": scenario.name,
                "recipe": method.recipe,
                "composition": method.composition,
                "rank": method.rank,
                "rounds": method.rounds,
                "baseline": scenario.baseline.recipe if scenario.baseline else "",
                "one_class_seeds": " ".join(map(str, method.one_class)),
            }
            further = [
                *site_columns,
                *scenario.others,
                *(f"{METRIC}{name}" for name in _own_metrics(scenario)),
            ]
            for column in (*COLUMNS, *further):
                numbers = method.spreads.get(column) or (None, None, 0)
                row |= {f"{column}_{part}": x for part, x in zip(PARTS, numbers, strict=True)}
            for other, comparisons in with_others.items():
                test = comparisons.get(method.recipe)
                numbers = (*(test.interval or (None,) * 2), test.p, test.holm_p) if test else ()
                for part, value in itertools.zip_longest(TESTS, numbers):
                    # Ten digits, so that they don't depend on the machine's exponential function.
                    row[f"{other}_{part}"] = None if value is None else float(f"{value:.10g}")
            rows.append(row)
    return str(pd.DataFrame(rows).to_csv(index=False))


def headline(scenarios: Sequence[ScenarioSummary]) -> Mapping[str, Mapping[str, float]]:
    """The numbers that DVC shows, by name of the recipe; `best` has the best accuracy.

    Main metric, that of the worst client, difference to the baseline (fractions) and traffic of the
    whole run in MiB, with six digits; unknown numbers are left out. Few, with short names, so that
    DVC's tables fit a terminal. The scenario is part of the name if there are several.
    """
    files, best = dict[str, Mapping[str, float]](), dict[str, float]()
    for scenario in scenarios:
        comparisons = against(scenario, scenario.baseline)
        prefix = f"{scenario.name}-" if len(scenarios) > 1 else ""
        for method in scenario.methods:
            with_base, spreads = comparisons.get(method.recipe), method.spreads
            final = method.final.mean
            numbers = {
                scenario.main: final,
                "worst": spreads["worst_client"].mean if "worst_client" in spreads else None,
                "gain": with_base.mean if with_base and with_base.differences else None,
                "mib": spreads["traffic_total_bytes"].mean / MIB,
            }
            files[f"{prefix}{method.recipe}"] = rounded = {
                # What the difference of equal numbers may be is 0.
                name: float(f"{x:.6g}") if abs(x) > TINY * abs(final) else 0.0
                for name, x in numbers.items()
                if x is not None
            }
            if method.rank == 1:
                best[f"{prefix}best"] = rounded[scenario.main]
    return {**files, "best": best} if best else files


def curves_csv(scenario: ScenarioSummary, recipes: Sequence[str]) -> str:
    """Test accuracy of each recipe, mean over seeds, by round, for `dvc plots`: fractions.

    Empty where it is not known of all seeds.
    """
    means = {}
    for recipe in dict.fromkeys(run.recipe for run in scenario.results):
        frame = courses(run for run in scenario.results if run.recipe == recipe)
        means[recipe] = frame.apply(fmean, axis=1)
    return str(pd.DataFrame(means).reindex(columns=recipes).to_csv(index_label="round"))
