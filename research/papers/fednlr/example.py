"""FedNLR's example 1 (figure 1) in numbers: two inputs, two hidden neurons (ReLU), two classes, no
biases.

Client 1 has class 1, around (1, 1/3). Client 2 has class 2, around (1/3, 1). The learning rate is
0.5. The paper gives the initial weights only in the drawing. The weights here give the eight values
of eq. 9 to their two decimals. The rows of the first layer are the classes' centres. The rows of
the second layer are the centres' hidden activations (eq. 2 with A = 1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fedml_noniid.pipelines.reporting.figures import Values
from fedml_noniid.pipelines.reporting.text import as_csv
from fedml_noniid.plugins.fednlr.algorithm import FedNLR
from research.runs import Measured
from research.targets import Built, Target, as_printed

LR = 0.5
CENTRES: Values = np.array([[1, 1 / 3], [1 / 3, 1]])  # [class, input]


class Weights(NamedTuple):
    """The network."""

    hidden: Values  # [neuron, input]
    classes: Values  # [class, neuron]


START = Weights(CENTRES, np.array([[10 / 9, 2 / 3], [2 / 3, 10 / 9]]))


def activations(w: Weights, x: Values) -> Values:
    """h = max(0, W x), [neuron]."""
    return np.maximum(w.hidden @ x, 0)


def probabilities(w: Weights, x: Values) -> Values:
    """p = softmax(V h), [class]."""
    scores = np.exp(w.classes @ activations(w, x))
    return np.asarray(scores / scores.sum())


def trained(client: int, nlr_rates: bool = False) -> Weights:
    """The network after a step of `client` (0 or 1) on the centre of its class, with FedNLR's or
    equal rates."""
    w, x = START, CENTRES[client]
    h, error = activations(w, x), probabilities(w, x) - np.eye(2)[client]  # dCE/dscores
    gradients = Weights(np.outer((w.classes.T @ error) * (h > 0), x), np.outer(error, h))
    means = Weights(h, w.classes @ h)
    factors = [
        rates(mean, depth) if nlr_rates else np.ones(2) for depth, mean in enumerate(means, start=1)
    ]
    return Weights(
        *(old - LR * f[:, None] * g for old, f, g in zip(w, factors, gradients, strict=True))
    )


def rates(mean: Values, depth: int) -> Values:
    """The factors of the neurons of a layer, the first or the second of 2 (eqs.

    15-17), from their activations [2].
    """
    method = FedNLR()
    return np.asarray(
        method.factors(torch.from_numpy(mean), method.ratio(depth, 2, len(mean))).numpy()
    )


def example_network(target: Target, measured: Measured) -> Built:
    """Figure 1: the network of example 1 on the server and after one step on each client, with the
    numbers of eq. 9."""
    assert target.reported is not None
    x = CENTRES[1]
    models = {"before": START, "FedAvg": trained(0), "FedNLR": trained(0, nlr_rates=True)}
    values = {name: [*activations(w, x), *probabilities(w, x)] for name, w in models.items()}
    table = [["", "before", "after client 1, FedAvg", "change", "after client 1, FedNLR", "change"]]
    agree = 0
    for index, (title, printed) in enumerate(target.reported["rows"].items()):
        before, after, nlr = (float(values[name][index]) for name in ("before", "FedAvg", "FedNLR"))
        agree += sum(
            f"{ours:.2f}" == f"{theirs:.2f}"
            for ours, theirs in zip((before, after), printed, strict=True)
        )
        table.append(
            [
                title,
                f"{before:.3f} ({as_printed(printed[0])})",
                f"{after:.3f} ({as_printed(printed[1])})",
                f"{after - before:+.3f}",
                f"{nlr:.3f}",
                f"{nlr - before:+.3f}",
            ]
        )
    down = {name: values[name][1] - values["before"][1] for name in ("FedAvg", "FedNLR")}
    sentences = (
        (
            f"{agree} of {2 * len(target.reported['rows'])} numbers are those that eq. 9 "
            "prints, to "
            "two decimals."
        ),
        f"The neuron that is bound to class 2 changes by {down['FedAvg']:+.4f} with FedAvg and by "
        f"{down['FedNLR']:+.4f} with FedNLR.",
    )
    return Built(table, {"csv": as_csv(table[0], table[1:])}, sentences)
