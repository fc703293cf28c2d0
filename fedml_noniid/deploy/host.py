"""The FedML trainer and aggregator behind every pair. A pair sets `recipe`; all behaviour is here.

FedML asks the aggregator for a model, sends it to the silos, gives it to their trainers, and
returns their answers to the aggregator. Here the "model" is a `wire.Down` and an answer is a
`wire.Up`. FedML calls one such exchange a round. So `comm_round` is the number of exchanges while
FedML's managers read it, and the number of rounds before and after.

FedML's own hooks act on plain models. On the server they see the parameters of the silos, and the
new model at the end of a round. In an exchange that moves no model, they see nothing. On a silo,
our own local privacy noise takes the place of FedML's (`privacy`). It covers all that
leaves the silo: also control variates, and feature means. In place of the number of samples leaves
the study's `max_samples`, and the loss is withheld.
"""

from __future__ import annotations

import atexit
import csv
import logging
import math
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import grpc
import torch
from torch import Tensor

from fedml_noniid.core.algorithm import TRAIN
from fedml_noniid.core.component import Exclusive, Mechanism, overrides
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError, one_line
from fedml_noniid.core.trees import Params, Tree, add
from fedml_noniid.data.checks import known
from fedml_noniid.data.files import leaving_nothing
from fedml_noniid.data.shards import Shard, samples_of
from fedml_noniid.deploy import settings, wire
from fedml_noniid.deploy.results import RunFile
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.deploy.wire import Down, Up
from fedml_noniid.engines.callbacks import Callback
from fedml_noniid.engines.packing import flatten, unflatten
from fedml_noniid.metrics import main_of
from fedml_noniid.models import model as models
from fedml_noniid.models import name_of
from fedml_noniid.plugins import registry
from fedml_noniid.privacy.ledger import Budget, Ledger, Release
from fedml_noniid.privacy.local import Noise, noised_with, run_key

with leaving_nothing():
    from fedml.core import ClientTrainer, ServerAggregator
    from fedml.core.distributed.communication.constants import CommunicationConstants
    from fedml.core.distributed.communication.grpc import (
        grpc_comm_manager_pb2,
        grpc_comm_manager_pb2_grpc,
    )
    from fedml.core.dp.fedml_differential_privacy import FedMLDifferentialPrivacy
    from fedml.core.mlops import MLOpsStore
    from fedml.core.security import constants
    from fedml.core.security.fedml_attacker import FedMLAttacker
    from fedml.core.security.fedml_defender import FedMLDefender


# FedML has no code for two of its names.
DEFENSES = {
    value for name, value in vars(constants).items() if name.startswith(("DEFENSE", "ANOMALY"))
}
DEFENSES -= {constants.DEFENSE_DP, constants.DEFENSE_DIFF_CLIPPING}


TELLING_S = 30.0  # how long a silo that ends looks for the server, which may be starting


class EndedError(UserError):
    """Another process of the run has ended before the run was over."""


class Ended(str):
    """A message that raises EndedError where FedML unpickles it, whatever it waits for there."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _raise_ended, (str(self),)


def _raise_ended(why: str) -> NoReturn:
    raise EndedError(one_line(why, 1000))


class _Process:
    """What stock FedML runs in this process."""

    unfinished = False  # a pair is being made, or its run is not over
    joined = False  # FedML has the pair, and its threads run


def tell_others(args: Any) -> bool:
    """Ends the other processes of the run if this one fails; FedML would wait without end.

    A silo tells the server, and the server tells the silos. `args`: FedML's. Returns whether this
    one fails.
    """
    error, joined = getattr(sys, "last_value", None), _Process.joined  # which nobody caught
    addresses = getattr(args, "grpc_ipconfig_path", None)
    if addresses is None or not (_Process.unfinished or (error and not joined)):
        return False
    why = f"{type(error).__name__}: {error}" if error else "see its log"
    who = wire.silo(args.rank - 1) if args.rank else "the server"
    ended = pickle.dumps(Ended(f"{who} has ended before the run was over: {why}"))
    with open(addresses, newline="") as file:
        rows = [*csv.DictReader(file)]
    for row in rows:  # the columns of FedML 0.8.30, or those of 0.9.6
        rank = int(row.get("eid") or row["receiver_id"])
        address = row.get("ingress_ip") or row.get("grpc_server_ip") or row["ip"]
        port = row.get("grpc_server_port") or CommunicationConstants.GRPC_BASE_PORT + rank
        knows = isinstance(error, EndedError) and args.rank  # the server told this silo
        if knows or rank == args.rank or (args.rank and rank):
            continue
        request = grpc_comm_manager_pb2.CommRequest(client_id=args.rank, message=ended)
        # A process that can't be reached has ended, but a server may be starting.
        with (
            suppress(grpc.RpcError),
            grpc.insecure_channel(
                f"{address}:{port}", options=[("grpc.enable_http_proxy", 0)]
            ) as line,
        ):
            stub = grpc_comm_manager_pb2_grpc.gRPCCommManagerStub(line)
            starting = not (rank or joined)
            limit_s = TELLING_S if starting else 5.0
            stub.sendMessage(request, timeout=limit_s, wait_for_ready=starting)
    return True


def _leave() -> None:
    # FedML keeps the `args` that `fedml.init` was called with.
    if tell_others(MLOpsStore.mlops_args) and _Process.joined:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)  # gRPC's threads would keep the process alive


atexit.register(_leave)


class Model(torch.nn.Module):
    """FedML's model object. FedML only moves it to a device; the network itself is functions."""

    def __init__(self, network: models.Model) -> None:
        super().__init__()
        self.network = network


def batches(samples: Samples) -> list[tuple[Tensor, Tensor]]:
    """A shard in FedML's form of data, as one batch."""
    return [(samples.x, samples.y)]


def _agreed(
    pair: type, args: Any, model: torch.nn.Module, shard: Shard
) -> tuple[settings.Deployment, settings.Terms]:
    """Checks `args`, and writes what FedML's managers read into it."""
    _Process.unfinished = True
    recipe: str = pair.recipe  # type: ignore[attr-defined]  # both hosts have it
    asked = getattr(args, "recipe", recipe)
    if set(registry.parse(asked)) != set(registry.parse(recipe)):
        raise UserError(
            f"args.recipe = {asked!r}, but {pair.__name__} runs {recipe!r}; use "
            f"make_pair({asked!r})"
        )
    own = "" if isinstance(model, Model) else name_of(model)
    deployment = settings.from_args(args, own)
    silos, mine = deployment.silos, (getattr(args, "rank", shard.rank), deployment.silos)
    if mine != (shard.rank, shard.silos):
        raise UserError(
            f"the shard is of rank {shard.rank} of {shard.silos} silos; args says rank {mine[0]} "
            f"of {silos} silos (client_num_in_total)"
        )
    if isinstance(model, Model):
        network = model.network
    else:
        shape = tuple(next(iter(shard.parts.values())).x.shape[1:])
        network = deployment.network(shape, shard.n_classes, shard.embedding)
    terms = settings.terms(deployment, recipe, network, shard.parts.get("public"))
    ids = [shard.rank] if shard.rank else [*range(1, silos + 1)]
    vars(args).update(rounds=terms.plan.rounds, comm_round=terms.plan.rounds)
    vars(args).update(client_id_list=str(ids), worker_num=silos, client_num_per_round=silos)
    if terms.plan.cohort < silos:
        args.cohort = terms.plan.cohort
    logging.getLogger().info(
        "recipe %s: %d rounds, in %d exchanges; %d of %d silos train in a round",
        *(terms.algorithm.name, terms.plan.rounds, terms.comm_round, terms.plan.cohort, silos),
    )
    return deployment, terms


class HostTrainer(ClientTrainer):
    """A silo: answers each Ask from its own shard, with the memory of the recipe's methods."""

    recipe: ClassVar[str]

    def __init__(self, model: torch.nn.Module, args: Any, shard: Shard) -> None:
        """`model`: ours, or a module of the user's own, which starts from its own parameters.

        `shard`: the silo's data; FedML's data set has its training samples again. Raises UserError.
        """
        _, self.terms = _agreed(type(self), args, model, shard)
        args.comm_round = self.terms.comm_round  # FedML's attacks on a silo count its answers
        try:
            super().__init__(model, args)
        finally:
            args.comm_round = args.rounds
        self.shard = shard
        self.silo: Silo | None = None
        self.id = shard.rank - 1
        self._noise: Noise | None = None
        self._sigma = 0.0  # of local noise
        self._mechanism: Mechanism | None = None  # of the recipe's local training
        self._ledger: Ledger | None = None
        self._batches = batches(shard.parts["train"])
        self._data: object = None  # what `silo` has read
        self._down: Down | None = None
        self._reply: Tree | None = None
        _Process.unfinished = False

    @property
    def samples(self) -> int:
        """n as it leaves: with the public samples that every client trains on. With local noise it
        is the study's number, which tells nothing of the data."""
        if FedMLDifferentialPrivacy.get_instance().is_local_dp_enabled():
            return self.terms.limits[self.shard.rank - 1]
        shared = round(self.terms.algorithm.needs.shared * self.shard.n_public)
        return len(self.shard.parts["train"].y) + shared

    def set_id(self, trainer_id: int) -> None:
        """FedML calls it before its manager reads `comm_round`."""
        super().set_id(trainer_id)
        self.args.comm_round = self.terms.comm_round
        _Process.unfinished = _Process.joined = True

    def set_model_params(self, model_parameters: Any) -> None:
        self._down, self.args.comm_round = model_parameters, self.args.rounds
        _Process.unfinished = self._down.ask is not None

    def get_model_params(self) -> Up:
        assert self._down is not None, "FedML sets a model first"
        return wire.up(self.id, self._down.exchange, self._reply)

    def train(self, train_data: Any, device: torch.device, args: Any) -> None:
        """Answers the last Ask.

        FedML's `update_dataset` has stored the data, poisoned if an attack says so.
        """
        assert self._down is not None, "FedML sets a model first"
        if args is not self.args:  # whose rounds are counted
            raise UserError("FedMLRunner and the pair have different args; give both one object")
        data = train_data if self.local_train_dataset is None else self.local_train_dataset
        if self.silo is None:
            self.begin()
        assert self.silo is not None, "made by now"
        if data is not self._data:
            self.silo.read(self._samples(data))
            self._data = data
        self._reply = self.silo.answer(self._down)

    def begin(
        self, file: RunFile | None = None, secret: Path | None = None, counted: bool = True
    ) -> None:
        """Makes the silo; its memory is in `file`.

        `secret`: the file for the secret of its privacy noise, see `privacy.local`.
        `counted`: its answers are releases, and leave. Raises UserError.
        """
        local, run = FedMLDifferentialPrivacy.get_instance(), "" if file is None else file.run
        key = cache(partial(run_key, secret, run, self.terms.fingerprint, self.id))
        mechanisms = self.terms.algorithm.mechanisms
        self._mechanism = next(
            (mechanism for mechanism in mechanisms if mechanism.unit == "sample"), None
        )
        sensitivity = math.inf
        if local.is_local_dp_enabled():
            self._sigma, sensitivity = local.dp_solution.ldp.get_rdp_scale(), self.args.sensitivity
            if self.terms.algorithm.packing(TRAIN) is not None:
                raise UserError(
                    f"recipe {self.recipe!r} compresses updates, and "
                    "dp_args.dp_solution_type = ldp adds noise to each number",
                    allowed="ldp without compression; compression with dpsgd",
                )
            if getattr(self.args, "max_samples", None) is None:
                raise UserError(
                    "dp_args.dp_solution_type = ldp: hides the number of samples behind "
                    "train_args.max_samples, which is missing"
                )
        if self._sigma or self._mechanism is not None:
            self._noise = Noise.from_key(key(), sensitivity, self._sigma)
        self._ledger = self._opened(secret) if counted else None
        loader = self.local_train_dataset
        self._data = self._batches if loader is None else loader
        shard = self.shard.with_train(self._samples(self._data))
        self.silo = Silo(self.terms, self.id, shard, file)
        self.silo.engine.clients.noised = noised_with(key)

    def _samples(self, data: Any) -> Samples:
        """FedML's training data. UserError if they are not the shard's, but for an attack."""
        samples, own = samples_of("train", data), self.shard.parts["train"]
        if data is self._batches or FedMLAttacker.get_instance().is_data_poisoning_attack():
            return samples
        if not all(map(torch.equal, samples[:2], own[:2])):
            raise UserError(
                "the training data of FedMLRunner are not the shard's, or draw random numbers; "
                "allowed: the loader that of_loaders has read"
            )
        for key in ("batch_size", "drop_last"):
            loaders, ours = getattr(data, key, None), getattr(self.terms.plan.local, key)
            if loaders not in (None, ours):
                logging.getLogger().warning(
                    "args.%s = %s is used, not %s of the loader", key, ours, loaders
                )
        return samples

    def _opened(self, secret: Path | None) -> Ledger | None:
        """The ledger beside the secret. UserError if a budget could not be kept."""
        most, delta = (getattr(self.args, f"budget_{key}", None) for key in ("epsilon", "delta"))
        budget = None if most is None or delta is None else Budget(most, delta)
        if budget is not None and (self._noise is None or secret is None):
            why = "has no privacy noise" if self._noise is None else "would not outlive a restart"
            raise UserError(
                f"dp_args.budget_epsilon = {most}: what leaves this silo, or its ledger, {why}",
                allowed="with local noise (ldp) or the method dpsgd, by `noniid deploy silo`",
            )
        if self._noise is None or secret is None:
            return None
        path = secret.with_name(f"{secret.name.removesuffix('.noise.key')}.ledger")
        return Ledger.open(path, budget, f"rank {self.shard.rank}")

    def answered(self, down: Down) -> Up:
        """The upload to a message, by the calls of FedML's own client. Raises UserError."""
        data, device, self.args.round_idx = self._batches, torch.device("cpu"), down.round
        self.update_dataset(data, None, len(self.shard.parts["train"].y))  # attacks may poison it
        self.set_model_params(down)
        self.on_before_local_training(data, device, self.args)
        self.train(data, device, self.args)
        self.on_after_local_training(data, device, self.args)
        return self.get_model_params()

    def on_after_local_training(self, train_data: Any, device: torch.device, args: Any) -> None:
        """Local privacy for all that leaves the silo, in place of FedML's own."""
        down, noise = self._down, self._noise
        if noise is None or self._reply is None:
            return
        assert down is not None and down.ask is not None and self.silo is not None, (
            "they made the reply"
        )
        leaving = {key: self._reply[key] for key in ("deltas", "buffers", "upload")}
        counted = down.counted.get(
            self.id, wire.NOT_COUNTED
        )  # decides which memory the answer was made with
        asked = [down.exchange, down.round, down.ask.job, down.ask.owner, counted, down.terms]
        # Running statistics leave as their change, which is small.
        initial = {key: leaf.cpu() for key, leaf in self.silo.initial[1].items()}
        start = flatten({"buffers": down.ask.buffers or initial})
        limits = partial(wire.allowed, ranges=self.terms.ranges)
        answer = flatten(leaving)
        known: Params = {} if down.sha256 else wire.tensors(down)
        question, digest = noise.digest([*asked, down.sha256], known), noise.digest([], answer)
        protected = answer
        # First: what can't be protected is not counted. The reply changes once it is counted.
        if self._sigma:
            protected = noise.protect(answer, question, start, limits, digest)
        if self._ledger is not None:
            self._spend(self._ledger, noise.release(question, answer, digest), down)
        self._reply |= unflatten(protected, leaving)
        if self._sigma:
            n = torch.full_like(self._reply["n"], self.samples)
            steps = float(self.terms.plan.steps(n.numpy())) * self._reply["steps"].sign()
            self._reply |= {"n": n, "steps": steps}
        noisy = self._sigma or (self._mechanism is not None and self._mechanism.noise)
        if noisy and down.ask.job == TRAIN:
            self._reply["loss"] = torch.full_like(self._reply["loss"], math.nan)

    def _spend(self, ledger: Ledger, release: str, down: Down) -> None:
        """Counts an answer before it leaves. UserError if the budget does not allow it."""
        what = f"round {down.round}, {down.question.job}"
        if self._sigma:
            noise = self._sigma / self.args.sensitivity
            ledger.spend(Release(release, "silo", noise, what=what))
        elif self._mechanism is not None and down.question.job == TRAIN:
            passes = self.terms.plan.local.passes(len(self._batches[0][1]))
            ledger.spend(Release(release, "sample", self._mechanism.noise, passes, what))


class HostAggregator(ServerAggregator):
    """The server: keeps the suspended round, and feeds it one stacked reply per exchange."""

    recipe: ClassVar[str]
    _shown: OrderedDict[str, Tensor] | None = None  # a plain model, while FedML's hooks look at it

    def __init__(
        self,
        model: torch.nn.Module,
        args: Any,
        shard: Shard,
        callbacks: Sequence[Callback] = (),
        file: RunFile | None = None,
    ) -> None:
        """`shard`: the server's data. `callbacks`: beside those of the settings.

        `file`: of the checkpoint, see `ServerRun`. Raises UserError.
        """
        # First, since it sets `comm_round`: FedML's defences read that, and count rounds.
        deployment, terms = _agreed(type(self), args, model, shard)
        if getattr(args, "enable_defense", False):
            known("defense_args.defense_type", args.defense_type, sorted(DEFENSES))
        super().__init__(model, args)
        _refuse_protection(terms)
        if terms.secure_sums:
            _refuse_what_sees_models(args, file)
        every = [*deployment.train_args.built_callbacks(), *callbacks]
        self.server_run = ServerRun(terms, shard, every, self._hook_model, file)
        _Process.unfinished = False

    def set_id(self, aggregator_id: int) -> None:
        """FedML calls it before its manager reads `comm_round`."""
        super().set_id(aggregator_id)
        self.args.comm_round = self.server_run.terms.comm_round
        _Process.unfinished = _Process.joined = True

    def get_model_params(self) -> Down | OrderedDict[str, Tensor]:
        self.args.comm_round = self.args.rounds
        return self.server_run.down if self._shown is None else self._shown

    def set_model_params(self, model_parameters: Any) -> None:
        """Does nothing: FedML passes the result of `aggregate`, which the server_run already
        has."""

    def on_before_aggregation(
        self, raw_client_model_or_grad_list: list[tuple[float, Up]]
    ) -> tuple[Any, list[int]]:
        """Checks the uploads.

        FedML's hook (clipping, attacks, defences) sees the parameters and may drop silos.
        """
        ups = {up["client"]: up for _, up in raw_client_model_or_grad_list}
        replies = self.hook(self.server_run.open(ups))
        return list(replies.items()), list(replies)

    def hook(self, replies: dict[int, Tree]) -> dict[int, Tree]:
        """The replies by client after FedML's hook, which sees models if the settings say so."""
        acts = any(
            getattr(self.args, f"enable_{feature}", False)
            for feature in ("attack", "defense", "dp")
        )
        if not acts or not any(reply.get("deltas") for reply in replies.values()):
            return replies
        # w_t: FedML's hooks take models, replies are differences to it.
        start = self.server_run.loop.state.params
        models = [
            (float(reply["n"]), OrderedDict(add(start, reply["deltas"])))
            for reply in replies.values()
        ]
        self._shown = OrderedDict(start)
        hooked, positions = super().on_before_aggregation(models)
        self._shown = None
        if len(hooked) != len(positions):
            raise UserError(
                f"FedML's defence left {len(hooked)} models of {len(positions)} silos, so whose "
                "they are is unknown"
            )
        clients, changed = list(replies), {}
        for i, (_, model) in zip(positions, hooked, strict=True):
            reply = replies[clients[i]]
            deltas = _differences(model, start, reply["deltas"])
            changed[clients[i]] = reply | {"deltas": deltas}
        return changed

    def aggregate(self, raw_client_model_or_grad_list: list[tuple[int, Tree]]) -> Down:
        """The next message: of this round, of the next round, or that the run is over."""
        down = self.server_run.feed(dict(raw_client_model_or_grad_list))
        _Process.unfinished = down.ask is not None
        return down

    def on_after_aggregation(self, aggregated_model_or_grad: Any) -> Any:
        """FedML's hook (central privacy noise, defences) acts on models.

        A message passes: its model has been here.
        """
        if isinstance(aggregated_model_or_grad, Down):
            return aggregated_model_or_grad
        return super().on_after_aggregation(aggregated_model_or_grad)

    def _hook_model(self, params: Params) -> Params:
        model = OrderedDict(params)
        hooked = self.on_after_aggregation(model)
        # FedML may replace tensors of the model; if all are the same objects, the hook left the
        # model alone.
        return params if all(hooked[key] is leaf for key, leaf in params.items()) else dict(hooked)

    def test(
        self, test_data: Any, device: torch.device, args: Any
    ) -> tuple[float, float, None, None]:
        """(accuracy or another main metric, loss, -, -) of the last round; it was evaluated when it
        ended."""
        rows = self.server_run.loop.rows
        if not rows:
            return 0.0, 0.0, None, None
        return rows[-1][f"test_{main_of(rows[-1])}"], rows[-1]["test_loss"], None, None


def _differences(model: Params, start: Params, deltas: Params) -> Params:
    """w - w_t of a hooked model; a leaf that the hook left alone keeps its bits.

    Values are compared, not objects: FedML clips in place, and its attacks put new tensors into the
    model.
    """
    return {
        key: delta if torch.equal(model[key], start[key] + delta) else model[key] - start[key]
        for key, delta in deltas.items()
    }


def _refuse_what_sees_models(args: Any, file: RunFile | None) -> None:
    """UserError if something but the recipe needs the silos' models. `file`: None with FedML's own
    transport."""
    attacks, defends = getattr(args, "enable_attack", False), getattr(args, "enable_defense", False)
    sees = "an attack" * bool(attacks) or "a defence" * bool(defends)
    if not sees and getattr(args, "max_grad_norm", None) is not None:
        sees = "dp_args.max_grad_norm"
    if file is None:
        sees = "FedML's own transport"
    if sees:
        raise UserError(
            f"train_args.secure_sums: {sees} needs the model of every silo, which the server does "
            "not see then; allowed: 0, or without it"
        )


def _refuse_protection(terms: settings.Terms) -> None:
    """UserError if FedML's protection could not do what it promises."""
    defender = FedMLDefender.get_instance()
    if defender.is_defense_on_aggregation():
        raise UserError(
            f"defense_args.defense_type = {defender.defense_type!r} replaces the average, which "
            "the recipe makes; "
            "allowed: defences before or after aggregation"
        )
    central = FedMLDifferentialPrivacy.get_instance().is_global_dp_enabled()
    if not central and not defender.is_defense_after_aggregation():
        return
    for component in terms.algorithm.components:
        asks = component.exchanges(terms.algorithm.setting)
        more = Exclusive.RECEIVED in component.exclusive or asks.finish
        if more or (overrides(component, "survey") and asks.round):
            raise UserError(
                f"recipe {terms.algorithm.name!r}: {component.name} sends out a new model without "
                "FedML's central privacy noise or its defence after aggregation; allowed: local "
                "privacy, defences before aggregation"
            )
