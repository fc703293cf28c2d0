"""Settings of a run's local training and of its callbacks, which the user may have written.

This module imports no torch before callbacks are built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from fedml_noniid.core.errors import UserError, together
from fedml_noniid.engines.local_training import LocalTraining
from fedml_noniid.own_code import is_own, source_of, source_with_files

if TYPE_CHECKING:
    from fedml_noniid.engines.callbacks import Callback
    from fedml_noniid.engines.metrics import Metric


def filled(named: object) -> object:
    """`name:` with nothing behind it is without options."""
    if not isinstance(named, dict):
        return named
    return {key: {} if entry is None else entry for key, entry in named.items()}


def _listed(named: object) -> object:
    """A list of names is without options."""
    if isinstance(named, list) and all(isinstance(name, str) for name in named):
        return {name: {} for name in named}
    if not isinstance(named, dict):
        raise UserError(value=named, allowed="a list of metrics, or {metric: options}")
    return filled(named)


Named = dict[str, dict[str, Any]]  # name -> options


def _buildable(named: Named, build: Callable[[str, dict[str, Any]], object]) -> Named:
    """The names and options. UserError with every mistake, from building each."""
    with together() as checked:
        for name, options in named.items():
            with checked():
                build(name, options)
    return named


class RunSettings(LocalTraining):
    """Local training, the callbacks of a run and its metrics."""

    callbacks: Annotated[Named, BeforeValidator(filled)] = Field(
        default={}, exclude_if=lambda value: not value
    )
    metrics: Annotated[Named, BeforeValidator(_listed)] = Field(
        default={}, exclude_if=lambda value: not value
    )

    @field_validator("callbacks")
    @classmethod
    def _callbacks(cls, callbacks: Named) -> Named:
        from fedml_noniid.engines.callbacks import callback_of

        return _buildable(callbacks, callback_of)

    @field_validator("metrics")
    @classmethod
    def _metrics(cls, metrics: Named) -> Named:
        from fedml_noniid.engines.metrics import metric_of

        return _buildable(metrics, metric_of)

    def built_callbacks(self) -> list[Callback]:
        """New ones, for a run; one of them measures the metrics, if there are any."""
        from fedml_noniid.engines.callbacks import callback_of
        from fedml_noniid.engines.metrics import Measuring

        callbacks = [callback_of(name, options) for name, options in self.callbacks.items()]
        metrics = self.built_metrics()
        return [*callbacks, Measuring(metrics)] if metrics else callbacks

    def built_metrics(self) -> list[Metric]:
        """The metrics."""
        from fedml_noniid.engines.metrics import metric_of

        return [metric_of(name, options) for name, options in self.metrics.items()]

    def own_code(self) -> dict[str, str]:
        """The user's code that a run has: name -> SHA-256 of its source, of a metric with its
        files."""
        names = [*self.callbacks]
        if isinstance(self.lr, dict) and "decay" in self.lr:
            names.append(self.lr["decay"])
        names.append(self.loss["name"] if isinstance(self.loss, dict) else self.loss)
        measured = {
            name: source_with_files(name, options)
            for name, options in self.metrics.items()
            if is_own(name)
        }
        return {name: source_of(name) for name in names if is_own(name)} | measured
