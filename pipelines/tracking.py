"""MLflow: one flat run per train item, and one per paper's report, in an embedded SQLite store under `mlruns/`.

The only importer of mlflow, always lazily: the import takes seconds, and nobody who doesn't track should pay for it.

    python -m pipelines.tracking sync              # makes every finished train item present, exactly once
    python -m pipelines.tracking ui [--port 5000]  # the same, then opens MLflow's pages and prints the link

`mlruns/` may be moved with the repository, or lost: MLflow stores absolute paths, which are rewritten when the
repository has moved, and `sync` rebuilds a lost database from the files of the train, evaluate and paper stages.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from pipelines import results, store
from pipelines.results import Result
from plugins.core.errors import UserError

METRICS_PER_CALL = 1000  # MLflow refuses larger batches
PARAMS_PER_CALL = 100
FOLDERS = {"partitions": "partition", "evaluation": "evaluation"}  # stage folder -> folder among a run's artifacts
REPORTS = "papers"  # experiment with the tables and figures of the papers, a run for each paper and size
SYNCED = "synced_files"  # tag: digest of the files that a run has been completed from
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}


def uri(root: Path) -> str:
    """The tracking URI of the store under `root`. Creates the store once; rewrites its paths if `root` has moved."""
    root = root.resolve()
    if "?" in str(root):
        raise UserError(f"{root}: a folder with '?' in its path can't hold an SQLite store; move it")
    if not store.database(root).exists() or store.moved(root):
        with store.lock(root):
            if not store.database(root).exists():
                _create(root)
            store.relocate(root)
    return f"sqlite:///{store.database(root)}"


class Run:
    """One MLflow run. What it has already is not logged again, so a resumed train item may repeat its rounds."""

    def __init__(self, client: Any, run: Any) -> None:
        """`run` is an mlflow.entities.Run; the rounds that it has already are read from the store."""
        self.run_id: str = run.info.run_id
        self.experiment_id: str = run.info.experiment_id
        self._client = client
        self._summaries: dict[str, float] = dict(run.data.metrics)
        histories = [client.get_metric_history(self.run_id, name) for name in run.data.metrics]
        self._logged = {(point.key, point.step) for history in histories for point in history}
        # The page's time axis shows measured seconds: each round is stamped with the end of the one before it.
        self._clock: int = max((p.timestamp for history in histories for p in history), default=run.info.start_time)

    def log_rounds(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Logs one metric per column and round; values that are not finite were not measured and are left out."""
        metrics = []
        for row in rows:
            step = int(row["round"])
            measured = [name for name, value in row.items() if name != "round" and math.isfinite(value)]
            fresh = [name for name in measured if (name, step) not in self._logged]
            if fresh and "seconds" in measured:
                self._clock += round(1000 * row["seconds"])
            metrics += [(name, row[name], self._clock, step) for name in fresh]
        self._log(metrics)

    def log_summary(self, prefix: str, values: Mapping[str, float]) -> None:
        """Logs numbers without rounds as `<prefix>/<name>`; a changed number replaces the one that was shown."""
        named = {f"{prefix}/{name}": value for name, value in values.items() if math.isfinite(value)}
        changed = {name: value for name, value in named.items() if self._summaries.get(name) != value}
        self._log([(name, value, _now(), 0) for name, value in changed.items()])
        self._summaries |= changed

    def log_files(self, paths: Iterable[Path]) -> None:
        """Copies files (or the files of folders) to the run; partition and evaluation files get a folder each."""
        for path in paths:
            log = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
            stage = path.parent.name if path.is_dir() else path.parent.parent.name
            log(self.run_id, str(path), FOLDERS.get(stage, path.name if path.is_dir() else None))

    def finish(self, *, final: Mapping[str, float], artifacts: Iterable[Path], end_time: int | None = None) -> None:
        """Logs the final numbers and files and marks the run as finished (`end_time` in ms, now by default)."""
        self.log_summary("final", final)
        self.log_files(artifacts)
        self._client.set_terminated(self.run_id, "FINISHED", end_time)

    def fail(self) -> None:
        """Marks the run as failed. `start` with the same fingerprint goes on with it."""
        self._client.set_terminated(self.run_id, "FAILED")

    def _log(self, metrics: Sequence[tuple[str, float, int, int]]) -> None:
        from mlflow.entities import Metric

        for i in range(0, len(metrics), METRICS_PER_CALL):
            batch = metrics[i : i + METRICS_PER_CALL]
            self._client.log_batch(self.run_id, metrics=[Metric(*metric) for metric in batch])
            self._logged.update((name, step) for name, _, _, step in batch)


def start(
    root: Path,
    experiment: str,
    name: str,
    params: Mapping[str, object],
    tags: Mapping[str, str],
    run_id: str | None = None,
) -> Run:
    """The run `name` to log into: a new one, unless an earlier attempt of the same train item can be gone on with.

    That is the run `run_id`, if it still exists with the same parameters, or else an unfinished run with the same
    name and the same tag `fingerprint` (its process was killed before it could note the run's id).
    """
    client = _client(root)
    with store.lock(root):
        experiment_id = _experiment(client, root, experiment)
        run = _attempt(client, experiment_id, name, params, tags, run_id)
        if run is None:
            run = client.create_run(experiment_id, run_name=name)
        else:
            client.update_run(run.info.run_id, status="RUNNING")
        _describe(client, run, params, tags)
    return Run(client, run)


def sync(root: Path) -> list[str]:
    """Makes every finished train item under `root` present exactly once; returns the keys that needed it.

    A train item's run is the one of its run_id.json or, when the database was lost, the one with its fingerprint;
    otherwise a new run is made. A run that was deleted on MLflow's pages comes back as long as its files exist.
    """
    items = results.read(root)
    if not items:
        return []
    uri(root)
    if not _unsynced(root, items):  # the usual case, answered without mlflow's slow import
        return []
    client = _client(root)
    with store.lock(root):
        todo = _unsynced(root, items)
        known = _known_runs(client)
        for item in todo:
            _complete(client, root, item, known)
    return [item.key for item in todo]


def log_report(root: Path, folder: Path) -> bool:
    """Makes the run of a report papers/<paper>/<size>/report hold its files and metrics; whether it needed that.

    The run has no others: what an earlier report had and this one has not goes.
    """
    paper, size = folder.resolve().parts[-3:-1]
    name, metrics = f"{paper}-{size}", folder.parent / "metrics.json"
    files = [*sorted(path for path in folder.rglob("*") if path.is_file()), metrics]
    digest = _digest_of(f"{name} report", files)
    uri(root)
    if digest in store.tag_values(root.resolve(), SYNCED):  # the usual case, as in `sync`
        return False
    client = _client(root)
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    with store.lock(root):
        experiment_id = _experiment(client, root, REPORTS)
        found = (run for run in _search(client, [experiment_id], view=3) if run.info.run_name == name)
        run = next(found, None) or client.create_run(experiment_id, run_name=name)
        if run.info.lifecycle_stage == "deleted":
            client.restore_run(run.info.run_id)
        client.set_tag(run.info.run_id, SYNCED, "no")  # until it is whole
        get_artifact_repository(run.info.artifact_uri).delete_artifacts()
        _describe(client, run, {"paper": paper, "size": size}, {})
        log = Run(client, run)
        log.finish(final=results.numbers(results.record(metrics)), artifacts=[folder, metrics])
        client.set_tag(run.info.run_id, SYNCED, digest)
    return True


def sync_reports(root: Path) -> int:
    """Makes every report under `root` present; returns how many needed it."""
    found = sorted(path.parent for path in root.glob("papers/*/*/report/report.html"))
    return sum(log_report(root, folder) for folder in found if (folder.parent / "metrics.json").is_file())


def comparison_link(root: Path, port: int) -> str:
    """The address of the page that compares the runs of the experiment of params.yaml."""
    params = root / "params.yaml"
    name = (yaml.safe_load(params.read_text()) or {}).get("experiment") if params.exists() else None
    uri(root)
    # Where params.yaml names no experiment that has runs, the last one used is what people look for.
    found = store.experiments(root.resolve())
    number = found.get(str(name), next(iter(found.values()), 0))
    query = "compareRunsMode=CHART&workflowType=machine_learning"
    return f"http://127.0.0.1:{port}/#/experiments/{number}/runs?{query}"


def default_root() -> Path:
    """The repository: DVC runs queued experiments in temporary copies and names the real root in DVC_ROOT."""
    return Path(os.environ.get("DVC_ROOT") or Path(__file__).parents[1])


def _now() -> int:
    """Milliseconds, as MLflow counts time."""
    return round(1000 * time.time())


def _create(root: Path) -> None:
    """Builds the database beside its place and moves it there, so that a kill leaves none or a whole one."""
    os.environ.update(QUIET)
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with tempfile.TemporaryDirectory(dir=root / "mlruns") as folder:
        unfinished = Path(folder) / "mlflow.db"
        build: Any = SqlAlchemyStore  # mlflow's constructor has no types
        build(f"sqlite:///{unfinished}", store.artifacts(root).as_uri()).engine.dispose()
        os.replace(unfinished, store.database(root))


def _client(root: Path) -> Any:
    os.environ.update(QUIET)
    address = uri(root)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        return MlflowClient(tracking_uri=address)
    except MlflowException as error:
        path, reason = store.database(root), str(error).splitlines()[0]
        raise UserError(f"{path}: can't be opened ({reason}); delete it and run `make ui`, which rebuilds it") from None


def _experiment(client: Any, root: Path, name: str) -> str:
    """The id of the experiment, which is made, or taken back out of MLflow's trash, if need be."""
    found = client.get_experiment_by_name(name)
    if found is None:
        folder = store.artifacts(root.resolve()) / quote(name, safe="")
        return str(client.create_experiment(name, artifact_location=folder.as_uri()))
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def _attempt(
    client: Any,
    experiment_id: str,
    name: str,
    params: Mapping[str, object],
    tags: Mapping[str, str],
    run_id: str | None,
) -> Any:
    """An earlier attempt (mlflow.entities.Run) of a train item, or None."""
    runs = _search(client, [experiment_id])
    named = [run for run in runs if run.info.run_id == run_id]
    unfinished = [run for run in runs if run.info.status != "FINISHED" and run.info.run_name == name]
    same = [
        run for run in unfinished if "fingerprint" in tags and run.data.tags.get("fingerprint") == tags["fingerprint"]
    ]
    # MLflow refuses to change a parameter, and a run with other parameters is another train item anyway.
    return next((run for run in named + same if not _differs(run, params)), None)


def _differs(run: Any, params: Mapping[str, object]) -> bool:
    return any(run.data.params.get(name, str(value)) != str(value) for name, value in params.items())


def _describe(client: Any, run: Any, params: Mapping[str, object], tags: Mapping[str, str]) -> None:
    """Adds the parameters and tags that the run lacks, and the commit and stage where MLflow's pages look for them."""
    from mlflow.entities import Param, RunTag

    shown = {"git_commit": "mlflow.source.git.commit", "stage": "mlflow.source.name"}
    tags = {shown[name]: value for name, value in tags.items() if name in shown} | dict(tags)
    fresh = [Param(name, str(value)) for name, value in params.items() if name not in run.data.params]
    changed = [RunTag(name, str(value)) for name, value in tags.items() if run.data.tags.get(name) != str(value)]
    client.log_batch(run.info.run_id, tags=changed)
    for i in range(0, len(fresh), PARAMS_PER_CALL):
        client.log_batch(run.info.run_id, params=fresh[i : i + PARAMS_PER_CALL])


def _search(client: Any, experiments: Sequence[str], view: int = 1) -> list[Any]:
    """All runs of some experiments; `view` 1 is the active ones, 3 the deleted ones too (mlflow.entities.ViewType)."""
    runs: list[Any] = []
    token = None
    while True:
        page = client.search_runs(list(experiments), run_view_type=view, max_results=1000, page_token=token)
        runs, token = runs + list(page), page.token
        if not token:
            return runs


def _known_runs(client: Any) -> dict[tuple[str, ...], Any]:
    """Runs by (run id,) and by (recipe, fingerprint); a finished run wins over an unfinished one."""
    runs = _search(client, [e.experiment_id for e in client.search_experiments(view_type=3)], view=3)
    runs.sort(key=lambda run: (run.info.status == "FINISHED", run.info.start_time))
    by_print = {(run.data.tags.get("recipe", ""), run.data.tags.get("fingerprint", "")): run for run in runs}
    return by_print | {(run.info.run_id,): run for run in runs}


def _unsynced(root: Path, items: Sequence[Result]) -> list[Result]:
    """The items without a run that has been completed from the same files."""
    done = store.tag_values(root.resolve(), SYNCED)
    return [item for item in items if _digest(root, item) not in done]


def _complete(client: Any, root: Path, item: Result, known: dict[tuple[str, ...], Any]) -> None:
    """Makes one train item's run whole."""
    fingerprint = item.tags.get("fingerprint")
    run = known.get((item.run.get("run_id", ""),))
    if run is None and fingerprint:
        run = known.get((item.recipe, fingerprint))
    experiment_id = _experiment(client, root, item.run.get("experiment", "recovered"))
    ended = round(1000 * (root / "runs" / item.key / "run.json").stat().st_mtime)
    if run is None:
        began = ended - round(1000 * sum(item.column("seconds")))
        run = client.create_run(experiment_id, run_name=item.key, start_time=began)
    elif run.info.lifecycle_stage == "deleted":
        client.restore_run(run.info.run_id)
    about = {"scenario": item.scenario, "recipe": item.recipe, "composition": item.composition, "seed": str(item.seed)}
    _describe(client, run, dict(item.params) | about, dict(item.tags) | about)
    log = Run(client, run)
    log.log_rounds(item.rows)
    log.log_summary("final", results.numbers(item.evaluation))
    with tempfile.TemporaryDirectory() as folder:
        log.finish(final=item.final, artifacts=[*item.files, _curve(item, Path(folder))], end_time=ended)
    client.set_tag(log.run_id, SYNCED, _digest(root, item))


def _curve(item: Result, folder: Path) -> Path:
    from pipelines import figures

    path = folder / "accuracy.png"
    path.write_bytes(figures.accuracy_of_run(item))
    return path


def _digest(root: Path, item: Result) -> str:
    """SHA-256 over everything that a run is completed from."""
    return _digest_of(item.key, (root / "runs" / item.key / "run.json", *item.files))


def _digest_of(name: str, files: Iterable[Path]) -> str:
    content = hashlib.sha256()
    for path in files:
        content.update(f"{name} {path.name} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return content.hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.tracking", description="MLflow runs of this project.")
    parser.add_argument("command", choices=["sync", "ui"], help="sync: record finished train items; ui: sync and show")
    parser.add_argument("--port", type=int, help="port of the pages (5000, or a free one if that is taken)")
    parser.add_argument("--root", type=Path, default=default_root(), help="repository (this one)")
    options = parser.parse_args(arguments)
    try:
        changed, reports = sync(options.root), sync_reports(options.root)
        sys.stdout.write(
            f"MLflow: {len(changed)} of {len(results.read(options.root))} finished runs brought up to date\n"
        )
        sys.stdout.write(f"MLflow: {reports} of the papers' reports brought up to date\n" if reports else "")
        sys.stdout.flush()
        if options.command == "ui":
            from pipelines import ui

            ui.serve(options.root, options.port)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
