"""FedPer.
Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers, 2019.
https://arxiv.org/abs/1912.00818

The network is split into base layers, which are averaged, and behind them personalization layers,
which each client keeps to itself and never sends. A client trains both together, from the received
base and its own last personalization layers. Choices:
- The personalization layers are the classifier alone, the smallest of the paper's choices. All
  clients begin with the classifier of w_0.
- `keep` names others: patterns of parameters and buffers, and `head` for the classifier. With
  LoRA, `keep: ["*lora_B*"]` shares the matrices A alone, as FedSA-LoRA does (Guo et al., ICLR 2025,
  https://arxiv.org/abs/2410.01463).
- The weights are n_k / sum n, as in FedAvg.
- A client that never took part has the personalization layers of w_0.

As with FedBN, accuracies are those of the clients' models on their own test samples, and other
methods see the shared part only. Methods that need whole models on the server are refused (FNR-FL,
FedDF, FedFTG), and those that need a classifier that all share (FedBABU, FedRS, FedGen, CCVR).
FedML pair: `make_pair("fedper")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import BODY, HEAD, Component, Needs, Setting
from fedml_noniid.core.options import RecipeError


@dataclass(frozen=True)
class FedPer(Component):
    """Keeps each client's classifier on the client, or the parameters that `keep` names."""

    name: ClassVar[str] = "fedper"

    keep: tuple[str, ...] = ()  # patterns; (): the classifier

    @property
    def needs(self) -> Needs:
        return Needs(personal=frozenset(self.keep or (HEAD,)))

    def check(self, setting: Setting) -> None:
        if BODY in self.keep:
            raise RecipeError(
                f"{self.name}: keep = {BODY!r} is refused; allowed: head, or patterns of parameters"
            )
