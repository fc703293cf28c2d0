"""Keeps what a silo's answers depend on, and computes them again from it: `noniid audit replay`.

Beside the shard and the study, an answer depends on the question (the tensors that came down), and
on the silo's memory before it. Both are kept in one file per answer, in a folder with a limit: the
oldest files go first.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from fedml_noniid.core.component import Ask
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params
from fedml_noniid.data import tensor_file
from fedml_noniid.data.files import Lines, remove_abandoned
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.results import RunFile
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.deploy.wire import Down, Up
from fedml_noniid.governance.audit import ANSWERS, FILE, SENT, Log, chained
from fedml_noniid.governance.policy import Participant
from fedml_noniid.governance.secure import vectors

Answered = Callable[[Down], Up]
Begin = Callable[[str], tuple[Silo, Answered]]  # for a run: the silo, and what its process answers
FedML = Callable[[], tuple[Any, Any, tuple[type[Any], type[Any]]]]  # (args, model, pair)
KIND = "asked"  # of a file
HIDDEN = "hidden"  # of a line about an answer that leaves in a secure sum
ASKED, MEMORY = "ask/", "memory/"  # before the names of tensors


class Kept:
    """The folder of one silo's questions."""

    def __init__(self, process: Participant, log: Log) -> None:
        self.folder, self._log = folder_of(process), log
        remove_abandoned(self.folder, ["*.safetensors"])
        self._most = process.deployment.comm_args.replay_mb * 1_000_000  # 0: nothing is kept

    def keep(self, silo: Silo, down: Down) -> None:
        """Notes that an answer is computed, and writes its file. Raises UserError."""
        memory, question = silo.memory(), wire.tensors(down)
        # Names in their order, and the axes in theirs: both decide about the bits of the answer.
        orders = {key: entry.order for key, entry in wire.table_of(question).items()}
        head = {
            "orders": orders,
            "question": [down.exchange, down.round, down.question.job, down.question.owner],
            "terms": down.terms,
            "counted": down.counted[silo.client],
            "memory": memory.head,
            "sha256": down.sha256 or wire.digest(question),  # not computed twice: it takes time
        }
        tensors = {f"{ASKED}{key}": question[key].permute(axes) for key, axes in orders.items()}
        tensors |= {f"{MEMORY}{key}": leaf for key, leaf in memory.tensors.items()}
        content = Asked(head, tensors).checksum
        facts = {"run": memory.head["run"], "exchange": down.exchange, "round": down.round}
        facts |= {"content": content}
        line = self._log.write(ANSWERS, **facts)
        if not self._most:
            return
        path = self.folder / f"{line['n']:08d}.safetensors"
        tensor_file.write(path, KIND, head, tensors, content, private=True)
        sizes = {file: file.stat().st_size for file in sorted(self.folder.glob("*.safetensors"))}
        while sum(sizes.values()) > self._most:
            oldest = next(iter(sizes))
            oldest.unlink()
            del sizes[oldest]

    def hidden(self, up: Up) -> None:
        """Notes an answer that leaves in a sum alone, and the digest of what is added up in it."""
        up["sha256"] = wire.digest(vectors.added(up["leaves"]))
        self._log.write(
            HIDDEN, exchange=up["exchange"], sha256=_of_hidden(up["leaves"], up["sha256"])
        )


@dataclass(frozen=True, eq=False)
class Asked(tensor_file.Tensors):
    """A kept question. Its head has the digest of its tensors, which the checksum leaves out."""

    @property
    def memory(self) -> Params:
        """The tensors of the silo's memory."""
        return {
            key.removeprefix(MEMORY): leaf
            for key, leaf in self.tensors.items()
            if key.startswith(MEMORY)
        }

    @property
    def question(self) -> Params:
        """The tensors that came down. Copies are aligned, as messages are."""
        return {
            key: self.tensors[f"{ASKED}{key}"]
            .clone()
            .permute([axes.index(n) for n in range(len(axes))])
            for key, axes in self.head["orders"].items()
        }

    @property
    def checksum(self) -> str:
        return tensor_file.Tensors(self.head, self.memory).checksum


def replay(log: Path, folder: Path, exchange: int | None, begin: Begin) -> str:
    """Computes the kept answers of a log again; a line for each.

    `exchange`: only this one. UserError if an answer is not the one that was sent, or nothing is
    kept. The last line says how many answers were not compared, if there are some.
    """
    lines, said, without = [line.body for line in chained(log, Lines(log).read())], "", 0
    for index, line in enumerate(lines):
        path = folder / f"{index:08d}.safetensors"
        if line["kind"] != ANSWERS or exchange not in (None, line["exchange"]):
            continue
        # Before the answer leaves, a silo whose connection has broken introduces itself again.
        later = takewhile(lambda entry: entry["kind"] != ANSWERS, lines[index + 1 :])
        sent = [
            answer
            for answer in later
            if answer["kind"] in (HIDDEN, SENT) and answer.get("exchange") == line["exchange"]
        ]
        if not sent:  # a kill came before the answer
            continue
        if not path.is_file():
            without += 1
            continue
        source = f"exchange {line['exchange']} (line {index + 1})"
        leaves = _answer(path, line["content"], *begin(line["run"]))
        hidden = sent[0]["kind"] == HIDDEN
        answer = _of_hidden(leaves) if hidden else wire.digest(leaves)
        if answer != sent[0]["sha256"]:
            raise UserError(f"{source}: sent {sent[0]['sha256']}, computed {answer}")
        said += f"{source}: the same SHA-256 {answer}\n"
    if not said:
        raise UserError(f"{folder}: has nothing of it; comm_args.replay_mb limits what is kept")
    if without:
        said += f"not compared: {without} (no file in {folder}; see comm_args.replay_mb)\n"
    return said


def _answer(path: Path, content: str, silo: Silo, answered: Answered) -> Params:
    """The tensors of the answer to a kept question."""
    asked = tensor_file.read(
        path, KIND, Asked, what="a kept question", origin="", remedy="restore it"
    )
    head, question = asked.head, asked.question
    if asked.checksum != content or wire.digest(question) != head["sha256"]:
        raise UserError(f"{path}: is not what the log says was kept")
    silo.go_on_from(head["memory"], asked.memory)
    exchange, round_, job, owner = head["question"]
    ask = Ask(job, (silo.client,), **wire.nested(question), owner=owner)
    counted = {silo.client: head["counted"]}
    down = Down(exchange, round_, ask, head["terms"], counted, sha256=head["sha256"])
    leaves: Params = answered(down)["leaves"]
    return leaves


def _of_hidden(leaves: Params, added: str = "") -> str:
    """The SHA-256 of an answer that leaves in a sum; `added`: the digest of what is added up."""
    summed = vectors.added(leaves)
    added = added or wire.digest(summed)
    rest = wire.digest({key: leaf for key, leaf in leaves.items() if key not in summed})
    return hashlib.sha256(f"{added} {rest}".encode()).hexdigest()


def of_process(process: Participant, fedml: FedML, exchange: int | None) -> str:
    """`replay` of a silo's process, with what makes its trainer. Raises UserError."""
    torch.set_num_threads(process.deployment.device_args.threads)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):  # FedML prints
        args, model, (trainer_class, _) = fedml()

        @cache
        def begin(run: str) -> tuple[Silo, Answered]:
            trainer = trainer_class(model, args, process.shard)
            # The server has chosen the name of the run: it may be no name of a file.
            memory = Path(folder) / hashlib.sha256(run.encode()).hexdigest()
            trainer.begin(RunFile(memory, run), process.noise_key, counted=False)
            assert trainer.silo is not None, "made by now"
            return trainer.silo, trainer.answered

        log = process.folder / FILE.format(process.rank)
        return replay(log, folder_of(process), exchange, begin)


def folder_of(process: Participant) -> Path:
    """The folder of what a silo keeps."""
    return process.folder / f"replay-{process.rank}"
