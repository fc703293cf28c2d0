"""Top-k sparsification with memory.
Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018.
https://arxiv.org/abs/1809.07599

Algorithm 1 with the operator top_k, where the update w_k - w_t of several local steps stands in
place of eta_t times a gradient. The k largest of all P numbers of the model are sent, not of each
tensor. Their size is 4 bytes for the position beside the number itself.
- `share` is k / P; 0.05 is ours.

Meeting others: see `compression`. Its FedML pair is `make_pair("topk")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.options import Share
from fedml_noniid.plugins.baselines.compression import ErrorFeedback, Largest


@dataclass(frozen=True)
class TopK(ErrorFeedback):
    """Sends the largest numbers of an update, and keeps the others for later."""

    name: ClassVar[str] = "topk"

    share: Share = 0.05

    @property
    def packing(self) -> Largest:
        return Largest(self.share)
