"""A scenario's availability: how it is checked, what it makes out of date, that it reaches training
and is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Dataset, Raw
from fedml_noniid.data.indices import Indices
from fedml_noniid.engines.absences import sometimes
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.config import Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.provenance import plan
from tests.pipelines.small import PARAMS

HEAD = "round,exchange,client\n"
Planned = dict[str, dict[str, str]]


def params(availability: str) -> str:
    """Two scenarios; the second one may have missing clients."""
    added = f"  other: {{partition: dirichlet, clients: 4, alpha: 0.5{availability}}}\n"
    return PARAMS.replace("[skewed]", "[skewed, other]").replace(
        "recipe_names:", f"{added}recipe_names:", 1
    )


def loaded(folder: Path, availability: str) -> config.Config:
    (folder / "params.yaml").write_text(params(availability))
    return config.load(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "scenarios.other.availability: neither is given; allowed: one of rate and file"),
        (
            "{rate: 0.1, file: a.csv}",
            "scenarios.other.availability: both are given; allowed: one of rate and file",
        ),
        ("{rate: 1}", "availability.rate = 1 is refused; allowed: a number from 0, below 1"),
        (
            "{rate: -0.1}",
            "availability.rate = -0.1 is refused; allowed: a number from 0, below 1",
        ),
        ("{rate: .nan}", "availability.rate = nan is refused"),
        ("{rate: often}", "availability.rate = 'often' is refused"),
        ("{file: 3}", "availability.file = 3 is refused"),
        (
            "{rat: 0.1}",
            (
                "scenarios.other.availability.rat is unknown (did you mean 'rate'?); allowed: "
                "rate, file"
            ),
        ),
        ("0.2", "scenarios.other.availability = 0.2 is refused"),
        ("{file: none.csv}", "scenarios.other.availability.file: "),
        ("{file: none.csv}", "none.csv: can't be read (No such file or directory)"),
        ("{file: ''}", "can't be read (Is a directory)"),
        ("{file: a.csv}", "a.csv, line 3: client = '4' is refused; allowed: 0 to 3"),
        ("{file: b.csv}", "b.csv, line 2: round = '4' is refused; allowed: 0 to 3"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.csv").write_text(f"{HEAD}1,0,3\n1,0,4\n")
    (tmp_path / "b.csv").write_text(f"{HEAD}4,0,3\n")
    with pytest.raises(UserError) as error:
        loaded(tmp_path, f", availability: {text}")
    message = str(error.value)
    assert message.startswith("params.yaml: ") and words in message and "\n" not in message


@pytest.fixture
def planned(tmp_path: Path) -> Callable[[str, str], Planned]:
    def planned(availability: str, lines: str) -> Planned:
        (tmp_path / "absent.csv").write_text(HEAD + lines)
        return plan(loaded(tmp_path, availability))

    return planned


FILE = ", availability: {file: absent.csv}"


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        (("", "1,0,3\n"), (", availability: {rate: 0.2}", "1,0,3\n"), True),
        ((", availability: {rate: 0.2}", ""), (", availability: {rate: 0.3}", ""), True),
        ((FILE, "1,0,3\n"), (FILE, "1,0,3\n2,0,3\n"), True),
        ((FILE, "1,0,3\n2,1,0\n"), (FILE, "2,1,0\n1,,3\n"), False),  # the same absences
        (("", "1,0,3\n"), ("", "1,0,2\n"), False),  # nobody reads the file
    ],
    ids=[
        "a rate",
        "another rate",
        "another line",
        "the same lines in another form",
        "a file that is not used",
    ],
)
def test_what_a_change_makes_out_of_date(
    planned: Callable[[str, str], Planned],
    before: tuple[str, str],
    after: tuple[str, str],
    changed: bool,
) -> None:
    """The trainings of the scenario and the report; no partition, and nothing of the other
    scenario."""
    old, new = planned(*before), planned(*after)
    found = {
        stage: {key for key, value in new[stage].items() if old[stage][key] != value}
        for stage in new
    }
    assert {stage: keys for stage, keys in found.items() if keys} == (
        {"train": {"other-fedavg-0", "other-scaffold+fnr-0"}, "report": {"all"}} if changed else {}
    )


def missing(settings: config.Config, scenario: str) -> list[set[int]]:
    """Who was missing from each round of a training on made data."""
    x, y = torch.arange(36.0).reshape(12, 3) % 7, torch.arange(12) % 2
    data = Dataset.from_raw("made", Raw(x, y, x, y, ("a", "b")))
    none = np.empty(0, dtype=np.int64)
    indices = Indices(np.split(np.arange(12), 4), none, none, [none] * 4)
    item = Item(settings, Unit(scenario, "fedavg", 0), data, indices, torch.device("cpu"))
    simulation = item.simulation()
    return [set(simulation.loop.missing) for _ in simulation.rounds()]


def test_it_reaches_the_training(tmp_path: Path) -> None:
    (tmp_path / "absent.csv").write_text(f"{HEAD}1,,3\n3,0,0\n3,0,1\n")
    settings = loaded(tmp_path, FILE)
    assert missing(settings, "other") == [{3}, set(), {0, 1}]
    assert missing(settings, "skewed") == [set()] * 3
    often = missing(loaded(tmp_path, ", availability: {rate: 0.5}"), "other")
    absent = sometimes(0.5, 0)  # the item's seed
    assert often == [set(absent(t, 0, (0, 1, 2, 3))) for t in (1, 2, 3)] and any(often)
