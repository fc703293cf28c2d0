"""A server that asks what was not signed, asks out of order, or sends numbers that no training
survives: each is an error with words, which the server hears, and the silo goes on."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
import torch

from fedml_noniid.core.component import Ask
from fedml_noniid.core.errors import UserError
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.engines.packing import flatten
from tests.deploy import world
from tests.recipe_table import DEPLOYED_ALONE
from tests.walks import thinned

# The messages of the two methods with noise are FedAvg's.
RECIPES = [name for name in DEPLOYED_ALONE if "," not in name and name not in ("dpsgd", "dpfedavg")]


def questions(server: ServerRun) -> dict[str, wire.Down]:
    """The first message of each job to a silo, once the others have answered."""
    silos, found = world.silos_of(server.terms), dict[str, wire.Down]()
    while (ask := server.down.ask) is not None:
        downs = {k: wire.row_of(server.down, k) for k in ask.to}
        found.setdefault(wire.name(ask), downs[ask.to[0]])
        ups = {k: wire.up(k, down.exchange, silos[k].answer(down)) for k, down in downs.items()}
        server.feed(server.open(ups))
    return found


def spoilt(ask: Ask, part: str, value: float) -> Ask:
    """The same with all numbers of a part replaced."""
    flat = wire.tensors(wire.Down(0, 0, ask, ""))
    changed = {
        key: torch.full_like(leaf, value) if key.startswith(f"{part}/") else leaf
        for key, leaf in flat.items()
    }
    return ask._replace(**wire.nested(changed))


@pytest.mark.parametrize("name", thinned(RECIPES, 1, 4))
def test_whatever_numbers_a_server_sends_a_silo_answers_or_says_why_not(name):
    """Any error but UserError would end its process. No lie changes a later answer."""
    terms = world.terms(*DEPLOYED_ALONE[name], batch_norm=True)
    asked = questions(ServerRun(terms, world.shards_of()[0]))
    for job, down in asked.items():
        (client,) = down.ask.to
        silo = world.silos_of(terms)[client]
        fresh = down._replace(counted={client: wire.NOT_COUNTED})
        if down.ask.owner and not down.ask.params:
            with pytest.raises(UserError, match=f"^{job}: client {client} trained no model"):
                silo.answer(fresh)
            continue
        before = flatten(silo.answer(fresh))
        for part in wire.TREES:
            for value in (math.nan, 3e38, -1.0):
                with suppress(UserError):
                    silo.answer(fresh._replace(ask=spoilt(down.ask, part, value)))
        after = flatten(silo.answer(fresh))
        assert all(torch.equal(after[key], leaf) for key, leaf in before.items())
