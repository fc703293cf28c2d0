"""The recipes that every runtime has to agree on, with hyper-parameters that make each method's part visible."""

from __future__ import annotations

PARAMETERS: dict[str, dict[str, object]] = {
    "fedprox": {"mu": 0.1},
    "scaffold": {"server_lr": 0.9},
    "fnr": {"p": 0.7, "epochs": 2, "batch_size": 8},
    "fednnnn": {"beta": 0.8, "gamma": 0.5},
    "ccn": {"T": 0.4},
    "fednlr": {"mu0": 1.1},
    "rfedavg": {"lam": 0.01},
    "rfedavg_plus": {"lam": 0.01},
}
COMPOSITIONS = (
    "fedprox+fnr",
    "scaffold+fnr",
    "scaffold+ccn",
    "fednnnn+fednlr",
    "rfedavg_plus+fednnnn",
    "ccn+fednlr",
    "scaffold+fnr+rfedavg_plus+ccn",
)

# (recipe, settings): the nine methods by themselves, then the compositions
RECIPES: list[tuple[str, dict[str, dict[str, object]]]] = [
    (recipe, {method: PARAMETERS[method] for method in recipe.split("+") if method in PARAMETERS})
    for recipe in ("fedavg", *PARAMETERS, *COMPOSITIONS)
]
