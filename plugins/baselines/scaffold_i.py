"""SCAFFOLD with option I: c_i is the gradient at the received model over the whole local data.
See `scaffold.py`: Karimireddy et al., ICML 2020, algorithm 1, line 12 (i).
https://arxiv.org/abs/1910.06378

- The gradient is that of the mean loss, from one more pass over the local data. It is
  taken in eval mode with the received statistics of the batch norms, because batch statistics of a
  whole set are not defined. Weight decay and other methods' terms are left out.
- Nothing is divided by a step size, so momentum, Adam and RMSProp are allowed. They take the
  corrected gradient.
FedML pair: `make_pair("scaffold_i")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedml_noniid.core.component import Answer, Client, Exclusive, Needs, Setting, Trace
from fedml_noniid.core.data import Batch
from fedml_noniid.core.trees import Params, Tree, sub, tree_map
from fedml_noniid.plugins.baselines.scaffold import Scaffold


@dataclass(frozen=True)
class ScaffoldI(Scaffold):
    """Takes the gradient at the received model as a client's control variate."""

    name: ClassVar[str] = "scaffold_i"
    needs: ClassVar[Needs] = Needs(local_set=True, unweighted=True)

    @property
    def exclusive(self) -> frozenset[Exclusive]:
        return super().exclusive - {Exclusive.OPTIMIZER}

    def check(self, setting: Setting) -> None:
        """Any optimiser: nothing is divided by a step size."""

    def report(self, trace: Trace, client: Client) -> Answer:
        """Line 12 (i): c_i+ <- g_i(x)."""
        task, x = client.task, client.params

        def gradient(batch: Batch) -> Params:
            def total(w: Params) -> tuple[Tensor, Tree]:
                return batch.sum(
                    task.loss.values(task.eval(w, client.buffers, batch.x).logits, batch.y)
                ), {}

            return task.grad(total, x)[0]

        c_plus = tree_map(lambda g: g / client.local_set.n, client.local_set.total(gradient))
        return Answer({"dc": sub(c_plus, client.memory["c_i"])}, {"c_i": c_plus})
