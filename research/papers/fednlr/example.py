"""FedNLR's example 1 (figure 1) in numbers: two inputs, two hidden neurons (ReLU), two classes, no
biases.

Client 1 has class 1, around (1, 1/3). Client 2 has class 2, around (1/3, 1). The learning rate is
0.5. The paper gives the initial weights only in the drawing. The weights here give the eight values
of eq. 9 to their two decimals. The rows of the first layer are the classes' centres. The rows of
the second layer are the centres' hidden activations (eq. 2 with A = 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedml_noniid.plugins.fednlr.algorithm import FedNLR
from research.papers.settings import compared
from research.runs import Measured
from research.targets import Built, Target

LR = 0.5
CENTRES = torch.tensor([[1, 1 / 3], [1 / 3, 1]], dtype=torch.float64)  # [class, input]
START = (CENTRES, CENTRES @ CENTRES.T)  # [neuron, input], [class, neuron]


def example_network(target: Target, measured: Measured) -> Built:
    """Figure 1: activations and probabilities on class 2, on the server and after one step on
    client 1, with the numbers of eq. 9."""
    assert target.reported is not None
    cells: dict[tuple[str, str], tuple[str, str]] = {}
    rows, models = target.reported["rows"], (START, trained(False), trained(True))
    for title, start, plain, scaled in zip(rows, *map(on_class_2, models), strict=True):
        texts = {
            "before": f"{start:.2f}",
            "after client 1": f"{plain:.2f}",
            "change": f"{plain - start:+.4f}",
            "after client 1, FedNLR": f"{scaled:.2f}",
            "change, FedNLR": f"{scaled - start:+.4f}",
        }
        cells |= {
            (title, c): (text, str(target.printed(title, c, ""))) for c, text in texts.items()
        }
    return compared(cells, "numbers")


def on_class_2(layers: Sequence[Tensor]) -> list[float]:
    """[h_1, h_2, p_1, p_2] at the centre of class 2: h = max(0, W x), p = softmax(V h)."""
    h = F.relu(layers[0] @ CENTRES[1])
    return [*h.tolist(), *F.softmax(layers[1] @ h, 0).tolist()]


def trained(has_nlr_rates: bool) -> list[Tensor]:
    """The layers after a step of client 1 on the centre of its class, with FedNLR's or equal
    rates (eqs. 15-17)."""
    layers = [layer.clone().requires_grad_() for layer in START]
    h = F.relu(layers[0] @ CENTRES[0])
    means, method = (h, layers[1] @ h), FedNLR()
    gradients = torch.autograd.grad(F.cross_entropy(means[1], torch.tensor(0)), layers)
    rates = [
        method.factors(mean.detach(), method.ratio(depth, 2, 2)) if has_nlr_rates else torch.ones(2)
        for depth, mean in enumerate(means, start=1)
    ]
    return [w - LR * f[:, None] * g for w, f, g in zip(START, rates, gradients, strict=True)]
