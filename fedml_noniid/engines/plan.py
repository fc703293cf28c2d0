"""Describes how a run trains: network, local training, rounds, cohorts, engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import BODY, HEAD, Setting
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.task import Task
from fedml_noniid.core.trees import Params, Tree
from fedml_noniid.data.streams import torch_stream
from fedml_noniid.data.types import Ints
from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.engines.local_training import LocalTraining as LocalTraining
from fedml_noniid.engines.personal import split_personal
from fedml_noniid.engines.schedule import Devices, Schedule, Waits, Work
from fedml_noniid.models.model import Model


class Clock(NamedTuple):
    """Describes the clients' devices and the server's waiting, on a virtual clock."""

    devices: Devices
    waits: Waits = Waits()
    until: int = 0  # microseconds at which the run ends; 0: after its rounds


@dataclass(frozen=True)
class Plan:
    """Holds the settings of a run that the data do not decide."""

    network: Model
    local: LocalTraining
    rounds: int  # T, at most; a callback may stop the run earlier
    cohort: int  # M, clients per round
    seed: int
    evaluate_every: int = 1  # rounds; the last one always
    engine: str = "auto"  # of a simulation: auto, sequential, vectorized
    # clients that the vectorized engine runs side by side; None: by the size of the model, see
    # `engines.vectorized`
    clients_at_once: int | None = None
    # beyond it, updates of a round are added up one by one, and clients' states lie on disk; the
    # bits are the same
    memory_mb: int = 2048
    # processes that the sequential engine may take on a CPU; the bits are the same
    workers: int = 1
    # whether quantities that cost further passes over data are recorded too
    observing: bool = False
    # where the clients' memories are: ram, disk, or by their size; the bits are the same
    clients_memory: str = "auto"
    clock: Clock | None = None  # of simulations; None: time does not count
    # made from `clock` by `engines.clock`; None: cohorts are drawn, and all do all their work
    schedule: Schedule | None = None
    # likewise, for a method that chooses cohorts: then no schedule is known before training
    work: Work | None = None

    @property
    def evaluations(self) -> int:
        """Rounds after which the model is evaluated, if no callback stops the run."""
        return math.ceil(self.rounds / self.evaluate_every)

    def setting(self, n_clients: int, n_public: int, deployed: bool = False) -> Setting:
        """The setting that a recipe is composed for. UserError for a cohort that can't be drawn."""
        if not 1 <= self.cohort <= n_clients:
            raise UserError(
                f"cohort of {self.cohort} clients: must be at least 1 and at most all "
                f"{n_clients} clients"
            )
        local, network = self.local, self.network
        why = {
            "batch norms mix the samples of a batch": bool(network.norms),
            "dropout draws for a batch": network.draws,
            network.sequential_only: not network.vmappable,
        }
        return Setting(
            n_clients,
            self.cohort,
            local.optimizer,
            local.rate.start,
            n_public,
            network.tokens,
            deployed,
            network.has_features,
            network.records,
            local.built_loss.classes,
            bool(network.norms),
            next((reason for reason, holds in why.items() if holds), ""),
            local.momentum,
        )

    def lr(self, t: int) -> float:
        """eta_t, the local step size of round `t`."""
        return self.local.rate.at_round(t, self.rounds)

    def draw_cohort(self, t: int, n_clients: int) -> tuple[int, ...]:
        """The clients of round `t`, ascending; the same for every recipe."""
        if self.schedule is not None:
            return self.schedule.cohort(t)
        return draw_cohort(self.seed, t, n_clients, self.cohort)

    def local_steps(self, t: int, client: int) -> int:
        """The local steps of a client in round `t`; 0: its epochs."""
        fewer = 0 if self.schedule is None else self.schedule.steps(t, client)
        return fewer or self.local.local_steps

    def steps(self, samples: Ints) -> Ints:
        """The local steps that clients with so many samples [N] take in a round, [N]."""
        local, size = self.local, self.local.batch_size
        if local.local_steps:
            return np.full_like(samples, local.local_steps)
        whole = np.maximum(samples // size, samples > 0)
        return local.epochs * (whole if local.drop_last else -(-samples // size))


class Start(NamedTuple):
    """Holds what every process of a run makes from the same settings and seed."""

    algorithm: Algorithm
    plan: Plan
    task: Task  # of the first round; parameters that are never trained belong to it, not to w_0
    params: Params  # w_0
    buffers: Params

    @staticmethod
    def from_plan(algorithm: Algorithm, plan: Plan, like: torch.Tensor) -> Start:
        """With the dtype and the device of `like`. RecipeError if no parameter is trained;
        UserError for a step size that a schedule must not have."""
        network = plan.network
        params, buffers = initial_model(network, plan.seed, like)
        needs, kept = algorithm.needs, {*network.frozen}
        if needs.fixed_classifier:
            kept |= {*network.layers[-1].parameters}
        if needs.fixed_body:
            kept |= params.keys() - {*network.layers[-1].parameters}
        fixed = {name: params[name] for name in sorted(kept)}
        trained = {name: leaf for name, leaf in params.items() if name not in fixed}
        personal: Tree = {}
        if parts := algorithm.needs.personal:
            trained, buffers, personal = split_personal(network, parts, trained, buffers)
        classifier = {*network.layers[-1].parameters} if needs.classifier else set()
        if kept_rows := classifier & personal.get("params", {}).keys():
            raise RecipeError(
                f"{algorithm.name}: clients would keep {min(kept_rows)}, and one of the methods "
                "needs a classifier that all share"
            )
        if not trained and not {HEAD, BODY} <= algorithm.needs.personal:
            raise RecipeError(
                f"{algorithm.name}: of model = {network.name!r} nothing would be left to "
                "train together; use a model with a layer before its classifier, such as mlp, or "
                "keep and fix less of it"
            )
        configured = replace(cast("Any", network), precision=plan.local.precision)
        rate, rounds = plan.local.rate, max(plan.rounds, 1)
        rates = [rate.at_round(t, rounds) for t in range(1, rounds + 1)]  # one may be refused
        optimizer, loss = plan.local.build(rates[0]), plan.local.built_loss
        own_models = bool(personal) or algorithm.own_models
        task = Task(configured, optimizer, fixed, personal, own_models, loss=loss)
        return Start(algorithm, plan, algorithm.prepared(task), trained, buffers)

    def task_at(self, t: int) -> Task:
        """The task with the step size of round `t`; before the first round, that of the first."""
        lr = self.plan.lr(t)
        if lr == self.plan.lr(1):
            return self.task
        # By the hook again: a component may bring its own optimiser.
        return self.algorithm.prepared(replace(self.task, optimizer=self.plan.local.build(lr)))


def initial_model(network: Model, seed: int, like: torch.Tensor) -> tuple[Params, Params]:
    """(w_0, buffers) of a seed, the same in every runtime; dtype and device of `like`."""
    drawn = network.init(torch_stream(seed, "init"))
    params, buffers = (
        {name: network.start.get(name, leaf).to(like) for name, leaf in tree.items()}
        for tree in drawn
    )
    return params, buffers
