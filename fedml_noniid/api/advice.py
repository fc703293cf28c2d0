"""Which method to use on a split: the same answer as `noniid advise`."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from fedml_noniid.api.split import Split, check_data
from fedml_noniid.pipelines.advise.learner import Advice as Found
from fedml_noniid.pipelines.advise.learner import Expected
from fedml_noniid.pipelines.tools import advice as tool
from fedml_noniid.plugins.data.checks import real_number
from fedml_noniid.plugins.engines.cohort import cohort_size


@dataclass(frozen=True, eq=False, repr=False)
class Advice:
    """The methods by expected gain over FedAvg, or the reason why the advisor does not know.

    >>> import fedml_noniid as nd
    >>> advice = nd.advise(nd.partition(nd.load("digits"), "iid", clients=2))
    >>> advice.method is None, advice.reason.partition(",")[0]
    (True, 'clients 2')
    """

    found: Found

    @property
    def method(self) -> str | None:
        """The advised method; None if the advisor does not know."""
        return None if self.found.best is None else self.found.best.method

    @property
    def reason(self) -> str:
        """Why it does not know; "" if it does."""
        return self.found.reason

    @property
    def table(self) -> pd.DataFrame:
        """Method, expected gain and the ends of its 90 % interval in points, best first; empty if
        it does not know."""
        return pd.DataFrame(self.found.ranked, columns=list(Expected._fields))

    def __repr__(self) -> str:
        return tool.words("advice", self.found)


def advise(split: Split, *, participation: float = 1.0) -> Advice:
    """The methods that should do best on this split, from runs on other data. Nothing is trained.

    `participation`: the fraction of the clients in each round. UserError for anything that is no
    split.

    >>> import fedml_noniid as nd
    >>> split = nd.partition(nd.load("digits"), "dirichlet", clients=20, alpha=0.1)
    >>> nd.advise(split).table.columns.tolist()
    ['method', 'gain', 'low', 'high']
    """
    check_data("advise", split, Split)
    real_number(
        "advise: participation",
        participation,
        lambda value: 0 < value <= 1,
        "a number above 0, to 1",
    )
    n = len(split.indices.clients)
    return Advice(tool.of_split(split.partition.statistics, cohort_size(participation, n) / n))
