"""`python -m benchmarks VERB`, in a checkout: the measurements, with their pages."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import attacks as mutating
from benchmarks import canaries as attacked
from benchmarks import chaos as killing
from benchmarks import choosing, everything, gpu_budget, machine, personalised
from benchmarks import cluster as of_items
from benchmarks import curves as of_rounds
from benchmarks import frozen as features
from benchmarks import gpu as on_gpu
from benchmarks import idle as waiting
from benchmarks import memories as on_disk
from benchmarks import owners as many_owners
from benchmarks import poison as lying
from benchmarks import streams as many_silos
from benchmarks import sums as exact
from fedml_noniid.pipelines import edge

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.command()
def bench(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One repetition, few rounds, no FedML: tests that it runs."),
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="WORKLOAD", help="Only this workload, such as mlp.")
    ] = None,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Measurements per engine and workload.")
    ] = 2,
    to: Annotated[Path, typer.Option(help="Folder of the report.")] = RESULTS,
) -> None:
    """Measure our engines beside a bare PyTorch loop and other simulators.

    PFL=/path/to/python, FLOWER=, FEDLAB= and BLAZEFL= name interpreters that have these simulators.
    """
    sys.stdout.write(everything.bench(only, quick, repetitions, to))


@app.command()
def budget() -> None:
    """Count what each method costs a GPU, without one: kernels, copies and waits of the host.

    The tests hold every method to this table.
    """
    gpu_budget.write(ROOT)


@app.command()
def gpu(
    device: Annotated[str, typer.Option(help="cuda, or cpu to rehearse.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Small jobs of a second each.")] = False,
    to: Annotated[Path, typer.Option(help="Folder of gpu.json and gpu.md.")] = RESULTS,
) -> None:
    """Check and measure a GPU, within 240 s. Writes docs/results/gpu.md.

    `python -m benchmarks.gpu` is the same with the base package alone.
    """
    arguments = ["--device", device, *["--quick"] * quick, "--to", str(to)]
    raise typer.Exit(on_gpu.main(arguments))


@app.command()
def chaos(
    runs: Annotated[int, typer.Option(min=0, help="Runs in which all silos must answer.")] = 50,
    quorum_runs: Annotated[
        int, typer.Option(min=0, help="Runs in which two of three must answer.")
    ] = 20,
    kills: Annotated[int, typer.Option(min=0, help="Events per run.")] = 4,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 0,
    work: Annotated[
        Path, typer.Option(help="Folder of the runs that are over; none of them runs twice.")
    ] = Path(".chaos"),
    write: Annotated[bool, typer.Option("--write", help="Write docs/results/chaos.*.")] = False,
) -> None:
    """Kill processes of cross-silo runs at random moments, and start them again.

    The final weights are compared with the simulation's, the audit logs with each other, and
    answers with what a silo computes again. Interrupted, it goes on where it was.
    """
    watch = machine.Watch()
    found = killing.chaos({1: runs, 2: quorum_runs}, kills, first, work, typer.echo)
    if write:
        killing.write(found, watch, RESULTS, "make chaos")
    if (found["outcome"] != "ok").any():
        raise typer.Exit(1)


@app.command()
def attacks(
    messages: Annotated[int, typer.Option(min=1, help="To a server, and to a silo.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    write: Annotated[bool, typer.Option("--write", help="Write docs/results/attacks.md.")] = False,
) -> None:
    """Send mutated messages to a live server and to a live silo, with valid certificates."""
    to = RESULTS if write else None
    if not mutating.attacks(messages, seed, to, typer.echo):
        raise typer.Exit(1)


@app.command()
def poison(
    runs: Annotated[int, typer.Option(min=1, help="Runs in which a silo lies.")] = lying.RUNS,
) -> None:
    """Let one silo of a deployment send far too much, and measure norms where nobody lies.

    Writes docs/results/poison.*.
    """
    lying.write(runs, RESULTS, typer.echo)


@app.command()
def choose(
    work: Annotated[Path, typer.Option(help="Folder of the runs; nothing in it runs twice.")],
    raw: Annotated[Path, typer.Option(help="Folder of the files of MNIST and CIFAR-10.")],
    only: Annotated[
        list[str] | None, typer.Option(help="Only these scenarios, and no page.")
    ] = None,
) -> None:
    """Measure `noniid choose` on 13 scenarios and 20 sets of seeds, beside the exhaustive search.

    Takes half an hour. Interrupted, it goes on where it was.
    """
    sys.stdout.write(choosing.write(ROOT, work.resolve(), raw.resolve(), only or ()))


@app.command(name="personalised")
def of_clients(
    work: Annotated[Path, typer.Option(help="Folder of the runs; nothing in it runs twice.")],
    raw: Annotated[Path, typer.Option(help="Folder of the files of MNIST.")],
) -> None:
    """Test personalised methods on each client's own samples, beside FedAvg with fine-tuning.

    Takes about half an hour. Interrupted, it goes on where it was.
    """
    work.mkdir(parents=True, exist_ok=True)
    personalised.write(ROOT, work.resolve(), raw.resolve())


@app.command()
def frozen(
    work: Annotated[Path, typer.Option(help="Folder of the runs; nothing in it runs twice.")],
    raw: Annotated[Path, typer.Option(help="Folder of the files of MNIST.")],
) -> None:
    """Measure Fed3R and a linear probe on frozen features beside FedAvg, over five partitions.

    Interrupted, it goes on where it was.
    """
    features.write(ROOT, raw.resolve(), work.resolve())


@app.command()
def owners(work: Annotated[Path, typer.Option(help="Folder of the data and the runs.")]) -> None:
    """Measure data of 1,000 to 1,000,000 owners, from the arrays to the report."""
    many_owners.write(ROOT, work.resolve())


@app.command()
def curves() -> None:
    """Measure a round by cohort, clients in total, width and processes. Takes a few minutes.

    Writes docs/results/curves.csv and a part of docs/results/scale.md.
    """
    of_rounds.measure(ROOT)


@app.command()
def canaries(
    seeds: Annotated[int, typer.Option(min=1, help="Attacks for each setting.")] = 1,
) -> None:
    """Attack the methods with privacy noise. Writes docs/results/canaries.md."""
    attacked.write(ROOT, seeds)


@app.command()
def memories() -> None:
    """Measure what clients' memories on disk cost. Writes docs/results/memories.md."""
    on_disk.write(ROOT)


@app.command()
def kills(
    work: Annotated[Path, typer.Option(help="A new folder for the data and the runs.")],
    items: Annotated[int, typer.Option(min=4, help="Items to train, four for each seed.")] = 200,
    workers: Annotated[int, typer.Option(min=1, help="Workers of the cluster.")] = 4,
) -> None:
    """Train items on a cluster of this machine while its workers are killed, and compare weights.

    Writes docs/results/kills.csv and a part of docs/results/cluster.md.
    """
    of_items.write_kills(ROOT, work.resolve(), items, workers)


@app.command(name="workers")
def beside_forks(
    work: Annotated[Path, typer.Option(help="A new folder for the data and the runs.")],
    turns: Annotated[int, typer.Option(min=1, help="Turns after the one that warms up.")] = 3,
    items: Annotated[int, typer.Option(min=4, help="Items to train, four for each seed.")] = 24,
) -> None:
    """Measure two workers of a cluster beside two forked processes, in turns.

    Writes docs/results/workers.csv and a part of docs/results/cluster.md.
    """
    of_items.write_turns(ROOT, work.resolve(), turns, items)


@app.command()
def streams(
    silos: Annotated[int, typer.Option(min=1, help="Silos, each with a stream.")] = 300,
    numbers: Annotated[int, typer.Option(min=1, help="Numbers of the model.")] = 10_000,
    exchanges: Annotated[int, typer.Option(min=1, help="Exchanges with all silos.")] = 10,
    processes: Annotated[int, typer.Option(min=1, help="Processes of silos.")] = 3,
) -> None:
    """Measure one server with many silos in one round. Writes docs/results/streams.md."""
    size = many_silos.Size(silos, numbers, exchanges, processes)
    many_silos.write(ROOT, size, f"python -m benchmarks {shlex.join(sys.argv[1:])}")


@app.command()
def idle(
    seconds: Annotated[int, typer.Option(min=1, help="How long it waits.")] = 60,
) -> None:
    """Measure a server and silos that wait: CPU and memory. Writes docs/results/idle.md."""
    waiting.write(ROOT, seconds, f"python -m benchmarks {shlex.join(sys.argv[1:])}")


@app.command()
def sums() -> None:
    """Measure what exact sums cost, beside a float32 average. Writes docs/results/sums.md."""
    exact.write(ROOT)


if __name__ == "__main__":
    sys.exit(edge.guarded(app))
