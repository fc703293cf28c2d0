"""The paper's curves with what they say about its claims, and the tables of its networks.

`accuracy`, `norms` and `path` are `curves` (research/papers/curves.py) with more words.
`norms` has two panels, N and E, and takes `claim`, a line, and `against`, the lines that it is
compared with. `network` takes `model`, `shape` (one sample's) and `classes`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fedml_noniid import models
from fedml_noniid.core.errors import UserError
from fedml_noniid.models.forward import Forward
from fedml_noniid.models.layers import BatchNorm, Conv, Flatten, Linear, MaxPool, ReLU
from fedml_noniid.models.stacked import Stacked
from fedml_noniid.pipelines.reporting.figures import Values
from fedml_noniid.pipelines.reporting.text import as_csv
from research.papers import curves
from research.papers.curves import Line, Panels
from research.papers.pictures import extremes
from research.papers.settings import NONE
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
    where it differs."""
    counted, reported = _layers(target), target.reported or {"rows": {}, "columns": []}
    columns, titles = list(reported["columns"]), list(reported["rows"])
    kinds = [re.sub(r" \(\d+\)$|\d+$", "", title) for title in titles]  # without a number
    if kinds != [layer.kind for layer in counted]:
        layers = ", ".join(layer.kind for layer in counted)
        raise UserError(
            f"{target.id}: the rows of reported.yaml are {', '.join(titles)}; the network has "
            f"{layers}"
        )
    lines, other, entries = [["", *columns, "Parameters"]], [], 0
    for title, layer in zip(titles, counted, strict=True):
        cells = []
        for column, ours, theirs in zip(columns, layer.cells, reported["rows"][title], strict=True):
            differs = theirs is not None and str(theirs) != ours
            entries += theirs is not None
            other += [f"{title}, {column}"] * differs
            cells.append(f"{ours} ({theirs})" if differs else ours)
        lines.append([title, *cells, f"{layer.parameters:,}" if layer.parameters else NONE])
    total = sum(layer.parameters for layer in counted)
    title, largest = max(zip(titles, counted, strict=True), key=lambda pair: pair[1].parameters)
    sentences = (
        f"{entries - len(other)} of the {entries} entries that the paper prints are this network's"
        f"{'; not: ' + '; '.join(other) if other else ''}.",
        f"{total:,} parameters, which the paper does not count; {title} has "
        f"{100 * largest.parameters / total:.0f} % "
        "of them.",
    )
    numbers = [
        [title, *layer.cells, layer.parameters]
        for title, layer in zip(titles, counted, strict=True)
    ]
    return Built(lines, {"csv": as_csv(["layer", *columns, "parameters"], numbers)}, sentences)


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


class _Layer(NamedTuple):
    kind: str  # as the paper names it, without a number
    cells: tuple[str, str, str, str]  # input, output, kernel, stride
    parameters: int = 0


def _layers(target: Target) -> list[_Layer]:
    """What the paper lists of a network, measured on one sample.

    UserError for a network with other blocks.
    """
    shape = tuple(int(n) for n in target.spec["shape"])
    net = models.build(str(target.spec["model"]), shape, int(target.spec["classes"]))
    assert isinstance(net, Stacked), "all networks for images are"
    params, buffers = net.init(torch.Generator().manual_seed(0))
    run, x = Forward(params, buffers, train=False), torch.zeros(1, *shape)
    layers = [_Layer("Input", (NONE, _size(x), NONE, NONE))]
    flattened = ""
    normalised = 0  # parameters of a batch norm, which the paper lists with the ReLU behind it
    for block in (*net.blocks, net.head):
        before, x = x, block(run, x)
        if isinstance(block, Conv):
            cells = (_size(before), _size(x), str(block.kernel), str(block.stride))
            layers.append(_Layer("Conv", cells, _count(params, block.name)))
        elif isinstance(block, BatchNorm):
            normalised = _count(params, block.name)
        elif isinstance(block, ReLU):
            layers.append(_Layer("BN+ReLU" if normalised else "ReLU", (NONE,) * 4, normalised))
            normalised = 0
        elif isinstance(block, MaxPool):
            layers.append(
                _Layer("Maxpool", (_size(before), _size(x), str(block.size), str(block.size)))
            )
        elif isinstance(block, Flatten):
            flattened = " * ".join(str(n) for n in before.shape[1:])
        elif isinstance(block, Linear):
            cells = (flattened or str(block.n_in), str(block.n_out), NONE, NONE)
            layers.append(_Layer("Fc", cells, _count(params, block.name)))
            flattened = ""
        else:
            raise UserError(
                f"{target.id}: model {net.name!r} is refused; allowed: one of layers that the "
                "paper uses"
            )
    return layers


def _size(x: torch.Tensor) -> str:
    """(channels, width, height) of a batch [1, channels, height, width]."""
    _, channels, height, width = x.shape
    return f"({channels}, {width}, {height})"


def _count(params: Mapping[str, torch.Tensor], block: str) -> int:
    return sum(leaf.numel() for name, leaf in params.items() if name.rpartition(".")[0] == block)
