"""Reads the files of the train and evaluate stages: one `ItemResult` per finished train item.

The folder `runs/<key>/` decides which results exist; `evaluation/<key>/` is added where it is
present. A folder without `run.json` is an unfinished train item and is skipped.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedml_noniid.core.errors import UserError
from fedml_noniid.metrics import Metric, main_of, metric_of
from fedml_noniid.pipelines.experiment import cache

COLUMNS = ("round", "bytes_up", "bytes_down")
TESTED = ("test_", "validation_")  # begin the columns of accuracy, loss and metrics
METRIC = "metric/"  # begins the names of the user's metrics in metrics.json and per_client.csv
OWN_VIEWS = ("noise", "rotation", "drift")  # skews with which clients see the test set differently
RERUN = "delete its folder and run `noniid run` again"


class Site(NamedTuple):
    """The client of a named owner."""

    samples: int  # of training
    tests: int  # its own test samples
    score: float  # accuracy, or another main metric, on these


class UnseenSite(NamedTuple):
    """An owner that took no part."""

    samples: int  # all of it
    majority: float  # the share of its largest class
    accuracy: float  # NaN without samples


@dataclass(frozen=True)
class ItemResult:
    """One train item: a recipe on a scenario with a seed."""

    key: str
    scenario: str
    recipe: str
    composition: str
    seed: int
    params: Mapping[str, object]
    tags: Mapping[str, str]
    final: Mapping[str, float]
    made: Mapping[
        str, Any
    ]  # how it was trained: seconds, machine, commit; empty if trained elsewhere
    rows: tuple[Mapping[str, float], ...]
    evaluation: Mapping[str, Any]
    client_accuracy: tuple[float, ...]  # or another main metric, on each client's own test samples
    files: tuple[Path, ...]
    notes: tuple[str, ...]  # what the data set's reader says about the data
    sites: Mapping[str, Site] = field(default_factory=dict)  # by owner; empty without names
    unseen: Mapping[str, UnseenSite] = field(default_factory=dict)  # by owner

    @property
    def main(self) -> str:
        """The name of the main metric, such as accuracy."""
        return main_of(self.rows[0])

    @property
    def metric(self) -> Metric:
        """How the main metric is written."""
        return metric_of(self.main)

    @property
    def tested(self) -> list[float]:
        """The main metric on the test set, of the evaluated rounds."""
        return self.column(f"test_{self.main}")

    @property
    def site_scores(self) -> dict[str, float]:
        """The main metric of each named owner's client on the owner's test samples.

        Empty unless these samples are the same for models of one's own and models for all: for
        other partitions than `natural`, and where clients see the test set differently.
        """
        is_natural = self.params.get("scenario.partition") == "natural"
        if not is_natural or any(self.params.get(f"scenario.{skew}") for skew in OWN_VIEWS):
            return {}
        return {name: site.score for name, site in self.sites.items()}

    @property
    def client_scores(self) -> tuple[float, ...]:
        """`site_scores`, or else `client_accuracy`."""
        return tuple(self.site_scores.values()) or self.client_accuracy

    @property
    def site_tests(self) -> int:
        """How many test samples the named owners have together."""
        return sum(site.tests for site in self.sites.values())

    @property
    def seconds(self) -> tuple[float, ...] | None:
        """Seconds of each round. None if it was trained elsewhere."""
        return tuple(self.made["seconds"]) if "seconds" in self.made else None

    def column(self, name: str) -> list[float]:
        """The finite values of one column of rounds.csv, in the order of the rounds."""
        return [row[name] for row in self.rows if math.isfinite(row.get(name, math.nan))]


def read(root: Path, repository: Path | None = None) -> list[ItemResult]:
    """Every finished train item under `root`, sorted by key. UserError names the unreadable file.

    `repository` has the store with `made.json` (how each item was made); the default is `root`.
    """
    return [
        _result(root, repository or root, path.parent)
        for path in sorted((root / "runs").glob("*/run.json"))
    ]


def finals(columns: Iterable[str]) -> list[str]:
    """The columns of rounds.csv that say how good a model is."""
    return [name for name in columns if name.startswith(TESTED)]


def rows(path: Path, rounds: int | None = None) -> tuple[dict[str, float], ...]:
    """The lines of rounds.csv, one per round. UserError if there are not `rounds` of them.

    An empty cell is NaN: nothing was measured in that round.
    """
    lines = table(path)
    if lines and len(lines) != (rounds or len(lines)):
        raise UserError(f"{path}: has {len(lines)} rounds, expected {rounds}")
    missing = [name for name in COLUMNS if not lines or name not in lines[0]]
    if lines and not any(name.startswith("test_") for name in lines[0]):
        missing.insert(0, "test_accuracy")
    if missing:
        raise UserError(f"{path}: has no {'column ' + missing[0] if lines else 'lines'}")
    return tuple(_floats(path, lines))


def of_clients(columns: Iterable[str]) -> str:
    """The column of per_client.csv that says how well a client is served."""
    return "accuracy" if "accuracy" in columns else f"test_{main_of(columns)}"


def _of_clients(path: Path) -> tuple[list[float], dict[str, Site]]:
    """The finite values of that column, and those of named owners."""
    rows = table(path)
    if not rows:
        return [], {}
    main = of_clients(rows[0])
    score = f"test_{main_of(rows[0])}" if "owner" in rows[0] else main
    try:
        values = [float(row[main] or "nan") for row in rows]
        sites = {
            row["owner"]: Site(int(row["samples"]), int(row["test_samples"]), float(row[score]))
            for row in rows
            if row.get("owner") and row[score]  # there is none without test samples
        }
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}, expected numbers; {RERUN}") from None
    return [value for value in values if math.isfinite(value)], sites


def unseen_sites(lines: Iterable[Mapping[str, Any]]) -> dict[str, UnseenSite]:
    """The owners of unseen.csv. KeyError and ValueError for other lines."""
    keys = ("majority_accuracy", "accuracy")
    return {
        str(line["owner"]): UnseenSite(
            int(line["samples"]), *(math.nan if line[k] == "" else float(line[k]) for k in keys)
        )
        for line in lines
    }


def table(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file as text, keyed by its header."""
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file, restval="(missing)", restkey="(too many cells)"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: can't be read ({error})") from None


def record(path: Path) -> dict[str, Any]:
    """One JSON object."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read as JSON ({error}); {RERUN}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {type(content).__name__}, expected a JSON object; {RERUN}")
    return content


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are finite numbers."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _result(root: Path, repository: Path, folder: Path) -> ItemResult:
    path = folder / "run.json"
    run, evaluation = record(path), root / "evaluation" / folder.name
    partition = root / "partitions" / f"{run.get('scenario')}-{run.get('seed')}"
    metrics, per_client = evaluation / "metrics.json", evaluation / "per_client.csv"
    named = [folder / "rounds.csv", folder / "model.safetensors"]
    named += [partition / "heatmap.png", *partition.glob("indices.*")]
    named += [metrics, evaluation / "per_class.csv", evaluation / "per_target.csv", per_client]
    named += [evaluation / "confusion.csv", evaluation / "unseen.csv"]
    try:
        tags = {name: str(value) for name, value in run["tags"].items()}
        made = cache.made(repository, tags.get("fingerprint", ""))
        scores, sites = _of_clients(per_client) if per_client.exists() else ([], {})
        return ItemResult(
            key=folder.name,
            scenario=str(run["scenario"]),
            recipe=str(run["recipe"]),
            composition=str(run["composition"]),
            seed=int(run["seed"]),
            params=dict(run["params"]),
            tags={"weights_sha256": str(run["weights_sha256"])} | tags | made.get("tags", {}),
            final=numbers(run["final"]),
            made=made,
            rows=rows(folder / "rounds.csv", int(run["rounds"])),
            evaluation=record(metrics) if metrics.exists() else {},
            client_accuracy=tuple(scores),
            sites=sites,
            unseen=unseen_sites(table(named[-1])) if named[-1].exists() else {},
            files=tuple(file for file in named if file.exists()),
            notes=tuple(run["notes"]),
        )
    except KeyError as error:
        raise UserError(f"{path}: the key {error} is missing; {RERUN}") from None
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: has a value of the wrong type ({error}); {RERUN}") from None


def _floats(path: Path, lines: Sequence[Mapping[str, str]]) -> Iterator[dict[str, float]]:
    """The lines of a CSV file as numbers. An empty cell is NaN."""
    for number, cells in enumerate(lines, start=2):
        try:
            yield {name: float(text or "nan") for name, text in cells.items()}
        except (TypeError, ValueError) as error:  # a TypeError for too many cells
            raise UserError(f"{path}: line {number}: {error}, expected numbers") from None
