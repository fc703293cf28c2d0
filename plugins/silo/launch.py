"""One process of a cross-silo run, or a loopback run of all of them on this machine.

    python -m plugins.silo.launch --role server --rank 0 --config pipelines/fedml_config.yaml
    python -m plugins.silo.launch --role client --rank 1 --config pipelines/fedml_config.yaml
    python -m plugins.silo.launch loopback --recipe fednnnn --silos 3

Errors are one line on stderr, and exit code 2.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

import torch

from plugins.core.errors import UserError
from plugins.data.files import write_whole
from plugins.engines.record import rounds_csv
from plugins.models import forward
from plugins.silo import results, settings, shards, transport, wire

if TYPE_CHECKING:
    from plugins.silo.host import HostAggregator, HostTrainer

ROLES = ("server", "client")
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Process:
    """One process. All that can be checked before FedML is imported has been checked."""

    rank: int
    config: Path
    deployment: settings.Deployment
    addresses: dict[int, str]
    shard: shards.Shard

    @property
    def folder(self) -> Path:
        """The folder for its output."""
        return Path(self.deployment.tracking_args.output_dir)

    @property
    def log(self) -> Path:
        """The file for FedML's log and ours."""
        return log_file(self.folder, self.rank)

    @staticmethod
    def of(role: str, rank: int, config: Path) -> Process:
        """Reads and checks configuration, addresses, shard and port. Raises UserError; writes nothing."""
        deployment = settings.read(config)
        first, last = (0, 0) if role == "server" else (1, deployment.silos)
        if not first <= rank <= last:
            allowed = "0" if role == "server" else f"1 to {last} (train_args.client_num_in_total in {config})"
            raise UserError(f"--rank {rank}: not a rank of role {role!r}; allowed: {allowed}")
        addresses = transport.read_addresses(Path(deployment.comm_args.grpc_ipconfig_path), deployment.silos)
        shard = shards.read(deployment.shard(rank), rank, deployment.silos)
        process = Process(rank, config, deployment, addresses, shard)
        terms = settings.terms(deployment, deployment.train_args.recipe, process.network, process.shard.n_public)
        terms.local.check(process.input_shape, torch.device("cpu"))
        transport.check_port(rank)
        return process

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(next(iter(self.shard.parts.values())).x.shape[1:])

    @property
    def network(self) -> forward.Model:
        """The network of the configuration, for the samples of the shard."""
        return self.deployment.network(self.input_shape, self.shard.n_classes, self.shard.embedding)

    def run(self, console: TextIO) -> None:
        """Runs to the end; `console` gets a line per round. Raises UserError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            logging.basicConfig(
                filename=self.log, filemode="w", level=logging.INFO, format="%(asctime)s %(message)s", force=True
            )
        except OSError as error:
            raise UserError(
                f"tracking_args.output_dir = {str(self.folder)!r} can't be written ({error.strerror}); choose another"
            ) from None
        torch.set_num_threads(self.deployment.device_args.threads)
        limit = self.deployment.comm_args.deadline_s
        if limit:
            timer = threading.Timer(limit, self._give_up, (console, f"comm_args.deadline_s = {limit:g} s are over", ()))
            timer.daemon = True
            timer.start()
        others = self.addresses if self.rank == 0 else {0: self.addresses[0]}
        peers = {rank: host for rank, host in others.items() if rank != self.rank}
        # FedML prints to stdout; its lines belong in its log.
        with self.log.open("a") as log, redirect_stdout(log):
            if self.rank:
                transport.wait_for_server(self.addresses, limit or 600)

            def lost(rank: int) -> None:
                reason = f"{transport.name(rank)} is gone; its port closed before the run was over"
                self._give_up(console, reason, peers)

            with transport.Watch(peers, lost) as watch:
                try:
                    self._fedml(console, watch)
                except UserError as error:
                    self._tell(peers, str(error))
                    raise
                except Exception as error:
                    LOG.exception("FedML failed")
                    # Most often, FedML could not send a message.
                    gone = [transport.name(rank) for rank, host in peers.items() if not transport.listens(host, rank)]
                    said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                    reason = f"{', '.join(gone)} is gone" if gone else said
                    self._tell(peers, reason)
                    raise UserError(f"{reason}; see {self.log}") from error

    def _fedml(self, console: TextIO, watch: transport.Watch) -> None:
        """The steps of a FedML user's main.py."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of FedML's imports
            import fedml
            from fedml.arguments import Arguments

        from plugins.silo.host import Model, batches
        from plugins.silo.pair import make_pair

        role = "client" if self.rank else "server"
        command = argparse.Namespace(
            yaml_config_file=str(self.config), run_id="0", rank=self.rank, local_rank=0, node_rank=0, role=role,
            run_device_id="0", using_mlops=False,
        )  # fmt: skip
        args = Arguments(command, training_type="cross_silo", comm_backend="GRPC")
        args.worker_num = self.deployment.silos
        with transport.no_phoning_home():
            # Without FedML's own logging set-up, which turns every print of the process into a log record.
            args = fedml.init(args, check_env=False, should_init_logs=False)

        rounds, parts, n_classes = self.deployment.train_args.rounds, self.shard.parts, self.shard.n_classes
        model, public = Model(self.network), parts.get("public")
        trainer_class, aggregator_class = make_pair(self.deployment.train_args.recipe)
        trainer: HostTrainer | None = None
        aggregator: HostAggregator | None = None

        def on_round(row: Mapping[str, float]) -> None:
            console.write(
                f"round {row['round']:.0f} of {rounds}: test accuracy "
                f"{row['test_accuracy']:.4f}, loss {row['test_loss']:.4f}, {row['seconds']:.1f} s\n"
            )
            console.flush()
            assert aggregator is not None, "it calls this"
            write_whole(self.folder / results.ROUNDS, rounds_csv(aggregator.conversation.rows))
            if row["round"] == rounds:
                watch.stop()

        dataset: tuple[object, ...] = (0, 0, None, None, {}, {}, None, n_classes)
        if self.rank:
            watch.expect()  # the server: this silo has waited for it
            train, k = parts["train"], self.rank - 1
            dataset = (len(train.y), 0, None, None, {k: len(train.y)}, {k: batches(train)}, None, n_classes)
            trainer = trainer_class(model, args, public, self.shard.noise)
        else:
            aggregator = aggregator_class(
                model, args, parts["test"], parts.get("validation"), public, on_round, watch.expect
            )
        # A second check: importing FedML takes so long that another process may have taken the port.
        transport.check_port(self.rank)
        # The constructor runs everything; `.run()` would only leave a file in the home folder.
        fedml.FedMLRunner(args, torch.device("cpu"), dataset, model, trainer, aggregator)
        if aggregator is None:
            return
        if aggregator.conversation.outcome is None:
            raise UserError(f"FedML ended after {args.comm_round} exchanges, before the run was over; see {self.log}")
        digest = results.write_model(self.folder / results.MODEL, aggregator.conversation.outcome)
        console.write(f"weights {digest} in {self.folder / results.MODEL}\n")

    def _tell(self, peers: transport.Addresses, reason: str) -> None:
        """Tells the processes that wait for this one that it can't go on."""
        if reason.startswith(wire.STOPPED):
            return
        content: object = wire.failure(self.rank - 1, reason) if self.rank else wire.stop(reason)
        for receiver in peers:
            transport.tell(self.addresses, self.rank, receiver, content)

    def _give_up(self, console: TextIO, reason: str, peers: transport.Addresses | tuple[()]) -> None:
        """Ends the process from a thread, since the main thread waits within FedML for ever."""
        if self.rank == 0 and peers:
            self._tell(peers, reason)
        LOG.error("error: %s", reason)
        logging.shutdown()
        console.flush()
        sys.stderr.write(f"error: {reason}\n")
        sys.stderr.flush()
        os._exit(2)


def log_file(folder: Path, rank: int) -> Path:
    """The log of a process."""
    return folder / f"fedml-{rank}.log"


def leave(code: int) -> NoReturn:
    """Ends the process at once; threads that FedML and gRPC left running would keep it alive."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(role: str, rank: int, config: Path) -> int:
    """Runs one process and returns the exit code. An error is one line on stderr and in the log."""
    try:
        Process.of(role, rank, config).run(sys.stdout)
    except UserError as error:
        # Without a log file, logging would print the line to stderr a second time.
        if logging.getLogger().handlers:
            LOG.error("error: %s", error)
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["loopback"]:
        from plugins.silo import loopback

        return loopback.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m plugins.silo.launch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--role", choices=ROLES, required=True)
    parser.add_argument("--rank", type=int, required=True, help="0 for the server, 1.. for the silos")
    parser.add_argument("--config", type=Path, required=True, help="fedml_config.yaml")
    options = parser.parse_args(arguments)
    return run(options.role, options.rank, options.config)


if __name__ == "__main__":
    leave(main())
