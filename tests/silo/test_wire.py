"""What travels, and that an upload which is not an answer is one clear error that names the
silo."""

from __future__ import annotations

import pickle

import pytest
import torch

from fedml_noniid.plugins.baselines.qfedavg import QFedAvg
from fedml_noniid.plugins.core.component import Ask
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.silo import wire

SCHEMA = {
    "deltas": {"w": torch.zeros(2, 3)},
    "buffers": {},
    "upload": {"scaffold": {"dc": {"w": torch.zeros(2, 3)}}},
    "n": torch.tensor(1),
    "steps": torch.tensor(1.0),
    "loss": torch.tensor(1.0),
}
RANGES = wire.ranges([QFedAvg()])
SENT = wire.Down(4, 2, Ask("train", (0, 2), {"w": torch.zeros(2, 3)}, {}, {}, {}), "terms")


def upload(client: int = 2, **leaves: object) -> wire.Up:
    """A good upload but for `leaves`; None drops one."""
    good = wire.up(client, 4, SCHEMA)
    good["leaves"] = {
        key: leaf for key, leaf in (good["leaves"] | leaves).items() if leaf is not None
    }
    return good


def test_a_good_upload_comes_back_in_the_structure_of_the_schema():
    found = wire.opened(pickle.loads(pickle.dumps(upload())), 2, SENT, SCHEMA, RANGES)
    assert found["upload"]["scaffold"]["dc"]["w"].shape == (2, 3)
    assert found["buffers"] == {}
    assert found["n"] == 1


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (
            {"deltas/w": torch.zeros(3, 2)},
            r"upload's 'deltas/w' is float32 \[3, 2\]; expected float32 \[2, 3\]",
        ),
        ({"deltas/w": torch.zeros(1, 3)}, r"is float32 \[1, 3\]"),  # would broadcast
        ({"deltas/w": torch.zeros(2, 3).double()}, r"is float64 \[2, 3\]; expected float32"),
        ({"deltas/w": [[0.0] * 3] * 2}, r"is list; expected"),
        ({"deltas/w": None}, r"upload lacks 'deltas/w'; expected float32 \[2, 3\]"),
        ({"upload/scaffold/dc/w": None}, r"upload lacks 'upload/scaffold/dc/w'"),
        ({"deltas/v": torch.zeros(2)}, r"upload has 'deltas/v', which the server did not ask for"),
        ({"deltas/w": torch.full((2, 3), float("nan"))}, r"'deltas/w' is not finite"),
        (
            {"upload/scaffold/dc/w": torch.full((2, 3), float("inf"))},
            r"'upload/scaffold/dc/w' is not finite",
        ),
        ({"n": torch.tensor(0)}, r"'n' has 0; allowed: from 1"),
        ({"steps": torch.tensor(-1.0)}, r"'steps' has -1; allowed: from 0 to 1"),
        (
            {"deltas/w": torch.full((2, 3), 1e20)},
            r"'deltas/w' has 1e\+20; allowed: from -1073741824",
        ),
    ],
)
def test_a_wrong_tensor_names_silo_round_and_job(leaves, message):
    with pytest.raises(UserError, match=r"^round 2, silo 2 \(rank 3\), job 'train': .*" + message):
        wire.opened(upload(**leaves), 2, SENT, SCHEMA, RANGES)


def test_a_number_has_the_range_of_its_component_its_kind_or_any():
    """2^30 where nothing else is said; n is limited by what the silo said when it joined."""
    for key, low, high in (
        ("deltas/w", -(2**30), 2**30),
        ("buffers/bn1.mean", -(2**30), 2**30),
        ("buffers/bn1.var", 0, 2**30),
        ("upload/fnr_authors/buffers/bn1.var", 0, 2**30),
        ("upload/qfedavg/F", 0, 2**30),
        ("n", 1, 2**30),
        ("upload/qfedavg/Fs", -(2**30), 2**30),
        ("upload/test/n", 0, 2**30),
    ):
        found = wire.allowed(key, RANGES)
        assert (found.low, found.high) == (low, high), key


def test_the_component_that_asks_travels_and_is_named():
    """The same job may be another component's."""
    sent = pickle.loads(
        pickle.dumps(SENT._replace(ask=SENT.ask._replace(job="refine", owner="fnr")))
    )
    assert (sent.ask.job, sent.ask.owner) == ("refine", "fnr")
    with pytest.raises(UserError, match=r"silo 2 \(rank 3\), job 'fnr.refine': upload lacks 'n'"):
        wire.opened(upload(n=None), 2, sent, SCHEMA, RANGES)


def test_wrong_envelopes():
    with pytest.raises(UserError, match=r"silo 2 \(rank 3\): upload is not one of this protocol"):
        wire.opened({"w": torch.zeros(2)}, 2, SENT, SCHEMA, RANGES)
    with pytest.raises(UserError, match="client 1, exchange 4; expected client 2, exchange 4"):
        wire.opened(upload(client=1), 2, SENT, SCHEMA, RANGES)
    with pytest.raises(UserError, match="client 2, exchange 3; expected client 2, exchange 4"):
        wire.opened(wire.up(2, 3, SCHEMA), 2, SENT, SCHEMA, RANGES)


def test_a_silo_that_was_not_asked_sends_nothing():
    assert wire.opened(wire.up(1, 4, None), 1, SENT, SCHEMA, RANGES) is None
    with pytest.raises(UserError, match="this silo was not asked"):
        wire.opened(upload(client=1), 1, SENT, SCHEMA, RANGES)


def test_what_fedml_looks_at():
    """Down is no plain dict, or FedML would split it; up is one, or FedML would call `.to` on its
    values."""
    assert type(SENT) is not dict
    assert type(upload()) is dict


def test_a_view_does_not_drag_its_storage_along():
    big = torch.zeros(1000, 1000)
    row = wire.up(0, 0, SCHEMA | {"deltas": {"w": big[0]}})
    assert len(pickle.dumps(row)) < 20_000
    ask = wire.mapped(wire.compact, Ask("train", (0,), {"w": big[:, :2].t()}, {}, {}, {}))
    assert len(pickle.dumps(ask)) < 20_000
    assert torch.equal(ask.params["w"], big[:, :2].t())
