"""Small files of a user's own, with the names and columns of docs/own_data.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from tests.data.reading import draw


def write_own_files(folder: Path) -> None:
    """A table of four hospitals, texts, grey images of 28 x 28, arrays of three classes and four
    owners."""
    i = np.arange(120)
    people = {
        "age": i % 37 + 20,
        "sex": np.where(i % 3, "f", "m"),
        "hospital": np.array(list("ABCD"))[i % 4],
        "diagnosis": np.where(i % 37 > 18, "ill", "well"),
    }
    pd.DataFrame(people).to_csv(folder / "patients.csv", index=False)
    said = {"review": np.where(i % 2, "a good film", "a bad film"), "mood": i % 2, "user": i % 5}
    pd.DataFrame(said).to_csv(folder / "reviews.csv", index=False)
    for k in range(20):
        for label in ("cat", "dog"):
            draw(folder / "photos" / "train" / label / f"{k}.png", "L", (28, 28))
            draw(folder / "photos" / "test" / label / f"{k % 2}.png", "L", (28, 28))
    (folder / "signals").mkdir()
    rng = np.random.default_rng(0)
    for part, n in (("train", 120), ("test", 40)):
        client = np.array(["ada", "bob", "cy", "di"])[np.arange(n) % 4]
        x, y = rng.normal(size=(n, 4)), np.arange(n) % 3
        np.savez(folder / "signals" / f"{part}.npz", x=x, y=y, client=client)
