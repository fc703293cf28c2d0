"""The data of scenarios in which some owners take no part.

A module of its own: stages that read prepared data alone do not depend on the readers.
"""

from __future__ import annotations

from dataclasses import replace

from fedml_noniid.core.errors import UserError, located
from fedml_noniid.data import datasets, unseen
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.pipelines.experiment.config import FILE, Config
from fedml_noniid.pipelines.experiment.workspace import Workspace


def read(workspace: Workspace, settings: Config, scenario: str) -> Dataset:
    """The data set, read anew without the owners that take no part. UserError."""
    data = settings.data
    with located("scenarios", scenario, source=FILE):
        if data.embed is not None:
            raise UserError("is refused with data.embed", path=("unseen",), allowed="null")
        # `tune` and `choose` work below the folder of params.yaml.
        folder = replace(workspace, root=workspace.data.parent).user_folder(data.root)
        whole = datasets.load(data.name, folder, **data.options)
        return unseen.without(whole, settings.scenarios[scenario].unseen)
