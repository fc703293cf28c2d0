"""Sends mutated messages to a live server and to a live silo: `python -m benchmarks attacks`.

The sender has a valid certificate and seals its messages: it is a silo, or the server, that lies.
Processes are those of `noniid deploy`, over gRPC on loopback. What each message is refused for is
worked out beforehand, by the same checks without a network, and compared with what the other side
says.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import grpc
import pandas as pd
import torch

from benchmarks import report
from benchmarks.machine import Watch
from benchmarks.mutations import mutated
from fedml_noniid.contract import silos
from fedml_noniid.core.component import Ask
from fedml_noniid.core.errors import one_line
from fedml_noniid.core.trees import Params
from fedml_noniid.credentials import certificates
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.deploy import results, settings, silo_client, silo_server, wire
from fedml_noniid.deploy.coordinator import Coordinator
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.deploy.stream import SERVICE
from fedml_noniid.engines import absences
from fedml_noniid.engines.packing import flatten
from fedml_noniid.governance.audit import Log
from fedml_noniid.governance.witness import Guard, Witness
from fedml_noniid.processes import launch, loopback

Asked = Generator[bytes, None, Params]  # yields the frames of a question, returns the answer
RECIPE = "rfedavg_plus+fnr"  # messages of four jobs
PATIENT = {"deadline_s": 1e5, "patience_s": 1e5, "lost_s": 1e5}  # no time limit ends anything
LIAR = 2  # the silo that lies, of three
FIRST = 100  # memory is measured after so many messages, and at the end
WIDE, HUGE = 4096, 1_500_000_000  # a layer, and bytes of a tensor, that a server has no right to
ANSWER_S = 300.0  # what must happen at once may take so long on a busy machine
FIRST_MESSAGES = 0.25  # of the mutated ones: Hellos to a server, and streams with a bad Welcome
TRACES = re.compile(r"Traceback|never retrieved|Fatal|unexpected")  # of an error nobody expected


@dataclass
class Siege:
    """What came of the messages to one process."""

    target: str
    sent: int = 0
    named: Counter[str] = field(default_factory=Counter)  # what the messages were refused for
    wrong: list[str] = field(default_factory=list)  # said for other reasons than expected
    before_mb: float = 0.0  # the most memory that the process has had, after FIRST messages
    after_mb: float = 0.0  # at the end
    seconds: float = 0.0
    same: bool = False  # whether the run then ended with the bits of the simulation
    codes: list[int | None] = field(default_factory=list)  # exit codes of the processes
    traces: list[str] = field(default_factory=list)  # lines of the log

    @property
    def good(self) -> bool:
        """Whether all is as it must be."""
        return self.same and {*self.codes} == {0} and not (self.wrong or self.traces)

    def note(self, name: str, expected: str, said: str, pid: int | None) -> None:
        """Counts a message under `name`; `pid`: of the process that got it."""
        self.sent += 1
        self.named[name or "taken: it is valid"] += 1
        if said != expected:
            self.wrong.append(f"message {self.sent}: {said!r} in place of {expected!r}")
        if self.sent == FIRST:
            self.before_mb = highest_mb(pid)
        if self.sent % FIRST == 0:
            self.after_mb = highest_mb(pid)

    def end(self, processes: loopback.Processes, ranks: Sequence[int]) -> None:
        """Waits for the end of processes; notes their exit codes and what their logs have."""
        for rank in ranks:
            processes.running[rank].join(ANSWER_S)
            self.codes.append(processes.running[rank].exitcode)
            log = launch.log_file(processes.output, rank).read_text(errors="replace")
            self.traces += [line[:200] for line in log.splitlines() if TRACES.search(line)]


def highest_mb(pid: int | None) -> float:
    """The most memory that a process has had, VmHWM."""
    status = Path(f"/proc/{pid}/status").read_text()
    matched = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert matched is not None, "Linux says it"
    return int(matched[1]) / 1024


def of_recipe() -> settings.Deployment:
    """Three silos, of which two must answer."""
    return silos.deployment(RECIPE, {}, rounds=2, comm={"quorum": 2, "gone_s": 0.2, **PATIENT})


def go(output: str | Path) -> Path:
    """The file whose existence lets the slow silo answer."""
    return Path(output) / "go"


def besieged(rank: int, config: str, output: str) -> None:
    """A process of the federation. The server takes calls at any rate, and silo 0 answers once the
    siege is over: so its exchange lasts as long."""
    if rank == 0:
        silo_server.MAX_CALLS = silo_server.CALLS_PER_S = 1e9
    if rank == 1:
        inner = Silo.answer

        def answer(self: Silo, down: wire.Down) -> Any:
            while not go(output).exists():
                time.sleep(0.05)
            return inner(self, down)

        Silo.answer = answer  # type: ignore[method-assign]  # this process is the slow silo
    loopback.process(rank, config, output)


def hasty(rank: int, config: str, output: str) -> None:
    """A silo that comes again at once."""
    silo_client.FIRST_PAUSE_S = silo_client.LONGEST_PAUSE_S = 0.0
    loopback.process(rank, config, output)


def read(
    frames: Iterator[bytes], kind: type[wire.H], look: wire.Look = lambda *_: False
) -> wire.Message[wire.H]:
    """The next message of a stream. Raises RefusedError."""
    steps, message = wire.arriving(kind, look), None
    next(steps)
    while message is None:
        message = steps.send(next(frames, b""))
    return message


def refusal_of(
    frames: Iterator[bytes], kind: type[wire.H], check: Callable[[Any], object], look: wire.Look
) -> str:
    """What a message is refused for by the checks alone; "" if it is taken."""
    try:
        check(read(frames, kind, look))
    except wire.RefusedError as refusal:
        return refusal.name
    return ""


class Line:
    """A stream, as far as a coordinator sees it."""

    def wake(self) -> None: ...

    def end(self, refusal: wire.RefusedError) -> None: ...


def outcome(error: grpc.RpcError) -> str:
    """The name of the server's refusal, otherwise gRPC's code."""
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return str(json.loads(error.details())["name"])
    return str(error.code().name.lower())


class Call:
    """A stream of a silo."""

    def __init__(self, channel: grpc.Channel, *frames: bytes | None) -> None:
        self._leaving: SimpleQueue[bytes | None] = SimpleQueue()
        self.send(*frames)
        path = f"/{SERVICE}/Session"
        self.stream = channel.stream_stream(path)(iter(self._leaving.get, None), timeout=ANSWER_S)

    def send(self, *frames: bytes | None) -> None:
        """Sends frames; None ends this direction."""
        for frame in frames:
            self._leaving.put(frame)

    def outcome(self) -> str:
        """Waits for the end of the stream: "ok", or as in `outcome`."""
        try:
            for _ in self.stream:
                pass
        except grpc.RpcError as error:
            return outcome(error)
        return "ok"


class LyingSilo:
    """A silo of the federation that sends a server mutated Hellos and Answers."""

    def __init__(self, processes: loopback.Processes, rng: random.Random) -> None:
        self._rng = rng
        process = launch.Process.from_config(LIAR + 1, processes.config)
        self.kit = Kit.read(process.deployment.kit(LIAR + 1), LIAR + 1)
        self._seal = partial(Witness.from_process(process), certificates.SERVER, True)
        self._silo = Silo(terms_of(process), LIAR, process.shard)
        study, samples = process.agreed.signed.sha256, len(process.shard.parts["train"].y)
        own = wire.Hello(session=secrets.token_hex(8), study=study, samples=samples)
        (self._good_hello,) = wire.leaving(own, None, self._seal)
        self._server = ChecksOfServer(processes, study)
        assert not self._server.of_hello([self._good_hello]), "this one is good"
        self._good_answer: list[bytes] = []

    def hello(self) -> bytes:
        """A good Hello of a new process: after a bad answer, a silo has to start again."""
        head = json.loads(self._good_hello) | {"session": secrets.token_hex(8)}
        return json.dumps(head).encode()

    def begin(self, channel: grpc.Channel) -> None:
        """Makes the good answer that is mutated later."""
        call = self._joined(channel)
        task = read(call.stream, wire.Task)
        head, trees = task.head, wire.nested(task.tensors)
        ask = Ask(head.job, (LIAR,), **cast("Any", trees), owner=head.owner)
        terms = self._silo.terms.fingerprint
        down = wire.Down(head.exchange, head.round, ask, terms)
        upload = wire.up(LIAR, down.exchange, self._silo.answer(down))
        answer = wire.Answer(exchange=down.exchange)
        self._good_answer = [*wire.leaving(answer, upload["leaves"], self._seal)]
        assert not self._server.of_answer(self._good_answer), "this one is good"
        call.send(None)
        call.stream.cancel()

    def _joined(self, channel: grpc.Channel) -> Call:
        """A stream after its Welcome."""
        hello = self.hello()
        assert not self._server.of_hello([hello]), "both remember the same latest processes"
        call = Call(channel, hello)
        read(call.stream, wire.Welcome)
        return call

    def attack(self, channel: grpc.Channel) -> tuple[str, str]:
        """Sends one mutated message; (what it must be refused for, what the server says)."""
        if self._rng.random() < FIRST_MESSAGES:
            frames = mutated([self.hello()], self._rng)
            expected = self._server.of_hello(frames)
            call = Call(channel, *frames, *([None] * bool(expected)))
            if expected:
                return expected, call.outcome()
            read(call.stream, wire.Welcome)
            call.send(None)
            call.stream.cancel()
            return "", ""
        expected = ""
        while not expected:  # a good answer would count
            frames = mutated(self._good_answer, self._rng)
            expected = self._server.of_answer(frames)
        call = self._joined(channel)
        read(call.stream, wire.Task, lambda *_: True)
        call.send(*frames, None)
        return expected, call.outcome()


def terms_of(process: launch.Process) -> settings.Terms:
    """What the processes of a federation agree on."""
    deployment, network = process.deployment, process.network
    recipe = deployment.train_args.recipe
    return settings.terms(deployment, recipe, network, process.shard.parts.get("public"))


class ChecksOfServer:
    """The checks of a server, without a network."""

    def __init__(self, processes: loopback.Processes, study: str) -> None:
        process = launch.Process.from_config(0, processes.config)
        self._run = ServerRun(terms_of(process), process.shard)
        kit, comm = Kit.read(process.deployment.kit(0), 0), process.deployment.comm_args
        self._witness = Witness(Log(processes.output / "expected-0.jsonl", kit), kit)
        self._coordinator = Coordinator(comm, process.deployment.silos, study, "run")

    def of_hello(self, frames: Sequence[bytes]) -> str:
        """What a Hello is refused for; "" if it is taken."""

        def check(message: Any) -> None:
            self._witness(certificates.name(LIAR + 1), False, message)
            line = cast("Any", Line())  # a coordinator only wakes and ends a stream
            self._coordinator.join(LIAR, message.head, line)

        return refusal_of(iter(frames), wire.Hello, check, lambda *_: False)

    def of_answer(self, frames: Sequence[bytes]) -> str:
        """What an answer is refused for; "" if it is taken, or says why there is none."""

        def look(head: wire.Answer, table: wire.Table) -> None:
            if head.at != (0, 0):
                raise wire.RefusedError("stale", "is over")
            wire.fit(table, self._run.schema, "")

        def check(message: Any) -> None:
            self._witness(certificates.name(LIAR + 1), False, message)
            if not message.head.failed:
                up = wire.Up(client=LIAR, exchange=message.head.exchange, leaves=message.tensors)
                self._run.opened(up, LIAR, silos.SIZES[LIAR])

        return refusal_of(iter(frames), wire.Answer, check, look)


def siege_of_server(messages: int, seed: int, folder: Path) -> Siege:
    """Attacks a server in its first exchange. Afterwards the silo that lies is gone."""
    terms, parts, siege = of_recipe(), silos.parts(), Siege("server")
    with loopback.Processes(terms, parts, folder, besieged) as processes:
        for rank in (0, 1, 2):
            processes.start(rank)
        liar = LyingSilo(processes, random.Random(seed))
        with silo_client.channel(processes.deployment.comm_args, liar.kit) as channel:
            grpc.channel_ready_future(channel).result(ANSWER_S)
            liar.begin(channel)
            began = time.monotonic()
            for _ in range(messages):
                expected, said = liar.attack(channel)
                siege.note(said, expected, said, processes.running[0].pid)
        siege.seconds = time.monotonic() - began
        go(processes.output).touch()
        siege.end(processes, (0, 1, 2))
        missing = absences.read(processes.output / results.ABSENT)
        liar_alone = {client for late in missing.values() for client in late} == {LIAR}
        undisturbed = loopback.simulate(terms, parts, missing)
        siege.same = liar_alone and processes.digest() == undisturbed
    return siege


def lies_of_a_server(task: list[bytes]) -> Iterator[list[bytes]]:
    """What somebody would think of, made of a good task with tensors."""
    head, table, *data = task
    for change in (
        *({"round": 10**6}, {"exchange": -7}, {"exchange": 10**30}, {"counted": 10**6}),
        *({"job": "test", "owner": ""}, {"job": "x" * 1000}, {"owner": "fnr"}),
    ):
        yield [json.dumps(json.loads(head) | change).encode(), table, *data]
    for kind in ("over", "stop"):
        yield [json.dumps(json.loads(head) | {"kind": kind}).encode()]
    yield [b"[" * 60_000]
    entries = json.loads(table)
    key = next(key for key, entry in entries.items() if len(entry["shape"]) == 2)
    shape = [WIDE, *entries[key]["shape"][1:]]
    wider = json.dumps(entries | {key: entries[key] | {"shape": shape}}).encode()
    size = wire.size_of(wire.table(wider))
    whole, rest = divmod(size, wire.CHUNK_BYTES)
    yield [head, wider, *[bytes(wire.CHUNK_BYTES)] * whole, *[bytes(rest)] * bool(rest)]
    huge = entries | {"params/more": {"dtype": "uint8", "shape": [HUGE], "order": [0]}}
    yield [head, json.dumps(huge).encode(), *[bytes(wire.CHUNK_BYTES)] * 64]


class LyingServer:
    """A server that sends silo 0 mutated Welcomes and Tasks. After so many, it runs an honest
    federation with it."""

    def __init__(
        self, processes: loopback.Processes, rng: random.Random, messages: int, siege: Siege
    ) -> None:
        self._processes, self._rng, self._messages = processes, rng, messages
        self._found, self.digest = siege, ""
        process, silo = (launch.Process.from_config(rank, processes.config) for rank in (0, 1))
        self._terms, self._shard = terms_of(process), process.shard
        kit = Kit.read(silo.deployment.kit(1), 1)
        self._seal = partial(Witness.from_process(process), certificates.name(1), True)
        log = Log(processes.output / "expected-1.jsonl", kit)
        self._witness, self._guard = Witness(log, kit), Guard(silo, log)
        self._said: wire.RefusedError | None = None  # by the guard, of the last task
        (self._welcome,) = wire.leaving(wire.Welcome(run="a run"), None, self._seal)
        assert self._of_welcome(iter([self._welcome])) == "", "this one is good"
        self._tasks: list[list[bytes]] = []
        for _ in self._federation(self._recorded):
            pass
        self._thought_of = lies_of_a_server(next(task for task in self._tasks if len(task) > 2))

    def _federation(self, ask: Callable[[wire.Down], Asked]) -> Iterator[bytes]:
        """Runs a federation; `ask` gets the answers of silo 0. Yields what is sent to it."""
        torch.set_num_threads(of_recipe().device_args.threads)  # of this thread, as in processes
        run, own = ServerRun(self._terms, self._shard), silos.silos_of(self._terms)
        self._own = own[0]
        while (question := run.down.ask) is not None:
            ups = {}
            for k in question.to:
                down = wire.row_of(run.down, k)
                leaves = flatten(own[k].answer(down) or {}) if k else (yield from ask(down))
                ups[k] = wire.Up(client=k, exchange=down.exchange, leaves=leaves)
            run.feed(run.open(ups))
        self.digest = silos.digest(run.loop.outcome)

    def _recorded(self, down: wire.Down) -> Asked:
        """Keeps a question as it would be sent, for a silo without memory, and answers it here."""
        head = wire.Task.from_down(down).model_copy(update={"counted": wire.NOT_COUNTED})
        self._tasks.append([*wire.leaving(head, wire.tensors(down), self._seal)])
        yield from ()
        return flatten(self._own.answer(down) or {})

    def _asked(self, requests: Iterator[bytes]) -> Callable[[wire.Down], Asked]:
        """Asks the silo."""

        def ask(down: wire.Down) -> Asked:
            yield from wire.leaving(wire.Task.from_down(down), wire.tensors(down), self._seal)
            return read(requests, wire.Answer).tensors

        return ask

    def session(self, requests: Iterator[bytes], _: object) -> Iterator[bytes]:
        """One stream of the silo."""
        try:
            read(requests, wire.Hello)
            if self._found.sent < self._messages:
                yield from self._lies(requests)
                return
            yield self._welcome
            yield from self._federation(self._asked(requests))
            yield from wire.leaving(wire.Task(kind="over"), None, self._seal)
            _until_it_leaves(requests)
        except grpc.RpcError:  # the silo has left
            return

    def _lies(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """Mutated messages until one of them ends the stream."""
        frames, ends = [self._welcome], ""
        if self._rng.random() < FIRST_MESSAGES:
            frames, ends = self._mutated([self._welcome], self._of_welcome)
            self._note(ends)
        yield from frames
        while not ends and self._found.sent < self._messages:
            frames, ends = self._mutated(self._rng.choice(self._tasks), self._of_task)
            yield from frames
            if ends:
                self._note(ends)
            else:
                said = read(requests, wire.Answer, lambda *_: True).head.failed
                self._note_answer(said)
        if ends not in ("", "truncated"):
            _until_it_leaves(requests)

    def _note(self, name: str, expected: str = "", said: str = "") -> None:
        self._found.note(name, expected, said, self._processes.running[1].pid)

    def _note_answer(self, said: str) -> None:
        """Counts a task that the silo has answered, perhaps with words."""
        if self._said is not None:
            self._note(self._said.name, one_line(str(self._said), 500), said)
        else:
            self._note("answered: it can't train with these numbers" if said else "")

    def _mutated(
        self, good: list[bytes], check: Callable[[Iterator[bytes]], str | None]
    ) -> tuple[list[bytes], str]:
        """(frames up to the one that decides, what ends the stream)."""
        while True:
            thought_of = next(self._thought_of, None) if check == self._of_task else None
            frames = thought_of or mutated(good, self._rng)
            rest = iter(frames)
            ends = check(rest)
            if ends is not None:
                return frames[: len(frames) - len([*rest])], ends

    def _of_welcome(self, frames: Iterator[bytes]) -> str | None:
        """What a Welcome ends the stream for; None if it names another run: a silo that knows none
        yet would stay with that one."""
        heads: list[wire.Welcome] = []

        def check(message: Any) -> None:
            self._witness(certificates.SERVER, False, message)
            heads.append(message.head)

        ends = refusal_of(frames, wire.Welcome, check, lambda *_: False)
        return None if heads and heads[0].run != "a run" else ends

    def _of_task(self, frames: Iterator[bytes]) -> str | None:
        """What a task ends the stream for; None if it ends the silo, which believes that the run is
        over."""
        heads: list[wire.Task] = []
        self._said = None

        def look(head: wire.Task, table: wire.Table) -> bool:
            try:
                self._guard.admit(head, table)
            except wire.RefusedError as refusal:
                self._said = refusal
            return True

        def check(message: Any) -> None:
            self._witness(certificates.SERVER, False, message)
            heads.append(message.head)

        ends = refusal_of(frames, wire.Task, check, look)
        if heads and heads[0].kind == "over":
            look(heads[0], {})
            return None if self._said is None else self._said.name
        return "stop" if heads and heads[0].kind == "stop" else ends


def _until_it_leaves(requests: Iterator[bytes]) -> None:
    for _ in requests:
        pass


def siege_of_silo(messages: int, seed: int, folder: Path) -> Siege:
    """Attacks a silo, from before its first round."""
    terms, siege = of_recipe(), Siege("silo")
    with loopback.Processes(terms, silos.parts(), folder, hasty) as processes:
        liar = LyingServer(processes, random.Random(seed), messages, siege)
        comm, kit = processes.deployment.comm_args, Kit.read(processes.deployment.kit(0), 0)
        port, handler = grpc.server(ThreadPoolExecutor(4)), grpc.stream_stream_rpc_method_handler
        port.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Session": handler(liar.session)}),)
        )
        credentials = grpc.ssl_server_credentials([(kit.key, kit.certificate)], kit.ca, True)
        port.add_secure_port(comm.server, credentials)
        port.start()
        processes.start(1)
        silo, began, before = processes.running[1], time.monotonic(), -1
        while silo.exitcode is None and siege.sent > before:  # else it is silent
            before = siege.sent
            silo.join(ANSWER_S)
        siege.seconds = time.monotonic() - began
        port.stop(None)
        siege.end(processes, (1,))
        siege.same = liar.digest == loopback.simulate(terms, silos.parts())
    return siege


def table(sieges: Sequence[Siege]) -> pd.DataFrame:
    """Returns a line for each fact, with a column for each target."""
    names = sorted({name for siege in sieges for name in siege.named})
    columns = {}
    for siege in sieges:
        columns[siege.target] = {
            "messages": siege.sent,
            "refused for another reason than expected": len(siege.wrong),
            "exit codes at the end": " ".join(map(str, siege.codes)),
            "errors that nobody expected, in the logs": len(siege.traces),
            "weights of the run afterwards": "the same SHA-256" if siege.same else "OTHER WEIGHTS",
            f"most memory (VmHWM) after {FIRST} messages, MB": round(siege.before_mb),
            "most memory at the end, MB": round(siege.after_mb),
            "seconds": round(siege.seconds),
            **{name if ":" in name else f"refused: {name}": siege.named[name] for name in names},
        }
    return pd.DataFrame(columns, dtype=object).rename_axis("what").reset_index()


def attacks(messages: int, seed: int, to: Path | None, say: Callable[[str], object]) -> bool:
    """Sends so many messages to a server, and as many to a silo; says whether all was right.

    `to`: the folder of the page, None for none.
    """
    watch, sieges = Watch(), list[Siege]()
    for siege in (siege_of_server, siege_of_silo):
        with tempfile.TemporaryDirectory() as folder:
            sieges.append(siege(messages, seed, Path(folder)))
        say(f"{sieges[-1]}")
    if to is not None:
        facts = table(sieges)
        context = {"machine": watch.line(), "table": facts.to_dict("records"), "seed": seed}
        report.write(to, "attacks", context, {"attacks": facts})
    return all(siege.good for siege in sieges)
