"""Federated-learning methods as FedML trainer/aggregator pairs, and the engines that simulate
them."""

import os

# Tensors of some megabytes in large pages: getting small ones from Linux costs more than what is
# calculated in them. torch reads this once, with its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
