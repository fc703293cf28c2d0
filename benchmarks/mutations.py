"""Makes wrong messages of good ones: bits, bytes, frames, and the JSON of heads and tables."""

from __future__ import annotations

import json
import math
import random
from copy import deepcopy
from typing import Any

DEEP = "a deeply nested value"  # a mark in JSON, which the standard library does not nest so far
NESTED = (b"[" * 30_000, b'{"a":' * 10_000)
NUMBERS = (math.nan, math.inf, -math.inf, 1e20, -1e20, -1.0, 0.5)
HOSTILE: list[Any] = [
    *(0, 1, -1, 2, 3, 4, 7, 16, 48, 1 << 20, 1 << 31, 1 << 47, 1 << 48, 1 << 63, -(1 << 63)),
    *(10**400, 1.5, -0.0, math.nan, math.inf, "", "float32", "float64", "bool", "x" * 300),
    *("\ud800", "\0", "w", "deltas/w", None, True, False, [], {}, [[]], [0], [0, 8], [4, 3]),
    *([0, 1 << 47], [1 << 40, 0, 1 << 40], {"a": 1}, [1, 0], "\u202e\u0007\u00e9", DEEP),
]


def places(value: object) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [pair for key in keys for pair in [(value, key), *places(value[key])]]


def changed_json(text: bytes, rng: random.Random) -> bytes:
    """JSON with one to three values changed, removed, renamed or added."""
    value: Any = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(places(value) or [(value, "x")])
        what = rng.randrange(5)
        if what == 0 and key != "x":
            container.pop(key)
        elif what == 1 and isinstance(container, dict):
            container[str(rng.choice(HOSTILE))] = container.pop(key, None)
        elif what == 2:
            name = str(rng.choice(HOSTILE))
            value[name] = {"dtype": "float32", "shape": [0], "order": [0]}
        else:
            container[key] = deepcopy(rng.choice(HOSTILE))
    return json.dumps(value).encode().replace(json.dumps(DEEP).encode(), rng.choice(NESTED))


def changed_bytes(frame: bytes, other: bytes, rng: random.Random) -> bytes:
    """A bit flipped, bytes cut out, doubled, or taken from another frame."""
    a, b = sorted(rng.randrange(len(frame) + 1) for _ in range(2))
    flipped = bytearray(frame)
    if frame:
        flipped[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    cut, doubled, spliced = frame[:a] + frame[b:], frame[:b] + frame[a:], frame[:a] + other[a:]
    return rng.choice([bytes(flipped), frame[:a], cut, doubled, spliced])


def changed_frames(frames: list[bytes], other: bytes, rng: random.Random) -> list[bytes]:
    """A frame left out, repeated, exchanged with another one, put in, or cut in two."""
    i, j = rng.randrange(len(frames)), rng.randrange(len(frames))
    frame, rest = frames[i], [*frames[:i], *frames[i + 1 :]]
    exchanged = list(frames)
    exchanged[i], exchanged[j] = frames[j], frame
    at = rng.randrange(len(frame) + 1)
    halves = [*frames[:i], frame[:at], frame[at:], *frames[i + 1 :]]
    put_in, repeated = [*frames[:i], other, *frames[i:]], [*frames[:i], frame, *frames[i:]]
    return rng.choice([rest, repeated, exchanged, put_in, halves])


def mutated(good: list[bytes], rng: random.Random) -> list[bytes]:
    """A message with something wrong, mostly where the format has structure: `good` has a head, and
    perhaps a table and bytes of tensors."""
    frames, others = list(good), [*good, b"", b"{}", b"\x80\x04."]
    what, i = rng.randrange(8), rng.randrange(len(frames))
    if what <= 4:
        index = min(what > 0, len(frames) - 1)
        frames[index] = changed_json(frames[index], rng)
    elif what <= 6:
        frames[i] = changed_bytes(frames[i], rng.choice(others), rng)
    else:
        frames = changed_frames(frames, rng.choice(others), rng)
    return frames
