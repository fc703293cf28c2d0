"""The device that a process computes on, and the settings under which it repeats its bits.

A process that has asked torch for CUDA forks no process that can use a GPU. So a forked process
asks for the GPUs of this machine, and a process that trains nothing itself never touches CUDA.
"""

from __future__ import annotations

import ctypes
import glob
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fedml_noniid.core.errors import UserError, known
from fedml_noniid.engines.forks import in_fork
from fedml_noniid.models.model import Model
from fedml_noniid.models.own import OwnNetwork

DEVICES = ("auto", "cpu", "cuda")
VISIBLE = "CUDA_VISIBLE_DEVICES"
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")  # with which cuBLAS repeats its sums
NVIDIA, DISPLAY = "0x10de", "0x03"  # vendor, and first digits of the class, of a PCI device
DRIVER = Path("/sys/module/nvidia/version")
OPERATIONS = ("matmul", "conv", "rnn")  # with float32 precisions of their own
AMPERE = [8, 0]  # its compute capability, the first with matrix units for tf32
# torch's warnings of a GPU that its kernels are not built for
NO_GPU_CODE = r"(?s).*(which is of compute capability|is not compatible with the current)"
NO_KERNEL = re.compile(r"(\S.*?) does not have a deterministic implementation")
TOO_LATE = "this operation is not deterministic because it uses CuBLAS"
# (read, write, the value of our work)
Switch = tuple[Callable[[], Any], Callable[[Any], Any], Any]


class Gpus(NamedTuple):
    """The GPUs that torch can use here, in its order."""

    names: Sequence[str] = ()
    driver: str = ""
    cudnn: int = 0
    reason: str = "this process was forked from one that has used CUDA"  # why there is none
    capability: Sequence[int] = ()  # of the first, (major, minor)


def gpus() -> Gpus:
    """Lists the GPUs, without touching CUDA in this process unless it has used CUDA already."""
    return _gpus(os.environ.get(VISIBLE))


@cache
def _gpus(visible: str | None) -> Gpus:
    """As `gpus`. `visible`: the environment variable, as torch has it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Gpus(reason="no NVIDIA driver is installed (libcuda.so.1)")
    listed: Sequence[Any] | None = [] if torch.cuda._initialized else in_fork(_list)
    if listed is None:
        return Gpus(reason="the process that asked CUDA for it died")
    return Gpus(*(listed or _list()))


def _list() -> Sequence[Any]:
    """Touches CUDA. Returns the fields of `Gpus`; none after a fork from a process with CUDA."""
    if torch.cuda._is_in_bad_fork():
        return ()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", NO_GPU_CODE)
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch types it in part
            names = [*map(torch.cuda.get_device_name, range(torch.cuda.device_count()))]
            capability = [*torch.cuda.get_device_capability()]
            cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # likewise
    except Exception as error:  # of torch, the driver or a missing library
        return (), "", 0, re.split(r"\.\s", " ".join(str(error).split()))[0]
    driver = DRIVER.read_text().strip() if DRIVER.exists() else "unknown"
    return names, driver, cudnn, "", capability


def _has_card() -> bool:
    """Whether this machine has an NVIDIA GPU, usable or not."""
    devices = [Path(path) for path in glob.glob("/sys/bus/pci/devices/*")]
    return bool(glob.glob("/dev/nvidia[0-9]*")) or any(
        (device / "vendor").read_text().startswith(NVIDIA)
        and (device / "class").read_text().startswith(DISPLAY)
        for device in devices
    )


def unusable_gpu() -> str:
    """Says why torch can't use this machine's GPU. "" without a GPU, for one that it can use, and
    for one that CUDA_VISIBLE_DEVICES hides."""
    hidden = os.environ.get(VISIBLE) in ("", "-1")
    return "" if hidden or gpus().names or not _has_card() else gpus().reason


def resolve_device(
    name: str, setting: str = "device 'cuda'", allowed: str = "auto, cpu"
) -> torch.device:
    """Returns the device; `auto` is CUDA if torch can use it. Touches no CUDA.

    `setting`, `allowed`: what asks for CUDA, and what it may be without one, in an error.
    UserError for an unknown device, for CUDA where there is none, and for a setting of cuBLAS with
    which a GPU does not repeat its bits.
    """
    known("device", name, DEVICES)
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda" and not gpus().names:
        raise UserError(
            f"{setting}: this machine has no usable CUDA device: {gpus().reason}; allowed here: "
            f"{allowed}"
        )
    if gpus().names and workspace() not in WORKSPACES:
        raise UserError(
            f"the environment variable {WORKSPACE} = {workspace()!r} lets a GPU change its bits "
            f"from run to run; allowed: {', '.join(WORKSPACES)}, or unset"
        )
    return torch.device("cuda" if gpus().names else "cpu")


def refuse_tf32(device: torch.device) -> None:
    """Raises UserError if a device has no matrix units for tf32."""
    name, allowed = device.type, "float32, bf16"
    if device.type == "cuda":
        if [*gpus().capability] >= AMPERE:
            return
        name, allowed = gpus().names[0], "float32"
    raise UserError(
        "precision = tf32 is for the matrix units of NVIDIA GPUs since Ampere; the device is "
        f"{name}",
        allowed=allowed,
    )


def n_cards(device: torch.device) -> int:
    """Counts the GPUs of the first one's model, as others have other bits; 0 on a CPU."""
    names = gpus().names if device.type == "cuda" else ()
    return sum(name == names[0] for name in names)


def cards(processes: int) -> list[str]:
    """Returns CUDA_VISIBLE_DEVICES of each process: one GPU of the first one's model, in turn."""
    names = gpus().names
    shown = (os.environ.get(VISIBLE) or ",".join(map(str, range(len(names))))).split(",")
    same = [card for card, name in zip(shown, names, strict=False) if name == names[0]]
    return [same[k % len(same)] for k in range(processes)]


def facts(device: torch.device) -> dict[str, str]:
    """Returns what decides about a GPU's bits, beside settings, code and data; {} for a CPU."""
    if device.type == "cpu":
        return {}
    names, driver, cudnn, *_ = gpus()
    return {
        "gpu": names[0],
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "cudnn": str(cudnn),
        "determinism": f"on, {WORKSPACE}={workspace()}",
    }


def workspace() -> str:
    """Returns cuBLAS's workspaces: those that the user has set, or else ours."""
    return os.environ.get(WORKSPACE) or WORKSPACES[0]


def _set_workspace(value: str) -> None:
    os.environ.pop(WORKSPACE, None)
    os.environ.update({WORKSPACE: value} if value else {})


def switches() -> list[Switch]:
    """Returns the switches of the process that decide about the bits of a device.

    torch has older and newer ones for float32. The older ones are written first and never read
    alone: reading one raises where somebody has set the newer.
    """
    precision, matmul = torch._C._get_fp32_precision_getter, torch.backends.cuda.matmul
    sums = [f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")]
    return [
        (partial(os.environ.get, WORKSPACE, ""), _set_workspace, workspace()),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 2),
        (
            torch._C._get_deterministic_fill_uninitialized_memory,
            torch._C._set_deterministic_fill_uninitialized_memory,
            False,  # no result reads such memory, and filling it costs time
        ),
        (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark, False),
        (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic, True),
        *((partial(getattr, matmul, name), partial(setattr, matmul, name), False) for name in sums),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
        (torch._C._get_cublas_allow_tf32, torch._C._set_cublas_allow_tf32, False),
        (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32, False),
        *(
            (
                partial(precision, backend, operation),
                partial(torch._C._set_fp32_precision_setter, backend, operation),
                "ieee" if backend == "cuda" and operation != "all" else "none",
            )
            for backend in ("generic", "cuda", "mkldnn")
            for operation in ("all", *OPERATIONS)
            if backend != "generic" or operation == "all"
        ),
    ]


def value(read: Callable[[], Any]) -> Any:
    """Returns the value of a switch; None where torch refuses to tell it."""
    try:
        return read()
    except RuntimeError:
        return None


def write(every: Sequence[Switch]) -> None:
    """Sets switches that differ."""
    for read, set_to, wanted in every:
        if wanted is not None and value(read) != wanted:
            set_to(wanted)


def be_deterministic() -> None:
    """Sets this process so that a device repeats its bits. It comes before the first use of CUDA.

    What torch has no deterministic kernel for then raises, see `refusing`.
    """
    write(switches())


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Inside, a GPU rounds what its matrix units multiply, if `on`."""
    operations = OPERATIONS if on else ()
    for operation in operations:
        torch._C._set_fp32_precision_setter("cuda", operation, "tf32")
    try:
        yield
    finally:
        for operation in operations:
            torch._C._set_fp32_precision_setter("cuda", operation, "ieee")


@contextmanager
def refusing(network: Model) -> Iterator[None]:
    """Inside, an operation without a deterministic kernel is a UserError that names its layer.

    One in a hook of a method is an error of that hook, see `core.contract.failure`.
    """
    try:
        yield
    except RuntimeError as error:
        if TOO_LATE in str(error):
            raise UserError(
                f"this process has used the GPU before {WORKSPACE} was set; set it to "
                f"{WORKSPACES[0]} before Python starts"
            ) from None
        if (operation := NO_KERNEL.search(str(error))) is None:
            raise
        raise UserError(
            f"model {network.name!r}{_layers(error, operation[1], network)} uses {operation[1]}, "
            "which has no deterministic implementation in torch: its bits would change from run to "
            "run; allowed: another layer, or train.device = cpu for a kernel of a GPU"
        ) from None


def _layers(error: BaseException, operation: str, network: Model) -> str:
    """Names the layer of the user's network that called an operation.

    A backward pass has no frame of its layer. There the operation names the kind of layer.
    """
    selves = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [part for part in selves if isinstance(part, nn.Module)]
    if not modules and not isinstance(network, OwnNetwork):
        return ""
    root = modules[0] if modules else cast("OwnNetwork", network).template(True).module
    names, kind = {part: name for name, part in root.named_modules()}, operation.replace("_", "")
    alike = [part for part in names if kind.startswith(type(part).__name__.lower())]
    return "".join(
        f", layer {names.get(part)} ({type(part).__name__})" for part in modules[-1:] or alike
    )
