"""One thread: two are slower than one on models this small, and sums depend on the number of
threads.

With the base package and pytest alone (`make test-core`), the tests of the extras are left out.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedml_noniid import foreign
from fedml_noniid.core import native
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.datasets import load

torch.set_num_threads(1)
pytest.register_assert_rewrite("fedml_noniid.contract.checks", "fedml_noniid.contract.silos")
# What this machine compiled before decides about no test. tests/core/test_sums.py switches the sums
# in C++ on.
os.environ[native.SWITCH] = "0"

# A shell without job control lets what it puts in the background ignore Ctrl-C, and children
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Package -> the tests that need it, beside single ones that call `pytest.importorskip`.
NEEDED = {
    "fedml": ("deploy", "governance", "privacy", "test_benchmarks.py"),
    "mlflow": (
        "api/test_same.py",
        "cli",
        "data/test_drift.py",
        "data/test_skew.py",
        "pipelines",
        "research",
    ),
    "nbclient": ("api/test_notebook.py",),
    "mkdocs": ("test_docs.py",),
}
collect_ignore = [
    name
    for package, names in NEEDED.items()
    if importlib.util.find_spec(package) is None
    for name in names
]


@pytest.fixture(autouse=True)
def nobody_elses_methods() -> Iterator[None]:
    """Methods of other packages that a test makes known are forgotten after it."""
    known = dict(foreign._known)
    yield
    foreign._known.clear()
    foreign._known.update(known)


@pytest.fixture(scope="session")
def digits() -> Dataset:
    """The smallest data set of images, which comes with scikit-learn."""
    return load("digits", Path())
