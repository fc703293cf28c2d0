"""Finished items and deployments on disk -> MLflow runs.

Each is one run, with its numbers, files and registered model.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.tracking import models, runs, view
from fedml_noniid.pipelines.tracking.store import Store

log = logging.getLogger(__name__)
SYNCED = "synced"  # tag: digest of the files and facts that completed a run
MODEL = "model.safetensors"  # is stored with the registered model


@dataclass(frozen=True)
class Finished:
    """What a finished run has."""

    name: str
    digest: str  # of everything else
    params: Mapping[str, object]
    tags: Mapping[str, str]
    rows: Sequence[Mapping[str, float]]  # of the rounds, with their `seconds` if they are known
    final: Mapping[str, float]
    files: Sequence[Path]
    written: Path  # the file that was written last
    live: str = ""  # id of the run that recorded it
    item: ItemResult | None = None  # whose model is registered

    @property
    def ended(self) -> int:
        """The end in milliseconds."""
        return round(1000 * self.written.stat().st_mtime)

    @property
    def began(self) -> float:
        """The beginning in seconds."""
        return self.ended / 1000 - sum(results.numbers(row).get("seconds", 0) for row in self.rows)


def sync(store: Store, root: Path, experiment: str) -> list[str]:
    """Makes one finished run for every finished item under `root`.

    Returns the keys that needed work.
    """
    items = results.read(root, store.repository)
    return record(store, experiment, [_of_item(item, root) for item in items], root)


def record(
    store: Store, experiment: str, finished_items: Sequence[Finished], root: Path
) -> list[str]:
    """Makes one finished run for each, unless MLflow has it. Returns the names that needed work.

    The earlier run of its name goes to MLflow's trash, so charts don't count it twice. Runs of a
    DVC experiment stay: their files are not in the workspace. So do those that another folder or
    machine made. A run that was deleted in MLflow is made again.
    """
    missing = {finished.digest for finished in finished_items} - recorded(store, experiment)
    if not missing:
        return []
    log.info("MLflow: recording runs in %s: %d", store.shown, len(missing))
    client = store.client()
    with store.guarded(), store.lock("sync"):
        experiment_id = runs.experiment_id(store, client, experiment)
        known, whole = defaultdict[str, list[Any]](list), set()
        for run in runs.search(client, experiment_id):
            known[run.data.tags.get("item", "")].append(run)
            whole.add(run.data.tags.get(SYNCED))
        todo = [
            finished_item for finished_item in finished_items if finished_item.digest not in whole
        ]
        for one in todo:
            run_id = _complete(store, client, experiment, one, known[one.name])
            if one.item is not None:
                models.register(client, run_id, experiment, one.item, root)
            client.set_tag(run_id, SYNCED, one.digest)
        view.prepare(client, experiment_id)
    return [one.name for one in todo]


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
        found = client.get_experiment_by_name(experiment)
        known = runs.search(client, found.experiment_id) if found else []
    return {str(run.data.tags.get(SYNCED)) for run in known}


def hashed(about: str, files: Sequence[Path] = ()) -> str:
    """SHA-256 over a text, and over the names and contents of files."""
    content = hashlib.sha256(about.encode())
    for path in files:
        content.update(f" {path.name} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return content.hexdigest()


def _of_item(item: ItemResult, root: Path) -> Finished:
    """A finished item. The model's own hash is among its tags."""
    data = (root / "data" / f"{item.params.get('data.name')}.safetensors").exists()
    facts = (item.key, item.composition, item.params, item.tags, item.final, item.seconds, data)
    files = [path for path in item.files if path.name != MODEL]
    about = {
        "item": item.key,
        "scenario": item.scenario,
        "recipe": item.recipe,
        "composition": item.composition,
        "seed": str(item.seed),
    }
    rows: Sequence[Mapping[str, float]] = item.rows
    if item.seconds is not None:
        rows = [{**row, "seconds": s} for row, s in zip(rows, item.seconds, strict=True)]
    return Finished(
        item.key,
        hashed(repr(facts), files),
        {**item.params, **about},
        {**item.tags, **about},
        rows,
        {**item.final, **results.numbers(item.evaluation)},
        # An edit of params.yaml that changes no item makes no work. So the digest leaves it out.
        [*files, *filter(Path.is_file, [root / "params.yaml"])],
        next(path for path in files if path.name == "rounds.csv"),
        item.made.get("run_id", ""),
        item,
    )


def _complete(
    store: Store, client: Any, experiment: str, one: Finished, earlier: Sequence[Any]
) -> str:
    """The id of the run (live or new), complete except for its model."""
    same = [run for run in earlier if _is_of(run, one)]
    run = max(same, key=lambda run: int(run.info.start_time), default=None)
    if run is None:
        log = runs.start(store, experiment, one.name, one.params, one.tags, one.began)
        log.log_rounds(one.rows)
    else:
        log = runs.Run(client, run)
        log.tag(one.tags)
    log.finish(one.final, one.files, run.info.end_time if run else one.ended)
    for old in earlier:
        is_later = old.info.status == "RUNNING" and old.info.start_time > one.ended
        tags = old.data.tags
        is_other = "dvc_experiment" in tags or tags.get(runs.OWNER, store.owner) != store.owner
        if old.info.run_id != log.run_id and not is_later and not is_other:
            client.delete_run(old.info.run_id)  # MLflow's pages can restore it from the trash
    return log.run_id


def _is_of(run: Any, one: Finished) -> bool:
    """Whether a run has all rounds of the training that wrote these files."""
    tags = run.data.tags
    is_same = "fingerprint" in one.tags and all(
        tags.get(key) == one.tags.get(key) for key in ("fingerprint", "weights_sha256")
    )
    return run.info.status == "FINISHED" and (run.info.run_id == one.live or is_same)
