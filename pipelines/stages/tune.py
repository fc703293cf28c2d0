"""Tuning, which is no stage of DVC: trains the trials of `tune` in tune/, and writes the best
values into params.yaml, and how they were chosen into tuned.yaml.

Every trial is an item like those of stage `train`. It is stored under its fingerprint, so it is
trained once, and a kill loses at most the rounds since its last checkpoint.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.util import load_yaml_guess_indent

from fedml_noniid.core.errors import UserError, located
from fedml_noniid.data.files import write_whole
from fedml_noniid.data.yaml_files import in_one_line, read_yaml
from fedml_noniid.engines.simulation import drive
from fedml_noniid.pipelines.experiment import check, results, search
from fedml_noniid.pipelines.experiment.config import FILE, RECORDS, Config, Tuned, Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.owner_scores import scores_of_owners
from fedml_noniid.pipelines.experiment.search import Answers, Request, Search
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages.evaluate import trained_item
from fedml_noniid.pipelines.stages.partition import partitions
from fedml_noniid.pipelines.stages.train import train

FOLDER, TRIALS = "tune", "trials.csv"
WIDTH = 120  # of params.yaml and tuned.yaml
HEAD = "# Written by `noniid tune`: how values of params.yaml were chosen.\n"


def tune(workspace: Workspace, settings: Config) -> tuple[dict[str, Tuned], list[str]]:
    """Tunes the recipes of an experiment whose data are prepared.

    Returns recipe -> record, as written to tuned.yaml, and notes. tune/trials.csv gets all trials.

    Raises UserError if `tune` makes no sense, or if all trials of a recipe diverge; params.yaml
    stays as it was then.
    """
    plan = search.tuning(settings)
    workspace = replace(workspace, root=workspace.root / FOLDER)
    samples, _ = samples_of(workspace, plan)
    with located(source=FILE):
        result = drive(plan.run(), partial(measured, workspace, plan))
    write_whole(workspace.root / TRIALS, csv_of(result.table(plan.metric)))
    records = {recipe: search.record(plan, result, recipe, samples) for recipe in plan.points}
    write(workspace.root.parent, records)
    return records, result.notes(records, plan.metric, samples)


def samples_of(workspace: Workspace, plan: Search) -> tuple[int, int]:
    """The numbers of validation samples and of test samples. Makes the partition. UserError if
    there are no data, or not those that the search needs."""
    path = workspace.dataset(plan.settings.data.name)
    if not path.is_file():
        raise UserError(f"{path}: is missing; stage prepare makes it")
    partitions(workspace, plan.laid_out(Request("", (), tuple(plan.seeds), 1)))
    unit = Unit(plan.scenario, next(iter(plan.points)), plan.seeds[0])
    return plan.sizes(Item.load(workspace, plan.settings, unit))


def measured(workspace: Workspace, plan: Search, request: Request) -> Answers:
    """Trains what is missing of a request, in the folders of the workspace."""
    planned = plan.laid_out(request)
    check.check(planned)
    partitions(workspace, planned)
    train(workspace, planned, f"{planned.experiment}, {request.name}")
    runs = {run.key: run.final for run in results.read(workspace.root, workspace.repository)}
    for unit in planned.units() if plan.is_by_owner else ():
        if unit.key in runs:
            runs[unit.key] = scores_of_owners(*trained_item(workspace, planned, unit)[:2])
    keys = {
        entry: [Unit(plan.scenario, entry, seed).key for seed in planned.seeds]
        for entry in planned.recipe_names
    }
    return {
        entry: [runs[key] for key in own] if runs.keys() >= {*own} else []
        for entry, own in keys.items()
    }


def csv_of(lines: Sequence[Mapping[str, Any]]) -> bytes:
    """Lines as a file."""
    return str(pd.DataFrame(lines).to_csv(index=False, lineterminator="\n")).encode()


def write(root: Path, records: Mapping[str, Tuned]) -> None:
    """Writes the chosen values into the entries of params.yaml, whose comments stay, and how they
    were chosen into tuned.yaml, beside the records of other recipes."""
    path = root / FILE
    text = path.read_text()
    _, indent, offset = load_yaml_guess_indent(text)
    yaml = YAML()
    yaml.width, yaml.preserve_quotes = WIDTH, True
    yaml.indent(mapping=2, sequence=indent or 2, offset=offset or 0)
    yaml.representer.add_representer(
        type(None), lambda r, _: r.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    content, written = yaml.load(text), io.StringIO()
    for name, tuned in records.items():
        _put(content["recipes"], name, tuned)
    yaml.dump(content, written, transform=lambda text: text.replace(", \n", ",\n"))
    # ruamel keeps comments, but a file may be laid out in a way that it does not write back.
    if YAML(typ="safe", pure=True).load(written.getvalue()) != content:
        raise UserError(
            f"{FILE}: the chosen values can't be written into it; write each entry of recipes "
            "on one line"
        )
    known = read_yaml(root / RECORDS) if (root / RECORDS).is_file() else {}
    known |= {name: tuned.model_dump() for name, tuned in records.items()}
    lines = {
        name: CommentedMap({key: _flow(value) for key, value in record.items()})
        for name, record in known.items()
    }
    yaml.dump(lines, record := io.StringIO())
    write_whole(root / RECORDS, HEAD + record.getvalue())
    write_whole(path, written.getvalue())


def _put(entries: CommentedMap, name: str, tuned: Tuned) -> None:
    """One entry with its new values, a line per section."""
    # A copy: an alias may stand for the entry, or for a section, elsewhere too.
    entry = CommentedMap() if entries[name] is None else copy.copy(entries[name])
    for section, keys in tuned.chosen.items():
        if entry.get(section):
            entry[section] = copy.copy(entry[section])
            entry[section].update(keys)
        else:
            entry[section] = _flow(keys)
    entries[name] = entry


def _flow(value: object) -> Any:
    """A value that is written on one line."""
    return YAML().load(in_one_line(value))
