"""Choosing, which is no stage of DVC: searches in choose/, decides, and writes its tables.

Every training is an item like those of stage `train`: stored under its fingerprint, so it is made
once, and a kill loses at most the rounds since its last checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fedml_noniid.core.errors import located
from fedml_noniid.data.files import write_whole
from fedml_noniid.engines.simulation import drive
from fedml_noniid.pipelines.experiment import search
from fedml_noniid.pipelines.experiment.config import FILE, Config
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.reporting.decision import Decision, decide
from fedml_noniid.pipelines.stages.tune import csv_of, measured, samples_of

FOLDER = "choose"


def choose(workspace: Workspace, settings: Config) -> Decision:
    """Searches and decides for an experiment whose data are prepared.

    Raises UserError if there is nothing to choose, or if FedAvg diverges.
    """
    with located(source=FILE):
        plan = search.choosing(settings)
        workspace = replace(workspace, root=workspace.root / FOLDER)
        sizes = samples_of(workspace, plan)
        decided = drive(decide(plan, *sizes), partial(measured, workspace, plan))
    write_whole(workspace.root / "rungs.csv", csv_of(decided.result.table(plan.metric)))
    write_whole(workspace.root / "final.csv", csv_of(decided.table))
    return decided
