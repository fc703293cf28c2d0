"""The verbs of a study's owner and of a site: deploy study, deploy policy, audit."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedml_noniid.cli.verb import group, say, verb
from fedml_noniid.core.errors import UserError

Study = Annotated[Path, typer.Argument(metavar="FILE", help="The study file.")]
Config = Annotated[Path, typer.Option(help="fedml_config.yaml of this machine.")]
STUDY = Path("study.yaml")


def add(app: typer.Typer, deploy: typer.Typer) -> None:
    """Adds the groups."""
    study = group(
        "Make, sign and show studies.\n\nThe server and all silos of a run hold to it.",
        "noniid deploy study key owner.key",
        "noniid deploy study make --config fedml_config.yaml --name trial-7 --days 90",
        "noniid deploy study sign study.yaml --key owner.key",
    )
    audit = group(
        "Check the audit log of a server or silo.",
        "noniid audit verify run/audit-1.jsonl --ca kits/1/ca.crt --against audit-0.jsonl",
        "noniid audit replay --rank 1 --config fedml_config.yaml",
    )
    for parent, prefix, function, *examples in (
        (study, "deploy study ", key, "key owner.key", "key keys/owner.key"),
        (
            study,
            "deploy study ",
            make,
            "make --config fedml_config.yaml --name trial-7 --days 90",
            "make study-2.yaml --config fedml_config.yaml --name trial-8 --days 30",
        ),
        (
            study,
            "deploy study ",
            sign,
            "sign study.yaml --key owner.key",
            "sign study-2.yaml --key keys/owner.key",
        ),
        (
            study,
            "deploy study ",
            show,
            "show study.yaml",
            "show study.yaml --rank 1 --config fedml_config.yaml",
        ),
        (
            deploy,
            "deploy ",
            policy,
            "policy --owner owner.pub",
            "policy site/policy.yaml --owner owner.pub --name 'Dr Owner'",
        ),
        (
            audit,
            "audit ",
            verify,
            "verify run/audit-1.jsonl --ca kits/1/ca.crt",
            "verify run/audit-1.jsonl --ca kits/1/ca.crt --against from-server/audit-0.jsonl",
        ),
        (
            audit,
            "audit ",
            replay,
            "replay --rank 1 --config fedml_config.yaml",
            "replay --rank 1 --config fedml_config.yaml --exchange 12",
        ),
    ):
        typed = [f"noniid {prefix}{example}" for example in examples]
        verb(parent, function.__name__, *typed, extra=None)(function)
    deploy.add_typer(study, name="study")
    app.add_typer(audit, name="audit")


def key(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File for the private key.")],
) -> None:
    """Make the key of a study's owner, once.

    The public key is written beside it, to the same name with .pub. Sites put it into their policy.
    """
    from fedml_noniid.governance import study

    public = study.make_key(path)
    sys.stdout.write(f"{path} stays with you; {path.with_suffix('.pub')} goes to sites: {public}\n")


def make(
    config: Annotated[Path, typer.Option(help="A whole fedml_config.yaml.")],
    name: Annotated[str, typer.Option(help="Name of the study.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days for which it holds.")],
    path: Study = STUDY,
) -> None:
    """Write a study file, to be signed.

    It has all settings that server and silos must share, the SHA-256 of the code that runs, and
    names, types and shapes of all tensors that will be sent. The shapes are those of the server's
    data file, which must be there.
    """
    from fedml_noniid.data import shards
    from fedml_noniid.data.files import write_whole
    from fedml_noniid.deploy import settings
    from fedml_noniid.governance import study

    deployment = settings.read(config)
    shard = shards.read(deployment.shard(0), 0, deployment.silos)
    last = datetime.date.today() + datetime.timedelta(days=days)
    write_whole(path, study.text(study.make(deployment, shard, name, last)))
    sys.stdout.write(f"{path}: read it, then sign it with `noniid deploy study sign`\n")


def sign(
    key: Annotated[Path, typer.Option(help="Private key of the owner.")],
    path: Study = STUDY,
) -> None:
    """Sign a study file as it lies. The signature is written beside it, to FILE.sig."""
    from fedml_noniid.governance import study

    public = study.sign(path, key)
    signature = study.signature_of(path)
    sys.stdout.write(
        f"{signature}: signed by {public}; both files go to the server and all sites\n"
    )


def show(
    path: Study = STUDY,
    rank: Annotated[int | None, typer.Option(min=0, help="Rank of this process.")] = None,
    config: Annotated[Path | None, typer.Option(help="fedml_config.yaml of this process.")] = None,
) -> None:
    """Show a study, once its signature is checked. No code that it names is imported.

    With rank and configuration, the policy of that process is asked first. If it admits the study,
    data file and code are checked too, and packages that the policy lists are imported. Nothing is
    run.
    """
    from fedml_noniid.governance.study import read_signed, shown_text

    if (rank is None) != (config is None):
        raise UserError("--rank and --config go together: they name a process with a policy")
    said = "no policy was asked"
    if rank is not None and config is not None:
        from fedml_noniid.processes.launch import Process

        comm = Process.from_config(rank, config).agreed.deployment.comm_args
        if read_signed(path) != read_signed(Path(comm.study)):
            raise UserError(f"{config}: comm_args.study names another study than {path}")
        said = f"{comm.policy} admits it"
    text, owner = shown_text(path)
    say(f"{text}# signed by {owner}; {said}")


def policy(
    owner: Annotated[Path, typer.Option(help="Public key of a study's owner: a .pub file.")],
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path(
        "policy.yaml"
    ),
    name: Annotated[str, typer.Option(help="The owner's name, for people.")] = "owner",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write the policy of a silo or of the server to start from: it admits one owner.

    Comments explain each rule.
    """
    from fedml_noniid.data.files import write_whole
    from fedml_noniid.governance import policy as policies
    from fedml_noniid.governance import study

    if path.exists() and not force:
        raise UserError(f"{path}: exists; allowed: another path, or --force to replace it")
    write_whole(path, policies.template(name, study.public_key(owner)))
    sys.stdout.write(f"{path}: it admits {name}; read its rules, and set those that you need\n")


def verify(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="An audit log.")],
    ca: Annotated[Path, typer.Option(help="ca.crt of a kit.")],
    against: Annotated[Path | None, typer.Option(help="The log of the other side.")] = None,
) -> None:
    """Check that nobody has changed an audit log.

    The first line that is wrong is named. Only the log of the other side shows lines that are
    missing at the end, or that the log's own process has written anew.
    """
    from fedml_noniid.governance import audit

    say(audit.verify(path, ca, against))


def replay(
    rank: Annotated[int, typer.Option(min=1, help="Rank of this silo.")],
    config: Config,
    exchange: Annotated[int | None, typer.Option(help="Only this exchange.")] = None,
) -> None:
    """Compute a silo's answers again, and compare their SHA-256 with its audit log.

    For all answers whose questions were kept, see comm_args.replay_mb.
    """
    from fedml_noniid.governance.replay import of_process
    from fedml_noniid.processes.launch import Process

    process = Process.from_config(rank, config)
    say(of_process(process, process.fedml, exchange))
