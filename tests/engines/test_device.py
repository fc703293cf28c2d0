"""What a process does about a GPU, with answers of torch and of its driver."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedml_noniid.api.process import in_turn
from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import Component, Server
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Tree
from fedml_noniid.engines import device
from fedml_noniid.engines.device import resolve_device
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.models import build, name_of
from fedml_noniid.models.model import Model
from tests import federation

OLD = "The NVIDIA driver on your system is too old (found version 12020)"
UNUSABLE = {  # what torch says -> the reason
    f"{OLD}. Please update your GPU driver": OLD,
    "No CUDA GPUs are available": "No CUDA GPUs are available",  # MIG without parts
}


def answers(monkeypatch: pytest.MonkeyPatch, names: list[str], refused: Exception | None) -> Path:
    """Lets torch see these GPUs, or refuse. Returns a file with the processes that asked it."""
    asked = Path(tempfile.mkdtemp()) / "asked"
    asked.touch()

    def noted(value: object, error: Exception | None = None) -> Callable[..., Any]:
        def answer(*_: object) -> Any:
            asked.write_text(f"{asked.read_text()} {os.getpid()}")
            if error is not None:
                raise error
            return value

        return answer

    monkeypatch.setattr(ctypes, "CDLL", lambda _: None)
    seen = {
        "_is_in_bad_fork": lambda: False,  # a test may have asked
        "init": noted(None, refused),
        "_lazy_init": noted(None, refused),
        "is_available": noted(bool(names)),
        "device_count": noted(len(names)),
        "get_device_name": lambda k: (noted(None)(), names[k])[1],
        "get_device_capability": noted((9, 0)),
    }
    for name, answer in seen.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.backends.cudnn, "version", noted(91900))
    device._gpus.cache_clear()
    return asked


@pytest.fixture(autouse=True)
def none_known() -> Iterator[None]:
    yield
    device._gpus.cache_clear()


def test_a_forked_process_asks_for_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, ["H200", "T4", "H200"], None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-1,7")
    found = resolve_device("auto")
    assert found.type == "cuda" and resolve_device("cpu").type == "cpu"
    assert device.n_cards(found) == 2 and device.n_cards(torch.device("cpu")) == 0
    assert device.cards(3) == ["5", "7", "5"], "in turn, and none of another model"
    facts = device.facts(found)
    assert (facts["gpu"], facts["cudnn"]) == ("H200", "91900") and "4096" in facts["determinism"]
    processes = {*map(int, asked.read_text().split())}
    assert len(processes) == 1 and os.getpid() not in processes
    assert device.facts(torch.device("cpu")) == {}


@pytest.mark.parametrize("said", UNUSABLE)
def test_a_gpu_that_torch_cannot_use_is_told(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, [], RuntimeError(said))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for there in (True, False):
        monkeypatch.setattr(device, "_has_card", lambda there=there: there)
        assert device.unusable_gpu() == (UNUSABLE[said] if there else "")
        assert resolve_device("auto").type == "cpu"
        with pytest.raises(UserError) as refused:
            resolve_device("cuda")
        assert str(refused.value) == (
            f"device 'cuda': this machine has no usable CUDA device: {UNUSABLE[said]}; allowed "
            "here: auto, cpu"
        )
    monkeypatch.setattr(device, "_has_card", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.unusable_gpu() == "", "the user has hidden it"


@pytest.mark.parametrize(
    ("vendor", "kind", "there"),
    [
        ("0x10de", "0x030000", True),
        ("0x10de", "0x0c0330", False),  # the USB port of a card
        ("0x8086", "0x030000", False),
    ],
)
def test_a_card_without_a_driver_is_found(
    vendor: str, kind: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the PCI devices of this machine, of which there is one here."""
    (tmp_path / "vendor").write_text(f"{vendor}\n")
    (tmp_path / "class").write_text(f"{kind}\n")
    devices = {"/sys/bus/pci/devices/*": [str(tmp_path)]}
    monkeypatch.setattr(device.glob, "glob", lambda pattern: devices.get(pattern, []))
    assert device._has_card() is there


@pytest.mark.parametrize("kept", [None, ":16:8"])
def test_a_process_is_deterministic(kept: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the user has set torch's newer switches, which the older can't tell."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if kept:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", kept)
    with in_turn():  # sets back what this test sets
        torch.backends.fp32_precision = "tf32"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = True
        device.be_deterministic()
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        assert torch.are_deterministic_algorithms_enabled() and cudnn.deterministic
        assert matmul.fp32_precision == cudnn.conv.fp32_precision == "ieee"
        off = (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_tf32, cudnn.allow_tf32)
        assert not any((*off, cudnn.benchmark)), "the older ones can be read"
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (kept or ":4096:8")
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == kept


def test_a_workspace_that_changes_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, ["H200"], None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
    assert resolve_device("cpu").type == "cpu"
    with pytest.raises(UserError, match=r"CUBLAS_WORKSPACE_CONFIG = ':4096:2' .*allowed: :4096:8,"):
        resolve_device("auto")


class Scattering(nn.Module):
    """Puts values at positions, for which torch has no deterministic kernel, also on a CPU.

    In training only, as a kernel of a GPU: nobody finds out before.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.are_deterministic_algorithms_enabled() and len(x) > 1:
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
        return x.sigmoid()


def network() -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(8, 4), nn.Sequential(Scattering())]
    return nn.Sequential(*layers, nn.Linear(4, 3))


def pooled() -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, 3))


NETWORK, POOLED = map(name_of, (network, pooled))


@dataclass(frozen=True)
class Putting(Component):
    """Does so in a hook of the server."""

    name: ClassVar[str] = "putting"

    def broadcast(self, server: Server) -> Tree:
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
        return {}


def refused(model: Model, components: tuple[Component, ...] = ()) -> str:
    """Why a run of the model is refused."""
    data = federation.images(torch.float32)
    x = data.train.x[:, :, :2, :4]
    with in_turn(), pytest.raises(UserError) as error:
        Simulation(
            Algorithm(components),
            Federation.from_indices(
                Samples(x, data.train.y), data.clients, Samples(x[:4], data.train.y[:4])
            ),
            Plan(model, LocalTraining(lr=0.1, epochs=1, batch_size=4), 1, 2, 0),
        ).run()
    return str(error.value)


def test_an_operation_without_a_deterministic_kernel_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says = "uses {}, which has no deterministic implementation in torch: its bits would change"
    layer = f"model {NETWORK!r}, layer 2.0 (Scattering) {says.format('put_')}"
    with in_turn():
        torch.use_deterministic_algorithms(False)  # as if the look at it were on another device
        mlp, put, pool = (build(name, (1, 2, 4), 3, {}) for name in ("mlp", NETWORK, POOLED))
    assert refused(put).startswith(layer)
    assert refused(mlp, (Putting(),)).startswith("'putting': broadcast failed, ")
    assert "put_ does not have a deterministic implementation" in refused(mlp, (Putting(),))
    operation = "adaptive_avg_pool2d_backward_cuda"  # a backward pass does not know its layer

    def backward(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{operation} does not have a deterministic implementation, but you set")

    monkeypatch.setattr(torch.autograd, "grad", backward)
    assert refused(pool).startswith(
        f"model {POOLED!r}, layer 1 (AdaptiveAvgPool2d) {says.format(operation)}"
    )


def test_a_gpu_that_was_used_too_early_is_told() -> None:
    words = "but this operation is not deterministic because it"
    mlp, early = build("mlp", (8,), 3, {}), "set it to :4096:8 before Python starts"
    with pytest.raises(UserError, match=early), device.refusing(mlp):
        raise RuntimeError(f"{words} uses CuBLAS and you have CUDA >= 10.2.")
    with pytest.raises(RuntimeError, match="other"), device.refusing(mlp):
        raise RuntimeError("other")
