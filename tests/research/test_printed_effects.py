"""What claims.yaml says of the papers' tables, against reported.yaml; and which runs behind a cause
were known."""

from __future__ import annotations

import pytest
from ruamel.yaml import YAML

from research.claims import Claims, of_papers
from tests.pipelines.small import ROOT


@pytest.fixture(scope="module")
def ours() -> dict[str, Claims]:
    """Paper -> the repository's claims."""
    return of_papers("small", ROOT)


def test_fedavg_s_printed_accuracy_is_that_of_a_cell_of_the_tables(
    ours: dict[str, Claims],
) -> None:
    """The committed page holds the printed effects: it is compared to the byte."""
    for paper, claims in ours.items():
        tables = YAML(typ="safe").load(ROOT / f"research/papers/{paper}/reported.yaml")
        scale = 100 if paper == "fnr" else 1
        cells = [
            scale * (cell[0] if isinstance(cell, list) else cell)
            for of in tables.values()
            for row, found in of["rows"].items()
            for cell in found
            if "FedAvg" in (row, *of["columns"]) and isinstance(cell, int | float | list)
        ]
        for one in claims.every.values():
            printed = one.claim.printed
            assert not isinstance(printed, dict) or {*one.claim.scenarios} <= {*printed}, one.id
            for of in printed.values() if isinstance(printed, dict) else [printed]:
                if of is not None and of.fedavg is not None:
                    assert min(abs(cell - of.fedavg) for cell in cells) < 1e-9, one.id
