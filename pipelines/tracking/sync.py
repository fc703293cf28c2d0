"""Finished items, deployments and reports on disk -> MLflow runs.

Each is one run, with its numbers, files and registered model.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Finished:
    """What a finished run has."""

    name: str
    digest: str  # of everything else
    params: Mapping[str, object]
    tags: Mapping[str, str]
    rows: Sequence[Mapping[str, float]]  # of the rounds, with their `seconds`
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
    def began(self) -> int:
        """The beginning in milliseconds."""
        seconds = [
            row["seconds"] for row in self.rows if math.isfinite(row.get("seconds", math.nan))
        ]
        return self.ended - round(1000 * sum(seconds))


def sync(store: Store, root: Path, experiment: str) -> list[str]:
    """Makes one finished run for every finished item under `root`.

    Returns the keys that needed work.
    """
    items = results.read(root, store.repository)
    return record(store, experiment, [_of_item(item, root) for item in items], root)


def sync_reports(store: Store, root: Path) -> list[str]:
    """Makes a run of the experiment "papers" for every paper's report under `root`.

    Returns the names that needed work.
    """
    return record(
        store, REPORTS, [*map(_of_report, sorted(root.glob("papers/built/*/*/metrics.json")))], root
    )


def record(store: Store, experiment: str, found: Sequence[Finished], root: Path) -> list[str]:
    """Makes one finished run for each, unless MLflow has it. Returns the names that needed work.

    A new run replaces the earlier run of its name. The earlier run goes to MLflow's trash with the
    tag `superseded_by`, so charts don't count it twice. Runs of a DVC experiment stay: their files
    are not in the workspace. A run that was deleted in MLflow is restored.
    """
    if recorded(store, experiment).issuperset(one.digest for one in found):
        return []
    client = store.client()
    with store.guarded(), store.lock("sync"):
        experiment_id = runs.of_name(store, client, experiment)
        known, whole = defaultdict[str, list[Any]](list), set()
        for run in runs.search(client, experiment_id, runs.ALL):
            known[run.data.tags.get("item", "")].append(run)
            if run.info.lifecycle_stage == "active":
                whole.add(run.data.tags.get(SYNCED))
        todo = [one for one in found if one.digest not in whole]
        for one in todo:
            run = _complete(client, experiment_id, one, known[one.name])
            if one.item is not None:
                models.register(client, run, experiment, one.item, root)
            client.set_tag(run.info.run_id, SYNCED, one.digest)
        view.prepare(client, experiment_id)
    return [one.name for one in todo]


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
    seconds = item.seconds or (math.nan,) * len(item.rows)  # NaN is not logged
    return Finished(
        item.key,
        hashed(repr(facts), files),
        {**item.params, **about},
        {**item.made.get("tags", {}), **item.tags, **about},
        [{**row, "seconds": value} for row, value in zip(item.rows, seconds, strict=True)],
        {**item.final, **results.numbers(item.evaluation)},
        files,
        next(path for path in files if path.name == "rounds.csv"),
        item.made.get("run_id", ""),
        item,
    )


def _of_report(metrics: Path) -> Finished:
    """A paper's report, by its file of numbers."""
    paper, size = metrics.parts[-3:-1]
    files = sorted(path for path in (metrics.parent / "report").glob("*") if path.is_file())
    numbers, params = results.numbers(results.record(metrics)), {"paper": paper, "size": size}
    digest = hashed(f"{paper} {size} {sorted(numbers.items())}", files)
    return Finished(f"{paper}-{size}", digest, params, {}, [], numbers, files, metrics)


def _complete(client: Any, experiment_id: str, one: Finished, earlier: Sequence[Any]) -> Any:
    """The run (live, restored from the trash, or new), complete except for its model."""
    same = [run for run in earlier if _is_of(run, one)]
    run = max(same, key=lambda run: int(run.info.start_time), default=None)
    if run is None:
        run = client.create_run(
            experiment_id, start_time=one.began, tags={"item": one.name}, run_name=one.name
        )
    elif run.info.lifecycle_stage == "deleted":
        client.restore_run(run.info.run_id)
        if SUPERSEDED in run.data.tags:
            client.delete_tag(run.info.run_id, SUPERSEDED)
    log = runs.Run(client, run)
    log.describe(one.params, {"item": one.name, **one.tags})
    log.log_rounds(one.rows)
    log.finish(one.final, one.files, run.info.end_time or one.ended)
    for old in earlier:
        named = old.data.tags.get("dvc_experiment")
        is_later = old.info.status == "RUNNING" and old.info.start_time > one.ended
        is_other = named is not None and named != run.data.tags.get("dvc_experiment")
        is_active = old.info.run_id != run.info.run_id and old.info.lifecycle_stage == "active"
        if is_active and not is_later and not is_other:
            # MLflow's pages can restore it from the trash.
            client.set_tag(old.info.run_id, SUPERSEDED, run.info.run_id)
            client.delete_run(old.info.run_id)
    return run


def _is_of(run: Any, one: Finished) -> bool:
    """Whether a run belongs to the training that wrote these files."""
    if run.info.run_id == one.live:
        return True
    fingerprint, weights = one.tags.get("fingerprint"), one.tags.get("weights_sha256")
    return bool(
        fingerprint is not None
        and run.data.tags.get("fingerprint") == fingerprint
        and run.info.status == "FINISHED"
        and run.data.tags.get("weights_sha256", weights) == weights
    )
