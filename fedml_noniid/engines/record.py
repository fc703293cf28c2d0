"""Evaluates and records every round, by the built-in callbacks of a run."""

from __future__ import annotations

import csv
import io
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedml_noniid.core.component import Reply
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import NonFiniteError
from fedml_noniid.core.task import Task
from fedml_noniid.core.trees import Params, leaf_row_norms, norm, row_norms, together, tree_map
from fedml_noniid.engines.callbacks import (
    Callback,
    Columns,
    CurrentRun,
    Exchange,
    RoundEnd,
    Row,
    Stateless,
)
from fedml_noniid.engines.client_tests import scores as client_scores
from fedml_noniid.engines.clients import numbers
from fedml_noniid.engines.evaluation import (
    CLIENT_ACCURACY,
    AccuracyByClient,
    evaluate,
    largest,
    scores,
)
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.traffic import Meter

TRIED = 256  # test samples for a new model that the server does not evaluate


class Evaluation(Stateless):
    """Tests the model of a round on the test set and the validation split.

    Where labels drift, the model is tested with the labels of the round, as the mean over all
    clients.
    """

    def __init__(
        self, federation: Federation, observing: bool = False, limit: float = math.inf
    ) -> None:
        """`observing`: whether it also tests a model before and after a client trains it again in
        the same round. `limit`: of the features and logits of a round's models on test samples;
        infinite in a simulation."""
        self.test, self.validation, self.drift = (
            federation.test,
            federation.validation,
            federation.drift,
        )
        self.observing, self.limit = observing, limit
        self.by_client = (
            None
            if federation.test_clients is None
            else AccuracyByClient.from_positions(federation.test_clients, self.test.y)
        )
        self._observed: Params = {}
        self._sizes: list[Tensor] | None = None  # the `largest` of passes of the round

    def on_exchange(self, exchange: Exchange) -> None:
        ask, reply = exchange.ask, exchange.reply
        observing = self.observing and exchange.task.loss.classes
        if observing and ask.owner and reply.deltas:
            assert exchange.trained is not None, "what is trained again was trained in this round"
            name = f"{ask.owner}/{ask.job}"
            self._observed[f"{name}.test_before"] = self._by_class(exchange, exchange.trained)
            self._observed[f"{name}.test_after"] = self._by_class(exchange, reply)

    def measure(self, end: RoundEnd) -> Columns:
        """Raises NonFiniteError if features or logits are beyond the limit."""
        state, done = end.done.state, end.done
        self._sizes = None if self.limit == math.inf else []
        evaluated = state.params if done.evaluated is None else done.evaluated
        columns: dict[str, Tensor | float] = {}
        if (by_client := self.by_client) is not None:
            columns |= by_client.columns(torch.full_like(by_client.sizes, math.nan))
        for name, samples in (("test", self.test), ("validation", self.validation)):
            columns |= self._tested(name, end, evaluated, samples if end.evaluating else None)
        # Few methods evaluate another model than they send. Then both are tested.
        metric = end.task.loss.metric
        columns[f"sent_{metric}"] = columns[f"test_{metric}"]
        if end.evaluating and done.evaluated is not None:
            columns |= self._tested("sent", end, state.params, self.test, (metric,))
        if self._sizes is not None:
            self._refuse_large(end, self._sizes)
        return (
            columns
            | (
                {}
                if end.client_tests is None
                else client_scores(end.client_tests, end.task.loss, by_client)
            )
            | self._observed
        )

    def on_round(self, run: CurrentRun, row: Row) -> None:
        self._observed = {}

    def _by_class(self, exchange: Exchange, reply: Reply) -> Tensor:
        """Test accuracy of the models of the clients that answered, by class, [M, C]; NaN for a
        class without samples.

        The classes are those of the client's own labels. `reply` may have more clients.
        """
        shares_of_classes: list[Tensor] = []
        for client in exchange.reply.clients:
            row = reply.clients.index(client)
            params = {
                key: exchange.start.params[key] + leaf[row] for key, leaf in reply.deltas.items()
            }
            buffers = {key: leaf[row] for key, leaf in reply.buffers.items()}
            y = (
                self.test.y
                if self.drift is None
                else self.drift.labels(self.test.y, client, exchange.round)
            )
            task, samples = exchange.task, self.test._replace(y=y)
            shares_of_classes.append(
                evaluate(task.network, task.whole(params), buffers, samples).per_class_accuracy
            )
        return torch.stack(shares_of_classes)

    def _refuse_large(self, end: RoundEnd, sizes: list[Tensor]) -> None:
        """Tries the new model where no pass has: clients that keep a part test their own models."""
        state = end.done.state
        tried = sizes or [
            largest(
                end.task.network, end.task.eval(state.params, state.buffers, self.test.x[:TRIED])
            )
        ]
        size = torch.stack(tried).max().item()
        if not size <= self.limit:  # written so that NaN is refused too
            raise NonFiniteError(
                f"round {end.number}: the new model's outputs on test samples reach {size:g}; "
                f"allowed: {self.limit:g}; lower lr or the method's coefficients"
            )

    def _tested(
        self,
        name: str,
        end: RoundEnd,
        params: Params,
        samples: Samples | None,
        names: Sequence[str] = (),
    ) -> dict[str, Tensor | float]:
        loss = end.task.loss
        names = names or (*loss.metrics, "loss")
        # Where clients keep a part, no model here is whole: they test their own, and nobody the
        # validation samples.
        if samples is None or end.task.own_models:
            return {f"{name}_{score}": math.nan for score in names}
        network, model = end.task.network, (end.task.whole(params), end.done.state.buffers)
        if self.drift is None:
            by_client = self.by_client if name == "test" else None
            by_score = scores(network, *model, samples, loss, by_client, self._sizes)
        else:
            views = self.drift.views(samples.y, end.number)
            by_view = [
                scores(network, *model, samples._replace(y=y), loss, sizes=self._sizes)
                for _, y in views
            ]
            shares = torch.tensor(
                [share for share, _ in views], dtype=torch.float64, device=samples.y.device
            )
            by_score = {
                score: (torch.stack([metrics[score] for metrics in by_view]) * shares).sum()
                for score in names
            }
        columns: dict[str, Tensor | float] = {f"{name}_{score}": by_score[score] for score in names}
        of_clients = [key for key in by_score if key.startswith(CLIENT_ACCURACY)]
        return columns | {key: by_score[key] for key in of_clients}


class Recording(Callback):
    """Records losses, lengths of updates, traffic, and what the methods measure."""

    def __init__(self, observing: bool = False) -> None:
        """`observing`: whether it also records the similarity of the clients' models to the next
        one."""
        self.observing = observing
        self.meter = Meter()
        self._observed: Params = {}
        self._groups: dict[str, list[str]] = {}

    def on_start(self, run: CurrentRun) -> None:
        self._run = weakref.proxy(run)  # no cycle: the data of a run go with it
        self._groups = _groups(run.start.task, run.start.params)

    def on_exchange(self, exchange: Exchange) -> None:
        ask, reply = exchange.ask, exchange.reply
        self.meter.count(ask, reply, self._run.algorithm.packing(ask.job))
        what = f"{ask.job}." if ask.owner else ""
        for key, leaf in flatten(reply.metrics).items():
            component, _, quantity = key.partition("/")
            self._observed[f"{component}/{what}{quantity}"] = leaf

    def measure(self, end: RoundEnd) -> Columns:
        state, trained, start = end.done.state, end.done.trained, end.start.params
        moved = {
            key: leaf_row_norms((leaf - start[key]).unsqueeze(0))
            for key, leaf in state.params.items()
        }
        numbers_of_round: dict[str, Tensor | float] = {
            "local_loss": end.reply.loss.mean(),
            **self._lengths(trained, end.done.weights, moved),
        }
        metrics: dict[str, Tensor] = {
            key: leaf.detach() for key, leaf in flatten(end.done.metrics).items()
        }
        numbers_of_round |= {
            key if leaf.ndim else key.replace("/", "_"): leaf for key, leaf in metrics.items()
        }
        numbers_of_round |= self._observed
        if self.observing and start and self._run.algorithm.received is None:
            numbers_of_round["round/similarity_to_global"] = _cosines(trained, start, state.params)
        up, down = self.meter.read()
        clients, cpu = end.reply.clients, torch.device("cpu")
        columns = {
            "clients": clients,
            "bytes_up": [up[k] for k in clients],
            "bytes_down": [down[k] for k in clients],
        }
        numbers_of_round |= {
            f"round/{name}": numbers(values, cpu) for name, values in columns.items()
        }
        return numbers_of_round | {"bytes_up": sum(up.values()), "bytes_down": sum(down.values())}

    def on_round(self, run: CurrentRun, row: Row) -> None:
        self._observed = {}
        self.meter.forget()

    def state(self) -> dict[str, Any]:
        return self.meter.state(self._run.state.params)

    def restore(self, state: dict[str, Any]) -> None:
        self.meter.restore(self._run.state.params, state)

    def _lengths(self, deltas: Params, weights: Tensor, moved: Params) -> dict[str, Tensor | float]:
        """FedNNNN's E (eqs. 5, 25), N (eq. 24) and room for the integral of N; by group of layers
        if the model has more than one.

        `weights`: q_k of the clients in the average, [M]; `moved`: the norms of the server's update
        by parameter, [1].
        """
        if not deltas:  # no model is averaged
            lengths = ("update_norm_client", "update_norm_server", "update_norm_server_sum")
            return dict.fromkeys(lengths, 0.0)
        norms = {key: leaf_row_norms(leaf) for key, leaf in deltas.items()}
        columns: dict[str, Tensor | float] = {
            "update_norm_client": weights @ together(list(norms.values())).to(weights.dtype)
        }
        columns |= {
            "update_norm_server": together(list(moved.values())).sum(),
            "update_norm_server_sum": math.nan,
        }
        for group, names in self._groups.items():
            columns[f"update_norm_client_{group}"] = weights @ together(
                [norms[key] for key in names]
            ).to(weights.dtype)
            columns[f"update_norm_server_{group}"] = together([moved[key] for key in names]).sum()
        return columns


def _cosines(deltas: Params, start: Params, params: Params) -> Tensor:
    """cos(w_k, w) of all weights as one vector, [M]; CCN's figure 1 (b).

    The models are known by their deltas.
    """
    models = tree_map(torch.add, deltas, start)
    dot = torch.stack(
        [leaf.flatten(1) @ params[key].flatten() for key, leaf in models.items()]
    ).sum(0)
    return dot / (row_norms(models) * norm(params)).clamp(min=1e-30)


def split_row(columns: Columns) -> tuple[Row, Params]:
    """(columns of rounds.csv, tensors to record), on the host."""
    copies = _on_host({key: value for key, value in columns.items() if isinstance(value, Tensor)})
    recorded = {key: leaf for key, leaf in copies.items() if leaf.ndim}
    numbers = {key: leaf.item() for key, leaf in copies.items() if not leaf.ndim}
    numbers |= {key: value for key, value in columns.items() if not isinstance(value, Tensor)}
    row = {key: numbers[key] for key in columns if key in numbers}
    return row, recorded


def _on_host(tensors: Params) -> Params:
    """Copies of the tensors on the host, in one transfer from a device.

    float64 holds each value exactly.
    """
    away = {key: leaf.detach() for key, leaf in tensors.items() if leaf.device.type != "cpu"}
    copies = {key: leaf.detach().clone() for key, leaf in tensors.items() if key not in away}
    if away:
        flat = torch.cat([leaf.double().reshape(-1) for leaf in away.values()]).cpu()
        parts = torch.split(flat, [leaf.numel() for leaf in away.values()])
        for (key, leaf), part in zip(away.items(), parts, strict=True):
            copies[key] = part.to(leaf.dtype).reshape(leaf.shape)
    return {key: copies[key] for key in tensors}


def stacked(recorded: Sequence[Params]) -> Params:
    """What was recorded of all rounds by name, [T, ...], on the CPU.

    A quantity by client changes its shape when the number of clients changes, because some are
    missing or a defence dropped their answers. Then it has the rounds since its last change only.
    """
    series: dict[str, list[Tensor]] = {}
    for tensors in recorded:
        for key, leaf in tensors.items():
            earlier = series.setdefault(key, [])
            if earlier and earlier[-1].shape != leaf.shape:
                earlier.clear()
            earlier.append(leaf)
    return {key: torch.stack(leaves) for key, leaves in series.items()}


def rounds_csv(rows: Sequence[Mapping[str, float]]) -> str:
    """rounds.csv: one line per round; a cell is empty where nothing was measured."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(rows[0])
    table.writerows(["" if math.isnan(value) else value for value in row.values()] for row in rows)
    return text.getvalue()


def _groups(task: Task, params: Params) -> dict[str, list[str]]:
    """Names of the parameters of fully connected and of convolutional layers; empty if there is one
    kind only."""
    groups: dict[str, list[str]] = {}
    for layer in task.network.layers:
        names = [key for key in layer.parameters if key in params]
        if names:
            kind = "conv" if any(params[key].ndim > 2 for key in names) else "fc"
            groups.setdefault(kind, []).extend(names)
    return groups if len(groups) > 1 else {}
