"""Finished items on disk -> MLflow runs.

Each item is one run, with its numbers, files and registered model.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.tracking import models, runs, view
from fedml_noniid.pipelines.tracking.store import Store

SYNCED = "synced"  # tag: digest of the files and facts that completed a run
SUPERSEDED = "superseded_by"  # tag of a run in the trash: id of the run that replaced it
REPORTS = "papers"  # experiment with the papers' tables and figures, one run per paper and size
MODEL = "model.safetensors"  # is stored with the registered model


def sync(store: Store, root: Path, experiment: str) -> list[str]:
    """Makes one finished run for every finished item under `root`.

    Returns the keys that needed work.

    A new run replaces the item's earlier run. The earlier run goes to MLflow's trash with the tag
    `superseded_by`, so charts don't count the item twice. Runs of a DVC experiment stay: their
    files are not in the workspace. A run that was deleted in MLflow is restored.
    """
    items = {item.key: item for item in results.read(root, store.repository)}
    digests = {key: _digest(item, root) for key, item in items.items()}
    if recorded(store, experiment).issuperset(digests.values()):
        return []
    client = store.client()
    with store.guarded(), store.lock("sync"):
        experiment_id, known = (
            runs.of_name(store, client, experiment),
            defaultdict[str, list[Any]](list),
        )
        for run in runs.search(client, experiment_id, runs.ALL):
            known[run.data.tags.get("item", "")].append(run)
        todo = [key for key in items if not any(_is_whole(run, digests[key]) for run in known[key])]
        for key in todo:
            run = _complete(client, experiment_id, items[key], known[key])
            models.register(client, run, experiment, items[key], root)
            client.set_tag(run.info.run_id, SYNCED, digests[key])
        view.prepare(client, experiment_id)
    return todo


def recorded(store: Store, experiment: str) -> set[str]:
    """The digests of the experiment's complete runs, without those in MLflow's trash.

    StoreError if it can't be read.

    The embedded database is read without mlflow. Every other store is asked, so a dead server is
    noticed.
    """
    name = runs.cut(experiment, runs.EXPERIMENT)
    if not store.uri:
        return store.tagged(name, SYNCED)
    client = store.client()
    with store.guarded():
        found = client.get_experiment_by_name(name)
        known = runs.search(client, found.experiment_id) if found else []
    return {str(run.data.tags.get(SYNCED)) for run in known}


def log_report(
    store: Store,
    name: str,
    params: Mapping[str, str],
    metrics: Mapping[str, float],
    files: Sequence[Path],
) -> None:
    """Makes a paper's report the run `name` of the experiment "papers".

    A run with other content goes to the trash.
    """
    about = f"{name} {sorted(params.items())} {sorted(metrics.items())}"
    digest = hashed(about, files)
    if digest in recorded(store, REPORTS):
        return

    def write() -> runs.Run:
        run = runs.start(store, REPORTS, name, params, {})
        run.finish(metrics, files)
        return run

    once(store, REPORTS, name, digest, write)


def once(
    store: Store, experiment: str, name: str, digest: str, write: Callable[[], runs.Run]
) -> bool:
    """Writes the run `name` and moves earlier runs of that name to the trash.

    False if a run has this digest.
    """
    client = store.client()
    with store.guarded(), store.lock("sync"):
        known = runs.search(client, runs.of_name(store, client, experiment))
        fresh = not any(_is_whole(run, digest) for run in known)
        if fresh:
            run = client.get_run(write().run_id)
            _supersede(client, run, [old for old in known if old.info.run_name == name])
            client.set_tag(run.info.run_id, SYNCED, digest)
    return fresh


def sync_reports(store: Store, root: Path) -> None:
    """Makes a run for every paper's report under `root`."""
    for metrics in sorted(root.glob("papers/built/*/*/metrics.json")):
        paper, size = metrics.parts[-3:-1]
        files = sorted(path for path in (metrics.parent / "report").glob("*") if path.is_file())
        numbers = results.numbers(results.record(metrics))
        log_report(store, f"{paper}-{size}", {"paper": paper, "size": size}, numbers, files)


def _complete(client: Any, experiment_id: str, item: ItemResult, earlier: Sequence[Any]) -> Any:
    """The item's run (live, restored from the trash, or new), complete except for its model."""
    written = round(
        1000 * next(path for path in item.files if path.name == "rounds.csv").stat().st_mtime
    )
    run = max(
        (run for run in earlier if _is_of(run, item)),
        key=lambda run: int(run.info.start_time),
        default=None,
    )
    if run is None:
        began = written - round(1000 * sum(item.seconds or ()))
        run = client.create_run(
            experiment_id, start_time=began, tags={"item": item.key}, run_name=item.key
        )
    elif run.info.lifecycle_stage == "deleted":
        client.restore_run(run.info.run_id)
        if SUPERSEDED in run.data.tags:
            client.delete_tag(run.info.run_id, SUPERSEDED)
    log = runs.Run(client, run)
    about = {
        "item": item.key,
        "scenario": item.scenario,
        "recipe": item.recipe,
        "composition": item.composition,
        "seed": str(item.seed),
    }
    log.describe(
        dict(item.params) | about, dict(item.made.get("tags", {})) | dict(item.tags) | about
    )
    seconds = item.seconds or (math.nan,) * len(item.rows)  # NaN is not logged
    log.log_rounds(
        [{**row, "seconds": value} for row, value in zip(item.rows, seconds, strict=True)]
    )
    files = [path for path in item.files if path.name != MODEL]
    log.finish(
        dict(item.final) | results.numbers(item.evaluation), files, run.info.end_time or written
    )
    _supersede(
        client,
        run,
        [old for old in earlier if old.info.status != "RUNNING" or old.info.start_time <= written],
    )
    return run


def _supersede(client: Any, run: Any, earlier: Sequence[Any]) -> None:
    """Moves the earlier runs of an item to the trash. MLflow's pages can restore them."""
    for old in earlier:
        named = old.data.tags.get("dvc_experiment")
        other = named is not None and named != run.data.tags.get("dvc_experiment")
        if (
            old.info.run_id != run.info.run_id
            and old.info.lifecycle_stage == "active"
            and not other
        ):
            client.set_tag(old.info.run_id, SUPERSEDED, run.info.run_id)
            client.delete_run(old.info.run_id)


def _is_whole(run: Any, digest: str) -> bool:
    return bool(run.info.lifecycle_stage == "active" and run.data.tags.get(SYNCED) == digest)


def _is_of(run: Any, item: ItemResult) -> bool:
    """Whether a run belongs to the training that wrote these files."""
    if run.info.run_id == item.made.get("run_id"):
        return True
    weights, same = (
        item.tags["weights_sha256"],
        run.data.tags.get("fingerprint") == item.tags.get("fingerprint"),
    )
    return bool(
        same
        and run.info.status == "FINISHED"
        and run.data.tags.get("weights_sha256", weights) == weights
    )


def _digest(item: ItemResult, root: Path) -> str:
    """SHA-256 over everything that completes a run. The model's own hash is among the tags."""
    data = (root / "data" / f"{item.params.get('data.name')}.safetensors").exists()
    about = (item.key, item.composition, item.params, item.tags, item.final, item.seconds, data)
    return hashed(repr(about), [path for path in item.files if path.name != MODEL])


def hashed(about: str, files: Sequence[Path] = ()) -> str:
    """SHA-256 over a text, and over the names and contents of files."""
    content = hashlib.sha256(about.encode())
    for path in files:
        content.update(f" {path.name} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return content.hexdigest()
