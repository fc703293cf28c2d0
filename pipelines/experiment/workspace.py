"""The folders of an experiment: its settings and outputs, its prepared data, and the repository
with the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedml_noniid.core.errors import UserError

if TYPE_CHECKING:  # it imports torch
    from fedml_noniid.pipelines.experiment.config import Config

# DVC's environment variables about an experiment -> tag of the run.
DVC_TAGS = {"DVC_EXP_NAME": "dvc_experiment", "DVC_EXP_BASELINE_REV": "dvc_revision"}


DATASET = "dataset.safetensors"  # of a partition
CLUSTER = "NONIID_CLUSTER"  # environment variable that `noniid run --cluster` sets for the stages


def refuse_without(root: Path, *names: str) -> None:
    """UserError if one of these is missing in the folder of an experiment."""
    for name in names:
        if not (root / name).exists():
            raise UserError(
                f"{root.resolve() / name}: is missing; `noniid init` makes the folder of an "
                "experiment"
            )


@dataclass(frozen=True)
class Workspace:
    """The folders of one experiment."""

    root: Path  # has params.yaml; stages write below it
    repository: Path  # keeps items, checkpoints and MLflow's store
    data: Path  # prepared data sets
    tracking_uri: str | None = None  # MLflow's server; None: the store in the repository
    tags: Mapping[str, str] = field(default_factory=dict)  # of MLflow's runs
    cluster: Path | None = None  # the kit of those that train the items; None: this machine does

    @staticmethod
    def from_environment(root: Path, environment: Mapping[str, str]) -> Workspace:
        """The experiment in `root`, with DVC's and MLflow's environment variables.

        DVC runs queued experiments in temporary copies. It names the repository in DVC_ROOT.
        """
        root = root.resolve()
        named = Path(environment.get("DVC_ROOT") or root).resolve()
        return Workspace(
            root,
            named if _is_copy_of(root, named) else root,
            root / "data",
            environment.get("MLFLOW_TRACKING_URI") or None,
            {tag: environment[name] for name, tag in DVC_TAGS.items() if environment.get(name)},
            Path(environment[CLUSTER]) if environment.get(CLUSTER) else None,
        )

    def user_folder(self, name: str) -> Path:
        """A folder that params.yaml names.

        DVC's temporary copies lack what git ignores, but the repository has it.
        """
        path = self.root / name
        return path if path.exists() else self.repository / name

    def dataset(self, name: str) -> Path:
        """The file of a prepared data set."""
        return self.data / f"{name}.safetensors"

    def dataset_of(self, settings: Config, scenario: str, seed: int) -> Path:
        """The file of the data set of a scenario: beside the partition if owners take no part."""
        if settings.scenarios[scenario].unseen is not None:
            return self.partition(scenario, seed) / DATASET
        return self.dataset(settings.data.name)

    def partition(self, scenario: str, seed: int) -> Path:
        """The folder of a partition."""
        return self.root / "partitions" / f"{scenario}-{seed}"

    def run(self, key: str) -> Path:
        """The folder of a trained item."""
        return self.root / "runs" / key

    def evaluation(self, key: str) -> Path:
        """The folder of an evaluated item."""
        return self.root / "evaluation" / key


def _is_copy_of(root: Path, repository: Path) -> bool:
    """Whether `root` is one of the temporary copies that DVC makes below the repository."""
    return repository / ".dvc" / "tmp" in root.parents
