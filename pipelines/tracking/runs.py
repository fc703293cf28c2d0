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

MAX_RUNS = 50000  # of one search
MAX_NAME = 250  # characters
SHOWN = {"git_commit": "mlflow.source.git.commit"}  # the names that MLflow's pages use
NOTE = "mlflow.note.content"  # tag: a run's description on MLflow's pages
FOLDERS = {
    "partitions": "partition",
    "evaluation": "evaluation",
}  # stage folder -> folder among a run's artifacts
OWNER = "owner"  # tag in a store that is not embedded: `Store.owner`
Values = Mapping[str, Any]


class Run:
    """One MLflow run."""

    def __init__(self, client: Any, run_id: str, began: int = 0) -> None:
        """`began`: when its first round began, in milliseconds since 1970."""
        self.run_id, self._client, self._clock = run_id, client, began
        self._n_rows = 0  # rounds that were logged

    def log(self, params: Values, tags: Values) -> None:
        """Logs parameters and tags. MLflow cuts values that are too long."""
        from mlflow.entities import Param, RunTag

        named = {SHOWN[name]: value for name, value in tags.items() if name in SHOWN}
        self._client.log_batch(
            self.run_id,
            params=[Param(_name(key), str(value)) for key, value in params.items()],
            tags=[RunTag(_name(key), str(value)) for key, value in {**named, **tags}.items()],
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
        self._client.log_batch(self.run_id, metrics=metrics)
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
        self.log({}, {NOTE: reason})
        self._client.set_terminated(self.run_id, "FAILED")


def start(
    store: Store,
    experiment: str,
    name: str,
    params: Values,
    tags: Values,
    began: float | None = None,
) -> Run:
    """A new run with parameters, tags and the data set as an input.

    `began`: its beginning in seconds since 1970, now by default.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    client = store.client()
    # Its item is known from the start: a run that breaks off here is replaced by the next sync.
    milliseconds = round(1000 * (began or time.time()))
    known = {"item": name} | ({OWNER: store.owner} if store.uri else {})
    run = client.create_run(
        experiment_id(store, client, experiment), milliseconds, known, run_name=name
    )
    log = Run(client, run.info.run_id, milliseconds)
    log.log(params, tags)
    if "data.name" in params and "data_hash" in tags:
        source = json.dumps({"uri": f"data/{params['data.name']}.safetensors"})
        data = Dataset(str(params["data.name"]), tags["data_hash"][:36], "local", source)
        inputs = [DatasetInput(data, [InputTag("mlflow.data.context", "train")])]
        with store.lock("data set"):  # two processes can't add the same one at once
            client.log_inputs(log.run_id, inputs)
    return log


def experiment_id(store: Store, client: Any, experiment: str) -> str:
    """The id of an experiment.

    If needed, the experiment is created or restored from MLflow's trash.
    """
    with store.lock("experiment"):  # two processes can't create it at once
        known = client.get_experiment_by_name(experiment)
        if known is None:
            hashed = hashlib.sha256(experiment.encode()).hexdigest()[:8]
            name = f"{re.sub('[^A-Za-z0-9]+', '-', experiment)[:50]}-{hashed}"
            folder = None if store.uri else (store.folder / "artifacts" / name).as_uri()
            return str(client.create_experiment(experiment, folder))
    if known.lifecycle_stage == "deleted":
        client.restore_experiment(known.experiment_id)
    return str(known.experiment_id)


def search(client: Any, experiment_id: str) -> list[Any]:
    """The runs of an experiment, without those in MLflow's trash."""
    runs: list[Any] = client.search_runs([experiment_id], max_results=MAX_RUNS)
    return runs


def _name(name: str) -> str:
    """The name with only the characters that MLflow allows for parameters, tags and metrics."""
    return re.sub(r"[^\w./ -]", "_", name)[:MAX_NAME]
