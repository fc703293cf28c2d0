"""The output folder of a finished deployment -> one MLflow run: metrics by round, and which silos
answered."""

from __future__ import annotations

import csv
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError, safe_open

from fedml_noniid.pipelines.experiment import counts, results
from fedml_noniid.pipelines.tracking import runs, view
from fedml_noniid.pipelines.tracking.store import Store
from fedml_noniid.pipelines.tracking.sync import hashed, once, recorded
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
MOST = 50  # silos that have a metric each
PASSED = (
    "attack_args",
    "defense_args",
    "dp_args",
)  # FedML's sections; of the first two we do not know the keys


class Deployed(NamedTuple):
    """A finished deployment."""

    name: str
    params: dict[str, object]
    tags: dict[str, str]
    rows: list[dict[str, float]]
    files: list[Path]
    digest: str


def read(folder: Path, config: Path) -> Deployed:
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
    answers = _answers(
        deployment, absences.read(folder / ABSENT, rounds, deployment.silos), len(rows)
    )
    # Round 0, if it is there, is last: it has no seconds.
    rows = [row | answers.pop(int(row["round"])) for row in rows] + list(answers.values())
    params = _params(deployment)
    tags = {key: str(params[key]) for key in ("recipe", "composition", "seed")}
    tags |= {"kind": "deployment", "weights_sha256": _weights(files[-1])}
    # A run that is done again has other seconds, and so another name.
    name = f"deployment/{tags['recipe']}-{tags['seed']}-{hashed('', files[:1])[:8]}"
    return Deployed(name, params, tags, rows, files, hashed("", [config, *files]))


def add(store: Store, experiment: str, found: Deployed) -> bool:
    """Makes the deployment a run, and earlier runs of its name go to the trash.

    False if it is there already.
    """
    from fedml_noniid.pipelines.experiment.training import FINAL

    last = max(found.rows, key=lambda row: row["round"])
    final = {key: last[key] for key in FINAL if key in last}
    final["traffic_mib"] = (
        sum(row.get("bytes_up", 0) + row.get("bytes_down", 0) for row in found.rows) / counts.MIB
    )
    ended = round(1000 * found.files[-1].stat().st_mtime)
    took = sum(
        seconds for row in found.rows if math.isfinite(seconds := row.get("seconds", math.nan))
    )

    def write() -> runs.Run:
        run = runs.start(
            store,
            experiment,
            found.name,
            found.params,
            found.tags,
            began=ended - round(1000 * took),
        )
        run.log_rounds(found.rows)
        run.finish(final, found.files, ended)
        return run

    fresh = once(store, experiment, found.name, found.digest, write)
    client = store.client()
    with store.guarded():
        view.prepare(client, runs.of_name(store, client, experiment))
    return fresh


def sync_stage(store: Store, root: Path, experiment: str) -> list[str]:
    """Makes the run of stage deploy a run, if its files are still those of deploy/result.json.

    Returns its name.
    """
    folder, record = root / "deploy" / "stage", root / "deploy" / "result.json"
    config, files = folder / "fedml_config.yaml", [folder / "run" / name for name in FILES]
    if not all(path.is_file() for path in (record, config, *files)):
        return []
    about = results.record(record)
    named = {key: str(about.get(key)) for key in ("scenario", "recipe", "seed")}
    name = f"deployment/{'-'.join(named.values())}"
    if hashed("", [config, *files]) in recorded(store, experiment):
        return []  # without torch, whose import takes seconds
    try:
        if _weights(files[-1]) != about.get("deployed_sha256"):
            return []  # DVC took deploy/result.json from another run
        found = read(folder / "run", config)
    except UserError as error:  # left by other code; the stage writes new files when it runs next
        log.info("MLflow: without the deployment (%s)", error)
        return []
    tags = found.tags | named | {"simulated_sha256": str(about.get("simulated_sha256"))}
    found = found._replace(name=name, params=found.params | named, tags=tags)
    return [name] if add(store, experiment, found) else []


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

    silos, seed, late = (
        deployment.silos,
        deployment.common_args.random_seed,
        defaultdict[int, set[int]](set),
    )
    for (t, _), clients in missing.items():
        late[t].update(clients)
    found = {}
    for t in range(0 if 0 in late else 1, rounds + 1):
        # Exchanges before the first round and after the last one ask everybody.
        asked = {*draw_cohort(seed, t, silos, deployment.cohort if t else silos)} | late[t]
        row = {"round": t, "silos_asked": len(asked), "silos_missing": len(late[t])}
        row["silos_answered"] = len(asked - late[t])
        row |= {f"answered.silo_{k}": k not in late[t] for k in sorted(asked) if silos <= MOST}
        found[t] = {key: float(value) for key, value in row.items()}
    return found


def _params(deployment: Deployment) -> dict[str, object]:
    """The configuration, flat, with the simulation's names where it has them.

    No path, no address.
    """
    from fedml_noniid.plugins.engines.local_training import RunSettings

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
    for section, values in {"train": local, **train.settings}.items():
        found |= {f"{section}.{key}": value for key, value in values.items()}
    # Paths and addresses are strings.
    found |= {
        key: value
        for key, value in deployment.comm_args.model_dump().items()
        if not isinstance(value, str)
    }
    for section, values in deployment.model_dump(include=set(PASSED), exclude_none=True).items():
        plain = {
            key: value
            for key, value in values.items()
            if isinstance(value, int | float) or str(value).isidentifier()
        }
        found |= {f"{section}.{key}": value for key, value in plain.items()}
    return found


def _weights(path: Path) -> str:
    """The SHA-256 that the server wrote into its model."""
    try:
        with safe_open(path, framework="numpy") as file:
            return str((file.metadata() or {})["weights_sha256"])
    except (SafetensorError, OSError, KeyError) as error:
        raise UserError(f"{path}: is not the model of a deployment ({error})") from None
