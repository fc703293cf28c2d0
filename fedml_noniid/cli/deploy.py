"""The verbs of FedML cross-silo: deploy kits, shards, server, silo, status, loopback, record,
config."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedml_noniid import extras
from fedml_noniid.cli import site
from fedml_noniid.cli.verb import Root, enter_workspace, group, say, verb
from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines import edge

Config = Annotated[Path, typer.Option(help="fedml_config.yaml of this machine.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder of the CA and the kits.")]
Rank = Annotated[int, typer.Option(help="0 for the server, 1.. for the silos.")]
Days = Annotated[int, typer.Option(min=1, max=3650, help="Days for which a kit is valid.")]


def add(app: typer.Typer) -> None:
    """Adds the group."""
    deploy = group(
        "Run FedML cross-silo, on one machine or on many.\n\nThe server and each silo are "
        "processes. "
        "`noniid deploy loopback` runs all of them on this machine.",
        "noniid deploy loopback --recipe scaffold --silos 3   # all on this machine",
        "noniid deploy kits make --silos 3 --out kits",
        "noniid deploy silo --rank 1 --config fedml_config.yaml",
    )
    kits = group(
        "Make and revoke certificates: for the operator of a federation.",
        "noniid deploy kits make --silos 3 --out kits",
        "noniid deploy kits show --out kits",
    )
    for parent, function, *examples in (
        (kits, make, "kits make --silos 3 --out kits", "kits make --silos 3 --out kits --days 30"),
        (kits, renew, "kits renew --rank 2 --out kits", "kits renew --rank 0 --out kits --days 30"),
        (kits, revoke, "kits revoke --rank 2 --out kits", "kits show --out kits"),
        (kits, show, "kits show --out kits", "kits show --out /secure/kits"),
        (deploy, config, "config", "config server/fedml_config.yaml"),
        (
            deploy,
            shards,
            "shards --data data/digits.safetensors --indices "
            "partitions/dirichlet-0/indices.safetensors --out shards",
        ),
        (
            deploy,
            server,
            "server --config fedml_config.yaml",
            "server --config /etc/federation/server.yaml",
        ),
        (
            deploy,
            silo,
            "silo --rank 1 --config fedml_config.yaml",
            "silo --rank 2 --config /etc/federation/silo.yaml",
        ),
        (
            deploy,
            status,
            "status --config fedml_config.yaml",
            "status --config fedml_config.yaml | python -m json.tool",
        ),
        (deploy, loopback, "loopback", "loopback --recipe scaffold --silos 4 --secure-sums 3"),
        (
            deploy,
            record,
            "record run --config fedml_config.yaml",
            "record run --config fedml_config.yaml --experiment hospitals",
        ),
    ):
        typed = [f"noniid deploy {example}" for example in examples]
        extra = extras.PIPELINE if function in (loopback, record) else None
        verb(parent, function.__name__, *typed, extra=extra)(function)
    deploy.add_typer(kits, name="kits")
    site.add(app, deploy)
    app.add_typer(deploy, name="deploy")


def make(
    silos: Annotated[int, typer.Option(min=1, help="Number of silos.")],
    out: Out,
    days: Days = 14,
) -> None:
    """Make a CA, and the kits that are missing.

    A kit holds the certificate of one process: one for the server, one for each silo. What exists
    stays as it is.
    """
    from fedml_noniid.credentials import authority

    sys.stdout.write(authority.make(out, silos, days))


def renew(rank: Rank, out: Out, days: Days = 14) -> None:
    """Make a new kit for one rank. The old certificate stays valid to its last day.

    The process takes the new kit by itself. A stolen kit must be revoked before it is renewed.
    """
    from fedml_noniid.credentials import authority

    sys.stdout.write(authority.renew(out, rank, days))


def revoke(rank: Rank, out: Out) -> None:
    """Revoke the valid certificates of one rank, also those that were renewed.

    The server refuses them once it has the new list.
    """
    from fedml_noniid.credentials import authority

    sys.stdout.write(authority.revoke(out, rank))


def show(out: Out) -> None:
    """Show a line for each kit.

    It has rank, name, serial number, the last day, and whether the certificate is revoked.
    """
    from fedml_noniid.credentials import authority

    say(authority.show(out))


def config(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path(
        "fedml_config.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a fedml_config.yaml to start from, with the most used keys and comments."""
    from fedml_noniid.data.files import write_whole
    from fedml_noniid.processes.loopback import CONFIG

    if path.exists() and not force:
        raise UserError(f"{path}: exists; allowed: another path, or --force to replace it")
    write_whole(path, CONFIG.read_text())
    typer.echo(
        f"{path}: set recipe, number of silos and addresses, then give the same file to the "
        "server and to each silo"
    )


def shards(
    data: Annotated[Path, typer.Option(help="A prepared data set: data/<name>.safetensors.")],
    indices: Annotated[
        Path, typer.Option(help="partitions/<scenario>-<seed>/indices.safetensors.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for <rank>.safetensors; 0 is the server's.")],
) -> None:
    """Cut a partition into a data file for each process.

    `noniid run partition` makes the partition. Rank 0, the server, gets the test set. Every silo
    gets its part of it too, and the public split, if there is one.
    """
    from fedml_noniid.data import shards as cutting

    typer.echo(f"{cutting.cut(data, indices, out)} shards and the server's file are in {out}")


def server(config: Config) -> None:
    """Run the server.

    It prints a line per round, and the SHA-256 of the final weights.

    Exit codes: 0 the run is over, 1 it broke down, 2 wrong input, 3 too few silos answered, 4 the
    policy refuses the study, 5 no contact, 6 stopped on request. After 1, 3, 5 and 6 the same
    command goes on.
    """
    from fedml_noniid.processes import launch

    raise typer.Exit(launch.run(0, config))


def silo(
    rank: Annotated[int, typer.Option(help="1 to the number of silos.")],
    config: Config,
) -> None:
    """Run one silo. It trains on its own data file; samples never leave it.

    Exit codes: 0 the run is over, 1 it broke down, 2 wrong input, 3 too few silos answered, 4 the
    policy refuses the study, 5 no contact, 6 stopped on request. After 1, 3, 5 and 6 the same
    command goes on.
    """
    if rank < 1:
        raise UserError(f"--rank {rank}: silos begin at 1; `noniid deploy server` runs the server")
    from fedml_noniid.processes import launch

    raise typer.Exit(launch.run(rank, config))


def status(config: Config) -> None:
    """Ask the server for its state.

    It prints JSON: the round, the silos, the missing answers.
    """
    from fedml_noniid.deploy import exit_codes
    from fedml_noniid.processes import launch

    try:
        say(launch.status(config))
    except UserError as error:
        edge.tell(error)
        raise typer.Exit(exit_codes.code(error)) from None


def loopback(
    recipe: Annotated[str | None, typer.Option(help="Instead of the experiment's.")] = None,
    silos: Annotated[int | None, typer.Option(help="Instead of the experiment's.")] = None,
    secure_sums: Annotated[
        int | None, typer.Option(help="Silos of the smallest sum that the server sees.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for all files.")] = Path("deploy") / "loopback",
) -> None:
    """Run a server and silos on this machine, with the settings and data of this experiment.

    Each is a process. The final weights have to be those of the simulation, bit for bit.
    """
    from fedml_noniid.pipelines.stages import deploy
    from fedml_noniid.pipelines.verbs import repro
    from fedml_noniid.processes import loopback as local

    here = enter_workspace(Path())
    settings = deploy.planned(here.root, recipe=recipe, silos=silos, secure_sums=secure_sums)
    local.refuse_foreign(out)
    repro.repro(here, "partition", typer.echo)
    local.compare(*deploy.prepared(here, settings), out, typer.echo)


def record(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", resolve_path=True, help="The server's tracking_args.output_dir."
        ),
    ],
    config: Annotated[
        Path, typer.Option(resolve_path=True, help="The server's fedml_config.yaml.")
    ],
    experiment: Annotated[
        str | None, typer.Option(help="Experiment in MLflow.", show_default="that of params.yaml")
    ] = None,
    root: Root = Path(),
) -> None:
    """Record a finished deployment in MLflow, as one run.

    A second time, it changes nothing. The store is the one of `noniid sync`.
    """
    workspace = enter_workspace(root)
    from fedml_noniid.pipelines.tracking import verbs

    verbs.record(workspace, folder, config, experiment)
