"""A user's own partition and data set: checked as ours, by dotted path and as objects."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import fedml_noniid as nd
from fedml_noniid.data.indices import INDICES
from fedml_noniid.pipelines.experiment import config, provenance
from fedml_noniid.pipelines.stages import plan
from tests.pipelines.small import PARAMS, run_stages

DIGITS = nd.load("digits")
LABELS = DIGITS.dataset.train_y.numpy()
QUIET: dict[str, Any] = {"rounds": 2, "progress": False}


def by_light(labels, samples, n_clients, rng, *, jitter: float = 0.0, dark: int = 0):
    light = samples.reshape(len(labels), -1).mean(1) + jitter * rng.normal(size=len(labels))
    return np.array_split(np.argsort(light)[dark:], n_clients)


def by_owner(owners, n_clients):
    return [np.flatnonzero(owners % n_clients == k) for k in range(n_clients)]


def test_a_function_deals_what_is_left_for_training() -> None:
    """By hand: the means of the images that are not held out, sorted and cut. By its name too."""
    how: dict[str, Any] = {"clients": 4, "dark": 37, "validation": 0.1, "public": 20}
    split = nd.partition(DIGITS, by_light, **how)
    indices = split.indices
    rest = np.setdiff1d(np.arange(len(LABELS)), np.r_[indices.validation, indices.public])
    light = DIGITS.dataset.train_x.numpy()[rest].mean((1, 2, 3))
    wanted = np.array_split(rest[np.argsort(light)][37:], 4)
    assert all(map(np.array_equal, indices.clients, map(np.sort, wanted)))
    assert split.statistics["samples_left_out"] == 37
    named = nd.partition(DIGITS, f"{__name__}:by_light", **how)
    assert (named.table == split.table).all(axis=None) and named.settings == split.settings
    jitter = {"partition": by_light, "clients": 3, "jitter": 1.0, "seeds": [4, 5]}
    both = nd.run("fedavg", DIGITS, **jitter, **QUIET).sha256
    assert both == nd.run("fedavg", DIGITS, **jitter, **QUIET, processes=2).sha256
    assert both[4] != both[5], "each seed draws anew"


def test_clients_of_whole_owners_are_tested_on_their_owners() -> None:
    x, owner = np.random.default_rng(3).normal(size=(90, 4)), np.arange(90) % 6
    data = nd.from_arrays(x, (x[:, 0] > 0).astype(int), owner=owner)
    found = nd.partition(data, by_owner, clients=3).indices
    for k in range(3):
        assert set((data.dataset.test_owner[found.test_clients[k]] % 3).tolist()) == {k}

    def mixed(owners, n_clients):
        return np.array_split(np.arange(len(owners)), n_clients)

    found = nd.partition(data, mixed, clients=3).indices  # owners are in several clients
    assert sum(map(len, found.test_clients)) == len(data.dataset.test_y)


def test_what_a_reader_may_return() -> None:
    """The same checks and the same result as `from_arrays` with what it returned."""
    x, y = np.arange(120.0, dtype=np.float32).reshape(30, 4), np.arange(30) % 2
    pairs, tests = (TensorDataset(torch.from_numpy(part), torch.from_numpy(y)) for part in (x, -x))
    with_tests = {"x": x, "y": y, "test_x": -x, "test_y": y}
    for returned, wanted in (
        ((x, y), {"x": x, "y": y}),
        ((x, y, -x, y), with_tests),
        ({"x": x, "y": y, "owner": y}, {"x": x, "y": y, "owner": y}),
        (pairs, {"x": x, "y": y}),
        ((pairs, tests), with_tests),
    ):
        found, same = nd.load(lambda kept=returned: kept).dataset, nd.from_arrays(**wanted).dataset
        for name in ("train_x", "train_y", "test_x", "test_y"):
            assert torch.equal(getattr(found, name), getattr(same, name))
        assert found.notes == same.notes


STUDY = """\
import numpy as np


def load(root, *, file: str, n: int = 60):
    x = np.loadtxt(root / file)[:n].reshape(-1, 4)
    return {"x": x, "y": (x[:, 0] > 0).astype(int), "owner": np.arange(len(x)) % 6}


def cut(labels, owners, n_clients, *, first: int = 0):
    return [np.flatnonzero((owners + first) % n_clients == k) for k in range(n_clients)]


def top(outputs, labels, *, k: int = 1):
    best = outputs.topk(k, 1).indices
    return (best == labels[:, None]).any(1).float().mean()
"""


@pytest.fixture
def study(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A study whose data set and partition lie beside its params.yaml, and their file."""
    file = tmp_path / f"hospital_{tmp_path.name.replace('-', '_')}.py"
    file.write_text(STUDY)
    np.savetxt(tmp_path / "x.txt", np.random.default_rng(0).normal(size=240))
    data = f"{{name: '{file.stem}:load', root: ., file: x.txt, n: 240, validation: 0.1, public: 5}}"
    params = PARAMS.replace(PARAMS.splitlines()[1], f"data: {data}")
    params = params.replace("partition: dirichlet", f"partition: {file.stem}.cut")
    params = params.replace("clients: 4, alpha: 0.5", "clients: 3, first: 1")
    params = params.replace("device: cpu", f"device: cpu, metrics: {{{file.stem}.top: {{k: 2}}}}")
    (tmp_path / "params.yaml").write_text(params)
    yield tmp_path, file
    sys.modules.pop(file.stem, None)


def test_a_study_has_them_and_sees_their_edits(study: tuple[Path, Path]) -> None:
    root, file = study
    settings = config.load(root)
    assert settings.own_extras, "`noniid run` asks the stage plan each time"
    for options in (settings.data.options, {"files": {"train": ["x.txt", "none.txt"]}}):
        assert [*plan.contents(settings.data.name, str(root), options)] == ["x.txt"]
    run_stages(root, ("prepare", "partition", "train", "evaluate", "report"))
    measured = (root / "evaluation" / "skewed-fedavg-0" / "metrics.json").read_text()
    assert json.loads(measured)["metric/top"] == 1, "of two classes"
    assert " 1.0000 " in (root / "report" / "report.md").read_text()
    assert "metric/top_mean" in (root / "report" / "summary.csv").read_text()
    indices = (root / "partitions" / "skewed-0" / INDICES).read_bytes()
    before = provenance.plan(settings)
    file.write_text(STUDY.replace("% n_clients ==", "// 2 % n_clients =="))
    del sys.modules[file.stem]
    after = provenance.plan(config.load(root))
    edited = {stage for stage in after if after[stage] != before[stage]}
    assert edited == {"prepare", "partition", "train", "deploy"}
    run_stages(root, ("prepare", "partition"))
    assert (root / "partitions" / "skewed-0" / INDICES).read_bytes() != indices


def test_mistakes_in_params_yaml_name_the_key(study: tuple[Path, Path]) -> None:
    root, file = study
    text = (root / "params.yaml").read_text()
    for old, new, words in (
        ("first: 1", "frist: 1", r"scenarios\.skewed\.frist is unknown \(did you mean 'first'\?\)"),
        ("first: 1", "first: a", r"scenarios\.skewed\.first = 'a' is refused; allowed: a whole"),
        (".cut", ".cat", r"scenarios\.skewed\.partition: partition .*cat' can't be imported"),
        (f"{file.stem}.cut", "cut", r"scenarios\.skewed\.partition = 'cut' is unknown"),
        ("n: 240", "m: 240", r"data\.m is unknown; allowed: file, n"),
        ("file: x.txt, ", "", r"data\.file is missing"),
        (":load", ":lead", r"data\.name: data set .*lead' can't be imported"),
    ):
        (root / "params.yaml").write_text(text.replace(old, new))
        with pytest.raises(nd.UserError, match=f"^params.yaml: {words}.*$"):
            config.load(root)
