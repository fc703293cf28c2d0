"""A user's own partition and data set: checked as ours, by dotted path and as objects."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedml_noniid as nd
from fedml_noniid.data.indices import INDICES
from fedml_noniid.pipelines.experiment import config, provenance
from fedml_noniid.pipelines.stages import plan
from tests.pipelines.small import PARAMS, run_stages

DIGITS = nd.load("digits")
LABELS = DIGITS.dataset.train_y.numpy()
QUIET: dict[str, Any] = {"rounds": 2, "progress": False}
_kept = np.random.default_rng(0)


def by_light(labels, samples, n_clients, rng, *, jitter: float = 0.0, dark: int = 0):
    light = samples.reshape(len(labels), -1).mean(1) + jitter * rng.normal(size=len(labels))
    return np.array_split(np.argsort(light)[dark:], n_clients)


def by_owner(owners, n_clients):
    return [np.flatnonzero(owners % n_clients == k) for k in range(n_clients)]


def test_a_function_deals_what_is_left_for_training() -> None:
    """By hand: the means of the images that are not held out, sorted and cut."""
    split = nd.partition(DIGITS, by_light, clients=4, dark=37, validation=0.1, public=20)
    indices = split.indices
    rest = np.setdiff1d(np.arange(len(LABELS)), np.r_[indices.validation, indices.public])
    light = DIGITS.dataset.train_x.numpy()[rest].mean((1, 2, 3))
    wanted = np.array_split(rest[np.argsort(light)][37:], 4)
    assert all(map(np.array_equal, indices.clients, map(np.sort, wanted)))
    assert split.statistics["samples_left_out"] == 37
    named = nd.partition(
        DIGITS, f"{__name__}:by_light", clients=4, dark=37, validation=0.1, public=20
    )
    assert (named.table == split.table).all(axis=None) and named.settings == split.settings


def test_each_seed_draws_anew_in_every_process() -> None:
    split = nd.partition(DIGITS, by_light, clients=3, jitter=1.0, seed=5)
    result = nd.run("fedavg", split, seeds=[4, 5], processes=2, **QUIET)
    direct = nd.run("fedavg", DIGITS, partition=by_light, clients=3, jitter=1.0, seeds=[5], **QUIET)
    assert result.sha256[5] == direct.sha256[5] != result.sha256[4]


def test_clients_of_whole_owners_are_tested_on_their_owners() -> None:
    rng = np.random.default_rng(3)
    x, owner = rng.normal(size=(90, 4)), np.arange(90) % 6
    y = (x[:, 0] > 0).astype(int)
    data = nd.from_arrays(x, y, owner=owner)
    found = nd.partition(data, by_owner, clients=3).indices
    for k in range(3):
        assert set((data.dataset.test_owner[found.test_clients[k]] % 3).tolist()) == {k}

    def mixed(owners, n_clients):
        return np.array_split(np.arange(len(owners)), n_clients)

    found = nd.partition(data, mixed, clients=3).indices  # owners are in several clients
    assert sum(map(len, found.test_clients)) == len(data.dataset.test_y)
    with pytest.raises(nd.UserError, match="'digits' doesn't say whose samples are whose"):
        nd.partition(DIGITS, by_owner, clients=3)


def drifts(labels, n_clients):
    return np.array_split(_kept.permutation(len(labels)), n_clients)


def fails(labels, n_clients):
    return [[0], [[1], 2][1:][5]]


def writes(labels, n_clients):
    labels[0] = 3
    return [[0], [1]]


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (drifts, {}, r"drifts\(\) returned another partition when it was called again with the"),
        (fails, {}, r"partition fails\(\) failed, .*test_own_data.py, line \d+: IndexError: list"),
        (writes, {}, r"partition writes\(\) failed, .*line \d+: ValueError: assignment destin"),
        (lambda n_clients: [[0], []], {}, r"<lambda>\(\)\[1\] = \[\] is refused; allowed: pos"),
        (lambda n_clients: [[0], [0.5]], {}, r"<lambda>\(\)\[1\] = \[0.5\] is refused; allowed"),
        (lambda n_clients: [[0], [10**6]], {}, r"<lambda>\(\)\[1\] = \[1000000\] is refused"),
        (lambda n_clients: [[0, 1], [1]], {}, r"<lambda>\(\): 1 is there 2 times; allowed: once"),
        (lambda n_clients: [[0]], {}, r"<lambda>\(\) returned 1 arrays; allowed: 2, one for each"),
        (lambda n_clients: None, {}, r"<lambda>\(\) = None is refused; allowed: a list of arra"),
        (by_light, {"jiter": 1}, r"jiter is no argument \(did you mean 'jitter'\?\)"),
        (by_light, {"jitter": "1"}, r"jitter = '1' is refused; allowed: a number"),
        ("nowhere:cut", {}, r"partition = .*can't be imported, ModuleNotFoundError|.*nowhere"),
        (f"{__name__}:LABELS", {}, r".*partition .* is a ndarray; allowed: a function of your"),
        (5, {}, r"partition = 5 is refused; allowed: text"),
    ],
)
def test_what_is_no_partition_is_one_line(function: Any, options: Any, words: str) -> None:
    with pytest.raises(nd.UserError) as error:
        nd.partition(DIGITS, function, clients=2, **options)
    assert error.match(f"^partition: {words}")
    assert "\n" not in str(error.value)


class Pairs(torch.utils.data.Dataset[Any]):
    """30 samples of two classes."""

    def __init__(self, start: float = 0.0) -> None:
        self.start = start

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), self.start + i), i % 2


def test_what_a_reader_may_return() -> None:
    """The same checks and the same result as `from_arrays` with what it returned."""
    x, y = np.arange(120.0).reshape(30, 4), np.arange(30) % 2
    pairs = np.repeat(np.arange(30.0)[:, None], 4, axis=1)
    for returned, wanted in (
        ((x, y), {"x": x, "y": y}),
        ((x, y, x[:5] + 9, y[:5]), {"x": x, "y": y, "test_x": x[:5] + 9, "test_y": y[:5]}),
        ({"x": x, "y": y, "owner": y}, {"x": x, "y": y, "owner": y}),
        (Pairs(), {"x": pairs, "y": y}),
        ((Pairs(), Pairs(99.0)), {"x": pairs, "y": y, "test_x": pairs + 99, "test_y": y}),
    ):
        found = nd.load(lambda kept=returned: kept).dataset
        same = nd.from_arrays(
            **{k: np.asarray(v, np.float32) if "x" in k else v for k, v in wanted.items()}
        )
        for name in ("train_x", "train_y", "test_x", "test_y"):
            assert torch.equal(getattr(found, name).double(), getattr(same.dataset, name).double())
        assert found.notes == same.dataset.notes


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda: 5, r"data set .*: the function returned 5; allowed: \(x, y\), "),
        (lambda: 1 / 0, r"data set .* failed, .*test_own_data.py, line \d+: ZeroDivisionError: "),
        (lambda: {"x": [[1.0]] * 4}, "data set .*: y is missing"),
        (lambda: {"x": [[1.0]], "y": [0], "z": 0}, "data set .*: z is unknown; allowed: "),
        (lambda: ([[1.0, np.nan]] * 8, [0, 1] * 4), "data set .*: x.* nan"),
        (lambda: [7, 8, 9], r"data set .*: the function returned \[7, 8, 9\]"),
        (
            lambda: torch.utils.data.TensorDataset(torch.zeros(4, 2)),
            r"data set .*: dataset\[0\] = ",
        ),
    ],
)
def test_what_is_no_data_set_is_one_line(returned: Any, words: str) -> None:
    with pytest.raises(nd.UserError) as error:
        nd.load(returned)
    assert error.match(f"^{words}")
    assert "\n" not in str(error.value)


STUDY = """\
import numpy as np


def load(root, *, file: str, n: int = 60):
    x = np.loadtxt(root / file)[:n].reshape(-1, 4)
    return {"x": x, "y": (x[:, 0] > 0).astype(int), "owner": np.arange(len(x)) % 6}


def cut(labels, owners, n_clients, *, first: int = 0):
    return [np.flatnonzero((owners + first) % n_clients == k) for k in range(n_clients)]
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
    (tmp_path / "params.yaml").write_text(params)
    yield tmp_path, file
    sys.modules.pop(file.stem, None)


def test_an_edit_is_another_data_set_and_another_partition(study: tuple[Path, Path]) -> None:
    root, file = study
    settings = config.load(root)
    assert settings.own_extras, "`noniid run` asks the stage plan each time"
    name, where, options = settings.data.name, root, settings.data.options
    assert [*plan.contents(name, str(where), options)] == ["x.txt"]
    for named in (["x.txt"], {"train": ["x.txt", "none.txt"]}):  # in lists too
        assert [*plan.contents(name, str(where), {"files": named})] == ["x.txt"]
    run_stages(root, ("prepare", "partition", "train", "evaluate", "report"))
    indices = (root / "partitions" / "skewed-0" / INDICES).read_bytes()
    first = provenance.plan(settings)

    file.write_text(STUDY.replace("% n_clients ==", "// 2 % n_clients =="))
    del sys.modules[file.stem]
    second = provenance.plan(config.load(root))
    assert {stage for stage in first if first[stage] != second[stage]} == {
        "prepare",
        "partition",
        "deploy",
    }
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
        with pytest.raises(nd.UserError, match=f"^params.yaml: {words}") as error:
            config.load(root)
        assert "\n" not in str(error.value)
