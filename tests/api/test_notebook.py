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

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    """The notebook after all its cells, of fewer rounds and seeds; a cell that fails is an
    error."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        few = re.sub(r"rounds=\d+", "rounds=2", cell.source)
        cell.source = few.replace("seeds=[0, 1, 2]", "seeds=[0, 1]")
    where = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=where).execute()
    return notebook


def outputs(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    found = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output["data"][kind] for output in found if kind in output.get("data", {})]


def test_it_comes_with_the_package(tmp_path: Path) -> None:
    assert nd.notebook(tmp_path / "new").read_bytes() == NOTEBOOK.read_bytes()
    with pytest.raises(nd.UserError, match="is there already"):
        nd.notebook(tmp_path / "new")


@pytest.mark.slow
def test_its_pictures_come_out_and_no_cell_warns(executed: nbformat.NotebookNode) -> None:
    """And its text gives the names of methods."""
    pictures = [
        imread(io.BytesIO(base64.b64decode(text))) for text in outputs(executed, "image/png")
    ]
    assert len(pictures) == 4  # the split, the curves, the clients of two sweeps
    for picture in pictures:
        assert min(picture.shape[:2]) > 100
        assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 20  # not blank
    found = [output for cell in executed.cells for output in cell.get("outputs", [])]
    assert not [one for one in found if one.get("name") == "stderr"]
    tables = "\n".join(outputs(executed, "text/plain"))
    assert all(recipe in tables for recipe in ("fedavg", "scaffold+fnr", "fedprox", "verdict"))
