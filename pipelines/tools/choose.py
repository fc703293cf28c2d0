"""Choosing, which is no stage of DVC: runs the race of `racing` in choose/, and writes its
tables.

Every training is an item like those of stage `train`: stored under its fingerprint, so it is made
once, and a kill loses at most the rounds since its last checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

from fedml_noniid.pipelines.experiment.config import FILE, Config
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages.tune import measured
from fedml_noniid.pipelines.tools import racing
from fedml_noniid.pipelines.tools.racing import Accuracies, Decision, Heat
from fedml_noniid.plugins.core.errors import UserError, located
from fedml_noniid.plugins.data.dataset import Dataset
from fedml_noniid.plugins.data.files import write_whole
from fedml_noniid.plugins.engines.simulation import drive

FOLDER = "choose"


def choose(place: Workspace, settings: Config) -> Decision:
    """Runs the race of an experiment whose data are prepared.

    Raises UserError if there is nothing to choose, or if FedAvg diverges at all of its values.
    """
    with located(source=FILE):
        racing.tried(settings)
    path = place.dataset(settings.data.name)
    if not path.is_file():
        raise UserError(f"{path}: is missing; stage prepare makes it")
    race_place = replace(place, root=place.root / FOLDER)

    def answer(heat: Heat) -> Accuracies:
        title = f"{settings.experiment}, choosing, {heat.name}"
        return measured(race_place, heat.laid_out(settings), title, heat.column)

    decision = drive(racing.race(settings, len(Dataset.read(path).test_y)), answer)
    tables = {
        "heats.csv": racing.frame_of_heats(decision),
        "final.csv": racing.frame_of_final(decision),
    }
    for name, table in tables.items():
        write_whole(race_place.root / name, table.to_csv(index=False, lineterminator="\n"))
    return decision
