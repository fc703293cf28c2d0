"""A silo's privacy ledger in a deployment: what it counts, kills, and a budget that is spent."""

from __future__ import annotations

import csv
import json
import math
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedml_noniid.core.errors import NonFiniteError, UserError
from fedml_noniid.core.options import RecipeError
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.host import Model
from fedml_noniid.deploy.pair import make_pair
from fedml_noniid.deploy.results import RunFile
from fedml_noniid.engines.record import rounds_csv
from fedml_noniid.governance import audit, replay
from fedml_noniid.privacy.accounting import epsilon
from tests.deploy import world
from tests.deploy.test_host import DP, LDP, SIGMA
from tests.deploy.test_host import begun as in_files
from tests.deploy.test_host import unprotected as unprotected

DPSGD = {"dpsgd": {"clip": 1.0, "noise": 2.0}}
DELTA = 1e-5


def lines(path: Path) -> list[dict]:
    """The releases of a ledger."""
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def begun(folder: Path, recipe: str, methods: dict, **more: object) -> tuple:
    """(first message, silos) whose secrets and ledgers are in a folder."""
    aggregator, trainers = world.pair(recipe, methods, **more)
    return aggregator.get_model_params(), in_files(trainers, folder)


def update(trainer: object, message: object) -> torch.Tensor:
    ((_, up),) = world.uploads(message, [trainer])
    return torch.cat([up["leaves"][key].flatten() for key in up["leaves"] if "deltas" in key])


def test_a_silo_draws_the_noise_of_dpsgd_with_its_secret_and_counts_it(tmp_path):
    """Not the simulation's noise, which all can draw. A question that comes again has the same
    answer and no further release, also after a restart; another has noise of its own."""
    message, silos = begun(tmp_path, "dpsgd", DPSGD)
    first, other, _ = silos
    clear, (without, *_) = begun(
        tmp_path / "clear", "dpsgd", {"dpsgd": DPSGD["dpsgd"] | {"noise": 0.0}}
    )
    answer, expected = update(first, message), update(without, clear)
    assert torch.equal(update(first, message), answer)
    nudged = message.ask.params | {"fc2.bias": message.ask.params["fc2.bias"] + 1e-6}
    again = message._replace(ask=message.ask._replace(params=nudged))
    # Another study, of a silo with this secret, whose server gives the run the same name.
    (tmp_path / "study").mkdir()
    shutil.copy(tmp_path / "0.noise.key", tmp_path / "study")
    theirs = {"dpsgd": DPSGD["dpsgd"] | {"delta": 1e-6}}
    asked, (of_study, *_) = begun(tmp_path / "study", "dpsgd", theirs)
    for noisy in (update(first, again), update(other, message), update(of_study, asked)):
        pair = torch.stack([answer - expected, noisy - expected])
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.5
    for silo in silos:
        silo._ledger.close()
    _, (restarted, *_) = begun(tmp_path, "dpsgd", DPSGD)
    assert torch.equal(update(restarted, message), answer)
    releases, passes = lines(tmp_path / "0.ledger"), world.EPOCHS
    counted = [(line["unit"], line["noise"], line["count"]) for line in releases]
    assert counted == [("sample", 2.0, passes)] * 2
    assert restarted._ledger.epsilon(DELTA) == epsilon({2.0: 2 * passes}, DELTA)
    whole = world.simulated("dpsgd", DPSGD, False)
    assert whole.rows[-1]["epsilon_per_sample"] == epsilon({2.0: world.ROUNDS * passes}, DELTA)


def test_a_silo_with_the_noise_of_dpsgd_withholds_its_loss(tmp_path):
    """Without noise it is sent. A run whose silos withhold it goes on, and is not measured."""
    for noise in (0.0, 2.0):
        methods = {"dpsgd": {"clip": 1.0, "noise": noise}}
        message, (first, *_) = begun(tmp_path / f"{noise}", "dpsgd", methods)
        ((_, up),) = world.uploads(message, [first])
        assert up["leaves"]["loss"].isnan() == (noise > 0) and up["leaves"]["n"] == 17
    outcome = world.run(*world.pair("dpsgd", DPSGD))
    (line, *_) = csv.DictReader(rounds_csv(outcome.rows).splitlines())
    assert line["local_loss"] == "" and float(line["test_loss"]) > 0


@pytest.mark.parametrize("recipe", ["fedper", "fedrep"])
def test_tests_of_own_models_do_not_leave_without_noise(recipe):
    with pytest.raises(RecipeError, match="results would leave without noise; allowed: without"):
        world.terms(f"dpsgd+{recipe}", DPSGD)
    world.terms(f"dpsgd+{recipe}", {"dpsgd": {"clip": 1.0, "noise": 0.0}})


def test_local_noise_needs_a_number_of_samples_that_tells_nothing(tmp_path):
    _, (first, *_) = world.pair("fedavg", {}, **LDP)
    first.args.max_samples = None
    with pytest.raises(UserError, match=r"behind train_args.max_samples, which is missing"):
        first.begin(None, tmp_path / "key")


def test_an_answer_that_is_not_finite_neither_leaves_nor_counts(tmp_path, monkeypatch):
    message, (first, *_) = begun(tmp_path, "fedavg", {}, **LDP)
    answer = first.silo.answer(message)
    answer["deltas"]["fc2.bias"] *= math.nan
    monkeypatch.setattr(first.silo, "answer", lambda _: answer)
    with pytest.raises(NonFiniteError, match=r"^deltas/fc2\.bias: is not finite"):
        update(first, message)
    assert lines(tmp_path / "0.ledger") == []


def test_an_answer_over_the_budget_does_not_leave(tmp_path):
    """Any two answers are `sensitivity` apart at most, and the noise is SIGMA sensitivities."""
    most = epsilon({SIGMA: 2}, DELTA) * 1.001
    budget = LDP | {"budget_epsilon": most, "budget_delta": DELTA}
    message, (first, *_) = begun(tmp_path, "fedavg", {}, **budget)
    kept = [update(first, message._replace(exchange=exchange)) for exchange in (0, 1)]
    with pytest.raises(UserError, match=r"0\.ledger: budget_epsilon: the privacy budget does not"):
        update(first, message._replace(exchange=2))
    assert torch.equal(update(first, message), kept[0]), "what has left may be sent again"
    assert [line["unit"] for line in lines(tmp_path / "0.ledger")] == ["silo"] * 2


@pytest.mark.parametrize(
    ("recipe", "more", "secret", "why"),
    [
        ("fedavg", {}, True, "has no privacy noise"),
        ("dpsgd", {}, False, "would not outlive a restart"),
        ("fedavg", DP | {"dp_solution_type": "ldp"}, False, "would not outlive a restart"),
    ],
)
def test_a_budget_that_could_not_be_kept_is_refused(tmp_path, recipe, more, secret, why):
    _, (first, *_) = world.pair(recipe, {}, budget_epsilon=3.0, budget_delta=DELTA, **more)
    with pytest.raises(UserError, match=rf"dp_args.budget_epsilon = 3\.0: .* {why}"):
        first.begin(None, tmp_path / "key" if secret else None)


def test_a_replay_does_not_touch_the_ledger(tmp_path, all_kits):
    """The silo's process has its ledger. With other samples, each answer would be a further
    release."""
    message = world.pair("dpsgd", DPSGD)[0].get_model_params()
    network, classes = Model(world.network(False)), make_pair("dpsgd")
    args, shard = world.args("dpsgd", DPSGD, False, **LDP), world.shards_of()[1]
    args.rank = shard.rank  # as FedML has it
    deployment = world.deployment("dpsgd", comm={"replay_mb": 100}, settings=DPSGD)
    key = tmp_path / "1.noise.key"
    process = SimpleNamespace(
        rank=1, folder=tmp_path, shard=shard, noise_key=key, deployment=deployment
    )
    log = audit.Log(tmp_path / "audit-1.jsonl", Kit.read(all_kits / "1", 1))
    kept, down = replay.Kept(process, log), wire.row_of(wire.with_digest(message), 0)
    trainer = classes[0](network, args, shard)
    trainer.begin(RunFile(tmp_path / "run", "run"), key)
    kept.keep(trainer.silo, down)
    sha = wire.digest(trainer.answered(down)["leaves"])
    log.write(audit.SENT, peer="server", exchange=down.exchange, sha256=sha)
    before = (tmp_path / "1.ledger").read_bytes()
    again = partial(replay.of_process, process, lambda: (args, network, classes), None)
    assert again().count("the same SHA-256") == 1
    data = shard.parts["train"]
    process.shard = shard.with_train(data._replace(y=torch.flip(data.y, [0])))
    with pytest.raises(UserError, match=r"sent .*, computed "):
        again()
    assert (tmp_path / "1.ledger").read_bytes() == before and len(lines(tmp_path / "1.ledger")) == 1
