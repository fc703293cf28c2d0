"""DP-SGD: differential privacy for each sample of a client.
Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: Deep Learning with Differential Privacy,
ACM CCS 2016. https://arxiv.org/abs/1607.00133

Algorithm 1 as the local training of a client, with the parameters of all layers as one vector.
- Batches are those of every method here: each epoch is cut into batches without replacement. So a
  sample is in one batch of an epoch. A server knows which batch, so nothing is amplified: an epoch
  is one release of the Gaussian mechanism (docs/privacy.md). The paper draws each lot at random,
  and its accountant counts that.
- A neighbour of a data set lacks what one sample adds to the gradients. The number of samples
  stays, since a client sends it. A short last batch is divided by its own size.
- Without noise the clip alone promises nothing: epsilon is infinite.
- A network with batch norms, dropout or recurrent layers is refused.

Meeting others: their terms of the loss belong to each sample's clipped gradient. Their terms of the
gradient (SCAFFOLD, FedDyn) are added after the noise. They are made of noisy updates. A method that
reads the samples in another way is refused. Its FedML pair is `make_pair("dpsgd")`: there a silo
draws the noise with its own secret, so a deployment has other bits than the simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from fedml_noniid.core.component import Client, Component, Exclusive, Mechanism, Setting
from fedml_noniid.core.data import Batch
from fedml_noniid.core.options import NonNegative, Range, RecipeError
from fedml_noniid.core.trees import Params, row_norms, scale, tree_map

Delta = Annotated[float, Range(0, 1, open="()")]


@dataclass(frozen=True)
class DPSGD(Component):
    """Clips the gradient of every sample, and adds Gaussian noise to each batch's sum."""

    name: ClassVar[str] = "dpsgd"

    clip: NonNegative = 4.0  # C, section 5.2; 0: no limit
    noise: NonNegative = 4.0  # sigma, section 5.2, the middle one of three
    delta: Delta = 1e-5  # section 5.2; for which epsilon is told

    @property
    def exclusive(self) -> frozenset[Exclusive]:
        return frozenset({Exclusive.SAMPLE_GRADIENTS} if self.clip else set())

    @property
    def mechanism(self) -> Mechanism | None:
        return Mechanism("sample", self.noise, self.delta) if self.clip else None

    def check(self, setting: Setting) -> None:
        check_clip(self.name, self.clip, self.noise)

    def sample_gradients(self, grads: Params, batch: Batch, client: Client) -> Params:
        """(sum_i g_i min(1, C / ||g_i||) + sigma C z) / B."""
        norms = row_norms(grads)  # [B]
        factor = (self.clip / norms).clamp(max=1)
        total = tree_map(lambda g: torch.tensordot(factor, g, dims=1), grads)
        if self.noise:
            total = client.noised(total, self.noise * self.clip, batch.key)
        return scale(1 / batch.sum(torch.ones_like(norms)).clamp(min=1), total)


def check_clip(name: str, clip: float, noise: float) -> None:
    """RecipeError for noise without a clip: it is told as a multiple of the clip."""
    if noise and not clip:
        raise RecipeError(
            f"{name}: noise = {noise} is a multiple of clip, and clip = 0 is no limit",
            allowed="noise = 0, or a clip above 0",
        )
