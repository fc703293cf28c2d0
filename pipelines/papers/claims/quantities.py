"""The number that each seed gives to a claim, from the runs' own files."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from scipy.stats import linregress

from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.papers.claims.runs import Ran
from fedml_noniid.pipelines.papers.claims.spec import Claim, Named
from fedml_noniid.pipelines.papers.targets.measured import ALLOWED, Measured, number
from fedml_noniid.plugins.core.errors import UserError

# Patterns of statistics beside those of pipelines/papers/targets/measured.py.
REACH = re.compile(
    r"rounds_to:(0\.\d+)"
)  # an accuracy; the number of rounds plus 1 where it is never reached
MEAN = re.compile(
    r"(mean|first\d+):(\w+)"
)  # the mean of a column over all rounds, or over the first
RECORDED = re.compile(
    r"recorded:([\w/]+):(\d+)"
)  # the mean over the rounds of one client's recorded number
N_OVER_E = "n_over_e"  # the mean over the rounds of the server's step by the clients' mean step
DRIFT = "neuron_drift"
MORE = (
    f"{ALLOWED}, rounds_to:0.9, mean:COLUMN, first5:COLUMN, recorded:KEY:CLIENT, {N_OVER_E}, "
    f"{DRIFT}"
)
COUNTED = re.compile(
    r"traffic_mib\w*|bytes_(up|down)|\w+_delta_bytes|delta_bytes\w*"
)  # the seed plays no part
BESIDE = "beside"  # the role of a number that is shown and not tested
COUNT = re.compile(r"rounds_to:.*")  # whole numbers


class Cell(NamedTuple):
    """A run that a number comes from."""

    role: str  # of, less, or the name in `over`
    scenario: str
    recipe: str
    run: Ran
    value: float


class Part(NamedTuple):
    """One of the numbers that must all be as the claim says, by seed."""

    words: str  # "sim0: rfedavg_plus less fedavg"
    values: Mapping[int, float]
    cells: Mapping[int, tuple[Cell, ...]]

    @property
    def is_tested(self) -> bool:
        """False for a number that is only shown beside a claim."""
        return all(cell.role != BESIDE for cells in self.cells.values() for cell in cells)


def is_counted(claim: Claim) -> bool:
    """Whether the number is counted, so that no test over seeds is needed."""
    return claim.contrast == "same" or COUNTED.fullmatch(claim.statistic) is not None


def never(named: Named, part: Part) -> tuple[set[str], set[str]]:
    """The runs of a part that never reach the accuracy of `rounds_to`, and all of its runs.

    Both are empty for another statistic.
    """
    if REACH.fullmatch(named.claim.statistic) is None:
        return set(), set()
    most = named.claim.scale * (named.study.content["train"]["rounds"] + 1)
    values = {cell.run.item: cell.value for cells in part.cells.values() for cell in cells}
    return {item for item, value in values.items() if value >= most}, set(values)


def step(claim: Claim) -> float:
    """The smallest step of the tested number; 0 if it is none to speak of."""
    return (
        abs(float(claim.scale))
        if COUNT.fullmatch(claim.statistic) and claim.contrast != "trend"
        else 0.0
    )


def parts(named: Named, measured: Measured) -> list[Part]:
    """The numbers of a claim by seed. A seed counts where all runs of a part have the statistic."""
    claim = named.claim
    if claim.contrast == "trend":
        return list(_trends(claim, measured))
    found = []
    for scenario in claim.scenarios:
        for words, roles, number_of in _contrasts(claim):
            places = [(role, scenario, recipe) for role, recipe in roles]
            found.append(_part(claim, measured, f"{scenario}: {words}", places, number_of))
    return found


Roles = list[tuple[str, str]]  # (role, recipe)
Combine = Callable[[Sequence[Cell]], float]


def _contrasts(claim: Claim) -> Iterator[tuple[str, Roles, Combine]]:
    """(words, roles, number of the cells) of each comparison within a scenario."""
    first = claim.of[0] if claim.of else ""
    if claim.contrast == "level":
        yield first, [("of", first)], lambda cells: cells[0].value
    elif claim.contrast == "order":
        for one, next_ in zip(claim.of, claim.of[1:], strict=False):
            yield f"{one} less {next_}", [("of", one), ("less", next_)], _difference
    else:
        words, number_of = {
            "difference": ("less", _difference),
            "ratio": ("by", _ratio),
            "same": ("same weights as", _same),
        }[claim.contrast]
        for other in claim.less:
            yield f"{first} {words} {other}", [("of", first), ("less", other)], number_of


def _difference(cells: Sequence[Cell]) -> float:
    return cells[0].value - cells[1].value


def _ratio(cells: Sequence[Cell]) -> float:
    return cells[0].value / cells[1].value if cells[1].value else math.nan


def _same(cells: Sequence[Cell]) -> float:
    return float(cells[0].run.weights_sha256 == cells[1].run.weights_sha256)


def _trends(claim: Claim, measured: Measured) -> Iterator[Part]:
    """The slope over `over` of a method's number, or of its difference to another's, seed by
    seed."""
    x, pairs = list(map(float, claim.over.values())), len(claim.less)

    def slope(cells: Sequence[Cell]) -> float:
        y = _gains(cells, pairs)
        return float(linregress(x, y).slope) if max(y) > min(y) else 0.0

    if claim.of:
        recipes = (("of", claim.of), ("less", claim.less))
        places = [
            (f"{role} {name}", name, own[0]) for name in claim.over for role, own in recipes if own
        ]
        yield _part(
            claim, measured, f"slope of {' less '.join((*claim.of, *claim.less))}", places, slope
        )
        return
    for scenario in claim.scenarios:
        places = [(f"of {name}", scenario, name) for name in claim.over]
        yield _part(claim, measured, f"{scenario}: slope", places, slope)


def _gains(cells: Sequence[Cell], others: int) -> list[float]:
    if not others:
        return [cell.value for cell in cells]
    return [one.value - other.value for one, other in zip(cells[::2], cells[1::2], strict=True)]


def beside(named: Named, measured: Measured) -> list[Part]:
    """The numbers that are shown beside a claim: statistics of its runs."""
    found = []
    for words, name in named.claim.beside.items():
        shown = named.claim.model_copy(update={"statistic": name, "scale": 1, "contrast": "level"})
        for scenario, recipe in named.claim.cells:
            said = f"{scenario}: {recipe}: {words}"
            found.append(
                _part(
                    shown,
                    measured,
                    said,
                    [(BESIDE, scenario, recipe)],
                    lambda cells: cells[0].value,
                )
            )
    return found


def _part(
    claim: Claim,
    measured: Measured,
    words: str,
    roles: Sequence[tuple[str, str, str]],
    combine: Combine,
) -> Part:
    by_role: list[dict[int, Cell]] = []
    for role, scenario, recipe in roles:
        address = {"study": claim.study, "scenario": scenario, "recipe": recipe}
        cells = {}
        for run in measured.runs(address):
            value = (
                0.0
                if claim.contrast == "same"
                else statistic(claim.statistic, run, measured, claim.study)
            )
            if value is not None:
                cells[run.seed] = Cell(
                    role, scenario, recipe, Ran.of(claim.study, run), claim.scale * value
                )
        by_role.append(cells)
    seeds = sorted(set.intersection(*(set(cells) for cells in by_role)))
    found = {seed: tuple(cells[seed] for cells in by_role) for seed in seeds}
    values = {seed: combine(cells) for seed, cells in found.items()}
    kept = {seed: value for seed, value in values.items() if math.isfinite(value)}
    return Part(words, kept, {seed: found[seed] for seed in kept})


def statistic(name: str, run: ItemResult, measured: Measured, study: str) -> float | None:
    """A statistic of one run. None if the run lacks it. UserError for an unknown pattern."""
    if reach := REACH.fullmatch(name):
        rounds = [int(row["round"]) for row in run.rows if row["test_accuracy"] >= float(reach[1])]
        return float(min(rounds, default=len(run.rows) + 1))
    if mean := MEAN.fullmatch(name):
        values = run.column(mean[2])
        count = len(values) if mean[1] == "mean" else int(mean[1].removeprefix("first"))
        return statistics.fmean(values[:count]) if values[:count] else None
    if name == N_OVER_E:
        fractions = [
            r["update_norm_server"] / r["update_norm_client"]
            for r in run.rows
            if r["update_norm_client"]
        ]
        return statistics.fmean(fractions) if fractions else None
    if recorded := RECORDED.fullmatch(name):
        tensor = measured.recorded(run, study).get(recorded[1])
        if tensor is None or tensor.shape[-1] <= int(recorded[2]):
            return None
        return float(tensor[..., int(recorded[2])].double().mean())
    if name == DRIFT:
        return _drift(run, measured, study)
    if ":" in name:
        raise UserError(f"statistic {name!r} is unknown; allowed: {MORE}")
    return number(run, name)


def _drift(run: ItemResult, measured: Measured, study: str) -> float | None:
    """FedNLR's table 4 over all clients: the mean change of bound neurons' activations on the
    classes that they lack.

    A neuron is bound to the class on which its mean activation is the highest before the last
    round's training. Every client has one class. None if no neuron is bound to a class that a
    client lacks.
    """
    recorded, held = measured.recorded(run, study), measured.held(study, run.scenario, run.seed)
    if held is None or "fednlr/before" not in recorded:
        return None
    before, after = (
        recorded[f"fednlr/{when}"][-1].double().numpy() for when in ("before", "after")
    )  # [M, C, H]
    changes: list[float] = []
    for row, client in enumerate(recorded["round/clients"][-1].tolist()):
        bound = before[row].argmax(0)  # [H], a class
        dead = before[row].max(0) <= 0
        for neuron, label in enumerate(bound):
            if not dead[neuron] and held.counts[client, label] == 0:
                changes.append(float(after[row, label, neuron] - before[row, label, neuron]))
    return statistics.fmean(changes) if changes else None
