"""What every method promises; walks the registry, so a new method is held to it without a new
test. The checks are those of `fedml_noniid.contract`, which others run on their methods."""

from __future__ import annotations

import re
import sys
from itertools import product
from typing import Any

import pytest

from fedml_noniid.contract import checks
from fedml_noniid.core.component import overrides
from fedml_noniid.plugins.registry import METHODS
from tests.recipe_table import ALONE, PARAMETERS, settings
from tests.walks import thinned

EVERY = pytest.mark.parametrize("method", sorted(METHODS))
POOLED = {
    name for name, kind in METHODS.items() if kind().needs.pooled
}  # one client, whatever the cohort
ENGINES = ("sequential", "vectorized")

# Hyper-parameters with which a method is FedAvg, where mathematics says so: to the bit.
NEUTRAL: dict[str, dict[str, object]] = {
    "ccvr": {"epochs": 0},
    "cfl": {"clusters": 1},
    "datasharing": {"share": 0.0},
    "dpfedavg": {"clip": 0.0},
    "dpsgd": {"clip": 0.0},
    "fedavgm": {"beta": 0.0},
    "fedcm": {"alpha": 1.0, "weights": "size"},
    "feddecorr": {"beta": 0.0},
    "feddf": {"steps": 0},
    "fedasync": {"server_lr": 1.0, "weights": "size"},
    "fedbuff": {"server_lr": 1.0, "weights": "size"},
    "fedexp": {"eps": 1e30, "weights": "size", "evaluate": "sent"},
    "fedftg": {"iterations": 0},
    "fedgen": {"generative_alpha": 0.0, "generative_beta": 0.0},
    "fedlc": {"tau": 0.0, "absent": "floor"},
    "fedntd": {"beta": 0.0},
    "fedrs": {"alpha": 1.0},
    "fedlesam": {"rho": 0.0, "weights": "size"},
    "fednsam": {"gamma": 0.0, "rho": 0.0, "weights": "size"},
    "fedsam": {"rho": 0.0, "weights": "size"},
    "ifca": {"clusters": 1},
    "moon": {"mu": 0.0},
    "powd": {"d": 4},  # as many candidates as clients
    "rpowd": {"d": 4},
    "sgdm": {"gamma": 0.0},
    "sgdm_local": {"gamma": 0.0},
    "sgdm_server": {"gamma": 0.0},
    "fednlr": {"mu0": 1.0, "a1": 0.0, "a2": 0.0},
    "fedprox": {"mu": 0.0},
    "fnr": {"p": 0.0},
    "fsl": {"epochs": 0},
    "rfedavg": {"lam": 0.0},
    "rfedavg_plus": {"lam": 0.0},
    "topk": {"share": 1.0},
}


@EVERY
def test_its_name_is_its_entry_and_its_module_names_a_source(method: str) -> None:
    kind = METHODS[method]
    assert kind.name == method
    assert kind.__name__.lower() == method.replace("_", ""), "the class carries the paper's name"
    source = sys.modules[kind.__module__].__doc__ or ""
    assert re.search(r"\b(19|20)\d\d\b", source), "the year"
    assert re.search(r"https?://", source), "the address"
    assert re.search(r"FedML pairs?", source)
    summary = kind.__doc__ or ""
    assert summary.endswith("."), "the class says what it does"
    assert not summary.startswith(f"{kind.__name__}("), "not what dataclass puts there"


WALKS = [
    *product(sorted(METHODS), ["does_something"]),
    *thinned(product(sorted(METHODS), ["keeps_its_state_and_repeats"]), 0, 2),
    *thinned(product(sorted(METHODS.keys() - POOLED), ["changes_nothing_that_it_is_given"]), 1),
    *thinned(product(sorted(METHODS), ["reads_what_it_needs"]), 2),
]


@pytest.mark.parametrize(("method", "check"), WALKS)
def test_what_every_method_promises(method: str, check: str) -> None:
    getattr(checks, check)(method, settings(method))


@pytest.mark.parametrize(("method", "engine"), thinned(product(NEUTRAL, ENGINES), every=2))
def test_neutral_hyper_parameters_are_fedavg_to_the_bit(method: str, engine: str) -> None:
    given = {method: PARAMETERS.get(method, {}) | NEUTRAL[method]}
    checks.neutral_is_fedavg(method, given, engine)


PAIRS = [
    "fedprox+fnr",
    "scaffold+ccn",
    "fednnnn+fednlr",
    "rfedavg_plus+fednnnn",
    "ccn+fednlr",
    "scaffold+fedprox",
]
LONG = [
    "scaffold+fnr+ccn+fednlr+moon",
    "fedgen+fedprox+fedlc+fednnnn+rfedavg_plus+datasharing",
    "feddyn+fedftg+fednlr+rfedavg+ccn",
]  # three of whose methods draw numbers


@pytest.mark.parametrize(("recipe", "engine"), thinned(product((*PAIRS, *LONG), ENGINES), every=2))
def test_order_and_names_of_a_recipe_do_not_matter(recipe: str, engine: str) -> None:
    checks.order_and_names_do_not_matter(recipe, settings(recipe), engine)


@pytest.mark.parametrize(("recipe", "engine"), thinned(product(LONG, ENGINES), every=2))
def test_the_order_of_components_decides_about_rounding_only(recipe: str, engine: str) -> None:
    checks.order_decides_about_rounding_only(recipe, settings(recipe), engine)


def test_no_two_components_of_a_recipe_draw_from_one_key() -> None:
    for kind in METHODS.values():
        checks.draws_from_keys_of_its_own(kind, METHODS)


def alone(hook: str) -> list[str]:
    """The entries of the table whose method brings its own `hook`."""
    methods = {entry: method for entry, (method, _) in ALONE.items() if method != "fedavg"}
    return [entry for entry, method in methods.items() if overrides(METHODS[method](), hook)]


@pytest.mark.parametrize(
    ("entry", "batch_norm"), thinned(product(alone("gradient_term"), (False, True)), every=2)
)
def test_a_gradient_term_of_several_clients_is_that_of_each(entry: str, batch_norm: bool) -> None:
    checks.gradient_term_of_several_is_that_of_each(*ALONE[entry], batch_norm)


@pytest.mark.parametrize("entry", alone("update_factor"))
def test_an_update_factor_is_one_number_per_row(entry: str) -> None:
    checks.update_factor_is_a_number_per_row(*ALONE[entry])


@pytest.mark.parametrize("method", thinned(sorted(METHODS.keys() - POOLED - {"qsgd"}), 1))
def test_the_numbering_of_the_clients_does_not_matter(method: str) -> None:
    """FNR-FL refines everybody here, since it breaks ties by id; FedGen's clients draw noise by id,
    and FedALA's a sample, so not here. QSGD rounds with draws of each client."""
    special: Any = {
        "dpfedavg": {"noise": 0.0},
        "dpsgd": {"noise": 0.0},
        "fedala": {"rate": 1.0},
        "feddf": {"steps": 2, "server_lr": 1e-5},
        "fnr": {"p": 1.0, "batch_size": 99},
        "fedgen": {"generative_alpha": 0.0, "generative_beta": 0.0},
    }
    checks.numbering_does_not_matter(method, {method: special[method]} if method in special else {})
