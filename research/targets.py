"""Reads targets, the tables and figures of `research/papers/<paper>/targets.yaml`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.representer import RoundTripRepresenter

from fedml_noniid.core.errors import UserError, located
from fedml_noniid.core.options import OpenSection, Section, validated
from fedml_noniid.data.checks import known
from fedml_noniid.data.yaml_files import read_yaml
from research.studies import PAPERS, folder_of, of_paper

NOT_HERE = "not run at this size"
# Kind that reads only the settings of its studies. Kind `heat_maps` reads only the partitions.
SETTINGS_ONLY = "settings"


class Head(Section):
    """The keys that targets of all kinds have."""

    kind: str
    title: str
    protocol: list[str]  # what runs, which settings the paper leaves open, and our choices


class OfAnyKind(Head, OpenSection):
    """A target with the keys of its kind."""


@dataclass(frozen=True)
class Target:
    """One table or figure."""

    id: str  # such as "rf-tab1"
    paper: str
    kind: str
    title: str
    protocol: Sequence[str]
    spec: Mapping[str, Any]  # all keys, including those of its kind
    # The paper's entry in reported.yaml: rows, columns, unit, ...
    reported: Mapping[str, Any] | None

    @property
    def studies(self) -> tuple[str, ...]:
        """All studies that the target reads: the values of all keys `study` at any depth."""
        return tuple(dict.fromkeys(_studies(self.spec)))

    @property
    def is_trained(self) -> bool:
        """Whether it reads runs of its studies."""
        return self.kind not in (SETTINGS_ONLY, "heat_maps")

    def printed(self, row: str, column: str, default: object = None) -> Any:
        """A cell of the paper's own table. `default` if the table lacks it."""
        if (
            self.reported is None
            or row not in self.reported["rows"]
            or column not in self.reported["columns"]
        ):
            return default
        return self.reported["rows"][row][list(self.reported["columns"]).index(column)]


class Built(NamedTuple):
    """A target after it was built."""

    table: Sequence[Sequence[str]]  # the first line is the header; empty if there is only a picture
    files: Mapping[str, bytes]  # by ending: csv, png, ...
    sentences: tuple[str, ...]  # on the paper's claim, from our numbers
    missing: tuple[str, ...] = ()  # results that the target needs and that do not exist yet
    printed: Sequence[Sequence[str]] = ()  # the paper's own table, if ours has another layout
    # Leaks, notes on the data and diverged seeds of the runs that were read.
    remarks: tuple[str, ...] = ()


def as_printed(number: float) -> str:
    """A number of reported.yaml in the paper's digits: 0.9970, which is 0.997 elsewhere."""
    return str(RoundTripRepresenter().represent_data(number).value)


def nothing(missing: Sequence[str], sentences: Sequence[str] = ()) -> Built:
    """A target without runs."""
    return Built((), {}, tuple(sentences), tuple(missing) or (() if sentences else (NOT_HERE,)))


def of_targets(paper: str, root: Path) -> dict[str, Target]:
    """The targets of a paper by id. UserError for a bad file, and for studies that do not exist."""
    folder = folder_of(known("paper", paper, PAPERS), root)
    path = folder / "targets.yaml"
    read_yaml(folder / "reported.yaml")  # raises what is wrong with the file
    reported = YAML(typ="rt").load(folder / "reported.yaml")  # keeps the digits of numbers
    studies = of_paper(paper, "paper", root)
    targets = {}
    for name, spec in read_yaml(path).items():
        with located(source=f"{path}: {name}"):
            head = validated(OfAnyKind, spec)
            target = Target(
                name, paper, head.kind, head.title, head.protocol, spec, reported.get(name)
            )
            for study in target.studies:
                known("study", study, studies)
        targets[name] = target
    return targets


def address(target: str, setting: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    """{study, scenario, recipe, ...} of a row in a column, or of a line in a panel.

    `setting` is the title of the column or panel. Later parts override earlier parts. A part's `at`
    overrides all parts for that title, for a method with settings of its own (`at: {title: {study:
    other}}`). `{key}` in a text stands for the value of that key: `method: fedprox` and `recipe:
    "{method}+ccn"`. UserError for an unknown key in a text.
    """
    special = [dict(part.get("at", {})).get(setting, {}) for part in parts]
    whole = {
        key: value for part in (*parts, *special) for key, value in part.items() if key != "at"
    }
    try:
        return {
            key: value.format_map(whole) if isinstance(value, str) else value
            for key, value in whole.items()
        }
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"{target}: {whole} names a key in braces that it lacks ({error})"
        ) from None


def paper_of(target: str, root: Path) -> str:
    """The paper that a target belongs to. UserError for an unknown one."""
    papers = [paper for paper in PAPERS if (folder_of(paper, root) / "targets.yaml").is_file()]
    owners = {name: paper for paper in papers for name in of_targets(paper, root)}
    return owners[known("table or figure", target, owners)]


def _studies(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        if "study" in tree:
            yield str(tree["study"])
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for value in tree:
            yield from _studies(value)
