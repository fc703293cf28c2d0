"""Makes the folder of a new experiment, with settings that fit the data, for `noniid init`.

Everything is checked before anything is written: the files of the data are read, the settings are
checked, every recipe is composed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

import fedml_noniid
from fedml_noniid.pipelines.experiment import cache, check, config, tuning
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
TEMPLATE = Path(__file__).with_name("templates") / "params.yaml.j2"
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
PREPARED = "data/raw"  # folder of the files of the papers' data sets
METHODS, FOR_TEXT = ("fedavg", "fedprox", "scaffold", "fednnnn"), ("fedavg", "fedprox", "fednnnn")
OWNED = ("femnist", "sent140", "made_tweets")  # data sets by name whose samples have owners
CNN_PIXELS = 28  # width and height from which the model is a cnn
MAX_OWNERS = 100  # clients, unless more are asked for
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
    by_name = [name for name in datasets.DATASETS if name not in user_files.OF_USER]
    return {"data": by_name, "partition": list(PARTITIONS), "model": list(models.MODELS)}[what]


def columns(file: Path) -> list[str]:
    """The names of a table's columns. UserError if it can't be read."""
    _exists(file, "file")
    (table,) = frames.tables_of(file.parent, file.name, None)
    return [str(name) for name in table.frame.columns]


def planned(folder: Path, wanted: StudyOptions) -> tuple[str, Sequence[str]]:
    """(params.yaml of the experiment, checked; the notes of the user's data, which are read).

    UserError with a line per mistake. UndecidedError for columns of a table that need a decision.
    """
    data, settings = _data(folder, wanted)
    model = _model(wanted, data)
    entries = list(wanted.methods or (FOR_TEXT if model in models.OF_TEXT else METHODS))
    methods = [method for name in entries for method in recipes.parse(name)]
    for method in methods:
        known("method", method, ["fedavg", *recipes.METHODS])
    public = 100 if data is None else max(1, min(100, len(data.train_y) // 10))
    needs = any(recipes.METHODS[one]().needs.public >= Public.UNLABELLED for one in methods)
    settings |= {"validation": 0.1, "public": public if needs else 0}
    scenario = _scenario(wanted, data, settings)
    name = scenario["partition"]
    train = {"model": model, "rounds": wanted.rounds, "epochs": 2, "batch_size": 32}
    silos = max(2, min(3, scenario["clients"]))
    content: dict[str, Any] = {
        "experiment": (wanted.source and wanted.source.resolve().name.partition(".")[0])
        or wanted.data,
        "data": settings,
        "scenario_names": [name],
        "scenarios": {name: scenario},
        "recipe_names": entries,
        "recipes": {entry: {} for entry in entries},
        "seeds": list(range(wanted.seeds)),
    }
    refused: list[UserError] = []
    for optimizer, lr in LOCAL.get(model, (("sgd", 0.05),)):
        for recipe in entries if wanted.deploy else entries[:1]:
            tried = content | {"train": {**train, "optimizer": optimizer, "lr": lr}}
            if wanted.deploy:
                deploy = {"recipe": recipe, "scenario": name, "seed": 0, "silos": silos}
                tried["deploy"] = deploy | {"rounds": 2}
            try:
                checked = config.checked(tried, config.FILE)
                check.check(checked)
                if data is not None:
                    fits.fits(checked, data)
            except UserError as error:
                refused.append(error)
                continue
            return _written(tried), () if data is None else data.notes
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
    if top is None and _called(["git", "init", "--quiet"], folder) is None:
        raise UserError(
            f"{folder}: `git init` fails; git has to be installed, and the folder writable"
        )
    if not (folder / ".dvc").is_dir():
        below = top is not None and Path(top.strip()) != folder.resolve()
        command = [sys.executable, "-m", "dvc", "init", "--quiet", *["--subdir"] * below]
        if _called(command, folder) is None:
            raise UserError(f"{folder}: `dvc init` fails; run it there to see why")
        write_whole(folder / ".dvc" / "config", DVC)
    for name, ignored in IGNORED.items():
        path = folder / name
        there = path.read_text().splitlines() if path.exists() else []
        write_whole(path, "".join(f"{line}\n" for line in dict.fromkeys((*there, *ignored))))
    stages = STAGES.read_text()
    assert CODE in stages, "the stage `plan` of dvc.yaml begins so"
    stages = stages.replace(CODE, ANY)
    if not deploy:
        stages, parts = re.subn(r"\n  deploy:\n(    .*\n)+|(?<=train), deploy(?=\])", "", stages)
        assert parts == 2, "the stage and its section"
    write_whole(folder / "dvc.yaml", stages)
    write_whole(folder / "params.yaml", params)


def _data(folder: Path, wanted: StudyOptions) -> tuple[Dataset | None, dict[str, Any]]:
    """The user's data, None for another data set; and the section `data`."""
    if wanted.source is None:
        return None, {"name": wanted.data, "root": PREPARED}
    is_file = wanted.data in TABLES
    _exists(wanted.source, "file" if is_file else "folder")
    place = wanted.source.parent if is_file else wanted.source
    options = ({"file": wanted.source.name} if is_file else {}) | dict(wanted.options)
    data = datasets.load(wanted.data, place, **options)
    inside = place.resolve().is_relative_to(folder.resolve())
    root = os.path.relpath(place.resolve(), folder.resolve()) if inside else str(place.resolve())
    return data, {"name": wanted.data, "root": root} | options


def _exists(path: Path, what: str) -> None:
    if not (path.is_file() if what == "file" else path.is_dir()):
        raise UserError(f"{path}: there is no such {what}")


def _model(wanted: StudyOptions, data: Dataset | None) -> str:
    """The model that is asked for, or one that fits the data. `fits` checks it with the user's
    data."""
    if wanted.model is not None:
        model = known("model", wanted.model, names("model"))
        takes_text = model in models.OF_TEXT
        if data is None and takes_text != (MODELS.get(wanted.data) in models.OF_TEXT):
            others = [one for one in models.MODELS if (one in models.OF_TEXT) != takes_text]
            raise UserError(
                f"model {model!r} does not take data set {wanted.data!r}; allowed: "
                f"{', '.join(others)}"
            )
        return model
    if data is None:
        return MODELS.get(wanted.data, "cnn")
    if data.embedding is not None:
        return "lstm"
    shape = data.train_x.shape[1:]
    return "cnn" if len(shape) == 3 and min(shape[1:]) >= CNN_PIXELS else "mlp"


def _scenario(
    wanted: StudyOptions, data: Dataset | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """How the data are divided: by owner, if they are known."""
    owners = None if data is None else data.train_owner
    usual = "dirichlet" if owners is None or wanted.alpha is not None else "natural"
    name = known("partition", wanted.partition or usual, names("partition"))
    if name in BY_OWNER and owners is None and (data is not None or wanted.data not in OWNED):
        allowed = ", ".join(other for other in PARTITIONS if other not in BY_OWNER)
        raise UserError(
            f"partition {name!r} needs owners, which the data do not name; allowed: {allowed}"
        )
    clients = 20 if data is None else max(2, min(20, len(data.train_y) // 50))
    if name in BY_OWNER and data is not None and owners is not None:
        held_out = (data.train_y.numpy(), settings["validation"], settings["public"])
        train = [hold_out(*held_out, seed).train for seed in range(wanted.seeds)]
        clients = min(MAX_OWNERS, *(len(np.unique(owners.numpy()[rows])) for rows in train))
    scenario = {"partition": name, "clients": wanted.clients or clients, "participation": 1.0}
    alpha = 0.5 if wanted.alpha is None and name == "dirichlet" else wanted.alpha
    return scenario | ({} if alpha is None else {"alpha": alpha})


def _written(content: Mapping[str, Any]) -> str:
    """The file, with comments that teach."""
    templates = jinja2.Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    templates.filters["yaml"] = tuning.in_one_line
    return templates.from_string(TEMPLATE.read_text()).render(content=content)


def _called(command: Sequence[str], folder: Path) -> str | None:
    """What a program prints; None if it is missing or fails."""
    environment = os.environ | {"DVC_NO_ANALYTICS": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
