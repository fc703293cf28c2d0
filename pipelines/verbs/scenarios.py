"""How uneven the scenarios of params.yaml are: a Markdown table, statistic x scenario, mean over
the seeds.

It reads the files of the partition stage. `noniid partition` runs that stage and shows the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from tabulate import tabulate

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment import config, results

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
    "Hellinger distance: another distance of the same two mixes of classes, from 0 to 1. All three "
    "are means over clients. Feature shift: the fraction of the variance inside classes that lies "
    "between clients, 0 if a class looks alike everywhere. Feature spread: how unequally the "
    "clients' samples of a class scatter, 0 if equally. Clarity: the fraction of samples that are "
    "nearest to the mean of their own class."
)


def read(root: Path, settings: config.Config) -> tuple[pd.DataFrame, list[str]]:
    """(the statistics of the partitions of params.yaml, a row each; those that are missing).

    UserError if all partitions are missing, or for a bad file.
    """
    rows, missing = [], []
    for name, seed in itertools.product(settings.scenario_names, settings.seeds):
        path = root / "partitions" / f"{name}-{seed}" / "statistics.json"
        if path.is_file():
            partition = described(settings.scenarios[name])
            rows.append({"scenario": name, "partition": partition, **_statistics(path)})
        else:
            missing.append(f"{name}-{seed}")
    if not rows:
        raise UserError(
            f"{root / 'partitions'}: holds no partition of params.yaml; run `noniid partition` "
            "first"
        )
    return pd.DataFrame(rows), missing


def described(scenario: config.Scenario) -> str:
    """`dirichlet (alpha 0.5), noise level 0.1, images rotated by 0, 90 degrees`."""
    options = ", ".join(f"{key} {value}" for key, value in scenario.options.items())
    noise = (
        "" if scenario.noise is None else f", noise {scenario.noise.form} {scenario.noise.sigma:g}"
    )
    others = (scenario.label_noise, scenario.rotation, scenario.drift, scenario.availability)
    words = "".join(f", {other.words}" for other in others if other is not None)
    return scenario.partition + (f" ({options})" if options else "") + noise + words


def markdown(found: pd.DataFrame, missing: Sequence[str]) -> str:
    """The table, a line per statistic and a column per scenario, and its notes."""
    scenarios = dict(list(found.groupby("scenario", sort=False)))
    lines = [["partition", *(rows["partition"].iloc[0] for rows in scenarios.values())]]
    for key in _keys(found):
        title, decimals = TITLES[key]
        lines.append([title, *(_cell(rows[key].dropna(), decimals) for rows in scenarios.values())])
    notes = [NOTE] + ([f"Not made, so not in the table: {', '.join(missing)}."] if missing else [])
    aligned = ["left", *["right"] * len(scenarios)]
    header = ["statistic", *scenarios]
    cells = tabulate(lines, header, "pipe", disable_numparse=True, colalign=aligned)
    return "\n\n".join([cells, *notes]) + "\n"


def _statistics(path: Path) -> dict[str, float]:
    content = results.record(path)
    found = results.numbers(content)
    for key in COLUMNS:
        if key not in found:
            problem = f"is {content[key]!r}, expected a number" if key in content else "is missing"
            raise UserError(f"{path}: {key} {problem}; {results.RERUN}")
    return found


def _keys(found: pd.DataFrame) -> list[str]:
    """The columns with a number in at least one scenario."""
    return [key for key in TITLES if key in found]


def _cell(values: pd.Series[float], decimals: int) -> str:
    """Mean and deviation over the seeds."""
    if not len(values):
        return ""
    mean, std = values.mean(), values.std()
    # The same numbers, summed in another order, differ in their last bits.
    agree = len(values) == 1 or std <= 1e-12 * abs(mean)
    return f"{mean:,.{decimals}f}" + ("" if agree else f" ± {std:,.{decimals}f}")
