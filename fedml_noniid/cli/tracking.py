"""The verbs of MLflow: sync and ui."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedml_noniid.cli.verb import Root, enter_workspace, verb


def add(app: typer.Typer) -> None:
    """Adds the verbs."""
    verb(app, "ui", "noniid ui", "noniid ui --port 5001")(ui)
    verb(
        app, "sync", "noniid sync", "MLFLOW_TRACKING_URI=http://mlflow.example.org:5000 noniid sync"
    )(sync)


def ui(
    port: Annotated[
        int | None,
        typer.Option(
            help="Port of the pages.", show_default="5000, or a free one if that is taken"
        ),
    ] = None,
    root: Root = Path(),
) -> None:
    """Serve MLflow's pages on this machine, until Ctrl-C.

    Finished runs are recorded first. The link that it prints opens a prepared comparison of all
    runs.
    """
    workspace = enter_workspace(root)
    from fedml_noniid.pipelines.tracking import verbs

    verbs.serve(workspace, port)


def sync(root: Root = Path()) -> None:
    """Record finished runs in MLflow. `noniid run` does it too.

    They go to the server that MLFLOW_TRACKING_URI names; without it, to the database under mlruns/.
    """
    workspace = enter_workspace(root)
    from fedml_noniid.pipelines.tracking import verbs

    verbs.bring_up_to_date(workspace)
