"""rFedAvg's LSTM for text, as a pure function of its parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import Width
from fedml_noniid.core.trees import Params
from fedml_noniid.data.text import PAD
from fedml_noniid.models.forward import Forward
from fedml_noniid.models.layers import Block, Linear
from fedml_noniid.models.stacked import Stacked

EMBEDDING = "embedding.weight"
NO_VMAP = "torch has no vmap rule for its LSTM"


@dataclass(frozen=True, eq=False)
class Recurrent(Block):
    """Word vectors that are never trained, and an LSTM, [B, L] -> [B, hidden].

    Its output is the LSTM's at the last token before the padding. Packed sequences give the same,
    because an LSTM reads forward. It is no weight layer of the network (`Layer`): a recurrent
    neuron has the rows of four gates and no ReLU. FedNLR, which goes by rows and activations,
    therefore scales the classifier and leaves the LSTM at eta.
    """

    embedding: Tensor  # [V, width]
    hidden: int
    depth: int

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        """As torch.nn.LSTM: uniform in +-1/sqrt(hidden); the rows of a weight are its gates i, f,
        g, o."""
        params, bound = {EMBEDDING: self.embedding}, 1 / math.sqrt(self.hidden)
        for key, shape in self._shapes().items():
            params[key] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        return params, {}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the LSTM's parameters, in the order in which torch wants them."""
        gates, shapes = 4 * self.hidden, dict[str, tuple[int, ...]]()
        for layer in range(self.depth):
            n_in = self.hidden if layer else self.embedding.shape[1]
            shapes |= {
                f"lstm.weight_ih_l{layer}": (gates, n_in),
                f"lstm.weight_hh_l{layer}": (gates, self.hidden),
            }
            shapes |= {f"lstm.bias_ih_l{layer}": (gates,), f"lstm.bias_hh_l{layer}": (gates,)}
        return shapes

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        tokens = x.long()  # [B, L]
        vectors = F.embedding(tokens, run.params[EMBEDDING])  # [B, L, width]
        zero = vectors.new_zeros(self.depth, len(x), self.hidden)
        weights = [run.params[key] for key in self._shapes()]
        # Always in train mode, which here differs by a dropout of 0 only: cuDNN gives no gradients
        # in eval mode.
        out, _, _ = torch.lstm(
            vectors, (zero, zero), weights, True, self.depth, 0.0, True, False, True
        )
        last = (tokens != PAD).sum(1) - 1  # [B]
        return out[torch.arange(len(x), device=x.device), last]


def lstm(
    shape: tuple[int, ...],
    n_classes: int,
    embedding: Tensor,
    *,
    hidden: Width = 256,
    layers: Width = 2,
) -> Stacked:
    """rFedAvg's LSTM (section VI-A and its repository): frozen word vectors, 2 layers of 256, phi,
    classes.

    1,098,242 trained parameters with vectors of 300 and two classes; `embedding` is [vocabulary,
    width].
    """
    if len(shape) != 1:
        raise UserError(f"model 'lstm' needs texts (tokens), got samples of {shape}")
    blocks, head = (Recurrent(embedding, hidden, layers),), Linear("fc", hidden, n_classes)
    return Stacked(
        "lstm", blocks, head, sequential_only=NO_VMAP, tokens=True, frozen=frozenset({EMBEDDING})
    )
