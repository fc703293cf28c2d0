"""What `noniid init` does: the folder of a new experiment, with settings that fit the data.

Everything is checked before anything is written: the files of the data are read, the settings are
checked, every recipe is composed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML

import fedml_noniid
from fedml_noniid.pipelines.experiment import cache, check, config
from fedml_noniid.pipelines.tools import fits
from fedml_noniid.plugins import models, recipes
from fedml_noniid.plugins.core.component import Public
from fedml_noniid.plugins.core.errors import UserError, known
from fedml_noniid.plugins.data import datasets, user_files
from fedml_noniid.plugins.data.dataset import Dataset
from fedml_noniid.plugins.data.files import write_whole
from fedml_noniid.plugins.data.partitions import BY_OWNER, PARTITIONS
from fedml_noniid.plugins.data.readers import frames
from fedml_noniid.plugins.data.splits import hold_out

STAGES = Path(fedml_noniid.__file__).with_name(
    "stages.yaml"
)  # a link to the checkout's dvc.yaml, a copy in a wheel
# In a checkout, stage `plan` depends on the code. An installed package may be another one at the
# next run.
CODE, ANY = "    deps:\n      - pipelines\n      - plugins\n", "    always_changed: true\n"
WRITTEN = ("params.yaml", "dvc.yaml")
IGNORED = {
    ".gitignore": (
        "/data/",
        "/plan/",
        "/partitions/",
        "/runs/",
        "/evaluation/",
        "/report/",
        "/deploy/",
        "/tune/",
        "/dvc_plots/",
        "/mlruns/",
        "/.items/",
        "/.resume/",
    ),
    ".dvcignore": (".items", ".resume", "mlruns"),
}
DVC = "[core]\n    analytics = false\n    check_update = false\n    autostage = false\n"
TABLES = ("table", "text")  # data sets with columns
OWN = tuple(user_files.OF_USER)
PREPARED = "data/raw"  # folder of the files of the papers' data sets
METHODS, FOR_TEXT = ("fedavg", "fedprox", "scaffold", "fednnnn"), ("fedavg", "fedprox", "fednnnn")
OWNED = ("femnist", "sent140", "made_tweets")  # data sets by name whose samples have owners
IMAGE, MOST = (
    28,
    100,
)  # pixels from which the model is a cnn; clients at most, unless more are asked for
MODELS = {
    "digits": "mlp",
    "sent140": "lstm",
    "made_tweets": "lstm",
}  # of data sets by name; all others: cnn
# model -> optimiser and step size, in the order in which they are tried
LOCAL = {
    "lstm": (("rmsprop", 0.01), ("sgd", 0.5)),
    "mlp": (("sgd", 0.1),),
    "logistic_regression": (("sgd", 0.1),),
}
WIDTH = 40  # column of the comments


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What the user asks for; None: what fits the data."""

    data: str = "digits"
    source: Path | None = None  # file of a table or text, folder of images or arrays
    options: Mapping[str, object] = field(default_factory=dict)  # of the reader, such as label
    methods: Sequence[str] | None = None
    partition: str | None = None
    alpha: float | None = None
    clients: int | None = None
    rounds: int = 20
    seeds: int = 3
    model: str | None = None
    deploy: bool = False  # whether FedML runs one method too, as processes


def refuse_existing(folder: Path, force: bool) -> None:
    """UserError if the folder has an experiment already, unless `force`, or what the stages would
    remove."""
    cache.refuse_foreign(folder)
    for name in WRITTEN:
        if not force and (folder / name).exists():
            raise UserError(
                f"{folder / name}: exists; allowed: another folder, or --force to replace it"
            )


def names(what: str) -> list[str]:
    """The names that `data`, `partition` or `model` of a new study may have."""
    by_name = [name for name in datasets.DATASETS if name not in OWN]
    return {"data": by_name, "partition": list(PARTITIONS), "model": list(models.MODELS)}[what]


def columns(file: Path) -> list[str]:
    """The names of a table's columns. UserError if it can't be read."""
    _exists(file, "file")
    (table,) = frames.from_files(file.parent, file.name, None)
    return [str(name) for name in table.frame.columns]


def planned(folder: Path, wanted: StudyOptions) -> tuple[str, Sequence[str]]:
    """(params.yaml of the experiment, checked; the notes of the user's own data, which are read).

    UserError with a line per mistake. UndecidedError for columns of a table that need a decision.
    """
    data, settings = _data(folder, wanted)
    entries = list(
        wanted.methods or (FOR_TEXT if _model(wanted, data) in models.OF_TEXT else METHODS)
    )
    for name in entries:
        for method in recipes.parse(name):
            known("method", method, ["fedavg", *recipes.METHODS])
    needs = any(
        recipes.METHODS[one]().needs.public >= Public.UNLABELLED
        for name in entries
        for one in recipes.parse(name)
    )
    size = None if data is None else len(data.train_y)
    settings |= {
        "validation": 0.1,
        "public": (100 if size is None else max(1, min(100, size // 10))) if needs else 0,
    }
    scenario = _scenario(wanted, data, settings)
    model = _model(wanted, data)
    content: dict[str, Any] = {
        "experiment": wanted.data
        if wanted.source is None
        else wanted.source.resolve().name.partition(".")[0] or wanted.data,
        "data": settings,
        "scenario_names": [scenario["partition"]],
        "scenarios": {scenario["partition"]: scenario},
        "recipe_names": entries,
        "recipes": {name: {} for name in entries},
        "seeds": list(range(wanted.seeds)),
        "train": {"model": model, "rounds": wanted.rounds, "epochs": 2, "batch_size": 32},
    }
    deploy = {
        "scenario": scenario["partition"],
        "seed": 0,
        "silos": max(2, min(3, scenario["clients"])),
        "rounds": 2,
    }
    refused: list[UserError] = []
    for optimizer, lr in LOCAL.get(model, (("sgd", 0.05),)):
        for deployed in entries if wanted.deploy else entries[:1]:
            tried = content | {"train": content["train"] | {"optimizer": optimizer, "lr": lr}}
            if wanted.deploy:
                tried["deploy"] = {"recipe": deployed} | deploy
            try:
                checked = config.checked(tried, config.FILE)
                check.check(checked)
                if data is not None:
                    fits.fits(checked, data)
            except UserError as error:
                refused.append(error)
                continue
            return "".join(
                f"{line}\n" for line in _lines(tried)
            ), () if data is None else data.notes
    raise refused[0]


def make(folder: Path, params: str, deploy: bool = False) -> None:
    """Makes the folder: git, DVC, and the files, params.yaml last.

    `deploy`: with the stage of that name. UserError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}: can't be made ({error.strerror or error}); choose another folder"
        ) from None
    top = _called(["git", "rev-parse", "--show-toplevel"], folder)
    if top is None:
        top = str(folder.resolve())
        if _called(["git", "init", "--quiet"], folder) is None:
            raise UserError(
                f"{folder}: `git init` fails; git has to be installed, and the folder writable"
            )
    if not (folder / ".dvc").is_dir():
        below = Path(top.strip()) != folder.resolve()
        if (
            _called(
                [sys.executable, "-m", "dvc", "init", "--quiet", *(["--subdir"] if below else [])],
                folder,
            )
            is None
        ):
            raise UserError(f"{folder}: `dvc init` fails; run it there to see why")
        write_whole(folder / ".dvc" / "config", DVC)
    for name, wanted in IGNORED.items():
        path = folder / name
        there = path.read_text().splitlines() if path.exists() else []
        write_whole(
            path,
            "".join(
                f"{line}\n" for line in (*there, *(line for line in wanted if line not in there))
            ),
        )
    stages = STAGES.read_text()
    assert CODE in stages, "the stage `plan` of dvc.yaml begins so"
    stages = stages.replace(CODE, ANY)
    if not deploy:
        stages, parts = re.subn(r"\n  deploy:\n(    .*\n)+|(?<=train), deploy(?=\])", "", stages)
        assert parts == 2, "the stage and its section"
    write_whole(folder / "dvc.yaml", stages)
    write_whole(folder / "params.yaml", params)


def _data(folder: Path, wanted: StudyOptions) -> tuple[Dataset | None, dict[str, Any]]:
    """The user's own data, None for another data set; and the section `data`."""
    if wanted.data not in OWN:
        return None, {"name": wanted.data, "root": PREPARED}
    assert wanted.source is not None, "own data have a place"
    _exists(wanted.source, "file" if wanted.data in TABLES else "folder")
    place = wanted.source.parent if wanted.data in TABLES else wanted.source
    options = ({"file": wanted.source.name} if wanted.data in TABLES else {}) | dict(wanted.options)
    data = datasets.load(wanted.data, place, **options)
    inside = place.resolve().is_relative_to(folder.resolve())
    root = os.path.relpath(place.resolve(), folder.resolve()) if inside else str(place.resolve())
    return data, {"name": wanted.data, "root": root} | options


def _exists(path: Path, what: str) -> None:
    if not (path.is_file() if what == "file" else path.is_dir()):
        raise UserError(f"{path}: there is no such {what}")


def _model(wanted: StudyOptions, data: Dataset | None) -> str:
    if wanted.model is not None:
        model = known("model", wanted.model, names("model"))
        if data is not None:
            models.build(
                model, tuple(data.train_x.shape[1:]), len(data.classes), {}, data.embedding
            )
        elif (model in models.OF_TEXT) != (MODELS.get(wanted.data) in models.OF_TEXT):
            allowed = [
                name
                for name in models.MODELS
                if (name in models.OF_TEXT) != (model in models.OF_TEXT)
            ]
            raise UserError(
                f"model {model!r} does not take data set {wanted.data!r}; allowed: "
                f"{', '.join(allowed)}"
            )
        return model
    if data is None:
        return MODELS.get(wanted.data, "cnn")
    if data.embedding is not None:
        return "lstm"
    shape = data.train_x.shape[1:]
    return "cnn" if len(shape) == 3 and min(shape[1:]) >= IMAGE else "mlp"


def _scenario(
    wanted: StudyOptions, data: Dataset | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """How the data are divided: by owner, if they are known."""
    owners = None if data is None else data.train_owner
    name = wanted.partition or (
        "dirichlet" if owners is None or wanted.alpha is not None else "natural"
    )
    known("partition", name, names("partition"))
    if name in BY_OWNER and (owners is None if data is not None else wanted.data not in OWNED):
        allowed = ", ".join(other for other in PARTITIONS if other not in BY_OWNER)
        raise UserError(
            f"partition {name!r} needs owners, which the data do not name; allowed: {allowed}"
        )
    clients = wanted.clients
    if clients is None and name in BY_OWNER and data is not None and owners is not None:
        labels, validation, public = (
            data.train_y.numpy(),
            settings["validation"],
            settings["public"],
        )
        splits = [hold_out(labels, validation, public, seed).train for seed in range(wanted.seeds)]
        clients = min(MOST, *(len(np.unique(owners.numpy()[rows])) for rows in splits))
    if clients is None:
        clients = 20 if data is None else max(2, min(20, len(data.train_y) // 50))
    alpha = wanted.alpha if wanted.alpha is not None else 0.5 if name == "dirichlet" else None
    scenario = {"partition": name, "clients": clients, "participation": 1.0}
    return scenario | ({} if alpha is None else {"alpha": alpha})


COMMENTS = {
    "name": "the kind of data; docs: Settings",
    "root": "folder of the files, relative to this one",
    "file": "a row per sample",
    "label": "column of the class",
    "owner": "column of the client",
    "text": "column of the text",
    "features": "columns of numbers",
    "one_hot": "columns of categories",
    "drop": "columns that are not used",
    "missing": "cells without a value: median, mode, or drop the rows",
    "test_file": "rows to test on",
    "validation": "fraction held out to choose hyper-parameters",
    "public": "training samples that no client holds; some methods need them",
    "rounds": "of communication",
    "epochs": "local epochs per round",
    "optimizer": "sgd, adam or rmsprop",
    "lr": "local step size",
    "recipe": "FedML runs it too, as processes, and the weights are compared",
}


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    """The file, with comments that teach."""
    yield "# The experiment. `noniid check` checks this file, `noniid run` runs what changed."
    yield f"experiment: {_plain(content['experiment'])}"
    yield from ("", "data:", *_section(content["data"]))
    yield from (
        "",
        (
            "# How the data are divided among the clients. `noniid partition` shows how uneven "
            "that "
            "is."
        ),
    )
    yield f"scenario_names: {_plain(content['scenario_names'])}"
    yield from (
        "scenarios:",
        *(f"  {name}: {_plain(entry)}" for name, entry in content["scenarios"].items()),
    )
    yield from (
        "",
        (
            "# The methods that are compared. `noniid methods` lists all, `noniid methods fnr` "
            "explains one."
        ),
    )
    yield f"recipe_names: {_plain(content['recipe_names'])}"
    yield (
        "recipes:              # the hyper-parameters that differ from the defaults: "
        "`fedprox: {fedprox: {mu: 0.1}}`"
    )
    yield from (f"  {name}: {{}}" for name in content["recipes"])
    yield from (
        "",
        (
            f"seeds: {_plain(content['seeds'])}      # each is a run of everything; the table "
            "shows "
            "mean and interval"
        ),
    )
    for name in ("train", "deploy"):
        if name in content:
            yield from ("", f"{name}:", *_section(content[name]))


def _section(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        line = f"  {key}: {_plain(value)}"
        yield f"{line:<{WIDTH - 1}} # {COMMENTS[key]}" if key in COMMENTS else line


def _plain(value: object) -> str:
    """A value in YAML, on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_plain(own)}" for key, own in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_./+-]+", value):
        # As YAML reads it: on, 1e3 or null are no text.
        return (
            value
            if YAML(typ="safe", pure=True).load(f"- {value}") == [value]
            else json.dumps(value)
        )
    return json.dumps(value, ensure_ascii=False)


def _called(command: Sequence[str], folder: Path) -> str | None:
    """What a program prints; None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    environment = os.environ | {"DVC_NO_ANALYTICS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None
