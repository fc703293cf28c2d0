"""Networks: ours, and a user's own."""

from __future__ import annotations

from fedml_noniid.models.factories import (
    CNN_PIXELS,
    MODELS,
    OF_TEXT,
    build,
    described,
    is_own,
    model_for,
    name_of,
)

__all__ = [
    "CNN_PIXELS",
    "MODELS",
    "OF_TEXT",
    "build",
    "described",
    "is_own",
    "model_for",
    "name_of",
]
