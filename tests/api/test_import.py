"""`import fedml_noniid` changes nothing in a program that uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, logging, os, random, signal, sys, threading, traceback, warnings
# What other packages change when they are imported is theirs.
import numpy, pandas, pydantic, ruamel.yaml, safetensors.torch, scipy.special, sklearn, torch.func

hooks, register = [], os.register_at_fork

def registered(**given):
    hooks.append(traceback.extract_stack(limit=2)[0].filename)
    register(**given)

def state():
    return {
        "meta_path": [*map(str, sys.meta_path)],
        "path": sys.path[:],
        "path_hooks": len(sys.path_hooks),
        "environ": dict(os.environ),
        "flags": [sys.dont_write_bytecode, sys.pycache_prefix, sys.getrecursionlimit(),
            sys.getswitchinterval(), str(sys.excepthook), str(sys.displayhook)],
        "profile": str([sys.gettrace(), sys.getprofile(), threading.excepthook]),
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "warnings": [*map(str, warnings.filters)],
        "torch": str([torch.get_default_dtype(), torch.get_num_threads(),
            torch.get_num_interop_threads(), torch.get_deterministic_debug_mode(),
            torch.get_float32_matmul_precision(), torch.is_grad_enabled(),
            torch.backends.cudnn.benchmark, torch.get_default_device()]),
        "numpy": str([numpy.geterr(), numpy.get_printoptions()]),
        "random": [hash(random.getstate()), hash(str(numpy.random.get_state())),
            hash(torch.get_rng_state().numpy().tobytes())],
        "logging": str([logging.root.handlers, logging.root.level, logging.raiseExceptions]),
        "threads": threading.active_count(),
        "folder": os.getcwd(),
    }

before = state()
os.register_at_fork = registered
import fedml_noniid
for name in fedml_noniid.__all__:
    getattr(fedml_noniid, name)
os.register_at_fork = register
after = state()
assert not {"mlflow", "fedml", "dvc", "typer"} & sys.modules.keys()
print(json.dumps([{key: [before[key], after[key]] for key in before if before[key] != after[key]},
    [file for file in hooks if "site-packages" not in file]]))
"""


def test_an_import_changes_nothing_in_the_program() -> None:
    """Neither that of the package nor that of all names of its API, and no hook of a fork."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [{}, []], done.stderr
