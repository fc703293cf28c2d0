"""Messages as bytes: another reader understands them, and whatever arrives is either valid or
refused."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from copy import deepcopy

import pytest
import torch

from fedml_noniid.plugins.core.component import Ask
from fedml_noniid.plugins.engines.packing import flatten
from fedml_noniid.plugins.silo import wire
from fedml_noniid.plugins.silo.wire import CHUNK_BYTES, DTYPES, MAX_FRAME_BYTES, RefusedError, read
from tests.silo.federation_server import framed

NUMBERS = torch.arange(24.0).reshape(2, 3, 4)
IMAGES = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)


def taken(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors after the journey."""
    frames = wire.body(tensors)
    return read(frames, wire.table(next(frames)))


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for key, leaf in expected.items():
        assert found[key].dtype == leaf.dtype and found[key].shape == leaf.shape
        assert torch.equal(found[key], leaf), key


EXAMPLES = {
    "dtypes": {
        name: torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype) for name, dtype in DTYPES.items()
    },
    "0-d": {"n": torch.tensor(7), "loss": torch.tensor(0.5), "b": torch.tensor(True)},
    "empty": {
        "none": torch.empty(0),
        "rows": torch.empty(0, 3),
        "w": torch.ones(2),
        "columns": torch.empty(3, 0),
    },
    "nothing": {},
    "views": {"part": NUMBERS[1:, ::2, 1:3], "row": NUMBERS[1], "reversed": NUMBERS.flip(0)},
    "aliased": {"a": NUMBERS, "b": NUMBERS, "c": NUMBERS[:1]},
    "expanded": {"w": torch.ones(1, 3).expand(4, 3)},
    "layouts": {
        "image": IMAGES.to(memory_format=torch.channels_last),
        "t": NUMBERS.permute(2, 0, 1),
        "w": NUMBERS,
    },
    "gradient": {"w": torch.ones(3, requires_grad=True)},
    "not aligned": {
        "u": torch.ones(3, dtype=torch.uint8),
        "w": torch.ones(5),
        "d": torch.ones(1).double(),
    },
    "unlucky names": {
        'a/"b"\n\u00e9\u4e16': torch.ones(2),
        "": torch.ones(1),
        "strides": torch.ones(3),
    },
    "large": {
        "w": torch.arange(3.0 * (CHUNK_BYTES // 4) + 5),
        "b": torch.ones(7, dtype=torch.int8),
    },
}


@pytest.mark.parametrize("tensors", EXAMPLES.values(), ids=EXAMPLES)
def test_tensors_arrive_as_they_were(tensors):
    found = taken(tensors)
    same(found, tensors)
    assert list(found) == list(tensors)


def test_frames_are_no_longer_than_a_chunk():
    sizes = [len(frame) for frame in wire.body(EXAMPLES["large"])][1:]
    assert sizes == [CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES, 20, 7]
    assert CHUNK_BYTES <= MAX_FRAME_BYTES


@pytest.mark.parametrize(
    ("leaf", "strides"),
    [
        (IMAGES.to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (NUMBERS.permute(2, 0, 1), (1, 12, 4)),
        (torch.ones(3, 2).t(), (1, 2)),
        (NUMBERS, (12, 4, 1)),
        (NUMBERS[1:, ::2, 1:3], (4, 2, 1)),  # with holes: it arrives contiguous
        (torch.ones(1, 3).expand(4, 3), (3, 1)),
        (
            torch.ones(2, 1, 4, 1).to(memory_format=torch.channels_last),
            None,
        ),  # as it is, whatever that is
    ],
)
def test_the_order_in_memory_arrives(leaf, strides):
    assert taken({"other": torch.ones(2), "w": leaf})["w"].stride() == (strides or leaf.stride())


def test_what_arrives_has_memory_of_its_own():
    found = taken({"u": torch.ones(3, dtype=torch.uint8), "a": NUMBERS, "b": NUMBERS})
    assert len({leaf.untyped_storage().data_ptr() for leaf in found.values()}) == 3
    # Matrix products round differently at addresses that are not aligned.
    assert all(leaf.data_ptr() % 16 == 0 for leaf in found.values())


def entry(
    dtype: object = "float32", shape: object = (2,), order: object = (0,), **more: object
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "order": order, **more}


@pytest.mark.parametrize(
    "entries",
    [
        [],
        "table",
        None,
        *({"w": value} for value in (None, [], {}, 5)),
        {"w": entry(more=1)},
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


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-8-sig"])
def test_only_utf_8_is_read(encoding):
    frame = '{"run": "r", "epoch": "e"}'
    assert wire.parsed(frame.encode(), wire.Welcome).run == "r"
    with pytest.raises(RefusedError, match="head must have the keys run, epoch and no other"):
        wire.parsed(frame.encode(encoding), wire.Welcome)


def test_a_refusal_is_short_whatever_was_sent():
    with pytest.raises(RefusedError) as refused:
        wire.fit(wire.table(framed({"x" * 1_000_000: entry()})), {}, "round 1")
    assert len(str(refused.value)) <= 1000


# Whatever arrives

SCHEMA = {
    "deltas": {"w": torch.zeros(3, 4).t(), "b": torch.zeros(4)},
    "buffers": {"batches": torch.tensor(0)},
    "upload": {
        "scaffold": {"dc": {"w": torch.zeros(4, 3)}},
        "half": torch.zeros(3, dtype=torch.bfloat16),
    },
    "n": torch.tensor(1),
    "steps": torch.tensor(1.0),
    "loss": torch.tensor(1.0),
}
ASKED = Ask(
    "train",
    (1,),
    {"w": torch.ones(3, 4).t()},
    {"m": torch.ones(2)},
    {"c": {"w": torch.ones(4)}},
    {"c_i": torch.ones(1, 4)},
    owner="scaffold",
)
DOWN = wire.Down(5, 2, ASKED, "terms", {1: 4})
CALL = {"run": "r", "epoch": "e", "session": "s", "client": 1}
SIZE = sum(leaf.numel() * leaf.element_size() for leaf in flatten(SCHEMA).values())
HOSTILE = [
    0,
    1,
    -1,
    2,
    3,
    4,
    7,
    16,
    48,
    1 << 20,
    1 << 31,
    1 << 47,
    1 << 48,
    1 << 63,
    -(1 << 63),
    10**400,
    1.5,
    -0.0,
    math.nan,
    math.inf,
    "",
    "float32",
    "float64",
    "bool",
    "x" * 300,
    "\ud800",
    "\0",
    "w",
    "deltas/w",
    None,
    True,
    False,
    [],
    {},
    [[]],
    [0],
    [0, 8],
    [4, 3],
    [0, 1 << 47],
    [1 << 40, 0, 1 << 40],
    {"a": 1},
    [1, 0],
]


def message(up: bool) -> list[bytes]:
    """A good answer, or a good task."""
    if up:
        return [
            wire.Answer(**CALL, exchange=5).frame(),
            *wire.body(wire.up(1, 5, SCHEMA)["leaves"]),
        ]
    return [wire.Task.of(DOWN).frame(), *wire.body(wire.tensors(DOWN))]


def received(frames: list[bytes], up: bool) -> None:
    """What server and silo do with a message.

    Raises RefusedError; asserts that what passes is right.
    """
    rest = iter(frames)
    start = wire.parsed(wire.following(rest), wire.Answer if up else wire.Task)
    table = wire.table(wire.following(rest))
    if not up:
        if wire.size_of(table) > 1 << 20:
            return  # a silo knows the model's size only from its server
        trees = wire.nested(read(rest, table))
        assert set(trees) == set(wire.TREES)
        return
    wire.fit(table, SCHEMA, "here")
    assert wire.size_of(table) == SIZE  # before memory is taken
    upload = wire.Up(client=1, exchange=start.exchange, leaves=read(rest, table))
    reply = wire.opened(upload, 1, DOWN, SCHEMA, wire.ranges(()))
    assert reply is not None
    found, expected = flatten(reply), flatten(SCHEMA)
    assert {key: (leaf.dtype, leaf.shape) for key, leaf in found.items()} == {
        key: (leaf.dtype, leaf.shape) for key, leaf in expected.items()
    }
    assert all(leaf.isfinite().all() for leaf in found.values())


def places(value: object) -> list[tuple[object, object]]:
    """(container, key) of every value inside."""
    keys = (
        list(value)
        if isinstance(value, dict)
        else list(range(len(value)))
        if isinstance(value, list)
        else []
    )
    return [place for key in keys for place in [(value, key), *places(value[key])]]  # type: ignore[index]  # has keys


def changed_json(text: bytes, rng: random.Random) -> bytes:
    """JSON with one to three values changed, removed, added or renamed."""
    value = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(places(value) or [(value, "x")])
        what = rng.randrange(8)
        if what == 0:
            container.pop(key, None) if isinstance(container, dict) else container.pop(key)
        elif what == 1 and isinstance(container, dict):
            container[str(rng.choice(HOSTILE))] = container.pop(key, None)
        elif what == 2 and isinstance(container, list):
            container.append(deepcopy(rng.choice(HOSTILE)))
        elif what == 2:
            value[str(rng.choice(HOSTILE))] = entry(shape=[0])
        elif what == 3 and isinstance(container, list):
            container.reverse()
        else:
            container[key] = deepcopy(rng.choice(HOSTILE))
    return json.dumps(value).encode()


def changed_bytes(frame: bytes, other: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut out, doubled, or taken from another frame."""
    a, b = sorted(rng.randrange(len(frame) + 1) for _ in range(2))
    what = rng.randrange(5)
    if what == 0 and frame:
        found = bytearray(frame)
        for _ in range(rng.choice((1, 1, 2, 8))):
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
        return bytes(found)
    cut, doubled, spliced = (
        frame[:a] + frame[b:],
        frame[:b] + frame[a:],
        frame[:a] + other + frame[b:],
    )
    return (frame[:a], cut, doubled, frame[:a] + other[a:], spliced)[what]


def mutated(good: list[bytes], others: list[bytes], rng: random.Random) -> list[bytes]:
    """A message with something wrong, mostly where the format has structure."""
    frames = list(good)
    what, i = rng.randrange(8), rng.randrange(len(frames))
    if what == 0:
        frames[0] = changed_json(frames[0], rng)
    elif what <= 4:
        frames[1] = changed_json(frames[1], rng)
    elif what <= 6:
        frames[i] = changed_bytes(frames[i], rng.choice(others), rng)
    elif rng.random() < 0.5:
        frames.insert(i, rng.choice([*frames, *others]))
    else:
        frames.pop(i)
    return frames


@pytest.mark.parametrize("up", [True, False])
def test_the_messages_before_their_mutation_are_good(up):
    received(message(up), up)


@pytest.mark.parametrize("messages", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_mutated_message_is_valid_or_refused(messages):
    """Any other exception fails the test, and so does a message that is taken but not valid."""
    rng, good = random.Random(0), {up: message(up) for up in (True, False)}
    others = [*good[True], *good[False], b"", b"{}", b"\x80\x04."]
    refused: Counter[str] = Counter()
    longest = 0
    for i in range(messages):
        up = rng.random() < 0.7
        frames = mutated(good[up], others, rng)
        try:
            received(frames, up)
        except RefusedError as refusal:
            refused[refusal.name] += 1
            longest = max(longest, len(str(refusal)))
        except Exception as error:  # any other kind is the failure that the test looks for
            error.add_note(f"message {i}, {'up' if up else 'down'}: {frames}")
            raise
    # All kinds were met, and some messages passed: a changed weight is as good as another.
    values = {"non-finite", "stale", "range"}
    assert set(refused) == values | {
        "malformed",
        "oversize",
        "truncated",
        "missing",
        "extra",
        "shape",
        "dtype",
    }
    assert messages // 100 < messages - refused.total() < messages // 2
    assert longest <= 1000
