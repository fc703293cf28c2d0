"""Steps in C++: the bits of the steps in Python, and what happens where they can't be compiled."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedml_noniid.plugins.core.data import Pass, Samples
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.trees import Params
from fedml_noniid.plugins.engines import compiled
from fedml_noniid.plugins.engines.compiled import (
    MIN_PLANNED_STEPS,
    SWITCH,
    Compiled,
    compiled_for,
    layers_of,
)
from fedml_noniid.plugins.engines.simulation import Simulation
from fedml_noniid.plugins.engines.vectorized import Vectorized
from fedml_noniid.plugins.models import build
from fedml_noniid.plugins.models.layers import Flatten, Linear, ReLU
from fedml_noniid.plugins.models.stacked import Stacked
from tests import federation

DEEP = Stacked(
    "deep",
    (Flatten(), Linear("a", 36, 40), ReLU("a"), Linear("b", 40, 7), ReLU("b")),
    Linear("c", 7, 3),
)
NETWORKS = {
    "logistic": build("logistic_regression", (1, 6, 6), 3),
    "mlp": build("mlp", (1, 6, 6), 3, {"hidden": 32}),
    "deep": DEEP,
}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles the steps, once for each machine."""
    monkeypatch.setenv(SWITCH, "1")
    if compiled_for(DEEP, {}, 0) is None:
        pytest.skip("no C++ compiler here, so there are no steps in C++")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """The steps of each call of the compiled steps."""
    found: list[Pass] = []
    call = Compiled.__call__

    def noted(
        self: Compiled, params: Params, steps: Pass, rate: float, out: Params | None
    ) -> tuple[Params, torch.Tensor]:
        found.append(steps)
        return call(self, params, steps, rate, out)

    monkeypatch.setattr(Compiled, "__call__", noted)
    return found


def both(
    monkeypatch: pytest.MonkeyPatch, recipe: str, model: Stacked, **options: object
) -> list[Simulation]:
    """A finished run in C++ and in Python."""
    of = federation.images(torch.float32)
    found = []
    for switch in ("1", "0"):
        monkeypatch.setenv(SWITCH, switch)
        simulation = federation.simulation(
            recipe, **({"of": of, "model": model, "engine": "vectorized", "cohort": 6} | options)
        )
        simulation.run()
        found.append(simulation)
    return found


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("batch_size", [1, 4, 10])
@pytest.mark.parametrize("size", [1, 3, 6])
def test_the_bits_are_those_of_python(
    network: str, batch_size: int, size: int, calls: list[Pass], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ragged clients, in chunks of several sizes.

    Some clients of a chunk have fewer steps than others.
    """
    monkeypatch.setattr(Vectorized, "chunk_size", lambda self, ask: size)
    ours, python = both(monkeypatch, "fedavg", NETWORKS[network], batch_size=batch_size)
    assert federation.equal(ours.outcome, python.outcome)
    assert calls and any(steps.live is not None for steps in calls) == (size > 1)


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bits_are_those_of_python_where_nothing_is_padded(
    dtype: torch.dtype, calls: list[Pass], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models of the round take the memory of the last round's."""
    of = federation.federation(dtype, (12, 12, 12, 12, 12))
    ours, python = both(monkeypatch, "fedavg", federation.network(), of=of, cohort=5)
    assert federation.equal(ours.outcome, python.outcome)
    assert len(calls) == federation.ROUNDS and all(steps.mask is None for steps in calls)


@pytest.mark.usefixtures("on")
def test_a_client_without_a_step_keeps_its_parameters() -> None:
    """Even where the gradient of its padding overflows to NaN."""
    params, _ = DEEP.init(torch.Generator().manual_seed(0))
    one, large = params, {name: torch.full_like(leaf, 1e30) for name, leaf in params.items()}
    given = {name: torch.stack([one[name], large[name]]) for name in params}
    live = torch.tensor([[True, False]]).expand(3, 2)
    samples, index = (
        Samples(torch.ones(4, 1, 6, 6), torch.tensor([0, 1, 2, 0])),
        torch.arange(4).expand(3, 2, 4),
    )
    steps = Pass(samples, index, mask=live.unsqueeze(-1).expand(3, 2, 4), live=live)
    with torch.no_grad():
        found, _ = Compiled(layers_of(DEEP) or (), {})(given, steps, 0.1, None)
    assert all(
        leaf[1].equal(large[name]) and leaf[0].isfinite().all() for name, leaf in found.items()
    )
    assert not any(leaf[0].equal(one[name]) for name, leaf in found.items())


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize(
    ("recipe", "in_cpp"),
    [("fedadam", True), ("fedprox", False), ("scaffold", False), ("fedlc", False)],
)
def test_a_method_with_a_hook_in_the_step_takes_the_steps_in_python(
    recipe: str, in_cpp: bool, calls: list[Pass], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, python = both(monkeypatch, recipe, NETWORKS["mlp"])
    assert federation.equal(ours.outcome, python.outcome)
    assert bool(calls) == in_cpp


@pytest.mark.parametrize(
    ("network", "names"),
    [
        (NETWORKS["logistic"], ("fc.weight", "fc.bias")),
        (DEEP, ("a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias")),
        (replace(DEEP, precision="bf16"), None),
        (replace(DEEP, blocks=DEEP.blocks[1:]), None),
        (replace(DEEP, blocks=DEEP.blocks[:-1]), None),
        (build("mlp", (6,), 3, {"batch_norm": True}), None),
        (build("mlp", (6,), 3, {"projection": 4}), None),
        (build("pfl_cnn", (3, 32, 32), 10), None),
    ],
)
def test_only_rows_of_linear_layers_with_relus_are_compiled(
    network: Stacked, names: tuple[str, ...] | None
) -> None:
    assert layers_of(network) == names


def test_few_steps_do_not_call_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    called: list[Path] = []
    monkeypatch.setattr(compiled, "_built", called.append)
    for switch, planned in (("", MIN_PLANNED_STEPS - 1), ("0", MIN_PLANNED_STEPS)):
        monkeypatch.setenv(SWITCH, switch)
        assert compiled_for(DEEP, {}, planned) is None and not called
    for switch, planned in (("", MIN_PLANNED_STEPS), ("1", 1)):
        monkeypatch.setenv(SWITCH, switch)
        compiled_for(DEEP, {}, planned)
        assert called.pop() == compiled.library() and not called


def test_without_a_compiler_the_steps_run_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler is tried once. It leaves no file, and one line in the log."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    with caplog.at_level(logging.WARNING, compiled.__name__):
        first, second = both(monkeypatch, "fedavg", NETWORKS["mlp"])
        monkeypatch.setenv(SWITCH, "1")
        assert compiled_for(DEEP, {}, MIN_PLANNED_STEPS) is None
    assert federation.equal(first.outcome, second.outcome)
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]
    assert "the compiler failed" in caplog.text and not list(tmp_path.iterdir())


def test_a_damaged_library_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv(SWITCH, "")
    compiled.library().write_bytes(b"half a file")
    assert compiled_for(DEEP, {}, 0) is None
    assert "can't be loaded" in caplog.text and caplog.text.count("\n") == 1


def test_an_unknown_value_of_the_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "yes")
    with pytest.raises(UserError, match=rf"{SWITCH}: 'yes'.*allowed: 0.*1"):
        compiled_for(DEEP, {}, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("on")
def test_processes_that_compile_at_the_same_time_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    code = (
        "from tests.engines.test_compiled import DEEP, compiled_for; raise SystemExit(not "
        "compiled_for(DEEP, {}, 0))"
    )
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait() for process in started] == [0, 0]
    assert list(tmp_path.iterdir()) == [compiled.library()]
