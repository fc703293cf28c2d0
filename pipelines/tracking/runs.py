"""One MLflow run, live or made from files: parameters, tags, data set, rounds, files."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedml_noniid.pipelines.experiment.results import numbers
from fedml_noniid.pipelines.tracking.store import Store

MAX_METRICS, MAX_PARAMS, MAX_RUNS = 1000, 100, 50000  # limits of one call
MAX_NAME, MAX_TAG = 250, 5000  # characters
SHOWN = {"git_commit": "mlflow.source.git.commit"}  # the names that MLflow's pages use
NOTE = "mlflow.note.content"  # tag: a run's description on MLflow's pages
FOLDERS = {
    "partitions": "partition",
    "evaluation": "evaluation",
}  # stage folder -> folder among a run's artifacts
OWNER = "owner"  # tag in a store that is not embedded: `Store.owner`


class Run:
    """One MLflow run."""

    def __init__(self, client: Any, run: Any) -> None:
        """`run`: an mlflow.entities.Run."""
        self.run_id: str = run.info.run_id
        self._client = client
        self._clock: int = run.info.start_time  # milliseconds
        self._n_rows = 0  # rounds that were logged

    def tag(self, tags: Mapping[str, str]) -> None:
        """As the function `tag`, of this run."""
        named = {SHOWN[name]: value for name, value in tags.items() if name in SHOWN}
        tag(self._client, self.run_id, {**named, **tags})

    def describe(self, params: Mapping[str, object], tags: Mapping[str, str]) -> None:
        """Logs the parameters, the tags, and the data set as an input."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        self.tag(tags)
        every = [Param(_name(key), str(value)) for key, value in params.items()]
        for i in range(0, len(every), MAX_PARAMS):
            self._client.log_batch(self.run_id, params=every[i : i + MAX_PARAMS])
        if "data.name" in params and "data_hash" in tags:
            name = str(params["data.name"])
            source = json.dumps({"uri": f"data/{name}.safetensors"})
            data = Dataset(name, tags["data_hash"][:36], "local", source)
            self._client.log_inputs(
                self.run_id, [DatasetInput(data, [InputTag("mlflow.data.context", "train")])]
            )

    def log_rounds(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Logs one metric per column and round, of the rounds that the last call did not have.

        `rows`: all rounds so far. Numbers that are not finite were not measured and are left out.
        The time axis of MLflow's pages is the sum of the rounds' `seconds`.
        """
        from mlflow.entities import Metric

        metrics = []
        for row in rows[self._n_rows :]:
            finite = numbers(row)
            step = int(finite.pop("round"))
            # The virtual clock is an axis of MLflow's pages where it is the step.
            virtual_ms = round(1000 * finite.get("clock_s", 0.0))
            metrics += [
                Metric(_name(f"by_virtual_ms/{key}"), value, self._clock, virtual_ms)
                for key, value in finite.items()
                if virtual_ms and key.startswith("test_")
            ]
            self._clock += round(1000 * finite.get("seconds", 0.0))
            metrics += [
                Metric(_name(key), value, self._clock, step) for key, value in finite.items()
            ]
        for i in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[i : i + MAX_METRICS])
        self._n_rows = len(rows)

    def finish(
        self, final: Mapping[str, float], files: Iterable[Path] = (), ended: int | None = None
    ) -> None:
        """Logs the final numbers as `final/<name>`, copies the files, marks the run as finished.

        `ended`: the end of the run in milliseconds, now by default.
        """
        from mlflow.entities import Metric

        now = round(1000 * time.time())  # the latest value of a metric is the one that MLflow shows
        metrics = [
            Metric(_name(f"final/{key}"), value, now, 0) for key, value in numbers(final).items()
        ]
        self._client.log_batch(self.run_id, metrics=metrics)
        for path in files:
            self._client.log_artifact(self.run_id, str(path), FOLDERS.get(path.parent.parent.name))
        self._client.set_terminated(self.run_id, "FINISHED", ended)

    def fail(self, reason: str) -> None:
        """Marks the run as failed, with the reason as its description."""
        self._client.set_tag(self.run_id, NOTE, reason[:MAX_TAG])
        self._client.set_terminated(self.run_id, "FAILED")


def start(
    store: Store,
    experiment: str,
    name: str,
    params: Mapping[str, object],
    tags: Mapping[str, str],
    began: float | None = None,
) -> Run:
    """A new run with parameters, tags and data set.

    `began`: its beginning in seconds since 1970, now by default.
    """
    client = store.client()
    # Its item is known from the start: a run that breaks off here is replaced by the next sync.
    run = client.create_run(
        experiment_id(store, client, experiment),
        round(1000 * (began or time.time())),
        {"item": name} | ({OWNER: store.owner} if store.uri else {}),
        run_name=name,
    )
    log = Run(client, run)
    with store.lock("describe"):  # two processes can't add the same data set at once
        log.describe(params, tags)
    return log


def experiment_id(store: Store, client: Any, experiment: str) -> str:
    """The id of an experiment.

    If needed, the experiment is created or restored from MLflow's trash.
    """
    from mlflow.exceptions import MlflowException

    known = client.get_experiment_by_name(experiment)
    if known is None:
        hashed = hashlib.sha256(experiment.encode()).hexdigest()[:8]
        name = f"{re.sub('[^A-Za-z0-9]+', '-', experiment)[:50]}-{hashed}"
        folder = None if store.uri else (store.folder / "artifacts" / name).as_uri()
        try:
            return str(client.create_experiment(experiment, folder))
        except MlflowException:  # another process created it first
            known = client.get_experiment_by_name(experiment)
            if known is None:
                raise
    if known.lifecycle_stage == "deleted":
        client.restore_experiment(known.experiment_id)
    return str(known.experiment_id)


def tag(client: Any, run_id: str, tags: Mapping[str, str]) -> None:
    """Sets tags of a run in one call."""
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(_name(key), str(v)[:MAX_TAG]) for key, v in tags.items()])


def search(client: Any, experiment_id: str) -> list[Any]:
    """The runs of an experiment, without those in MLflow's trash."""
    runs: list[Any] = client.search_runs([experiment_id], max_results=MAX_RUNS)
    return runs


def _name(name: str) -> str:
    """The name with only the characters that MLflow allows for parameters, tags and metrics."""
    return re.sub(r"[^\w./ -]", "_", name)[:MAX_NAME]
