"""Registered models: a run's final model with its code, so that `mlflow.pyfunc.load_model` can load
it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.tracking.runs import NAME, cut

PLUGINS = Path(__file__).parents[2] / "plugins"
CODE = ("__init__.py", "core", "data", "models")  # the parts of plugins/ that a network needs
REQUIRED = [
    f"{name}=={version(name).partition('+')[0]}"
    for name in ("mlflow", "numpy", "safetensors", "torch")
]
TAGS = ("fingerprint", "data_hash", "weights_sha256", "git_commit")


def register(client: Any, run: Any, experiment: str, result: ItemResult, root: Path) -> None:
    """Registers the model once, as a version of `<experiment>.<scenario>.<recipe>` with the alias
    `seed-<seed>`."""
    weights, network = root / "runs" / result.key / "model.safetensors", _network(result, root)
    if (
        network is None
        or not weights.is_file()
        or client.search_model_versions(f"run_id = '{run.info.run_id}'")
    ):
        return
    if "own_models" in result.tags:  # no one model was measured
        return
    import numpy as np
    from mlflow import pyfunc
    from mlflow.entities import LoggedModelOutput
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec
    from mlflow.utils import environment

    run_id, seed, parts = (
        run.info.run_id,
        str(result.seed),
        (experiment, result.scenario, result.recipe),
    )
    name = cut(re.sub("[/:]", "_", ".".join(parts)), NAME)
    tags = {"recipe": result.recipe, "scenario": result.scenario, "seed": seed, "item": result.key}
    tags |= {key: result.tags[key] for key in TAGS if key in result.tags}
    inputs = TensorSpec(np.dtype(network.pop("dtype")), (-1, *network["shape"]))
    outputs = TensorSpec(np.dtype("float32"), (-1, len(network["classes"])))
    signature = ModelSignature(Schema([inputs]), Schema([outputs]))
    model = client.create_logged_model(
        run.info.experiment_id, re.sub(r"[/:.%\"']", "-", result.key), run_id, tags
    )
    with tempfile.TemporaryDirectory() as folder:
        data, files = Path(folder) / "data", Path(folder) / "files"
        data.mkdir()
        (data / "network.json").write_text(json.dumps(network))
        shutil.copy(weights, data)
        code, about = (
            Path(__file__).with_name("served.py"),
            Model(run_id=run_id, model_id=model.model_id, signature=signature),
        )
        # The versions in REQUIRED are those that are installed. MLflow's check of that takes a
        # second.
        with mock.patch.object(environment, "warn_dependency_requirement_mismatches", create=True):
            pyfunc.save_model(
                files,
                "served",
                str(data),
                [str(code)],
                mlflow_model=about,
                pip_requirements=REQUIRED,
            )
        package = files / "code" / "fedml_noniid"
        shutil.copytree(PLUGINS, package / "plugins", ignore=_others)
        (package / "__init__.py").touch()
        client.log_model_artifacts(model.model_id, str(files))
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, 0)])
    try:
        client.create_registered_model(name)
    except MlflowException:
        client.get_registered_model(name)  # it exists already
    made = client.create_model_version(
        name, model.artifact_location, run_id, tags, model_id=model.model_id
    )
    client.set_registered_model_alias(name, f"seed-{seed}", made.version)


def _network(result: ItemResult, root: Path) -> dict[str, Any] | None:
    """The description from which `served` builds the network.

    None if the training data set is not on disk.
    """
    path = root / "data" / f"{result.params.get('data.name')}.safetensors"
    data = _data(path, path.stat().st_mtime_ns) if path.is_file() else None
    if data is None or data.checksum != result.tags.get("data_hash"):
        return None
    return {
        "model": result.params["train.model"],
        "options": result.params["train.model_options"],
        "shape": data.train_x.shape[1:],
        "dtype": "float32" if data.std else "int32",
        "classes": data.classes,
        "mean": data.mean,
        "std": data.std,
    }


@lru_cache(maxsize=1)
def _data(path: Path, changed: int) -> Any:
    """The data set, read once for all models.

    `changed` is the file's time of change: a changed file is read again.
    """
    from fedml_noniid.plugins.data.dataset import Dataset

    return Dataset.read(path)


def _others(folder: str, names: list[str]) -> list[str]:
    """The parts of plugins/ that a network does not need."""
    return [
        name
        for name in names
        if name == "__pycache__" or (folder == str(PLUGINS) and name not in CODE)
    ]
