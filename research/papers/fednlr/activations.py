"""FedNLR's table 4: the activations of hidden neurons before and after one client trains, for two
methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.types import Ints
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.reporting.figures import Values
from fedml_noniid.pipelines.reporting.text import as_csv
from research.runs import Measured
from research.targets import Built, Target, as_printed

NONE = -1  # stands for the class of a neuron that is bound to no class
HEADER = ("seed", "neuron", "bound_to", "c1_before", "c2_before", "method", "c2_after")


class _Drift(NamedTuple):
    """The last round of one seed: mean activations of classes."""

    seed: int
    accuracy: float  # before the round
    classes: Ints  # of C-1 and C-2
    before: Values  # [2, M], on C-1 and on C-2
    after: Mapping[str, Values]  # by method, [M], on C-2
    bound: Ints  # [M], a class
    strictly: int  # neurons that are bound to a class by definition 1
    same: bool  # all methods start from the same model


def activations(target: Target, measured: Measured) -> Built:
    """Table 4: the hidden neurons' mean activations before and after C-1's training in the last
    round.

    `methods` start from the same model; `clients` are C-1 and C-2. A neuron is bound to the class
    on which its mean is the highest. A neuron that two classes excite alike (a dead one) is bound
    to none.
    """
    spec = target.spec
    source = {"study": spec["study"], "scenario": spec["scenario"]}
    groups = {
        name: measured.group(source | {"recipe": recipe})
        for name, recipe in spec["methods"].items()
    }
    divergences = [
        sentence for name, group in groups.items() for sentence in group.divergence_of(name)
    ]
    runs = {name: {run.seed: run for run in group.runs} for name, group in groups.items()}
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in runs.values())))
    if not seeds:
        missing = tuple(
            name for name, group in groups.items() if not group.runs and not group.diverged
        )
        return Built(
            (), {}, tuple(divergences), missing or (() if divergences else ("a seed of both",))
        )
    drifts = [
        _read(target, measured, {name: by_seed[seed] for name, by_seed in runs.items()})
        for seed in seeds
    ]
    lines = [
        [
            drift.seed,
            m + 1,
            None if bound == NONE else int(bound),
            *map(float, drift.before[:, m]),
            name,
            float(after[m]),
        ]
        for drift in drifts
        for m, bound in enumerate(drift.bound)
        for name, after in drift.after.items()
    ]
    sentences = [
        *divergences,
        f"Shown is seed {seeds[0]}.",
        *(sentence for drift in drifts for sentence in _words(drift)),
    ]
    printed = [["", *map(str, (target.reported or {})["columns"])]]
    for title, values in (target.reported or {})["rows"].items():
        printed.append([str(title), *("" if x is None else as_printed(x) for x in values)])
    files = {"csv": as_csv(HEADER, lines)}
    return Built(_table(drifts[0]), files, tuple(sentences), printed=printed)


def _read(target: Target, measured: Measured, runs: Mapping[str, ItemResult]) -> _Drift:
    study, clients = str(target.spec["study"]), list(target.spec["clients"])
    run = next(iter(runs.values()))
    samples = measured.client_samples(study, run.scenario, run.seed)
    if samples is None:
        raise UserError(f"{target.id}: study {study} has no partition {run.scenario}-{run.seed}")
    for client, n in enumerate((samples.counts > 0).sum(1)):
        if n != 1:
            raise UserError(
                f"{target.id}: client {client} has {n} classes; table 4 needs clients with one "
                "class"
            )
    before, after, bound = {}, {}, {}  # [C, M], of C-1
    for name, run in runs.items():
        recorded = measured.recorded(run, study)
        position = recorded["round/clients"][-1].tolist().index(clients[0])
        before[name], after[name], bound[name] = (
            recorded[f"fednlr/{quantity}"][-1, position]
            for quantity in ("before", "after", "bound")
        )
    start, *others = before.values()
    highest, second = start.topk(2, dim=0).values
    classes = samples.counts.argmax(1)[clients]
    return _Drift(
        run.seed,
        run.rows[-2]["test_accuracy"] if len(run.rows) > 1 else float("nan"),
        classes,
        start[classes].numpy(),
        {name: values[classes[1]].numpy() for name, values in after.items()},
        start.argmax(0).masked_fill(highest == second, NONE).numpy(),
        int(next(iter(bound.values())).any(0).sum()),
        all((start == other).all() for other in others),
    )


def _table(drift: _Drift) -> list[list[str]]:
    """One line per neuron. Neurons that are bound to the class are marked."""
    changes = ((f"on C-2 after C-1, {name}", f"change, {name}") for name in drift.after)
    lines = [
        [
            "neuron",
            "original on C-1",
            "original on C-2",
            *(title for pair in changes for title in pair),
        ]
    ]
    for m, bound in enumerate(drift.bound):
        first, second = ("*" if bound == c else "" for c in drift.classes)
        line = [str(m + 1), f"{drift.before[0, m]:.2f}{first}", f"{drift.before[1, m]:.2f}{second}"]
        for after in drift.after.values():
            line += [
                f"{after[m]:.2f}{second}",
                f"{after[m] - drift.before[1, m]:+.3f}" if second else "",
            ]
        lines.append(line)
    return lines


def _words(drift: _Drift) -> Iterator[str]:
    """Sentences on the claim of table 4, for one seed."""
    classes = f"classes {drift.classes[0]} and {drift.classes[1]}"
    about = f"Seed {drift.seed} ({classes}, accuracy before the round {drift.accuracy:.1%})"
    if not drift.same:
        yield (
            f"{about}: the methods do not start from the same model, so that nothing can be "
            "compared."
        )
        return
    bound = _change(drift, "bound to its class", np.flatnonzero(drift.bound == drift.classes[1]))
    more = _change(
        drift, "more active there than on C-1", np.flatnonzero(drift.before[1] > drift.before[0])
    )
    yield (
        f"{about}: {bound}; {more}. By definition 1, sample by sample, {drift.strictly} of "
        f"{len(drift.bound)} neurons "
        "are bound to any class."
    )


def _change(drift: _Drift, kind: str, neurons: Ints) -> str:
    """The change of a kind of neurons on C-2, in words."""
    if not len(neurons):
        return f"no neuron is {kind}"
    changes = {name: (after - drift.before[1])[neurons] for name, after in drift.after.items()}
    parts = [
        f"{change.mean():+.3f} by {name} ({(change < 0).sum()} fall)"
        for name, change in changes.items()
    ]
    base, other = (abs(change.mean()) for change in changes.values())
    less = f"{'less' if other < base else 'not less'} with {list(changes)[1]}"
    many = "neuron" if len(neurons) == 1 else "neurons"
    return f"on C-2, {len(neurons)} {many} {kind}: on average {' and '.join(parts)}, {less}"
