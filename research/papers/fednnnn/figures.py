"""FedNNNN's curves with what they say about the paper's claims, and the tables of its networks.

`accuracy`, `norms` and `path` are `curves` (research/papers/curves.py) with more words.
`norms` has two panels, N and E, and takes `claim`, a line, and `against`, the lines that it is
compared with. `network` takes `model`, `shape` (one sample's) and `classes`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fedml_noniid import models
from fedml_noniid.core.errors import UserError
from fedml_noniid.models.forward import Forward
from fedml_noniid.models.layers import BatchNorm, Conv, Flatten, Linear, MaxPool, ReLU
from fedml_noniid.models.stacked import Stacked
from fedml_noniid.pipelines.reporting.figures import Values
from research.papers import curves
from research.papers.curves import Line, Panels
from research.papers.pictures import extremes
from research.papers.settings import NONE, compared
from research.runs import Measured
from research.targets import Built, Target

BASELINE = "FedAvg"


def accuracy(target: Target, measured: Measured) -> Built:
    """Accuracy by round, and when each method first is as good as the baseline ever gets."""
    return curves.curves(target, measured, (_reached, curves.ends))


def norms(target: Target, measured: Measured) -> Built:
    """N and E by round, a panel each; how the claimed line compares with others, and N / E of each
    line."""
    return curves.curves(target, measured, (_norms, curves.ends))


def path(target: Target, measured: Measured) -> Built:
    """The integral of N by round, and how much of it belongs to the second half of the rounds:
    little once it stops."""
    return curves.curves(target, measured, (_late, curves.ends))


def _reached(_: Mapping[str, Any], panels: Panels) -> Iterator[str]:
    for lines in panels.values():
        if BASELINE in lines and len(lines) > 1:
            best = lines[BASELINE].mean.max()
            first = ", ".join(f"{name} {_first(line, best)}" for name, line in lines.items())
            yield (
                f"{BASELINE}'s best over the rounds, {best:.2f}, is first reached in round: "
                f"{first}."
            )
            highest = {name: line.mean.max() for name, line in lines.items()}
            high, _low = extremes(highest)
            yield f"Best over the rounds: {high} ({highest[high]:.2f})."


def _norms(spec: Mapping[str, Any], panels: Panels) -> Iterator[str]:
    claim = str(spec.get("claim", ""))
    for title, lines in panels.items():
        for other in spec.get("against", ()):
            if claim in lines and other in lines:
                yield f"{title}: {_compared(claim, lines[claim].mean, other, lines[other].mean)}."
    n, e = panels.values()
    fractions = ", ".join(
        f"{name} {(n[name].mean / e[name].mean).mean():.3g}" for name in n if name in e
    )
    if fractions:
        yield f"N / E, mean over the rounds: {fractions}."


def _late(_: Mapping[str, Any], panels: Panels) -> Iterator[str]:
    for lines in panels.values():
        sums = {name: line.mean for name, line in lines.items() if len(line.rounds) > 1}
        late = ", ".join(
            f"{name} {100 * (1 - y[len(y) // 2 - 1] / y[-1]):.0f} %" for name, y in sums.items()
        )
        if late:
            yield f"Fraction of the whole way that lies in the second half of the rounds: {late}."


def network(target: Target, measured: Measured) -> Built:
    """The layers of a network with their numbers of parameters, in brackets what the paper says
    where it differs.

    UserError if the paper's layers are others.
    """
    assert target.reported is not None
    titles, columns = list(target.reported["rows"]), [*target.reported["columns"], "Parameters"]
    layers = list(_layers(target.spec))
    names = [re.sub(r" \(\d+\)$|\d+$", "", title) for title in titles]  # without a number
    if names != [name for name, *_ in layers]:
        raise UserError(
            f"{target.id}: the rows of reported.yaml are {', '.join(titles)}; the network has "
            f"{', '.join(name for name, *_ in layers)}"
        )
    cells = {}
    for title, (_, *texts) in zip(titles, layers, strict=True):
        for column, text in zip(columns, texts, strict=True):
            cells[title, column] = text, str(target.printed(title, column) or "")
    return compared(cells, "entries")


def _layers(spec: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """(the paper's name without a number, input, output, kernel, stride, parameters) of each layer,
    measured on one sample."""
    net = models.build(str(spec["model"]), tuple(spec["shape"]), int(spec["classes"]))
    assert isinstance(net, Stacked), "all networks for images are"
    params, buffers = net.init(torch.Generator().manual_seed(0))
    run, x = Forward(params, buffers, train=False), torch.zeros(1, *spec["shape"])
    yield "Input", NONE, _size(x), NONE, NONE, NONE
    flat = normalised = ""  # the shape behind a flattening, parameters of a batch norm
    for block in (*net.blocks, net.head):
        before, x = x, block(run, x)
        own = f"{sum(params[name].numel() for name in getattr(block, 'names', ())):,}"
        match block:
            case Conv(kernel=size, stride=stride):
                yield "Conv", _size(before), _size(x), str(size), str(stride), own
            case MaxPool(size=size):
                yield "Maxpool", _size(before), _size(x), str(size), str(size), NONE
            case BatchNorm():
                normalised = own
            case ReLU():  # one row of the paper has the batch norm before it, too
                name = "BN+ReLU" if normalised else "ReLU"
                yield name, NONE, NONE, NONE, NONE, normalised or NONE
                normalised = ""
            case Flatten():
                flat = " * ".join(str(n) for n in before.shape[1:])
            case Linear():
                yield "Fc", flat or str(block.n_in), str(block.n_out), NONE, NONE, own
                flat = ""


def _size(x: torch.Tensor) -> str:
    """(channels, width, height) of a batch [1, channels, height, width]."""
    _, channels, height, width = x.shape
    return f"({channels}, {width}, {height})"


def _first(line: Line, level: float) -> str:
    """The round in which a line first reaches a level."""
    enough = line.mean >= level
    return str(line.rounds[int(enough.argmax())]) if enough.any() else "never"


def _compared(claim: str, ours: Values, other: str, theirs: Values) -> str:
    """In how many rounds one line is above another, and the mean ratio in the two halves of the
    rounds."""
    ratio = ours / theirs
    text = f"{claim} is above {other} in {int((ratio > 1).sum())} of {len(ratio)} rounds"
    if len(ratio) > 1:
        early, late = (part.mean() for part in np.array_split(ratio, 2))
        text += (
            f", {early:.2f} times as large in the first half of them on average, {late:.2f} "
            "times in the second"
        )
    return text
