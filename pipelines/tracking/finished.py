"""Makes of results on disk what a finished MLflow run has: of an item, and of a method over its
seeds."""

from __future__ import annotations

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedml_noniid.data.yaml_files import read_yaml
from fedml_noniid.metrics import Metric
from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.reporting.text import MIB

MODEL = "model.safetensors"  # is stored with the registered model
TRAFFIC = "mean_traffic_mib"
KIND = "kind"  # tag: METHOD, or "deployment"
METHOD = "method"


@dataclass(frozen=True)
class Finished:
    """What a finished run has."""

    name: str
    digest: str  # of everything else
    params: Mapping[str, object]
    tags: Mapping[str, str]
    rows: Sequence[Mapping[str, float]]  # of the rounds, with their `seconds` if they are known
    final: Mapping[str, float]
    files: Sequence[Path]
    written: Path  # the file that was written last
    live: str = ""  # id of the run that recorded it
    items: tuple[ItemResult, ...] = ()  # the item, or the seeds of the method
    parent: str = ""  # name of the run that this one is nested in

    @property
    def ended(self) -> int:
        """The end in milliseconds."""
        return round(1000 * self.written.stat().st_mtime)

    @property
    def began(self) -> float:
        """The beginning in seconds."""
        return self.ended / 1000 - sum(results.numbers(row).get("seconds", 0) for row in self.rows)


def hashed(about: str, files: Sequence[Path] = ()) -> str:
    """SHA-256 over a text, and over the names and contents of files."""
    content = hashlib.sha256(about.encode())
    for path in files:
        content.update(f" {path.name} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return content.hexdigest()


def shown_name(name: str, metric: Metric) -> str:
    """The name of a mean over seeds that is rounded as the report has it, in percent where that
    has. Runs of seeds have no number of this name, so charts of it show methods alone."""
    return f"mean_{name}_percent" if metric.percent else f"mean_{name}"


def shown_value(value: float, metric: Metric) -> float:
    """That number."""
    return round(metric.factor * value, metric.decimals)


def from_item(item: ItemResult, root: Path) -> Finished:
    """The run of a finished item. The model's own hash is among its tags."""
    data = (root / "data" / f"{item.params.get('data.name')}.safetensors").exists()
    facts = (item.key, item.composition, item.params, item.tags, item.final, item.seconds, data)
    files = [path for path in item.files if path.name != MODEL]
    about = {key: str(getattr(item, key)) for key in ("scenario", "recipe", "composition", "seed")}
    about["item"] = item.key
    return Finished(
        item.key,
        hashed(repr(facts), files),
        {**item.params, **about},
        {**item.tags, **about},
        [
            {**row, **({} if item.seconds is None else {"seconds": item.seconds[index]})}
            for index, row in enumerate(item.rows)
        ],
        {**item.final, **results.numbers(item.evaluation)},
        # An edit of params.yaml that changes no item makes no work. So the digest leaves it out.
        [*files, *filter(Path.is_file, [root / "params.yaml"])],
        next(path for path in files if path.name == "rounds.csv"),
        item.made.get("run_id", ""),
        (item,),
        f"{item.scenario}-{item.recipe}",
    )


def from_items(items: Sequence[ItemResult], root: Path) -> list[Finished]:
    """The runs of all items, in the order of the recipes of params.yaml, and then that of each
    method at each scenario."""
    path = root / "params.yaml"
    names = read_yaml(path).get("recipe_names") if path.is_file() else None
    order = {name: index for index, name in enumerate(names or ())}
    ordered = sorted(items, key=lambda item: order.get(item.recipe, len(order)))
    runs = [from_item(item, root) for item in ordered]
    by_method = defaultdict[str, list[Finished]](list)
    for run in runs:
        by_method[run.parent].append(run)
    return runs + [_method(name, seeds_, root) for name, seeds_ in by_method.items()]


def _method(name: str, runs: Sequence[Finished], root: Path) -> Finished:
    """The run of a method: means over its seeds, what its seeds have in common, and the pictures of
    its scenario."""
    items = tuple(item for run in runs for item in run.items)
    first, metric = items[0], items[0].metric
    main, worst = shown_name(first.main, metric), shown_name("worst_client", metric)
    scores = [item.tested[-1] for item in items if item.tested]
    worsts = [min(item.client_scores) for item in items if item.client_scores]
    traffic = [row["bytes_up"] + row["bytes_down"] for item in items for row in item.rows]
    final = {
        column: shown_value(statistics.fmean(values), metric)
        for column, values in ((main, scores), (worst, worsts))
        if values
    }
    final[TRAFFIC] = sum(traffic) / MIB / len(items)
    if len(scores) > 1:
        deviation = shown_value(statistics.stdev(scores), metric)
        final[f"{main.removeprefix('mean_')}_deviation"] = deviation
    fingerprint = hashed(" ".join(run.digest for run in runs))
    names = (f"{first.main}-{first.scenario}.png", f"clients-{first.scenario}.png")
    pictures = [*filter(Path.is_file, (root / "report" / file for file in names))]
    tags = {KIND: METHOD, "item": name, "fingerprint": fingerprint}
    tags["seeds"] = ", ".join(str(item.seed) for item in items)
    return Finished(
        name,
        hashed(fingerprint, pictures),
        _common([run.params for run in runs]),
        _common([run.tags for run in runs]) | tags,
        _mean_rows(items, main),
        final,
        pictures,
        max((run.written for run in runs), key=lambda path: path.stat().st_mtime),
        items=items,
    )


def _common(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all have in common, without the number of a seed, which one seed has by itself."""
    return {
        key: value
        for key, value in values[0].items()
        if key not in ("item", "seed") and all(other.get(key) == value for other in values)
    }


def _mean_rows(items: Sequence[ItemResult], name: str) -> list[dict[str, float]]:
    """The mean of the main metric by round, over the rounds that all seeds evaluated."""
    # Imported here: it imports pandas.
    from fedml_noniid.pipelines.reporting.summary import courses

    scores = courses(items).dropna().mean(axis=1)
    return [{"round": t, name: shown_value(x, items[0].metric)} for t, x in scores.items()]
