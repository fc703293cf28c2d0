"""Data sharing. Zhao, Li, Lai, Suda, Civin, Chandra: Federated Learning with Non-IID Data, 2018.
https://arxiv.org/abs/1806.00582

Section 4: a small set of labelled data is shared with every client, which trains on it together with its own. Here that
is the public split, which makes this the control for methods that train on it (FNR-FL): what is it worth if everybody
simply has it? n_k counts the shared samples; `share` takes the first part of the split. Left out is the first training
of the global model on the shared data, so that all methods begin with the same weights.
Its FedML pair is `make_pair("datasharing")`; every silo needs the public split.

Meeting others: whatever reads a client's data (class counts, mean features) reads the shared samples too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plugins.core.component import Component, RecipeError, Setting


@dataclass(frozen=True)
class DataSharing(Component):
    """Gives the public split to every client."""

    name: ClassVar[str] = "datasharing"
    public: ClassVar[str] = "labelled"

    share: float = 1.0  # alpha of section 4; their figure 6 has 0 to 1

    def check(self, setting: Setting) -> None:
        if not 0 <= self.share <= 1:
            raise RecipeError(f"datasharing: share = {self.share} must lie in [0, 1]")

    def shared(self, n_public: int) -> int:
        """Section 4: alpha of the shared set, the same samples for everybody."""
        return round(self.share * n_public)
