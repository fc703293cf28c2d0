"""Trains in CUDA graphs (`train.cuda_graphs`): a step is recorded once, and one launch replays all
its kernels.

A step of the same shapes comes often. The first runs as always, which also warms the libraries up.
The second is recorded. It and all further ones are replayed. A graph repeats kernels and addresses.
So models, buffers and the optimiser's state keep their memory from step to step, and a counter on
the device finds the step's batch. Python does not run again in a replay: a hook that waits for the
device, or copies from the host, can't be recorded, and is refused.

A graph lives for one training of one chunk of clients, because its addresses do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from fedml_noniid.plugins.core.data import Pass
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.training import Descent
from fedml_noniid.plugins.core.trees import Params, Tree, tree_map
from fedml_noniid.plugins.engines.step_inputs import StepInputs
from fedml_noniid.plugins.models.model import Model

# (began, inputs, number of the first step) -> where local training ended
Descend = Callable[[Tree, StepInputs, int | Tensor], Descent]
MIN_SAME_SHAPE_STEPS = 3  # steps of one shape; with fewer of them a graph would be replayed once


class GraphRecorder(Protocol):
    """Records work on a device."""

    def aside(self) -> AbstractContextManager[None]:
        """Inside, work can be recorded."""
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records `work` without doing it.

        Returns what does it. UserError if it can't be recorded.
        """
        ...


class CudaGraphs:
    """Records CUDA graphs, on a stream of its own: the default stream can't be recorded."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch types it in part
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                work()
        except (RuntimeError, UserError) as error:
            cause = error.__cause__ or error  # an error in a method's hook has its cause
            if not isinstance(cause, RuntimeError):
                raise
            reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
            raise UserError(
                f"cuda_graphs = true is refused: a step can't be recorded ({reason}); allowed: "
                "false"
            ) from error
        return graph.replay


def graphs_for(network: Model) -> GraphRecorder:
    """What records the steps of a network. UserError if they can't be recorded."""
    if not network.vmappable:
        raise UserError(
            f"cuda_graphs = true is refused for model {network.name!r}: cuDNN's recurrent "
            "layers were never recorded "
            "here; allowed: false"
        )
    return CudaGraphs()


def replayed(graphs: GraphRecorder, descend: Descend, began: Tree, inputs: StepInputs) -> Descent:
    """As `descend(began, inputs, 0)`; the sums of losses and features may be rounded otherwise."""
    steps, drawn, out = inputs
    shapes = [math.prod(steps.index.shape[1:])] * len(steps) if steps.sizes is None else steps.sizes
    times = Counter(shapes)
    if max(times.values(), default=0) < MIN_SAME_SHAPE_STEPS:
        return descend(began, inputs, 0)
    params = began["params"]
    carried: Tree = {
        "params": tree_map(torch.clone, params)
        if out is None
        else tree_map(Tensor.copy_, out, params),
        "buffers": tree_map(torch.clone, began["buffers"]),
        "state": tree_map(torch.clone, began["state"]),
        "own": tree_map(torch.clone, began["own"]),
    }
    at = torch.zeros(1, dtype=torch.int64, device=steps.index.device)  # the number of the step
    first, weight = _first(steps), _weight(steps)
    given: Params = {}  # what the step draws
    totals: Params = {}

    def one(size: int) -> None:
        one_step = inputs._replace(
            steps=_at(steps, at, size, first), drawn=iter((given,)), out=carried["params"]
        )
        found = descend(carried | {"factor": began["factor"]}, one_step, at[0])
        if not totals:
            totals["loss"] = found.loss.new_zeros(len(steps), *found.loss.shape)
            if found.features is not None:
                totals["features"] = torch.zeros_like(found.features)
        totals["loss"].index_copy_(0, at, found.loss.unsqueeze(0))
        if found.features is not None and weight is not None:
            totals["features"].add_(weight.index_select(0, at)[0].unsqueeze(-1) * found.features)
        left = {name: getattr(found, name) for name in carried}
        tree_map(lambda old, new: old if new is old else old.copy_(new), carried, left)
        at.add_(1)

    ways: dict[int, Callable[[], None]] = {size: partial(one, size) for size in times}
    come = Counter[int]()
    with graphs.aside():
        for size in shapes:
            new = next(drawn)
            if not given:
                given |= tree_map(torch.clone, new)
            else:
                tree_map(lambda old, new: old.copy_(new), given, new)
            come[size] += 1
            if come[size] == 2 and times[size] >= MIN_SAME_SHAPE_STEPS:
                ways[size] = graphs.record(ways[size])
            ways[size]()
    loss = totals["loss"].sum(0)
    count = torch.zeros_like(loss) + (len(steps) if steps.live is None else steps.live.sum(0))
    features = (
        None if weight is None else totals["features"] / weight.sum(0).clamp(min=1).unsqueeze(-1)
    )
    return Descent(steps=count, loss=loss, features=features, **carried)


def _at(steps: Pass, at: Tensor, size: int, first: Tensor | None) -> Pass:
    """The pass of one step, of `size` samples. Its number `at` [1] is on the device."""
    of_step = {
        name: leaf.index_select(0, at)
        for name in ("mask", "live", "last", "personal")
        if (leaf := getattr(steps, name)) is not None
    }
    if first is None:
        return replace(steps, index=steps.index.index_select(0, at), **of_step)
    places = first.index_select(0, at) + torch.arange(size, device=at.device)
    return replace(steps, index=steps.index.index_select(0, places), sizes=(size,), **of_step)


def _first(steps: Pass) -> Tensor | None:
    """Where each step's samples begin in a flat index, [S]; None for a padded one."""
    if steps.sizes is None:
        return None
    begins = accumulate(steps.sizes[:-1], initial=0)
    return torch.tensor(list(begins), device=steps.index.device)


def _weight(steps: Pass) -> Tensor | None:
    """How many samples of the last epoch each step has, [S, ...]; None if nobody asks for that
    epoch's features."""
    if steps.last is None:
        return None
    if steps.mask is not None:
        return steps.last * steps.mask.sum(-1)
    sizes = (
        steps.index.shape[-1]
        if steps.sizes is None
        else torch.tensor(steps.sizes, device=steps.index.device)
    )
    return steps.last * sizes
