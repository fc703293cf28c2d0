"""Each message is noted on both sides under a seal; a guard refuses what was not signed."""

from __future__ import annotations

import datetime
import hashlib
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedml_noniid.core.component import Ask
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import tree_map
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.data.files import Lines
from fedml_noniid.deploy import settings, wire
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.governance import audit
from fedml_noniid.governance.secure.silo import SUM, requested
from fedml_noniid.governance.witness import Guard, Witness
from tests.deploy import world
from tests.governance.conftest import TODAY, Place

NAMES = ("server", "silo-1", "silo-2")
HELLO = wire.Hello(session="s", study="t", samples=17)
W = {"w": torch.ones(3)}


class Line:
    """The witnesses of a server and two silos, and the messages between them."""

    def __init__(self, folder: Path, kits: Path) -> None:
        self.folder, self.ca, self.ends = folder, kits / "ca" / "ca.crt", []
        for rank in range(3):
            kit = Kit.read(kits / str(rank), rank)
            self.ends.append(Witness(audit.Log(folder / audit.FILE.format(rank), kit), kit))

    def send(
        self, sender: int, receiver: int, head: wire.Head, tensors: dict | None = None
    ) -> None:
        def witnessed(message: wire.Message) -> wire.Head:
            return self.ends[sender](NAMES[receiver], True, message)

        frames = wire.leaving(head, tensors, witnessed)
        steps = wire.arriving(type(head), lambda *_: True)
        next(steps)
        for frame in frames:
            found = steps.send(frame)
        self.ends[receiver](NAMES[sender], False, found)

    def begin(self) -> None:
        for silo in (1, 2):
            self.send(silo, 0, HELLO)
            self.send(0, silo, wire.Welcome(run="r"))

    def verify(self, rank: int) -> str:
        mine, other = (self.folder / audit.FILE.format(one) for one in (rank, 0))
        return audit.verify(mine, self.ca, other)


@pytest.fixture
def line(tmp_path, kits):
    return Line(tmp_path, kits)


def test_what_one_side_notes_the_other_side_confirms(line: Line) -> None:
    line.begin()
    for exchange in range(2):
        for silo in (1, 2):
            task = wire.Task(kind="ask", exchange=exchange, round=1, job="train")
            line.send(0, silo, task, W)
        line.send(1, 0, wire.Answer(exchange=exchange), W)
        line.send(2, 0, wire.Answer(exchange=exchange, failed="policy"))
    for rank in (1, 2):
        assert "agree with it" in line.verify(rank)
    log = line.ends[1].log.path
    noted = [one.body for one in audit.chained(log, Lines(log).read())]
    sent = {one["sha256"] for one in noted if "sha256" in one}
    assert sent == {wire.digest(W)}


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        ({"round": 4, "counted": 2}, {"round": 1, "counted": -1}),
        ({}, {"job": "other"}),
        ({}, {"owner": "evil"}),
        ({}, {"step": 8}),
        ({"kind": "over"}, {"kind": "stop", "why": "no reason"}),
    ],
)
def test_a_server_can_not_note_another_head_than_it_sends(
    line: Line, sent: dict, got: dict
) -> None:
    """With the same tensors, or without any."""
    line.begin()
    task = wire.Task(kind="ask", exchange=3, round=4, job="train")
    tensors = W if sent.get("kind", "ask") == "ask" else {}

    def message(changed: dict) -> wire.Message:
        head = task.model_copy(update=changed)
        return wire.Message(head, wire.table_of(tensors), wire.digest(tensors), tensors)

    seal = line.ends[0]("silo-1", True, message(sent)).seal
    line.ends[1]("server", False, message({**sent, **got, "seal": seal}))
    words = (
        rf"audit-1\.jsonl: line 4: got 'Task' .*{[*got.values()][-1]}.*audit-0\.jsonl has not sent"
    )
    for rank in (0, 1):
        ours, other = (line.folder / audit.FILE.format(one) for one in (rank, 1 - rank))
        with pytest.raises(UserError, match=words):
            audit.verify(ours, line.ca, other)


def test_a_message_that_the_other_side_has_not_noted_is_said(line: Line) -> None:
    """An answer with tensors and one without leave the silo; the server leaves them out."""
    line.begin()
    for head, tensors in ((wire.Answer(exchange=3), W), (wire.Answer(exchange=4, failed="no"), {})):
        line.ends[1]("server", True, wire.Message(head, wire.table_of(tensors), "f00d", tensors))
    line.send(0, 1, wire.Task(kind="over"))
    said = line.verify(1).splitlines()
    assert said[1].endswith("lines of server agree with it")
    assert said[2:] == [
        f"not confirmed: {line.folder}/audit-0.jsonl has not got what {line.folder}/audit-1.jsonl "
        "has sent in lines 4, 5: a connection may have broken, or the message was refused"
    ]


def test_an_upload_that_the_silo_did_not_note_is_found(line: Line) -> None:
    line.begin()
    line.send(1, 0, wire.Answer(exchange=0), W)
    log = line.folder / "audit-1.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match=r"had signed 4 lines; .* ends with line 3"):
        line.verify(1)


def test_the_policy_that_is_noted_is_the_one_that_decided(
    place: Place, tmp_path: Path, kits: Path
) -> None:
    """Also if the file was changed before the log is opened."""
    decided = hashlib.sha256(place.policy.read_bytes()).hexdigest()
    agreed = place.decide()
    place.rules(max_rounds=1)
    comm = agreed.deployment.comm_args.model_copy(update={"kit": f"{kits}/{{rank}}"})
    deployment = agreed.deployment.model_copy(update={"comm_args": comm})
    process = SimpleNamespace(
        rank=1, folder=tmp_path, agreed=agreed._replace(deployment=deployment)
    )
    log = Witness.from_process(process).log.path
    (start,) = (one.body for one in audit.chained(log, Lines(log).read()))
    assert start["policy"] == decided


@pytest.mark.parametrize("lie", ["no seal", "of another", "changed", "certificate"])
def test_who_does_not_seal_is_not_heard(line: Line, lie: str) -> None:
    """Silo 2 speaks as silo 1: TLS says who it is, and the seal has to say the same."""
    line.begin()
    good = line.ends[1]
    sealed = good("server", True, wire.Message(wire.Answer(exchange=0), {}, "", {}))
    log, n, head, signature = sealed.seal
    heads = {
        "no seal": sealed.model_copy(update={"seal": None}),
        "of another": line.ends[2]("server", True, wire.Message(sealed, {}, "", {})),
        "changed": sealed.model_copy(update={"seal": (log, n + 1, head, signature)}),
        "certificate": HELLO.model_copy(update={"certificate": "-----BEGIN", "seal": sealed.seal}),
    }
    lines = len(line.ends[0].log.path.read_bytes().splitlines())
    with pytest.raises(wire.RefusedError, match="silo-1") as error:
        line.ends[0]("silo-1", False, wire.Message(heads[lie], {}, "", {}))
    assert error.value.name == "seal"
    assert len(line.ends[0].log.path.read_bytes().splitlines()) == lines
    line.ends[0]("silo-1", False, wire.Message(sealed, {}, "", {}))


def opened(folder: Path, kits: Path) -> audit.Log:
    """The log of silo 1, as a process that is started finds it."""
    return audit.Log(folder / "audit-1.jsonl", Kit.read(kits / "1", 1))


@pytest.fixture
def log(tmp_path: Path, kits: Path) -> audit.Log:
    return opened(tmp_path, kits)


def first(
    recipe: str = "scaffold", rounds: int = world.ROUNDS
) -> tuple[settings.Terms, wire.Down, wire.Task, wire.Table]:
    """What silos agree on, and the first question of a run to silo 0: as object, head and table."""
    terms = world.terms(recipe, {}, batch_norm=True, rounds=rounds)
    down = wire.row_of(ServerRun(terms, world.shards_of()[0]).down, 0)
    return terms, down, wire.Task.from_down(down), wire.table_of(wire.tensors(down))


def guard(place: Place, log: audit.Log, today: datetime.date = TODAY) -> Guard:
    """That of a silo whose policy allows three answers, and that decided today."""
    place.rules(max_answers=3)
    agreed = place.decide(today)
    process = SimpleNamespace(
        rank=1, agreed=agreed, folder=log.path.parent, deployment=agreed.deployment
    )
    return Guard(process, log)


def test_an_exchange_is_answered_a_few_times_only(
    place: Place, log: audit.Log, tmp_path: Path, kits: Path
) -> None:
    """A silo that is started again remembers how often."""
    terms, down, task, table = first()
    silo = world.silos_of(terms)[0]
    trainer = SimpleNamespace(
        silo=silo,
        terms=terms,
        answered=lambda down: wire.up(0, down.exchange, silo.answer(down)),
    )
    for start in range(2):
        mine = guard(place, log)
        for _ in range(2 - start):
            mine.admit(task, table)
            assert mine.answering(trainer, "run")(down)["leaves"]
        log = opened(tmp_path, kits)
    with pytest.raises(wire.RefusedError, match=r"policy\.yaml: max_answers = 3: exchange 0"):
        guard(place, log).admit(task, table)


def rounds_of(silo: int, rounds: int) -> list[int]:
    """The rounds in which a server asks a silo, one of three in each."""
    terms = world.terms("fedavg", {}, batch_norm=True, rounds=rounds)
    terms = replace(terms, plan=replace(terms.plan, cohort=1))
    server, asks = ServerRun(terms, world.shards_of()[0]), []
    while (ask := server.down.ask) is not None:
        asks += [server.down.round] * (silo in ask.to)
        zeros = tree_map(torch.zeros_like, server.schema)
        server.feed(dict.fromkeys(ask.to, zeros | {"n": torch.tensor(1)}))
    return asks


def test_the_end_of_a_run_is_believed_after_the_silo_s_last_round(
    place: Place, log: audit.Log, tmp_path: Path, kits: Path
) -> None:
    """One silo of three is drawn in each of nine rounds, by the seed that all know."""
    rounds = 9
    place.make("fedavg", rounds=rounds, cohort=1)
    last = max(rounds_of(0, rounds))
    assert 1 < last < rounds, "this silo's last round is not the run's"
    terms, down, _, table = first("fedavg", rounds)
    over = wire.Task(kind="over")
    silo = world.silos_of(terms)[0]
    silo._file = SimpleNamespace(run="a run", path=tmp_path / "memory")
    trainer = SimpleNamespace(silo=silo, terms=terms, answered=silo.answer)

    def admits(mine: Guard) -> bool:
        with suppress(wire.RefusedError):
            mine.admit(over, {})
            return True
        return False

    def question(t: int) -> wire.Down:
        return down._replace(exchange=t - 1, round=t, counted={0: wire.NOT_COUNTED})

    mine = guard(place, log)
    with pytest.raises(wire.RefusedError, match=f"its last one is round {last}"):
        mine.admit(over, {})
    with pytest.raises(wire.RefusedError, match="has none like it"):
        mine.admit(
            wire.Task.from_down(question(last)).model_copy(update={"round": rounds + 1}), table
        )
    assert not admits(mine), "what the study does not have counts for nothing"
    for t in (1, last):
        mine.admit(wire.Task.from_down(question(t)), table)
        assert admits(mine) == (t == last)
        trainer.answered = lambda _: wire.up(0, 0, {})
        with pytest.raises(wire.RefusedError, match="the answer and the study differ"):
            mine.answering(trainer, "a run")(question(t))
    for run, believes in (("a run", True), ("another", False)):
        again = guard(place, opened(tmp_path, kits))
        assert not admits(again)
        again.answering(trainer, run)
        assert admits(again) == believes, "the log remembers the rounds of each run"


def test_a_study_says_whether_a_callback_may_end_the_run(place: Place, log: audit.Log) -> None:
    """The silo's owner has agreed to it, and the server can't have such a callback without it."""
    with pytest.raises(wire.RefusedError, match="was asked up to round 0"):
        guard(place, log).admit(wire.Task(kind="over"), {})
    plain = place.decide().signed.study
    callbacks = {"early_stop": {"patience": 3}}
    place.make("scaffold", callbacks=callbacks)
    signed = place.decide().signed.study
    assert signed.may_end_early and not plain.may_end_early
    guard(place, log).admit(wire.Task(kind="over"), {})
    train = world.deployment("scaffold", callbacks=callbacks).train_args
    signed.check_end(train)
    with pytest.raises(
        UserError, match=r"train_args\.callbacks = .*; allowed: callbacks that stop"
    ):
        plain.check_end(train)


def test_sums_are_counted_by_themselves(
    place: Place, log: audit.Log, tmp_path: Path, kits: Path
) -> None:
    """The last answer that is allowed may be added up as often as it may be given, also by a silo
    that is started again."""
    place.make("scaffold", secure_sums=2)
    for _ in range(3):
        log.write(audit.ANSWERS, exchange=0)
    added = len(place.decide().signed.study.messages["train"].added)
    request = {f"shared/{key}": leaf for key, leaf in requested(2, added).items()}
    task = wire.Task(kind="ask", step=1, round=1, job=SUM, counted=-1)
    down = wire.Down(0, 1, Ask(SUM, (0,), shared=requested(2, added)), "", {0: -1}, 1)
    for start in range(2):
        mine = guard(place, log)
        for _ in range(2 - start):
            mine.admit(task, wire.table_of(request))
            assert mine.adding(lambda _: {"leaves": {}})(down) == {"leaves": {}}
        log = opened(tmp_path, kits)
    with pytest.raises(
        wire.RefusedError, match="max_answers = 3: exchange 0 was added to sums 3 times"
    ):
        guard(place, log).admit(task, wire.table_of(request))
    with pytest.raises(wire.RefusedError, match="max_answers = 3: exchange 0 was answered 3 times"):
        mine.admit(*first()[2:])


@pytest.mark.parametrize("least", [0, 2])
def test_an_answer_with_other_tensors_than_the_studys_does_not_leave(
    least: int, place: Place, log: audit.Log
) -> None:
    place.make("scaffold", secure_sums=least)
    terms, down, *_ = first()
    silo = world.silos_of(terms)[0]
    good = wire.up(0, 0, silo.answer(down))
    trainer = SimpleNamespace(silo=silo, terms=terms, answered=lambda _: good)
    answered = guard(place, log).answering(trainer, "run")
    assert answered(down) is good
    for change, name in (
        ({"upload/scaffold/labels": W["w"]}, "upload/scaffold/labels"),
        ({"n": W["w"]}, "n"),
    ):
        other = good | {"leaves": good["leaves"] | change}
        trainer.answered = lambda _, other=other: other
        with pytest.raises(wire.RefusedError, match=f"the answer and the study differ in '{name}'"):
            answered(down)


def test_a_guard_asks_study_and_memory(place: Place, log: audit.Log) -> None:
    mine, (_, _, task, table) = guard(place, log), first()
    mine.admit(task, table)
    for change, words in (
        ({"counted": 10**6}, "counts an answer to exchange 1000000"),
        ({"counted": -2}, "counts an answer to exchange -2"),
        ({"owner": "scaffold"}, "job 'scaffold.train'"),
        ({"round": 10**6}, "has none like it"),
    ):
        with pytest.raises(wire.RefusedError, match=words):
            mine.admit(task.model_copy(update=change), table)


def test_a_policy_that_expires_during_a_run_allows_no_more(place: Place, log: audit.Log) -> None:
    """The silo was started on its last day, and that was yesterday."""
    last = datetime.date.today() - datetime.timedelta(days=1)
    *_, task, table = first()
    for expires, refuses in ((last, True), (datetime.date.today(), False)):
        place.rules(expires=expires)
        mine = guard(place, log, last)
        words = pytest.raises(
            wire.RefusedError, match=rf"policy\.yaml: expires = {last}; today is "
        )
        with words if refuses else nullcontext():
            mine.admit(task, table)


def test_a_guard_knows_a_method_s_job_by_its_owner_only(place: Place, log: audit.Log) -> None:
    """Otherwise the silo would look for a method without a name, and end with a traceback."""
    place.make("rfedavg_plus")
    mine = guard(place, log)
    server = ServerRun(world.terms("rfedavg_plus", {}, batch_norm=True), world.shards_of()[0])
    while not server.down.ask.owner:
        zeros = tree_map(torch.zeros_like, server.schema)
        server.feed(dict.fromkeys(server.down.ask.to, zeros | {"n": torch.tensor(1)}))
    down = wire.row_of(server.down, 0)
    task, table = wire.Task.from_down(down), wire.table_of(wire.tensors(down))
    mine.admit(task, table)
    with pytest.raises(wire.RefusedError, match=r"job '\.rfedavg_plus\.map'; the study has only"):
        mine.admit(task.model_copy(update={"owner": "", "job": "rfedavg_plus.map"}), table)
