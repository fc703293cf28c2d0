"""What the claims' studies cost: CPU hours, hours of a GPU as reckoned, bytes.

A section of the page.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedml_noniid.pipelines.experiment.results import table
from fedml_noniid.pipelines.papers.claims.runs import Ran
from fedml_noniid.pipelines.papers.claims.spec import Claims
from fedml_noniid.pipelines.papers.claims.verdict import Verdict
from fedml_noniid.pipelines.reporting.text import NONE, markdown

BUDGET = Path("docs") / "results" / "gpu-budget.csv"  # in a checkout; `noniid budget` makes it
LAUNCH = 5e-6  # seconds, of one kernel: what a busy host needs to launch it
SAYS = f"""\
- CPU hours: the rounds' wall seconds of one core, all runs of the study that claims read; other \
work is in them.
- GPU hours: reckoned, never measured. Small networks on a GPU wait for the host, so a step \
takes its launches times
  {1e6 * LAUNCH:g} us. Launches are those of the sequential engine (gpu-budget.md), one client \
after another.
- MiB: really sent in one run, both ways, mean over seeds; from the method with the least to the \
one with the most."""


def section(found: Sequence[Verdict], files: Mapping[str, Claims], root: Path) -> str:
    """The table of all studies that have run."""
    launches = _launches(root)
    rows = [["paper", "study", "runs", "CPU hours", "GPU hours, reckoned", "MiB of a run"]]
    for paper, claims in files.items():
        for study in claims.studies:
            own = [
                one for one in found if (one.named.paper, one.named.claim.study) == (paper, study)
            ]
            runs = {ran.item: ran for one in own for ran in one.runs if not ran.diverged}
            if runs:
                hours = sum(ran.seconds or 0 for ran in runs.values()) / 3600
                rows.append(
                    [
                        paper,
                        study,
                        str(len(runs)),
                        f"{hours:.2g}",
                        _gpu(claims, study, runs, launches),
                        _mib(claims, study, runs),
                    ]
                )
    return f"## Costs\n\n{SAYS}\n\n{markdown(rows)}" if len(rows) > 1 else ""


def _launches(root: Path) -> dict[str, float]:
    """Launches of a step by method; empty without the table."""
    path = root / BUDGET
    lines = table(path) if path.is_file() else []
    return {
        line["recipe"]: float(line["launches_per_step"])
        for line in lines
        if line["engine"] == "sequential"
    }


def _gpu(claims: Claims, study: str, runs: Mapping[str, Ran], launches: Mapping[str, float]) -> str:
    if not launches:
        return NONE
    content, seconds = claims.studies[study].content, 0.0
    for scenario in content["scenario_names"]:
        steps = claims.images(study, scenario) / content["train"]["batch_size"]
        for recipe in content["recipe_names"]:
            methods = str((content["recipes"][recipe] or {}).get("recipe", recipe)).split("+")
            base = launches["fedavg"]
            each = base + sum(launches.get(method, base) - base for method in methods)
            seconds += (
                steps
                * each
                * LAUNCH
                * sum(f"{scenario}-{recipe}-{seed}" in runs for seed in content["seeds"])
            )
    return f"{seconds / 3600:.2g}"


def _mib(claims: Claims, study: str, runs: Mapping[str, Ran]) -> str:
    content, means = claims.studies[study].content, []
    for scenario in content["scenario_names"]:
        for recipe in content["recipe_names"]:
            items = (runs.get(f"{scenario}-{recipe}-{seed}") for seed in content["seeds"])
            sent = [ran.mib for ran in items if ran is not None and ran.mib is not None]
            means += [statistics.fmean(sent)] if sent else []
    if not means:
        return NONE
    low, high = f"{min(means):.4g}", f"{max(means):.4g}"
    return low if low == high else f"{low} to {high}"
