"""Shields the API's calls from what the caller's process is set to, and the caller from theirs.

torch has settings of the process (such as its default dtype, precision, deterministic algorithms)
and of a thread (such as autocast, inference mode, default device). They decide about bits.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._C import _pop_torch_function_stack, _push_on_torch_function_stack
from torch.utils._python_dispatch import _disable_current_modes


def _flushes() -> bool:
    """Whether this thread takes numbers below the smallest normal one as 0."""
    return sys.float_info.min / 2 == 0


# (read, write, the value that calls of the API have)
Switch = tuple[Callable[[], Any], Callable[[Any], Any], Any]
SWITCHES: list[Switch] = [
    (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled, False),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, True),
    (torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic, False),
    (torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled, True),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled, True),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark, False),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic, False),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, True),
    (_flushes, torch.set_flush_denormal, False),
    (
        np.geterr,
        lambda how: np.seterr(**how),
        {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"},
    ),
    *(
        (
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
            False,
        )
        for device in ("cpu", "cuda")
    ),
    # Of float32. torch has older and newer switches for the same; the older ones set both.
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    (torch._C._get_cublas_allow_tf32, torch._C._set_cublas_allow_tf32, False),
    (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32, True),
    *(
        (
            partial(torch._C._get_fp32_precision_getter, backend, operation),
            partial(torch._C._set_fp32_precision_setter, backend, operation),
            "tf32" if backend == "cuda" and operation in ("conv", "rnn") else "none",
        )
        for backend in ("generic", "cuda", "mkldnn")
        for operation in ("all", "matmul", "conv", "rnn")
        if backend != "generic" or operation == "all"
    ),
]
_turn = threading.RLock()  # held by the call that this process works on


def _no_turn() -> None:
    global _turn
    _turn = threading.RLock()


os.register_at_fork(
    after_in_child=_no_turn
)  # nobody would give back what a thread of the parent holds


@contextmanager
def in_turn() -> Iterator[None]:
    """Waits for the calls of other threads, works with the settings of a new process, and leaves
    the caller's as they were, with the global random generators.

    Code of the user that draws from a global generator meets it with seed 0.
    """
    with _turn, ExitStack() as stack:
        stack.callback(torch.set_num_threads, _threads_of_the_process())
        stack.enter_context(torch.inference_mode(False))  # gradients are on too
        stack.enter_context(_disable_current_modes())
        for _ in range(torch._C._len_torch_function_stack()):  # the default device is the first
            stack.callback(_push_on_torch_function_stack, _pop_torch_function_stack())
        _set(stack)
        devices = range(torch.cuda.device_count()) if torch.cuda._initialized else ()
        stack.enter_context(torch.random.fork_rng([*devices]))
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(random.setstate, random.getstate())
        for seed in (torch.default_generator.manual_seed, np.random.seed, random.seed):
            seed(0)
        yield


def _threads_of_the_process() -> int:
    """torch counts threads for each thread. A new thread has the number that was set last, by any
    of them."""
    with ThreadPoolExecutor(1) as new:
        return new.submit(torch.get_num_threads).result()


def _value(read: Callable[[], Any]) -> Any:
    """The value of a switch; None where torch refuses to tell, as a newer one has been set."""
    try:
        return read()
    except RuntimeError:
        return None


def _set(stack: ExitStack) -> None:
    """Sets the switches, and has the stack set them back, where they differ then."""
    before = [(read, write, _value(read)) for read, write, _ in SWITCHES]
    stack.callback(_write, before)
    _write(SWITCHES)


def _write(switches: list[Switch]) -> None:
    for read, write, value in switches:
        if value is not None and _value(read) != value:
            write(value)
