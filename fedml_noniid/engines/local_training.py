"""How a client trains in a round: the settings, checked, and the optimiser that they describe.

This module imports no torch before something is built, so that settings are read quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, WrapValidator

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import Count, Momentum, NonNegative, OneOf, Positive, Range, Section
from fedml_noniid.data.batches import MOST_READ, passes
from fedml_noniid.rates import Rate, rate_of

if TYPE_CHECKING:
    import torch

    from fedml_noniid.core.losses import Loss
    from fedml_noniid.core.optimizers import Optimizer as Built


def _rate(value: object, number: Callable[[object], float]) -> Any:
    if isinstance(value, Mapping):
        rate_of(value)
    return value if isinstance(value, Mapping | Rate) else number(value)


# A number, the options of a schedule, or the schedule.
LearningRate = Annotated[Positive, WrapValidator(_rate), PlainSerializer(lambda value: value)]


def _loss(value: Any) -> Any:
    if isinstance(value, type):
        value = f"{value.__module__}:{value.__qualname__}"
    if value != DEFAULT_LOSS:  # the default imports no torch
        from fedml_noniid.losses import loss_of

        loss_of(value)
    return value


def _default(value: object) -> bool:
    return value == DEFAULT_LOSS


DEFAULT_LOSS = "cross_entropy"
# Its name, or {name: ..., option: ...}.
LossSetting = Annotated[Any, BeforeValidator(_loss)]


def _optimizers() -> Mapping[str, type[Built]]:
    from fedml_noniid.core.optimizers import OPTIMIZERS

    return OPTIMIZERS


def _precisions() -> tuple[str, ...]:
    from fedml_noniid.models.model import PRECISIONS

    return PRECISIONS


Optimizer = Annotated[str, OneOf(_optimizers)]


class LocalTraining(Section):
    """How a client trains in one round."""

    optimizer: Optimizer = "sgd"
    lr: LearningRate
    loss: LossSetting = Field(default=DEFAULT_LOSS, exclude_if=_default)
    epochs: Annotated[int, Range(1, MOST_READ)]
    batch_size: Count
    momentum: Momentum | None = None  # None: the optimiser's own default
    weight_decay: NonNegative = 0.0
    local_steps: Annotated[int, Range(0, MOST_READ)] = (
        0  # above 0: steps per round in place of epochs
    )
    drop_last: bool = False  # whether the last, short batch of an epoch is left out
    augment: bool = False  # whether images are cropped and flipped at random
    precision: Annotated[str, OneOf(_precisions)] = "float32"  # of matrix products, convolutions

    @property
    def rate(self) -> Rate:
        """The schedule of the step size."""
        return self.lr if isinstance(self.lr, Rate) else rate_of(self.lr)

    @property
    def built_loss(self) -> Loss:
        """The loss."""
        from fedml_noniid.losses import loss_of

        return loss_of(self.loss)

    def passes(self, n: int) -> int:
        """How often the training of a round reads a sample of `n`, at most."""
        return passes(n, self.epochs, self.batch_size, self.local_steps, self.drop_last)

    def build(self, lr: float | None = None) -> Built:
        """The pure optimiser, with the step size `lr`; None: the largest of the schedule."""
        kind = _optimizers()[self.optimizer]
        options = {} if self.momentum is None else {"momentum": self.momentum}
        return kind(
            self.rate.start if lr is None else lr, weight_decay=self.weight_decay, **options
        )

    def check_reads(self, sizes: Collection[int]) -> None:
        """UserError if a client with so many samples reads more in a round than memory holds."""
        reads = {n: n * self.passes(n) for n in set(sizes)}
        n = max(reads, key=reads.__getitem__)
        if reads[n] > MOST_READ:
            key = "local_steps" if self.local_steps else "epochs"
            raise UserError(
                f"is refused: a client with {n} samples would read {reads[n]} in a round, and "
                f"their order would take {8 * reads[n] / 1e9:.1f} GB",
                path=(key,),
                value=getattr(self, key),
                allowed=f"at most {MOST_READ} samples in a round of a client",
            )

    def check(self, shape: tuple[int, ...], device: torch.device) -> None:
        """UserError if these settings can't train on samples of this shape on this device."""
        from fedml_noniid.data.reading import PAD
        from fedml_noniid.engines.device import refuse_tf32

        if self.precision == "tf32":
            refuse_tf32(device)
        if self.augment and not (len(shape) == 3 and min(shape[1:]) > PAD):
            raise UserError(
                f"augment = true is refused for samples of shape {list(shape)}",
                allowed="false, or images [channels, height, width] of at least "
                f"{PAD + 1} x {PAD + 1} pixels",
            )
