"""One MLflow run, live or made again from files: parameters, tags, data set, rounds, files.

Nothing is logged twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedml_noniid.pipelines.tracking.store import Store

ACTIVE, ALL = 1, 3  # mlflow.entities.ViewType: without and with what is in MLflow's trash
# Limits of one call.
MAX_METRICS, MAX_PARAMS, MAX_RUNS = 1000, 100, 50000
# Limits in characters. A server allows 5,000 or 8,000 for tags, depending on its version.
NAME, PARAM, TAG, EXPERIMENT = 250, 6000, 5000, 500
SHOWN = {
    "git_commit": "mlflow.source.git.commit",
    "stage": "mlflow.source.name",
}  # the names that MLflow's pages use
NOTE = "mlflow.note.content"  # tag: a run's description on MLflow's pages
NOTHING: Mapping[str, float] = {}
FOLDERS = {
    "partitions": "partition",
    "evaluation": "evaluation",
}  # stage folder -> folder among a run's artifacts


class Run:
    """One MLflow run."""

    def __init__(self, client: Any, run: Any) -> None:
        """`run`: an mlflow.entities.Run."""
        self.run_id: str = run.info.run_id
        self._client, self._run = client, run
        self._summary: dict[str, float] = dict(run.data.metrics)
        points = [
            point
            for name in run.data.metrics
            for point in client.get_metric_history(self.run_id, name)
        ]
        self._logged = {(point.key, point.step) for point in points}
        self._clock: int = max((point.timestamp for point in points), default=run.info.start_time)

    def describe(self, params: Mapping[str, object], tags: Mapping[str, str]) -> None:
        """Logs the parameters that the run lacks, the tags, and the data set as an input."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

        named = {SHOWN[name]: value for name, value in tags.items() if name in SHOWN} | dict(tags)
        self._client.log_batch(
            self.run_id, tags=[RunTag(_name(key), cut(str(v), TAG)) for key, v in named.items()]
        )
        wanted = {_name(key): cut(str(value), PARAM) for key, value in params.items()}
        fresh = [
            Param(key, value) for key, value in wanted.items() if key not in self._run.data.params
        ]
        for i in range(0, len(fresh), MAX_PARAMS):
            self._client.log_batch(self.run_id, params=fresh[i : i + MAX_PARAMS])
        if "data.name" in params and "data_hash" in tags:
            name = str(params["data.name"])
            source = json.dumps({"uri": f"data/{name}.safetensors"})
            data = Dataset(name, tags["data_hash"][:36], "local", source)
            self._client.log_inputs(
                self.run_id, [DatasetInput(data, [InputTag("mlflow.data.context", "train")])]
            )

    def log_rounds(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Logs one metric per column and round.

        Numbers that are not finite were not measured and are left out.

        The time axis of MLflow's pages shows a row's `seconds`. Without them it shows the time of
        this call.
        """
        from mlflow.entities import Metric

        metrics = []
        for row in rows:
            step = int(row["round"])
            finite = {
                _name(key): value
                for key, value in row.items()
                if key != "round" and math.isfinite(value)
            }
            fresh = {key: value for key, value in finite.items() if (key, step) not in self._logged}
            if fresh:
                self._clock = (
                    self._clock + round(1000 * row["seconds"]) if "seconds" in finite else _now()
                )
            metrics += [Metric(key, value, self._clock, step) for key, value in fresh.items()]
        for i in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[i : i + MAX_METRICS])
        self._logged |= {(metric.key, metric.step) for metric in metrics}

    def finish(
        self,
        final: Mapping[str, float] = NOTHING,
        files: Iterable[Path] = (),
        ended: int | None = None,
    ) -> None:
        """Logs the final numbers as `final/<name>`, copies the files, marks the run as finished.

        `ended`: the end of the run in milliseconds, now by default.
        """
        from mlflow.entities import Metric

        named = {
            _name(f"final/{key}"): value for key, value in final.items() if math.isfinite(value)
        }
        changed = {key: value for key, value in named.items() if self._summary.get(key) != value}
        self._client.log_batch(
            self.run_id, metrics=[Metric(key, v, _now(), 0) for key, v in changed.items()]
        )
        for path in files:
            self._client.log_artifact(self.run_id, str(path), FOLDERS.get(path.parent.parent.name))
        self._client.set_terminated(self.run_id, "FINISHED", ended)

    def fail(self, reason: str) -> None:
        """Marks the run as failed, with the reason as its description.

        `start` with the same fingerprint resumes it.
        """
        self._client.set_tag(self.run_id, NOTE, cut(reason, TAG))
        self._client.set_terminated(self.run_id, "FAILED")


def start(
    store: Store,
    experiment: str,
    name: str,
    params: Mapping[str, object],
    tags: Mapping[str, str],
    began: int | None = None,
) -> Run:
    """The run `name` to log into: an unfinished run with the same tag `fingerprint` (killed or
    failed), or a new one.

    `began`: the beginning of a new run in milliseconds, now by default.
    """
    client = store.client()
    experiment_id, run = of_name(store, client, experiment), None
    if "fingerprint" in tags:
        same = f"tags.fingerprint = '{tags['fingerprint']}' AND attributes.status != 'FINISHED'"
        run = next(iter(client.search_runs([experiment_id], same)), None)
    if run is None:
        # Its item is known from the start: a run that breaks off here is replaced by the next sync.
        run = client.create_run(experiment_id, start_time=began, tags={"item": name}, run_name=name)
    elif run.info.status != "RUNNING":
        client.update_run(run.info.run_id, "RUNNING")
        client.set_tag(run.info.run_id, NOTE, "")
    log = Run(client, run)
    with store.lock("describe"):  # two processes can't add the same data set at once
        log.describe(params, {"item": name} | dict(tags))
    return log


def of_name(store: Store, client: Any, experiment: str) -> str:
    """The id of an experiment.

    If needed, the experiment is created or restored from MLflow's trash.
    """
    from mlflow.exceptions import MlflowException

    name = cut(experiment, EXPERIMENT)
    found = client.get_experiment_by_name(name)
    if found is None:
        folder = (
            store.folder / "artifacts" / f"{re.sub('[^A-Za-z0-9]+', '-', name)[:50]}-{_hash(name)}"
        )
        try:
            return str(client.create_experiment(name, None if store.uri else folder.as_uri()))
        except MlflowException:  # another process created it first
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def search(client: Any, experiment_id: str, view: int = ACTIVE) -> list[Any]:
    """The runs of an experiment."""
    found: list[Any] = client.search_runs([experiment_id], run_view_type=view, max_results=MAX_RUNS)
    return found


def cut(text: str, limit: int) -> str:
    """The text.

    If it is too long for MLflow, it is cut. A hash at its end keeps different texts different.
    """
    return text if len(text) <= limit else f"{text[: limit - 9]}…{_hash(text)}"


def _name(name: str) -> str:
    """The name with only the characters that MLflow allows for parameters, tags and metrics."""
    return re.sub(r"[^\w./ -]", "_", cut(name, NAME))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _now() -> int:
    """The time in milliseconds, MLflow's unit."""
    return round(1000 * time.time())
