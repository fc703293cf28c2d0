"""The studies behind a paper's tables and figures: `research/papers/<paper>/params.yaml`, at one
of three sizes.

A study is an experiment like that of the repository's params.yaml. Its folder
`research/built/<paper>/<size>/studies/<study>` has a params.yaml, and the same stages run it.
`like: other` starts from another study of the paper. The settings of a study are those of size
`paper`; the keys under `smoke` or `small` replace some of them at that size. A size with an empty
`scenario_names` does not run the study.
"""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.checks import known
from fedml_noniid.data.yaml_files import read_yaml

PAPERS = ("fnr", "fednnnn", "ccn", "fednlr", "rfedavg")
TITLES = {
    "fnr": "FNR-FL",
    "fednnnn": "FedNNNN",
    "ccn": "CCN",
    "fednlr": "FedNLR",
    "rfedavg": "rFedAvg and rFedAvg+",
}
SIZES = ("smoke", "small", "paper")
RESULTS = Path("research") / "built"
PAPER_FILES = Path("research") / "papers"
TEMPLATES = Path(__file__).parent / "templates"
# Beside a study's runs: the items without a model, as their loss is not finite; the trials of a
# tuned study.
DIVERGED, TUNED = "diverged.json", "tuned.json"
# Of `like`: a list of the study replaces the other's list, with its names and what sizes change of
# it.
REPLACED = {"scenarios": "scenario_names", "recipes": "recipe_names"}
# Keys that are no settings of the experiment.
ABOUT = ("what", "like", "looks", *SIZES)


@dataclass(frozen=True)
class Study:
    """One study at one size."""

    paper: str
    name: str
    size: str
    what: str  # a few words for people
    content: Mapping[str, Any]  # a params.yaml
    kind: str = "studies"  # or "claims", or "tune" for the trials of a study of claims
    # Numbers of seeds at which claims are judged, ascending. Empty: once, with all seeds.
    looks: tuple[int, ...] = ()

    @property
    def is_run(self) -> bool:
        """Whether this size runs it.

        `scenario_names: []` leaves it out, for instance where its data may be missing.
        """
        return bool(self.content["scenario_names"])

    @property
    def items(self) -> list[str]:
        """The names of its runs, seed by seed."""
        if not self.is_run:
            return []
        names = ("seeds", "scenario_names", "recipe_names")
        return [
            f"{s}-{r}-{seed}"
            for seed, s, r in itertools.product(*(self.content[key] for key in names))
        ]

    def until(self, seeds: int) -> Study:
        """The study with its first seeds only, so many."""
        return replace(self, content={**self.content, "seeds": self.content["seeds"][:seeds]})

    @property
    def folder(self) -> Path:
        """Its results, relative to the repository."""
        if self.kind == "tune":
            return RESULTS / "tune" / f"{self.paper}-{self.size}" / self.name
        return RESULTS / self.paper / self.size / self.kind / self.name

    @property
    def data_folder(self) -> Path:
        """Its prepared data, relative to the repository: the same for all studies with the same
        data settings."""
        data = {
            key: value
            for key, value in self.content["data"].items()
            if key not in ("validation", "public")
        }
        digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
        return Path("data") / "papers" / f"{data['name']}-{digest[:8]}"

    def yaml(self, root: Path) -> str:
        """Its params.yaml, in which the folder of raw data is the repository's (`root`)."""
        raw = root / self.content["data"].get("root", "data/raw")
        data = dict(self.content["data"]) | {"root": os.path.relpath(raw, root / self.folder)}
        text = io.StringIO()
        YAML(typ="safe", pure=True).dump({**self.content, "data": data}, text)
        return text.getvalue()


def folder_of(paper: str, root: Path) -> Path:
    """The folder with a paper's params.yaml, targets.yaml and reported.yaml: the root's own, or the
    package's."""
    local = root / PAPER_FILES / paper
    return local if local.is_dir() else Path(__file__).parent / "papers" / paper


def of_paper(paper: str, size: str, root: Path) -> dict[str, Study]:
    """The studies of a paper at a size, in the order in which they are worth running.

    UserError for a bad file.
    """
    known("paper", paper, PAPERS)
    known("size", size, SIZES)
    path = folder_of(paper, root) / "params.yaml"
    content = read_yaml(path)
    studies = content.get("studies")
    if not isinstance(studies, dict) or not studies:
        raise UserError(f"{path}: the key 'studies' is missing")
    return {name: resolved(paper, name, size, studies, f"{path}: study") for name in studies}


def resolved(paper: str, name: str, size: str, studies: Mapping[str, Any], kind: str) -> Study:
    """One of `studies`, at a size. UserError for a `like` that leads nowhere; `kind` begins it."""
    whole = _resolved(name, studies, kind, ())
    content = {key: value for key, value in whole.items() if key not in ABOUT}
    if size != "paper":
        content = _laid_over(content, whole.get(size) or {})
    for entries, names in REPLACED.items():
        content.setdefault(names, list(content.get(entries) or {}))
    content["experiment"] = f"{paper}-{name}-{size}"
    content["machine"] = {"checkpoint_every": 1}  # rounds may take minutes
    looks = () if size == "smoke" else tuple(whole.get("looks") or ())
    return Study(paper, name, size, str(whole.get("what", name)), content, looks=looks)


def _resolved(
    name: str, studies: Mapping[str, Any], kind: str, followed: tuple[str, ...]
) -> dict[str, Any]:
    """A study with the settings of those that it is like."""
    study = studies[known(kind, name, studies)] or {}
    base = study.get("like")
    if base is None:
        return copy.deepcopy(dict(study))
    if base in followed or base == name:
        raise UserError(f"{kind} {name!r} is like itself, by way of {base!r}")
    inherited = _resolved(base, studies, kind, (*followed, name))
    for entries, names in REPLACED.items():
        if entries in study:
            for settings in (inherited, *(inherited.get(size) or {} for size in SIZES)):
                settings.pop(entries, None)
                settings.pop(names, None)
    content = _laid_over(inherited, study)
    # A size may take away a key that only the study itself has, so its null stays until then.
    return content | {
        size: _laid_over(inherited.get(size) or {}, study.get(size) or {}, keep_null=True)
        for size in SIZES
        if size in inherited or size in study
    }


def _laid_over(
    below: Mapping[str, Any], above: Mapping[str, Any], keep_null: bool = False
) -> dict[str, Any]:
    """`below` with the keys of `above`, sections key by key; null takes a key away, later if it is
    kept."""
    merged = dict(copy.deepcopy(below))
    for key, value in above.items():
        if value is None and not keep_null:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _laid_over(merged[key], value, keep_null)
        else:
            merged[key] = copy.deepcopy(value)
    return merged
