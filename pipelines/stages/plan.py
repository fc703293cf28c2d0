"""Stage plan: hashes of the settings, code and the user's files of each stage -> plan/<stage>.json.

DVC compares these small files. So if a comment or a setting changes no result, only this stage runs
again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.provenance import contents, plan
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.plugins.data.files import replace_folder
from fedml_noniid.plugins.data.user_files import user_files


def content(hashes: Mapping[str, str]) -> bytes:
    """A file of plan/."""
    return (json.dumps(hashes, indent=2) + "\n").encode()


def run(place: Workspace) -> None:
    """Writes one file for each stage."""
    settings = config.load(place.root)
    data = settings.data
    files_of_user = contents(user_files(data.name, place.given(data.root), data.options))
    found = plan(settings, files_of_user)
    files = {f"{stage}.json": content(hashes) for stage, hashes in found.items()}
    replace_folder(place.root / "plan", files)
