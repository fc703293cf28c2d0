"""Scans of patients of nine hospitals, made from a formula."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

HOSPITALS = 9


def scans(*, patients: int = 540) -> dict[str, NDArray[np.generic]]:
    """Images [n, 8, 8] of four diseases; each hospital has its own brightness."""
    rng = np.random.default_rng(7)
    disease, hospital = np.arange(patients) % 4, rng.integers(HOSPITALS, size=patients)
    row, column = np.divmod(disease, 2)
    x = 90 + 3 * hospital[:, None, None] + rng.normal(0, 20, size=(patients, 8, 8))
    for i in range(patients):
        x[i, 4 * row[i] : 4 * row[i] + 4, 4 * column[i] : 4 * column[i] + 4] += 25
    return {"x": x.clip(0, 255).astype(np.uint8), "y": disease, "owner": hospital}


def by_hospital(
    owners: NDArray[np.int64], n_clients: int, rng: np.random.Generator, *, share: float = 1.0
) -> list[NDArray[np.int64]]:
    """Client k has a share of the patients of the hospitals k, k + n_clients, ..."""
    parts = [np.flatnonzero(owners % n_clients == k) for k in range(n_clients)]
    return [rng.permutation(part)[: max(1, round(share * len(part)))] for part in parts]
