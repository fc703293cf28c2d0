"""Each message is noted on both sides under a seal; a guard refuses what was not signed."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.attacks import read
from fedml_noniid.core.component import Ask
from fedml_noniid.core.errors import UserError
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.data.files import Lines
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.engines.cohort import draw_cohort
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
        self.ca, self.ends, self.paths = kits / "ca" / "ca.crt", [], []
        for rank in range(3):
            kit = Kit.read(kits / str(rank), rank)
            self.paths.append(folder / audit.FILE.format(rank))
            self.ends.append(Witness(audit.Log(self.paths[rank], kit), kit))

    def send(
        self, sender: int, receiver: int, head: wire.Head, tensors: dict | None = None
    ) -> None:
        frames = wire.leaving(head, tensors, partial(self.ends[sender], NAMES[receiver], True))
        self.ends[receiver](NAMES[sender], False, read(frames, type(head)))

    def begin(self) -> None:
        for silo in (1, 2):
            self.send(silo, 0, HELLO)
            self.send(0, silo, wire.Welcome(run="r"))

    def verify(self, rank: int, against: int = 0) -> str:
        return audit.verify(self.paths[rank], self.ca, self.paths[against])


@pytest.fixture
def line(tmp_path, kits):
    return Line(tmp_path, kits)


def test_what_one_side_notes_the_other_side_confirms(line: Line) -> None:
    line.begin()
    for exchange in range(2):
        for silo in (1, 2):
            line.send(0, silo, wire.Task(kind="ask", exchange=exchange, round=1, job="train"), W)
        line.send(1, 0, wire.Answer(exchange=exchange), W)
        line.send(2, 0, wire.Answer(exchange=exchange, failed="policy"))
    for rank in (1, 2):
        assert "agree with it" in line.verify(rank)
    noted = [one.body for one in audit.chained(line.paths[1], Lines(line.paths[1]).read())]
    assert {one["sha256"] for one in noted if "sha256" in one} == {wire.digest(W)}


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        ({"round": 4, "counted": 2}, {"round": 1, "counted": -1}),
        ({}, {"owner": "evil"}),
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
    noted = wire.Message(
        task.model_copy(update=sent), wire.table_of(tensors), wire.digest(tensors), tensors
    )
    seal = line.ends[0]("silo-1", True, noted).seal
    other = task.model_copy(update={**sent, **got, "seal": seal})
    line.ends[1]("server", False, noted._replace(head=other))
    words = rf"audit-1\.jsonl: line 4: got 'Task' .*{[*got.values()][-1]}.*-0\.jsonl has not sent"
    for rank in (0, 1):
        with pytest.raises(UserError, match=words):
            line.verify(rank, 1 - rank)


def test_a_message_that_the_other_side_has_not_noted_is_said(line: Line) -> None:
    """An answer with tensors and one without leave the silo; the server leaves them out."""
    line.begin()
    for head, tensors in ((wire.Answer(exchange=3), W), (wire.Answer(exchange=4, failed="no"), {})):
        line.ends[1]("server", True, wire.Message(head, wire.table_of(tensors), "f00d", tensors))
    line.send(0, 1, wire.Task(kind="over"))
    *_, agree, missing = line.verify(1).splitlines()
    assert agree.endswith("lines of server agree with it")
    assert missing.startswith(f"not confirmed: {line.paths[0]} has not got what {line.paths[1]} ")
    assert "has sent in lines 4, 5: a connection may have broken" in missing


@pytest.mark.parametrize("lie", ["no seal", "of another", "changed", "certificate"])
def test_who_does_not_seal_is_not_heard(line: Line, lie: str) -> None:
    """Silo 2 speaks as silo 1: TLS says who it is, and the seal has to say the same."""
    line.begin()
    sealed = line.ends[1]("server", True, wire.Message(wire.Answer(exchange=0), {}, "", {}))
    log, n, head, signature = sealed.seal
    heads = {
        "no seal": sealed.model_copy(update={"seal": None}),
        "of another": line.ends[2]("server", True, wire.Message(sealed, {}, "", {})),
        "changed": sealed.model_copy(update={"seal": (log, n + 1, head, signature)}),
        "certificate": HELLO.model_copy(update={"certificate": "-----BEGIN", "seal": sealed.seal}),
    }
    before = line.paths[0].read_bytes()
    with pytest.raises(wire.RefusedError, match="silo-1") as error:
        line.ends[0]("silo-1", False, wire.Message(heads[lie], {}, "", {}))
    assert error.value.name == "seal" and line.paths[0].read_bytes() == before
    line.ends[0]("silo-1", False, wire.Message(sealed, {}, "", {}))


@pytest.fixture
def guards(place: Place, tmp_path: Path, kits: Path) -> Callable[..., tuple[Guard, audit.Log]]:
    """Starts a silo whose policy allows three answers, and that decided today."""

    def started(today: datetime.date = TODAY) -> tuple[Guard, audit.Log]:
        place.rules(max_answers=3)
        agreed = place.decide(today)
        process = SimpleNamespace(
            rank=1, agreed=agreed, folder=tmp_path, deployment=agreed.deployment
        )
        log = audit.Log(tmp_path / "audit-1.jsonl", Kit.read(kits / "1", 1))
        return Guard(process, log), log

    return started


def question(server: ServerRun) -> tuple[wire.Down, wire.Task, wire.Table]:
    """What silo 0 is asked now: as object, head and table."""
    down = wire.row_of(server.down, 0)
    return down, wire.Task.from_down(down), wire.table_of(wire.tensors(down))


def asking(recipe: str = "scaffold", rounds: int = world.ROUNDS) -> ServerRun:
    return ServerRun(world.terms(recipe, {}, batch_norm=True, rounds=rounds), world.shards_of()[0])


def trainer_of(server: ServerRun, answered: Callable[[wire.Down], wire.Up]) -> SimpleNamespace:
    return SimpleNamespace(
        silo=world.silos_of(server.terms)[0], terms=server.terms, answered=answered
    )


def test_an_exchange_is_answered_a_few_times_only(guards) -> None:
    """A silo that is started again remembers how often."""
    server = asking()
    down, task, table = question(server)
    silo = world.silos_of(server.terms)[0]
    trainer = trainer_of(server, lambda down: wire.up(0, down.exchange, silo.answer(down)))
    for times in (2, 1):
        mine, _ = guards()
        for _ in range(times):
            mine.admit(task, table)
            assert mine.answering(trainer, "run")(down)["leaves"]
    with pytest.raises(wire.RefusedError, match=r"policy\.yaml: max_answers = 3: exchange 0"):
        guards()[0].admit(task, table)


def test_the_end_of_a_run_is_believed_after_the_silo_s_last_round(
    place: Place, guards, tmp_path: Path
) -> None:
    """One silo of three is drawn in each of nine rounds, by the seed that all know. At once only if
    the study says that a callback may end the run."""
    rounds, over = 9, wire.Task(kind="over")
    callbacks = {"early_stop": {"patience": 3}}
    place.make("fedavg", rounds=rounds, callbacks=callbacks)
    guards()[0].admit(over, {})
    place.make("fedavg", rounds=rounds, cohort=1)
    train = world.deployment("fedavg", callbacks=callbacks).train_args
    with pytest.raises(UserError, match=r"train_args\.callbacks = .*; allowed: callbacks that st"):
        place.decide().signed.study.check_end(train)
    server = asking("fedavg", rounds)
    cohorts = {t: draw_cohort(world.SEED, t, 3, 1) for t in range(1, rounds + 1)}
    last = max(t for t, cohort in cohorts.items() if 0 in cohort)
    assert 1 < last < rounds, "this silo's last round is not the run's"
    first, task, table = question(server)
    trainer = trainer_of(server, lambda _: wire.up(0, 0, {}))
    trainer.silo._file = SimpleNamespace(run="a run", path=tmp_path / "memory")

    def ends(mine: Guard) -> bool:
        with suppress(wire.RefusedError):
            mine.admit(over, {})
            return True
        return False

    mine, _ = guards()
    with pytest.raises(wire.RefusedError, match=f"its last one is round {last}"):
        mine.admit(over, {})
    with pytest.raises(wire.RefusedError, match="has none like it"):
        mine.admit(task.model_copy(update={"round": rounds + 1}), table)
    for t in (1, last):
        down = first._replace(exchange=t - 1, round=t, counted={0: wire.NOT_COUNTED})
        mine.admit(wire.Task.from_down(down), table)
        assert ends(mine) == (t == last)
        with pytest.raises(wire.RefusedError, match="the answer and the study differ"):
            mine.answering(trainer, "a run")(down)
    for run, believes in (("a run", True), ("another", False)):
        again, _ = guards()
        again.answering(trainer, run)
        assert ends(again) == believes, "the log remembers the rounds of each run"


def test_sums_are_counted_by_themselves(place: Place, guards) -> None:
    """The last answer that is allowed may be added up as often as it may be given, also by a silo
    that is started again."""
    place.make("scaffold", secure_sums=2)
    mine, log = guards()
    for _ in range(3):
        log.write(audit.ANSWERS, exchange=0)
    asked = requested(2, len(place.decide().signed.study.messages["train"].added))
    table = wire.table_of({f"shared/{key}": leaf for key, leaf in asked.items()})
    task = wire.Task(kind="ask", step=1, round=1, job=SUM, counted=-1)
    down = wire.Down(0, 1, Ask(SUM, (0,), shared=asked), "", {0: -1}, 1)
    for times in (2, 1):
        mine, _ = guards()
        for _ in range(times):
            mine.admit(task, table)
            assert mine.adding(lambda _: {"leaves": {}})(down) == {"leaves": {}}
    words = "max_answers = 3: exchange 0 was added to sums 3 times"
    with pytest.raises(wire.RefusedError, match=words):
        guards()[0].admit(task, table)
    with pytest.raises(wire.RefusedError, match="max_answers = 3: exchange 0 was answered 3 times"):
        mine.admit(*question(asking())[1:])


@pytest.mark.parametrize("least", [0, 2])
@pytest.mark.parametrize("name", ["upload/scaffold/labels", "n"])
def test_an_answer_with_other_tensors_than_the_studys_does_not_leave(
    least: int, name: str, place: Place, guards
) -> None:
    place.make("scaffold", secure_sums=least)
    server = asking()
    down, *_ = question(server)
    good = wire.up(0, 0, world.silos_of(server.terms)[0].answer(down))
    other = good | {"leaves": good["leaves"] | {name: W["w"]}}
    answers = iter((good, other))
    answered = guards()[0].answering(trainer_of(server, lambda _: next(answers)), "run")
    assert answered(down) is good
    with pytest.raises(wire.RefusedError, match=f"the answer and the study differ in '{name}'"):
        answered(down)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"counted": 10**6}, "counts an answer to exchange 1000000"),
        ({"counted": -2}, "counts an answer to exchange -2"),
        ({"owner": "scaffold"}, "job 'scaffold.train'"),
        ({"round": 10**6}, "has none like it"),
    ],
)
def test_a_guard_asks_study_and_memory(guards, change: dict, words: str) -> None:
    (mine, _), (_, task, table) = guards(), question(asking())
    mine.admit(task, table)
    with pytest.raises(wire.RefusedError, match=words):
        mine.admit(task.model_copy(update=change), table)


def test_a_policy_that_expires_during_a_run_allows_no_more(place: Place, guards) -> None:
    """The silo was started on its last day, and that was yesterday."""
    today = datetime.date.today()
    last, asked = today - datetime.timedelta(days=1), question(asking())[1:]
    place.rules(expires=today)
    guards(last)[0].admit(*asked)
    place.rules(expires=last)
    with pytest.raises(wire.RefusedError, match=rf"policy\.yaml: expires = {last}; today is "):
        guards(last)[0].admit(*asked)


def test_a_guard_knows_a_method_s_job_by_its_owner_only(place: Place, guards) -> None:
    """Otherwise the silo would look for a method without a name, and end with a traceback."""
    place.make("rfedavg_plus")
    mine, _ = guards()
    _, task, table = question(asking("rfedavg_plus"))  # which begins by a method's question
    mine.admit(task, table)
    with pytest.raises(wire.RefusedError, match=r"job '\.rfedavg_plus\.map'; the study has only"):
        mine.admit(task.model_copy(update={"owner": "", "job": "rfedavg_plus.map"}), table)
