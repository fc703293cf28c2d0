"""scikit-learn's bundled digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedml_noniid.data.dataset import Raw


def digits(root: Path) -> Raw:
    """scikit-learn's bundled digits: 1797 grey images of 8x8, values 0 to 16; `root` isn't used.

    Split 1437 to 360, stratified by class, once and for all: the test set doesn't depend on an
    experiment's seed.
    """
    # Imported here, since it takes seconds and only the prepare stage needs it.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    x = torch.from_numpy(bunch.images.astype(np.uint8)).unsqueeze(1)
    y = torch.from_numpy(bunch.target.astype(np.int64))
    train, test = train_test_split(
        np.arange(len(y)), test_size=0.2, stratify=bunch.target, random_state=0
    )
    train, test = np.sort(train), np.sort(test)
    return Raw(x[train], y[train], x[test], y[test], [str(c) for c in range(10)], unit=16)
