"""Stage study: all items of one study of a paper, in one process -> papers/<paper>/<size>/studies/<study>/.

Its folder is laid out as the repository is (params.yaml, partitions, runs, evaluation). Items run seed by seed, so that
a part of a study is a table already, and on a CPU as many at a time as there are cores, with the same results. Trained
items are kept under their fingerprints in .items/ until `make clean`: what was trained once is copied, whatever else of
the study has changed. A kill loses at most the rounds in progress.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shutil
import time
from argparse import Namespace
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pipelines import check, cli, config, evaluate, partition, studies, train
from pipelines.items import Item
from pipelines.provenance import fingerprint_of
from pipelines.workers import how_many, side_by_side
from plugins.core.errors import NonFiniteError, UserError
from plugins.data import datasets
from plugins.data.checks import known
from plugins.data.files import replace_folder, write_whole
from plugins.engines.simulation import resolve_device

log = logging.getLogger(__name__)
KEPT = ".items"


def run(options: argparse.Namespace) -> None:
    """Runs a study of a paper."""
    root = config.root()
    found = studies.of_paper(options.paper, options.size, root)
    execute(root, found[known(f"study of {options.paper}", options.study, found)])
    done, of = settled(root, found.values())
    log.info("%s %s: %d of the paper's %d items are settled", options.paper, options.size, done, of)


def settled(root: Path, found: Collection[studies.Study]) -> tuple[int, int]:
    """(items of the studies that are run, or skipped, to their end; items of all of them)."""
    ends = (studies.DIVERGED, studies.SKIPPED)
    done = (one for one in found if any((root / one.folder / end).is_file() for end in ends))
    return sum(one.n_items for one in done), sum(one.n_items for one in found)


def execute(root: Path, study: studies.Study) -> None:
    """Runs what is left of a study, under its folder in the repository `root`."""
    # Made anew from the items that are kept, so that nothing is left of other settings.
    shutil.rmtree(root / study.folder, ignore_errors=True)
    write_whole(root / study.folder / config.FILE, study.yaml(root))
    if not study.is_run:
        log.info("%s %s: not run at size %s", study.paper, study.name, study.size)
        return
    with _inside(root, study):
        settings = config.load()
        check.check(Namespace())
        try:
            prepared(root, study, settings.data)
        except UserError as error:
            if study.size != "small":
                raise
            # This size takes what data there are.
            write_whole(config.root() / studies.SKIPPED, f"{error}\n")
            log.info("%s %s is skipped: %s", study.paper, study.name, error)
            return
        items = [
            Namespace(seed=seed, scenario=scenario, recipe=recipe)
            for seed in settings.seeds
            for scenario in settings.scenario_names
            for recipe in settings.recipe_names
        ]
        on_gpu = resolve_device(settings.train.device).type == "cuda"
        _all(root, study, items, how_many(settings.train.threads, on_gpu))


def prepared(root: Path, study: studies.Study, data: config.DataSettings) -> Path:
    """The study's data as tensors; read from the data set's own files if they have not been yet."""
    path = root / study.data_folder / f"{data.name}.safetensors"
    if not path.is_file():
        datasets.load(data.name, config.root() / data.root, **data.options).save(path)
    return path


def _all(root: Path, study: studies.Study, items: list[Namespace], processes: int) -> None:
    """Every item, as many side by side as there are processes, with the time that is left."""
    for item in items:
        if not (config.root() / "partitions" / f"{item.scenario}-{item.seed}").exists():
            partition.run(item)  # the first of its scenario and seed
    began, fresh, diverged = time.monotonic(), 0, {}
    done = enumerate(side_by_side(partial(_item, root), items, processes), start=1)
    for n, (item, outcome) in done:
        fresh += outcome.trained
        left = (time.monotonic() - began) / max(fresh, 1) * (len(items) - n)
        if outcome.reason:
            diverged[_folder("", item).name] = outcome.reason
        log.info(
            "%s %s, %d of %d: %s %s%s", study.paper, study.name, n, len(items), _folder("", item).name,
            outcome.reason or f"{100 * outcome.accuracy:.2f} %",
            f", {_clock(left)} left" if outcome.trained else ", known",
        )  # fmt: skip
    write_whole(config.root() / studies.DIVERGED, json.dumps(diverged, indent=2) + "\n")


class _Outcome(NamedTuple):
    trained: bool  # not taken from those that are kept
    accuracy: float
    reason: str = ""  # why there is no model


def _item(root: Path, options: Namespace) -> _Outcome:
    """Trains an item or takes it from those that are kept, and evaluates it.

    Training that diverges is an outcome too, which a table has to show: it is kept and does not end the study.
    """
    item = Item.load(options.scenario, options.recipe, options.seed)
    kept = root / KEPT / fingerprint_of(item)[:16]
    folder = config.root() / _folder("runs", options)
    fresh = not kept.is_dir()
    if fresh:
        try:
            train.train(options)
            files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        except NonFiniteError as error:
            files = {studies.DIVERGED: str(error).encode()}
        replace_folder(kept, files)
    if (kept / studies.DIVERGED).is_file():
        return _Outcome(fresh, math.nan, (kept / studies.DIVERGED).read_text())
    if not fresh:
        replace_folder(folder, {path.name: path.read_bytes() for path in sorted(kept.iterdir())})
    evaluate.run(options)
    metrics = json.loads((config.root() / _folder("evaluation", options) / "metrics.json").read_text())
    return _Outcome(fresh, float(metrics["accuracy"]))


def _folder(kind: str, item: Namespace) -> Path:
    return Path(kind) / f"{item.scenario}-{item.recipe}-{item.seed}"


@contextmanager
def _inside(root: Path, study: studies.Study) -> Iterator[None]:
    """The study's folder as the current one, with the prepared data where the stages look for them."""
    folder, data = root / study.folder, root / study.data_folder
    data.mkdir(parents=True, exist_ok=True)
    link = folder / "data"
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(data, folder), target_is_directory=True)
    os.environ.setdefault("DVC_ROOT", str(root))  # MLflow's store and what is resumed are the repository's
    chatty = [logging.getLogger(name) for name in ("pipelines.train", "pipelines.partition")]
    levels = [logger.level for logger in chatty]
    for logger in chatty:
        logger.setLevel(logging.WARNING)  # a line per item is enough
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(root)
        for logger, level in zip(chatty, levels, strict=True):
            logger.setLevel(level)
        link.unlink(missing_ok=True)


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    return cli.run(run, __doc__, arguments, "paper", "study", "size")
