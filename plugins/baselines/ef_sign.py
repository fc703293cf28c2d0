"""Signs with error feedback.
Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression
Schemes, ICML 2019. https://arxiv.org/abs/1901.09847
Before: Seide, Fu, Droppo, Li, Yu: 1-Bit Stochastic Gradient Descent, Interspeech 2014.

Algorithm 1 (EF-signSGD), where the update w_k - w_t of several local steps stands in place of gamma
times a gradient.
- Tensor by tensor, so that each has a length of its own.
- One bit has two values: the sign of 0 is +1.

Meeting others: see `compression`. Its FedML pair is `make_pair("ef_sign")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.trees import Params
from fedml_noniid.plugins.baselines.compression import ErrorFeedback, Grid


@dataclass(frozen=True)
class Signs(Grid):
    """Sends one bit for each number, and one length for each tensor."""

    def __call__(self, p: Params) -> Params:
        """(||p||_1 / d) sign(p), by tensor."""
        return {
            name: self.point((x >= 0).to(x.dtype), x.abs().sum() / max(x.numel(), 1))
            for name, x in p.items()
        }


@dataclass(frozen=True)
class EFSign(ErrorFeedback):
    """Sends the signs of an update and its mean magnitude, and keeps the error for later."""

    name: ClassVar[str] = "ef_sign"

    @property
    def packing(self) -> Signs:
        return Signs(bits=1, last=1)
