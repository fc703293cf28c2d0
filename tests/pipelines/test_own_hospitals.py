"""The reader of docs/own_data.md: hospitals by name, judged one by one, and left out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import fedml_noniid as nd
from fedml_noniid.cli import app
from fedml_noniid.pipelines.experiment import results
from tests.pipelines.small import ROOT, run_stages

SITES = ["east", "north", "south", "west"]
PAGE = (ROOT / "docs" / "own_data.md").read_text().split("## Your own reader")[1].split("\n## ")[0]
HOW: dict[str, Any] = {"partition": "natural", "rounds": 2, "progress": False}


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The page's function, in a folder with its file of code and a file per hospital."""
    code = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)[0]
    (tmp_path / "hospital.py").write_text(code)
    (tmp_path / "ecg").mkdir()
    rng = np.random.default_rng(0)
    for number, site in enumerate(SITES):
        x = rng.normal(number, 1, size=(40, 4))
        rows = np.column_stack([x, x.max(1) > number + 1])
        np.savetxt(tmp_path / "ecg" / f"{site}.txt", rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    space: dict[str, Any] = {}
    exec(compile(code, str(tmp_path / "hospital.py"), "exec"), space)
    yield space["read"]
    sys.modules.pop("hospital", None)


def test_the_command_of_the_page_makes_an_experiment_of_named_hospitals(
    read: Any, tmp_path: Path
) -> None:
    (command,) = re.findall(r"^noniid (init .*)$", PAGE, flags=re.MULTILINE)
    assert app.main([*command.split(), "--methods", "fedavg"]) == 0
    content = yaml.safe_load((tmp_path / "params.yaml").read_text())
    natural = content["scenarios"]["natural"]
    assert natural["clients"] == 4
    content["scenarios"]["new"] = natural | {"clients": 3, "unseen": ["north"]}
    content |= {"scenario_names": ["natural", "new"], "seeds": [0]}
    content["train"]["rounds"] = 2
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(content))
    run_stages(tmp_path, ("prepare", "partition", "train", "evaluate", "report"))
    runs = {run.key: run for run in results.read(tmp_path)}
    assert sorted(runs["natural-fedavg-0"].sites) == SITES
    data = nd.load(read, root=tmp_path, folder="ecg")
    again = nd.run("fedavg", data, clients=3, unseen=["north"], validation=0.1, **HOW)
    record = results.record(tmp_path / "runs/new-fedavg-0/run.json")
    assert record["weights_sha256"] == again.sha256[0]
    # North's rows were nowhere in it: the mean is that of a reader who lacks the file.
    (tmp_path / "ecg" / "north.txt").rename(tmp_path / "north.txt")
    never = nd.load(read, root=tmp_path, folder="ecg")
    assert never.dataset.mean == again.data.dataset.mean
    right = again.predict(np.loadtxt(tmp_path / "north.txt")[:, :4])
    labels = np.loadtxt(tmp_path / "north.txt")[:, 4].astype(int).astype(str)
    assert runs["new-fedavg-0"].unseen["north"].accuracy == pytest.approx((right == labels).mean())
