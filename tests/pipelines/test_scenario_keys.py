"""What a scenario adds to its partition (missing clients, devices and waits, attackers): how it is
checked, what it makes out of date, that it reaches training and is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedml_noniid as nd
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Dataset, Raw
from fedml_noniid.data.indices import Indices
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.engines.absences import sometimes
from fedml_noniid.engines.evaluation import evaluate
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.config import Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.measuring import measure
from fedml_noniid.pipelines.experiment.provenance import plan
from fedml_noniid.pipelines.experiment.scenario import AttackSettings
from fedml_noniid.pipelines.experiment.training import trained
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.verbs import fits
from fedml_noniid.pipelines.verbs.scenarios import described
from tests.pipelines.small import PARAMS

HEAD = "client,step_us,down_bytes_s,up_bytes_s\n"
OWNERS = HEAD.replace("client", "owner")
ABSENT = "round,exchange,client\n"
STEPS = "devices: {step_ms: 20}"
WAITS = "all, or one of {deadline_s, late}, {first, sampled}, {buffer, concurrency}"
FILES = {
    "a": "client\n",
    "b": f"{HEAD}0,10,0,0\n0,10,0,0\n",
    "c": f"{HEAD}0,10,0,0\n",
    "d": f"{HEAD}0,0,0,0\n",
    "e": f"{HEAD}4,10,0,0\n",
    "f": f"{OWNERS}B,9,1,1\nB,9,1,1\nB,8,1,1\n",
    "g": f"{OWNERS}B,0,1,1\n",
    "h": f"{ABSENT}1,0,3\n1,0,4\n",
    "i": f"{ABSENT}4,0,3\n",
    "steps": f"{HEAD}0,10,0,0\n2,30,0,0\n1,20,0,0\n3,40,0,0\n",
    "slower": f"{HEAD}0,10,0,0\n2,30,0,0\n1,21,0,0\n3,40,0,0\n",
    "absent": f"{ABSENT}1,,3\n3,0,0\n3,0,1\n",
    "same": f"{ABSENT}3,0,1\n3,0,0\n1,0,3\n",
    "fewer": f"{ABSENT}1,,3\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that scenarios name."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.csv").write_text(text)
    return tmp_path


def loaded(folder: Path, more: str = "", train: str = "") -> config.Config:
    """Two scenarios; the second one has `more` keys. With `train` it is the only one."""
    added = f"  other: {{partition: dirichlet, clients: 4, alpha: 0.5{more and ', '}{more}}}\n"
    params = PARAMS.replace("[skewed]", "[other]" if train else "[skewed, other]")
    params = params.replace("recipe_names:", f"{added}recipe_names:", 1)
    if train:
        params = params[: params.index("deploy:")].replace("rounds: 3", f"rounds: 3, {train}")
    (folder / "params.yaml").write_text(params)
    return config.load(folder)


# That every key refuses values of another kind and beyond its ends is in test_options.py.
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("attack: {kind: alie}", "attack.clients is missing"),
        (
            "attack: {clients: 0, kind: alie}",
            "attack.clients = 0 is refused; allowed: a number between 0",
        ),
        ("attack: {clients: 0.2, kind: ale}", "'ale' is unknown (did you mean 'alie'?)"),
        (
            "attack: {clients: 0.2, kind: alie, zed: 1}",
            "attack.zed is unknown; allowed: z, clients, kind",
        ),
        ("attack: {clients: 0.2, kind: alie, gamma: 2.0}", "attack.gamma is unknown"),
        ("attack: {clients: 0.2, kind: backdoor}", "attack.target is missing"),
        ("availability: {}", "availability: neither is given; allowed: one of rate and file"),
        (
            "availability: {rate: 0.1, file: a.csv}",
            "availability: both are given; allowed: one of rate and file",
        ),
        (
            "availability: {rate: 1}",
            "availability.rate = 1 is refused; allowed: a number from 0, below 1",
        ),
        (
            "availability: {rat: 0.1}",
            "availability.rat is unknown (did you mean 'rate'?); allowed: rate, file",
        ),
        ("availability: {file: none.csv}", "none.csv: can't be read (No such file or directory)"),
        ("availability: {file: ''}", "can't be read (Is a directory)"),
        ("availability: {file: h.csv}", "h.csv, line 3: client = '4' is refused; allowed: 0 to 3"),
        ("availability: {file: i.csv}", "i.csv, line 2: round = '4' is refused; allowed: 0 to 3"),
        ("devices: {}", "other.devices: neither is given; allowed: one of step_ms and file"),
        ("devices: {step_ms: 2, file: a.csv}", "both are given; allowed: one of step_ms and file"),
        ("devices: {file: a.csv, up_mbit: 1}", "devices: up_mbit is given beside a file"),
        ("devices: {step_ms: 2, spread: 0.5}", "spread = 0.5 is refused; allowed: a number from 1"),
        ("devices: {step_ms: 2, on_s: 3}", "devices: one of on_s and every_s is given"),
        ("devices: {step_ms: 2, on_s: 3, every_s: 2}", "on_s = 3.0 is refused; allowed: at most"),
        ("devices: {step_ms: 2, spred: 3}", "spred is unknown (did you mean 'spread'?)"),
        ("devices: {file: none.csv}", "none.csv: can't be read (No such file or directory)"),
        ("devices: {file: a.csv}", "a.csv, line 1: 'client' is refused; allowed: client,step_us"),
        ("devices: {file: b.csv}", "b.csv, line 3: client 0 is named twice; allowed: once"),
        ("devices: {file: c.csv}", "c.csv: has 1 clients; allowed: 0 to 3"),
        ("devices: {file: d.csv}", "d.csv, line 2: 0 has step_us = 0; allowed"),
        ("devices: {file: e.csv}", "e.csv, line 2: client = '4' is refused; allowed: 0 to 3"),
        ("devices: {file: f.csv}", "f.csv, line 4: owner 'B' has step_us = 9 and 8; allowed"),
        ("devices: {file: g.csv}", "g.csv, line 2: B has step_us = 0; allowed: from 1 up"),
        (
            "waits: {first: 2, sampled: 3}",
            "waits needs devices, whose time it is about; allowed: all",
        ),
        (f"{STEPS}, waits: some", "waits = 'some' is refused; allowed: keys with values"),
        (f"{STEPS}, waits: {{first: 2}}", WAITS),
        (f"{STEPS}, waits: {{first: 2, sampled: 3, buffer: 2, concurrency: 2}}", WAITS),
        (f"{STEPS}, waits: {{deadline_s: 2, late: wait}}", "late = 'wait' is unknown"),
        (
            f"{STEPS}, waits: {{first: 4, sampled: 3}}",
            "first = 4 is refused; allowed: at most sampled, 3",
        ),
        (
            f"{STEPS}, waits: {{first: 3, sampled: 5}}",
            "waits.sampled = 5 is refused; allowed: 1 to 4 client",
        ),
        (f"{STEPS}, availability: {{rate: 0.1}}", "devices and availability are given; allowed"),
        (
            f"{STEPS}, participation: 0.5, waits: {{first: 1, sampled: 2}}",
            "other.participation: says how many clients take part, and so does waits",
        ),
    ],
)
def test_a_mistake_is_named(folder: Path, text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        loaded(folder, text)
    message = str(error.value)
    assert message.startswith("params.yaml: scenarios.other") and words in message


def test_what_only_other_settings_show_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"train\.until_s: scenario other has no devices"):
        loaded(folder, train="until_s: 2")
    assert loaded(folder, STEPS, "until_s: 2").train.until_s == 2
    text = PARAMS.replace("alpha: 0.5,", "alpha: 0.5, attack: {clients: 0.3, kind: alie},")
    (folder / "params.yaml").write_text(text)
    with pytest.raises(UserError, match=r"deploy.scenario.*as silos decide themselves"):
        config.load(folder)


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("", "availability: {rate: 0.2}", True),
        ("availability: {rate: 0.2}", "availability: {rate: 0.3}", True),
        ("availability: {file: absent.csv}", "availability: {file: fewer.csv}", True),
        ("", "devices: {file: steps.csv}", True),
        ("devices: {file: steps.csv}", "devices: {file: slower.csv}", True),
        (STEPS, f"{STEPS}, waits: {{first: 2, sampled: 3}}", True),
        (STEPS, f"{STEPS}, waits: all", False),
        ("", "attack: {clients: 0.3, kind: alie}", True),
        ("attack: {clients: 0.3, kind: alie}", "attack: {clients: 0.3, kind: scale}", True),
    ],
)
def test_what_a_change_makes_out_of_date(
    folder: Path, before: str, after: str, changed: bool
) -> None:
    """The trainings of the scenario and the report; no partition, and nothing of the other
    scenario."""
    old, new = (plan(loaded(folder, text)) for text in (before, after))
    keys = {
        stage: {key for key, value in new[stage].items() if old[stage][key] != value}
        for stage in new
    }
    assert {stage: changes for stage, changes in keys.items() if changes} == (
        {"train": {"other-fedavg-0", "other-scaffold+fnr-0"}, "report": {"all"}} if changed else {}
    )


def test_what_is_not_set_does_not_count_and_of_a_file_its_numbers(folder: Path) -> None:
    """So results of earlier releases stay up to date."""
    params = loaded(folder).params(Unit("other", "fedavg", 0))
    assert not {key for key in params if "devices" in key or "waits" in key or "until" in key}
    shown = {
        name: loaded(folder, f"{key}: {{file: {name}.csv}}").scenarios["other"].model_dump()[key]
        for key, names in (("availability", "absent same fewer"), ("devices", "steps slower"))
        for name in names.split()
    }
    hashes = {name: values["sha256"] for name, values in shown.items()}
    assert hashes["absent"] == hashes["same"] != hashes["fewer"]
    assert hashes["steps"] != hashes["slower"]


def made(n: int = 48) -> Dataset:
    """Images of two classes, which differ in their brightness."""
    y = torch.arange(n) % 2
    x = (torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 100).round()
    x += 100 * y.reshape(-1, 1, 1, 1)
    return Dataset.from_raw("made", Raw(x, y, x, y, ("dark", "light")))


def item(settings: config.Config, scenario: str = "other", recipe: str = "fedavg") -> Item:
    """Four clients with twelve samples each: one step per round."""
    data, none = made(), np.empty(0, dtype=np.int64)
    lists = Ragged.from_lists(np.split(np.arange(48), 4))
    indices = Indices(lists, none, none, Ragged.from_lists([none] * 4))
    return Item(settings, Unit(scenario, recipe, 0), data, indices, torch.device("cpu"))


def missing(one: Item) -> list[set[int]]:
    """Who was missing from each round of a training."""
    simulation = one.simulation()
    return [set(simulation.loop.missing) for _ in simulation.rounds()]


def test_missing_clients_reach_the_training(folder: Path) -> None:
    settings = loaded(folder, "availability: {file: absent.csv}")
    assert missing(item(settings)) == [{3}, set(), {0, 1}]
    assert missing(item(settings, "skewed")) == [set()] * 3
    often = missing(item(loaded(folder, "availability: {rate: 0.5}")))
    absent = sometimes(0.5, 0)  # the item's seed
    assert often == [set(absent(t, 0, (0, 1, 2, 3))) for t in (1, 2, 3)] and any(often)


def test_devices_reach_the_training_and_the_record(folder: Path) -> None:
    """One step of 10, 20, 30 and 40 microseconds; the server waits for two."""
    one = item(loaded(folder, "devices: {file: steps.csv}, waits: {first: 2, sampled: 4}"))
    simulation = one.simulation()
    result = trained(one, simulation, "")
    assert [row["clock_s"] for row in result.rows] == [20e-6, 40e-6, 60e-6]
    assert result.rows[0]["wasted_s"] == pytest.approx(40e-6)
    assert simulation.loop.plan.schedule is not None
    assert result.record["schedule_sha256"] == simulation.loop.plan.schedule.sha256
    assert result.record["params"]["scenario.cohort"] == 2
    plain = item(one.settings, "skewed")
    assert "schedule_sha256" not in trained(plain, plain.simulation(), "").record


def test_a_file_by_owners_follows_them_to_their_clients(tmp_path: Path) -> None:
    """Clients 0 to 3 are those of D, B, A and C here; an owner may have equal lines."""
    lines = "A,30,0,0\nB,20,0,0\nC,40,0,0\nD,10,0,0\nA,30,0,0\nE,9,0,0\n"
    (tmp_path / "a.csv").write_text(OWNERS + lines)
    one = item(loaded(tmp_path, "devices: {file: a.csv}"))
    owner = torch.tensor([3, 1, 0, 2]).repeat_interleave(12)
    named = replace(one.data, train_owner=owner, owner_names=("A", "B", "C", "D"))
    clock = replace(one, data=named)._clock()
    assert clock is not None and clock.devices.step_us == (10, 20, 30, 40)
    unknown = replace(named, owner_names=("A", "B", "C", "X"))
    for data, words in (
        (one.data, "names owners, clients have none"),
        (unknown, "lacks owner 'X'"),
    ):
        with pytest.raises(UserError, match=rf"a\.csv: {words}; allowed: a line for each"):
            replace(one, data=data)._clock()


def test_drawn_devices_are_those_of_the_seed(tmp_path: Path) -> None:
    text = "devices: {step_ms: 20, spread: 10, down_mbit: 2, dropout: 0.1, on_s: 2, every_s: 6}"
    scenario = loaded(tmp_path, text).scenarios["other"]
    assert scenario.devices is not None
    first, other = (scenario.devices.devices(50, seed) for seed in (0, 1))
    assert first == scenario.devices.devices(50, 0) != other
    assert 20_000 <= min(first.step_us) < 30_000 < 140_000 < max(first.step_us) <= 200_000
    assert 25_000 <= min(first.down) < 35_000 < 180_000 < max(first.down) <= 250_000
    assert {*first.up} == {0} and first.dropout == 0.1
    told = described(scenario)
    assert "devices (step_ms 20.0, spread 10.0, down_mbit 2.0" in told


def test_check_counts_rounds_in_which_nobody_is_in_time(tmp_path: Path) -> None:
    late = f"{STEPS}, waits: {{deadline_s: 0.01, late: drop}}"
    loaded(tmp_path, late, "until_s: 0.1")
    words = r"scenarios\.other: until_s = 0\.1 is refused; allowed: a later"
    with pytest.raises(UserError, match=words):
        fits.checked(Workspace.from_environment(tmp_path, {}))
    loaded(tmp_path, late, "augment: false")
    _, notes = fits.checked(Workspace.from_environment(tmp_path, {}))
    assert notes[0] == (
        "other-fedavg-0: in 3 of 3 rounds nobody would be in time, so the quickest client counted"
    )


def test_the_seed_alone_draws_attackers_and_fewer_are_among_more() -> None:
    def drawn(fraction: float, seed: int) -> set[int]:
        attack = AttackSettings(clients=fraction, kind="alie")
        return {*attack.drawn(made(), 20, seed).clients}

    assert drawn(0.2, 0) < drawn(0.4, 0) and len(drawn(0.4, 0)) == 8
    assert drawn(0.2, 0) == drawn(0.2, 0) != drawn(0.2, 1)
    assert len(drawn(0.01, 0)) == 1  # as with participation, at least one


def test_every_method_meets_the_same_attackers_in_an_honest_partition(folder: Path) -> None:
    settings = loaded(folder, "attack: {clients: 0.5, kind: label_flip}")
    met = [item(settings, recipe=recipe) for recipe in ("fedavg", "scaffold+fnr")]
    liars = met[0].attackers.clients
    assert len(liars) == 2 and met[1].attackers.clients == liars
    seen = met[0].simulation().loop.federation.train.y
    for k, mine in enumerate(met[0].indices.clients):
        true = met[0].data.train_y[torch.from_numpy(mine)]
        assert torch.equal(seen[torch.from_numpy(mine)], 1 - true if k in liars else true)
    assert torch.equal(met[0].test.y, made().test_y) and met[0].indices.skew.labels is None


@pytest.mark.parametrize("personal", [False, True])
def test_the_backdoors_rate(folder: Path, personal: bool) -> None:
    """By hand: the test images of the other class with four bright pixels, and how many of them
    the model calls the target. Of clients' own models: the mean over the honest ones."""
    one = item(loaded(folder, "attack: {clients: 0.5, kind: backdoor, target: light, rate: 1.0}"))
    result = trained(one, one.simulation(), "")
    tensors = dict(result.tensors)
    common = {
        name.removeprefix("params/"): leaf
        for name, leaf in tensors.items()
        if name.startswith("params/")
    }
    models = [common]
    if personal:
        rng = torch.Generator().manual_seed(1)
        last = {name: leaf for name, leaf in common.items() if name.startswith("fc2")}
        own = {name: torch.randn(4, *leaf.shape, generator=rng) for name, leaf in last.items()}
        tensors |= {f"own/params/{name}": leaf for name, leaf in own.items()}
        honest = {0, 1, 2, 3} - {*one.attackers.clients}
        models = [common | {name: leaf[k] for name, leaf in own.items()} for k in honest]
    x = one.test.x[one.test.y == 0].clone()
    x[:, :, 2:, 2:] = one.data.normalised("train", one.device).max()
    other = one.test._replace(x=x, y=torch.zeros(len(x)).long())
    named = [evaluate(one.network, model, {}, other).predictions for model in models]
    rates = [float((predictions == 1).double().mean()) for predictions in named]
    metrics = measure(one, tensors, result.rows).metrics
    assert metrics["metric/backdoor_rate"] == pytest.approx(np.mean(rates))
    assert result.record["tags"]["attack"].startswith("clients ")
    honest_item = item(loaded(folder, "attack: {clients: 0.5, kind: alie}"))
    assert "metric/backdoor_rate" not in measure(honest_item, tensors, result.rows).metrics


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        ({"kind": "backdoor", "target": 1}, "its trigger needs images"),
        ({"kind": "backdoor", "target": "x"}, "target"),
        ({"kind": "label_flip"}, "the targets are none"),
    ],
)
def test_data_that_do_not_allow_it(attack: dict[str, Any], words: str) -> None:
    rng = np.random.default_rng(0)
    x, numbers = rng.normal(size=(30, 3)), words.endswith("none")
    y = rng.normal(size=30) if numbers else rng.integers(0, 2, 30)
    data = nd.load("digits") if attack.get("target") == "x" else nd.from_arrays(x, y)
    how: dict[str, Any] = {"partition": "iid", "clients": 5, "attack": {"clients": 0.2, **attack}}
    with pytest.raises(UserError, match=rf"^run: .*{words}"):
        nd.run("fedavg", data, **how, **({"loss": "mse"} if numbers else {}))


def test_the_check_of_an_experiment_sets_a_rule_up_with_its_cohort(tmp_path: Path) -> None:
    """Krum with one attacker needs four clients in a round; the trial had two."""
    text = PARAMS.replace("[fedavg, scaffold+fnr]", "[fedavg, krum]")
    text = text.replace("fedavg: {}", "fedavg: {}\n  krum: {}")
    (tmp_path / "params.yaml").write_text(text)
    fits.fits(config.load(tmp_path), made(200))
    (tmp_path / "params.yaml").write_text(text.replace("clients: 4", "clients: 3"))
    with pytest.raises(UserError, match="'krum': f = 1, m = 1 of 3 clients"):
        fits.fits(config.load(tmp_path), made(200))
