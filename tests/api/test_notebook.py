"""The notebook of examples/ runs as it is stored, and its pictures come out."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
from matplotlib.image import imread
from nbclient import NotebookClient

import fedml_noniid as nd


@pytest.mark.slow
def test_its_pictures_come_out_and_no_cell_warns(tmp_path: Path) -> None:
    """And its text gives the names of methods. Fewer rounds and seeds; a cell that fails is an
    error."""
    notebook = nbformat.read(nd.notebook(tmp_path), as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        few = re.sub(r"rounds=\d+", "rounds=2", cell.source)
        cell.source = few.replace("seeds=[0, 1, 2]", "seeds=[0, 1]")
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    data = [output.get("data", {}) for output in outputs]
    pictures = [
        imread(io.BytesIO(base64.b64decode(part["image/png"])))
        for part in data
        if "image/png" in part
    ]
    assert len(pictures) == 4  # the split, the curves, the clients of two sweeps
    for picture in pictures:
        assert min(picture.shape[:2]) > 100
        assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 20  # not blank
    assert not [one for one in outputs if one.get("name") == "stderr"]
    tables = "\n".join(part.get("text/plain", "") for part in data)
    assert all(recipe in tables for recipe in ("fedavg", "scaffold+fnr", "fedprox", "verdict"))
