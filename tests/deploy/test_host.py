"""A FedML pair, driven in one process message by message, ends with the weights of the simulation,
bit for bit."""

from __future__ import annotations

import importlib
import math
from copy import copy, deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from fedml_noniid import models
from fedml_noniid.contract import silos
from fedml_noniid.core.errors import UserError
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.results import RunFile
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.simulate import simulate
from tests.deploy import world
from tests.recipe_table import DEPLOYED, DEPLOYED_ALONE
from tests.recipe_table import settings as table
from tests.walks import thinned

DP = {
    "enable_dp": True,
    "mechanism_type": "gaussian",
    "epsilon": 0.9,
    "delta": 1e-5,
    "sensitivity": 1.0,
}


def norm(model):
    return math.sqrt(sum(leaf.square().sum().item() for leaf in model.values()))


@pytest.fixture(autouse=True)
def unprotected(monkeypatch):
    """FedML's protection is global; every test begins without."""
    importlib.import_module("fedml_noniid.deploy.host")  # imports fedml without its warnings
    from fedml.core.dp.fedml_differential_privacy import FedMLDifferentialPrivacy
    from fedml.core.security.fedml_attacker import FedMLAttacker
    from fedml.core.security.fedml_defender import FedMLDefender

    monkeypatch.setattr(FedMLDifferentialPrivacy, "_dp_instance", None)
    monkeypatch.setattr(FedMLAttacker, "_attacker_instance", None)
    monkeypatch.setattr(FedMLDefender, "_defender_instance", None)


SKEWED = [
    *("fedavg", "rfedavg_plus", "ccn", "fednlr", "fnr", "moon", "fedbn"),
    *("datasharing+moon+ccn+fednlr", "scaffold+fnr+rfedavg_plus+ccn"),
]
NORMS = {"batch_norm": True}
# Two clients would be one bucket, or would trim nobody, or are too few for Krum.
OF_THREE = ("bucketing", "krum", "trimmed_mean")
CASES = [
    # By itself, each method also runs with batch norms and all silos in test_resume.
    # some rest
    *thinned(
        (
            (entry, {"batch_norm": False, "cohort": 3 if entry[0] in OF_THREE else 2})
            for entry in DEPLOYED_ALONE.values()
        ),
        0,
        4,
    ),
    *thinned(
        ((entry, NORMS) for name, entry in DEPLOYED.items() if name not in DEPLOYED_ALONE), 0, 12
    ),
    # In noise, with augmentation.
    *thinned((((recipe, table(recipe)), NORMS | {"skewed": True}) for recipe in SKEWED), 0, 3),
    *(
        ((recipe, table(recipe)), NORMS | {"precision": "bf16"})
        for recipe in ("fedavg", "scaffold+fnr+rfedavg_plus+ccn")
    ),
]


@pytest.mark.parametrize(("entry", "how"), CASES, ids=lambda value: str(value)[:60])
def test_pair_equals_simulation(entry, how):
    silos.pair_equals_simulation(*entry, **how)
    if "skewed" in how or "precision" in how:
        plain = {key: value for key, value in how.items() if key == "batch_norm"}
        expected = world.digest(world.simulated(*entry, **how))
        assert expected != world.digest(world.simulated(*entry, **plain))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({}, {"precision": "bf16"}),
        ({"skewed": True}, {"skewed": True, "augment": False}),
        ({"settings": {"fedprox": {"mu": 0.1}}}, {"settings": {"fedprox": {"mu": 0.2}}}),
    ],
)
def test_a_silo_with_another_configuration_is_refused(mine, theirs):
    recipe = "fedprox" if "settings" in mine else "fedavg"
    (aggregator, good), (_, others) = (
        world.pair(recipe, **{"settings": {}} | how) for how in (mine, theirs)
    )
    with pytest.raises(
        UserError, match=r"silo 1 \(rank 2\): its configuration is not the server's"
    ):
        world.uploads(aggregator.get_model_params(), [good[0], others[1]])


@pytest.mark.parametrize(
    ("package", "prefix", "recipe"),
    [
        ("fnr", "FNR", "fnr"),
        ("fednnnn", "FedNNNN", "fednnnn"),
        ("ccn", "CCN", "ccn"),
        ("fednlr", "FedNLR", "fednlr"),
        ("rfedavg", "RFedAvg", "rfedavg"),
        ("rfedavg", "RFedAvgPlus", "rfedavg_plus"),
    ],
)
def test_visible_pairs(package, prefix, recipe):
    module = importlib.import_module(f"fedml_noniid.plugins.{package}.pair")
    for kind in ("Trainer", "Aggregator"):
        pair = getattr(module, prefix + kind)
        assert pair.__base__.__name__ == f"Host{kind}" and pair.recipe == recipe


def test_a_pair_refuses_another_recipe():
    from fedml_noniid.deploy.host import Model
    from fedml_noniid.plugins.fnr.pair import FNRAggregator

    args, (shard, *_) = world.args("ccn", {}, False), world.shards_of()
    with pytest.raises(UserError, match=r"args.recipe = 'ccn', but FNRAggregator runs 'fnr'"):
        FNRAggregator(Model(world.network(False)), args, shard)


def test_a_module_of_the_users_own_starts_from_its_parameters():
    """FedML's user gives an `nn.Module`, and names some network in the configuration."""
    from fedml_noniid.deploy.pair import make_pair

    torch.manual_seed(4)
    layers = nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)
    mine = nn.Sequential(*layers, nn.Linear(8, world.CLASSES))
    other = deepcopy(mine)
    other[1].weight.data += 1
    args, (server, *shards) = world.args("scaffold", {}, False), world.shards_of()
    args.model, args.model_options = "lr", {}
    trainer_class, aggregator_class = make_pair("scaffold")
    aggregator = aggregator_class(mine, copy(args), server)
    stranger = trainer_class(other, copy(args), shards[0])
    with pytest.raises(UserError, match="its configuration is not the server's"):
        world.uploads(aggregator.get_model_params(), [stranger])
    trainers = [trainer_class(deepcopy(mine), copy(args), shard) for shard in shards]
    data = world.parts()
    net = models.build(models.name_of(mine), (1, 4, 4), world.CLASSES)
    local = LocalTraining(lr=world.LR, epochs=world.EPOCHS, batch_size=world.BATCH)
    plan = Plan(net, local, world.ROUNDS, 3, world.SEED, engine="sequential")
    parts = (data.train, data.clients, data.test)
    federation = Federation.from_indices(*parts, validation=data.validation)
    expected = simulate("scaffold", {}, federation, plan).run()
    assert world.digest(world.run(aggregator, trainers)) == world.digest(expected)


def test_a_silo_whose_own_model_diverges_is_named():
    """Nothing that it sends is wrong: only the silo knows."""
    aggregator, trainers = world.pair("ditto", {"ditto": {"lam": 1e38}})
    with pytest.raises(UserError, match=r"round 1, client \d: .* memory is not finite"):
        world.uploads(aggregator.get_model_params(), trainers)


# FedML's hooks
# --------------------------------------------------------------------------------------------------


LDP = DP | {"dp_solution_type": "ldp"}
SIGMA = math.sqrt(2 * math.log(1.25e5)) / 0.9  # 5.38, of sensitivity 1


def begun(trainers: list, folder: Path) -> list:
    """Silos whose memory and secrets are in files."""
    folder.mkdir(exist_ok=True)
    for trainer in trainers:
        file = RunFile(folder / f"{trainer.id}", "a run")
        trainer.begin(file, file.path.with_suffix(".noise.key"))
    return trainers


def plain(message: object, recipe: str, settings: dict, **more: object) -> dict[str, torch.Tensor]:
    """The tensors that the first silo would send without noise."""
    _, trainers = world.pair(recipe, settings, **more)
    trainers[0].set_model_params(message)
    trainers[0].train(trainers[0]._batches, torch.device("cpu"), trainers[0].args)
    return trainers[0].get_model_params()["leaves"]


def test_local_privacy_noise_covers_all_that_leaves_a_silo(tmp_path):
    """scaffold uploads control variates beside w_k - w_t; both are noised. n and steps are those of
    the study's 70 samples, not of this silo's 17, and the loss is withheld.

    All of it together is clipped to C = 1/2. Running statistics count as changes, and variances
    stay positive.
    """
    aggregator, noisy = world.pair("scaffold", {}, batch_norm=True, **LDP)
    message = aggregator.get_model_params()
    without = plain(message, "scaffold", {}, batch_norm=True, **LDP)
    (_, with_noise), *_ = ups = world.uploads(message, begun(noisy, tmp_path))
    sent, clear = with_noise["leaves"], {"n", "steps", "loss"}
    assert {key.partition("/")[0] for key in without} == {*wire.PARTS}
    assert not [key for key, leaf in without.items() if torch.equal(leaf, sent[key])]
    assert (without["n"], without["steps"]) == (17, 2) and without["loss"] > 0
    assert (sent["n"], sent["steps"]) == (70, 6) and sent["loss"].isnan()
    start = wire.flatten({"buffers": message.ask.buffers})
    moved = {key: without[key] - start.get(key, 0) for key in without.keys() - clear}
    factor = 0.5 / norm(moved)
    noises = {key: sent[key] - start.get(key, 0) - factor * leaf for key, leaf in moved.items()}
    drawn = torch.cat([noises[key].flatten() for key in noises if key != "buffers/bn1.var"])
    assert factor < 1 and len(drawn) > 300
    assert abs(drawn.std().item() / SIGMA - 1) < 5 / math.sqrt(2 * len(drawn))
    assert (sent["buffers/bn1.var"] >= 0).all()
    aggregator.server_run.open({up["client"]: up for _, up in ups})


def test_local_noise_refuses_a_compressed_update():
    _, (trainer, *_) = world.pair("fedprox+topk", {}, **LDP)
    with pytest.raises(UserError, match=r"compresses updates, and .* = ldp adds noise"):
        trainer.begin()


def test_one_question_has_one_noise_and_each_silo_its_own(tmp_path):
    """The model is w_0 each time, so only noise can differ."""
    aggregator, trainers = world.pair("scaffold", {}, **LDP)
    message, (first, *others) = aggregator.get_model_params(), begun(trainers, tmp_path)

    def noise_of(trainer: object, message: object = message) -> torch.Tensor:
        ((_, up),) = world.uploads(message, [trainer])
        return up["leaves"]["deltas/fc1.weight"].flatten()

    noise = noise_of(first)
    torch.manual_seed(1)
    assert torch.equal(noise_of(first), noise)
    assert len(first._ledger._ids) == 1, "one question is one release"
    nudged = message.ask.params | {"fc2.bias": message.ask.params["fc2.bias"] + 1e-6}
    for other in (
        noise_of(first, message._replace(exchange=7)),
        noise_of(first, message._replace(sha256="the digest that the transport knows")),
        noise_of(first, message._replace(ask=message.ask._replace(params=nudged))),
        *map(noise_of, others),
    ):
        correlation = torch.corrcoef(torch.stack([other, noise]))[0, 1]  # of 128 numbers
        assert abs(correlation.item()) < 0.5 and (other - noise).std() > SIGMA


@pytest.mark.parametrize("recipe", ["scaffold", "fnr", "fednova", "fedgen", "ccvr"])
def test_a_run_with_local_noise_ends_and_the_server_takes_every_answer(recipe):
    """Noise of 0.005 makes counts and losses negative, unless it is moved into their range."""
    settings = table(recipe)
    outcome = world.run(*world.pair(recipe, settings, True, **LDP | {"sensitivity": 0.001}))
    assert len(outcome.rows) == world.ROUNDS
    assert world.digest(outcome) != world.digest(world.simulated(recipe, settings, True))


CDP = DP | {"dp_solution_type": "cdp", "max_grad_norm": 1.0}


@pytest.mark.parametrize(
    ("recipe", "protection", "message"),
    [
        (
            "fedavg",
            {"enable_defense": True, "defense_type": "crum"},
            r"defense_args.defense_type 'crum' is unknown \(did you mean 'krum'\?\); allow",
        ),
        (
            "fedavg",
            {"enable_defense": True, "defense_type": "wise_median"},
            "replaces the average, which the recipe makes",
        ),
        *(
            (recipe, CDP, f"{recipe} sends out a new model without FedML's central privacy noise")
            for recipe in ("rfedavg_plus", "ccvr", "ifca")
        ),
    ],
)
def test_protection_that_could_not_do_what_it_promises_is_refused(recipe, protection, message):
    with pytest.raises(UserError, match=message):
        world.pair(recipe, {}, **protection)


def test_central_privacy_noise_is_on_the_model_that_is_sent_next_and_averaged_against():
    _, trainers = world.pair("fedavg", {})
    aggregator, _ = world.pair("fedavg", {}, client_num=3, **CDP)
    before = aggregator.server_run.loop.state.params
    ups = world.uploads(aggregator.get_model_params(), trainers)
    kept, _ = aggregator.on_before_aggregation(ups)
    # FedML clips models, in place; what is kept are differences.
    clipped = [{key: before[key] + reply["deltas"][key] for key in before} for _, reply in kept]
    assert max(map(norm, clipped)) <= 1.001
    message = aggregator.on_after_aggregation(aggregator.aggregate(kept))
    for key, leaf in aggregator.server_run.loop.state.params.items():
        assert torch.equal(message.ask.params[key], leaf)
        sizes = zip(world.SIZES, clipped, strict=True)
        average = sum(n / sum(world.SIZES) * model[key] for n, model in sizes)
        assert (average - leaf).abs().max() > 1e-3, "noised"


KRUM = {"enable_defense": True, "defense_type": "krum", "byzantine_client_num": 0}


def defending(monkeypatch, **functions) -> None:
    """FedML's defender with these functions in place of its own."""
    from fedml.core.security.fedml_defender import FedMLDefender

    for name, function in functions.items():
        monkeypatch.setattr(FedMLDefender.get_instance(), name, function)


def test_a_defence_before_aggregation_can_drop_a_silo(monkeypatch):
    aggregator, trainers = world.pair("fedavg", {}, **KRUM, krum_param_m=1)
    ups = world.uploads(aggregator.get_model_params(), trainers)
    defending(
        monkeypatch,
        defend_before_aggregation=lambda raw_client_grad_list, extra_auxiliary_info: (
            raw_client_grad_list[::2]
        ),
        get_benign_client_idxs=lambda client_idxs: client_idxs[::2],
    )
    kept, indices = aggregator.on_before_aggregation(ups)
    assert indices == [0, 2] == [client for client, _ in kept]
    assert aggregator.aggregate(kept).counted == {0: 0, 2: 0}


def test_a_defence_compares_models_and_what_it_leaves_alone_keeps_its_bits(monkeypatch):
    """It sees w_t and every w_k. The first silo's bias moves; all else is as it was sent."""
    aggregator, trainers = world.pair("fedavg", {}, **KRUM, krum_param_m=3)
    ups, seen = world.uploads(aggregator.get_model_params(), trainers), []
    sent = trainers[0]._down.ask.params
    for _, up in ups:  # differences that are lost where w_t is added and taken away again
        up["leaves"] |= {f"deltas/{key}": up["leaves"][f"deltas/{key}"] / 3 for key in sent}

    def defended(raw_client_grad_list, extra_auxiliary_info):
        seen.extend([extra_auxiliary_info, *(dict(model) for _, model in raw_client_grad_list)])
        n, first = raw_client_grad_list[0]
        return [(n, first | {"fc2.bias": first["fc2.bias"] + 1}), *raw_client_grad_list[1:]]

    def benign(client_idxs):
        return client_idxs

    defending(monkeypatch, defend_before_aggregation=defended, get_benign_client_idxs=benign)
    kept, _ = aggregator.on_before_aggregation(ups)
    assert all(torch.equal(seen[0][key], leaf) for key, leaf in sent.items())
    for (_, reply), (_, up), model in zip(kept, ups, seen[1:], strict=True):
        for key, leaf in sent.items():
            delta = up["leaves"][f"deltas/{key}"]
            assert torch.equal(model[key], leaf + delta)
            moves = reply is kept[0][1] and key == "fc2.bias"
            torch.testing.assert_close(
                reply["deltas"][key], delta + moves, rtol=0, atol=1e-6 * moves
            )


def test_a_poisoned_shard_is_what_is_trained_on():
    aggregator, (silo, *_) = world.pair("fedavg", {})
    ((x, y),), updates = silo._batches, []
    for batches in ([(x, y)], [(x[:9], 1 - y[:9].clamp(max=1)), (x[9:], y[9:])]):
        silo._batches = batches
        ((_, up),) = world.uploads(aggregator.get_model_params(), [silo])
        updates.append(up["leaves"]["deltas/fc2.weight"])
    assert not torch.equal(*updates)
