"""What `noniid methods show` says is what goes over the wire, tensor by tensor."""

from __future__ import annotations

import inspect
import json
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch

from benchmarks.attacks import read
from fedml_noniid.contract import silos
from fedml_noniid.core.component import Answer, Client, Component, Trace
from fedml_noniid.core.contract import HOOKS
from fedml_noniid.core.errors import UserError
from fedml_noniid.deploy import stream, wire
from fedml_noniid.governance import disclosure
from fedml_noniid.plugins import registry
from fedml_noniid.plugins.baselines.scaffold import Scaffold
from tests.deploy.federation_server import Federation
from tests.recipe_table import DEPLOYED

TIMES = (disclosure.BEFORE, disclosure.ROUND, disclosure.AFTER, disclosure.TESTED)
SUM, CHECK = "sum", "check"
# The others are slow: together they take as long as many files of tests. One of each kind is here:
# asks of some silos, before round 1, after the last, tests of two models, rows of silos, sums in
# float64.
FEW = ("fedavg", "scaffold+fnr", "rfedavg_plus", "ccvr", "fedbn+fednnnn", "fedgen", "fed3r")
Told = Mapping[str, Any]  # or a part of it
Frames = tuple[list[bytes], list[bytes]]  # that the server has read from a silo, and written


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
    streams, init = defaultdict(list), stream.Stream.__init__

    def recording(self: stream.Stream, call: Any, who: str, *more: Any) -> None:
        streams[who].append(([], []))
        init(self, Recorded(call, streams[who][-1]), who, *more)

    monkeypatch.setattr(stream.Stream, "__init__", recording)
    return streams


def decoded(frames: list[bytes], first: type[wire.Head], rest: type[wire.Head]) -> list[Any]:
    """The messages in the frames of one direction, of these kinds."""
    left, kind, messages = iter(frames), first, []
    while frame := next(left, None):
        messages.append(read(chain([frame], left), kind))
        kind = rest
    return messages


def schedule(told: Told, rounds: int) -> list[Told]:
    """What was told of each exchange of a run."""
    by_time = {when: [] for when in TIMES}
    for exchange in told["exchanges"]:
        by_time[exchange["when"]].append(exchange)
    before, each, last, tested = by_time.values()
    return [*before, *[*each, *tested] * (rounds - 1), *each, *last, *tested]


def compare(told: Told, recorded: Mapping[str, list[Frames]]) -> None:
    """Every message and tensor that was recorded was told, and the reverse."""
    exchanges, answered = schedule(told, silos.ROUNDS), Counter[int]()
    for who in ("silo-1", "silo-2", "silo-3"):
        # Connections may come to nothing on a busy machine.
        ((up, down),) = (frames for frames in recorded[who] if frames[0])
        _, *answers = decoded(up, wire.Hello, wire.Answer)
        _, *tasks, over = decoded(down, wire.Welcome, wire.Task)
        assert over.head.kind == "over"
        for task, answer in zip(tasks, answers, strict=True):
            head, exchange = task.head, exchanges[task.head.exchange]
            assert (head.exchange, head.step) == answer.head.at
            turn = exchange["turns"][head.step]
            assert f"{head.owner}.{head.job}".removeprefix(".") == turn["job"]
            same(task, turn["down"], {})
            levels = task.tensors.get("shared/levels", torch.zeros(0, 1)).sum(1).tolist()
            sizes = [integers(entry["form"]) for _, entry in sorted(exchange["added"].items())]
            length = sum(map(operator.mul, levels, sizes))
            same(answer, turn["up"], {SUM: f"int64 [{length}]"} if SUM in turn["up"] else {})
        numbers = sorted({task.head.exchange for task in tasks})
        turns = [(n, turn["job"]) for n in numbers for turn in exchanges[n]["turns"]]
        every = len([job for _, job in turns if job != CHECK])  # which is where a silo lies
        assert len(tasks) == every, "each message once"
        answered.update(numbers)
    assert [answered[n] for n in range(len(exchanges))] == [one["asked"] for one in exchanges]


def same(message: wire.Message[Any], told: Told, sums: Mapping[str, str]) -> None:
    """The tensors of a message are those that were told. `sums`: the forms of sums, whose length
    is that of all levels that there are."""
    expected = {key: entry["form"] for key, entry in told.items()} | sums
    assert {key: wire.form(entry) for key, entry in message.table.items()} == expected
    if not sums:
        assert wire.size_of(message.table) == sum(entry["bytes"] or 0 for entry in told.values())


def integers(form: str) -> int:
    """The integers that stand for a tensor in a sum: one for a number of float32, two of
    float64."""
    dtype, shape = form.split(" ", 1)
    return math.prod(json.loads(shape)) * {"float32": 1, "float64": 2}[dtype]


def started(entry: tuple[str, dict], least: int, kits: Path, folder: Path) -> Federation:
    """A server and three silos. Raises UserError."""
    return Federation(kits, silos.deployment(*entry, secure_sums=least), folder)


@pytest.mark.parametrize("least", [0, 2])
@pytest.mark.parametrize(
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in DEPLOYED],
)
def test_what_is_told_is_what_goes_over_the_wire(
    name: str, least: int, kits: Path, tmp_path: Path, recorded: dict[str, list[Frames]]
) -> None:
    """Or it is told that secure sums are refused, and they are."""
    terms = silos.terms(*DEPLOYED[name], batch_norm=True)
    refused = disclosure.refused(terms)
    if least and refused:
        with pytest.raises(UserError, match=re.escape(refused)):
            started(DEPLOYED[name], least, kits, tmp_path)
        return
    told = disclosure.describe(replace(terms, secure_sums=least), silos.shards_of()[0])
    started(DEPLOYED[name], least, kits, tmp_path).run()
    compare(told, recorded)
    hooks = {inspect.getdoc(getattr(Component, hook)) for hook in HOOKS}
    for words in re.findall('"what": "(.*?)"', json.dumps([told["exchanges"], told["stays"]])):
        assert words and words not in hooks, "our methods say what each tensor is"


# It can fail
# --------------------------------------------------------------------------------------------------


class Curious(Scaffold):
    """Sends one more tensor than it did when its messages were shown."""

    def report(self, trace: Trace, client: Client) -> Answer:
        answer = super().report(trace, client)
        labels = trace.steps.new_zeros(client.task.network.n_classes)
        return answer._replace(upload=answer.upload | {"labels": labels})


def test_a_tensor_that_was_not_told_is_found(
    kits: Path, tmp_path: Path, recorded: dict[str, list[Frames]], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = ("scaffold", {})
    told = disclosure.describe(silos.terms(*entry, batch_norm=True), silos.shards_of()[0])
    monkeypatch.setitem(registry.METHODS, "scaffold", Curious)
    started(entry, 0, kits, tmp_path).run()
    with pytest.raises(AssertionError, match="upload/scaffold/labels"):
        compare(told, recorded)


NORMS = {"params/bn1.weight", "params/bn1.bias", "buffers/bn1.mean", "buffers/bn1.var"}


@pytest.mark.parametrize(("recipe", "kept"), [("fedbn", NORMS), ("fedavg", set())])
def test_what_stays(recipe: str, kept: set[str]) -> None:
    """FedBN keeps its batch norms: they are in no upload."""
    terms = silos.terms(recipe, {}, batch_norm=True)
    told = disclosure.describe(terms, silos.shards_of()[0])
    assert told["stays"].keys() == {f"own/{key}" for key in kept}
    leaves = {key for one in told["exchanges"] for turn in one["turns"] for key in turn["up"]}
    sent = {key.replace("deltas/", "params/") for key in leaves if "bn1" in key}
    assert sent == NORMS - kept
