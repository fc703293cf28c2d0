"""The verbs of the repository itself: keep, bench, budget, chaos. They need a checkout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import fedml_noniid
from fedml_noniid.cli.verb import Root, one_of, verb, workspace
from fedml_noniid.pipelines.papers.studies import SIZES
from fedml_noniid.plugins.core.errors import UserError

CHECKOUT = Path(fedml_noniid.__file__).parents[1]
RESULTS = Path("docs") / "results"


def add(app: typer.Typer) -> None:
    """Adds the verbs. An installed package does not list them."""
    hidden = not _is_checkout()
    for function, *examples in (
        (
            keep,
            "noniid keep fnr-tab4 --size small",
            "noniid keep digits-methods    # of params.yaml",
        ),
        (bench, "noniid bench --quick --only mlp", "noniid bench --to bench-results"),
        (
            budget,
            "noniid budget    # two minutes; needs no GPU",
            "noniid budget && git diff docs/results",
        ),
        (chaos, "noniid chaos --runs 2 --quorum-runs 1", "noniid chaos --write"),
    ):
        verb(app, function.__name__, *examples, hidden=hidden)(function)


def _is_checkout() -> bool:
    return (CHECKOUT / "benchmarks").is_dir()


def checkout(name: str) -> Path:
    """The checkout that runs, whose own modules can now be imported.

    UserError for an installed package.
    """
    if not _is_checkout():
        raise UserError(
            f"noniid {name} needs a checkout of the repository; this package is installed in "
            f"{CHECKOUT}"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return CHECKOUT


def keep(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A table or figure with --size, as rf-tab1; else a name for the result.",
        ),
    ],
    size: Annotated[
        str | None,
        typer.Option(
            help=f"Size of the table or figure: {', '.join(SIZES)}.",
            **one_of("size", lambda: SIZES),
        ),
    ] = None,
    root: Root = Path(),
) -> None:
    """Write a result into docs/results. Needs a checkout.

    It has the facts to check the result: rounds, seeds, machine, versions. The page, the numbers of
    its table, a line per run and a line per round are files. A page replaces the old one.
    """
    checkout("keep")
    place = workspace(root)
    from fedml_noniid.pipelines.tools import keep as keeping

    keeping.keep(place.root, name, size)


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
    to: Annotated[
        Path | None, typer.Option(help="Folder of the report.", show_default="docs/results")
    ] = None,
) -> None:
    """Measure our engines beside others. Needs a checkout.

    The others are a bare PyTorch loop and other simulators; the report has the ratios.
    PFL=/path/to/python, FLOWER=, FEDLAB= and BLAZEFL= name interpreters that have these simulators.
    """
    root = checkout("bench")
    from benchmarks import everything

    sys.stdout.write(everything.bench(only, quick, repetitions, to or root / RESULTS))


def budget() -> None:
    """Count what each method costs a GPU, without one. Needs a checkout.

    It writes docs/results/gpu-budget.csv and .md: kernels, copies and waits of the host, by method
    and engine. The tests hold every method to this table.
    """
    root = checkout("budget")
    from benchmarks import gpu_budget

    gpu_budget.write(root)
    typer.echo(f"{gpu_budget.FILE} and .md are written")


def chaos(
    runs: Annotated[int, typer.Option(min=0, help="Runs in which all silos must answer.")] = 50,
    quorum_runs: Annotated[
        int, typer.Option(min=0, help="Runs in which two of three must answer.")
    ] = 20,
    kills: Annotated[int, typer.Option(min=0, help="Events per run.")] = 4,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 0,
    write: Annotated[bool, typer.Option("--write", help="Write docs/results/chaos.md.")] = False,
) -> None:
    """Kill processes of cross-silo runs. Needs a checkout.

    They are killed at random moments and started again. The final weights are compared with the
    simulation's.
    """
    root = checkout("chaos")
    from benchmarks import chaos as measured

    if not measured.chaos(
        runs, quorum_runs, kills, first, root / RESULTS / "chaos.md" if write else None, typer.echo
    ):
        raise typer.Exit(1)
