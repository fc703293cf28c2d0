"""Makes the folder of a new experiment, with settings that fit the data, for `noniid init`.

Everything is checked before anything is written: the files of the data are read, the settings are
checked, every recipe is composed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

import fedml_noniid
from fedml_noniid.core.component import Public
from fedml_noniid.core.errors import MISSING, UNKNOWN, UserError, among, known
from fedml_noniid.data import datasets, partitions, user_files
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.files import write_whole
from fedml_noniid.data.readers import frames, table_files
from fedml_noniid.data.readers.download import DownloadNeededError, forbidden
from fedml_noniid.data.splits import hold_out
from fedml_noniid.data.strata import are_labels
from fedml_noniid.data.yaml_files import in_one_line
from fedml_noniid.models import CNN_PIXELS, model_for
from fedml_noniid.own_code import look_in, names_code, split_path
from fedml_noniid.pipelines.experiment import cache, check, config
from fedml_noniid.pipelines.experiment.config import Config, DataSettings
from fedml_noniid.pipelines.verbs import fits, repro
from fedml_noniid.plugins import registry

STAGES = Path(fedml_noniid.__file__).with_name(
    "stages.yaml"
)  # a link to the checkout's dvc.yaml, a copy in a wheel
# In a checkout, stage `plan` depends on the code. An installed package may be another one at the
# next run.
CODE, ANY = (
    "    deps:\n      - fedml_noniid\n      - pipelines\n      - plugins\n      - tuned.yaml\n",
    "    always_changed: true\n",
)
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
        "/choose/",
        "/leave-one-out/",
        "/dvc_plots/",
        "/mlruns/",
        "/.items/",
        "/.resume/",
    ),
    ".dvcignore": (".items", ".resume", "mlruns"),
}
DVC = "[core]\n    analytics = false\n    check_update = false\n    autostage = false\n"
PREPARED = "data/raw"  # folder of the files of the papers' data sets
METHODS, FOR_TEXT = ("fedavg", "fedprox", "scaffold", "fednnnn"), ("fedavg", "fedprox", "fednnnn")
MAX_OWNERS = 100  # clients, unless more are asked for
# Optimiser and step size of a model; CNNS: of all others.
LOCAL = {"lstm": ("rmsprop", 0.01), "mlp": ("sgd", 0.1), "logistic_regression": ("sgd", 0.1)}
CNNS = ("sgd", 0.05)
LR_OF_NUMBERS = 0.01  # of mse: a step of another size diverges where an error is large
OWN_DATA = (
    f"a file that ends in {', '.join(table_files.ENDINGS)}; a folder with train.npz or train/; "
    "a reader as module:function"
)


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What the user asks for; all else fits the data."""

    data: str = "digits"  # the name of a data set, or the path of own data
    # Of a table: label or target (several, joined by commas), owner, text.
    columns: Mapping[str, str] = field(default_factory=dict)
    methods: Sequence[str] = ()
    settings: Sequence[str] = ()  # `KEY=VALUE`, keys and values as in params.yaml
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


def names() -> list[str]:
    """The data sets that a new experiment may have by name."""
    return [name for name in datasets.DATASETS if name not in user_files.OF_USER]


def kind_of(data: str, is_text: bool = False) -> str:
    """The data set: the name itself, also of a user's own reader, or the kind of own data that lies
    at a path.

    `is_text`: whether a column of text is named. UserError if it is neither.
    """
    if data in names() or ":" in data:
        return data
    if data.endswith(table_files.ENDINGS):
        return "text" if is_text else "table"
    if (Path(data) / "train.npz").is_file():
        return "arrays"
    if (Path(data) / "train").is_dir():
        return "image_folder"
    hints = among(data, names())
    hints["allowed"] = f"{OWN_DATA}; {hints['allowed']}"
    raise UserError(UNKNOWN, path=("--data",), value=data, **hints)


def columns(file: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """The names of a table's columns. UserError if it can't be read.

    `options`: of section `data`, which may say how to read it.
    """
    # Cells that are read as numbers take a fraction of the memory of text.
    dialect = frames.Dialect(*map((options or {}).get, frames.Dialect._fields))
    path = Path(file)
    (table,) = table_files.tables_of(path.parent, path.name, None, dialect, lambda _: True)
    return [str(name) for name in table.frame.columns]


def keys_of(settings: Sequence[str]) -> dict[str, Any]:
    """Reads settings such as `train.rounds=50` into nested keys.

    Raises UserError for text that is not YAML.
    """
    tree: dict[str, Any] = {}
    keys: list[str] = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            allowed = "KEY=VALUE, such as train.rounds=50"
            raise UserError(path=("--set",), value=setting, allowed=allowed)
        if any(
            f"{earlier}.".startswith(f"{key}.") or key.startswith(f"{earlier}.") for earlier in keys
        ):
            raise UserError(f"--set {key} is there twice, as a whole or in part", allowed="once")
        keys.append(key)
        try:
            value = YAML(typ="safe", pure=True).load(text)
        except YAMLError:
            raise UserError(path=(f"--set {key}",), value=text, allowed="YAML") from None
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = _merged(tree, value)
    return tree


def _merged(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both, at any depth. Where both have a value, it is that of `then`."""
    merged = dict(first)
    for key, value in then.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merged(old, value)
        merged[key] = value
    return merged


def planned(folder: Path, wanted: StudyOptions) -> tuple[dict[str, Any], Sequence[str]]:
    """(params.yaml of the experiment, checked; the notes of the data, which are read).

    UserError with a line per mistake. UndecidedError for columns of a table that need a decision.
    """
    look_in(folder)
    tree = keys_of(wanted.settings)
    parts = {name: tree.pop(name, {}) for name in ("data", "scenario", "train", "deploy")}
    for name, part in parts.items():
        if not isinstance(part, Mapping):
            raise UserError(path=(name,), value=part, allowed=f"{name}.KEY=VALUE")
    own = {f"--{key}": f"data.{key}" for key in wanted.columns}
    own |= {"--data": "data.file"} if wanted.data.endswith(table_files.ENDINGS) else {}
    own |= {"--methods": "recipe_names"} if wanted.methods else {}
    for option, key in own.items():
        if {key.removeprefix("data.")} & {*tree, *parts["data"]}:
            raise UserError(f"{key} is there twice, by {option} and by --set", allowed="once")
    section, data = _data(folder, wanted, parts["data"])
    model = parts["train"].get("model") or _model(data)
    entries = list(wanted.methods or (FOR_TEXT if model == "lstm" else METHODS))
    named = [registry.entry(entry) for entry in entries]
    optimizer, lr = LOCAL.get(str(model), CNNS)
    train = {"model": model, **_loss(data), "rounds": 20, "epochs": 2, "batch_size": 32}
    if train.get("loss") == "mse":
        lr = LR_OF_NUMBERS
    content = {
        "experiment": Path(wanted.data).resolve().name.partition(".")[0],
        "data": section | {"validation": 0.1, "public": _public(entries, data)} | parts["data"],
        "scenario_names": ["iid"],
        "scenarios": {"iid": {"partition": "iid", "clients": 2}},
        "recipe_names": [name for name, _ in named],
        "recipes": dict(named),
        "seeds": tree.pop("seeds", [0, 1, 2]),
        "train": {**train, "optimizer": optimizer, "lr": lr} | parts["train"],
    }
    checked = config.checked(content, config.FILE)  # the scenario depends on these settings
    scenario = _scenario(parts["scenario"], data, checked)
    name = split_path(scenario["partition"])[1]
    content |= {"scenario_names": [name], "scenarios": {name: scenario}}
    content = _merged(content, tree)
    checked = config.checked(content, config.FILE)
    if wanted.deploy or parts["deploy"]:
        silos = max(2, min(3, checked.scenarios[name].clients))
        deploy = {"recipe": checked.recipe_names[0], "scenario": name, "seed": checked.seeds[0]}
        content["deploy"] = {**deploy, "silos": silos, "rounds": 2, **parts["deploy"]}
        checked = config.checked(content, config.FILE)
    check.check(checked)
    if data is not None:
        fits.fits(checked, data)
    return content, () if data is None else data.notes


def make(folder: Path, content: Mapping[str, Any]) -> None:
    """Makes the folder: git, DVC, and the files, params.yaml with this content last. UserError."""
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
        from dvc.exceptions import DvcException
        from dvc.repo import Repo

        repro.quiet_dvc()
        below = top is not None and Path(top.strip()) != folder.resolve()
        try:
            Repo.init(str(folder), subdir=below).close()
        except DvcException as error:
            raise UserError(f"{folder}: DVC refuses it: {error}") from None
        write_whole(folder / ".dvc" / "config", DVC)
    for name, ignored in IGNORED.items():
        path = folder / name
        there = path.read_text().splitlines() if path.exists() else []
        write_whole(path, "".join(f"{line}\n" for line in dict.fromkeys((*there, *ignored))))
    stages = STAGES.read_text()
    assert CODE in stages, "the stage `plan` of dvc.yaml begins so"
    stages = stages.replace(CODE, ANY)
    if "deploy" not in content:
        stages, parts = re.subn(r"\n  deploy:\n(    .*\n)+|(?<=train), deploy(?=\])", "", stages)
        assert parts == 2, "the stage and its section"
    write_whole(folder / "dvc.yaml", stages)
    write_whole(folder / "params.yaml", _written(content))


def _data(
    folder: Path, wanted: StudyOptions, keys: Mapping[str, Any]
) -> tuple[dict[str, Any], Dataset | None]:
    """(the section `data` without its held-out parts, the data; None if they are to be downloaded).

    `keys`: of the section, as asked for.
    """
    name = kind_of(wanted.data, "text" in wanted.columns)
    section: dict[str, Any] = {"name": name, "root": "." if ":" in name else PREPARED}
    if name != wanted.data:
        source = Path(wanted.data).resolve()
        if name in ("table", "text"):
            section["file"], source = source.name, source.parent
        inside = source.is_relative_to(folder.resolve())
        section["root"] = os.path.relpath(source, folder.resolve()) if inside else str(source)
    section |= wanted.columns
    if "," in (targets := wanted.columns.get("target", "")):
        section["target"] = targets.split(",")
    asked = section | dict(keys)
    if "file" in section and not {"label", "target"} & asked.keys():
        allowed = (
            f"a column of {wanted.data}: {', '.join(columns(wanted.data, asked))}; or --target"
        )
        raise UserError(MISSING, path=("--label",), allowed=allowed)
    options = {key: value for key, value in asked.items() if key not in DataSettings.model_fields}
    try:
        with forbidden():
            return section, datasets.load(asked["name"], folder / str(asked["root"]), **options)
    except DownloadNeededError:
        return section, None


def _loss(data: Dataset | None) -> dict[str, str]:
    """The loss, where the targets are no classes: of labels, or of numbers."""
    if data is None or data.has_classes:
        return {}
    labels = are_labels(data.train_y.numpy(), data.test_y.numpy())
    return {"loss": "bce" if labels else "mse"}


def _model(data: Dataset | None) -> str:
    """A model that fits the data."""
    if data is not None and data.embedding is not None:
        return "lstm"
    # Data sets that are downloaded are images of that size.
    shape = (1, CNN_PIXELS, CNN_PIXELS) if data is None else data.train_x.shape[1:]
    return model_for(shape)


def _public(entries: Sequence[str], data: Dataset | None) -> int:
    """The samples of the public split: none, unless a method needs them."""
    methods = [method for entry in entries for method in registry.parse(entry)]
    needs = any(registry.method(name)().needs.public >= Public.UNLABELLED for name in methods)
    most = 100 if data is None else max(1, min(100, len(data.train_y) // 10))
    return most if needs else 0


def _scenario(options: Mapping[str, Any], data: Dataset | None, checked: Config) -> dict[str, Any]:
    """How the data are divided: by owner, if they are known."""
    owners = None if data is None else data.train_owner
    usual = "dirichlet" if owners is None or "alpha" in options else "natural"
    name = options.get("partition", usual)
    if not names_code(name):
        known("partition", name, partitions.PARTITIONS)
    clients = 20 if data is None else max(2, min(20, len(data.train_y) // 50))
    if name in partitions.BY_OWNER and data is not None and owners is not None:
        held_out = (data.strata.train, checked.data.validation, checked.data.public)
        train = [hold_out(*held_out, seed).train for seed in checked.seeds]
        clients = min(MAX_OWNERS, *(len(np.unique(owners.numpy()[rows])) for rows in train))
    scenario = {"partition": name, "clients": clients, "participation": 1.0}
    return scenario | ({"alpha": 0.5} if name == "dirichlet" else {}) | dict(options)


def _written(content: Mapping[str, Any]) -> str:
    """The file, with comments that teach."""
    templates = jinja2.Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    templates.filters["yaml"] = in_one_line
    return templates.from_string(TEMPLATE.read_text()).render(content=content)


def _called(command: Sequence[str], folder: Path) -> str | None:
    """What a program prints; None if it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
