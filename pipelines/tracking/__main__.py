"""`python -m pipelines.tracking sync` records finished items in MLflow. `ui` also serves MLflow's pages."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipelines import cli
from pipelines.experiment.workspace import Workspace
from pipelines.tracking import ui
from pipelines.tracking.store import Store
from pipelines.tracking.sync import sync, sync_reports
from plugins.core.errors import UserError

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = cli.parser("pipelines.tracking", __doc__)
    parser.add_argument("command", choices=["sync", "ui"])
    parser.add_argument("--port", type=int, help="port of the pages (5000, or a free one if that is taken)")
    return cli.guarded(_run, parser.parse_args(arguments))


def _run(options: argparse.Namespace, place: Workspace) -> None:
    store, experiment = Store(place.repository, place.tracking_uri), _experiment(place.root / "params.yaml")
    changed = sync(store, place.root, experiment)
    sync_reports(store, place.root)
    log.info("MLflow: %d of its runs brought up to date", len(changed))
    if options.command == "ui":
        ui.serve(store, experiment, options.port)


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
