"""Tests models that are whole on the clients only, each on its client's test split.

At the end of a round, the run asks every client for its result.

A simulation and a deployment exchange the same: the shared part down, the statistics of
the metrics (hits) and the summed loss up. These exchanges are no part of a method, so the bytes of
rounds.csv leave them out, as they do all tests.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from fedml_noniid.core.algorithm import Algorithm, State
from fedml_noniid.core.component import V_BUFFERS, Ask, Client, Reply, V
from fedml_noniid.core.losses import Loss
from fedml_noniid.core.options import Range
from fedml_noniid.core.received import received
from fedml_noniid.core.training import component_views, own_model
from fedml_noniid.core.trees import Params, Tree
from fedml_noniid.engines.clients import Clients, Engine, numbers
from fedml_noniid.engines.evaluation import AccuracyByClient, totals
from fedml_noniid.engines.packing import stack
from fedml_noniid.engines.personal import PERSONAL, noise_of, personalized, without

TEST = "test"  # the job of the Ask, which no component owns
SENT, EVALUATED = "sent", "evaluated"  # the model that is sent; a few methods evaluate another one


def asking(
    algorithm: Algorithm, to: Sequence[int], state: State, evaluated: Params | None
) -> Generator[Ask, Reply, Reply]:
    """Asks the clients `to`. `evaluated`: None if it is the model that is sent."""
    beside = {} if evaluated is None else {EVALUATED: evaluated}
    ask = Ask(TEST, tuple(to), state.params, state.buffers, beside)
    return (yield algorithm.with_models(ask, state.slices))


def ranges(loss: Loss) -> dict[str, Range]:
    """The range of the numbers in an answer."""
    return {TEST: loss.statistics_range}


def is_test(ask: Ask) -> bool:
    """Whether the run asks, not a component whose job has the same name."""
    return (ask.job, ask.owner) == (TEST, "")


def answered(engine: Engine, ask: Ask, round_: int) -> Reply:
    """The replies to an Ask of a run: to a test from here, to all else from the engine."""
    return _tested(engine.clients, ask, round_) if is_test(ask) else engine.answer(ask, round_)


def _tested(clients: Clients, ask: Ask, round_: int) -> Reply:
    """Each client's model on its own test samples with its labels of the round; zeros for one
    without samples."""
    task = clients.task
    width = task.loss.n_statistics(task.network.n_classes) + 1
    columns: dict[str, list[Tensor]] = {}
    n_samples = []
    for position, client in enumerate(ask.to):
        mine = received(ask, position)
        samples, at = clients.tests.get(client), clients.row[client]
        n_samples.append(0 if samples is None else len(samples.y))
        if samples is not None and clients.drift is not None:
            samples = samples._replace(y=clients.drift.drift.labels(samples.y, at, round_))
        for name, params in {SENT: mine.params, **mine.shared}.items():
            column = columns.setdefault(name, [])
            if samples is None:
                column += torch.zeros(width, dtype=torch.float64, device=clients.device)
                continue
            sent = Client(task, params, mine.buffers, round_)
            model = model_of_client(clients.algorithm, sent, clients.memory.row(client))
            read = noise_of(samples, client, clients.seed)
            column += totals(task.network, *model, samples, read, task.loss)
    parts: Params = {
        name: torch.stack(numbers_of).view(-1, width) for name, numbers_of in columns.items()
    }  # [M, k + 1]
    sizes = [len(clients.indices[client]) for client in ask.to]
    n, tested = numbers([*sizes, *n_samples], clients.device).view(2, -1)  # one copy to the device
    none = torch.zeros(len(ask.to), device=clients.device)
    return Reply(ask.to, {}, {}, {TEST: {**parts, "n": tested}}, n, none, none)


def model_of_client(algorithm: Algorithm, sent: Client, memory: Tree) -> tuple[Params, Params]:
    """The model with which a client is tested, all parameters and buffers.

    `sent`: a client with the model that the server sends; `memory`: the client's.
    """
    client = personalized(sent, memory)
    params, buffers = sent.params, sent.buffers
    if (c := algorithm.own_model) is not None:
        mine, ask = memory[c.name], Ask(sent.job, ())
        views = component_views(algorithm, client, ask, memory)
        own = own_model(algorithm, views, mine.get(V, {}), params)
        params, buffers = own["params"], own.get("buffers", mine.get(V_BUFFERS, buffers))
    return client.task.model(params, buffers)


def models_of_clients(clients: Clients, params: Params, buffers: Params) -> Tree:
    """What makes the tested models of the clients of the given one, leaves [N, ...]: the parts
    that they keep, or whole models but for what nobody trains."""
    algorithm = clients.algorithm
    if algorithm.own_model is None:
        kept: Tree = clients.memory.whole(PERSONAL).get(PERSONAL, {})
        return kept
    sent = Client(clients.task, params, buffers, 0)
    fixed, models = {*clients.task.fixed}, list[Tree]()
    for client in clients.row:
        whole, its_buffers = model_of_client(algorithm, sent, clients.memory.row(client))
        models.append({"params": without(whole, fixed), "buffers": its_buffers})
    return stack(models)


def scores(
    reply: Reply, loss: Loss, by_client: AccuracyByClient | None = None
) -> dict[str, Tensor]:
    """Columns of rounds.csv: over all clients' samples together, and those of `by_client`; 0-d
    float64 on the device; NaN without samples."""
    parts: Params = reply.upload[TEST]
    means = {
        name: loss.of_sums(parts[name], parts["n"]) for name in (SENT, EVALUATED) if name in parts
    }
    tested = means.get(EVALUATED, means[SENT])
    columns = {f"test_{name}": value for name, value in tested.items()}
    columns[f"sent_{loss.metric}"] = means[SENT][loss.metric]
    if by_client is not None:
        hits = parts.get(EVALUATED, parts[SENT])[:, 0]  # the statistics of classes
        accuracies = torch.full_like(by_client.sizes, math.nan)
        accuracies[numbers(reply.clients, hits.device)] = hits / parts["n"]
        columns |= by_client.columns(accuracies)
    return columns
