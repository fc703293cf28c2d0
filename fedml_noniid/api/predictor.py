"""The final model of a run as a module of torch, which takes samples as the data set has them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from fedml_noniid.core.losses import Loss
from fedml_noniid.core.options import Count, Positive, Section
from fedml_noniid.core.trees import Params
from fedml_noniid.data.dataset import Dataset, normalised
from fedml_noniid.models.model import Model


class Tuning(Section):
    """Says how a model is fine-tuned."""

    steps: Count
    lr: Positive


class Predictor(nn.Module):
    """Raw samples [n, ...] -> logits [n, C], in eval mode. It normalises as training did.

    Its state_dict has the names of `Result.weights`. Raw means as in `data.dataset.test_x`: pixels
    from 0 to 255, a table's own units, the numbers of tokens.
    """

    def __init__(self, network: Model, params: Params, buffers: Params, data: Dataset) -> None:
        super().__init__()
        self._network, self._scaling = replace(network, plain=True), (data.mean, data.std)
        self._names = tuple(params), tuple(buffers)
        for name, leaf in params.items():
            _owner(self, name).register_parameter(name.rpartition(".")[2], nn.Parameter(leaf))
        for name, leaf in buffers.items():
            _owner(self, name).register_buffer(name.rpartition(".")[2], leaf)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, C] of raw samples [n, ...] on the device of the parameters."""
        return self._logits(normalised(x, *self._scaling))

    def _logits(self, x: Tensor) -> Tensor:
        """Logits [n, C] of normalised samples [n, ...]."""
        tensors: Mapping[str, Tensor] = {
            **dict(self.named_parameters()),
            **dict(self.named_buffers()),
        }
        params, buffers = ({name: tensors[name] for name in names} for names in self._names)
        return self._network(params, buffers, x, False).logits

    def fine_tuned(self, x: Tensor, y: Tensor, loss: Loss, steps: int, lr: float) -> Predictor:
        """A copy after full-batch steps of SGD on raw samples `x` [n, ...] with targets `y` [n]."""
        model = copy.deepcopy(self)
        trained = [
            leaf for name, leaf in model.named_parameters() if name not in self._network.frozen
        ]
        x = normalised(x, *self._scaling)
        optimizer = torch.optim.SGD(trained, lr)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.autograd.backward(loss.mean(model._logits(x), y, None))
            optimizer.step()
        return model


def _owner(module: nn.Module, name: str) -> nn.Module:
    """The module that holds the tensor of a name with dots; modules on the way are made."""
    for part in name.split(".")[:-1]:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = cast("nn.Module", module._modules[part])
    return module
