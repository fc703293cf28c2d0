"""Common parts of all files of settings: sections, local training, and mistakes explained in
words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WrapValidator,
    field_validator,
)

from fedml_noniid.plugins.core.errors import nearest, shown
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.own_code import source_of
from fedml_noniid.plugins.rates import rate_of

if TYPE_CHECKING:
    from fedml_noniid.plugins.engines.callbacks import Callback
    from fedml_noniid.plugins.engines.plan import LocalTraining

MOST = 1_000_000_000  # of anything that is counted: products of such numbers fit into 64 bits
Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrNone = Annotated[int, Field(ge=0, le=MOST)]  # 0: none, or all
Momentum = Annotated[float, Field(ge=0, lt=1)]
Decay = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Whether the settings that are read passed every check before. Checks that import torch are left
# out then.
CHECKED: ContextVar[bool] = ContextVar("CHECKED", default=False)
F = TypeVar("F", bound=Callable[..., Any])


def unless_checked(check: F) -> F:
    """Makes a pydantic validator that changes nothing a check that is left out for CHECKED
    settings."""

    @functools.wraps(check)
    def checked(*given: Any) -> Any:
        # A validator of a field gets the class and the value; one of a section gets the section.
        return given[:2][-1] if CHECKED.get() else check(*given)

    return cast(F, checked)


class Section(BaseModel):
    """A section of a file: unknown keys and values of the wrong kind are errors, nothing is
    converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


def _rate(value: object, number: Callable[[object], float]) -> Any:
    """A learning rate: a number above 0, or the options of a schedule."""
    if not isinstance(value, dict):
        return number(value)
    rate_of(value)
    return value


LearningRate = Annotated[
    float,
    Field(gt=0, allow_inf_nan=False),
    WrapValidator(_rate),
    PlainSerializer(lambda value: value),
]


class LocalSettings(Section):
    """How a client trains in one round; optimiser and step size have other names in other files."""

    epochs: Count
    batch_size: Count
    momentum: Momentum | None = None  # None: the optimiser's own default
    weight_decay: Decay = 0.0
    local_steps: CountOrNone = 0  # above 0: steps per round in place of epochs
    drop_last: bool = False  # whether the last, short batch of an epoch is left out
    augment: bool = False  # whether images are cropped and flipped at random
    precision: str = "float32"  # of matrix products and convolutions
    callbacks: dict[str, dict[str, Any]] = Field(
        default={}, exclude_if=lambda given: not given
    )  # name -> options

    @field_validator("callbacks", mode="before")
    @classmethod
    def _empty(cls, callbacks: object) -> object:
        """`name:` with nothing behind it is a callback without options."""
        return (
            {key: given or {} for key, given in callbacks.items()}
            if isinstance(callbacks, dict)
            else callbacks
        )

    @field_validator("callbacks")
    @classmethod
    def _callbacks(cls, callbacks: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if CHECKED.get() and not any(
            "." in name for name in callbacks
        ):  # a user's file may have changed
            return callbacks
        from fedml_noniid.plugins.engines.callbacks import callback_of

        for name, options in callbacks.items():
            callback_of(name, options)
        return callbacks

    @field_validator("precision")
    @classmethod
    @unless_checked
    def _precision(cls, value: str) -> str:
        from fedml_noniid.plugins.models.model import PRECISIONS

        return known("precision", value, PRECISIONS)

    def built_callbacks(self) -> list[Callback]:
        """New ones, for a run."""
        from fedml_noniid.plugins.engines.callbacks import callback_of

        return [callback_of(name, options) for name, options in self.callbacks.items()]

    def own_code(self, lr: object) -> dict[str, str]:
        """The classes of the user's own that a run has: name -> SHA-256 of their source.

        `lr`: the step size.
        """
        names = [
            *self.callbacks,
            *([lr["decay"]] if isinstance(lr, dict) and "decay" in lr else []),
        ]
        return {name: source_of(name) for name in names if "." in name}

    def training(self, optimizer: str, lr: float) -> LocalTraining:
        """With the two that have other names."""
        from fedml_noniid.plugins.engines.plan import LocalTraining

        return LocalTraining(
            optimizer,
            rate_of(lr),
            self.epochs,
            self.batch_size,
            self.momentum,
            self.weight_decay,
            self.local_steps,
            self.drop_last,
            self.augment,
            self.precision,
        )


def too_large(content: object, key: str = "") -> list[str]:
    """A line for each whole number in the content of a file that does not fit into 64 bits."""
    if isinstance(content, int) and not -(2**63) <= content < 2**63:
        return [f"{key} = {shown(content)} is refused; allowed: whole numbers of 64 bits"]
    inner: Iterable[tuple[object, object]] = ()
    if isinstance(content, Mapping):
        inner = content.items()
    elif isinstance(content, list):
        inner = enumerate(content)
    return [
        line
        for name, value in inner
        for line in too_large(value, f"{key}.{name}" if key else str(name))
    ]


def mistakes(error: ValidationError, sections: Mapping[str, type[BaseModel]]) -> list[str]:
    """Each mistake in words: key, value, and what is allowed.

    `sections`: by name; the file itself is called "".
    """
    return [line for one in error.errors(include_url=False) for line in _lines(one, sections)]


def _lines(error: Any, sections: Mapping[str, type[BaseModel]]) -> list[str]:
    """One error of pydantic; one of our own validators may hold several."""
    path = [
        str(part) if len(str(part)) <= 100 else f"{str(part)[:97]}..."
        for part in error["loc"]
        if part != "[key]"
    ]
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        allowed = list(sections[path[-2] if len(path) > 1 else ""].model_fields)
        return [f"unknown key {key!r}{nearest(path[-1], allowed)}; allowed: {', '.join(allowed)}"]
    if error["type"] == "missing":
        return [f"{key} is missing"]
    if error["type"] == "value_error":
        return [
            f"{key}: {line}" if key else line for line in str(error["ctx"]["error"]).splitlines()
        ]
    if error["type"] == "string_pattern_mismatch":
        return [
            (
                f"{key} = {shown(error['input'])} is refused; allowed: letters, digits, '_', '+', "
                "'-' (DVC splits at dots)"
            )
        ]
    return [
        f"{key} = {shown(error['input'])} is refused: {error['msg'][0].lower()}{error['msg'][1:]}"
    ]
