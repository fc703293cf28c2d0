"""Stage prepare: a data set's own files -> data/<name>.safetensors, with a checksum."""

from __future__ import annotations

import argparse
import logging

from pipelines import cli, config
from plugins.data import datasets

log = logging.getLogger(__name__)


def prepare(_: argparse.Namespace) -> None:
    """Loads the data set of params.yaml and keeps it as tensors."""
    settings = config.load().data
    data = datasets.load(settings.name, config.root() / settings.root, **settings.options)
    path = config.root() / "data" / f"{settings.name}.safetensors"
    data.save(path)
    log.info(
        "%s: %d training and %d test samples of %s, %d classes, sha256 %s",
        data.name, len(data.train_y), len(data.test_y), "x".join(map(str, data.train_x.shape[1:])),
        len(data.classes), data.checksum[:12],
    )  # fmt: skip
    for note in data.notes:
        log.info("%s: %s", data.name, note)


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    return cli.run(prepare, __doc__, arguments)
