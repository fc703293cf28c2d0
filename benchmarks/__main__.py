"""`python -m benchmarks VERB`, in a checkout: the measurements, with their pages.

A page of docs/results whose verb is not here was made at the commit that the page names.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import (
    attacks,
    chaos,
    everything,
    gpu,
    gpu_budget,
    poison,
    stragglers,
)
from benchmarks.machine import Watch
from benchmarks.report import RESULTS
from fedml_noniid.pipelines import edge

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.command("bench")
def measure_engines(
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


@app.command("budget")
def count_kernels() -> None:
    """Count what each method costs a GPU, without one: kernels, copies and waits of the host.

    The tests hold every method to this table.
    """
    gpu_budget.write()


@app.command("gpu")
def check_gpu(
    device: Annotated[str, typer.Option(help="cuda, or cpu to rehearse.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Small jobs of a second each.")] = False,
    to: Annotated[Path, typer.Option(help="Folder of gpu.json and gpu.md.")] = RESULTS,
) -> None:
    """Check and measure a GPU, within 240 s. Writes docs/results/gpu.md.

    `python -m benchmarks.gpu` is the same with the base package alone.
    """
    arguments = ["--device", device, *["--quick"] * quick, "--to", str(to)]
    raise typer.Exit(gpu.main(arguments))


@app.command("stragglers")
def compare_waits(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each way.")] = 5,
    to: Annotated[Path, typer.Option(help="Folder of the page.")] = RESULTS,
) -> None:
    """Compare ways to treat slow clients by the virtual clock. Writes docs/results/stragglers.*."""
    sys.stdout.write(stragglers.write(seeds, to))


@app.command("chaos")
def kill_processes(
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
    watch = Watch()
    events = chaos.chaos({1: runs, 2: quorum_runs}, kills, first, work, typer.echo)
    if write:
        chaos.write(events, watch)
    if (events["outcome"] != "ok").any():
        raise typer.Exit(1)


@app.command("attacks")
def send_mutations(
    messages: Annotated[int, typer.Option(min=1, help="To a server, and to a silo.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    write: Annotated[bool, typer.Option("--write", help="Write docs/results/attacks.md.")] = False,
) -> None:
    """Send mutated messages to a live server and to a live silo, with valid certificates."""
    if not attacks.attacks(messages, seed, RESULTS if write else None, typer.echo):
        raise typer.Exit(1)


@app.command("poison")
def lie(
    runs: Annotated[int, typer.Option(min=1, help="Runs in which a silo lies.")] = poison.RUNS,
) -> None:
    """Let one silo of a deployment send far too much, and measure norms where nobody lies.

    Writes docs/results/poison.*.
    """
    poison.write(runs, typer.echo)


if __name__ == "__main__":
    sys.exit(edge.guarded(app))
