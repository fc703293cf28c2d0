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
    def setting(**written: object) -> object:
        keys = {"comm_round": None, **written} if ours == "rounds" else written
        return getattr(getattr(read(**keys), section), field)

    assert setting(**{fedml: value}) == value
    assert setting(**{ours: value}) == value
    assert setting(**{fedml: value, ours: value}) == value
    line = refusal(**{fedml: value, ours: other})
    assert line.startswith(f"args: {section}.") and "contradicts" in line
    assert all(part in line for part in (fedml, ours, repr(value), repr(other)))


@pytest.mark.parametrize(
    ("key", "value"),
    [("epochs", 7), ("batch_size", 8), ("momentum", 0.5), ("weight_decay", 0.25)],
)
def test_a_key_that_has_one_name_is_taken(key, value):
    assert getattr(read(**{key: value}).train_args, key) == value


def test_fewer_clients_per_round_are_the_cohort():
    assert read().cohort == 3
    assert read(client_num_per_round=None, client_num_in_total=5).cohort == 5
    # FedML has written both by the time that a pair is made.
    fedmls = {"worker_num": 2, "client_id_list": "[1, 2]"}
    assert read(client_num_per_round=2, **fedmls).cohort == 2
    assert read(client_num_per_round=2, cohort=2).cohort == 2
    assert read(client_num_per_round=3, cohort=2).cohort == 2  # all are connected
    assert "client_num_per_round = 2" in refusal(client_num_per_round=2, cohort=1)
    assert "client_num_per_round = 4" in refusal(client_num_per_round=4)


def test_a_run_without_a_number_of_rounds_is_refused():
    """FedML has no default, and two rounds are nobody's wish."""
    assert refusal(comm_round=None) == "args: train_args.comm_round is missing"


@pytest.mark.parametrize("ids", ["[1, 2]", [1, 2], "[2]", "[64, 65, 66]", "1,2,3", 7])
def test_a_list_of_ids_that_fedml_would_wait_for_is_refused(ids):
    line = refusal(client_id_list=ids)
    assert line.startswith("args: train_args.client_id_list = ") and "is its rank" in line


@pytest.mark.parametrize("ids", [None, "None", "[]", [], "[1]", "[1, 2, 3]", "[1,2,3]", [1, 2, 3]])
def test_a_list_of_all_ids_is_what_fedml_makes_itself(ids):
    assert read(client_id_list=ids).train_args.client_id_list == "[]"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("epoch", "epochs"),
        ("comm_rounds", "comm_round"),
        ("n_rounds", "rounds"),
        ("setings", "settings"),
        ("recipie", "recipe"),
        ("local_step", "local_steps"),
        ("Batch_Size", "batch_size"),
        ("learning_rates", "learning_rate"),
    ],
)
def test_a_misspelt_key_is_named(key, meant):
    assert refusal(**{key: 3}).startswith(f"args: {key} is unknown (did you mean {meant!r}?); a")


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


@pytest.mark.parametrize("key", settings.WAITING)
def test_limits_of_our_transport_are_refused_under_fedmls(key):
    assert f"args: {key} = 2 is refused" in refusal(**{key: 2}, grpc_ipconfig_path="ip.csv")


@pytest.mark.parametrize(
    ("written", "part"),
    [
        ({"learning_rate": "1e-3"}, "train_args.learning_rate = '1e-3' is refused"),
        ({"comm_round": "3"}, "train_args.comm_round = '3' is refused"),
        ({"weight_decay": "1e-4"}, "train_args.weight_decay = '1e-4' is refused"),
        ({"random_seed": "0"}, "common_args.random_seed = '0' is refused"),
    ],
)
def test_a_number_that_is_text_is_refused_with_a_remedy(written, part):
    """PyYAML, which FedML reads with, takes 1e-3 for text."""
    line = refusal(**written)
    assert part in line and line.endswith("this is text for YAML: no quotes, and 1.0e-3 for 1e-3")


@pytest.mark.parametrize("backend", ["sp", "MPI", "NCCL"])
def test_fedmls_simulators_are_refused_with_what_to_use(backend):
    with pytest.raises(UserError, match=r"training_type = 'simulation'.*`fedml_noniid.run\(") as e:
        read(training_type="simulation", backend=backend)
    assert "noniid run" in str(e.value).splitlines()[0]


def test_another_optimiser_of_fedml_is_refused_with_the_key_that_decides():
    assert "the method that runs is `recipe`" in refusal(federated_optimizer="SCAFFOLD")


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
    del args.rounds
    args.comm_round, args.client_num_per_round = 5, 2
    for _ in range(2):
        model, shard = world.network(False), world.shards_of()[0]
        host = importlib.import_module("fedml_noniid.deploy.host")
        pair = importlib.import_module("fedml_noniid.deploy.pair")
        terms = pair.make_pair("scaffold+ccn")[1](host.Model(model), args, shard).server_run.terms
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
