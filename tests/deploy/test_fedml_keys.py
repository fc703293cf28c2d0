"""FedML's keys under stock FedML: each is taken as the setting that it is, or refused in a line."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.deploy import settings
from tests.deploy import world

BASE = {"rank": 1, "client_num_in_total": 3, "client_num_per_round": 3, "comm_round": 4}


def read(**written: object) -> settings.Deployment:
    """What a pair reads of FedML's `args`; None leaves a key out."""
    keys = BASE | written
    kept = {key: value for key, value in keys.items() if value is not None}
    return settings.from_args(SimpleNamespace(**kept))


def refusal(**written: object) -> str:
    """The one line with which FedML's `args` are refused."""
    with pytest.raises(UserError) as error:
        read(**written)
    (line,) = str(error.value).splitlines()
    return line


# FedML's key, our key, a value, another value, the section and the field that have it
ROWS = [
    ("comm_round", "rounds", 50, 2, "train_args", "rounds"),
    ("learning_rate", "lr", 0.3, 0.1, "train_args", "lr"),
    ("client_optimizer", "optimizer", "adam", "sgd", "train_args", "optimizer"),
    ("wd", "weight_decay", 0.25, 0.5, "train_args", "weight_decay"),
    ("local_iterations", "local_steps", 7, 8, "train_args", "local_steps"),
    ("random_seed", "seed", 5, 6, "common_args", "random_seed"),
]


@pytest.mark.parametrize(("fedml", "ours", "value", "other", "section", "field"), ROWS)
def test_a_key_of_fedml_is_the_setting_that_it_names(fedml, ours, value, other, section, field):
    rounds = {"comm_round": None} if ours == "rounds" else {}
    for written in ({fedml: value}, {ours: value}, {fedml: value, ours: value}):
        assert getattr(getattr(read(**rounds | written), section), field) == value
    line = refusal(**{fedml: value, ours: other})
    assert line.startswith(f"args: {section}.") and "contradicts" in line
    assert all(part in line for part in (fedml, ours, repr(value), repr(other)))


def test_fewer_clients_per_round_are_the_cohort():
    assert read().train_args.per_round == 3
    assert read(client_num_per_round=None, client_num_in_total=5).train_args.per_round == 5
    # FedML has written both by the time that a pair is made.
    fedmls = {"worker_num": 2, "client_id_list": "[1, 2]"}
    assert read(client_num_per_round=2, **fedmls).train_args.per_round == 2
    assert read(client_num_per_round=2, cohort=2).train_args.per_round == 2
    assert read(client_num_per_round=3, cohort=2).train_args.per_round == 2  # all are connected
    assert "client_num_per_round = 2" in refusal(client_num_per_round=2, cohort=1)
    assert "client_num_per_round = 4" in refusal(client_num_per_round=4)


TEXT = "this is text for YAML: no quotes, and 1.0e-3 for 1e-3"  # as PyYAML, which FedML reads with
REFUSED = [
    # FedML has no default, and two rounds are nobody's wish.
    ({"comm_round": None}, "train_args.comm_round is missing"),
    ({"federated_optimizer": "SCAFFOLD"}, "the method that runs is `recipe`"),
    *(
        ({"client_id_list": ids}, "train_args.client_id_list = .* is its rank")
        for ids in ("[1, 2]", [1, 2], "[64, 65, 66]", "1,2,3", 7)
    ),
    *(
        ({key: 3}, rf"args: {key} is unknown \(did you mean '{meant}'\?\); a")
        for key, meant in (("epoch", "epochs"), ("n_rounds", "rounds"), ("setings", "settings"))
    ),
    *(
        ({key: 2, "grpc_ipconfig_path": "ip.csv"}, f"args: {key} = 2 is refused")
        for key in settings.WAITING
    ),
    ({"learning_rate": "1e-3"}, f"train_args.learning_rate = '1e-3' is refused.*{TEXT}"),
    ({"comm_round": "3"}, f"train_args.comm_round = '3' is refused.*{TEXT}"),
]


@pytest.mark.parametrize(("written", "words"), REFUSED)
def test_what_fedml_would_take_in_another_way_is_refused(written, words):
    assert re.search(words, refusal(**written))


@pytest.mark.parametrize("ids", [None, "None", [], "[1]", "[1, 2, 3]", "[1,2,3]", [1, 2, 3]])
def test_a_list_of_all_ids_is_what_fedml_makes_itself(ids):
    assert read(client_id_list=ids).train_args.client_id_list == "[]"


def test_keys_of_fedml_and_of_the_user_are_no_misspelt_ones():
    """All that FedML's cross-silo code reads of `args`, and what users add."""
    fedml = Path(importlib.util.find_spec("fedml").origin).parent
    files = [*(fedml / "cross_silo").rglob("*.py"), *(fedml / "core").rglob("*.py")]
    text = "\n".join(path.read_text() for path in files)
    keys = set(re.findall(r"\bargs\.([a-z]\w*)", text)) | {"data_cache_dir", "model_name", "alpha"}
    assert len(keys) > 100
    known = {key for section in SECTIONS for key in settings.keys_of(section)}
    read(**dict.fromkeys(keys - known - {*BASE, "worker_num"}, 0))


SECTIONS = [type(own) for _, own in settings.Deployment() if isinstance(own, settings.Section)]


@pytest.mark.parametrize("key", settings.ELSEWHERE)
def test_a_key_that_no_recipe_reads_is_refused_unless_it_changes_nothing(key):
    line = refusal(**{key: "both"})
    assert line.startswith(f"args: {key} = 'both' is refused; allowed: ")
    assert read(**{key: False}) == read(**{key: "no"}) == read()


@pytest.mark.parametrize("backend", ["sp", "MPI", "NCCL"])
def test_fedmls_simulators_are_refused_with_what_to_use(backend):
    with pytest.raises(UserError, match=r"training_type = 'simulation'.*`fedml_noniid.run\("):
        read(training_type="simulation", backend=backend)


# The pair
# --------------------------------------------------------------------------------------------------


def test_comm_round_is_the_callers_but_while_fedmls_managers_read_it():
    aggregator, (silo, *_) = world.pair("scaffold+fnr+ccn", {})
    exchanges = aggregator.server_run.terms.comm_round
    assert exchanges > world.ROUNDS
    for host in (aggregator, silo):
        assert host.args.comm_round == world.ROUNDS
        host.set_id(0)  # FedML's call, before its managers read it
        assert host.args.comm_round == exchanges
    silo.set_model_params(aggregator.get_model_params())  # FedML's first calls after that
    assert aggregator.args.comm_round == silo.args.comm_round == world.ROUNDS


def test_fedmls_managers_wait_for_all_silos_whatever_the_cohort():
    args = world.args("fedavg", {}, False)
    args.client_num_per_round, args.worker_num, args.client_id_list = 2, 2, "[1, 2]"
    aggregator, silos = world.hosts("fedavg", lambda _: world.network(False), args, world.parts())
    assert (aggregator.args.worker_num, aggregator.args.client_num_per_round) == (3, 3)
    assert aggregator.args.client_id_list == "[1, 2, 3]"
    assert [silo.args.client_id_list for silo in silos] == ["[1]", "[2]", "[3]"]
    outcome, expected = world.run(aggregator, silos), world.simulated("fedavg", {}, False, 2)
    assert world.digest(outcome) == world.digest(expected)


def test_a_pair_made_twice_of_one_args_runs_as_often():
    """In a notebook, a cell is run again."""
    args = world.args("scaffold+ccn", {}, False)
    args.__dict__.pop("rounds")
    args.comm_round, args.client_num_per_round = 5, 2
    host = importlib.import_module("fedml_noniid.deploy.host")
    _, aggregator_class = importlib.import_module("fedml_noniid.deploy.pair").make_pair(args.recipe)
    for _ in range(2):
        model = host.Model(world.network(False))
        terms = aggregator_class(model, args, world.shards_of()[0]).server_run.terms
        assert (terms.plan.rounds, terms.plan.cohort, args.comm_round) == (5, 2, 5)


def test_the_shard_of_another_rank_is_refused():
    args = world.args("fedavg", {}, False)
    args.rank = 2
    with pytest.raises(UserError, match="the shard is of rank 0 of 3 silos; args says rank 2"):
        world.hosts("fedavg", lambda _: world.network(False), args, world.parts())


def test_other_args_than_fedmls_are_refused():
    """FedML would end the run after another number of exchanges."""
    aggregator, (silo, *_) = world.pair("fedavg", {})
    silo.set_model_params(aggregator.get_model_params())
    copied = SimpleNamespace(**vars(silo.args))
    with pytest.raises(UserError, match="have different args"):
        silo.train(silo._batches, torch.device("cpu"), copied)
