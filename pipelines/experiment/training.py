"""Trains one item and makes the files of its folder in runs/.

Settings, data and code determine every byte.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save

from fedml_noniid.core.component import Public
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params, leaves
from fedml_noniid.data.indices import INDICES
from fedml_noniid.engines.callbacks import Row
from fedml_noniid.engines.hashing import model_tensors, weights_sha256
from fedml_noniid.engines.record import rounds_csv
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.own_code import OURS, EditedError, check_unchanged
from fedml_noniid.pipelines.experiment import cache, provenance
from fedml_noniid.pipelines.experiment.config import Config, Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.results import finals
from fedml_noniid.pipelines.experiment.workspace import Workspace

# How reports describe the public split that training sees.
SEEN = {Public.UNLABELLED: "unlabelled", Public.LABELLED: "labelled", Public.TEST_SET: "labelled"}
SECONDS = "seconds"  # the one column that differs from run to run


def tags_of(item: Item, simulation: Simulation, fingerprint: str) -> dict[str, str]:
    """Tags by which a run is found, and facts that a reader must know."""
    needs, unit = simulation.algorithm.needs, item.unit
    leaks = [leak for leak in (item.data.leak, simulation.algorithm.leak) if leak]
    return {
        "item": unit.key,
        "recipe": unit.recipe,
        "scenario": unit.scenario,
        "seed": str(unit.seed),
        "composition": item.settings.composition(unit.recipe),
        "fingerprint": fingerprint,
        "data_hash": item.data.checksum,
        "partition_hash": hashlib.sha256(item.indices.content).hexdigest(),
        "engine": simulation.engine_name,
        **provenance.machine_kind(item.settings),
        "public": SEEN.get(needs.public, "none"),
        "leak": "; ".join(leaks) or "none",
        "federated": "no" if needs.pooled else "yes",
        **simulation.remarks,
    }


class Trained(NamedTuple):
    """The result of an item."""

    tensors: Params  # the content of model.safetensors, with what is not saved
    rows: list[Row]  # of rounds.csv, and SECONDS
    recorded: Params  # the content of recorded.safetensors
    record: dict[str, Any]  # the content of run.json
    unsaved: frozenset[str] = frozenset()  # parameters that model.safetensors lacks

    def files(self) -> dict[str, bytes]:
        """The files of the item's folder in runs/."""
        rows = [
            {name: value for name, value in row.items() if name != SECONDS} for row in self.rows
        ]
        return {
            "rounds.csv": rounds_csv(rows).encode(),
            "model.safetensors": save(
                {
                    key: leaf
                    for key, leaf in self.tensors.items()
                    if key.partition("/")[2] not in self.unsaved
                }
            ),
            "run.json": (json.dumps(self.record, indent=2) + "\n").encode(),
            "recorded.safetensors": save(self.recorded),
        }


def trained(item: Item, simulation: Simulation, fingerprint: str) -> Trained:
    """Runs the remaining rounds. Raises NonFiniteError, and EditedError if code was edited."""
    unit = item.unit
    params = item.settings.params(unit)
    check_unchanged(OURS)
    outcome = simulation.run()
    try:
        check_unchanged(OURS)
        if item.settings.params(unit) != params:
            names = ", ".join(item.settings.own_code(unit.recipe))
            raise EditedError(f"a file of {names} was changed during the run")
    except EditedError as error:
        raise EditedError(f"the result of {unit.key} is refused: {error}") from None
    last = outcome.rows[-1]
    own, frozen = outcome.personal | outcome.models, item.network.frozen
    tensors = model_tensors(outcome.params, outcome.evaluated, outcome.buffers, own, frozen)
    record = {
        **unit._asdict(),
        "composition": item.settings.composition(unit.recipe),
        "params": params,
        "tags": tags_of(item, simulation, fingerprint),
        "final": {key: last[key] for key in finals(last) if last[key] == last[key]},
        "rounds": simulation.loop.done,
        "weights_sha256": weights_sha256(tensors),
        "notes": list(item.data.notes),
    }
    if simulation.loop.plan.schedule is not None:
        record["schedule_sha256"] = simulation.loop.plan.schedule.sha256
    if any(True for _ in leaves(simulation.engine.clients.memory.first)):
        record["memory_sha256"] = simulation.engine.clients.memory.sha256()
    unsaved = frozen if item.settings.train.save == "trained" else frozenset[str]()
    return Trained(tensors, outcome.rows, outcome.tensors, record, unsaved)


def fingerprint_of(
    workspace: Workspace, settings: Config, unit: Unit, hashes: dict[Path, str | None]
) -> str:
    """Hash of an item's settings, code, data and partition. `hashes`: of data sets, once known."""
    data = workspace.dataset_of(settings, unit.scenario, unit.seed)
    if data not in hashes:
        hashes[data] = cache.sha256(data)
    indices = cache.sha256(workspace.partition(unit.scenario, unit.seed) / INDICES)
    return provenance.training_fingerprint(settings, unit, hashes[data], indices)


def item_of(workspace: Workspace, settings: Config, unit: Unit, fingerprint: str) -> Item:
    """The item with this fingerprint, with its data. UserError if there is another one."""
    item = Item.load(workspace, settings, unit)
    if fingerprint_of(workspace, settings, unit, {}) != fingerprint:
        raise UserError(
            f"{unit.key}: its code, data or partition are not those with which the command began",
            allowed="the same packages on all machines, yours too, and one command in this folder",
        )
    return item
