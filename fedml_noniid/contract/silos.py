"""A small experiment with ragged clients, simulated, or run by silos: message by message as bytes,
or by a FedML pair as gRPC calls it."""

from __future__ import annotations

import math
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fedml_noniid import models
from fedml_noniid.contract.federation import takes_norms
from fedml_noniid.core.data import Samples
from fedml_noniid.data import shards
from fedml_noniid.data.noise import deviations, per_sample
from fedml_noniid.data.shards import Parts, Shard
from fedml_noniid.deploy import settings as silo_settings
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.settings import Deployment, Terms
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.hashing import model_tensors, weights_sha256
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.engines.run import Outcome
from fedml_noniid.models.model import Model
from fedml_noniid.simulate import simulate

SIZES = (17, 33, 70)  # of the silos; batches of 32, so 1 to 3 steps, the last of them short
TESTS = (30, 50, 0)  # their own test samples
ROUNDS, SEED, BATCH, EPOCHS, LR = 2, 3, 32, 2, 0.1
HIDDEN, CLASSES, SKEWED = 8, 4, 6
Settings = Mapping[str, Mapping[str, object]]  # method -> hyper-parameter -> value


def parts(public: bool = True, skewed: bool = False) -> Parts:
    """Random images of four classes, with a class-dependent mean so that there is something to
    learn.

    `skewed`: images that are large enough to be cropped, and each silo has noise of its own, the
    first none.
    """
    rng, size = np.random.default_rng(0), SKEWED if skewed else 4
    y = torch.from_numpy(rng.integers(0, CLASSES, 260))
    x = torch.from_numpy(
        rng.normal(size=(260, 1, size, size)).astype(np.float32)
    ) + 0.5 * y.reshape(-1, 1, 1, 1)

    def cut(first: int, last: int) -> Samples:
        return Samples(x[first:last].clone(), y[first:last].clone())

    edges = np.cumsum((0, *SIZES))
    clients = [np.arange(a, b) for a, b in pairwise(edges)]
    train = cut(0, 120)
    if skewed:
        std = deviations("level", 0.5, len(clients), (1, size, size), torch.tensor([2.0]))
        train = train._replace(noise=per_sample(std, clients, train.x))
    held_out = cut(230, 260) if public else None
    tests = [cut(120 + a, 120 + b) for a, b in pairwise(np.cumsum((0, *TESTS)).tolist())]
    return Parts(train, clients, cut(120, 200), cut(200, 230), held_out, CLASSES, tests=tests)


def network(batch_norm: bool, skewed: bool = False) -> Model:
    """One hidden layer."""
    size = SKEWED if skewed else 4
    return models.build(
        "mlp", (1, size, size), CLASSES, {"hidden": HIDDEN, "batch_norm": batch_norm}
    )


def args(
    recipe: str, settings: Settings, batch_norm: bool, cohort: int = 0, **more: object
) -> SimpleNamespace:
    """What FedML makes of a YAML file."""
    return SimpleNamespace(
        recipe=recipe,
        settings=settings,
        rounds=ROUNDS,
        cohort=cohort,
        client_num_in_total=3,
        client_num_per_round=3,
        epochs=EPOCHS,
        batch_size=BATCH,
        learning_rate=LR,
        max_samples=max(SIZES),
        random_seed=SEED,
        model="mlp",
        model_options={"hidden": HIDDEN, "batch_norm": batch_norm},
        client_id_list="[]",
        training_type="cross_silo",
        backend="GRPC",
        using_gpu=False,
        **more,
    )


def terms(
    recipe: str,
    methods: Settings,
    batch_norm: bool = False,
    cohort: int = 0,
    rounds: int = ROUNDS,
) -> Terms:
    """What server and silos agree on."""
    batch_norm = batch_norm and takes_norms(recipe, methods)
    made = deployment(recipe, methods, batch_norm, rounds, cohort=cohort)
    return silo_settings.terms(made, recipe, network(batch_norm), parts().public)


def deployment(
    recipe: str,
    methods: Settings,
    batch_norm: bool = True,
    rounds: int = ROUNDS,
    comm: Mapping[str, object] | None = None,
    **train: object,
) -> Deployment:
    """A server and three silos."""
    batch_norm = batch_norm and takes_norms(recipe, methods)
    content = {
        "common_args": {"random_seed": SEED},
        "model_args": {
            "model": "mlp",
            "model_options": {"hidden": HIDDEN, "batch_norm": batch_norm},
        },
        "train_args": {
            "recipe": recipe,
            "settings": methods,
            "rounds": rounds,
            "epochs": EPOCHS,
            "batch_size": BATCH,
            "learning_rate": LR,
            "max_samples": max(SIZES),
            **train,
        },
        "comm_args": comm or {},
    }
    return silo_settings.check(content, "test")


def simulated(
    recipe: str,
    settings: Settings,
    batch_norm: bool,
    cohort: int = 0,
    skewed: bool = False,
    rounds: int = ROUNDS,
    **more: Any,
) -> Outcome:
    """The run in a simulation; `more`: of its federation, and `precision`."""
    data, precision = parts(skewed=skewed), more.pop("precision", "float32")
    held_out = {"validation": data.validation, "public": data.public, "tests": data.client_tests}
    federation = Federation.from_indices(data.train, data.clients, data.test, **held_out, **more)
    local = LocalTraining(
        lr=LR, epochs=EPOCHS, batch_size=BATCH, augment=skewed, precision=precision
    )
    made = network(batch_norm and takes_norms(recipe, settings), skewed)
    plan = Plan(made, local, rounds, cohort or 3, SEED, engine="sequential")
    return simulate(recipe, settings, federation, plan).run()


def shards_of(data: Parts | None = None) -> list[Shard]:
    """The data of the server and of each silo."""
    return list(shards.split(data or parts()))


def silos_of(terms: Terms, data: Parts | None = None) -> list[Silo]:
    """The silos, without FedML and without a network."""
    _, *mine = shards_of(data)
    return [Silo(terms, k, shard) for k, shard in enumerate(mine)]


def talk(server: ServerRun, silos: Sequence[Silo]) -> Outcome:
    """All exchanges, message by message as bytes."""
    while (down := server.down).ask is not None:
        uploads = {}
        for k in down.ask.to:
            mine = wire.row_of(down, k)
            trees: dict[str, Any] = wire.nested(_journey(wire.tensors(mine)))
            received = mine._replace(ask=mine.question._replace(**trees))
            upload = wire.up(k, down.exchange, silos[k].answer(received))
            uploads[k] = {**upload, "leaves": _journey(upload["leaves"])}
        server.feed(server.open(uploads))
    return server.loop.outcome


def _journey(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors after the journey as bytes."""
    steps, arrived = wire.arriving(wire.Answer), None
    next(steps)
    answer = wire.Answer(exchange=0)
    for frame in wire.leaving(answer, dict(tensors), lambda message: message.head):
        arrived = steps.send(frame)
    assert arrived is not None, "the last frame ends the message"
    return arrived.tensors


def pair(
    recipe: str,
    settings: Settings,
    batch_norm: bool = False,
    cohort: int = 0,
    skewed: bool = False,
    **more: object,
) -> tuple[Any, list[Any]]:
    """(aggregator, trainers), as FedML sets them up; needs fedml."""
    batch_norm = batch_norm and takes_norms(recipe, settings)
    if skewed:
        more.setdefault("augment", True)
    of_fedml = args(recipe, settings, batch_norm, cohort, **more)
    data = parts(skewed=skewed)
    return hosts(recipe, lambda _: network(batch_norm, skewed), of_fedml, data)


def hosts(
    recipe: str,
    made: Callable[[Parts], Model],
    of_fedml: SimpleNamespace,
    data: Parts,
    theirs: Parts | None = None,
) -> tuple[Any, list[Any]]:
    """(aggregator, trainers); `made`: the network for data; `theirs`: what the silos have, if
    something else."""
    from fedml_noniid.deploy.host import Model as FedMLModel
    from fedml_noniid.deploy.pair import make_pair

    trainer_class, aggregator_class = make_pair(recipe)
    aggregator = aggregator_class(FedMLModel(made(data)), copy(of_fedml), shards_of(data)[0])
    of_silos = theirs or data
    return aggregator, [
        trainer_class(FedMLModel(made(of_silos)), copy(of_fedml), shard)
        for shard in shards_of(of_silos)[1:]
    ]


def compare(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> None:
    """The rows of a deployment equal those of a simulation, where that measured something.

    Both test, unless no silo with test samples of its own has answered.
    """
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("test_accuracy", "test_loss", "sent_accuracy"):
            assert math.isnan(mine[key]) == math.isnan(other[key]), key
        for key in other.keys() - {"seconds"}:
            assert mine[key] == other[key] or math.isnan(other[key]), (key, mine[key], other[key])


def uploads(message: object, trainers: Sequence[Any]) -> list[tuple[int, dict[str, Any]]]:
    """One message to every silo and their uploads, pickled and unpickled on the way as by FedML's
    gRPC."""
    return [
        (
            trainer.local_sample_number,
            pickle.loads(pickle.dumps(trainer.answered(pickle.loads(pickle.dumps(message))))),
        )
        for trainer in trainers
    ]


def run(aggregator: Any, trainers: Sequence[Any]) -> Outcome:
    """All exchanges, in the order in which FedML's managers call the pair."""
    message = aggregator.get_model_params()
    for _ in range(aggregator.server_run.terms.comm_round):
        kept, _ = aggregator.on_before_aggregation(uploads(message, trainers))
        message = aggregator.on_after_aggregation(aggregator.aggregate(kept))
        aggregator.set_model_params(message)
    assert message.ask is None, "the run should be over after comm_round exchanges"
    outcome: Outcome = aggregator.server_run.loop.outcome
    return outcome


def digest(outcome: Outcome) -> str:
    """SHA-256 of the weights."""
    return weights_sha256(
        model_tensors(outcome.params, outcome.evaluated, outcome.buffers, outcome.models)
    )


# The checks
# --------------------------------------------------------------------------------------------------


def messages_survive_the_wire(recipe: str, settings: Settings) -> None:
    """Silos that get and send bytes end with the bits of the simulation, and the server takes every
    upload. `ranges` holds for all that is sent. A tree without leaves, such as the buffers of a
    network without batch norms, does not arrive."""
    for batch_norm in (True, False):
        agreed = terms(recipe, settings, batch_norm)
        outcome = talk(ServerRun(agreed, shards_of()[0]), silos_of(agreed))
        expected = simulated(recipe, settings, batch_norm)
        assert digest(outcome) == digest(expected), "not the bits of the simulation"


def pair_equals_simulation(
    recipe: str, settings: Settings, batch_norm: bool = True, **how: Any
) -> None:
    """The FedML pair, driven in this process message by message, has the bits and the rows of the
    simulation."""
    expected = simulated(recipe, settings, batch_norm, **how)
    deployed = run(*pair(recipe, settings, batch_norm, **how))
    assert digest(deployed) == digest(expected), "not the bits of the simulation"
    compare(deployed.rows, expected.rows)
    assert not any(math.isnan(line["test_accuracy"]) for line in deployed.rows)


def processes_equal_simulation(recipe: str, settings: Settings) -> None:
    """A server and three silos as processes over loopback gRPC have the bits of the simulation."""
    from fedml_noniid.processes import loopback

    with tempfile.TemporaryDirectory() as folder:
        deployed = loopback.run(deployment(recipe, settings), parts(), Path(folder))
    assert deployed == digest(simulated(recipe, settings, True)), "not the bits of the simulation"
