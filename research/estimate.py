"""Estimates what studies take before they run: trainings, hours and bytes on disk.

A training takes what the runs of its study that have ended on this machine took, those of the same
scenario and method if there are any. Without such runs, a fixed number per size stands in.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.user_files import GLOVE
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.reporting.text import mib
from research.runs import Measured

# Size -> (seconds, bytes, 1) of a training. The seconds of small are the mean of claims-runs.csv in
# docs/results; paper is CCN's VGG-16 on a GPU, by operations.
ASSUMED = {"smoke": (3.0, 2e5, 1.0), "small": (45.0, 5e5, 1.0), "paper": (3600.0, 6e7, 1.0)}
WITH_VECTORS = "sent140"  # the data set for which a paper uses GloVe's word vectors


def estimate(measured: Measured, names: Iterable[str]) -> str:
    """What is left of the named studies, in one line. Runs of other settings than today's have not
    ended.

    UserError if size paper lacks word vectors: random ones are another model.
    """
    left, ended = [np.zeros(3)], 0
    for name in names:
        study, written = measured.studies[name], measured.folder(name) / config.FILE
        data = study.content["data"]
        path = measured.root / data.get("root", "data/raw") / GLOVE
        if data["name"] == WITH_VECTORS and study.size == "paper" and not path.is_file():
            raise UserError(
                f"{study.paper} {name}: {path} is missing, and size paper does not train on random "
                "word vectors; unpack glove.6B.zip and put that file there"
            )
        try:
            runs, diverged = measured.of_study(name), {*measured.diverged_items(name)}
        except UserError:  # a damaged file, which the run makes again
            runs, diverged = [], set()
        costs: dict[str, tuple[float, float, float]] = {
            run.key: (sum(run.seconds, 0.0), sum(file.stat().st_size for file in run.files), 0)
            for run in runs
            if run.seconds
        }
        is_same = written.is_file() and written.read_text() == study.yaml(measured.root)
        have = {run.key for run in runs} | diverged if is_same else set()
        ended += len(have.intersection(study.items))
        for item in set(study.items) - have:
            kind = item.rpartition("-")[0]
            similar = [costs[key] for key in costs if key.rpartition("-")[0] == kind]
            similar = similar or [*costs.values()] or [ASSUMED[study.size]]
            left.append(np.mean(similar, axis=0))
    seconds, size, assumed = np.sum(left, axis=0)
    return (
        f"{len(left) - 1} trainings ({ended} more have ended), about {seconds / 3600:.2g} hours in "
        f"one process and {mib(size)} MiB on disk; {assumed:.0f} of them without a similar run on "
        "this machine, guessed from the size alone"
    )
