"""A call has the same bits whatever the caller's process is set to, and leaves that as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from decimal import localcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedml_noniid as nd
from fedml_noniid.api import process
from fedml_noniid.engines import device
from fedml_noniid.engines.device import value

X = np.random.default_rng(0).normal(size=(90, 6)) * 1e3
Y = np.arange(90) % 3


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def drawn(outputs: Any, labels: Any) -> float:
    return float(torch.rand(())) + float(np.random.rand()) + random.random()


def computed() -> tuple[Any, ...]:
    """Data, partition, weights and predictions."""
    data = nd.from_arrays(X, Y)
    split = nd.partition(data, "dirichlet", clients=3, alpha=0.5)
    found = [nd.run("fedavg", split, model=model, rounds=2) for model in ("mlp", network)]
    vectors = nd.embed(data, "mlp", model_options={"hidden": 4})
    return (
        data.dataset.checksum,
        [lists.tolist() for lists in split.indices.clients],
        *(result.sha256 for result in found),
        *(result.predict(X).tolist() for result in found),
        vectors.dataset.checksum,
    )


@contextmanager
def switched(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


@contextmanager
def newer_precision() -> Iterator[None]:
    parts = {
        torch.backends: ("none", "tf32"),
        torch.backends.mkldnn.matmul: ("none", "bf16"),
        torch.backends.cuda.matmul: ("none", "tf32"),
    }
    for part, (_, changed) in parts.items():
        part.fp32_precision = changed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for part, (default, _) in parts.items():
            part.fp32_precision = default


def backend(module: Any, name: str, value: Any) -> Any:
    return switched(partial(getattr, module, name), partial(setattr, module, name), value)


def moved_generators() -> Any:
    torch.rand(3), np.random.rand(3), random.random()
    return nullcontext()


CALLERS: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: switched(
        torch.get_default_dtype, torch.set_default_dtype, torch.float64
    ),
    "half": lambda: switched(torch.get_default_dtype, torch.set_default_dtype, torch.float16),
    "default device": lambda: switched(lambda: None, torch.set_default_device, "meta"),
    "device": lambda: torch.device("meta"),
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomalies": torch.autograd.detect_anomaly,
    "deterministic": lambda: switched(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 2
    ),
    "matmul high": lambda: switched(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
    ),
    "matmul medium": lambda: switched(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "cublas tf32": lambda: backend(torch.backends.cuda.matmul, "allow_tf32", True),
    "cudnn exact": lambda: backend(torch.backends.cudnn, "allow_tf32", False),
    "newer precision": newer_precision,
    "no mkldnn": lambda: backend(torch.backends.mkldnn, "enabled", False),
    "no fast path": lambda: switched(
        torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
    ),
    "no denormals": lambda: switched(process._flushes, torch.set_flush_denormal, True),
    "threads": lambda: switched(torch.get_num_threads, torch.set_num_threads, 3),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "NumPy's errors": lambda: np.errstate(all="raise"),
    "decimals": lambda: localcontext(prec=2),
    "generators": moved_generators,
}


def state() -> list[Any]:
    """All that a caller can read."""
    switches = [value(read) for read, *_ in (*process.SWITCHES, *device.switches())]
    modes = torch._C._len_torch_function_stack(), torch.empty(0).device
    gradients = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    generators = torch.get_rng_state().numpy().tobytes(), str(np.random.get_state())
    return [switches, modes, gradients, generators, random.getstate(), torch.get_num_threads()]


@pytest.fixture(scope="module")
def alone() -> tuple[Any, ...]:
    return computed()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("names", [[*CALLERS][turn::4] for turn in range(4)], ids="-".join)
def test_callers_switches_change_no_bit_and_stay(names: list[str], alone: tuple[Any, ...]) -> None:
    """Several at a time; those that exclude each other are in different groups."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(CALLERS[name]())
        before = state()
        assert computed() == alone
        assert state() == before


@pytest.mark.parametrize("error", [nd.UserError, KeyboardInterrupt])
def test_a_call_that_fails_leaves_them_too(error: type[BaseException]) -> None:
    """And with the code of the user that it ran."""

    def broken(outputs: Any, labels: Any) -> float:
        torch.set_default_dtype(torch.float64)
        np.random.rand()
        raise error("no more")

    data, how = nd.from_arrays(X, Y), {"partition": "iid", "clients": 3, "progress": False}
    with torch.inference_mode(), torch.device("meta"), np.errstate(all="raise"):
        before = state()
        with pytest.raises(error):
            nd.run("fedavg", data, **how, rounds=1, metrics=[broken])
        assert state() == before
    assert torch.get_default_dtype() == torch.float32


def test_processes_have_them_too(alone: tuple[Any, ...]) -> None:
    split = nd.partition(nd.from_arrays(X, Y), "dirichlet", clients=3, alpha=0.5)
    with CALLERS["default dtype"](), torch.no_grad():
        found = nd.run("fedavg", split, rounds=2, seeds=[0, 1], processes=2)
    assert found.sha256[0] == alone[2][0]


def test_code_of_the_user_meets_global_generators_with_seed_0() -> None:
    split = nd.partition(nd.from_arrays(X, Y), "iid", clients=3)
    found = []
    for seed in (1, 2):
        for seeded in (np.random.seed, random.seed, torch.manual_seed):
            seeded(seed)
        result = nd.run("fedavg", split, rounds=2, metrics=[drawn], progress=False)
        found.append(result.rounds["test_drawn"].tolist())
    assert found[0] == found[1]
