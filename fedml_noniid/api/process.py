"""Shields the API's calls from what the caller's process is set to, and the caller from theirs.

torch has settings of the process (such as its default dtype, precision, deterministic algorithms)
and of a thread (such as autocast, inference mode, default device). They decide about bits.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from torch._C import _pop_torch_function_stack, _push_on_torch_function_stack
from torch.utils._python_dispatch import _disable_current_modes

from fedml_noniid.engines.device import Switch, switches, value, write


def _flushes() -> bool:
    """Whether this thread takes numbers below the smallest normal one as 0."""
    return sys.float_info.min / 2 == 0


SWITCHES: list[Switch] = [  # beside those of `engines.device`
    (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled, False),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, True),
    (torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic, False),
    (torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled, True),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled, True),
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
]
# Process -> what its call in work holds. In a forked one, nobody would give back what a thread of
# the parent holds.
_turns: dict[int, threading.RLock] = {}


@contextmanager
def in_turn() -> Iterator[None]:
    """Waits for the calls of other threads, works with the settings of a new process, and leaves
    the caller's as they were, with the global random generators.

    Code of the user that draws from a global generator meets it with seed 0.
    """
    with _turns.setdefault(os.getpid(), threading.RLock()), ExitStack() as stack:
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


def _set(stack: ExitStack) -> None:
    """Sets the switches, and has the stack set them back, where they differ then."""
    every = [*SWITCHES, *switches()]
    before = [(read, set_to, value(read)) for read, set_to, _ in every]
    stack.callback(write, before)
    write(every)
