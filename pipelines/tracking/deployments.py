"""The output folder of a finished deployment -> one MLflow run: metrics by round, and how many
silos were missing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from fedml_noniid.core.errors import UserError
from fedml_noniid.metrics import main_of, metric_of
from fedml_noniid.pipelines.experiment import counts, results
from fedml_noniid.pipelines.tracking.finished import (
    KIND,
    TRAFFIC,
    Finished,
    hashed,
    shown_name,
    shown_value,
)

# Functions that need it import it: it imports torch, which takes seconds.
if TYPE_CHECKING:
    from fedml_noniid.deploy.settings import Deployment

FILES = ROUNDS, ABSENT, MODEL = (
    "rounds.csv",
    "absent.csv",
    "model.safetensors",
)  # as fedml_noniid/deploy/results.py has them


def read(folder: Path, config: Path) -> Finished:
    """The deployment whose server wrote `folder`.

    UserError if it is not over, or if a file can't be read.
    """
    from fedml_noniid.engines import absences
    from fedml_noniid.governance.policy import read_agreed

    deployment, rows = read_agreed(config).deployment, results.rows(folder / ROUNDS)
    rounds, files = deployment.train_args.rounds, [folder / name for name in FILES]
    if len(rows) > rounds:
        raise UserError(
            f"{files[0]}: has {len(rows)} rounds, {config} says {rounds}; --config needs this "
            "run's file"
        )
    may_be_short = bool(deployment.train_args.callbacks)  # one of them may have stopped the run
    if not files[-1].exists() or (len(rows) < rounds and not may_be_short):
        raise UserError(
            f"{folder}: the run is not over ({len(rows)} of {rounds} rounds); it can be logged "
            f"once it has {MODEL}"
        )
    missing = absences.read(folder / ABSENT, rounds, deployment.silos)
    late = [
        {client for (t, _), clients in missing.items() if t == row["round"] for client in clients}
        for row in rows
    ]
    rows = tuple(
        row | {"silos_missing": float(len(silos))} for row, silos in zip(rows, late, strict=True)
    )
    params = _params(deployment)
    final = {key: rows[-1][key] for key in results.finals(rows[-1])}
    main = main_of(rows[-1])
    metric, score = metric_of(main), final[f"test_{main}"]
    if math.isfinite(score):
        final[shown_name(main, metric)] = shown_value(score, metric)
    final["traffic_mib"] = final[TRAFFIC] = (
        sum(row["bytes_up"] + row["bytes_down"] for row in rows) / counts.MIB
    )
    tags = {key: str(params[key]) for key in ("recipe", "composition", "seed")}
    tags |= {KIND: "deployment", "weights_sha256": _weights(files[-1])}
    # A run that is done again has other seconds, and so another name.
    name = f"deployment/{tags['recipe']}-{tags['seed']}-{hashed('', files[:1])[:8]}"
    digest = hashed("", [config, *files])
    return Finished(name, digest, params, tags, rows, final, files, files[-1])


def _params(deployment: Deployment) -> dict[str, object]:
    """The configuration, flat, with the simulation's names where it has them.

    No path, no address.
    """
    from fedml_noniid.engines.run_settings import RunSettings
    from fedml_noniid.plugins import registry

    train, model = deployment.train_args, deployment.model_args
    params: dict[str, object] = {
        "recipe": train.recipe,
        "composition": train.recipe,
        "silos": deployment.silos,
        "seed": deployment.common_args.random_seed,
        "cohort": deployment.train_args.per_round,
        "train.rounds": train.rounds,
        "train.threads": deployment.device_args.threads,
    }
    params |= {f"train.{key}": value for key, value in model.model_dump().items()}
    sections = {"train": train.model_dump(include=set(RunSettings.model_fields))}
    sections |= registry.resolved(train.recipe, train.settings)
    # A path, an address or a password is text.
    for name, values in deployment.model_dump(include={"comm_args", "dp_args"}).items():
        sections[name] = {
            key: value for key, value in values.items() if isinstance(value, int | float)
        }
    for section, values in sections.items():
        params |= {f"{section}.{key}": value for key, value in values.items()}
    return params


def _weights(path: Path) -> str:
    """The SHA-256 that the server wrote into its model."""
    try:
        with safe_open(path, framework="numpy") as file:
            return str((file.metadata() or {})["weights_sha256"])
    except (SafetensorError, OSError, KeyError) as error:
        raise UserError(f"{path}: is not the model of a deployment ({error})") from None
