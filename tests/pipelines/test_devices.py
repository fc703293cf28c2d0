"""A scenario's devices and waits: how they are checked, what they make out of date, that they reach
training and are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Dataset, Raw
from fedml_noniid.data.indices import Indices
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.config import Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.provenance import plan
from fedml_noniid.pipelines.experiment.training import trained
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.verbs import fits
from fedml_noniid.pipelines.verbs.scenarios import described
from tests.pipelines.small import PARAMS

HEAD = "client,step_us,down_bytes_s,up_bytes_s\n"
OWNERS = HEAD.replace("client", "owner")
FILE = HEAD + "0,10,0,0\n2,30,0,0\n1,20,0,0\n3,40,0,0\n"
STEPS = "devices: {step_ms: 20}"


def loaded(folder: Path, more: str = "", train: str = "") -> config.Config:
    """Two scenarios; the second one has `more` keys."""
    added = f"  other: {{partition: dirichlet, clients: 4, alpha: 0.5{more and ', '}{more}}}\n"
    params = PARAMS.replace("[skewed]", "[other]" if train else "[skewed, other]")
    params = params.replace("recipe_names:", f"{added}recipe_names:", 1)
    if train:
        params = params[: params.index("deploy:")].replace("rounds: 3", f"rounds: 3, {train}")
    (folder / "params.yaml").write_text(params)
    return config.load(folder)


WAITS = "all, or one of {deadline_s, late}, {first, of}, {buffer, concurrency}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("devices: {}", "other.devices: neither is given; allowed: one of step_ms and file"),
        ("devices: {step_ms: 2, file: a.csv}", "both are given; allowed: one of step_ms and file"),
        ("devices: {file: a.csv, up_mbit: 1}", "devices: up_mbit is given beside a file"),
        ("devices: {step_ms: 0}", "devices.step_ms = 0 is refused; allowed: a number above 0"),
        ("devices: {step_ms: 2, spread: 0.5}", "spread = 0.5 is refused; allowed: a number from 1"),
        ("devices: {step_ms: 2, on_s: 3}", "devices: one of on_s and every_s is given"),
        ("devices: {step_ms: 2, on_s: 3, every_s: 2}", "on_s = 3.0 is refused; allowed: at most"),
        ("devices: {step_ms: 2, spred: 3}", "spred is unknown (did you mean 'spread'?)"),
        ("devices: {file: none.csv}", "devices.file: "),
        ("devices: {file: none.csv}", "none.csv: can't be read (No such file or directory)"),
        ("devices: {file: a.csv}", "a.csv, line 1: 'client' is refused; allowed: client,step_us"),
        ("devices: {file: b.csv}", "b.csv, line 3: client 0 is named twice; allowed: once"),
        ("devices: {file: c.csv}", "c.csv: has 1 clients; allowed: 0 to 3"),
        ("devices: {file: d.csv}", "d.csv, line 2: 0 has step_us = 0; allowed"),
        ("devices: {file: e.csv}", "e.csv, line 2: client = '4' is refused; allowed: 0 to 3"),
        ("devices: {file: f.csv}", "f.csv, line 4: owner 'B' has step_us = 9 and 8; allowed"),
        ("devices: {file: g.csv}", "g.csv, line 2: B has step_us = 0; allowed: from 1 up"),
        ("waits: {first: 2, of: 3}", "waits needs devices, whose time it is about; allowed: all"),
        (f"{STEPS}, waits: some", "waits = 'some' is refused; allowed: keys with values"),
        (f"{STEPS}, waits: {{first: 2}}", WAITS),
        (f"{STEPS}, waits: {{first: 2, of: 3, buffer: 2, concurrency: 2}}", WAITS),
        (f"{STEPS}, waits: {{deadline_s: 2, late: wait}}", "late = 'wait' is unknown"),
        (f"{STEPS}, waits: {{first: 4, of: 3}}", "first = 4 is refused; allowed: at most of, 3"),
        (f"{STEPS}, waits: {{first: 3, of: 5}}", "waits.of = 5 is refused; allowed: 1 to 4 client"),
        (f"{STEPS}, availability: {{rate: 0.1}}", "devices and availability are given; allowed"),
        (
            f"{STEPS}, participation: 0.5, waits: {{first: 1, of: 2}}",
            "other.participation: says how many clients take part, and so does waits",
        ),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.csv").write_text("client\n")
    (tmp_path / "b.csv").write_text(f"{HEAD}0,10,0,0\n0,10,0,0\n")
    (tmp_path / "c.csv").write_text(f"{HEAD}0,10,0,0\n")
    (tmp_path / "e.csv").write_text(f"{HEAD}4,10,0,0\n")
    (tmp_path / "d.csv").write_text(f"{HEAD}0,0,0,0\n")
    (tmp_path / "f.csv").write_text(f"{OWNERS}B,9,1,1\nB,9,1,1\nB,8,1,1\n")
    (tmp_path / "g.csv").write_text(f"{OWNERS}B,0,1,1\n")
    with pytest.raises(UserError) as error:
        loaded(tmp_path, text)
    message = str(error.value)
    assert message.startswith("params.yaml: scenarios.other") and words in message


def test_an_end_in_virtual_seconds_needs_devices(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.until_s: scenario other has no devices"):
        loaded(tmp_path, train="until_s: 2")
    assert loaded(tmp_path, STEPS, "until_s: 2").train.until_s == 2


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("", "devices: {file: a.csv}", True),
        ("devices: {file: a.csv}", "devices: {file: b.csv}", True),
        (STEPS, f"{STEPS}, waits: {{first: 2, of: 3}}", True),
        (STEPS, f"{STEPS}, waits: all", False),
    ],
)
def test_what_a_change_makes_out_of_date(
    tmp_path: Path, before: str, after: str, changed: bool
) -> None:
    """The trainings of the scenario and the report, and no partition."""
    (tmp_path / "a.csv").write_text(FILE)
    (tmp_path / "b.csv").write_text(FILE.replace("20", "21"))
    old, new = (plan(loaded(tmp_path, text)) for text in (before, after))
    keys = {
        stage: {key for key, value in new[stage].items() if old[stage][key] != value}
        for stage in new
    }
    assert {stage: changes for stage, changes in keys.items() if changes} == (
        {"train": {"other-fedavg-0", "other-scaffold+fnr-0"}, "report": {"all"}} if changed else {}
    )


def test_settings_without_devices_are_as_before(tmp_path: Path) -> None:
    """So results of earlier releases stay up to date."""
    params = loaded(tmp_path).params(Unit("other", "fedavg", 0))
    assert not {key for key in params if "devices" in key or "waits" in key or "until" in key}


def item(settings: config.Config, scenario: str = "other") -> Item:
    x, y = torch.arange(36.0).reshape(12, 3) % 7, torch.arange(12) % 2
    data = Dataset.from_raw("made", Raw(x, y, x, y, ("a", "b")))
    none = np.empty(0, dtype=np.int64)
    lists, tests = (Ragged.from_lists(parts) for parts in (np.split(np.arange(12), 4), [none] * 4))
    indices = Indices(lists, none, none, tests)
    return Item(settings, Unit(scenario, "fedavg", 0), data, indices, torch.device("cpu"))


def test_they_reach_the_training_and_the_record(tmp_path: Path) -> None:
    """One step of 10, 20, 30 and 40 microseconds; the server waits for two."""
    (tmp_path / "a.csv").write_text(FILE)
    one = item(loaded(tmp_path, "devices: {file: a.csv}, waits: {first: 2, of: 4}"))
    simulation = one.simulation()
    made = trained(one, simulation, "")
    assert [row["clock_s"] for row in made.rows] == [20e-6, 40e-6, 60e-6]
    assert made.rows[0]["wasted_s"] == pytest.approx(40e-6)
    assert simulation.loop.plan.schedule is not None
    assert made.record["schedule_sha256"] == simulation.loop.plan.schedule.sha256
    assert made.record["params"]["scenario.cohort"] == 2
    plain = item(one.settings, "skewed")
    assert "schedule_sha256" not in trained(plain, plain.simulation(), "").record


def test_a_file_by_owners_follows_them_to_their_clients(tmp_path: Path) -> None:
    """Clients 0 to 3 are those of D, B, A and C here; an owner may have equal lines."""
    lines = "A,30,0,0\nB,20,0,0\nC,40,0,0\nD,10,0,0\nA,30,0,0\nE,9,0,0\n"
    (tmp_path / "a.csv").write_text(OWNERS + lines)
    one = item(loaded(tmp_path, "devices: {file: a.csv}"))
    owner = torch.tensor([3, 1, 0, 2]).repeat_interleave(3)
    named = replace(one.data, train_owner=owner, owner_names=("A", "B", "C", "D"))
    clock = replace(one, data=named)._clock()
    assert clock is not None and clock.devices.step_us == (10, 20, 30, 40)
    with pytest.raises(UserError, match=r"a\.csv: names owners, clients have none; allowed"):
        one._clock()
    unknown = replace(named, owner_names=("A", "B", "C", "X"))
    with pytest.raises(UserError, match=r"a\.csv: lacks owner 'X'; allowed: a line for each"):
        replace(one, data=unknown)._clock()


def test_drawn_devices_are_those_of_the_seed(tmp_path: Path) -> None:
    text = "devices: {step_ms: 20, spread: 10, down_mbit: 2, dropout: 0.1, on_s: 2, every_s: 6}"
    scenario = loaded(tmp_path, text).scenarios["other"]
    assert scenario.devices is not None
    made, other = (scenario.devices.devices(50, seed) for seed in (0, 1))
    assert made == scenario.devices.devices(50, 0) != other
    assert 20_000 <= min(made.step_us) < 30_000 < 140_000 < max(made.step_us) <= 200_000
    assert 25_000 <= min(made.down) < 35_000 < 180_000 < max(made.down) <= 250_000
    assert {*made.up} == {0} and made.dropout == 0.1
    assert all(window[:2] == (2_000_000, 6_000_000) for window in made.windows)
    assert "devices step_ms 20.0, spread 10.0, down_mbit 2.0" in described(scenario)
    assert described(scenario).endswith(", waits for all")


def test_check_counts_rounds_in_which_nobody_is_in_time(tmp_path: Path) -> None:
    late = f"{STEPS}, waits: {{deadline_s: 0.01, late: drop}}"
    loaded(tmp_path, late, "until_s: 0.1")
    with pytest.raises(
        UserError, match=r"scenarios\.other: until_s = 0\.1 is refused; allowed: a later"
    ):
        fits.checked(Workspace.from_environment(tmp_path, {}))
    loaded(tmp_path, late, "augment: false")
    _, notes = fits.checked(Workspace.from_environment(tmp_path, {}))
    assert notes[0] == (
        "other-fedavg-0: in 3 of 3 rounds nobody would be in time, so the quickest client counted"
    )
