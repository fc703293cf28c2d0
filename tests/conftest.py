"""One thread: two are slower than one on models this small, and sums depend on the number of threads."""

from __future__ import annotations

import os

import torch

from fedml_noniid.plugins.engines.compiled import SWITCH

torch.set_num_threads(1)
# What this machine compiled before decides about no test. tests/engines/test_compiled.py switches the steps in C++ on.
os.environ[SWITCH] = "0"
