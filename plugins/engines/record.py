"""The records of every round, in every runtime: the columns of rounds.csv, and the papers' other quantities."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedml_noniid.plugins.core.algorithm import TRAIN, Round, State
from fedml_noniid.plugins.core.component import Ask, Reply
from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.errors import NonFiniteError
from fedml_noniid.plugins.core.task import Task
from fedml_noniid.plugins.core.trees import Params, Tree, leaf_row_norms, norm, row_norms, together, tree_map
from fedml_noniid.plugins.data.drift import Drift
from fedml_noniid.plugins.engines.clients import numbers, refuse_non_finite
from fedml_noniid.plugins.engines.evaluation import evaluate, scores
from fedml_noniid.plugins.engines.own_tests import scores as own_scores
from fedml_noniid.plugins.engines.packing import flatten
from fedml_noniid.plugins.engines.traffic import Meter

SCORES = ("accuracy", "loss")


class Recorder:
    """Reads each exchange, and makes a row at the end of each round.

    A quantity by client changes its shape when the number of clients changes, because some are missing or a defence
    dropped their answers. Then `tensors` has the rounds since its last change only.
    """

    def __init__(
        self,
        task: Task,
        test: Samples,
        validation: Samples | None,
        observing: bool = False,
        drift: Drift | None = None,
    ) -> None:
        """`observing`: whether quantities that cost further passes are recorded too.

        They are the similarity of the clients' models to the next one, and the test accuracy of a model before and
        after a client trains it again in the same round. `drift`: how the clients' labels change with the round. The
        model is then tested with the labels of the round, as the mean over all clients.
        """
        self.task, self.test, self.validation, self.observing = task, test, validation, observing
        self.drift = drift
        self.meter = Meter()
        self.rows: list[dict[str, float]] = []
        self.recorded: list[Params] = []  # of each row: "<component>/<quantity>", on the CPU
        self._began = time.perf_counter()
        self._start: Params = {}
        self._trained: Reply | None = None
        self._observed: Tree = {}
        self._groups: dict[str, list[str]] = {}

    @property
    def tensors(self) -> Params:
        """ "<component>/<quantity>" of all rounds, [T, ...], on the CPU."""
        series: dict[str, list[Tensor]] = {}
        for recorded in self.recorded:
            for key, leaf in recorded.items():
                earlier = series.get(key, [])
                # With another number of clients the quantity begins anew.
                fits = not earlier or earlier[-1].shape == leaf.shape
                series[key] = earlier if fits else []
                series[key].append(leaf)
        return {key: torch.stack(leaves) for key, leaves in series.items()}

    def begin(self, state: State) -> None:
        """A round begins with this server."""
        self._began, self._start, self._observed = time.perf_counter(), state.params, {}
        if not self._groups:
            self._groups = _groups(self.task, state.params)

    def exchange(self, ask: Ask, reply: Reply, round_: int) -> None:
        """One Ask and what came back. Raises NonFiniteError, naming the client."""
        refuse_non_finite(reply, round_)
        self.meter.count(ask, reply)
        if ask.job == TRAIN:
            self._trained = reply
        what = f"{ask.job}." if ask.owner else ""
        for key, leaf in flatten(reply.metrics).items():
            component, _, quantity = key.partition("/")
            self._observed[f"{component}/{what}{quantity}"] = leaf
        if self.observing and ask.owner and reply.deltas:
            assert self._trained is not None, "what is trained again was trained in this round"
            name = f"{ask.owner}/{ask.job}"
            self._observed[f"{name}.test_before"] = self._by_class(self._trained, reply.clients, round_)
            self._observed[f"{name}.test_after"] = self._by_class(reply, reply.clients, round_)

    def end(self, round_: int, done: Round, evaluating: bool = True, own: Reply | None = None) -> dict[str, float]:
        """The row of the round that ends; cells of an evaluation that is not due are NaN.

        `own`: the clients' answers to the test of their own models, where they keep a part of the model.
        Raises NonFiniteError when the server's update is not finite.
        """
        state = done.state
        evaluated = state.params if done.evaluated is None else done.evaluated
        found: dict[str, Tensor | float] = {}
        for name, samples in (("test", self.test), ("validation", self.validation)):
            found |= self._evaluated(name, round_, evaluated, state.buffers, samples if evaluating else None)
        assert self._trained is not None, "every round trains"
        kept, self._trained = self._trained, None
        moved = {key: leaf_row_norms((leaf - self._start[key]).unsqueeze(0)) for key, leaf in state.params.items()}
        found |= {"local_loss": kept.loss.mean()} | self._lengths(done.trained, moved)
        metrics: Tree = {key: leaf.detach() for key, leaf in flatten(done.metrics).items()}
        found |= {key.replace("/", "_"): leaf for key, leaf in metrics.items() if leaf.ndim == 0}
        # Few methods evaluate another model than they send. Then both are tested.
        found["sent_accuracy"] = found["test_accuracy"]
        if evaluating and done.evaluated is not None:
            found |= self._evaluated("sent", round_, state.params, state.buffers, self.test, ("accuracy",))
        found |= {} if own is None else own_scores(own)
        row: dict[str, float] = {"round": round_} | _on_host(found)
        length = row["update_norm_server"]
        if not math.isfinite(length):
            raise NonFiniteError(
                f"round {round_}, server: the update is not finite; lower train.lr or the method's coefficients"
            )
        row["update_norm_server_sum"] = length + (self.rows[-1]["update_norm_server_sum"] if self.rows else 0.0)
        up, down = self.meter.read()
        row["bytes_up"], row["bytes_down"] = sum(up.values()), sum(down.values())
        row["seconds"] = time.perf_counter() - self._began
        self.rows.append(row)
        clients, cpu = kept.clients, torch.device("cpu")
        kept_there = {key: leaf for key, leaf in metrics.items() if leaf.ndim} | self._observed
        if self.observing:
            kept_there["round/similarity_to_global"] = self._cosines(done.trained, state.params)
        columns = {"clients": clients, "bytes_up": [up[k] for k in clients], "bytes_down": [down[k] for k in clients]}
        counted = {f"round/{name}": numbers(values, cpu) for name, values in columns.items()}
        self.recorded.append(_copied(kept_there) | counted)
        return row

    def _by_class(self, reply: Reply, clients: Sequence[int], round_: int) -> Tensor:
        """Test accuracy of the models of some clients by class, [len(clients), C]; NaN for a class without samples.

        The classes are those of the client's own labels.
        """
        found: list[Tensor] = []
        for row in map(reply.clients.index, clients):
            params = {key: self._start[key] + leaf[row] for key, leaf in reply.deltas.items()}
            buffers = {key: leaf[row] for key, leaf in reply.buffers.items()}
            own = self.test._replace(y=self._seen(round_, self.test.y, clients[len(found)]))
            found.append(evaluate(self.task.network, self.task.whole(params), buffers, own).per_class_accuracy)
        return torch.stack(found)

    def _evaluated(
        self,
        name: str,
        round_: int,
        params: Params,
        buffers: Params,
        samples: Samples | None,
        of: Sequence[str] = SCORES,
    ) -> dict[str, Tensor | float]:
        # Where clients keep a part, no model here is whole: they test their own, and nobody the validation samples.
        if samples is None or self.task.own:
            return {f"{name}_{score}": math.nan for score in of}
        whole = self.task.whole(params)
        if self.drift is None:
            measured: tuple[Tensor, ...] = scores(self.task.network, whole, buffers, samples)
        else:
            views = self.drift.views(samples.y, round_)
            seen = [scores(self.task.network, whole, buffers, samples._replace(y=y)) for _, y in views]
            shares = torch.tensor([share for share, _ in views], dtype=torch.float64, device=samples.y.device)
            accuracy, loss = ((torch.stack(values) * shares).sum() for values in zip(*seen, strict=True))
            measured = accuracy, loss
        found = dict(zip(SCORES, measured, strict=True))
        return {f"{name}_{score}": found[score] for score in of}

    def _seen(self, round_: int, y: Tensor, client: int) -> Tensor:
        """A client's labels in a round of samples of the classes `y` [n]."""
        return y if self.drift is None else self.drift.seen(y, client, round_)

    def _lengths(self, deltas: Params, moved: Params) -> dict[str, Tensor | float]:
        """FedNNNN's E, N and room for the integral of N; by group of layers if the model has more than one.

        `moved`: the norms of the server's update by parameter, [1].
        """
        norms = {key: leaf_row_norms(leaf) for key, leaf in deltas.items()}
        columns: dict[str, Tensor | float] = {"update_norm_client": together(list(norms.values())).mean()}
        columns |= {"update_norm_server": together(list(moved.values())).sum(), "update_norm_server_sum": math.nan}
        for group, names in self._groups.items():
            columns[f"update_norm_client_{group}"] = together([norms[key] for key in names]).mean()
            columns[f"update_norm_server_{group}"] = together([moved[key] for key in names]).sum()
        return columns

    def _cosines(self, deltas: Params, params: Params) -> Tensor:
        """cos(w_k, w) of all weights as one vector, [M]; CCN's figure 1 (b). The models are known by their deltas."""
        models = tree_map(torch.add, deltas, self._start)
        dot = torch.stack([leaf.flatten(1) @ params[key].flatten() for key, leaf in models.items()]).sum(0)
        return dot / (row_norms(models) * norm(params)).clamp(min=1e-30)


def _on_host(found: Mapping[str, Tensor | float]) -> dict[str, float]:
    """The numbers, with all 0-d tensors in one copy from the device. float64 holds each of their values exactly."""
    there = {key: value for key, value in found.items() if isinstance(value, Tensor)}
    values = torch.stack([value.double() for value in there.values()]).cpu().tolist()
    whole = {key for key, value in there.items() if not value.is_floating_point()}
    here = {key: int(value) if key in whole else value for key, value in zip(there, values, strict=True)}
    return {key: here.get(key, value) for key, value in found.items()}


def _copied(found: Params) -> Params:
    """Copies of the tensors on the host, in one transfer from a device. float64 holds each value exactly."""
    if all(leaf.device.type == "cpu" for leaf in found.values()):
        return {key: leaf.detach().clone() for key, leaf in found.items()}
    flat = torch.cat([leaf.detach().double().reshape(-1) for leaf in found.values()]).cpu()
    parts = torch.split(flat, [leaf.numel() for leaf in found.values()])
    return {
        key: part.to(leaf.dtype).reshape(leaf.shape) for (key, leaf), part in zip(found.items(), parts, strict=True)
    }


def rounds_csv(rows: Sequence[Mapping[str, float]]) -> str:
    """rounds.csv: one line per round; a cell is empty where nothing was measured."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(rows[0])
    table.writerows(["" if math.isnan(value) else value for value in row.values()] for row in rows)
    return text.getvalue()


def _groups(task: Task, params: Params) -> dict[str, list[str]]:
    """Names of the parameters of fully connected and of convolutional layers; empty if there is one kind only."""
    groups: dict[str, list[str]] = {}
    for layer in task.network.layers:
        names = [key for key in layer.parameters if key in params]
        if names:
            kind = "conv" if any(params[key].ndim > 2 for key in names) else "fc"
            groups.setdefault(kind, []).extend(names)
    return groups if len(groups) > 1 else {}
