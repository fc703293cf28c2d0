"""The verbs of a cluster: cluster kit, scheduler, worker, slurm; the options of verbs that train on
one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedml_noniid.cli.verb import group, verb
from fedml_noniid.pipelines.experiment.workspace import CLUSTER

OnCluster = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="DIR", help="Train on the cluster with this kit."),
]


def add(app: typer.Typer) -> None:
    """Adds the group."""
    cluster = group(
        "Train items on several machines of yours.\n\nA scheduler and workers run on them. "
        "`noniid run --cluster` gives each worker an item, and stores what it makes.",
        "noniid cluster kit --out /shared/cluster",
        "noniid cluster scheduler --listen 10.0.0.5:8786 --kit /shared/cluster",
        "noniid cluster worker /shared/cluster --processes 8",
        "noniid run --cluster /shared/cluster",
    )
    for function, *examples in (
        (kit, "kit --out /shared/cluster", "kit --out cluster-kit --days 30"),
        (scheduler, "scheduler --listen 10.0.0.5:8786 --kit /shared/cluster"),
        (
            worker,
            "worker /shared/cluster --processes 8",
            "worker /shared/cluster --threads 4",
        ),
        (
            slurm,
            "slurm --kit /shared/cluster --jobs 16 | sbatch",
            "slurm --kit /shared/cluster --jobs 4 --processes 32 --sbatch=--partition=cpu",
        ),
    ):
        typed = [f"noniid cluster {example}" for example in examples]
        verb(cluster, function.__name__, *typed)(function)
    app.add_typer(cluster, name="cluster")


def train_on(folder: Path | None) -> None:
    """Names the cluster to what trains, which may be processes of DVC. Raises UserError."""
    if folder is None:
        return
    # Imported here: it imports dask. It refuses the folder before anything is prepared.
    from fedml_noniid.pipelines.cluster.address import located

    located(folder)
    os.environ[CLUSTER] = str(folder.resolve())


def kit(
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days that it is valid.")] = 365,
) -> None:
    """Make the certificate that all processes of a cluster show each other.

    Who has the kit can run code on every machine of the cluster. Keep it in a folder that only you
    can read. It is of this cluster alone: silos never have it.
    """
    from fedml_noniid.pipelines.cluster import kit as kits

    kits.make(out, days)
    typer.echo(f"{out}: the scheduler, the workers and `noniid run` need this folder")


def scheduler(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="This machine's address.")],
    kit: Annotated[
        Path, typer.Option(metavar="DIR", help="The kit. scheduler.json is written there.")
    ],
) -> None:
    """Run the scheduler of a cluster, until it is stopped.

    It holds no data and no models. It listens at this one address, and serves no page.
    """
    from fedml_noniid.pipelines.cluster import processes

    processes.serve(kit, listen)


def slurm(
    kit: Annotated[Path, typer.Option(metavar="DIR", help="The kit, which all nodes see.")],
    jobs: Annotated[int, typer.Option(min=1, help="Jobs of the array.")],
    processes: Annotated[int, typer.Option(min=1, help="Workers of a job.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="As train.threads.")] = 1,
    time: Annotated[str, typer.Option(help="Time limit of a job, as sbatch has it.")] = "04:00:00",
    sbatch: Annotated[
        list[str] | None, typer.Option(help="An option of sbatch; may be given several times.")
    ] = None,
) -> None:
    """Write an sbatch script that starts a cluster on Slurm.

    Each job of the array runs workers, and the first one also the scheduler. Before its time is
    over, a job puts itself back into the queue. Trainings go on from their checkpoints.
    """
    from fedml_noniid.pipelines.cluster import slurm as scripts

    typer.echo(scripts.script(kit, jobs, processes, threads, time, sbatch or ()), nl=False)


def worker(
    kit: Annotated[Path, typer.Argument(metavar="DIR", help="The kit, with scheduler.json.")],
    processes: Annotated[int, typer.Option(min=1, help="Workers; each trains one item.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="As train.threads: it decides bits.")] = 1,
    device: Annotated[str, typer.Option(help="As train.device: auto, cpu or cuda.")] = "auto",
) -> None:
    """Run workers of a cluster, until its scheduler ends.

    A worker trains an item with the bits of the machine in front, or gets none: code, versions,
    instructions of the CPU and threads must be the same.
    """
    from fedml_noniid.pipelines.cluster import processes as cluster

    cluster.work(kit, processes, threads, device)
