"""A signed study of three silos, with its files in a folder."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from fedml_noniid import own_code
from fedml_noniid.credentials import authority
from fedml_noniid.governance import policy, study
from tests.deploy import world
from tests.deploy.conftest import asking_soon as asking_soon

TODAY = datetime.date(2027, 3, 1)
# A module of a stranger leaves a trace when it is imported.
RATE = {"decay": "fedx_of_a_stranger:Mine", "start": 0.1}
MODULE = """
from pathlib import Path
Path(__file__).with_name('trace').touch()
from dataclasses import dataclass
from fedml_noniid.rates import Rate
@dataclass(frozen=True)
class Mine(Rate):
    pass
"""


class Place:
    """A study's owner, and a site that trusts nobody else."""

    def __init__(self, folder: Path) -> None:
        self.study, self.policy = folder / "study.yaml", folder / "policy.yaml"
        self.config, self.key = folder / "config.yaml", folder / "owner.key"
        self.owner = study.make_key(self.key)
        self.policy.write_text(policy.template("Ms Owner", self.owner))
        self.make()

    def make(self, recipe: str = "scaffold", dp: dict | None = None, **train: object) -> None:
        """Signs the study of a recipe, and writes the site's own file."""
        places = {"study": str(self.study), "policy": str(self.policy)}
        made = world.deployment(recipe, comm=places, **train)
        last = TODAY + datetime.timedelta(days=30)
        found = study.make(made, world.shards_of()[0], "of three hospitals", last)
        self.study.write_text(study.text(found))
        study.sign(self.study, self.key)
        content = made.model_dump(by_alias=True) | {"dp_args": dp or {}}
        self.config.write_text(study.yaml.safe_dump(content))

    def rules(self, **rules: object) -> None:
        """Changes rules of the policy."""
        content = study.yaml.safe_load(self.policy.read_text()) | rules
        self.policy.write_text(study.yaml.safe_dump(content))

    def decide(self, today: datetime.date = TODAY, samples: int = 33) -> policy.Agreed:
        """The site's decision. Raises UserError."""
        agreed = policy.read_agreed(self.config)
        agreed.check(1, samples, today)
        return agreed


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(own_code, "_only", None)
    return Place(tmp_path)


@pytest.fixture(scope="session")
def kits(tmp_path_factory):
    """Of a server and twenty silos. No test may change them."""
    folder = tmp_path_factory.mktemp("kits")
    authority.make(folder, 20)
    return folder
