"""A silo's privacy ledger in a deployment: what it counts, kills, and a budget that is spent."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedml_noniid.core.errors import NonFiniteError, UserError
from fedml_noniid.core.options import RecipeError
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.deploy import results, settings, wire
from fedml_noniid.deploy.host import Model
from fedml_noniid.deploy.pair import make_pair
from fedml_noniid.deploy.results import RunFile
from fedml_noniid.engines.record import rounds_csv
from fedml_noniid.governance import audit, replay
from fedml_noniid.privacy.accounting import epsilon
from fedml_noniid.processes import launch, loopback
from tests.deploy import world
from tests.deploy.test_host import DP, LDP, SIGMA
from tests.deploy.test_host import unprotected as unprotected
from tests.deploy.test_processes import ended
from tests.processes import until

DPSGD = {"dpsgd": {"clip": 1.0, "noise": 2.0}}
DELTA = 1e-5


def lines(path: Path) -> list[dict]:
    """The releases of a ledger."""
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def begun(folder: Path, recipe: str, methods: dict, **more: object) -> tuple:
    """(first message, silos) whose secrets and ledgers are in a folder."""
    aggregator, trainers = world.pair(recipe, methods, **more)
    for trainer in trainers:
        place = folder / f"{trainer.id}"
        trainer.begin(RunFile(place, "a run"), place.with_suffix(".noise.key"))
    return aggregator.get_model_params(), trainers


def update(trainer: object, message: object) -> torch.Tensor:
    ((_, up),) = world.uploads(message, [trainer])
    return torch.cat([up["leaves"][key].flatten() for key in up["leaves"] if "deltas" in key])


def test_a_silo_draws_the_noise_of_dpsgd_with_its_secret_and_counts_it(tmp_path):
    """Not the simulation's noise, which all can draw. A question that comes again has the same
    answer and no further release, also after a restart; another has noise of its own."""
    message, (first, other, _) = begun(tmp_path, "dpsgd", DPSGD)
    one, whole = update(first, message), world.simulated("dpsgd", DPSGD, False)
    assert torch.equal(update(first, message), one)
    clear = begun(tmp_path / "clear", "dpsgd", {"dpsgd": {"clip": 1.0, "noise": 0.0}})
    expected = update(clear[1][0], clear[0])
    # The mean of a batch, added up over the steps: noise 2 C / B in each.
    nudged = message.ask.params | {"fc2.bias": message.ask.params["fc2.bias"] + 1e-6}
    again = message._replace(ask=message.ask._replace(params=nudged))
    elsewhere = begun(tmp_path / "elsewhere", "dpsgd", DPSGD)[1][0]
    # Another study, of a silo with this secret, whose server gives the run the same name.
    (tmp_path / "study").mkdir()
    shutil.copy(tmp_path / "0.noise.key", tmp_path / "study")
    theirs = {"dpsgd": DPSGD["dpsgd"] | {"delta": 1e-6}}
    asked, (of_study, *_) = begun(tmp_path / "study", "dpsgd", theirs)
    noises = [one, update(first, again), update(other, message), update(elsewhere, message)]
    noises.append(update(of_study, asked))
    noises = [noise - expected for noise in noises]
    for k, noise in enumerate(noises[1:], start=1):
        correlation = torch.corrcoef(torch.stack([noises[0], noise]))[0, 1]
        assert abs(correlation.item()) < 0.5, k
    first._ledger.close()
    restarted = begun_again(tmp_path)
    assert torch.equal(update(restarted, message), one)
    found = lines(tmp_path / "0.ledger")
    passes = world.EPOCHS
    assert [(of["unit"], of["noise"], of["count"]) for of in found] == [("sample", 2.0, passes)] * 2
    assert restarted._ledger.epsilon(DELTA) == epsilon({2.0: 2 * passes}, DELTA)
    assert whole.rows[-1]["epsilon_per_sample"] == epsilon({2.0: world.ROUNDS * passes}, DELTA)


def test_a_silo_with_the_noise_of_dpsgd_withholds_its_loss(tmp_path):
    """Without noise it is sent. A run whose silos withhold it goes on, and is not measured."""
    for noise in (0.0, 2.0):
        (tmp_path / f"{noise}").mkdir()
        settings = {"dpsgd": {"clip": 1.0, "noise": noise}}
        message, (first, *_) = begun(tmp_path / f"{noise}", "dpsgd", settings)
        ((_, up),) = world.uploads(message, [first])
        assert up["leaves"]["loss"].isnan() == (noise > 0) and up["leaves"]["n"] == 17
    found = world.run(*world.pair("dpsgd", settings))
    assert all(math.isnan(row["local_loss"]) for row in found.rows)
    (line, *_) = csv.DictReader(rounds_csv(found.rows).splitlines())
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


def begun_again(folder: Path) -> object:
    _, (trainer, *_) = world.pair("dpsgd", DPSGD)
    trainer.begin(RunFile(folder / "0", "a run"), folder / "0.noise.key")
    return trainer


def test_local_noise_is_counted_by_answer_in_its_own_unit(tmp_path):
    """Any two answers are `sensitivity` apart at most, and the noise is SIGMA sensitivities."""
    message, (first, *_) = begun(tmp_path, "scaffold", {}, **LDP)
    for exchange in (0, 0, 1):
        update(first, message._replace(exchange=exchange))
    (one, other) = lines(tmp_path / "0.ledger")
    assert one["unit"] == "silo" and one["noise"] == pytest.approx(SIGMA) and one["count"] == 1
    assert one["id"] != other["id"]


def test_an_answer_that_is_not_finite_neither_leaves_nor_counts(tmp_path, monkeypatch):
    message, (first, *_) = begun(tmp_path, "fedavg", {}, **LDP)
    whole = first.silo.answer(message)
    worse = whole["deltas"] | {"fc2.bias": torch.full_like(whole["deltas"]["fc2.bias"], torch.nan)}
    monkeypatch.setattr(first.silo, "answer", lambda _: whole | {"deltas": worse})
    with pytest.raises(NonFiniteError, match=r"^deltas/fc2\.bias: is not finite"):
        update(first, message)
    monkeypatch.undo()
    assert lines(tmp_path / "0.ledger") == []
    update(first, message)
    assert len(lines(tmp_path / "0.ledger")) == 1


def test_an_answer_over_the_budget_does_not_leave(tmp_path):
    most = epsilon({SIGMA: 2}, DELTA) * 1.001
    budget = LDP | {"budget_epsilon": most, "budget_delta": DELTA}
    message, (first, *_) = begun(tmp_path, "fedavg", {}, **budget)
    kept = [update(first, message._replace(exchange=exchange)) for exchange in (0, 1)]
    with pytest.raises(UserError, match=r"0\.ledger: budget_epsilon: the privacy budget does not"):
        update(first, message._replace(exchange=2))
    assert torch.equal(update(first, message), kept[0]), "what has left may be sent again"
    assert len(lines(tmp_path / "0.ledger")) == 2


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
    """Two runs are in one log, and the silo's process has its ledger. With other samples, each
    answer would be a further release."""
    message = world.pair("dpsgd", DPSGD)[0].get_model_params()
    network, classes = Model(world.network(False)), make_pair("dpsgd")
    args, shard = world.args("dpsgd", DPSGD, False, **LDP), world.shards_of()[1]
    args.rank = shard.rank  # as FedML has it
    process = SimpleNamespace(
        rank=1,
        folder=tmp_path,
        shard=shard,
        noise_key=tmp_path / "1.noise.key",
        deployment=world.deployment("dpsgd", comm={"replay_mb": 100}, settings=DPSGD),
    )

    def fedml() -> tuple:
        return args, network, classes

    log = audit.Log(tmp_path / "audit-1.jsonl", Kit.read(all_kits / "1", 1))
    kept, down = replay.Kept(process, log), wire.row_of(wire.with_digest(message), 0)
    for run in ("one", "two"):
        trainer = classes[0](network, args, shard)
        trainer.begin(RunFile(tmp_path / run, run), process.noise_key)
        kept.keep(trainer.silo, down)
        sha = wire.digest(trainer.answered(down)["leaves"])
        log.write(audit.SENT, peer="server", exchange=down.exchange, sha256=sha)
        if run == "one":
            trainer._ledger.close()
    before = (tmp_path / "1.ledger").read_bytes()
    assert replay.of_process(process, fedml, None).count("the same SHA-256") == 2
    data = shard.parts["train"]
    process.shard = shard.with_train(data._replace(y=torch.flip(data.y, [0])))
    with pytest.raises(UserError, match=r"sent .*, computed "):
        replay.of_process(process, fedml, None)
    assert (tmp_path / "1.ledger").read_bytes() == before and len(lines(tmp_path / "1.ledger")) == 2


@pytest.mark.slow
def test_the_round_goes_on_without_a_silo_whose_budget_is_spent(tmp_path):
    """Silo 0 may answer in three rounds of six. It is killed, and so is silo 1; neither loses nor
    repeats a release."""
    rounds, allowed = 6, 3
    most = epsilon({2.0: allowed * world.EPOCHS}, DELTA) * 1.001
    comm = {"quorum": 2, "deadline_s": 60.0, "gone_s": 30.0}
    terms = world.deployment("dpsgd", rounds=rounds, comm=comm, settings=DPSGD)
    budget = settings.DpArgs(budget_epsilon=most, budget_delta=DELTA)
    with loopback.Processes(terms, world.parts(public=False), tmp_path) as processes:
        common, own = processes.config, tmp_path / "own.yaml"
        own.write_text(processes.deployment.model_copy(update={"dp_args": budget}).yaml())

        def start(rank: int) -> None:
            processes.config = own if rank == 1 else common
            processes.start(rank)

        for rank in range(4):
            start(rank)
        until((processes.output / results.ROUNDS).exists, "the first round")
        for rank in (2, 1):
            processes.kill(rank)
            start(rank)
        assert ended(processes) == [0] * 4
        kits = processes.deployment.kit(1).parent
        absent = (processes.output / results.ABSENT).read_text().splitlines()[1:]
        log = launch.log_file(processes.output, 0).read_text()
    spent = lines(kits / "1.ledger")
    assert len(spent) == allowed and not (kits / "0.ledger").exists()
    missed = {int(line.split(",")[0]) for line in absent if line.endswith(",0")}
    assert {4, 5, 6} <= missed and len(missed) == rounds - allowed
    assert "the privacy budget does not allow this answer" in log
    for rank in (2, 3):
        found = lines(kits / f"{rank}.ledger")
        assert len({of["id"] for of in found}) == len(found) <= rounds
