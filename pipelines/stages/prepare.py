"""Stage prepare: a data set's own files -> data/<name>.safetensors, with a checksum.

With `data.embed`, the file has the vectors that a frozen network makes of the samples.
"""

from __future__ import annotations

import logging

from fedml_noniid.data import datasets
from fedml_noniid.data.readers import table
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.embedding import embedded
from fedml_noniid.pipelines.experiment.workspace import Workspace

log = logging.getLogger(__name__)


def run(workspace: Workspace) -> None:
    """Loads the data set of params.yaml and saves it as tensors."""
    whole = config.load(workspace.root)
    settings = whole.data
    data = datasets.load_once(settings.name, workspace.user_folder(settings.root), settings.options)
    data = embedded(whole, data)
    data.save(workspace.dataset(settings.name))
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
        if table.IN_ORDER not in note:  # `noniid init` and the report have the list
            log.info("%s: %s", data.name, note)
