"""Runs all items of one study of a paper -> research/built/<paper>/<size>/studies/<study>/.

Its folder is laid out as the repository is (params.yaml, partitions, runs, evaluation), and the
same stages fill it.

A study with a section `tune`, as some of claims.yaml, is tuned first: every method tries equally
many values on the validation split, then all seeds run with the best. The seeds of the trials are
none of the study's.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
from dataclasses import replace
from functools import partial
from typing import Any

from fedml_noniid.core.errors import UserError, located
from fedml_noniid.data.files import write_whole
from fedml_noniid.engines.device import unusable_gpu
from fedml_noniid.engines.simulation import drive
from fedml_noniid.pipelines.experiment import check, config, search
from fedml_noniid.pipelines.experiment.provenance import preparing
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import prepare
from fedml_noniid.pipelines.stages.evaluate import evaluated
from fedml_noniid.pipelines.stages.partition import partitions
from fedml_noniid.pipelines.stages.train import train
from fedml_noniid.pipelines.stages.tune import measured
from research import replicas, studies

log = logging.getLogger(__name__)


def execute(outer: Workspace, study: studies.Study, is_trained: bool = True) -> None:
    """Runs what is left of a study, in its folder below `outer.root`.

    `is_trained`: False ends it with the partitions.
    """
    replicas.register()
    inside = workspace(outer, study)
    name = f"{study.paper} {study.name}"
    if not study.is_run:
        shutil.rmtree(inside.root, ignore_errors=True)
    write_whole(inside.root / config.FILE, study.yaml(outer.root))
    if not study.is_run:
        log.info("%s: not run at size %s", name, study.size)
        return
    settings = config.load(inside.root)
    asked = study.size == "paper" and settings.train.device == "auto"
    if is_trained and asked and (reason := unusable_gpu()):
        raise UserError(f"{name}: size paper needs the GPU, and torch can't use it: {reason}")
    check.check(settings)
    prepared(inside, settings)
    if is_trained and settings.tune is not None:
        write_whole(inside.root / config.FILE, tuned(outer, study, settings).yaml(outer.root))
        settings = config.load(inside.root)
    partitions(inside, settings)
    if not is_trained:
        return
    diverged = train(inside, settings, name)
    evaluated(inside, settings, name)
    write_whole(inside.root / studies.DIVERGED, json.dumps(diverged, indent=2) + "\n")


def tuned(outer: Workspace, study: studies.Study, settings: config.Config) -> studies.Study:
    """The study with the best values of each method, after the trials that are missing.

    UserError if all trials of a method diverge.
    """
    content = copy.deepcopy(dict(study.content))
    seeds = " ".join(map(str, content.pop("tune")["seeds"]))
    inside = workspace(outer, replace(study, kind="tune"))
    record: dict[str, list[list[Any]]] = {}
    plan = search.tuning(settings)
    with located(source="claims.yaml"):
        result = drive(plan.run(), partial(measured, inside, plan))
    for recipe in plan.points:
        best, *_ = ranked = result.ranked(recipe)
        entry = content["recipes"][recipe] = dict(content["recipes"][recipe] or {})
        for section, keys in best.point.values.items():
            entry[section] = (entry.get(section) or {}) | keys
        # A mean of fewer rounds or seeds is no number beside the others.
        record[recipe] = [
            [
                trial.point.description,
                float(f"{trial.metric:.6g}") if trial in result.finals else None,
                seeds,
            ]
            for trial in ranked
        ]
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    write_whole(outer.root / study.folder / studies.TUNED, text)
    return replace(study, content=content)


def workspace(outer: Workspace, study: studies.Study) -> Workspace:
    """The study's folders below `outer.root`."""
    tags = {**outer.tags, "paper": study.paper, "study": study.name, "size": study.size}
    return replace(
        outer, root=outer.root / study.folder, data=outer.root / study.data_folder, tags=tags
    )


def prepared(inside: Workspace, settings: config.Config) -> None:
    """Makes the study's data as tensors, unless they are there as its settings and today's code
    would make them."""
    path, (made_of,) = inside.dataset(settings.data.name), preparing(settings).values()
    note = path.with_suffix(".made")
    if not (path.is_file() and note.is_file() and note.read_text() == made_of):
        prepare.run(inside)
        write_whole(note, made_of)
