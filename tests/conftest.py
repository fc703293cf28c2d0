"""One thread: two are slower than one on models this small, and sums depend on the number of threads."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
