"""Counts the bytes that an algorithm's messages move."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from fedml_noniid.core.component import Ask, Reply
from fedml_noniid.core.packing import Packing
from fedml_noniid.core.received import received
from fedml_noniid.core.trees import Params, n_bytes


class Meter:
    """Counts bytes up and down, over all addressed clients, since `forget`.

    Counted are models, buffers and side vectors in their own dtype, and compressed updates as they
    are packed; not counted are a message's few
    scalars of bookkeeping (n_k, steps, loss). A model that a client already holds, because the last
    Ask to it carried the same one, is not sent again (rFedAvg+ sends w_{t+1} once, not twice). Of
    secure sums the masked integers are counted, once, and no keys and certificates.
    """

    def __init__(self) -> None:
        self._up: Counter[int] = Counter()
        self._down: Counter[int] = Counter()
        self._model: Params = {}
        self._holders: set[int] = set()

    def count(self, ask: Ask, reply: Reply, packing: Packing | None = None) -> None:
        """Adds one exchange. `packing`: of its updates."""
        ask = received(ask, 0)  # where each client has a model of its own, all have one size
        if ask.params:
            if ask.params is not self._model:
                self._model, self._holders = ask.params, set()
            model = n_bytes(ask.params) + n_bytes(ask.buffers)
            self._down.update({client: model for client in ask.to if client not in self._holders})
            self._holders.update(ask.to)
        aside = n_bytes(ask.shared) + n_bytes(ask.each) // len(ask.to)
        # All that were asked have answered, also those whose answers a defence dropped.
        answered = (n_bytes(reply.deltas) + n_bytes(reply.buffers) + n_bytes(reply.upload)) // len(
            reply.clients
        )
        if packing is not None:
            zeros = {key: torch.zeros(p.shape, dtype=p.dtype) for key, p in ask.params.items()}
            answered += n_bytes(packing.pack(zeros)) - n_bytes(zeros)
        self._down.update(dict.fromkeys(ask.to, aside))
        self._up.update(dict.fromkeys(ask.to, answered))

    def read(self) -> tuple[Counter[int], Counter[int]]:
        """Bytes (up, down) by client."""
        return self._up, self._down

    def forget(self) -> None:
        """Counts from 0."""
        self._up, self._down = Counter(), Counter()

    def state(self, params: Params) -> dict[str, list[Any]]:
        """As JSON, for `restore`: the bytes, and the clients that hold `params` already."""
        holders = sorted(self._holders) if params is self._model else []
        return {"holders": holders, "up": list(self._up.items()), "down": list(self._down.items())}

    def restore(self, params: Params, state: dict[str, list[Any]]) -> None:
        """After a restart."""
        self._model, self._holders = params, set(state["holders"])
        self._up, self._down = Counter(dict(state["up"])), Counter(dict(state["down"]))
