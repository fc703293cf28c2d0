"""Runs in MLflow: `sync` records finished items, `ui` also serves MLflow's pages, `deployment` records a deployment.

They go to the store that the variable MLFLOW_TRACKING_URI names; without it, to the database under mlruns/.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from fedml_noniid.pipelines import cli
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.tracking import deployments, ui
from fedml_noniid.pipelines.tracking.store import Store
from fedml_noniid.pipelines.tracking.sync import sync, sync_reports
from fedml_noniid.plugins.core.errors import UserError

log = logging.getLogger(__name__)
DEPLOYMENT = "records the output folder of a finished deployment as one run; a second time, it changes nothing"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = cli.parser("fedml_noniid.pipelines.tracking", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    about = {"sync": "records finished items", "ui": "records them and serves MLflow's pages", "deployment": DEPLOYMENT}
    made = {name: commands.add_parser(name, help=text, description=text) for name, text in about.items()}
    for command in made.values():
        command.add_argument("--root", type=Path, default=argparse.SUPPRESS, help="folder of params.yaml (this one)")
    made["ui"].add_argument("--port", type=int, help="port of the pages (5000, or a free one if that is taken)")
    add = made["deployment"].add_argument
    add("folder", type=Path, help="the server's tracking_args.output_dir")
    add("--config", type=Path, required=True, help="the server's fedml_config.yaml")
    add("--to", metavar="URI", help="the store; without it, that of all other runs: MLFLOW_TRACKING_URI, or mlruns/")
    add("--experiment", help="name of the experiment in MLflow (that of params.yaml)")
    return cli.guarded(_run, parser.parse_args(arguments))


def _run(options: argparse.Namespace, place: Workspace) -> None:
    if options.command == "deployment":
        _deployment(options, place)
        return
    store, experiment = Store(place.repository, place.tracking_uri), _experiment(place.root / "params.yaml")
    changed = [*sync(store, place.root, experiment), *deployments.sync_stage(store, place.root, experiment)]
    sync_reports(store, place.root)
    log.info("MLflow: %d of its runs brought up to date", len(changed))
    if options.command == "ui":
        ui.serve(store, experiment, options.port)


def _deployment(options: argparse.Namespace, place: Workspace) -> None:
    found = deployments.read(options.folder, options.config)
    store = Store(place.repository, place.tracking_uri if options.to is None else options.to)
    experiment = options.experiment or _experiment(place.root / "params.yaml")
    fresh = deployments.add(store, experiment, found)
    log.info("%s: %s in experiment %s of %s", found.name, "logged" if fresh else "was there", experiment, store.address)


def _experiment(path: Path) -> str:
    """The experiment's name. It is read alone, since a check of all settings imports torch, which takes seconds."""
    try:
        return str(YAML(typ="safe", pure=True).load(path.read_text())["experiment"])
    except (OSError, UnicodeDecodeError, YAMLError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: names no experiment ({' '.join(str(error).split())}); it needs `experiment: <name>`"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
