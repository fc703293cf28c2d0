"""What `noniid methods show` says is what goes over the wire, tensor by tensor."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import yaml

from fedml_noniid.contract import silos
from fedml_noniid.core.component import Answer, Client, Component, Setting, Trace
from fedml_noniid.core.contract import HOOKS
from fedml_noniid.core.errors import UserError
from fedml_noniid.deploy import stream
from fedml_noniid.governance import disclosure
from fedml_noniid.plugins import registry
from fedml_noniid.plugins.baselines.scaffold import Scaffold
from tests.governance.secure.test_secure_sums import Running, nobody
from tests.recipe_table import PARAMETERS

ROOT = Path(__file__).parents[2]
SERVER = "server"  # in its certificate
ITEM_BYTES = {"float64": 8, "float32": 4, "int32": 4, "int64": 8, "uint8": 1, "bool": 1}
Frames = tuple[list[bytes], list[bytes]]  # that one end of a stream has read, and written
Message = tuple[dict, dict, bytes]  # head, table, bytes
Told = Mapping[str, Any]  # or a part of it
Entry = tuple[str, dict[str, dict[str, object]]]  # recipe, hyper-parameters
SUM, CHECK = "sum", "check"
WHEN = (
    "before round 1",
    "in each round",
    "after the last round",
    "after each round that is tested",
)
# The others are slow: together they take as long as many files of tests. One of each kind is here:
# asks of some silos, before round 1, after the last, tests, rows of silos, sums in float64.
FEW = ("fedavg", "scaffold+fnr", "rfedavg_plus", "ccvr", "fedbn", "fedgen", "fed3r-tuned")


# What went over the wire
# --------------------------------------------------------------------------------------------------


class Recorded:
    """gRPC's object of a stream, and all frames that it is handed."""

    def __init__(self, call: Any, frames: Frames) -> None:
        self.call, (self._read, self._written) = call, frames

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)

    async def read(self) -> Any:
        frame = await self.call.read()
        if frame is not grpc.aio.EOF:
            self._read.append(bytes(frame))
        return frame

    async def write(self, frame: bytes) -> None:
        self._written.append(bytes(frame))
        await self.call.write(frame)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Frames]]:
    """By the name in the other side's certificate: the frames of each stream."""
    found, init = defaultdict(list), stream.Stream.__init__

    def recording(self: stream.Stream, call: Any, who: str, *more: Any) -> None:
        found[who].append(([], []))
        init(self, Recorded(call, found[who][-1]), who, *more)

    monkeypatch.setattr(stream.Stream, "__init__", recording)
    return found


def decoded(frames: list[bytes]) -> list[Message]:
    """The messages in the frames of one direction, without a line of our decoder."""
    left, found = list(frames), []
    while left:
        head, table, body = json.loads(left.pop(0)), {}, b""
        if head.get("kind") == "ask" or head.get("failed") == "":
            table = json.loads(left.pop(0))
            size = sum(math.prod(one["shape"]) * ITEM_BYTES[one["dtype"]] for one in table.values())
            while len(body) < size:
                body += left.pop(0)
            assert len(body) == size
        found.append((head, table, body))
    return found


def tensors(message: Message) -> dict[str, np.ndarray]:
    """The tensors of a message whose axes lie in their own order."""
    _, table, body = message
    found, at = {}, 0
    for key, one in table.items():
        found[key] = np.frombuffer(body, one["dtype"], math.prod(one["shape"]), offset=at).reshape(
            one["shape"]
        )
        at += found[key].nbytes
    return found


# and what was told before
# --------------------------------------------------------------------------------------------------


def schedule(told: Told, rounds: int) -> list[Told]:
    """What was told of each exchange of a run."""
    of: dict[str, list] = {when: [] for when in WHEN}
    for one in told["exchanges"]:
        of[one["when"]].append(one)
    before, each, last, tested = of.values()
    between = [*each, *tested] * (rounds - 1)
    return [*before, *between, *each, *last, *tested]


def compare(told: Told, silos: Mapping[str, Frames], rounds: int) -> None:
    """Every message, tensor and key of a head that was recorded was told, and the reverse.

    `silos`: what the server has read and written.
    """
    exchanges, answered = schedule(told, rounds), defaultdict(set)
    keys = {kind: {*head["keys"]} for kind, head in told["heads"].items()}
    for who, (read, written) in silos.items():
        (hello, *up), (welcome, *down) = decoded(read), decoded(written)
        over = down.pop()
        for kind, message in (("Hello", hello), ("Welcome", welcome), ("Task", over)):
            assert message[0].keys() == keys[kind] and not message[1]
        assert over[0]["kind"] == "over"
        turns = []
        for task, answer in zip(down, up, strict=True):
            assert (task[0].keys(), answer[0].keys()) == (keys["Task"], keys["Answer"])
            number, step = at = task[0]["exchange"], task[0]["step"]
            assert at == (answer[0]["exchange"], answer[0]["step"])
            turns.append(at)
            answered[number].add(who)
            same(task, answer, exchanges[number], step)
        numbers = sorted({number for number, _ in turns})
        all_turns = [
            (n, k)
            for n in numbers
            for k, turn in enumerate(exchanges[n]["turns"])
            if turn["job"] != CHECK  # where a silo lies
        ]
        assert turns == all_turns, "each message once, in its order"
    assert [len(answered[n]) for n in range(len(exchanges))] == [one["asked"] for one in exchanges]
    assert len(answered) == len(exchanges)


def same(task: Message, answer: Message, exchange: Told, step: int) -> None:
    """A task and its answer are those of the exchange."""
    turn = exchange["turns"][step]
    assert f"{task[0]['owner']}.{task[0]['job']}".removeprefix(".") == turn["job"]
    for (_, table, body), told in ((task, turn["down"]), (answer, turn["up"])):
        entry_keys = {"dtype", "shape", "order"}
        assert all(one.keys() == entry_keys for one in table.values())
        expected = {key: one["form"] for key, one in told.items()}
        size = sum(one["bytes"] or 0 for one in told.values())
        if SUM in expected:  # L: each tensor's integers, times the levels that it has anywhere
            levels = tensors(task)["shared/levels"].sum(1).tolist()
            sizes = map(integers, sorted(exchange["added"].items()))
            length = sum(n * of for n, of in zip(levels, sizes, strict=True))
            expected[SUM] = f"int64 [{length}]"
            size = 8 * length
        found = {key: f"{one['dtype']} {one['shape']}" for key, one in table.items()}
        assert found == expected and len(body) == size


def integers(named: tuple[str, Told]) -> int:
    """The integers that stand for a tensor in a sum: one for a number of float32, two of
    float64."""
    dtype, shape = named[1]["form"].split(" ", 1)
    return math.prod(json.loads(shape)) * {"float32": 1, "float64": 2}[dtype]


# All methods
# --------------------------------------------------------------------------------------------------


def entries() -> dict[str, Entry]:
    """All methods, and what else the table of digits has, with settings that run in no time.
    Without those that can't be deployed."""
    content = yaml.safe_load((ROOT / "research" / "experiments" / "methods.yaml").read_text())[
        "recipes"
    ]
    named = {name: (entry.get("recipe", name), entry) for name, entry in content.items()}
    # Research's replicas of authors' code, by module, are no methods of the product.
    named = {name: entry for name, entry in named.items() if ":" not in entry[0]}
    others = sorted({*registry.METHODS} - {recipe for recipe, _ in named.values()})
    found = {}
    for name, (recipe, entry) in (named | {name: (name, {}) for name in others}).items():
        methods = {
            method: PARAMETERS.get(method, {}) | entry.get(method, {})
            for method in registry.parse(recipe)
        }
        algorithm = registry.build(recipe, methods, Setting(3, 3, n_public=30))
        if not (algorithm.leak or algorithm.needs.pooled):
            found[name] = recipe, methods
    return found


ENTRIES = entries()


def started(entry: Entry, least: int, kits: Path, folder: Path) -> Running:
    """A server and three silos. Raises UserError."""
    recipe, methods = entry
    made = silos.deployment(recipe, methods, secure_sums=least)
    return Running(made, silos.parts(), kits, folder, nobody)


def ran(running: Running, recorded: Mapping[str, list[Frames]]) -> dict[str, Frames]:
    """Runs it; what the server has read from each silo, and written. The silos have written and
    read just that, but for connections that came to nothing, as happens on a busy machine."""
    running.run()
    servers, *of_silos = (recorded.pop(name) for name in (SERVER, *sorted({*recorded} - {SERVER})))
    found = {f"silo-{k + 1}": one for k, (one,) in enumerate(of_silos)}
    assert len(found) == 3 and not recorded
    for _, written in (failed for failed in servers if not failed[0]):
        assert len(decoded(written)) <= 1, "but a Hello, nothing leaves before a Welcome"
    reached = [stream for stream in servers if stream[0]]
    assert sorted(reached) == sorted((out, in_) for in_, out in found.values())
    return found


@pytest.mark.parametrize("least", [0, 2])
@pytest.mark.parametrize(
    "name", [one if one in FEW else pytest.param(one, marks=pytest.mark.slow) for one in ENTRIES]
)
def test_what_is_told_is_what_goes_over_the_wire(
    name: str, least: int, kits: Path, tmp_path: Path, recorded: dict[str, list[Frames]]
) -> None:
    """Or it is told that secure sums are refused, and they are."""
    terms = silos.terms(*ENTRIES[name], batch_norm=True)
    refused = disclosure.refused(terms)
    if least and refused:
        with pytest.raises(UserError, match=re.escape(refused)):
            started(ENTRIES[name], least, kits, tmp_path)
        return
    told = disclosure.describe(replace(terms, secure_sums=least), silos.shards_of()[0])
    compare(told, ran(started(ENTRIES[name], least, kits, tmp_path), recorded), silos.ROUNDS)
    hooks = {inspect.getdoc(getattr(Component, hook)) for hook in HOOKS}
    for words in described(told):
        assert words and words not in hooks, "our methods say what each tensor is"


def described(told: Told) -> Iterator[str]:
    """The words of all tensors."""
    for exchange in told["exchanges"]:
        for of in (*exchange["turns"], {"added": exchange["added"]}):
            for key in {"down", "up", "added"} & of.keys():
                yield from (one["what"] for one in of[key].values())
    yield from (one["what"] for one in told["stays"].values())


# It can fail
# --------------------------------------------------------------------------------------------------


class Curious(Scaffold):
    """Sends one more tensor than it did when its messages were shown."""

    more = False

    def report(self, trace: Trace, client: Client) -> Answer:
        found = super().report(trace, client)
        labels = client.task.network.n_classes
        more = {"labels": trace.loss.new_zeros(labels)} if Curious.more else {}
        return found._replace(upload=found.upload | more)


def test_a_tensor_that_was_not_told_is_found(
    kits: Path,
    tmp_path: Path,
    recorded: dict[str, list[Frames]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry.METHODS, "scaffold", Curious)
    entry = ("scaffold", {})
    told = disclosure.describe(silos.terms(*entry, batch_norm=True), silos.shards_of()[0])
    monkeypatch.setattr(Curious, "more", True)
    found = ran(started(entry, 0, kits, tmp_path), recorded)
    with pytest.raises(AssertionError, match="upload/scaffold/labels"):
        compare(told, found, silos.ROUNDS)


# What stays
# --------------------------------------------------------------------------------------------------


def test_what_stays() -> None:
    """FedBN keeps its batch norms, Ditto a second model."""
    shard = silos.shards_of()[0]
    for recipe, kept in (
        (
            "fedbn",
            {
                f"own/{part}"
                for part in (
                    "params/bn1.weight",
                    "params/bn1.bias",
                    "buffers/bn1.mean",
                    "buffers/bn1.var",
                )
            },
        ),
        ("fedavg", set()),
    ):
        told = disclosure.describe(silos.terms(recipe, {}, batch_norm=True), shard)
        assert told["stays"].keys() == kept
        leaves = {key for one in told["exchanges"] for turn in one["turns"] for key in turn["up"]}
        assert {key for key in leaves if "bn1" in key} == (
            set()
            if kept
            else {
                f"{tree}/bn1.{leaf}"
                for tree, leaf in (
                    ("deltas", "weight"),
                    ("deltas", "bias"),
                    ("buffers", "mean"),
                    ("buffers", "var"),
                )
            }
        )
