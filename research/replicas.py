"""Makes what others' code does known as methods: FNR-FL's, rFedAvg's and rFedAvg+'s authors', and
the SCAFFOLD of three benchmarks.

Each file of `research/methods` is a module of its own, as a user's method is. So a result depends
on this file and on what it imports, and on no other file of research.
"""

from __future__ import annotations

from pathlib import Path

from fedml_noniid.own_code import look_in
from fedml_noniid.plugins import registry

METHODS = Path(__file__).parent / "methods"
CLASSES = {
    "fnr_authors": "fnr_authors:FNRAuthors",
    "rfedavg_authors": "rfedavg_authors:RFedAvgAuthors",
    "rfedavg_plus_authors": "rfedavg_authors:RFedAvgPlusAuthors",
    "scaffold_authors": "niid_bench:ScaffoldAuthors",
    "scaffold_flower": "niid_bench:ScaffoldFlower",
    "scaffold_fedbench": "niid_bench:ScaffoldFedBench",
}


def register() -> None:
    """Makes them known by their names, in this process and in those that it forks."""
    look_in(METHODS)
    for path in CLASSES.values():
        registry.method(path)
