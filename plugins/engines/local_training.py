"""How a client trains in a round: the settings, checked, and the optimiser that they describe.

This module imports no torch before something is built, so that settings are read quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, WrapValidator, field_validator

from fedml_noniid.plugins.core.errors import UserError, together
from fedml_noniid.plugins.core.options import (
    CHECKED,
    Count,
    CountOrNone,
    Momentum,
    NonNegative,
    OneOf,
    Positive,
    Section,
)
from fedml_noniid.plugins.own_code import source_of
from fedml_noniid.plugins.rates import Rate, rate_of

if TYPE_CHECKING:
    import torch

    from fedml_noniid.plugins.core.optimizers import Optimizer as Built
    from fedml_noniid.plugins.engines.callbacks import Callback


def _rate(value: object, number: Callable[[object], float]) -> Any:
    if isinstance(value, Mapping):
        rate_of(value)
    return value if isinstance(value, Mapping | Rate) else number(value)


# A number, the options of a schedule, or the schedule.
LearningRate = Annotated[Positive, WrapValidator(_rate), PlainSerializer(lambda value: value)]


def _optimizers() -> Mapping[str, type[Built]]:
    from fedml_noniid.plugins.core.optimizers import OPTIMIZERS

    return OPTIMIZERS


def _precisions() -> tuple[str, ...]:
    from fedml_noniid.plugins.models.model import PRECISIONS

    return PRECISIONS


Optimizer = Annotated[str, OneOf(_optimizers)]


class LocalTraining(Section):
    """How a client trains in one round."""

    optimizer: Optimizer = "sgd"
    lr: LearningRate
    epochs: Count
    batch_size: Count
    momentum: Momentum | None = None  # None: the optimiser's own default
    weight_decay: NonNegative = 0.0
    local_steps: CountOrNone = 0  # above 0: steps per round in place of epochs
    drop_last: bool = False  # whether the last, short batch of an epoch is left out
    augment: bool = False  # whether images are cropped and flipped at random
    precision: Annotated[str, OneOf(_precisions)] = "float32"  # of matrix products, convolutions
    cuda_graphs: bool = False  # whether steps are recorded and replayed as CUDA graphs

    @property
    def rate(self) -> Rate:
        """The schedule of the step size."""
        return self.lr if isinstance(self.lr, Rate) else rate_of(self.lr)

    def build(self, lr: float | None = None) -> Built:
        """The pure optimiser, with the step size `lr`; None: the largest of the schedule."""
        kind = _optimizers()[self.optimizer]
        given = {} if self.momentum is None else {"momentum": self.momentum}
        return kind(self.rate.start if lr is None else lr, weight_decay=self.weight_decay, **given)

    def check(self, shape: tuple[int, ...], device: torch.device) -> None:
        """UserError if these settings can't train on samples of this shape on this device."""
        from fedml_noniid.plugins.data.reading import PAD

        if self.precision == "tf32" and device.type != "cuda":
            raise UserError(
                f"precision = tf32 is for NVIDIA's matrix units, the device is {device.type}",
                allowed="float32, bf16",
            )
        if self.cuda_graphs and device.type != "cuda":
            raise UserError(
                f"cuda_graphs = true needs device cuda, the device is {device.type}",
                allowed="false",
            )
        if self.augment and not (len(shape) == 3 and min(shape[1:]) > PAD):
            raise UserError(
                f"augment = true is refused for samples of shape {list(shape)}",
                allowed="false, or images [channels, height, width] of at least "
                f"{PAD + 1} x {PAD + 1} pixels",
            )


def _empty(callbacks: object) -> object:
    """`name:` with nothing behind it is a callback without options."""
    if not isinstance(callbacks, dict):
        return callbacks
    return {key: given or {} for key, given in callbacks.items()}


class RunSettings(LocalTraining):
    """Local training, and the callbacks of a run: name -> options."""

    callbacks: Annotated[dict[str, dict[str, Any]], BeforeValidator(_empty)] = Field(
        default={}, exclude_if=lambda given: not given
    )

    @field_validator("callbacks")
    @classmethod
    def _build(cls, callbacks: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if CHECKED.get() and not any("." in name for name in callbacks):
            return callbacks  # a user's file may have changed, but ours have not
        from fedml_noniid.plugins.engines.callbacks import callback_of

        with together() as checked:
            for name, options in callbacks.items():
                with checked():
                    callback_of(name, options)
        return callbacks

    def built_callbacks(self) -> list[Callback]:
        """New ones, for a run."""
        from fedml_noniid.plugins.engines.callbacks import callback_of

        return [callback_of(name, options) for name, options in self.callbacks.items()]

    def own_code(self) -> dict[str, str]:
        """The user's classes that a run has: name -> SHA-256 of their source."""
        names = [*self.callbacks]
        if isinstance(self.lr, dict) and "decay" in self.lr:
            names.append(self.lr["decay"])
        return {name: source_of(name) for name in names if "." in name}
