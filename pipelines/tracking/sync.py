"""Finished items, methods and deployments on disk -> MLflow runs.

Each is one run, with its numbers and files. A method's run is the parent of those of its seeds, and
has the registered model and a confusion matrix.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.tracking import finished, models, runs, view
from fedml_noniid.pipelines.tracking.finished import Finished
from fedml_noniid.pipelines.tracking.store import Store

log = logging.getLogger(__name__)
SYNCED = "synced"  # tag: digest of the files and facts that completed a run
# Tags by which MLflow's pages nest runs, and colour them.
PARENT, COLOUR = "mlflow.parentRunId", "mlflow.runColor"


def sync(store: Store, root: Path, experiment: str) -> list[str]:
    """Makes one finished run for every finished item under `root`, and for every method.

    Returns the names that needed work.
    """
    items = results.read(root, store.repository)
    return record(store, experiment, finished.from_items(items, root), root)


def record(
    store: Store, experiment: str, finished_runs: Sequence[Finished], root: Path
) -> list[str]:
    """Makes one finished run for each, unless MLflow has it. Returns the names that needed work.

    The earlier run of its name goes to MLflow's trash, so charts don't count it twice. Runs of a
    DVC experiment stay: their files are not in the workspace. So do those that another folder or
    machine made. A run that was deleted in MLflow is made again.
    """
    missing = {run.digest for run in finished_runs} - recorded(store, experiment)
    if not missing:
        return []
    log.info("MLflow: recording runs in %s: %d", store.shown, len(missing))
    client = store.client()
    with store.guarded(), store.lock("sync"):
        experiment_id = runs.experiment_id(store, client, experiment)
        earlier = runs.search(client, experiment_id)
        synced = {run.data.tags.get(SYNCED): run.info.run_id for run in earlier}
        ids = {run.name: synced.get(run.digest, "") for run in finished_runs}
        todo = [run for run in finished_runs if not ids[run.name]]
        for run in todo:
            ids[run.name] = _complete(store, client, experiment, run, earlier)
        names = {run.name for run in todo}
        recipes = [*dict.fromkeys(run.tags["recipe"] for run in finished_runs)]
        for run in finished_runs:
            if not {run.name, run.parent} & names:
                continue
            if run.items and not run.parent:
                models.register(client, ids, experiment, run.items, root)
                models.log_confusion(client, ids[run.name], run.items)
            tags = {COLOUR: view.colour(recipes.index(run.tags["recipe"])), SYNCED: run.digest}
            parent = {PARENT: ids[run.parent]} if run.parent else {}
            runs.Run(client, ids[run.name]).log({}, {**tags, **parent})
        view.prepare(client, experiment_id)
    return [run.name for run in todo]


def recorded(store: Store, experiment: str) -> set[str]:
    """The digests of the experiment's complete runs, without those in MLflow's trash.

    StoreError if it can't be read.

    The embedded database is read without mlflow. Every other store is asked, so a dead server is
    noticed.
    """
    if not store.uri:
        return store.tagged(experiment, SYNCED)
    client = store.client()
    with store.guarded():
        known = client.get_experiment_by_name(experiment)
        ran = runs.search(client, known.experiment_id) if known else []
    return {str(run.data.tags.get(SYNCED)) for run in ran}


def _complete(
    store: Store, client: Any, experiment: str, finished: Finished, known: Sequence[Any]
) -> str:
    """The id of the run (live or new), complete except for its model.

    `known`: all runs of the experiment.
    """
    earlier = [run for run in known if run.data.tags.get("item") == finished.name]
    same = [run for run in earlier if _is_of(run, finished)]
    run = max(same, key=lambda run: int(run.info.start_time), default=None)
    if run is None:
        log = runs.start(
            store, experiment, finished.name, finished.params, finished.tags, finished.began
        )
        log.log_rounds(finished.rows)
    else:
        log = runs.Run(client, run.info.run_id)
        log.log({}, finished.tags)
    log.finish(finished.final, finished.files, run.info.end_time if run else finished.ended)
    for old in earlier:
        is_later = old.info.status == "RUNNING" and old.info.start_time > finished.ended
        tags = old.data.tags
        is_other = "dvc_experiment" in tags or tags.get(runs.OWNER, store.owner) != store.owner
        if old.info.run_id != log.run_id and not is_later and not is_other:
            client.delete_run(old.info.run_id)  # MLflow's pages can restore it from the trash
    return log.run_id


def _is_of(run: Any, finished: Finished) -> bool:
    """Whether a run has all rounds of the training that wrote these files."""
    tags = run.data.tags
    is_same = "fingerprint" in finished.tags and all(
        tags.get(key) == finished.tags.get(key) for key in ("fingerprint", "weights_sha256")
    )
    return run.info.status == "FINISHED" and (run.info.run_id == finished.live or is_same)
