"""Turns samples into vectors by a frozen network, once: the head is then trained on the vectors.

The vectors are the input of the linear layer that makes the network's output. If no linear layer
makes it, they are the output itself. `layer` names another module, whose output they are.

A pass is one of evaluation, in float32, of `batch` samples, by one thread. So vectors have the same
bits however many threads share the chunks. Another size of chunks may change their last bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from threading import local
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from fedml_noniid.core.errors import UserError, located, shown
from fedml_noniid.core.options import Count
from fedml_noniid.core.trees import Params
from fedml_noniid.data.dataset import Dataset, Raw, normalised
from fedml_noniid.models import factories
from fedml_noniid.models.modules import copied, hooked, our_name
from fedml_noniid.models.settings import NetworkSettings, fitting, read_weights
from fedml_noniid.own_code import running

Vectors = Callable[[Tensor], Tensor]  # normalised samples [B, ...] -> [B, d]


class Backbone(NamedTuple):
    """A frozen network, ready to make vectors."""

    new: Callable[[], Vectors]  # one for each thread
    taken: str  # what the vectors are, in words
    d: int  # numbers of a vector


class Sample(NamedTuple):
    """What a network is made for."""

    x: Tensor  # [1, ...], a normalised sample
    n_classes: int
    embedding: Tensor | None = None  # of text, the vectors of its tokens

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a sample."""
        return tuple(self.x.shape[1:])


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
        sample = _sample(data)
        backbone = self._backbone(sample, device)
        parts = []
        for raw in (data.train_x, data.test_x):
            chunks = (
                normalised(part, data.mean, data.std) for part in torch.split(raw, self.batch)
            )
            parts.append(self._scaled(backbone, chunks, threads))
        return self._made_of(data, backbone, parts)

    def outline(self, data: Dataset) -> Dataset:
        """As `embedded`, with zeros in place of the vectors, which costs two passes. UserError."""
        backbone = self._backbone(_sample(data), "cpu")
        lengths = (len(data.train_y), len(data.test_y))
        return self._made_of(data, backbone, [torch.zeros(n, backbone.d) for n in lengths])

    def vectors(self, x: Tensor, n_classes: int, embedding: Tensor | None = None) -> Tensor:
        """The vectors [n, d] of normalised samples [n, ...], such as a silo's own. UserError.

        With `normalise="channel"` they are as before that.
        """
        if not len(x):
            raise UserError("there is no sample to embed", allowed="at least one")
        backbone = self._backbone(Sample(x[:1].float(), n_classes, embedding), "cpu")
        chunks = (part.float() for part in torch.split(x, self.batch))
        return self._scaled(backbone, chunks, threads=1)

    def _made_of(self, data: Dataset, backbone: Backbone, parts: list[Tensor]) -> Dataset:
        raw: dict[str, Any] = {field.name: getattr(data, field.name) for field in fields(Raw)}
        raw |= dict(zip(("train_x", "test_x"), parts, strict=True))
        note = f"samples are vectors of {backbone.d} numbers, {backbone.taken}"
        raw |= {"unit": 1.0, "embedding": None, "encode": None, "notes": (*data.notes, note)}
        # Owners can't be left out of vectors.
        raw |= {"without": None, **dict.fromkeys(("unseen_x", "unseen_y", "unseen_owner"))}
        how = "channel" if self.normalise == "channel" else "none"
        return Dataset.from_raw(data.name, Raw(**raw), how)

    def _scaled(self, backbone: Backbone, chunks: Iterator[Tensor], threads: int) -> Tensor:
        """All vectors, of length 1 if that is asked for."""
        vectors = torch.cat(self._running(lambda: list(passed(backbone.new, chunks, threads))))
        if not vectors.isfinite().all():
            raise UserError(f"{self._what}: a vector is not finite", allowed="finite numbers")
        if self.normalise != "length":
            return vectors
        lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
        return vectors / torch.where(lengths > 0, lengths, 1.0)

    @property
    def _what(self) -> str:
        return f"model {factories.described(self.model)!r}"

    def _backbone(self, sample: Sample, device: torch.device | str) -> Backbone:
        """The network with its weights, tried on one sample twice."""
        make = self._ours if self.model in factories.MODELS else self._own
        new, taken = make(sample, torch.device(device))
        with torch.inference_mode():
            once, again = (self._running(lambda: new()(sample.x)) for _ in range(2))
        if not torch.equal(once, again):
            raise UserError(
                f"{self._what} draws random numbers in evaluation", allowed="passes that repeat"
            )
        return Backbone(new, f"{taken} of {factories.described(self.model)}", once.shape[1])

    def _ours(self, sample: Sample, device: torch.device) -> tuple[Callable[[], Vectors], str]:
        """One of our networks."""
        if self.layer:
            raise UserError(
                f"layer = {shown(self.layer)} is refused with model {self.model!r}",
                allowed="the input of its classifier",
            )
        network = factories.build(
            self.model, sample.shape, sample.n_classes, self.model_options, sample.embedding
        )
        trees = network.init(torch.Generator().manual_seed(0))
        start = self._weights(trees[0] | trees[1], network.layers[-1].parameters)
        params, buffers = (
            {name: start.get(name, leaf).to(device) for name, leaf in tree.items()}
            for tree in trees
        )

        def vectors(x: Tensor) -> Tensor:
            return network(params, buffers, x.to(device), False).features.cpu()

        return lambda: vectors, f"the input of {network.layers[-1].name}"

    def _own(self, sample: Sample, device: torch.device) -> tuple[Callable[[], Vectors], str]:
        """A module of a user. Of text, it takes the numbers of the tokens as int64."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            facts = factories.facts(sample.shape, sample.n_classes, sample.embedding)
            module = self._running(factories.maker(self.model, self.model_options, facts))
        if not isinstance(module, nn.Module):
            raise UserError(
                f"{self._what} gives a {type(module).__name__}", allowed="a torch.nn.Module"
            )
        kind = torch.float32 if sample.embedding is None else torch.int64
        module = copied(module, {})  # which may be the user's object
        module.eval()
        tap, taken = self._tap(module, sample.x.to(kind))
        self._load(tap, sample.x.to(kind))
        module.to(device).requires_grad_(False)

        def new() -> Vectors:
            own = copy.deepcopy(tap)
            return lambda x: own(x.to(device, kind)).float().cpu()

        return new, taken

    def _load(self, tap: Tap, x: Tensor) -> None:
        """Puts the tensors of `init` into the module."""
        if not self.init:
            return
        # A copy: parameters of the module itself may forbid gradients.
        unused = self._running(lambda: unused_parameters(copy.deepcopy(tap), x))
        state = {our_name(name): leaf for name, leaf in tap.module.state_dict().items()}
        wanted = {name: leaf for name, leaf in state.items() if name}
        for name, leaf in self._weights(wanted, map(our_name, unused)).items():
            state[name].copy_(leaf)

    def _weights(self, wanted: Mapping[str, Tensor], unused: Iterable[str]) -> Params:
        """The tensors of the file `init`.

        UserError unless it has all that the vectors depend on.
        """
        if not self.init:
            return {}
        with located("init"):
            weights = read_weights(Path(self.init))
            left = {*unused}
            start = fitting({k: leaf for k, leaf in weights.items() if k not in left}, {**wanted})
            for name in wanted:
                if name not in {*start, *left}:
                    allowed = "all tensors that the vectors depend on"
                    raise UserError(f"{self.init} lacks {name}", allowed=allowed)
        return start

    def _tap(self, module: nn.Module, x: Tensor) -> tuple[Tap, str]:
        """Where the vectors are taken, and that in words."""
        if self.layer:
            names = [name for name, _ in module.named_modules() if name]
            if self.layer not in names:
                raise UserError(path=("layer",), value=self.layer, allowed=", ".join(names))
            return Tap(module, self.layer), f"the output of {self.layer}"
        linear: list[tuple[str, Tensor]] = []

        def keep(name: str, _: object, out: Tensor) -> None:
            linear.append((name, out))

        with torch.no_grad(), hooked(module, keep, nn.Linear):
            out = self._running(lambda: module(x))
        if not isinstance(out, Tensor):
            raise UserError(f"{self._what} gives a {type(out).__name__}", allowed="a tensor")
        if linear and linear[-1][1].data_ptr() == out.data_ptr():
            return Tap(module, linear[-1][0], before=True), f"the input of {linear[-1][0]}"
        return Tap(module, ""), "the output"

    def _running(self, job: Callable[[], Any]) -> Any:
        """What the user's code returns. UserError with its place if it fails."""
        return running(self._what, job, "forward")


@dataclass
class Tap:
    """A module, and the part of it whose output, or input, is the vector."""

    module: nn.Module
    layer: str
    before: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, d]."""
        pieces: list[Any] = []
        part = self.module.get_submodule(self.layer)
        hook = part.register_forward_hook(
            lambda _, args, out: pieces.append(args[0] if self.before else out)
        )
        try:
            self.module(x)
        finally:
            hook.remove()
        if not pieces or not isinstance(pieces[-1], Tensor) or pieces[-1].shape[0] != len(x):
            raise UserError(
                f"{self.layer or 'the network'} gives no tensor with a row for each sample"
            )
        vectors: Tensor = pieces[-1].flatten(1) if pieces[-1].ndim > 1 else pieces[-1][:, None]
        return vectors


def unused_parameters(tap: Tap, x: Tensor) -> set[str]:
    """The names of the parameters that the vector of a sample does not depend on."""
    named = dict(tap.module.named_parameters())
    tap.module.requires_grad_(True)
    with torch.enable_grad():
        grads = torch.autograd.grad(tap(x).sum(), list(named.values()), allow_unused=True)
    return {name for name, grad in zip(named, grads, strict=True) if grad is None}


def _sample(data: Dataset) -> Sample:
    return Sample(
        normalised(data.train_x[:1], data.mean, data.std), len(data.classes), data.embedding
    )


def passed(new: Callable[[], Vectors], chunks: Iterator[Tensor], threads: int) -> Iterator[Tensor]:
    """The vectors of each chunk, in their order; each of the threads has a network of its own."""
    mine = local()

    def begin() -> None:
        torch.set_num_threads(1)  # of this thread
        mine.vectors = new()

    def embed_chunk(chunk: Tensor) -> Tensor:
        with torch.inference_mode():
            vectors: Tensor = mine.vectors(chunk)
        return vectors.clone()

    with ThreadPoolExecutor(threads, initializer=begin) as pool:
        # Chunks that wait are in memory.
        while waiting := [*islice(chunks, 2 * threads)]:
            yield from pool.map(embed_chunk, waiting)
