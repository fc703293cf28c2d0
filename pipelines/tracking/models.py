"""Registered models: a run's final model with its code, so that `mlflow.pyfunc.load_model` can load
it."""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.experiment.workspace import DATASET
from fedml_noniid.pipelines.tracking.finished import MODEL
from fedml_noniid.pipelines.tracking.runs import MAX_NAME

log = logging.getLogger(__name__)
PACKAGE = Path(__file__).parents[2]
# The parts of fedml_noniid/ that a network needs.
CODE = ("core", "data", "models")  # beside own_code.py
REQUIRED = [
    f"{name}=={version(name).partition('+')[0]}"
    for name in ("mlflow", "numpy", "safetensors", "torch")
]
FOLDER = "model"  # among the artifacts of a run
ALIAS = "serve"
TAGS = ("fingerprint", "data_hash", "weights_sha256", "git_commit")


def register(
    client: Any, ids: Mapping[str, str], experiment: str, items: Sequence[ItemResult], root: Path
) -> None:
    """Registers the model of a method's first seed once, as a version of
    `<experiment>.<scenario>.<recipe>` with the alias ALIAS. `ids`: of runs, by item.

    The best seed would be chosen by the test set.
    """
    result = min(items, key=lambda item: item.seed)
    run_id, network = ids[result.key], _network(result, root)
    if network is None or client.search_model_versions(f"run_id = '{run_id}'"):
        return
    import numpy as np
    from mlflow import pyfunc
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec
    from mlflow.utils import environment

    inputs = TensorSpec(np.dtype(network.pop("dtype")), (-1, *network["shape"]))
    outputs = TensorSpec(np.dtype("float32"), (-1, len(network["classes"])))
    signature = ModelSignature(Schema([inputs]), Schema([outputs]))
    with tempfile.TemporaryDirectory() as folder:
        data, files = Path(folder) / "data", Path(folder) / "files"
        data.mkdir()
        (data / "network.json").write_text(json.dumps(network))
        shutil.copy(root / "runs" / result.key / MODEL, data)
        # The versions in REQUIRED are those that are installed. MLflow's check of that takes a
        # second.
        with mock.patch.object(environment, "warn_dependency_requirement_mismatches", create=True):
            pyfunc.save_model(
                files,
                "served",
                str(data),
                [str(Path(__file__).with_name("served.py"))],
                mlflow_model=Model(run_id=run_id, signature=signature),
                pip_requirements=REQUIRED,
            )
        package = files / "code" / "fedml_noniid"
        for name in CODE:
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(PACKAGE / name, package / name, ignore=ignore)
        shutil.copy(PACKAGE / "own_code.py", package)
        (package / "__init__.py").touch()
        client.log_artifacts(run_id, str(files), FOLDER)
    name = re.sub("[/:]", "_", f"{experiment}.{result.scenario}.{result.recipe}")[:MAX_NAME]
    try:
        client.create_registered_model(name)
    except MlflowException:
        client.get_registered_model(name)  # it exists already
    source = f"{client.get_run(run_id).info.artifact_uri}/{FOLDER}"
    tags = {key: result.tags[key] for key in TAGS if key in result.tags}
    tags |= {"recipe": result.recipe, "scenario": result.scenario, "item": result.key}
    made = client.create_model_version(name, source, run_id, tags)
    client.set_registered_model_alias(name, ALIAS, made.version)


def log_confusion(client: Any, run_id: str, items: Sequence[ItemResult]) -> None:
    """Draws the confusion matrix of all seeds together into the run of their method."""
    paths = [path for item in items for path in item.files if path.name == "confusion.csv"]
    if not paths:
        return
    # Imported here: they take a second.
    import pandas as pd

    from fedml_noniid.pipelines.reporting.heatmap import confusion

    read = partial(pd.read_csv, index_col=0, dtype={"class": str}, keep_default_na=False)
    tables = [read(path) for path in paths]
    counts, classes = sum(table.to_numpy() for table in tables), [*tables[0].index]
    title = f"{items[0].recipe}, {items[0].scenario}: {len(tables)} seeds"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "confusion.png"
        path.write_bytes(confusion(counts, classes, title))
        client.log_artifact(run_id, str(path))


def _network(result: ItemResult, root: Path) -> dict[str, Any] | None:
    """The description from which `served` builds the network.

    None if no one model was measured, if the training data set is not on disk, or if the network is
    a user's own: its package may be missing where the model is served.
    """
    from fedml_noniid.losses import MultiLabel, loss_of
    from fedml_noniid.models import is_own

    model = str(result.params.get("train.model"))
    path = root / "partitions" / f"{result.scenario}-{result.seed}" / DATASET
    if not path.is_file():
        path = root / "data" / f"{result.params.get('data.name')}.safetensors"
    is_there = path.is_file() and (root / "runs" / result.key / MODEL).is_file()
    if "own_models" in result.tags or is_own(model) or not is_there:
        return None
    data = _data(path, path.stat().st_mtime_ns)
    if data.checksum != result.tags.get("data_hash"):
        return None
    if result.params.get("train.save") == "trained":
        log.warning("%s is not registered: train.save leaves out what is frozen", result.key)
        return None
    loss = loss_of(result.params.get("train.loss", "cross_entropy"))
    labels = "sigmoid" if isinstance(loss, MultiLabel) else ""
    return {
        "model": model,
        "options": result.params["train.model_options"],
        "shape": data.train_x.shape[1:],
        "dtype": data.dtype,
        "classes": data.classes,
        # What a served model makes of the outputs: a function of torch, or nothing.
        "answers": "softmax" if loss.classes else labels,
        "mean": data.mean,
        "std": data.std,
    }


@lru_cache(maxsize=1)
def _data(path: Path, changed: int) -> Any:
    """The data set, read once for all models.

    `changed` is the file's time of change: a changed file is read again.
    """
    from fedml_noniid.data.dataset import Dataset

    return Dataset.read(path)
