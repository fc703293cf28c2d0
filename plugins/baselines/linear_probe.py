"""Federated linear probe.
Legate, Bernier, Caccia, Oyallon, Belilovsky: Guiding The Last Layer in Federated Learning with
Pre-Trained Models, NeurIPS 2023, compare with it. https://arxiv.org/abs/2306.03937

A control: all layers before the classifier keep the values of w_0, and clients train, send and
average the classifier only. What it reaches needs no federated training of the features.
- With `init`, the values are those of a pre-trained network. Without, they are random.
- Batch norms keep their scale and shift. Their running statistics still follow the data, as in any
  training. Data that are embedded already leave even these alone.
- On a network without layers before its classifier it is FedAvg, to the bit.

Meeting others: other methods see the classifier only. `fed3r+linear_probe` with `fine_tune` begins
at the ridge classifier. FedBABU and FedPer would leave nothing to average, so they are refused.
FedML pair: `make_pair("linear_probe")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import Component, Needs


@dataclass(frozen=True)
class LinearProbe(Component):
    """Trains the classifier under layers that keep their initial values."""

    name: ClassVar[str] = "linear_probe"
    needs: ClassVar[Needs] = Needs(features=True, fixed_body=True)
