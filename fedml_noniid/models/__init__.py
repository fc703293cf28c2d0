"""Networks: ours, and a user's own."""

from __future__ import annotations

from fedml_noniid.models.factories import MODELS, OF_TEXT, build, described, is_own, name_of

__all__ = ["MODELS", "OF_TEXT", "build", "described", "is_own", "name_of"]
