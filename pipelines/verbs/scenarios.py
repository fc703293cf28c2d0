"""How uneven the scenarios of params.yaml are: a Markdown table, statistic x scenario, mean over
the seeds.

It reads the files of the partition stage. `noniid partition` runs that stage and shows the table.
One sentence for each scenario says what that means.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from tabulate import tabulate

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment import cache, config
from fedml_noniid.pipelines.experiment.scenario import OF_RUN, SKEWS, pairs

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
OF_SKEWS = {
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
TITLES = COLUMNS | OF_SKEWS
# Up to these numbers, clients count as alike. A client's gradient differs from that of all clients
# by at most its label distance times the largest difference between the gradients of two classes:
# up to 0.1, less than a tenth of what the classes differ by is left to correct.
MAX_LABEL_DISTANCE = 0.1
MAX_GINI = 0.2  # half of the clients have at least 30 % of the samples
MAX_SHIFT = 0.05  # the clients' class means scatter by 0.22 deviations of a class
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
            cache.check(path.parent)
            partition = described(settings.scenarios[name])
            rows.append({"scenario": name, "partition": partition, **json.loads(path.read_text())})
        else:
            missing.append(f"{name}-{seed}")
    if not rows:
        raise UserError(
            f"{root / 'partitions'}: holds no partition of params.yaml; run `noniid partition` "
            "first"
        )
    return pd.DataFrame(rows), missing


def described(scenario: config.Scenario) -> str:
    """`dirichlet (alpha 0.5), noise (sigma 0.1, form level)`."""
    options = f" ({pairs(scenario.options)})" if scenario.options else ""
    return ", ".join([f"{scenario.partition}{options}", *scenario.described(*SKEWS, *OF_RUN)])


def markdown(frame: pd.DataFrame, missing: Sequence[str]) -> str:
    """The table, a line per statistic and a column per scenario, and its notes."""
    scenarios = dict(list(frame.groupby("scenario", sort=False)))
    lines = [["partition", *(rows["partition"].iloc[0] for rows in scenarios.values())]]
    for key, (title, decimals) in TITLES.items():
        if key not in frame:
            continue
        lines.append([title, *(_cell(rows[key].dropna(), decimals) for rows in scenarios.values())])
    notes = [NOTE] + ([f"Not made, so not in the table: {', '.join(missing)}."] if missing else [])
    aligned = ["left", *["right"] * len(scenarios)]
    header = ["statistic", *scenarios]
    cells = tabulate(lines, header, "pipe", disable_numparse=True, colalign=aligned)
    return "\n\n".join([cells, *notes]) + "\n"


def in_words(table: pd.DataFrame, settings: config.Config) -> list[str]:
    """One sentence for each scenario: that its clients are alike, or what is uneven and how much.

    The statistics are means over the seeds.
    """
    return [
        _sentence(name, settings.scenarios[name], rows.mean(numeric_only=True))
        for name, rows in table.groupby("scenario", sort=False)
    ]


def _sentence(name: str, scenario: config.Scenario, numbers: pd.Series[float]) -> str:
    distance = numbers["label_distance_mean"]
    # The distance that clients of this size have by chance, if classes are equally frequent.
    chance = math.sqrt((numbers["classes"] - 1) / (2 * math.pi * numbers["size_mean"]))
    labels = f"label distance {distance:.2f}; by chance alone about {chance:.2f}"
    uneven = []
    # Skew and chance add up like the legs of a right triangle.
    is_label_skew = distance**2 > chance**2 + MAX_LABEL_DISTANCE**2
    if is_label_skew:
        uneven.append(f"labels ({labels})")
    if numbers["size_gini"] > MAX_GINI:
        sizes = f"{numbers['size_min']:,.0f} to {numbers['size_max']:,.0f}"
        uneven.append(f"sizes ({sizes} samples, Gini {numbers['size_gini']:.2f})")
    if numbers.get("feature_shift", 0.0) > MAX_SHIFT:
        uneven.append(f"features (shift {numbers['feature_shift']:.2f})")
    uneven += scenario.described(*SKEWS)
    if not uneven:
        gain = "methods for non-IID data can gain little"
        return f"{name}: your clients are alike ({labels}): {gain}."
    alike = "" if is_label_skew else f"; their labels are alike ({labels})"
    return f"{name}: your clients are uneven in {', '.join(uneven)}{alike}."


def _cell(values: pd.Series[float], decimals: int) -> str:
    """Mean and deviation over the seeds."""
    if not len(values):
        return ""
    mean, std = values.mean(), values.std()
    # The same numbers, summed in another order, differ in their last bits.
    agree = len(values) == 1 or std <= 1e-12 * abs(mean)
    return f"{mean:,.{decimals}f}" + ("" if agree else f" ± {std:,.{decimals}f}")
