"""The output folder of a finished deployment -> one MLflow run: metrics by round, and which silos
answered."""

from __future__ import annotations

import csv
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from fedml_noniid.pipelines.experiment import counts, results
from fedml_noniid.pipelines.tracking.store import Store
from fedml_noniid.pipelines.tracking.sync import Finished, hashed, record, recorded
from fedml_noniid.plugins.core.errors import UserError

# Functions that need these import them: they import torch, which takes seconds.
if TYPE_CHECKING:
    from fedml_noniid.plugins.silo.settings import Deployment

log = logging.getLogger(__name__)
FILES = ROUNDS, ABSENT, MODEL = (
    "rounds.csv",
    "absent.csv",
    "model.safetensors",
)  # as plugins/silo/results.py has them
MAX_SILO_METRICS = 50  # silos that have a metric each
PASSED = (
    "attack_args",
    "defense_args",
    "dp_args",
)  # FedML's sections; of the first two we do not know the keys


def read(folder: Path, config: Path) -> Finished:
    """The deployment whose server wrote `folder`.

    UserError if it is not over, or if a file can't be read.
    """
    from fedml_noniid.plugins.engines import absences
    from fedml_noniid.plugins.silo import settings

    deployment, rows = settings.read(config), _rounds(folder / ROUNDS)
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
    answers = _answers(deployment, missing, len(rows))
    # Round 0, if it is there, is last: it has no seconds.
    rows = [row | answers.pop(int(row["round"])) for row in rows] + list(answers.values())
    last, params = max(rows, key=lambda row: row["round"]), _params(deployment)
    final = {key: last[key] for key in results.FINAL if key in last}
    traffic = [row.get("bytes_up", 0) + row.get("bytes_down", 0) for row in rows]
    tags = {key: str(params[key]) for key in ("recipe", "composition", "seed")}
    tags |= {"kind": "deployment", "weights_sha256": _weights(files[-1])}
    # A run that is done again has other seconds, and so another name.
    name = f"deployment/{tags['recipe']}-{tags['seed']}-{hashed('', files[:1])[:8]}"
    final |= {"traffic_mib": sum(traffic) / counts.MIB}
    digest = hashed("", [config, *files])
    return Finished(name, digest, params, tags, rows, final, files, files[-1])


def sync_stage(store: Store, root: Path, experiment: str) -> list[str]:
    """Makes the run of stage deploy a run, if its files are still those of deploy/result.json.

    Returns its name.
    """
    folder, result = root / "deploy" / "stage", root / "deploy" / "result.json"
    config, files = folder / "fedml_config.yaml", [folder / "run" / name for name in FILES]
    if not all(path.is_file() for path in (result, config, *files)):
        return []
    about = results.record(result)
    if hashed("", [config, *files]) in recorded(store, experiment):
        return []  # without torch, whose import takes seconds
    try:
        if _weights(files[-1]) != about.get("deployed_sha256"):
            return []  # DVC took deploy/result.json from another run
        found = read(folder / "run", config)
    except UserError as error:  # left by other code; the stage writes new files when it runs next
        log.info("MLflow: without the deployment (%s)", error)
        return []
    named = {key: str(about.get(key)) for key in ("scenario", "recipe", "seed")}
    found = replace(
        found,
        name=f"deployment/{'-'.join(named.values())}",
        params={**found.params, **named},
        tags={**found.tags, **named, "simulated_sha256": str(about.get("simulated_sha256"))},
    )
    return record(store, experiment, [found], root)


def _rounds(path: Path) -> list[dict[str, float]]:
    """The lines of rounds.csv. An empty cell is NaN: nothing was measured."""
    try:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file, restval="(missing)", restkey="(too many cells)"))
        rows = [{name: float(cell or "nan") for name, cell in line.items()} for line in lines]
        if any(
            row["round"] != t or not row.keys() >= {*results.COLUMNS}
            for t, row in enumerate(rows, start=1)
        ):
            raise ValueError(
                f"allowed: rounds from 1 up, columns {', '.join(results.COLUMNS)}, ..."
            )
    except OSError as error:
        raise UserError(
            f"{path}: can't be read ({error.strerror}); a server writes it after its first round"
        ) from None
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is not a server's table of rounds ({error})") from None
    return rows


def _answers(
    deployment: Deployment, missing: Mapping[tuple[int, int], Collection[int]], rounds: int
) -> dict[int, dict[str, float]]:
    """How many silos were asked and answered in each round, and which.

    Round 0 is there if somebody missed it.
    """
    from fedml_noniid.plugins.engines.cohort import draw_cohort

    silos, seed = deployment.silos, deployment.common_args.random_seed
    found = {}
    for t in range(rounds + 1):
        late = {client for (at, _), clients in missing.items() if at == t for client in clients}
        if t == 0 and not late:
            continue
        # Exchanges before the first round and after the last one ask everybody.
        asked = {*draw_cohort(seed, t, silos, deployment.cohort if t else silos)} | late
        row = {"round": t, "silos_asked": len(asked), "silos_missing": len(late)}
        row["silos_answered"] = len(asked - late)
        if silos <= MAX_SILO_METRICS:
            row |= {f"answered.silo_{k}": k not in late for k in sorted(asked)}
        found[t] = {key: float(value) for key, value in row.items()}
    return found


def _params(deployment: Deployment) -> dict[str, object]:
    """The configuration, flat, with the simulation's names where it has them.

    No path, no address.
    """
    from fedml_noniid.plugins.engines.run_settings import RunSettings

    train, model = deployment.train_args, deployment.model_args
    found: dict[str, object] = {
        "recipe": train.recipe,
        "composition": train.recipe,
        "silos": deployment.silos,
        "seed": deployment.common_args.random_seed,
        "cohort": deployment.cohort,
        "train.rounds": train.rounds,
        "train.threads": deployment.device_args.threads,
        "train.model": model.model,
        "train.model_options": model.model_options,
    }
    local = train.model_dump(include=set(RunSettings.model_fields))
    others = deployment.model_dump(include={"comm_args", *PASSED}, exclude_none=True)
    # A path, an address or a password is text, and no word.
    plain = {
        section: {
            key: value
            for key, value in values.items()
            if isinstance(value, int | float) or (section in PASSED and str(value).isidentifier())
        }
        for section, values in others.items()
    }
    found |= plain.pop("comm_args")
    for section, values in {"train": local, **train.settings, **plain}.items():
        found |= {f"{section}.{key}": value for key, value in values.items()}
    return found


def _weights(path: Path) -> str:
    """The SHA-256 that the server wrote into its model."""
    try:
        with safe_open(path, framework="numpy") as file:
            return str((file.metadata() or {})["weights_sha256"])
    except (SafetensorError, OSError, KeyError) as error:
        raise UserError(f"{path}: is not the model of a deployment ({error})") from None
