"""A kept question gives the upload that was sent, to the bit, for every recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedml_noniid.core.errors import UserError
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.data.files import Lines
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.governance import audit, replay
from tests.deploy import world
from tests.recipe_table import DEPLOYED

QUICK = ["fedavg", "scaffold", "scaffold+fnr+rfedavg_plus+ccn", "fedbn", "feddyn"]


def recorded(
    folder: Path,
    kits: Path,
    recipe: str,
    between: Callable[[audit.Log], object] = lambda _: None,
    hidden: bool = False,
) -> tuple[Path, replay.Kept]:
    """The log of silo 0 in a run of which it misses an answer, and the folder of its questions.

    `between` writes lines before each answer leaves; `hidden`: in a sum.
    """
    terms = world.terms(*DEPLOYED[recipe], batch_norm=True, rounds=3)
    log = audit.Log(folder / "audit-1.jsonl", Kit.read(kits / "1", 1))
    kept = replay.Kept(process(folder, 100), log)
    server, silos = ServerRun(terms, world.shards_of()[0]), world.silos_of(terms)

    def noted(silo: Silo, down: wire.Down) -> wire.Up:
        kept.keep(silo, down)
        up = wire.up(0, down.exchange, silo.answer(down))
        between(log)
        if hidden:
            kept.hidden(dict(up))
        else:
            sha = wire.digest(up["leaves"])
            log.write(audit.SENT, peer="server", exchange=down.exchange, sha256=sha)
        return up

    while (down := server.down).ask is not None:
        downs = {k: wire.row_of(down, k) for k in down.ask.to}
        ups = {k: wire.up(k, down.exchange, silos[k].answer(downs[k])) for k in downs if k}
        first = {0: noted(silos[0], downs[0])} if 0 in downs else {}
        if down.round == 2:  # the silo's answer does not count
            server.without(first)
        server.feed(server.open(ups if down.round == 2 else first | ups))
    return log.path, kept


def process(folder: Path, most_mb: int) -> SimpleNamespace:
    """Of rank 1, with this folder for its output."""
    deployment = world.deployment("fedavg", comm={"replay_mb": most_mb})
    return SimpleNamespace(folder=folder, rank=1, deployment=deployment)


def fresh(recipe: str) -> Silo:
    terms = world.terms(*DEPLOYED[recipe], batch_norm=True, rounds=3)
    return Silo(terms, 0, world.shards_of()[1])


def replayed(log: Path, kept: replay.Kept, silo: Silo, exchange: int | None = None) -> str:
    def answered(down: wire.Down) -> wire.Up:
        return wire.up(0, down.exchange, silo.answer(down))

    return replay.replay(log, kept.folder, exchange, lambda run: (silo, answered))


@pytest.mark.parametrize(
    "recipe",
    [
        one if one in QUICK else pytest.param(one, marks=pytest.mark.slow)
        for one in {**dict.fromkeys(QUICK), **DEPLOYED}
    ],
)
def test_every_answer_is_computed_again(tmp_path: Path, kits: Path, recipe: str) -> None:
    log, kept = recorded(tmp_path, kits, recipe)
    said = replayed(log, kept, fresh(recipe))
    sent = [one for one in audit.chained(log, Lines(log).read()) if one.body["kind"] == audit.SENT]
    assert said.count("the same SHA-256") == len(sent) >= 3
    assert len({one.body["sha256"] for one in sent}) > 1, "a replay could not fail"


def test_answers_that_are_not_compared_are_counted(tmp_path: Path, kits: Path) -> None:
    """The first file is gone. Before each answer, the silo has introduced itself again."""
    again = ("sent", "arrived", "arrived", "arrived")
    log, kept = recorded(tmp_path, kits, "scaffold", between=lambda log: [*map(log.write, again)])
    sorted(kept.folder.iterdir())[0].unlink()
    *compared, last = replayed(log, kept, fresh("scaffold")).splitlines()
    assert len(compared) == 2 and all("the same SHA-256" in line for line in compared)
    assert last == f"not compared: 1 (no file in {kept.folder}; see comm_args.replay_mb)"


def test_all_of_an_answer_in_a_sum_is_compared() -> None:
    """What is added up, and the counts that the server sees."""
    leaves = {"deltas/w": torch.ones(2), "n": torch.tensor(1), "loss": torch.tensor(1.0)}
    changes = [{key: leaf + 1} for key, leaf in leaves.items()]
    assert len({replay._of_hidden(leaves | change) for change in ({}, *changes)}) == 4


@pytest.mark.parametrize("hidden", [False, True])
def test_other_samples_give_another_answer(tmp_path: Path, kits: Path, hidden: bool) -> None:
    log, kept = recorded(tmp_path, kits, "scaffold", hidden=hidden)
    assert replayed(log, kept, fresh("scaffold")).count("the same SHA-256") == 3
    silo = fresh("scaffold")
    data = world.shards_of()[1].parts["train"]
    silo.read(data._replace(y=torch.flip(data.y, [0])))
    with pytest.raises(UserError, match=r"exchange 0 \(line 2\): sent .*, computed "):
        replayed(log, kept, silo)


def test_an_altered_question_is_found(tmp_path: Path, kits: Path) -> None:
    """Also one whose own checksum was made to fit."""
    log, kept = recorded(tmp_path, kits, "scaffold")
    first, second, third = sorted(kept.folder.iterdir())
    with safe_open(second, "pt") as file:
        metadata = file.metadata()
    question = load_file(second)
    question["ask/params/fc2.bias"] += 1
    save_file(question, second, metadata)
    first.write_bytes(third.read_bytes())
    third.write_bytes(third.read_bytes()[:-1])
    words = "is not what the log says was kept"
    for exchange, said in enumerate((words, words, "damaged")):
        with pytest.raises(UserError, match=said):
            replayed(log, kept, fresh("scaffold"), exchange)


def test_the_folder_has_a_limit(
    tmp_path: Path, kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, kept = recorded(tmp_path, kits, "scaffold")
    first, *_, last = sorted(kept.folder.iterdir())
    monkeypatch.setattr(kept, "_most", 2 * last.stat().st_size)
    silo = fresh("scaffold")
    down = wire.row_of(ServerRun(silo.terms, world.shards_of()[0]).down, 0)
    kept.keep(silo, down)
    left = sorted(kept.folder.iterdir())
    assert first not in left and last in left, "the oldest go"
    with pytest.raises(UserError, match="has nothing of it; comm_args"):
        replayed(log, kept, silo, exchange=0)
    monkeypatch.setattr(kept, "_most", 0)
    kept.keep(silo, down)
    assert sorted(kept.folder.iterdir()) == left
