"""Turns samples into vectors by a frozen network, once: the head is then trained on the vectors.

The vectors are the input of the linear layer that makes the network's output. If no linear layer
makes it, they are the output itself. `layer` names another module, whose output they are.

A pass is one of evaluation, in float32, of `batch` samples, by one thread. So vectors have the same
bits however many threads share the chunks. Another size of chunks may change their last bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from threading import local
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from fedml_noniid.plugins.core.errors import UserError, located, shown
from fedml_noniid.plugins.core.options import Count
from fedml_noniid.plugins.core.trees import Params
from fedml_noniid.plugins.data.dataset import Dataset, Raw, normalised
from fedml_noniid.plugins.models import factories
from fedml_noniid.plugins.models.settings import NetworkSettings, fitting, our_name, read_weights
from fedml_noniid.plugins.own_code import place

Vectors = Callable[[Tensor], Tensor]  # normalised samples [B, ...] -> [B, d]


class Backbone(NamedTuple):
    """A frozen network, ready to make vectors."""

    new: Callable[[], Vectors]  # one for each thread
    taken: str  # what the vectors are, in words
    d: int  # numbers of a vector


class EmbedSettings(NetworkSettings):
    """How samples become vectors: the section `embed` of the data.

    `init` holds the weights: a safetensors file, or a state dict of torch.
    """

    layer: str = ""  # a module of the network whose output is the vector
    batch: Count = 256  # samples of a pass
    # length: each vector is divided by its length; channel: each number gets mean 0 and deviation 1
    # over the training set, which needs sums of all clients
    normalise: Literal["none", "length", "channel"] = Field(default="none")

    def model_code(self) -> dict[str, str]:
        with located("data", "embed"):
            return super().model_code()

    def embedded(
        self, data: Dataset, threads: int = 1, device: torch.device | str = "cpu"
    ) -> Dataset:
        """The data set of the vectors [n, d] of the samples. UserError."""
        backbone = self._backbone(data, device)
        parts = (data.train_x, data.test_x)
        return self._made_of(data, backbone, [self._of(backbone, data, x, threads) for x in parts])

    def outline(self, data: Dataset) -> Dataset:
        """As `embedded`, with zeros in place of the vectors, which costs two passes. UserError."""
        backbone = self._backbone(data, "cpu")
        lengths = (len(data.train_y), len(data.test_y))
        return self._made_of(data, backbone, [torch.zeros(n, backbone.d) for n in lengths])

    def vectors(self, data: Dataset, x: Tensor, threads: int = 1) -> Tensor:
        """The vectors [n, d] of raw samples [n, ...] as `data` has them. UserError."""
        return self._of(self._backbone(data, "cpu"), data, x, threads)

    def _made_of(self, data: Dataset, backbone: Backbone, parts: list[Tensor]) -> Dataset:
        raw: dict[str, Any] = {one.name: getattr(data, one.name) for one in fields(Raw)}
        raw |= dict(zip(("train_x", "test_x"), parts, strict=True))
        note = f"samples are vectors of {backbone.d} numbers, {backbone.taken}"
        raw |= {"unit": 1.0, "embedding": None, "notes": (*data.notes, note)}
        how = "channel" if self.normalise == "channel" else "none"
        return Dataset.of(data.name, Raw(**raw), how)

    def _of(self, backbone: Backbone, data: Dataset, x: Tensor, threads: int) -> Tensor:
        chunks = (normalised_chunk(data, part) for part in torch.split(x, self.batch))
        out = passed(backbone.new, chunks, threads)
        found = torch.cat(list(out)) if len(x) else torch.zeros(0, backbone.d)
        if not found.isfinite().all():
            raise UserError(f"{self._what}: a vector is not finite", allowed="finite numbers")
        if self.normalise == "length":
            lengths = torch.linalg.vector_norm(found, dim=1, keepdim=True)
            found = found / torch.where(lengths > 0, lengths, 1.0)
        return found

    @property
    def _what(self) -> str:
        return f"model {factories.described(self.model)!r}"

    def _backbone(self, data: Dataset, device: torch.device | str) -> Backbone:
        """The network with its weights, tried on one sample twice."""
        make = self._ours if self.model in factories.MODELS else self._own
        x = normalised_chunk(data, data.train_x[:1])
        new, taken = make(data, x, torch.device(device))
        once, again = (self._passed(new(), x) for _ in range(2))
        if not torch.equal(once, again):
            raise UserError(
                f"{self._what} draws random numbers in evaluation", allowed="passes that repeat"
            )
        return Backbone(new, f"{taken} of {factories.described(self.model)}", once.shape[1])

    def _ours(
        self, data: Dataset, x: Tensor, device: torch.device
    ) -> tuple[Callable[[], Vectors], str]:
        if self.layer:
            raise UserError(
                f"layer = {shown(self.layer)} is refused with model {self.model!r}",
                allowed="the input of its classifier",
            )
        shape, n_classes = tuple(data.train_x.shape[1:]), len(data.classes)
        network = factories.build(self.model, shape, n_classes, self.model_options, data.embedding)
        params, buffers = network.init(torch.Generator().manual_seed(0))
        unused = {*network.layers[-1].parameters}
        start = self._weights(params | buffers, unused)
        params, buffers = (
            {name: start.get(name, leaf).to(device) for name, leaf in tree.items()}
            for tree in (params, buffers)
        )

        def vectors(x: Tensor) -> Tensor:
            return network(params, buffers, x.to(device), False).features.cpu()

        return lambda: vectors, f"the input of {network.layers[-1].name}"

    def _own(
        self, data: Dataset, x: Tensor, device: torch.device
    ) -> tuple[Callable[[], Vectors], str]:
        facts = (tuple(data.train_x.shape[1:]), len(data.classes), data.embedding)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = self._running(factories.maker(self.model, self.model_options, *facts))
        if not isinstance(module, nn.Module):
            raise UserError(
                f"{self._what} gives a {type(module).__name__}", allowed="a torch.nn.Module"
            )
        module.eval()
        x = x.long() if data.embedding is not None else x
        tap, taken = self._tap(module, x)
        # A frozen module may forbid gradients; only a copy is asked which parameters count.
        used = used_parameters(copy.deepcopy(tap), x, self._running)
        state = {our_name(name): leaf for name, leaf in module.state_dict().items()}
        unused = state.keys() - {our_name(name) for name in used}
        unused -= {our_name(name) for name, _ in module.named_buffers()}
        start = self._weights({k: v for k, v in state.items() if k}, unused)
        with torch.no_grad():
            for name, leaf in module.state_dict().items():
                if our_name(name) in start:
                    leaf.copy_(start[our_name(name)])
        module.to(device).requires_grad_(False)

        def new() -> Vectors:
            own = copy.deepcopy(tap)
            is_text = data.embedding is not None
            return lambda x: own((x.long() if is_text else x).to(device)).float().cpu()

        return new, taken

    def _weights(self, wanted: Mapping[str, Tensor], unused: Iterable[str]) -> Params:
        """The tensors of the file `init`.

        UserError unless it has all that the vectors depend on.
        """
        if not self.init:
            return {}
        with located("init"):
            found = read_weights(Path(self.init))
            left = {*unused}
            start = fitting({k: leaf for k, leaf in found.items() if k not in left}, {**wanted})
            missing = [name for name in wanted if name not in start and name not in left]
            if missing:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise UserError(
                    f"{self.init} lacks {missing[0]}{more}",
                    allowed="all tensors that the vectors depend on",
                )
        return start

    def _tap(self, module: nn.Module, x: Tensor) -> tuple[Tap, str]:
        """Where the vectors are taken, and that in words."""
        names = {part: name for name, part in module.named_modules()}
        if self.layer:
            if self.layer not in names.values():
                raise UserError(
                    where=("layer",),
                    value=self.layer,
                    allowed=", ".join(filter(None, names.values())),
                )
            return Tap(module, self.layer), f"the output of {self.layer}"
        linear: list[tuple[str, Tensor]] = []
        hooks = [
            part.register_forward_hook(lambda part, _, out: linear.append((names[part], out)))
            for part in names
            if isinstance(part, nn.Linear)
        ]
        with torch.no_grad():
            out = self._running(lambda: module(x))
        for hook in hooks:
            hook.remove()
        if not isinstance(out, Tensor):
            raise UserError(f"{self._what} gives a {type(out).__name__}", allowed="a tensor")
        if linear and linear[-1][1].data_ptr() == out.data_ptr():
            return Tap(module, linear[-1][0], before=True), f"the input of {linear[-1][0]}"
        return Tap(module, ""), "the output"

    def _passed(self, vectors: Vectors, x: Tensor) -> Tensor:
        with torch.inference_mode():
            found: Tensor = self._running(lambda: vectors(x))
        return found

    def _running(self, call: Callable[[], Any]) -> Any:
        """What the user's code returns. UserError with its place if it fails."""
        try:
            return call()
        except UserError:
            raise
        except Exception as error:  # of any kind: the code is the user's
            told = " ".join(str(error).split())[:200]
            told = f"{place(error, 'forward')}{type(error).__name__}: {told}"
            raise UserError(f"{self._what} fails: {told}") from error


@dataclass
class Tap:
    """A module, and the part of it whose output, or input, is the vector."""

    module: nn.Module
    layer: str
    before: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, d]."""
        found: list[Any] = []
        part = self.module.get_submodule(self.layer)
        hook = part.register_forward_hook(
            lambda _, args, out: found.append(args[0] if self.before else out)
        )
        try:
            self.module(x)
        finally:
            hook.remove()
        if not found or not isinstance(found[-1], Tensor) or found[-1].shape[0] != len(x):
            raise UserError(
                f"{self.layer or 'the network'} gives no tensor with a row for each sample"
            )
        vectors: Tensor = found[-1].flatten(1) if found[-1].ndim > 1 else found[-1][:, None]
        return vectors


def used_parameters(tap: Tap, x: Tensor, running: Callable[[Callable[[], Any]], Any]) -> set[str]:
    """The names of the parameters that the vector of a sample depends on."""
    named = dict(tap.module.named_parameters())
    for leaf in named.values():
        leaf.requires_grad_(True)
    with torch.enable_grad():
        out = running(lambda: tap(x)).sum()
        grads = torch.autograd.grad(out, list(named.values()), allow_unused=True)
    return {name for name, grad in zip(named, grads, strict=True) if grad is not None}


def normalised_chunk(data: Dataset, x: Tensor) -> Tensor:
    """Raw samples [B, ...] of a data set, normalised as it says."""
    return normalised(x.to(torch.float32, copy=True), data.mean, data.std)


def passed(new: Callable[[], Vectors], chunks: Iterable[Tensor], threads: int) -> Iterable[Tensor]:
    """The vectors of each chunk, in their order; each of the threads has a network of its own."""
    mine = local()

    def begin() -> None:
        torch.set_num_threads(1)  # of this thread
        mine.vectors = new()

    def one(chunk: Tensor) -> Tensor:
        with torch.inference_mode():
            found: Tensor = mine.vectors(chunk)
        return found.clone()

    with ThreadPoolExecutor(threads, initializer=begin) as pool:
        waiting: list[Any] = []
        for chunk in chunks:
            waiting.append(pool.submit(one, chunk))
            # Chunks that wait are in memory.
            if len(waiting) > 2 * threads:
                yield waiting.pop(0).result()
        yield from (each.result() for each in waiting)
