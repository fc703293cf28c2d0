"""Arithmetic of fewer bits in local training: off unless asked for, near to the exact one,
everything else exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.engines import device
from fedml_noniid.engines.device import be_deterministic
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.local import LocalSteps
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.engines.run import Outcome
from fedml_noniid.models import build
from fedml_noniid.simulate import simulate
from tests import federation

MODELS = {
    "mlp": {"hidden": 8},
    "batch_norm": {"hidden": 8, "batch_norm": True},
    "cnn": {"channels": 4, "hidden": 8},
}


def run(model: str, precision: str, engine: str, rounds: int = 4, workers: int = 1) -> Outcome:
    of = federation.images(torch.float32)
    return simulate(
        "scaffold",
        {},
        Federation.from_indices(of.train, of.clients, of.test),
        Plan(
            build("mlp" if model == "batch_norm" else model, (1, 6, 6), 3, MODELS[model]),
            LocalTraining(lr=0.1, epochs=3, batch_size=4, precision=precision),
            rounds,
            4,
            0,
            engine=engine,
            workers=workers,
        ),
    ).run()


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("model", MODELS)
def test_bf16_is_near_to_the_exact_run_but_not_equal(model: str, engine: str) -> None:
    """Where it goes in four rounds differs by less than how far it goes.

    Everything that is kept is float32.
    """
    exact, low = run(model, "float32", engine), run(model, "bf16", engine)
    assert all(
        leaf.dtype == torch.float32 for leaf in (*low.params.values(), *low.buffers.values())
    )
    before = run(model, "float32", engine, rounds=1).params
    for key, leaf in exact.params.items():
        assert not torch.equal(low.params[key], leaf), key
    error = torch.sqrt(sum((low.params[k] - exact.params[k]).square().sum() for k in exact.params))  # type: ignore[arg-type]  # sum of tensors
    moved = torch.sqrt(sum((exact.params[k] - before[k]).square().sum() for k in before))  # type: ignore[arg-type]  # likewise
    assert error < 0.5 * moved
    assert low.rows[-1]["local_loss"] == pytest.approx(exact.rows[-1]["local_loss"], rel=0.05)
    assert federation.equal(run(model, "bf16", engine), low), "it repeats to the bit"


def test_bf16_has_the_same_bits_in_several_processes() -> None:
    """The runtime of silos has them too: tests/deploy/test_host.py."""
    assert federation.equal(
        run("cnn", "bf16", "sequential", workers=2), run("cnn", "bf16", "sequential")
    )


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU, and a card before Ampere, have no matrix units for tf32."""
    local, cuda = (
        LocalTraining(lr=0.1, epochs=1, batch_size=4, precision="tf32"),
        torch.device("cuda"),
    )
    with pytest.raises(UserError, match="the device is cpu; allowed: float32, bf16"):
        local.check((6,), torch.device("cpu"))
    monkeypatch.setattr(device, "gpus", lambda: device.Gpus(["T4"], capability=[7, 5]))
    with pytest.raises(UserError, match="the device is T4; allowed: float32"):
        local.check((6,), cuda)
    monkeypatch.setattr(device, "gpus", lambda: device.Gpus(["A100"], capability=[8, 0]))
    local.check((6,), cuda)


def precisions() -> list[str]:
    operations = ("matmul", "conv", "rnn")
    return [torch._C._get_fp32_precision_getter("cuda", operation) for operation in operations]


def test_tf32_is_on_in_local_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, walked = [], LocalSteps.__call__

    def noted(*given: Any) -> Any:
        seen.extend(precisions())
        return walked(*given)

    monkeypatch.setattr(LocalTraining, "check", lambda *_: None)  # it refuses a CPU
    monkeypatch.setattr(LocalSteps, "__call__", noted)
    be_deterministic()
    run("mlp", "tf32", "sequential", rounds=1)
    assert seen and {*seen} == {"tf32"}
    assert {*precisions()} == {"ieee"}
