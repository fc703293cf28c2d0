"""A FedML pair for any recipe."""

from __future__ import annotations

from fedml_noniid.deploy.host import HostAggregator, HostTrainer
from fedml_noniid.plugins import registry


def make_pair(recipe: str) -> tuple[type[HostTrainer], type[HostAggregator]]:
    """(trainer, aggregator) classes for a recipe such as "scaffold+fnr".

    RecipeError for an unknown method.
    """
    methods = registry.parse(recipe)
    name = "".join(registry.method(method).__name__ for method in methods) or "FedAvg"
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
