"""A FedML pair, driven in one process message by message, ends with the weights of the simulation,
bit for bit."""

from __future__ import annotations

import dataclasses
import importlib
import math
from pathlib import Path

import pytest
import torch

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.silo import wire
from fedml_noniid.plugins.silo.results import RunFile
from tests.recipe_table import ALONE, DEPLOYED, PARAMETERS
from tests.recipe_table import settings as table
from tests.silo import world

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
    importlib.import_module("fedml_noniid.plugins.silo.host")  # imports fedml without its warnings
    from fedml.core.dp.fedml_differential_privacy import FedMLDifferentialPrivacy
    from fedml.core.security.fedml_attacker import FedMLAttacker
    from fedml.core.security.fedml_defender import FedMLDefender

    monkeypatch.setattr(FedMLDifferentialPrivacy, "_dp_instance", None)
    monkeypatch.setattr(FedMLAttacker, "_attacker_instance", None)
    monkeypatch.setattr(FedMLDefender, "_defender_instance", None)


SKEWED = ["fedavg", "rfedavg_plus", "ccn", "fednlr", "fnr", "moon", "fedbn"]
SKEWED += ["datasharing+moon+ccn+fednlr", "scaffold+fnr+rfedavg_plus+ccn"]
NORMS = {"batch_norm": True}
CASES = [
    *((DEPLOYED[entry], NORMS) for entry in DEPLOYED),
    *((entry, {"batch_norm": False}) for entry in ALONE.values()),
    *((entry, {"batch_norm": False, "cohort": 2}) for entry in ALONE.values()),  # some rest
    # In noise, with augmentation.
    *(((recipe, table(recipe)), NORMS | {"skewed": True}) for recipe in SKEWED),
    *(
        ((recipe, table(recipe)), NORMS | {"precision": "bf16"})
        for recipe in ("fedavg", "scaffold+fnr+rfedavg_plus+ccn")
    ),
]


@pytest.mark.parametrize(("entry", "how"), CASES, ids=lambda value: str(value)[:60])
def test_pair_equals_simulation(entry, how):
    expected, found = world.simulated(*entry, **how), world.run(*world.pair(*entry, **how))
    assert world.digest(found) == world.digest(expected)
    world.compare(found.rows, expected.rows)
    assert not any(math.isnan(row["test_accuracy"]) for row in found.rows)
    if "skewed" in how or "precision" in how:
        plain = {key: value for key, value in how.items() if key == "batch_norm"}
        assert world.digest(expected) != world.digest(world.simulated(*entry, **plain))


def test_the_noise_is_the_silos_to_add():
    aggregator, trainers = world.pair("fedavg", {}, True, skewed=True)
    trainers[2].shard = dataclasses.replace(trainers[2].shard, noise=None)
    expected = world.simulated("fedavg", {}, True, skewed=True)
    assert world.digest(world.run(aggregator, trainers)) != world.digest(expected)


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
    """Each paper's classes set `recipe` and a docstring, and nothing else."""
    from fedml.core import ClientTrainer, ServerAggregator

    module = importlib.import_module(f"fedml_noniid.plugins.{package}.pair")
    for kind, base in (("Trainer", ClientTrainer), ("Aggregator", ServerAggregator)):
        found = getattr(module, prefix + kind)
        assert issubclass(found, base)
        assert found.recipe == recipe
        assert {name for name in vars(found) if not name.startswith("__")} <= {
            "recipe",
            "_abc_impl",
        }
        assert found.__doc__


def test_a_pair_refuses_another_recipe():
    from fedml_noniid.plugins.fnr.pair import FNRAggregator
    from fedml_noniid.plugins.silo.host import Model

    args, (shard, *_) = world.args("ccn", {}, False), world.shards_of()
    with pytest.raises(UserError, match=r"args.recipe = 'ccn', but FNRAggregator runs 'fnr'"):
        FNRAggregator(Model(world.network(False)), args, shard)


def test_make_pair_names_an_unknown_method():
    from fedml_noniid.plugins.silo.pair import make_pair

    with pytest.raises(UserError, match=r"method 'fednnn' is unknown \(did you mean 'fednnnn'\?\)"):
        make_pair("fednnn")


def test_a_diverging_silo_is_named():
    _, trainers = world.pair("fedavg", {})
    aggregator, _ = world.pair("fedavg", {})
    trainers[1]._batches = [(x * float("inf"), y) for x, y in trainers[1]._batches]
    with pytest.raises(UserError, match="round 1, client 1: loss or update is not finite"):
        world.uploads(aggregator.get_model_params(), trainers)


# FedML's hooks
# --------------------------------------------------------------------------------------------------


LDP = DP | {"dp_solution_type": "ldp"}
SIGMA = math.sqrt(2 * math.log(1.25e5)) / 0.9  # 5.38, of sensitivity 1


def begun(trainers: list, folder: Path, run: str = "a run") -> list:
    """Silos whose memory and secrets are in files."""
    for trainer in trainers:
        path = folder / f"{trainer.id}"
        trainer.begin(RunFile(path, run), path.with_suffix(".noise.key"))
    return trainers


def plain(message: object, recipe: str, settings: dict, **more: object) -> dict[str, torch.Tensor]:
    """The tensors that the first silo would send without noise."""
    _, trainers = world.pair(recipe, settings, **more)
    trainers[0].set_model_params(message)
    trainers[0].train(trainers[0]._batches, torch.device("cpu"), None)
    return trainers[0].get_model_params()["leaves"]


def test_local_privacy_noise_covers_all_that_leaves_a_silo(tmp_path):
    """scaffold uploads control variates beside w_k - w_t; both are noised, n, steps and loss are
    not.

    All of it together is clipped to C = 1/2. Running statistics count as changes, and variances
    stay positive.
    """
    aggregator, noisy = world.pair("scaffold", {}, batch_norm=True, **LDP)
    message = aggregator.get_model_params()
    without = plain(message, "scaffold", {}, batch_norm=True, **LDP)
    (_, with_noise), *_ = ups = world.uploads(message, begun(noisy, tmp_path))
    found = with_noise["leaves"]
    assert {key.partition("/")[0] for key in without} == {*wire.PARTS}
    assert {key for key, leaf in without.items() if torch.equal(leaf, found[key])} == {
        "n",
        "steps",
        "loss",
    }
    start = wire.flatten({"buffers": message.ask.buffers})
    moved = {
        key: leaf - start.get(key, 0)
        for key, leaf in without.items()
        if key not in ("n", "steps", "loss")
    }
    factor = 0.5 / norm(moved)
    assert factor < 1
    noise = {key: found[key] - start.get(key, 0) - factor * leaf for key, leaf in moved.items()}
    drawn = torch.cat([leaf.flatten() for key, leaf in noise.items() if key != "buffers/bn1.var"])
    assert len(drawn) > 300 and abs(drawn.std().item() / SIGMA - 1) < 5 / math.sqrt(2 * len(drawn))
    assert (found["buffers/bn1.var"] >= 0).all()
    aggregator.server_run.open({up["client"]: up for _, up in ups})


def test_one_question_has_one_noise_even_after_a_restart_and_each_silo_its_own(tmp_path):
    """Asked 20 times, the noise does not average down.

    The model is w_0 each time, so only noise can differ.
    """
    aggregator, trainers = world.pair("scaffold", {}, **LDP)
    message, (first, *others) = aggregator.get_model_params(), begun(trainers, tmp_path)

    def asked(trainer: object, message: object = message) -> dict[str, torch.Tensor]:
        ((_, up),) = world.uploads(message, [trainer])
        return up["leaves"]

    def noise_of(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        return leaves["deltas/fc1.weight"].flatten()

    one = asked(first)
    for seed in range(20):
        torch.manual_seed(seed)
        assert all(torch.equal(leaf, one[key]) for key, leaf in asked(first).items())
    again = begun(world.pair("scaffold", {}, **LDP)[1], tmp_path)[
        0
    ]  # the process was killed and started again
    assert all(torch.equal(leaf, one[key]) for key, leaf in asked(again).items())
    nudged = message.ask.params | {"fc2.bias": message.ask.params["fc2.bias"] + 1e-6}
    different = [
        asked(first, message._replace(exchange=7)),
        asked(first, message._replace(round=2)),
        asked(first, message._replace(ask=message.ask._replace(params=nudged))),
        *(asked(trainer) for trainer in others),
        asked(begun(world.pair("scaffold", {}, **LDP)[1], tmp_path / "elsewhere")[0]),
    ]
    for other in map(noise_of, different):
        assert (
            abs(torch.corrcoef(torch.stack([other, noise_of(one)]))[0, 1].item()) < 0.5
        )  # of 128 numbers
        assert (other - noise_of(one)).std() > SIGMA


def test_the_noise_of_a_question_does_not_serve_for_another_answer(tmp_path):
    """The server says that another answer was the last that counted, so c_i differs.

    The rest is the same.
    """
    aggregator, trainers = world.pair("scaffold", {}, **LDP)
    first, message = begun(trainers, tmp_path)[0], aggregator.get_model_params()
    world.uploads(message, [first])
    second = message._replace(exchange=1)
    ((_, fresh),) = world.uploads(second, [first])
    ((_, behind),) = world.uploads(second._replace(counted={0: 0}), [first])
    apart = behind["leaves"]["deltas/fc1.weight"] - fresh["leaves"]["deltas/fc1.weight"]
    assert apart.std() > SIGMA


@pytest.mark.parametrize(("recipe", "settings"), ALONE.values(), ids=ALONE)
def test_a_run_with_local_noise_ends_and_the_server_takes_every_answer(recipe, settings):
    """Noise of 0.005 makes counts and losses negative, unless it is moved into their range."""
    aggregator, trainers = world.pair(recipe, settings, True, **LDP | {"sensitivity": 0.001})
    found = world.run(aggregator, trainers)
    assert len(found.rows) == world.ROUNDS
    assert world.digest(found) != world.digest(world.simulated(recipe, settings, True))


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
            (recipe, CDP, f"{recipe} sends the new model out once")
            for recipe in ("rfedavg_plus", "ccvr")
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
    models = [
        {key: before[key] + delta for key, delta in reply["deltas"].items()} for _, reply in kept
    ]
    assert all(norm(model) <= 1.001 for model in models), "clipped"
    assert all(
        norm({key: before[key] + up["leaves"][f"deltas/{key}"] for key in before}) > 1.5
        for _, up in ups
    )
    message = aggregator.on_after_aggregation(aggregator.aggregate(kept))
    sent = aggregator.server_run.loop.state.params
    assert all(torch.equal(message.ask.params[key], sent[key]) for key in sent)
    assert not any(torch.equal(before[key], sent[key]) for key in sent)
    weights = torch.tensor(world.SIZES, dtype=torch.float64) / sum(world.SIZES)
    average = {
        key: sum(w.item() * model[key] for w, model in zip(weights, models, strict=True))
        for key in sent
    }
    assert min((average[key] - sent[key]).abs().max().item() for key in sent) > 1e-3, "noised"


def test_a_server_that_learns_keeps_its_model_to_itself_until_the_noise_is_added():
    settings = {"feddf": PARAMETERS["feddf"]}
    pair = world.pair("feddf", settings, **CDP)
    assert world.digest(world.run(*pair)) != world.digest(world.simulated("feddf", settings, False))


def test_a_defence_before_aggregation_can_drop_a_silo():
    aggregator, trainers = world.pair(
        "fedavg",
        {},
        enable_defense=True,
        defense_type="krum",
        byzantine_client_num=0,
        krum_param_m=1,
    )
    ups = world.uploads(aggregator.get_model_params(), trainers)
    from fedml.core.security.fedml_defender import FedMLDefender

    defender = FedMLDefender.get_instance()
    defender.defend_before_aggregation = lambda raw_client_grad_list, extra_auxiliary_info: (
        raw_client_grad_list[::2]
    )
    defender.get_benign_client_idxs = lambda client_idxs: client_idxs[::2]
    kept, indices = aggregator.on_before_aggregation(ups)
    assert indices == [0, 2] == [client for client, _ in kept]
    assert aggregator.aggregate(kept).counted == {0: 0, 2: 0}
    w = torch.tensor([17, 70], dtype=torch.float64) / 87
    start = trainers[0]._down.ask.params
    for key, leaf in aggregator.server_run.loop.state.params.items():
        rows = torch.stack([up["leaves"][f"deltas/{key}"] for _, up in ups[::2]])
        assert torch.allclose(leaf, start[key] + torch.tensordot(w.float(), rows, dims=1))


def test_a_defence_compares_models_and_what_it_leaves_alone_keeps_its_bits(monkeypatch):
    """It sees w_t and every w_k. The first silo's bias moves; all else is as it was sent."""
    aggregator, trainers = world.pair(
        "fedavg",
        {},
        enable_defense=True,
        defense_type="krum",
        byzantine_client_num=0,
        krum_param_m=3,
    )
    ups = world.uploads(aggregator.get_model_params(), trainers)
    for (
        _,
        up,
    ) in ups:  # differences that are lost where they are added to w_t and w_t is taken away again
        up["leaves"] |= {
            key: leaf / 3 for key, leaf in up["leaves"].items() if key.startswith("deltas/")
        }
    from fedml.core.security.fedml_defender import FedMLDefender

    defender, seen = FedMLDefender.get_instance(), []

    def defended(raw_client_grad_list, extra_auxiliary_info):
        seen.append(extra_auxiliary_info)
        seen.extend(dict(model) for _, model in raw_client_grad_list)
        n, first = raw_client_grad_list[0]
        return [(n, first | {"fc2.bias": first["fc2.bias"] + 1}), *raw_client_grad_list[1:]]

    monkeypatch.setattr(defender, "defend_before_aggregation", defended)
    monkeypatch.setattr(defender, "get_benign_client_idxs", lambda client_idxs: client_idxs)
    kept, _ = aggregator.on_before_aggregation(ups)
    start, *models = seen
    sent = trainers[0]._down.ask.params
    assert all(torch.equal(start[key], leaf) for key, leaf in sent.items())
    for k, (_, up) in enumerate(ups):
        for key, leaf in sent.items():
            delta, found = up["leaves"][f"deltas/{key}"], kept[k][1]["deltas"][key]
            assert torch.equal(models[k][key], leaf + delta)
            if (k, key) == (0, "fc2.bias"):
                torch.testing.assert_close(found, delta + 1)
            else:
                assert torch.equal(found, delta)


def test_an_attack_that_fedml_simulates_counts(monkeypatch):
    """It puts other tensors into the models that it is given: 2 w_t - w_k in place of w_k, so -(w_k
    - w_t)."""
    monkeypatch.setattr("fedml.device.get_device", lambda _: torch.device("cpu"))
    aggregator, trainers = world.pair(
        "fedavg",
        {},
        enable_attack=True,
        attack_type="byzantine",
        attack_mode="flip",
        byzantine_client_num=3,
    )
    ups = world.uploads(aggregator.get_model_params(), trainers)
    kept, _ = aggregator.on_before_aggregation(ups)
    for (_, up), (_, reply) in zip(ups, kept, strict=True):
        for key, delta in reply["deltas"].items():
            assert delta.abs().max() > 1e-3
            torch.testing.assert_close(delta, -up["leaves"][f"deltas/{key}"], rtol=1e-4, atol=1e-6)


def test_a_defence_after_aggregation_may_work_in_place(monkeypatch):
    """As FedML's `cclip` does."""
    aggregator, trainers = world.pair(
        "fedavg", {}, enable_defense=True, defense_type="crfl", clip_threshold=1e9, dataset=""
    )
    from fedml.core.security.fedml_defender import FedMLDefender

    def defended(model):
        for key in model:
            model[key] = torch.ones_like(model[key])
        return model

    monkeypatch.setattr(FedMLDefender.get_instance(), "defend_after_aggregation", defended)
    kept, _ = aggregator.on_before_aggregation(
        world.uploads(aggregator.get_model_params(), trainers)
    )
    message = aggregator.on_after_aggregation(aggregator.aggregate(kept))
    assert all(bool((leaf == 1).all()) for leaf in message.ask.params.values())


def test_a_poisoned_shard_is_what_is_trained_on():
    aggregator, trainers = world.pair("fedavg", {})
    message = aggregator.get_model_params()
    (_, clean), *_ = world.uploads(message, trainers[:1])
    ((x, y),) = trainers[0]._batches
    trainers[0]._batches = [(x[:9], 1 - y[:9].clamp(max=1)), (x[9:], y[9:])]
    (_, poisoned), *_ = world.uploads(message, trainers[:1])
    assert not torch.equal(
        clean["leaves"]["deltas/fc2.weight"], poisoned["leaves"]["deltas/fc2.weight"]
    )


def test_the_last_evaluation_is_fedmls_metric():
    aggregator, trainers = world.pair("fedavg", {})
    assert aggregator.test(None, torch.device("cpu"), None) == (0.0, 0.0, None, None)
    outcome = world.run(aggregator, trainers)
    assert aggregator.test(None, torch.device("cpu"), None)[0] == outcome.rows[-1]["test_accuracy"]
