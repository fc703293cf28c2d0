"""A finished run as the claims' files name it: a line of claims-runs.csv."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.plugins.core.errors import UserError

MIB = "traffic_mib"  # of metrics.json
OF_MACHINE = ("cpu", "torch")  # tags


class Ran(NamedTuple):
    """A run that ended. One that diverged has no accuracy and no weights."""

    study: str
    item: str  # <scenario>-<recipe>-<seed>
    accuracy: float | None  # on the test set, last round
    mib: float | None  # really sent, both ways
    seconds: float | None  # of all rounds
    weights_sha256: str
    fingerprint: str
    mlflow_run: str
    commit: str
    cpu: str
    torch: str

    @classmethod
    def of(cls, study: str, run: ItemResult) -> Ran:
        """A finished run of a study."""
        tags = run.tags
        return cls(
            study,
            run.key,
            run.column("test_accuracy")[-1],
            run.evaluation.get(MIB),
            sum(run.seconds) if run.seconds else None,
            tags["weights_sha256"],
            tags.get("fingerprint", ""),
            str(run.made.get("run_id", "")),
            tags.get("git_commit", ""),
            *(tags.get(key, "") for key in OF_MACHINE),
        )

    @classmethod
    def ended_early(cls, study: str, item: str) -> Ran:
        """A run that diverged."""
        return cls(study, item, None, None, None, "", "", "", "", "", "")

    @classmethod
    def read(cls, line: Mapping[str, str]) -> Ran:
        """A line of the file. UserError for a missing or bad cell."""
        try:
            numbers = {
                key: float(line[key]) if line[key] else None
                for key in ("accuracy", "mib", "seconds")
            }
            return cls(**{key: numbers.get(key, line[key]) for key in cls._fields})  # type: ignore[arg-type]  # by name
        except (KeyError, ValueError) as error:
            raise UserError(
                f"a line on a run can't be read ({error}); make the file again"
            ) from None

    @property
    def diverged(self) -> bool:
        """Whether it ended without a model."""
        return self.accuracy is None or not math.isfinite(self.accuracy)
