"""Controls, and readings of a method, that only a simulation may run."""

from __future__ import annotations

import pytest
import torch

from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.shards import Shard
from fedml_noniid.deploy import settings
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.plugins import registry
from tests import federation
from tests.leaking import Peek


@pytest.mark.parametrize(
    ("recipe", "values", "why"),
    [
        (
            "centralised",
            {},
            "'centralised' .* can't be deployed: it trains one model on the data of all",
        ),
        ("peek", {}, "'peek' .* can't be deployed: it trains on the test set"),
        ("rfedavg", {"dp": "paper", "sigma": 1.0, "clip": 1.0}, "drawn from the run's seed"),
    ],
)
def test_what_only_a_simulation_may_do_is_not_deployed(
    recipe: str, values: dict[str, object], why: str
) -> None:
    registry.register(Peek)
    deployment = settings.check(
        {"train_args": {"recipe": recipe, "settings": {recipe: values}}}, "test"
    )
    with pytest.raises(UserError, match=why):
        settings.terms(deployment, recipe, federation.network(), federation.federation().public)


@pytest.mark.parametrize(
    ("recipe", "values", "why"),
    [
        ("krum", {"f": 1}, "quorum: 'krum': f = 1, m = 1 of 3 clients"),
        ("trimmed_mean", {"beta": 0.3}, "quorum: 'trimmed_mean': beta = 0.3 of 3 clients"),
    ],
)
def test_a_quorum_of_too_few_silos_for_the_method_is_refused(
    recipe: str, values: dict[str, object], why: str
) -> None:
    """Else a silo that leaves would turn Krum, or a trimmed mean, into something weaker."""
    train = {"recipe": recipe, "settings": {recipe: values}, "client_num_in_total": 5}
    for quorum in (0, 4, 3):
        written = {"train_args": train, "comm_args": {"quorum": quorum}}
        deployment = settings.check(written, "test")
        if quorum == 3:
            with pytest.raises(UserError, match=why):
                settings.terms(deployment, recipe, federation.network())
        else:
            settings.terms(deployment, recipe, federation.network())


def test_a_shard_replaced_by_an_attack_keeps_the_shared_samples() -> None:
    """FedML's poisoning gives a silo another shard; the shared part is the server's to give."""
    deployment = settings.check({"train_args": {"recipe": "datasharing"}}, "test")
    of = federation.federation()
    terms = settings.terms(deployment, "datasharing", federation.network(), of.public)
    own = Samples(of.train.x[:4], of.train.y[:4])
    silo = Silo(terms, 0, Shard(1, 3, 3, {"train": own, "public": of.public}))
    silo.read(own._replace(y=2 - own.y))
    assert torch.equal(silo.engine.clients.train.y, torch.cat([2 - own.y, of.public.y]))
