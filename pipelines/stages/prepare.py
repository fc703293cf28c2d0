"""Stage prepare: a data set's own files -> data/<name>.safetensors, with a checksum.

With `data.embed`, the file has the vectors that a frozen network makes of the samples.
"""

from __future__ import annotations

import logging

from fedml_noniid.data import datasets
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.embedding import embedded
from fedml_noniid.pipelines.experiment.workspace import Workspace

log = logging.getLogger(__name__)


def run(place: Workspace) -> None:
    """Loads the data set of params.yaml and saves it as tensors."""
    whole = config.load(place.root)
    settings = whole.data
    data = datasets.load(settings.name, place.given(settings.root), **settings.options)
    data = embedded(whole, data)
    data.save(place.dataset(settings.name))
    log.info(
        "%s: %d training and %d test samples of %s, %d %s, sha256 %s",
        data.name,
        len(data.train_y),
        len(data.test_y),
        "x".join(map(str, data.train_x.shape[1:])),
        len(data.classes),
        "classes" if data.has_classes else "targets",
        data.checksum[:12],
    )
    for note in data.notes:
        log.info("%s: %s", data.name, note)
