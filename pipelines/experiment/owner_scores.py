"""Scores models on the samples of the clients' owners, for `tune` and `choose`.

A module of its own: stage evaluate does not depend on the code of partitions.
"""

from __future__ import annotations

import torch

from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params
from fedml_noniid.data.client_tests import of_users
from fedml_noniid.engines.evaluation import pooled
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.measuring import models_of


def scores_of_owners(item: Item, tensors: Params) -> dict[str, float]:
    """The metrics and the loss of the clients' models on their owners' validation samples and on
    their test samples, named as in rounds.csv.

    Each part is all clients' samples together. `item`, `tensors`: as in `measure`, of a run that is
    over. UserError where samples have no owner.
    """
    models, scores = models_of(item, tensors), dict[str, float]()
    for name, samples in samples_of_owners(item).items():
        scored = [models.evaluate(k, own) if len(own.y) else None for k, own in enumerate(samples)]
        if (whole := pooled(item.network, scored, samples, item.loss)) is None:
            raise UserError(f"the owners of the clients have no {name} samples")
        numbers = {**whole.metrics, "loss": whole.loss}
        scores |= {f"{name}_{score}": value for score, value in numbers.items()}
    return scores


def samples_of_owners(item: Item) -> dict[str, list[Samples]]:
    """Each client's validation samples and test samples: those of its owners, as it sees and labels
    them after the last round.

    UserError where samples have no owner.
    """
    data, rows = item.data, torch.from_numpy(item.indices.validation)
    owners = data.train_owner
    x, y = data.normalised("train", item.device)[rows], data.train_y[rows].to(item.device)
    parts = {
        "validation": (Samples(x, y), None if owners is None else owners[rows]),
        "test": (item.test, data.test_owner),
    }
    kind = item.settings.scenarios[item.unit.scenario].partition
    by_part = {}
    for part, (samples, owners_of_part) in parts.items():
        owned = of_users(data, item.indices.clients, kind, owners_of_part)
        if owned is None:
            raise UserError(
                f"clients' own models can't be chosen: the {part} samples are no client's",
                allowed="recipes with one model, or a partition with each owner in one client",
            )
        by_part[part] = [
            seen._replace(y=item.labelled(seen.y, k))
            for k, seen in enumerate(item.seen_by(owned, samples))
        ]
    return by_part
