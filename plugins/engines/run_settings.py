"""Settings of a run's local training and of its callbacks, which the user may have written.

This module imports no torch before callbacks are built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from fedml_noniid.plugins.core.errors import together
from fedml_noniid.plugins.engines.local_training import LocalTraining
from fedml_noniid.plugins.own_code import is_path, source_of

if TYPE_CHECKING:
    from fedml_noniid.plugins.engines.callbacks import Callback


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
        names.append(self.loss["name"] if isinstance(self.loss, dict) else self.loss)
        return {name: source_of(name) for name in names if is_path(name)}
