"""FedBN.
Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization, ICLR 2021. https://arxiv.org/abs/2102.07623, authors' code:
https://github.com/med-air/FedBN

Each client keeps its batch norms to itself, scale, shift and running statistics. They begin with
w_0's, stay as the client's last training left them, and are never sent. All else is trained, sent
and averaged as in FedAvg. Choices:
- The weights are n_k / sum n. `weights="uniform"`: 1 / M, as in the paper's algorithm and the
  authors' code.
- The paper has no client that misses a round. Here a client that never took part has the batch
  norms of w_0.

Every client has a model of its own: the sent one with its batch norms. So accuracies are those of
the clients' models, each on the client's own test samples, over all samples together. The clients
test them, in a deployment too (`engines.client_tests`). On the validation split
nobody has an accuracy. A model without batch norms is trained as by FedAvg, to the bit.

Meeting others: other methods see the shared part only, so norms, momenta, control variates and
proximal terms leave the batch norms alone. What a method evaluates on a client is the client's
model; after local training, it has the trained batch norms. Methods that need the batch norms
elsewhere are refused (FNR-FL, FedDF, FedFTG). FedML pair: `make_pair("fedbn")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import NORMS, Component, Needs, Weights


@dataclass(frozen=True)
class FedBN(Component):
    """Keeps each client's batch norms on the client."""

    name: ClassVar[str] = "fedbn"
    needs: ClassVar[Needs] = Needs(personal=frozenset({NORMS}))

    weights: Weights = "size"  # the paper: uniform
