"""docs/adding_a_method.md is run as it stands: its edits in a copy of the tree, and what it says is
refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fedml_noniid.plugins import recipes
from fedml_noniid.plugins.core.component import (
    Component,
    Exclusive,
)
from fedml_noniid.plugins.core.options import RecipeError
from tests import federation

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "adding_a_method.md"
COMPONENT, REGISTRY, TABLE, BY_HAND, PAIR = re.findall(
    r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL
)
(COMMAND,) = re.findall(r"```bash\npython (.*?)\n```", GUIDE.read_text())


@pytest.fixture
def fedexp(monkeypatch: pytest.MonkeyPatch) -> type[Component]:
    """The guide's component, as a module of its own and registered under its name."""
    module = types.ModuleType("fedexp_of_the_guide")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(COMPONENT, str(GUIDE), "exec"), module.__dict__)
    found: type[Component] = module.__dict__["FedExP"]
    monkeypatch.setitem(recipes.METHODS, found.name, found)
    return found


def put(path: Path, behind: str, line: str) -> None:
    text = path.read_text()
    assert text.count(behind) == 1, f"{path.name}: {behind!r}"
    path.write_text(text.replace(behind, behind + line))


def test_after_the_three_edits_the_suites_pass(tmp_path: Path) -> None:
    """The command that the page gives, in a copy of the tree."""
    for folder in ("plugins", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copytree(ROOT / "fedml_noniid", tmp_path / "fedml_noniid", symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "plugins" / "baselines" / "fedexp.py").write_text(COMPONENT)
    imported, entry = REGISTRY.splitlines(keepends=True)
    put(tmp_path / "plugins" / "recipes.py", "import FedDynAuthors\n", imported)
    put(tmp_path / "plugins" / "recipes.py", "    for kind in (\n", entry)
    row, unsound = TABLE.splitlines(keepends=True)
    put(
        tmp_path / "tests" / "recipe_table.py",
        "PARAMETERS: dict[str, dict[str, object]] = {\n",
        row,
    )
    put(tmp_path / "tests" / "recipe_table.py", "UNSOUND = {\n", unsound)
    (tmp_path / "tests" / "methods" / "test_fedexp.py").write_text(BY_HAND)
    done = subprocess.run(
        [sys.executable, *COMMAND.split(), "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 15, "the walks meet the method"


def test_an_undeclared_step_is_refused_in_the_words_of_the_page(
    fedexp: type[Component], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of the page."""
    words = (
        "'fedexp' changes the server step without owning it; add Exclusive.SERVER_STEP to "
        "`exclusive`"
    )
    assert words in GUIDE.read_text()
    unclaimed = type("FedExP", (fedexp,), {"exclusive": frozenset[Exclusive]()})
    monkeypatch.setitem(recipes.METHODS, "fedexp", unclaimed)
    with pytest.raises(RecipeError, match=re.escape(words)):
        federation.run("fedexp", rounds=1)


def test_the_pair_is_made_by_name(fedexp: type[Component]) -> None:
    pytest.importorskip("fedml", reason="a pair extends FedML's classes")
    made: dict[str, type] = {}
    exec(PAIR, made)
    assert {made["FedExPTrainer"].recipe, made["FedExPAggregator"].recipe} == {"fedexp"}  # type: ignore[attr-defined]  # set by `make_pair`
