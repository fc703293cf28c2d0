"""Seconds per round of our transport, plain and with secure sums, and of stock FedML's gRPC, with
the same silos: `python -m benchmarks.transport`.

Both run FedAvg with a wide MLP and one step on a few samples per silo, so the exchange of the
models takes most of a round. The runs take turns (ours, stock, ours, ...). The first round of a run
counts the start of the processes, so it is dropped. All runs must end with the same weights. Then
the bytes of a plain and of a masked run are counted, on their way through a relay. `--write` writes
docs/results/transport.md and its two tables.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from benchmarks import stock_fedml
from benchmarks.processes import ROOT
from benchmarks.relay import DOWN, UP, Relay
from benchmarks.report import render
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import write_whole
from fedml_noniid.data.shards import Parts
from fedml_noniid.deploy import results, settings
from fedml_noniid.governance.secure import masks
from fedml_noniid.pipelines.experiment import provenance
from fedml_noniid.processes import loopback

OURS, SECURE, STOCK = "ours", "ours, secure sums", "stock FedML"
NUMBERS = 11_181_642  # of ResNet-18
FEATURES, CLASSES, SAMPLES = 64, 10, 8  # samples of a silo, and of the test set
COUNTED_SILOS, COUNTED_MB, COUNTED_ROUNDS = 12, 1.2, 2  # where bytes are counted
RELAYED = "relayed.yaml"  # the settings of the silos of such a run
Turn = dict[str, list[float]]  # transport -> seconds of its measured rounds
OPTIONS = (  # name, least, default, what
    ("silos", 1, 4, "number of silos"),
    ("megabytes", 1, 45, "size of the model"),
    ("rounds", 2, 3, "rounds per run with the dropped one"),
    ("turns", 1, 3, "runs of each transport"),
)


def deployment(silos: int, megabytes: float, rounds: int) -> settings.Deployment:
    """FedAvg with a model of `megabytes` (of 10^6 bytes)."""
    hidden = max(1, round(megabytes * 1e6 / 4 / (FEATURES + 1 + CLASSES)))  # float32
    content = {
        "model_args": {"model": "mlp", "model_options": {"hidden": hidden}},
        "train_args": {
            "recipe": "fedavg",
            "rounds": rounds,
            "client_num_in_total": silos,
            "client_num_per_round": silos,
            "epochs": 1,
            "batch_size": SAMPLES,
            "learning_rate": 1e-4,
        },
    }
    return settings.check(content, "benchmark")


def made_up(silos: int) -> Parts:
    """Random samples: a few for each silo, and as many for the test."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> Samples:
        x = torch.randn(count, 1, 8, FEATURES // 8, generator=generator)
        return Samples(x, torch.randint(0, CLASSES, (count,), generator=generator))

    clients = [np.arange(k * SAMPLES, (k + 1) * SAMPLES) for k in range(silos)]
    return Parts(drawn(silos * SAMPLES), clients, drawn(SAMPLES), None, None, CLASSES)


def ours(terms: settings.Deployment, parts: Parts, folder: Path) -> tuple[str, list[float]]:
    """(SHA-256 of the final weights, seconds of all rounds) under our transport."""
    return loopback.run(terms, parts, folder), stock_fedml.seconds_by_round(folder / "run")


def secure(terms: settings.Deployment, parts: Parts, folder: Path) -> tuple[str, list[float]]:
    """The same with sums over all silos alone."""
    train = terms.train_args.model_copy(update={"secure_sums": terms.silos})
    return ours(terms.model_copy(update={"train_args": train}), parts, folder)


def relayed(rank: int, config: str, output: str) -> None:
    """The main function of a process whose silos call a relay."""
    loopback.process(rank, str(Path(config).with_name(RELAYED)) if rank else config, output)


def counted(secure_sums: int) -> dict[str, float]:
    """The bytes of one run, up and down: on the network, with all that TLS and gRPC add, and as
    rounds.csv counts them. Raises UserError."""
    terms = deployment(COUNTED_SILOS, COUNTED_MB, COUNTED_ROUNDS)
    train = terms.train_args.model_copy(update={"secure_sums": secure_sums})
    terms = terms.model_copy(update={"train_args": train})
    with (
        tempfile.TemporaryDirectory() as folder,
        loopback.Processes(terms, made_up(COUNTED_SILOS), Path(folder), relayed) as processes,
        Relay(processes.deployment.comm_args.server) as relay,
    ):
        comm = processes.deployment.comm_args.model_copy(update={"server": relay.address})
        own = processes.deployment.model_copy(update={"comm_args": comm})
        write_whole(processes.config.with_name(RELAYED), own.yaml())
        for rank in range(COUNTED_SILOS + 1):
            processes.start(rank)
        processes.wait(loopback.DEADLINE_S)
        rows = pd.read_csv(processes.output / results.ROUNDS)
    said = {"rows_up": rows["bytes_up"].sum(), "rows_down": rows["bytes_down"].sum()}
    return {"up": relay.bytes[UP], "down": relay.bytes[DOWN], **said}


def mask_seconds(silos: int, numbers: int) -> float:
    """How long a silo masks so many numbers for a sum over so many silos; the least of three."""
    own = [X25519PrivateKey.generate() for _ in range(silos)]
    keys = tuple(key.public_key().public_bytes_raw() for key in own)
    of, vector = masks.Exchange("run", "terms", 0), torch.zeros(numbers, dtype=torch.int64)
    found = []
    for attempt in range(3):
        began = time.perf_counter()
        clients, samples = tuple(range(silos)), (1,) * silos
        request = masks.Request(of, attempt, "question", b"", clients, samples, keys)
        masks.mask(vector, own[0], 0, request)
        found.append(time.perf_counter() - began)
    return min(found)


def stock(terms: settings.Deployment, parts: Parts, folder: Path) -> tuple[str, list[float]]:
    """The same under stock FedML."""
    return stock_fedml.run(terms, parts, folder), stock_fedml.seconds_by_round(folder)


TRANSPORTS: Mapping[str, Callable[[settings.Deployment, Parts, Path], tuple[str, list[float]]]] = {
    OURS: ours,
    SECURE: secure,
    STOCK: stock,
}


def measure(silos: int, megabytes: float, rounds: int, turns: int) -> tuple[str, list[Turn]]:
    """(SHA-256 of the final weights, seconds by turn).

    UserError if two runs end with other weights.
    """
    terms, parts = deployment(silos, megabytes, rounds), made_up(silos)
    expected, found = "", list[Turn]()
    for number in range(1, turns + 1):
        found.append({})
        for name, run in TRANSPORTS.items():
            with tempfile.TemporaryDirectory() as folder:
                sha, seconds = run(terms, parts, Path(folder))
            expected = expected or sha
            if sha != expected:
                raise UserError(
                    f"turn {number}, {name}: the weights {sha} are not those of the first run, "
                    f"{expected}"
                )
            found[-1][name] = seconds[1:]
            sys.stderr.write(
                f"turn {number} of {turns}, {name}: {median(seconds[1:]):.2f} s per round\n"
            )
    return expected, found


def rounds(turns: Sequence[Turn]) -> pd.DataFrame:
    """A row per measured round."""
    rows = [
        (number, name, t, value)
        for number, turn in enumerate(turns, start=1)
        for name, seconds in turn.items()
        for t, value in enumerate(seconds, start=2)
    ]
    return pd.DataFrame(rows, columns=["turn", "transport", "round", "seconds"])


def table(turns: Sequence[Turn]) -> list[list[str]]:
    """Medians per transport, and how many times as long as ours the others take."""
    frame = rounds(turns)
    medians = frame.groupby(["turn", "transport"])["seconds"].median().unstack()
    cells = [["transport", "s per round", "range", "times as long as ours", "range over turns"]]
    for name in TRANSPORTS:
        seconds = frame.loc[frame["transport"] == name, "seconds"]
        ratios = medians[name] / medians[OURS]
        times = ["1", ""] if name == OURS else [f"{ratios.median():.2f}", _range(ratios)]
        cells.append([name, f"{seconds.median():.2f}", _range(seconds), *times])
    return cells


def _range(values: pd.Series) -> str:
    return f"{values.min():.2f} to {values.max():.2f}"


def _count(least: int) -> Callable[[str], int]:
    def parsed(word: str) -> int:
        if not word.isdigit() or int(word) < least:
            raise argparse.ArgumentTypeError(f"{word!r} is no whole number from {least} up")
        return int(word)

    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; writes with `--write`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__)
    for name, least, default, what in OPTIONS:
        parser.add_argument(
            f"--{name}", type=_count(least), default=default, help=f"{what} (default: {default})"
        )
    parser.add_argument("--write", action="store_true", help="write docs/results/transport.*")
    given = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    try:
        sha, turns = measure(given.silos, given.megabytes, given.rounds, given.turns)
        counts = pd.DataFrame({OURS: counted(0), SECURE: counted(COUNTED_SILOS)}).T
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    context = {
        "command": shlex.join([*parser.prog.split(), *arguments]),
        "given": given,
        "machine": provenance.machine(torch.device("cpu")),
        "load": load,
        "samples": SAMPLES,
        "sha": sha,
        "table": table(turns),
        "bytes": counts,
        "counted": {"silos": COUNTED_SILOS, "mb": COUNTED_MB, "rounds": COUNTED_ROUNDS},
        "masks": [(silos, NUMBERS, mask_seconds(silos, NUMBERS)) for silos in (4, 12)],
    }
    text = render("transport.md.j2", context)
    sys.stdout.write(text)
    if given.write:
        to = ROOT / "docs" / "results"
        write_whole(to / "transport.csv", rounds(turns).to_csv(index=False))
        write_whole(to / "transport-bytes.csv", counts.to_csv(index_label="transport"))
        write_whole(to / "transport.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
