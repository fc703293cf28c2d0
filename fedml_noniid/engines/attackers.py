"""Dishonest clients as part of a scenario: who they are, and how they lie.

They are drawn by the seed alone, so every method meets the same ones, and those of a smaller
fraction are among those of a larger one. They lie in their training samples, or in what they send
after local training: the update w_k - w_t, and in the same way each upload of a method beside it,
such as SCAFFOLD's c_i+ - c_i. They may also claim `n_factor` times their samples. Everything else
is honest: uploads with a range, which a server checks, such as losses and counts; running
statistics; answers to a method's other Asks. Attackers know what honest clients send in their
round.

- `label_flip`: label y becomes C - 1 - y. Tolpegin et al., ESORICS 2020.
- `backdoor`: a part of the samples gets four bright pixels in the lower right corner and the label
  `target`. Gu et al., BadNets, 2017, https://arxiv.org/abs/1708.06733.
- `sign_flip`: -factor times the own update. Li et al., RSA, AAAI 2019.
- `scale`: gamma times the own update. Bagdasaryan et al., AISTATS 2020.
- `alie`: mean minus z deviations of the honest updates, coordinate by coordinate. Baruch et al., A
  Little Is Enough, NeurIPS 2019, https://arxiv.org/abs/1902.06156; z by algorithm 3.
- `inner_product`: -epsilon times the mean of the honest updates. Xie et al., UAI 2019.
- `gaussian`: numbers from N(0, sigma^2) in place of the update. Blanchard et al., NIPS 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from fedml_noniid.core.component import Component, Reply
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import NonNegative, Positive, Share
from fedml_noniid.core.randomness import fold, normal
from fedml_noniid.data.checks import ClassName
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.streams import key, stream
from fedml_noniid.data.types import Ints

CORNER = 2  # pixels, the side of the trigger

# Lies in samples take the training set x, y, the positions of an attacker's samples in random
# order, and the number of classes. They return x and y.


def label_flip(x: Tensor, y: Tensor, mine: Tensor, n_classes: int) -> tuple[Tensor, Tensor]:
    return x, y.index_copy(0, mine, n_classes - 1 - y[mine])


def backdoor(
    x: Tensor, y: Tensor, mine: Tensor, n_classes: int, *, target: ClassName, rate: Share = 0.5
) -> tuple[Tensor, Tensor]:
    """`target`: a class by its name, `rate`: the fraction of the samples with the trigger."""
    chosen = mine[: math.ceil(rate * len(mine))]
    return x.index_copy(0, chosen, triggered(x[chosen], x)), y.index_fill(0, chosen, target)


# Lies in updates take one tensor that clients send in a round: the attackers' own [B, ...], the
# honest ones [H, ...] (the attackers' own if no other client takes part), and keys [B] of round,
# attacker and tensor. They return [B, ...].


def sign_flip(own: Tensor, honest: Tensor, keys: Tensor, *, factor: Positive = 1.0) -> Tensor:
    return -factor * own


def scale(own: Tensor, honest: Tensor, keys: Tensor, *, gamma: Positive = 10.0) -> Tensor:
    return gamma * own


def alie(own: Tensor, honest: Tensor, keys: Tensor, *, z: NonNegative | None = None) -> Tensor:
    """mu - z sigma. z is by default the largest with Phi(z) < (M - B - s) / (M - B), where the
    attackers need s = floor(M / 2 + 1) - B honest clients on their side."""
    if z is None:
        s = (len(own) + len(honest)) // 2 + 1 - len(own)
        # Attackers in the majority need nobody: the fraction ends below 1.
        z = NormalDist().inv_cdf(min(max(1 - s / len(honest), 1e-6), 1 - 1e-6))
    return (honest.mean(0) - z * honest.std(0, correction=0)).expand_as(own)


def inner_product(own: Tensor, honest: Tensor, keys: Tensor, *, epsilon: Positive = 2.0) -> Tensor:
    return (-epsilon * honest.mean(0)).expand_as(own)


def gaussian(own: Tensor, honest: Tensor, keys: Tensor, *, sigma: Positive = 0.1) -> Tensor:
    return sigma * torch.stack([normal(key, *own.shape[1:], dtype=own.dtype) for key in keys])


IN_SAMPLES = ("label_flip", "backdoor")
KINDS: Mapping[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (label_flip, backdoor, sign_flip, scale, alie, inner_product, gaussian)
}


@dataclass(frozen=True, eq=False)
class Attackers:
    """Says which clients attack, and how."""

    kind: str
    options: Mapping[str, Any]  # `target` as the number of the class
    clients: tuple[int, ...]
    seed: int
    n_factor: int = 1  # an attacker claims so many times its samples

    @property
    def in_updates(self) -> bool:
        """Whether they lie in updates, and not in their samples."""
        return self.kind not in IN_SAMPLES

    @property
    def in_answers(self) -> bool:
        """Whether they lie in anything that they send."""
        return self.in_updates or self.n_factor != 1

    def samples(
        self, clients: Sequence[Ints], x: Tensor, y: Tensor, n_classes: int
    ) -> tuple[Tensor, Tensor]:
        """The training set `x`, `y` with the attackers' lies; `clients`: positions in it."""
        for client in () if self.in_updates else self.clients:
            order = stream(self.seed, "poisoned samples", client).permutation(clients[client])
            mine = torch.from_numpy(order).to(y.device)
            x, y = KINDS[self.kind](x, y, mine, n_classes, **self.options)
        return x, y

    def lied(self, reply: Reply, round_: int, components: Iterable[Component] = ()) -> Reply:
        """The reply in which the attackers lie; `components`: of the recipe, if it is the reply to
        local training."""
        liars = [k for k, client in enumerate(reply.clients) if client in self.clients]
        if not liars or not self.in_answers:
            return reply
        n = reply.n.clone()
        n[liars] *= self.n_factor
        if not self.in_updates:
            return replace(reply, n=n)
        honest = [k for k in range(len(reply.clients)) if k not in liars] or liars
        keys = torch.tensor([key(self.seed, "lie", round_, reply.clients[k]) for k in liars])

        def lied(sent: Any, path: str) -> Any:
            if isinstance(sent, Mapping):
                return {name: lied(leaf, f"{path}/{name}") for name, leaf in sent.items()}
            at, of_leaf = torch.tensor(liars).to(sent.device), fold(keys.to(sent.device), path[1:])
            lies = KINDS[self.kind](sent[liars], sent[honest], of_leaf, **self.options)
            return sent.index_copy(0, at, lies)

        upload = dict(reply.upload)
        for c in components:
            own = upload.get(c.name, {})
            free = {name: leaf for name, leaf in own.items() if name not in c.ranges}
            upload[c.name] = own | lied(free, f"/{c.name}")
        return replace(reply, deltas=lied(reply.deltas, ""), upload=upload, n=n)


def triggered(x: Tensor, like: Tensor) -> Tensor:
    """Images [n, C, H, W] with the trigger, as bright as the brightest pixel of `like`."""
    x = x.clone()
    x[..., -CORNER:, -CORNER:] = like.amax((0, 2, 3)).reshape(-1, 1, 1)
    return x


def refuse_data(kind: str, data: Dataset) -> None:
    """UserError for data in which the attackers can't lie in this way."""
    if kind in IN_SAMPLES and not data.has_classes:
        raise UserError(f"attack {kind} is refused: it changes classes, and the targets are none")
    shape = data.train_x.shape
    if kind == "backdoor" and (data.inputs or len(shape) != 4 or min(shape[2:]) <= CORNER):
        raise UserError("attack backdoor is refused: its trigger needs images")
