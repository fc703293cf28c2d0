"""What a network is to engines and methods: a pure function of its parameters and buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from fedml_noniid.core.task import Layer, Output
from fedml_noniid.core.trees import Params

# logits [..., B, C] -> (gradient of the mean loss by them, losses of the samples [..., B])
Slope = Callable[[Tensor], tuple[Tensor, Tensor]]
# Precisions of the matrix products and convolutions of local training. tf32 rounds their inputs to
# 11 bits, on a GPU only. bf16 rounds inputs and layers' outputs to 8 bits wherever torch's autocast
# does. Both change a run's bits. Parameters, sums, losses, the server and every evaluation keep
# their own precision.
PRECISIONS = ("float32", "tf32", "bf16")


@dataclass(frozen=True, eq=False)
class Model(ABC):
    """A network. Implements `core.task.Network`."""

    name: str
    _: KW_ONLY
    sequential_only: str = ""  # why torch.func.vmap can't take it; "" if it can
    # whether samples are the numbers of tokens, on which arithmetic has no meaning
    tokens: bool = False
    frozen: frozenset[str] = frozenset()  # parameters that nobody trains, the same for all
    # first values in place of those that `init` draws
    start: Params = field(default_factory=dict, repr=False)
    # whether passes are plain, see `Forward`: one client at a time, without vmap
    plain: bool = False
    precision: str = "float32"  # of training, one of PRECISIONS
    vocabulary: int = 0  # V, if outputs are logits of tokens [B, T, V]; 0: they are [B, C]

    @property
    def vmappable(self) -> bool:
        """Whether torch.func.vmap can take it."""
        return not self.sequential_only

    @property
    @abstractmethod
    def n_classes(self) -> int:
        """C."""

    @property
    @abstractmethod
    def feature_size(self) -> int:
        """d, the input of the classifier; 0 without a linear classifier."""

    @property
    @abstractmethod
    def layers(self) -> tuple[Layer, ...]:
        """The weight layers in forward order, the classifier last."""

    @property
    @abstractmethod
    def norms(self) -> frozenset[str]:
        """The names of the batch norms."""

    @property
    @abstractmethod
    def draws(self) -> bool:
        """Whether a pass in training draws random numbers."""

    @property
    def has_features(self) -> bool:
        """Whether a linear classifier that is trained makes the logits from features."""
        return self.feature_size > 0 and self.frozen.isdisjoint(self.layers[-1].parameters)

    @property
    def records(self) -> bool:
        """Whether there are `activations`."""
        return True

    @property
    def dense(self) -> bool:
        """Whether the network takes several clients' trees at once (`Forward.axes`), which pays on
        a CPU."""
        return False

    @property
    def written_out(self) -> bool:
        """Whether there is `gradient`."""
        return False

    @abstractmethod
    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        """(parameters, buffers), float32 on the CPU."""

    @abstractmethod
    def draws_ahead(
        self, params: Params, buffers: Params, x: Tensor, keys: Tensor, batch: int
    ) -> Iterator[Params]:
        """What the passes of a training draw, step by step.

        `x`: a sample [1, ...]; `keys` [..., S]: of the steps, on the host; `batch`: B, the samples
        of the largest step.
        """

    @abstractmethod
    def __call__(
        self,
        params: Params,
        buffers: Params,
        x: Tensor,
        train: bool,
        mask: Tensor | None = None,
        key: Tensor | None = None,
        drawn: Params | None = None,
        axes: int = 0,
    ) -> Output:
        """The forward pass of a batch [B, ...]; `axes`: 1 for batches of several clients, [M, B,
        ...].

        `drawn`: a step of `draws_ahead`, in place of `key`.
        """

    @abstractmethod
    def classify(self, params: Params, h: Tensor) -> Tensor:
        """Logits [B, C] of features [B, d]."""

    def activations(self, params: Params, buffers: Params, x: Tensor) -> dict[str, Tensor]:
        """As `core.task.Network.activations`."""
        raise NotImplementedError

    def gradient(
        self,
        params: Params,
        buffers: Params,
        x: Tensor,
        slope: Slope,
        mask: Tensor | None = None,
        drawn: Params | None = None,
        out: Params | None = None,
        axes: int = 0,
    ) -> tuple[Params, Tensor, Output]:
        """Gradient of the mean loss of a batch, losses of its samples, and forward pass in
        training."""
        raise NotImplementedError
