"""What is recorded of a round beside the model's accuracy, worked out again from the exchanges
themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fedml_noniid.core.component import (
    Answer,
    Ask,
    Asks,
    Change,
    Client,
    Component,
    Exchanges,
    Server,
    Setting,
    Trace,
)
from fedml_noniid.models.networks import cnn
from fedml_noniid.models.stacked import Stacked
from fedml_noniid.plugins import registry
from tests import federation
from tests.methods import by_hand as hand


def test_groups_of_layers_have_lengths_of_their_own() -> None:
    """Of a model with both kinds: the squares of the groups' lengths add up to the whole's."""
    net = cnn((1, 6, 6), federation.N_CLASSES, channels=2, hidden=4)
    (row,) = federation.run("fedavg", data=federation.images(), model=net, rounds=1).rows
    whole, fc, conv = (row[f"update_norm_server{group}"] for group in ("", "_fc", "_conv"))
    assert fc**2 + conv**2 == pytest.approx(whole**2, rel=1e-9)
    assert min(fc, conv) > 0
    assert 0 < row["update_norm_client_conv"] < row["update_norm_client"]


@dataclass(frozen=True)
class Watcher(Component):
    """Measures and observes."""

    name: ClassVar[str] = "watcher"
    level: float = 1.0

    def exchanges(self, setting: Setting) -> Exchanges:
        return Exchanges(round=1)

    def report(self, trace: Trace, client: Client) -> Answer:
        """Reports metrics in every run. The core drops them where they are not recorded."""
        return Answer(
            metrics={"moved": torch.stack([trace.params["fc2.bias"], client.params["fc2.bias"]])}
        )

    def step(self, server: Server) -> Change:
        return Change(metrics={"level": torch.tensor(self.level), "n": server.replies.n})

    def survey(self, server: Server) -> Asks:
        if server.round:
            yield Ask("again", server.replies.clients, server.params, server.buffers)

    def answer(self, client: Client) -> Answer:
        return Answer(metrics={"seen": client.params["fc2.bias"]} if client.observing else {})


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.METHODS, "watcher", Watcher)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.usefixtures("watcher")
def test_what_methods_measure_and_observe(engine: str) -> None:
    """Numbers become columns; tensors are kept of every round; clients' own only where the run
    observes."""
    simulation = federation.simulation("watcher", engine=engine, rounds=2, cohort=6)
    simulation.engine.clients.observing = True
    out = simulation.run()
    assert [row["watcher_level"] for row in out.rows] == [1.0, 1.0]
    assert out.tensors["watcher/n"].tolist() == [list(federation.SIZES)] * 2
    assert out.tensors["watcher/moved"].shape == (2, 6, 2, federation.N_CLASSES)
    assert torch.equal(out.tensors["watcher/again.seen"][-1], out.params["fc2.bias"].expand(6, -1))
    blind = federation.simulation("watcher", engine=engine, rounds=2, cohort=6).run()
    assert set(out.tensors) - set(blind.tensors) == {"watcher/moved", "watcher/again.seen"}
    assert federation.equal(out, blind), "looking changes nothing, not even the traffic"


def test_the_sent_model_is_looked_at_beside_the_evaluated_one() -> None:
    """FedNNNN evaluates the average and sends the normalised one."""
    ran = hand.run("fednnnn", rounds=2)
    assert isinstance(hand.given(), Stacked)
    for w, column in (
        (ran.outcome.params, "sent_accuracy"),
        (ran.outcome.evaluated, "test_accuracy"),
    ):
        tree = {key: leaf.numpy() for key, leaf in w.items()}
        assert ran.outcome.rows[-1][column] == hand.accuracy(tree, hand.PUBLIC_X, hand.PUBLIC_Y)
