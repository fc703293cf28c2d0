"""What is found of a user's functions: the module of a name, and the files that they read."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import validated
from fedml_noniid.data.user_files import user_files
from fedml_noniid.engines.run_settings import RunSettings
from fedml_noniid.models.settings import NetworkSettings
from fedml_noniid.own_code import function_of, look_in, source_of
from fedml_noniid.pipelines.experiment.scenario import Scenario

CODE = """\
from torch import nn

def read(root="unread", *, file="a.txt", others=("inner", "none.txt")): ...
def cut(labels, n_clients, file="a.txt"): ...
def first(outputs, labels, file="a.txt"): ...
def net(n_classes, file="a.txt"): return nn.Linear(8, n_classes)
"""
OWN = "files_of_mine"
LR = {"optimizer": "sgd", "lr": 0.1, "epochs": 1, "batch_size": 4}
# What the settings are made of, with options of the function.
USES: dict[str, Callable[..., dict[str, str]]] = {
    "partition": lambda **options: validated(
        Scenario, {"partition": f"{OWN}:cut", "clients": 2, **options}
    ).own_code(),
    "metric": lambda **options: validated(
        RunSettings, LR | {"metrics": {f"{OWN}:first": options}}
    ).own_code(),
    "network": lambda **options: NetworkSettings(
        model=f"{OWN}:net", model_options=options
    ).model_code(),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / f"{OWN}.py").write_text(CODE)
    for name in ("a.txt", "b.txt", "inner/c.txt", "unread/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("first")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop(OWN, None)


def test_a_module_that_another_one_hides_is_named_with_its_file(tmp_path: Path) -> None:
    """Python's own come first."""
    (tmp_path / "statistics.py").write_text("def cut(): ...")
    look_in(tmp_path)
    for name, words in (
        ("statistics:cut", "module 'statistics' has no attribute 'cut'"),
        ("statistics.inner:cut", "No module named 'statistics.inner'; .* not a package"),
    ):
        expected = f"'{name}' can't be imported, .*{words} in {re.escape(statistics.__file__)};"
        with pytest.raises(UserError, match=expected):
            function_of("partition", name, {})


def test_a_reader_s_defaults_name_files_where_no_option_does(tmp_path: Path) -> None:
    """Relative to the folder of the data, which the function gets itself."""
    assert [*user_files(f"{OWN}:read", tmp_path, {})] == ["a.txt", "inner/c.txt"]
    assert [*user_files(f"{OWN}:read", tmp_path, {"file": "b.txt"})] == ["b.txt", "inner/c.txt"]


@pytest.mark.parametrize("use", USES)
def test_a_file_that_an_option_or_a_default_names_counts(use: str) -> None:
    of = USES[use]
    first, other = of(), of(file="b.txt")
    (name,) = first
    assert of(file="none.txt")[name] == source_of(OWN), "no file is there"
    assert len({source_of(OWN), first[name]}) == 2
    Path("a.txt").write_text("second")
    assert of() != first and of(file="b.txt") == other
    Path("b.txt").write_text("second")
    assert of(file="b.txt") != other
