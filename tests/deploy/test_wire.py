"""Messages: what a reader gets back, what is refused by name, and what FedML looks at."""

from __future__ import annotations

import json
import math
import pickle
import random
from collections import Counter

import pytest
import torch

from benchmarks.attacks import read
from benchmarks.mutations import mutated
from fedml_noniid.core.component import Ask
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import Range
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.wire import CHUNK_BYTES, DTYPES, RefusedError
from fedml_noniid.engines.packing import flatten
from fedml_noniid.plugins.baselines.qfedavg import QFedAvg
from tests.deploy.federation_server import answer_of, body, framed

NUMBERS = torch.arange(24.0).reshape(2, 3, 4)
IMAGES = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)


# As bytes


HEADS = [
    wire.Hello(session="s", study="t", samples=17),
    wire.Welcome(run="r"),
    wire.Answer(exchange=1, failed="f"),
    wire.Task(kind="ask", why="w", job="j", owner="o"),
    wire.Refusal(name="n", why="w"),
]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_no_head_takes_much_of_the_other_side_s_disk(head):
    """Each is a line in its audit log, also if it is refused: no part may be long."""
    kind = type(head)
    if isinstance(head, wire.Sealed):
        head = head.model_copy(update={"seal": ("log", 0, "sha", "sig"), "certificate": "PEM"})
    assert wire.parsed(head.frame(), kind) == head
    good = json.loads(head.frame())

    def longer(value: object) -> list[object]:
        if isinstance(value, list):
            parts = enumerate(value)
            return [[*value[:i], x, *value[i + 1 :]] for i, of in parts for x in longer(of)]
        return ["x" * 5000] if isinstance(value, str) else [10**400, 1 << 63, -(1 << 63)]

    for key, value in good.items():
        for other in longer(value):
            with pytest.raises(RefusedError) as error:
                wire.parsed(json.dumps(good | {key: other}).encode(), kind)
            assert error.value.name == "malformed", key


def taken(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors after the journey."""
    frames = wire.leaving(wire.Answer(exchange=4), tensors, lambda message: message.head)
    return read(frames, wire.Answer).tensors


@pytest.mark.parametrize(
    "tensors",
    [
        {name: torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype) for name, dtype in DTYPES.items()},
        {"n": torch.tensor(7), "none": torch.empty(0, 3), "w": torch.ones(2), "": torch.ones(1)},
        {},
        {"part": NUMBERS[1:, ::2, 1:3], "row": NUMBERS[1], "alias": NUMBERS[:1]},
        {"expanded": torch.ones(1, 3).expand(4, 3), "gradient": torch.ones(3, requires_grad=True)},
        {"u": torch.ones(3, dtype=torch.uint8), 'a/"b"\n\u4e16': torch.ones(5)},  # not aligned
        {"large": torch.arange(3.0 * (CHUNK_BYTES // 4) + 5), "b": torch.ones(7).byte()},
    ],
)
def test_tensors_arrive_as_they_were(tensors):
    arrived = taken(tensors)
    assert list(arrived) == list(tensors)
    for key, leaf in tensors.items():
        assert arrived[key].dtype == leaf.dtype and torch.equal(arrived[key], leaf), key
        # Matrix products round differently at addresses that are not aligned.
        assert arrived[key].data_ptr() % 16 == 0


@pytest.mark.parametrize(
    ("leaf", "strides"),
    [
        (IMAGES.to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (NUMBERS.permute(2, 0, 1), (1, 12, 4)),
        (torch.ones(3, 2).t(), (1, 2)),
        (NUMBERS[1:, ::2, 1:3], (4, 2, 1)),  # with holes: it arrives contiguous
        (torch.ones(1, 3).expand(4, 3), (3, 1)),
        # As it is, whatever that is.
        (torch.ones(2, 1, 4, 1).to(memory_format=torch.channels_last), None),
    ],
)
def test_the_order_in_memory_arrives(leaf, strides):
    assert taken({"other": torch.ones(2), "w": leaf})["w"].stride() == (strides or leaf.stride())


def entry(
    dtype: object = "float32", shape: object = (2,), order: object = (0,), **more: object
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "order": order, **more}


@pytest.mark.parametrize(
    "entries",
    [
        [],
        *({"w": value} for value in (None, [], {}, 5, entry(more=1))),
        *({"w": entry(dtype=value)} for value in ("F8", ["float32"], None, "Tensor")),
        *({"w": entry(shape=value)} for value in ("ab", (2.0,), (True,), (-2,), (1 << 62,), 2)),
        {"w": entry(shape=(1,) * 17, order=[*range(17)])},
        {"w": entry(shape=(0, 1 << 47, 1 << 47), order=(0, 1, 2))},
        *({"w": entry(order=value)} for value in ((), (1,), (-1,), (0, 1), (0.0,), (False,), "0")),
        {"w": entry(shape=(2, 2), order=(0, 0))},
    ],
)
def test_a_bad_table_is_refused(entries):
    assert wire.table(framed({"w": entry()}))["w"].shape == (2,)
    with pytest.raises(RefusedError) as refused:
        wire.table(framed(entries))
    assert refused.value.name == "malformed"


# The check of an upload

SCHEMA = {
    "deltas": {"w": torch.zeros(3, 2).t(), "b": torch.zeros(4)},
    "buffers": {"batches": torch.tensor(0)},
    "upload": {"scaffold": {"dc": {"w": torch.zeros(2, 3)}}, "half": torch.zeros(3).bfloat16()},
    "n": torch.tensor(1),
    "steps": torch.tensor(1.0),
    "loss": torch.tensor(1.0),
}
RANGES = wire.ranges([QFedAvg()]) | {"upload/half": Range(-8, whole=True)}
SENT = wire.Down(4, 2, Ask("train", (0, 2), {"w": torch.zeros(2, 3)}, {}, {}, {}), "terms")


def upload(client: int = 2, **leaves: object) -> wire.Up:
    """A good upload but for `leaves`; None drops one."""
    good = wire.up(client, 4, SCHEMA)
    found = good["leaves"] | leaves
    return good | {"leaves": {key: leaf for key, leaf in found.items() if leaf is not None}}


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"deltas/w": torch.zeros(3, 2)}, r"'deltas/w' is float32 \[3, 2\]; expected float32 \[2"),
        ({"deltas/w": torch.zeros(1, 3)}, r"is float32 \[1, 3\]"),  # would broadcast
        ({"deltas/w": torch.zeros(2, 3).double()}, r"is float64 \[2, 3\]; expected float32"),
        ({"deltas/w": [[0.0] * 3] * 2}, r"is list; expected"),
        ({"upload/scaffold/dc/w": None}, r"lacks 'upload/scaffold/dc/w'; expected float32 \[2, 3"),
        ({"deltas/v": torch.zeros(2)}, r"upload has 'deltas/v', which the server did not ask for"),
        ({"x" * 10_000: torch.zeros(2)}, r"upload has 'x{900}"),
        ({"deltas/w": torch.full((2, 3), math.nan)}, r"'deltas/w' is not finite"),
        ({"upload/scaffold/dc/w": torch.full((2, 3), math.inf)}, r"dc/w' is not finite"),
        ({"n": torch.tensor(0)}, r"'n' has 0; allowed: from 1"),
        ({"steps": torch.tensor(-1.0)}, r"'steps' has -1; allowed: from 0 to 1"),
        (
            {"upload/half": torch.tensor([1.0, -8.0, 2.5]).bfloat16()},
            r"'upload/half' has 2.5; allowed: whole numbers from -8 to 1",
        ),
        ({"upload/half": torch.tensor([0, 0, math.nan]).bfloat16()}, r"half' is not finite"),
        ({"deltas/w": torch.full((2, 3), 1e20)}, r"'deltas/w' has 1e\+20; allowed: from -10737418"),
    ],
)
def test_a_wrong_tensor_names_silo_round_and_job(leaves, message):
    """The same job may be another component's, so its owner is named too."""
    sent = SENT._replace(ask=SENT.ask._replace(owner="fnr"))
    said = rf"^round 2, silo 2 \(rank 3\), job 'fnr.train': .*{message}"
    with pytest.raises(UserError, match=said) as refused:
        wire.opened(upload(**leaves), 2, sent, SCHEMA, RANGES)
    assert len(str(refused.value)) <= 1000


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


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"w": torch.zeros(2)}, r"silo 2 \(rank 3\): upload is not one of this protocol"),
        (upload(client=1), "client 1, exchange 4; expected client 2, exchange 4"),
        (wire.up(2, 3, SCHEMA), "client 2, exchange 3; expected client 2, exchange 4"),
    ],
)
def test_wrong_envelopes(message, said):
    with pytest.raises(UserError, match=said):
        wire.opened(message, 2, SENT, SCHEMA, RANGES)


def test_a_view_does_not_drag_its_storage_along():
    big = torch.zeros(1000, 1000)
    ask = wire.mapped(wire.compact, Ask("train", (0,), {"w": big[:, :2].t()}))
    for message in (wire.up(0, 0, SCHEMA | {"deltas": {"w": big[0]}}), ask):
        assert len(pickle.dumps(message)) < 20_000


# Whatever arrives

SIZE = sum(leaf.numel() * leaf.element_size() for leaf in flatten(SCHEMA).values())


def received(frames: list[bytes]) -> None:
    """What the server does with an answer of silo 2.

    Raises RefusedError; asserts that what passes is right.
    """

    def look(_: wire.Answer, table: wire.Table) -> None:
        wire.fit(table, SCHEMA, "here")
        assert wire.size_of(table) == SIZE  # before memory is taken

    message = read(iter(frames), wire.Answer, look)
    if message.head.failed:
        return
    up = wire.Up(client=2, exchange=message.head.exchange, leaves=message.tensors)
    found, expected = flatten(wire.opened(up, 2, SENT, SCHEMA, RANGES)), flatten(SCHEMA)
    assert found.keys() == expected.keys()
    for key, leaf in expected.items():
        assert (found[key].dtype, found[key].shape) == (leaf.dtype, leaf.shape)
        assert found[key].isfinite().all()


@pytest.mark.parametrize("messages", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_mutated_answer_is_valid_or_refused(messages):
    """Any other exception fails the test, and so does an answer that is taken but not valid."""
    rng, good = random.Random(0), [answer_of(4), *body(upload()["leaves"])]
    received(good)
    refused: Counter[str] = Counter()
    for i in range(messages):
        frames = mutated(good, rng)
        try:
            received(frames)
        except RefusedError as refusal:
            refused[refusal.name] += 1
        except Exception as error:  # any other kind is the failure that the test looks for
            error.add_note(f"message {i}: {frames}")
            raise
    # All kinds were met, and some messages passed: a changed weight is as good as another.
    assert set(refused) == {
        *("non-finite", "stale", "range", "malformed", "oversize"),
        *("truncated", "missing", "extra", "shape", "dtype"),
    }
    assert messages // 100 < messages - refused.total() < messages // 2
