"""A component may send each client one of several models in place of w_t."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import (
    Exclusive,
    Server,
    Setting,
)
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.trees import Tree, row
from fedml_noniid.deploy.settings import refuse_what_reads_more
from fedml_noniid.engines.packing import stack
from fedml_noniid.plugins.registry import METHODS
from tests import federation
from tests.core.test_foreign_methods import made

OWNED = frozenset({Exclusive.RECEIVED, Exclusive.OWN_MODEL})


@pytest.mark.parametrize(
    ("methods", "engine"),
    [
        *((methods, "sequential") for methods in ("", "+moon", "+fedntd", "+fedbn", "+dpsgd")),
        # Moon passes the received model: side by side, products of one matrix and of many differ.
        *((methods, "vectorized") for methods in ("", "+fedprox", "+fedbn", "+dpsgd")),
    ],
)
def test_one_model_for_all_has_the_bits_of_one_model(methods: str, engine: str) -> None:
    how: dict[str, Any] = {"engine": engine, "batch_norm": True}
    private = {"dpsgd": {"clip": 0.3, "noise": 0.5}} if "dpsgd" in methods else {}
    one = federation.simulation("cfl" + methods, {"cfl": {"clusters": 1}, **private}, **how)
    out, plain = one.run(), federation.run(methods[1:] or "fedavg", private, **how)
    assert federation.equal_models(out, plain)
    kept = row(one.loop.state.slices["cfl"]["models"], 0)
    assert all(
        torch.equal(kept["params"][name], leaf) for name, leaf in one.loop.state.params.items()
    )
    assert [now["bytes_down"] for now in out.rows] == [now["bytes_down"] for now in plain.rows]


def test_secure_sums_are_refused() -> None:
    """Each silo has another question, so no silo could tell whose sum it joins."""
    algorithm = Algorithm.compose([made(exclusive=OWNED)()], Setting(3, 3))
    with pytest.raises(UserError, match="a sum needs one question to all"):
        refuse_what_reads_more(algorithm, 0)


@pytest.mark.parametrize(
    ("models", "numbers"),
    [({}, torch.zeros(6).long()), (None, torch.zeros(6)), (None, torch.full((6,), 1))],
    ids=["models", "dtype", "number"],
)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_wrong_models_are_refused(
    models: Any, numbers: torch.Tensor, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init_server(self: Any, server: Server) -> Tree:
        first = stack([{"params": server.params, "buffers": server.buffers}])
        return {"models": first if models is None else models, "model_of": numbers}

    kind = made(init_server=init_server, exclusive=OWNED)
    monkeypatch.setitem(METHODS, "made", kind)
    with pytest.raises(RecipeError, match=r"^'made': (init_server returned|model_of = )"):
        federation.run("made", engine=engine)
