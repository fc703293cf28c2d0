"""Stage evaluate: accuracy of the final models per class and per client ->
evaluation/<scenario>-<recipe>-<seed>/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params
from fedml_noniid.engines.device import n_cards, resolve_device
from fedml_noniid.pipelines.experiment import cache, config, progress, results
from fedml_noniid.pipelines.experiment.config import Config, Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.measuring import measure, with_frozen
from fedml_noniid.pipelines.experiment.provenance import code, digest, machine_kind
from fedml_noniid.pipelines.experiment.workers import how_many, side_by_side
from fedml_noniid.pipelines.experiment.workspace import Workspace


def run(workspace: Workspace) -> None:
    """Evaluates the trained items of the experiment."""
    settings = config.load(workspace.root)
    evaluated(workspace, settings, settings.experiment)


def evaluated(workspace: Workspace, settings: Config, title: str) -> None:
    """Evaluates every item that has a model, in one process per core."""
    cache.refuse_foreign(workspace.root, "evaluation")
    units = [unit for unit in settings.units() if workspace.run(unit.key).is_dir()]
    cards = n_cards(resolve_device(settings.train.device))
    processes = how_many(settings.machine.processes, settings.train.threads, cards)
    with progress.Display(f"{title}, evaluation", len(units)) as display:
        for unit, fresh in side_by_side(
            partial(_get_or_create, workspace, settings), units, processes, display, cards > 0
        ):
            display.done(unit.key, "evaluated", not fresh)
    cache.keep_only(workspace.root / "evaluation", [unit.key for unit in units])


def _get_or_create(workspace: Workspace, settings: Config, unit: Unit) -> bool:
    """Evaluates an item or takes the result from the store. Returns whether it evaluated."""
    folder = workspace.run(unit.key)
    cache.check(folder)
    made_of = cache.sha256(folder / cache.RECEIPT), machine_kind(settings)
    fingerprint = digest(*made_of, code("fedml_noniid.pipelines.stages.evaluate"))
    make = partial(_files, workspace, settings, unit)
    return cache.get_or_create(
        workspace.evaluation(unit.key), workspace.repository, fingerprint, make
    )


def _files(workspace: Workspace, settings: Config, unit: Unit) -> dict[str, bytes]:
    """Measures the model that the train stage wrote."""
    item, tensors, rows = trained_item(workspace, settings, unit)
    return measure(item, tensors, rows).files()


def trained_item(
    workspace: Workspace, settings: Config, unit: Unit
) -> tuple[Item, Params, Sequence[Mapping[str, float]]]:
    """(an item after its last round, the content of its model.safetensors, the lines of its
    rounds.csv). UserError if it was trained with other settings."""
    item, folder = Item.load(workspace, settings, unit), workspace.run(unit.key)
    run = results.record(folder / "run.json")
    if settings.params(unit) != run["params"]:
        raise UserError(
            f"{unit.key}: was trained with other settings than those of {config.FILE} now; "
            "`noniid run` trains it again"
        )
    saved, rounds = _read(folder / "model.safetensors"), int(run["rounds"])
    whole = with_frozen(saved, item.network, unit.seed, run)
    tensors = {key: leaf.to(item.device) for key, leaf in whole.items()}
    return item.ended(rounds), tensors, results.rows(folder / "rounds.csv", rounds)


def _read(path: Path) -> Params:
    try:
        tensors: Params = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: not a readable model ({error}); `dvc repro` trains it again"
        ) from None
    return tensors
