"""A FedML pair for any recipe."""

from __future__ import annotations

from fedml_noniid.plugins import recipes
from fedml_noniid.plugins.silo.host import HostAggregator, HostTrainer


def make_pair(recipe: str) -> tuple[type[HostTrainer], type[HostAggregator]]:
    """(trainer, aggregator) classes for a recipe such as "scaffold+fnr".

    RecipeError for an unknown method.
    """
    methods = recipes.parse(recipe)
    name = "".join(recipes.method(method).__name__ for method in methods) or "FedAvg"
    doc = "of {!r}, as FedML cross-silo calls it."
    trainer = type(
        f"{name}Trainer",
        (HostTrainer,),
        {"recipe": recipe, "__doc__": "A silo " + doc.format(recipe)},
    )
    server = type(
        f"{name}Aggregator",
        (HostAggregator,),
        {"recipe": recipe, "__doc__": "The server " + doc.format(recipe)},
    )
    return trainer, server
