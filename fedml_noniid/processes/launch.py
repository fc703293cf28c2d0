"""One process of a cross-silo run: `noniid deploy server --config fedml_config.yaml`, or `silo
--rank 1`.

Each mistake is one line on stderr. Exit codes: 0 the run is over, 1 it broke down, 2 wrong input,
3 too few silos answered, 4 the policy of this process refuses the study, 5 no contact with the
server, 6 stopped on request. After 1, 3, 5 and 6 the process can be started again and goes on.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import logging
import math
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import torch

from fedml_noniid.core.errors import UserError, one_line
from fedml_noniid.data import shards
from fedml_noniid.data.files import opened, remove_abandoned, write_whole, writing
from fedml_noniid.deploy import exit_codes, results, settings, wire
from fedml_noniid.engines import absences
from fedml_noniid.engines.callbacks import OnRow
from fedml_noniid.engines.record import rounds_csv
from fedml_noniid.governance.policy import Participant, read_agreed
from fedml_noniid.governance.witness import Guard, Witness
from fedml_noniid.metrics import main_of, metric_of
from fedml_noniid.models import model as models

if TYPE_CHECKING:
    from fedml_noniid.deploy.host import HostAggregator, HostTrainer
    from fedml_noniid.deploy.server_run import ServerRun

LOG = logging.getLogger(__name__)
WRITTEN = (results.ROUNDS, results.ABSENT, results.MODEL, results.CHECKPOINT)  # by the server


class Process(Participant):
    """One process. All that can be checked before FedML is imported has been checked."""

    @staticmethod
    def from_config(rank: int, config: Path) -> Process:
        """Reads and checks configuration and shard. Raises UserError; writes nothing."""
        agreed = read_agreed(config)
        deployment = agreed.deployment
        if not 0 <= rank <= deployment.silos:
            raise UserError(
                f"--rank {rank}: allowed: 1 to {deployment.silos} "
                f"(train_args.client_num_in_total in {config})"
            )
        shard = shards.read(deployment.shard(rank), rank, deployment.silos)
        process = Process(rank, agreed, shard)
        samples, today = len(shard.parts["train" if rank else "test"].y), datetime.date.today()
        agreed.check(rank, samples, today)
        terms = settings.terms(
            deployment, deployment.train_args.recipe, process.network, shard.parts.get("public")
        )
        agreed.signed.study.check_terms(terms)
        terms.plan.local.check(
            process.input_shape, terms.device.of_silo if rank else torch.device("cpu")
        )
        if rank == 0:
            agreed.signed.study.check_end(deployment.train_args)
            deployment.comm_args.check_free()  # now: FedML takes 11 s to import
        return process

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(next(iter(self.shard.parts.values())).x.shape[1:])

    @cached_property
    def network(self) -> models.Model:
        """The network of the configuration, for the samples of the shard."""
        return self.deployment.network(self.input_shape, self.shard.n_classes, self.shard.embedding)

    def run(self, console: TextIO) -> None:
        """Runs to the end; `console` gets a line per round. Raises UserError."""
        log = log_file(self.folder, self.rank)
        with writing(log):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handlers: list[logging.Handler] = [LogFile(log), logging.StreamHandler()]
            handlers[1].addFilter(lambda record: record.levelno == logging.WARNING)
            for handler in handlers:
                handler.setFormatter(LogFormatter("%(asctime)s %(message)s"))
                handler.addFilter(_logged)
            logging.basicConfig(handlers=handlers, level=logging.INFO, force=True)
            file = opened(log, "a", private=True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"tracking_args.output_dir = {str(self.folder)!r}: another process of rank "
                f"{self.rank} runs there"
            ) from None
        # What a stranger causes is counted by the coordinator.
        logging.getLogger("grpc").setLevel(logging.CRITICAL)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        remove_abandoned(
            self.folder, WRITTEN if self.rank == 0 else [f"silo-{self.rank}.safetensors"]
        )
        torch.set_num_threads(self.deployment.device_args.threads)
        with file, redirect_stdout(file):  # FedML prints
            try:
                if self.rank:
                    self._silo()
                else:
                    self._server(console)
            except UserError:
                raise
            except (
                Exception
            ) as error:  # of FedML or the pair: the log gets the traceback, the user one line
                LOG.exception("unexpected")
                said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                raise exit_codes.BrokenError(f"{said}; see {log}") from error

    def _server(self, console: TextIO) -> None:
        from fedml_noniid.deploy.coordinator import Coordinator
        from fedml_noniid.deploy.silo_server import SiloServer

        comm, silos = self.deployment.comm_args, self.deployment.silos
        rounds = self.deployment.train_args.rounds

        def on_round(row: Mapping[str, float]) -> None:
            missing = server_run.missing.items()
            late = {k for (t, _), clients in missing if t == row["round"] for k in clients}
            self._write_tables(server_run)
            line = round_line(row, rounds, sorted(late))
            coordinator.round_over(line)
            console.write(f"{line}\n")
            console.flush()

        args, model, (_, aggregator_class) = self.fedml()
        file = results.RunFile(self.folder / results.CHECKPOINT, secrets.token_hex(8))
        aggregator = aggregator_class(model, args, self.shard, [OnRow(on_round)], file)
        server_run = aggregator.server_run
        if server_run.loop.start.task.own_models:
            LOG.warning(
                "recipe %s: each silo keeps a model, or a part of it, and tests its own model; "
                "accuracies are over the test samples in the silos' files",
                server_run.terms.algorithm.name,
            )
        if server_run.loop.rows:  # a kill may have come between the checkpoint and the tables
            self._write_tables(server_run)
        witness = Witness.from_process(self)
        study = self.agreed.signed.sha256
        coordinator = Coordinator(comm, silos, study, server_run.run, rounds, witness.refused)
        witness.failed = coordinator.give_up
        start = server_run.loop.done + 1
        LOG.info(
            "run %s: round %d of %d is next, at %s", server_run.run, start, rounds, comm.server
        )
        silo_server = SiloServer(comm, self.deployment.kit(0), coordinator, witness)
        try:
            with silo_server:
                server_run.serve(coordinator, aggregator.hook)
            path = self.folder / results.MODEL
            digest = results.write_model(path, server_run.loop.outcome)
        except exit_codes.QuorumError:
            raise
        except UserError as error:  # the settings were right when the run began
            raise exit_codes.BrokenError.from_mistakes(error.mistakes) from None
        console.write(f"weights {digest} in {path}\n")
        console.flush()

    def _write_tables(self, server_run: ServerRun) -> None:
        """Writes rounds.csv and absent.csv."""
        write_whole(self.folder / results.ROUNDS, rounds_csv(server_run.loop.rows))
        absences.write(self.folder / results.ABSENT, server_run.missing)

    def _silo(self) -> None:
        from fedml_noniid.deploy.silo import read_memory
        from fedml_noniid.deploy.silo_client import SiloClient
        from fedml_noniid.governance.secure.silo import SecureSilo

        args, model, (trainer_class, _) = self.fedml()
        trainer = trainer_class(model, args, self.shard)
        terms, n = trainer.terms, trainer.samples
        comm, kit = self.deployment.comm_args, self.deployment.kit(self.rank)
        witness = Witness.from_process(self)
        guard = Guard(self, witness.log)
        study = self.agreed.signed.sha256
        hello = wire.Hello(session=secrets.token_hex(8), study=study, samples=n)
        memory = self.folder / f"silo-{self.rank}.safetensors"
        run = str(read_memory(memory).head["run"]) if memory.exists() else ""
        with SiloClient(comm, kit, self.rank - 1, hello, guard.admit, witness, run) as client:
            LOG.info("run %s: %s has joined", client.run, wire.silo(self.rank - 1))
            trainer.begin(results.RunFile(memory, client.run), self.noise_key)
            answered = guard.answering(trainer, client.run)
            if terms.secure_sums:
                # Beside the kit: a new run has another output folder, and may ask the same.
                names, sets = (client.run, study), kit.with_name(f"{kit.name}.sums")
                secure = SecureSilo(answered, terms, self.rank, kit, names, sets)
                answered = guard.adding(secure.answered)
            client.serve(answered)
        LOG.info("the run is over")

    def fedml(self) -> tuple[Any, Any, tuple[type[HostTrainer], type[HostAggregator]]]:
        """(args, model, pair): the first steps of a FedML user's main.py, without `fedml.init`.

        That would ask FedML's host for its configuration, and seed the generators that privacy
        noise is drawn from with the seed that every participant knows.
        """
        from fedml_noniid.deploy.host import Model
        from fedml_noniid.deploy.pair import make_pair

        args = SimpleNamespace(rank=self.rank, worker_num=self.deployment.silos)
        for section in self.deployment.model_dump(by_alias=True).values():
            vars(args).update(section)
        return args, Model(self.network), make_pair(self.deployment.train_args.recipe)


def round_line(row: Mapping[str, float], rounds: int, late: Sequence[int]) -> str:
    """The line about a round that is over; `late`: the silos that did not answer."""
    main = main_of(row)
    line = f"round {row['round']:.0f} of {rounds}: test {metric_of(main).label} "
    if math.isfinite(row[f"test_{main}"]):
        line += f"{metric_of(main).shown(row[f'test_{main}'])}, loss {row['test_loss']:.4f}"
    else:
        line += "not measured"
    without = f", without {', '.join(map(wire.silo, late))}" if late else ""
    return f"{line}, {row['seconds']:.1f} s{without}"


class LogFile(logging.FileHandler):
    """A log for its owner alone.

    It follows no symbolic link, which may lead to a file that is not ours.
    """

    def _open(self) -> Any:
        return opened(Path(self.baseFilename), "a", private=True)


class LogFormatter(logging.Formatter):
    """Sets tracebacks in: what another machine has written can't look like a line of the log."""

    def formatException(self, ei: Any) -> str:  # noqa: N802, logging's own name
        return "\n".join(f"  {one_line(line)}" for line in super().formatException(ei).splitlines())


def log_file(folder: Path, rank: int) -> Path:
    """The log of a process."""
    return folder / f"fedml-{rank}.log"


def _logged(record: logging.LogRecord) -> bool:
    """Makes a record one line, as others may have written its text; False for FedML's, all "root",
    many per message."""
    record.msg, record.args = one_line(record.getMessage(), 1000), ()
    return record.name != "root" or record.levelno >= logging.WARNING


def _stop(number: int, _: object) -> NoReturn:
    raise exit_codes.StoppedError(f"stopped by {signal.Signals(number).name}; start again to go on")


def leave(code: int) -> NoReturn:
    """Ends the process at once; threads that gRPC left running would keep it alive."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(rank: int, config: Path) -> int:
    """Runs one process and returns the exit code.

    An error is a line for each mistake on stderr, and one line in the log.
    """
    os.environ.setdefault(
        "GRPC_VERBOSITY", "NONE"
    )  # gRPC's own lines; errors that matter are raised
    try:
        Process.from_config(rank, config).run(sys.stdout)
    except (UserError, exit_codes.StoppedError) as error:
        # Without a log file, logging would print the line a second time.
        has_log = any(
            isinstance(handler, logging.FileHandler) for handler in logging.getLogger().handlers
        )
        for mistake in getattr(error, "mistakes", (error,)):
            if has_log:
                LOG.error("error: %s", mistake)
            sys.stderr.write(f"error: {mistake}\n")
        return exit_codes.code(error)
    return 0


def status(config: Path) -> str:
    """The state of the server as JSON. Imports no code of a user. Raises UserError."""
    from fedml_noniid.deploy import silo_client

    comm = settings.read_comm(config)
    return json.dumps(silo_client.status(comm, settings.path_of(comm.kit, 0)), indent=2)
