"""Measures the tightest PyTorch loop for one process: the limit of this machine for one client at a
time.

It uses ready batches, autograd.grad, updates in place, and no module calls where they cost time. It
tries several variants on a few steps and measures the fastest one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.harness import Job, Meter, main

Loss = Callable[[Tensor, Tensor], Tensor]


class Variant:
    """A way to write the loop."""

    def __init__(self, job: Job, layout: torch.memory_format, fused: bool, unrolled: bool) -> None:
        """`fused`: all parameters in one call per step; `unrolled`: functions instead of modules,
        for the MLP."""
        self.job, self.layout, self.fused = job, layout, fused
        module = job.module().to(memory_format=layout)  # type: ignore[call-overload]  # torch's stub leaves it out
        self.names = [name for name, _ in module.named_parameters()]
        self.params = list(module.parameters())
        # Every simulator also averages the running statistics of batch norms.
        self.state: list[Tensor] = [
            *self.params,
            *(b for b in module.buffers() if b.is_floating_point()),
        ]
        self.loss: Loss = self._mlp if unrolled else lambda x, y: F.cross_entropy(module(x), y)
        self.name = " ".join(
            ["channels-last" if layout == torch.channels_last else "contiguous"]
            * (self.params[0].ndim == 4)
            + ["unrolled"] * unrolled
            + ["fused updates" if fused else "updates one by one"]
        )

    def _mlp(self, x: Tensor, y: Tensor) -> Tensor:
        w1, b1, w2, b2 = self.params
        return F.cross_entropy(torch.addmm(b2, torch.addmm(b1, x, w1.t()).relu_(), w2.t()), y)

    def batches(self, t: int, clients: int) -> list[list[tuple[Tensor, Tensor]]]:
        """The batches of the first `clients` clients in round `t`, ready to use."""
        job, made = self.job, []
        for rows in job.batches[t][:clients]:
            x = job.x[rows]  # [S, B, ...]
            x = x.flatten(2) if self.params[0].ndim == 2 else x
            parts = [
                part.contiguous(memory_format=self.layout) if part.ndim == 4 else part
                for part in x.unbind()
            ]
            made.append(list(zip(parts, job.y[rows].unbind(), strict=True)))
        return made

    def round(self, batches: list[list[tuple[Tensor, Tensor]]]) -> None:
        """Trains every client from the model and replaces the model by the clients' mean."""
        with torch.no_grad():
            start = [leaf.clone() for leaf in self.state]
            total = [torch.zeros_like(leaf) for leaf in self.state]
        for batch in batches:
            self._client(batch, start)
            with torch.no_grad():
                torch._foreach_add_(total, self.state)
        with torch.no_grad():
            torch._foreach_div_(total, len(batches))
            torch._foreach_copy_(self.state, total)

    def _client(self, batches: list[tuple[Tensor, Tensor]], start: list[Tensor]) -> None:
        params, lr, loss = self.params, self.job.lr, self.loss
        with torch.no_grad():
            torch._foreach_copy_(self.state, start)
        for x, y in batches:
            grads = torch.autograd.grad(loss(x, y), params)
            with torch.no_grad():
                if self.fused:
                    torch._foreach_add_(params, grads, alpha=-lr)
                else:
                    for parameter, grad in zip(params, grads, strict=True):
                        parameter.add_(grad, alpha=-lr)

    def trial(self) -> float:
        """CPU seconds for one client: the minimum of some attempts, without the first, which warms
        up."""
        batches = self.batches(0, 1)
        seconds: list[float] = []
        while len(seconds) < 2 or sum(seconds) < self.job.trial_s:
            began = time.process_time()
            self.round(batches)
            seconds.append(time.process_time() - began)
        return min(seconds[1:])


def variants(job: Job) -> list[Callable[[], Variant]]:
    """A function for each variant. It makes the variant with the initial weights."""
    layouts = (
        [torch.contiguous_format]
        if job.model == "mlp"
        else [torch.contiguous_format, torch.channels_last]
    )
    kinds = [(layout, fused, job.model == "mlp") for layout in layouts for fused in (False, True)]
    return [lambda kind=kind: Variant(job, *kind) for kind in kinds]  # type: ignore[misc]  # mypy can't infer these


def measure(job: Job, _: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Measures all rounds of the fastest variant."""
    best = min(variants(job), key=lambda make: make().trial())()
    meter = Meter()
    for t in range(len(job.cohorts)):
        batches = best.batches(t, len(job.cohorts[t]))
        meter.begin()
        best.round(batches)
        meter.end()
    weights = {name: leaf.detach() for name, leaf in zip(best.names, best.params, strict=True)}
    return meter.measured(job.warm, best.name), weights


if __name__ == "__main__":
    main(measure)
