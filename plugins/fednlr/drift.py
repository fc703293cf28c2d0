"""Neuron drift as FedNLR defines it: bound neurons (definition 1) and what training does to them
(appendix A, table 4).

Both need samples of all classes, which no client has. A simulation that observes its clients takes
the public split for this. Training does not touch the public split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedml_noniid.core.component import Client, Trace
from fedml_noniid.core.data import Pass, one_hot
from fedml_noniid.core.task import Task
from fedml_noniid.core.trees import Params, Tree


def recorded(trace: Trace, client: Client) -> Tree:
    """Table 4 on the public split, if there is one and targets are classes.

    By class, of the last hidden layer: the mean activations [C, M_l] before and after training, the
    neurons that are bound before training [C, M_l].
    """
    task, public = client.task, client.public
    shown = isinstance(public, Pass) and task.loss.classes
    if len(task.network.layers) < 2 or not shown:
        return {}
    labels, n_classes = torch.cat([batch.y for batch in public]), task.network.n_classes
    before = last_hidden(task, client.params, client.buffers, public)
    after = last_hidden(task, trace.params, trace.buffers, public)
    return {
        "before": class_means(before, labels, n_classes),
        "after": class_means(after, labels, n_classes),
        "bound": bound(before, labels, n_classes),
    }


def last_hidden(task: Task, params: Params, buffers: Params, public: Pass) -> Tensor:
    """The activation of each neuron of the last hidden layer on each sample, a channel's mean over
    space, [n, M_l]."""
    layer = task.network.layers[-2].name
    hidden = [task.activations(params, buffers, batch.x)[layer] for batch in public]
    return torch.cat([h.flatten(2).mean(2) if h.ndim > 2 else h for h in hidden])


def class_means(activations: Tensor, labels: Tensor, n_classes: int) -> Tensor:
    """The mean activation of each neuron over the samples of each class: [n, M] and [n] to [C, M],
    NaN without any."""
    member = one_hot(labels, n_classes, activations.dtype)  # [n, C]
    return member.T @ activations / member.sum(0).unsqueeze(-1)


def bound(activations: Tensor, labels: Tensor, n_classes: int) -> Tensor:
    """Definition 1: neuron i is bound to class c if min over D^c of h_i > max over D^c' of h_i for
    all c' != c.

    Activations [n, M] and labels [n] to [C, M] bool. A class without samples binds nothing and is
    compared with nothing; if only one class has samples, nothing is bound.
    """
    rows, shape = labels.unsqueeze(1).expand_as(activations), (n_classes, activations.shape[1])
    smallest = activations.new_full(shape, torch.inf).scatter_reduce(
        0, rows, activations, "amin"
    )  # [C, M]
    largest = activations.new_full(shape, -torch.inf).scatter_reduce(0, rows, activations, "amax")
    diagonal = torch.eye(n_classes, dtype=torch.bool, device=labels.device).unsqueeze(-1)
    others = (
        largest.expand(n_classes, *shape).masked_fill(diagonal, -torch.inf).amax(1)
    )  # [C, C, M] -> [C, M]
    return (smallest > others) & smallest.isfinite() & others.isfinite()
