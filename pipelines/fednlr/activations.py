"""FedNLR's table 4: the activations of hidden neurons before and after training on one client, by two methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from torch import Tensor

from pipelines import results
from pipelines.figures import Values
from pipelines.results import Result
from pipelines.targets.marks import said_of
from pipelines.targets.measured import Measured
from pipelines.targets.pictures import panels, png
from pipelines.targets.spec import Built, Target
from pipelines.targets.table import as_csv
from plugins.core.errors import UserError
from plugins.data.types import Ints

NONE = -1  # the class of a neuron that is bound to none


def activations(target: Target, measured: Measured) -> Built:
    """Table 4: the hidden neurons' mean activations before and after C-1's training in the last round, `methods` from
    the same model; `clients` are C-1 and C-2. A neuron is bound to the class on which its mean is the highest, one that
    two classes excite alike (a dead one) to none.
    """
    spec = target.spec
    where = {"study": spec["study"], "scenario": spec["scenario"]}
    addresses = {name: where | {"recipe": recipe} for name, recipe in spec["methods"].items()}
    groups = {name: measured.group(address) for name, address in addresses.items()}
    runs = {name: group.runs for name, group in groups.items()}
    said = [sentence for name, group in groups.items() for sentence in said_of(name, group)]
    seeds = sorted(set.intersection(*({run.seed for run in found} for found in runs.values())))
    if not seeds:
        missing = tuple(name for name, found in runs.items() if not found and not groups[name].diverged)
        return Built((), {}, tuple(said), missing or (() if said else ("a seed of both",)))
    seen = [
        _Drift({name: next(run for run in found if run.seed == seed) for name, found in runs.items()}, target, measured)
        for seed in seeds
    ]
    first = seen[0]
    files = {"csv": as_csv(first.HEADER, [line for drift in seen for line in drift.lines()]), "png": first.picture()}
    words = [*said, f"Shown is seed {first.seed}.", *(sentence for drift in seen for sentence in drift.words())]
    return Built(first.table(), files, tuple(words), printed=_printed(target))


class _Drift:
    """The last round of one seed: activations of class means, [M] each."""

    HEADER = ("seed", "neuron", "bound_to", "c1_before", "c2_before", "method", "c2_after")

    def __init__(self, runs: Mapping[str, Result], target: Target, measured: Measured) -> None:
        study = str(target.spec["study"])
        recorded = {name: measured.recorded(run, study) for name, run in runs.items()}
        one = next(iter(runs.values()))
        self.seed, self.names = one.seed, list(runs)
        classes = _classes(measured, study, one)
        self.classes = [classes[client] for client in target.spec["clients"]]  # of C-1 and C-2
        before = {name: _of_client(found, "before", target.spec["clients"][0]) for name, found in recorded.items()}
        start = before[self.names[0]]  # [C, M]
        self.same = all((start == other).all() for other in before.values())
        self.before = start[self.classes].numpy()  # [2, M]
        highest, second = start.topk(2, dim=0).values
        self.bound = start.argmax(0).masked_fill(highest == second, NONE).numpy()  # [M], a class
        self.strictly = int(_of_client(recorded[self.names[0]], "bound", target.spec["clients"][0]).any(0).sum())
        self.after = {
            name: _of_client(found, "after", target.spec["clients"][0])[self.classes[1]].numpy()
            for name, found in recorded.items()
        }
        self.accuracy = one.rows[-2]["test_accuracy"] if len(one.rows) > 1 else float("nan")

    def changes(self, name: str, neurons: Ints) -> Values:
        """Of these neurons, on C-2."""
        return np.asarray((self.after[name] - self.before[1])[neurons])

    def table(self) -> list[list[str]]:
        """A line per neuron; what is bound to the class is marked."""
        header = ["neuron", "original on C-1", "original on C-2"]
        for name in self.names:
            header += [f"on C-2 after C-1, {name}", f"change, {name}"]
        lines = [header]
        for m in range(len(self.bound)):
            marks = ["*" if self.bound[m] == c else "" for c in self.classes]
            line = [str(m + 1), *(f"{h:.2f}{mark}" for h, mark in zip(self.before[:, m], marks, strict=True))]
            for name in self.names:
                after = self.after[name][m]
                line += [f"{after:.2f}{marks[1]}", f"{after - self.before[1, m]:+.3f}" if marks[1] else ""]
            lines.append(line)
        return lines

    def lines(self) -> Iterable[list[object]]:
        for m, bound in enumerate(self.bound):
            for name in self.names:
                of = "" if bound == NONE else int(bound)
                yield [self.seed, m + 1, of, *map(float, self.before[:, m]), name, float(self.after[name][m])]

    def words(self) -> list[str]:
        """What table 4 is to show, seed by seed."""
        of = f"classes {self.classes[0]} and {self.classes[1]}"
        about = f"Seed {self.seed} ({of}, accuracy before the round {self.accuracy:.1%})"
        if not self.same:
            return [f"{about}: the methods do not start from the same model, so that nothing can be compared."]
        kinds = {
            "bound to its class": np.flatnonzero(self.bound == self.classes[1]),
            "more active there than on C-1": np.flatnonzero(self.before[1] > self.before[0]),
        }
        told = "; ".join(self._told(kind, neurons) for kind, neurons in kinds.items())
        return [
            f"{about}: {told}. By definition 1, sample by sample, {self.strictly} of {len(self.bound)} neurons are "
            "bound to any class."
        ]

    def _told(self, kind: str, neurons: Ints) -> str:
        """How the neurons of a kind change on C-2."""
        if not len(neurons):
            return f"no neuron is {kind}"
        changes = {name: self.changes(name, neurons) for name in self.names}
        mean = {name: float(change.mean()) for name, change in changes.items()}
        parts = [f"{mean[name]:+.3f} by {name} ({int((changes[name] < 0).sum())} fall)" for name in self.names]
        base, own = self.names
        less = "less" if abs(mean[own]) < abs(mean[base]) else "not less"
        many = "neuron" if len(neurons) == 1 else "neurons"
        return f"on C-2, {len(neurons)} {many} {kind}: on average {' and '.join(parts)}, {less} with {own}"

    def picture(self) -> bytes:
        """The table as a heat map."""
        rows = {"original on C-1": self.before[0], "original on C-2": self.before[1]}
        rows |= {f"C-2 after C-1, {name}": self.after[name] for name in self.names}
        values = np.stack(list(rows.values()))
        figure, (axes,) = panels(1)
        figure.set_size_inches(10.5, 2.2)
        axes.imshow(values, aspect="auto", cmap="Blues", vmin=0)
        for (i, m), h in np.ndenumerate(values):
            bold = self.bound[m] == self.classes[min(i, 1)]
            axes.text(
                m, i, f"{h:.2f}", ha="center", va="center", fontsize=7, fontweight="bold" if bold else "normal",
                color="white" if h > 0.6 * values.max() else "black",
            )  # fmt: skip
        axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
        axes.set_xticks(range(values.shape[1]), [str(m + 1) for m in range(values.shape[1])], fontsize=7)
        axes.set_xlabel("hidden neuron; bold: bound to the class", fontsize=8)
        axes.grid(visible=False)
        return png(figure)


def _classes(measured: Measured, study: str, run: Result) -> dict[int, int]:
    """The class of each client, which has one only."""
    path = measured.folder(study) / "partitions" / f"{run.scenario}-{run.seed}" / "clients.csv"
    found = {}
    for row in results.table(path):
        held = [c for c, n in enumerate(list(row.values())[3:]) if float(n) > 0]  # after client, samples, entropy
        if len(held) != 1:
            raise UserError(f"{path}: client {row['client']} has {len(held)} classes, table 4 needs clients with one")
        found[int(row["client"])] = held[0]
    return found


def _of_client(recorded: Mapping[str, Tensor], quantity: str, client: int) -> Tensor:
    """What a client recorded in the last round, [C, M]."""
    place = recorded["round/clients"][-1].tolist().index(client)
    return recorded[f"fednlr/{quantity}"][-1, place]


def _printed(target: Target) -> list[list[str]]:
    """The paper's table 4."""
    assert target.reported is not None
    lines = [["", *map(str, target.reported["columns"])]]
    for title, values in target.reported["rows"].items():
        lines.append([str(title), *("" if value is None else str(value) for value in values)])
    return lines
