"""How uneven the scenarios of params.yaml are: a Markdown table, statistic x scenario, mean over
the seeds.

It reads the files of the partition stage. `noniid partition` runs that stage and shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from fedml_noniid.pipelines.experiment import config, results
from fedml_noniid.pipelines.reporting import text
from fedml_noniid.pipelines.reporting.summary import Spread, spread
from fedml_noniid.plugins.core.errors import UserError

# Key of statistics.json -> title of the column, decimals.
COLUMNS = {
    "clients": ("clients", 0),
    "samples": ("samples", 0),
    "samples_left_out": ("left out", 0),
    "size_min": ("smallest", 0),
    "size_mean": ("mean size", 1),
    "size_max": ("largest", 0),
    "size_gini": ("Gini of sizes", 3),
    "classes_per_client_mean": ("classes per client", 2),
    "entropy_mean": ("entropy, bits", 2),
    "entropy_min": ("lowest entropy", 2),
    "label_distance_mean": ("label distance", 3),
    "label_distance_max": ("largest label distance", 3),
    "label_hellinger_mean": ("Hellinger distance", 3),
}
# For scenarios with these skews only; nothing of the first line for text.
SKEWS = {
    "feature_shift": ("feature shift", 3),
    "feature_spread": ("feature spread", 3),
    "class_clarity": ("clarity", 3),
    "noise_mean": ("mean noise", 3),
    "noise_max": ("most noise", 3),
    "label_noise_mean": ("wrong labels", 3),
    "label_noise_max": ("most wrong labels", 3),
    "rotations": ("angles", 0),
    "drifting": ("clients that drift", 0),
}
TITLES = COLUMNS | SKEWS
NOTE = (
    "± is the sample standard deviation over the seeds; none where all seeds agree. Gini of "
    "sizes: 0 if all clients "
    "have equally many samples. Entropy: of a client's labels. Label distance: half the sum "
    "over classes of the "
    "absolute difference between a client's class fractions and those of all clients together, "
    "from 0 (alike) to 1. "
    "Both are means over clients. docs/results/skew-runs.md explains the Hellinger distance, "
    "feature shift, feature spread and clarity."
)


@dataclass(frozen=True)
class Row:
    """One scenario: its partition in words, and each statistic over its seeds."""

    scenario: str
    partition: str
    statistics: Mapping[str, Spread]


def read(root: Path, settings: config.Config) -> tuple[list[Row], list[str]]:
    """(scenarios of params.yaml, missing partitions).

    UserError if all partitions are missing, or for a bad file.
    """
    rows, missing = [], []
    for name in settings.scenario_names:
        made = []
        for seed in settings.seeds:
            path = root / "partitions" / f"{name}-{seed}" / "statistics.json"
            if path.is_file():
                made.append(_statistics(path))
            else:
                missing.append(f"{name}-{seed}")
        if made:
            spreads = {
                key: spread([found[key] for found in made if key in found]) for key in TITLES
            }
            known = {key: value for key, value in spreads.items() if value is not None}
            rows.append(Row(name, described(settings.scenarios[name]), known))
    if not rows:
        raise UserError(
            f"{root / 'partitions'}: holds no partition of params.yaml; run `noniid partition` "
            "first"
        )
    return rows, missing


def described(scenario: config.Scenario) -> str:
    """`dirichlet (alpha 0.5), noise level 0.1, images rotated by 0, 90 degrees`."""
    options = ", ".join(f"{key} {value}" for key, value in scenario.options.items())
    noise = (
        "" if scenario.noise is None else f", noise {scenario.noise.form} {scenario.noise.sigma:g}"
    )
    others = (scenario.label_noise, scenario.rotation, scenario.drift, scenario.availability)
    words = "".join(f", {other.words}" for other in others if other is not None)
    return scenario.partition + (f" ({options})" if options else "") + noise + words


def markdown(rows: Sequence[Row], missing: Sequence[str]) -> str:
    """The table, a line per statistic and a column per scenario, and its notes."""
    lines = [
        ["statistic", *(row.scenario for row in rows)],
        ["partition", *(row.partition for row in rows)],
    ]
    lines += [
        [TITLES[key][0], *(_cell(row.statistics.get(key), key) for row in rows)]
        for key in _keys(rows)
    ]
    notes = [NOTE] + ([f"Not made, so not in the table: {', '.join(missing)}."] if missing else [])
    aligned = ["left", *["right"] * len(rows)]
    cells = tabulate(lines[1:], lines[0], "pipe", disable_numparse=True, colalign=aligned)
    return "\n\n".join([cells, *notes]) + "\n"


def table(rows: Sequence[Row]) -> bytes:
    """All numbers unrounded as CSV, one line per scenario.

    With one seed the standard deviation is empty.
    """
    keys = _keys(rows)
    header = [
        "scenario",
        "partition",
        "seeds",
        *(f"{key}_{part}" for key in keys for part in ("mean", "std")),
    ]
    lines: list[list[object]] = []
    for row in rows:
        cells = (part for key in keys for part in (row.statistics.get(key) or (None, None))[:2])
        lines.append(
            [row.scenario, row.partition, max(found.n for found in row.statistics.values()), *cells]
        )
    return text.as_csv(header, lines, digits=None)


def _statistics(path: Path) -> dict[str, float]:
    content = results.record(path)
    found = results.numbers(content)
    for key in COLUMNS:
        if key not in found:
            problem = (
                "is missing" if key not in content else f"is {content[key]!r}, expected a number"
            )
            raise UserError(f"{path}: {key} {problem}; {results.RERUN}")
    return found


def _keys(rows: Sequence[Row]) -> list[str]:
    """The columns with a number in at least one scenario."""
    return [key for key in TITLES if any(key in row.statistics for row in rows)]


def _cell(found: Spread | None, key: str) -> str:
    if found is None:
        return ""
    decimals = TITLES[key][1]
    # The same numbers, summed in another order, differ in their last bits.
    if (found.std or 0) <= 1e-12 * abs(found.mean):
        return f"{found.mean:,.{decimals}f}"
    return f"{found.mean:,.{decimals}f} ± {found.std:,.{decimals}f}"
