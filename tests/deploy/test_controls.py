"""Controls, and readings of a method, that only a simulation may run."""

from __future__ import annotations

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.deploy import settings
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
