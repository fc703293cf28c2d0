"""What `noniid sync`, `ui` and `deploy record` do.

Runs go to the store that the variable MLFLOW_TRACKING_URI names; without it, to the database under
mlruns/.
"""

from __future__ import annotations

import logging
from pathlib import Path

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.yaml_files import read_yaml
from fedml_noniid.pipelines.experiment.workspace import Workspace, refuse_without
from fedml_noniid.pipelines.tracking import deployments, ui
from fedml_noniid.pipelines.tracking import sync as syncing
from fedml_noniid.pipelines.tracking.store import Store

log = logging.getLogger(__name__)


def bring_up_to_date(workspace: Workspace) -> tuple[Store, str]:
    """Records finished items.

    Returns the store and the name of the experiment. UserError.
    """
    store = Store(workspace.repository, workspace.tracking_uri)
    experiment = _experiment(workspace.root / "params.yaml")
    changed = syncing.sync(store, workspace.root, experiment)
    if changed:
        log.info("MLflow: %d of its runs brought up to date", len(changed))
    return store, experiment


def serve(workspace: Workspace, port: int | None) -> None:
    """Records finished items and serves MLflow's pages until Ctrl-C. UserError."""
    ui.serve(*bring_up_to_date(workspace), port)


def record(workspace: Workspace, folder: Path, config: Path, experiment: str | None) -> None:
    """Records the output folder of a finished deployment as one run; a second time, it changes
    nothing. UserError.

    `config`: the server's fedml_config.yaml. `experiment`: None for that of params.yaml.
    """
    finished = deployments.read(folder, config)
    store = Store(workspace.repository, workspace.tracking_uri)
    experiment = experiment or _experiment(workspace.root / "params.yaml")
    fresh = syncing.record(store, experiment, [finished], workspace.root)
    state = "logged" if fresh else "was there"
    log.info("%s: %s in experiment %s of %s", finished.name, state, experiment, store.shown)


def _experiment(path: Path) -> str:
    """The experiment's name.

    It is read alone, since a check of all settings imports torch, which takes seconds.
    """
    refuse_without(path.parent, path.name)
    content = read_yaml(path)
    if "experiment" not in content:
        raise UserError(f"{path}: names no experiment; it needs `experiment: <name>`")
    return str(content["experiment"])
