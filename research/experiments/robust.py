"""Writes the tables of docs/results/robust.md, of the finished runs of robust.yaml: `python -m
research.experiments.robust`.

robust-runs.csv has a line per run, robust-rounds.csv one per round. robust.csv has a line per skew,
attack and rule: the mean accuracy, and its difference to FedAvg under the same attack and to the
same rule without one, paired by seed, with 95 % intervals of the t test. The tables go to standard
output.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from scipy.stats import t
from tabulate import tabulate

from fedml_noniid.pipelines.experiment import results

TO = Path("docs/results")
RATE = "metric/backdoor_rate"


def runs(root: Path) -> pd.DataFrame:
    """A line per run: final accuracy and success of the backdoor, as fractions."""
    rows = [
        {
            **dict(zip(("skew", "attack"), run.scenario.split("-"), strict=True)),
            "rule": run.recipe,
            "seed": run.seed,
            "accuracy": run.tested[-1],
            "backdoor_rate": run.evaluation.get(RATE),
            "sha256": run.tags["weights_sha256"],
        }
        for run in results.read(root)
    ]
    return pd.DataFrame(rows).sort_values(["skew", "attack", "rule", "seed"])


def rounds(root: Path) -> pd.DataFrame:
    """A line per run and round: test accuracy, as a fraction."""
    frames = [
        pd.DataFrame(
            {
                "scenario": run.scenario,
                "rule": run.recipe,
                "seed": run.seed,
                "round": range(1, len(run.tested) + 1),
                "test_accuracy": run.tested,
            }
        )
        for run in results.read(root)
    ]
    return pd.concat(frames)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A line per skew, attack and rule."""
    by_seed = table.set_index(["skew", "attack", "rule", "seed"])["accuracy"]
    rows = []
    for (skew, attack, rule), group in table.groupby(["skew", "attack", "rule"], sort=False):
        row = {"skew": skew, "attack": attack, "rule": rule, "seeds": len(group)}
        row |= {
            "accuracy": group["accuracy"].mean(),
            "backdoor_rate": group["backdoor_rate"].mean(),
        }
        others = {"vs_fedavg": (skew, attack, "fedavg"), "vs_no_attack": (skew, "none", rule)}
        for name, other in others.items():
            gain = (by_seed[skew, attack, rule] - by_seed[other]).dropna()
            half = float(t.ppf(0.975, len(gain) - 1)) * gain.std() / len(gain) ** 0.5
            row |= {name: gain.mean(), f"{name}_low": gain.mean() - half}
            row[f"{name}_high"] = gain.mean() + half
        rows.append(row)
    return pd.DataFrame(rows)


def markdown(means: pd.DataFrame, skew: str, rules: list[str], attacks: list[str]) -> str:
    """Accuracy in %, and in brackets the difference to FedAvg in points; the backdoor's rate in
    %."""
    lines = []
    for rule in rules:
        line = [rule]
        for attack in attacks:
            (mean,) = means.query(
                "skew == @skew and attack == @attack and rule == @rule"
            ).itertuples()
            half = 100 * (mean.vs_fedavg_high - mean.vs_fedavg)
            gain = f" ({100 * mean.vs_fedavg:+.1f} ± {half:.1f})" if rule != "fedavg" else ""
            line.append(f"{100 * mean.accuracy:.1f}{gain}")
            if attack == "backdoor":
                line.append(f"{100 * mean.backdoor_rate:.0f}")
        lines.append(line)
    at = attacks.index("backdoor") + 1
    head = ["rule", *attacks[:at], "its rate", *attacks[at:]]
    return str(tabulate(lines, head, "pipe", disable_numparse=True))


def main() -> None:
    """Writes the files."""
    table = runs(Path())
    means = summary(table)
    rounds(Path()).to_csv(TO / "robust-rounds.csv", index=False, float_format="%.6g")
    table.to_csv(TO / "robust-runs.csv", index=False, float_format="%.10g")
    means.to_csv(TO / "robust.csv", index=False, float_format="%.6g")
    order = ("fedavg", "median", "trimmed_mean", "krum", "multi-krum", "rfa", "centred_clipping")
    rules = [*order, "bucketing+median", "bucketing+krum"]
    attacks = ["none", "label_flip", "backdoor", "sign_flip", "alie", "inner_product", "gaussian"]
    for skew in ("iid", "dirichlet05", "dirichlet01"):
        sys.stdout.write(f"\n## {skew}\n\n{markdown(means, skew, rules, attacks)}\n")


if __name__ == "__main__":
    main()
