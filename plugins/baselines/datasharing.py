"""Data sharing. Zhao, Li, Lai, Suda, Civin, Chandra: Federated Learning with Non-IID Data, 2018.
https://arxiv.org/abs/1806.00582

Section 4: a small set of labelled data is shared with every client, which trains on it together
with its own data. Here that set is the public split. The method is therefore the control for
methods that train on that split (FNR-FL): it shows the gain if every client has it. n_k counts
shared samples. `share` takes so many, evenly spaced in the split. With `augment` they are cropped
and flipped as all samples of a client; FNR-FL and FSL take theirs as they are. The paper first
trains the global model on the shared data. That is left out, so all methods begin with the same
weights.

Meeting others: methods that read a client's data (class counts, mean features) read the shared
samples too. FedML pair: `make_pair("datasharing")`; every silo needs the public split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import Component, Needs, Public
from fedml_noniid.core.options import Fraction


@dataclass(frozen=True)
class DataSharing(Component):
    """Gives the public split to every client."""

    name: ClassVar[str] = "datasharing"

    share: Fraction = 1.0  # alpha of section 4; their figure 6 has 0 to 1

    @property
    def needs(self) -> Needs:
        """Section 4: the fraction alpha of the shared set, the same samples for every client."""
        return Needs(public=Public.LABELLED, shared=self.share)
