"""docs/adding_a_method.md shows the repository's own FedExP: file, entry, row and test, and what is
refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedml_noniid.core.component import Exclusive
from fedml_noniid.core.options import RecipeError
from fedml_noniid.plugins import registry
from fedml_noniid.plugins.baselines.fedexp import FedExP
from tests import federation

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "adding_a_method.md"
COMPONENT, REGISTRY, TABLE, BY_HAND = re.findall(
    r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL
)
(COMMAND,) = re.findall(r"```bash\npython (.*?)\n```", GUIDE.read_text())


def test_the_page_shows_the_files_as_they_are() -> None:
    """The site reads whole files from the repository, and fails where there is none."""
    assert COMPONENT == '--8<-- "plugins/baselines/fedexp.py"\n'
    assert BY_HAND == '--8<-- "tests/methods/test_fedexp.py"\n'
    for path, lines in (("plugins/registry.py", REGISTRY), ("tests/recipe_table.py", TABLE)):
        text = (ROOT / path).read_text().splitlines()
        assert lines and not [line for line in lines.splitlines() if text.count(line) != 1], path


def test_no_other_code_names_the_method() -> None:
    """So the edits of the page are all that it takes."""
    files = [
        path
        for folder in ("plugins", "pipelines", "fedml_noniid", "research", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\bfedexp\b|\bFedExP\b(?!'s)", path.read_text())
    ]
    found = {path.resolve().relative_to(ROOT).as_posix() for path in files}
    assert found == {"plugins/registry.py", "plugins/baselines/fedexp.py"}


@pytest.mark.slow
def test_the_walks_meet_the_method() -> None:
    """The command of the page, which only collects here: the suite runs what it finds."""
    done = subprocess.run(
        [sys.executable, *COMMAND.split(), "--collect-only", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^(tests/\S+?)::\S*fedexp", done.stdout, flags=re.MULTILINE)
    assert {"tests/test_contract.py", "tests/test_parity.py"} <= set(found)
    assert len(found) >= 15


def test_an_undeclared_step_is_refused_in_the_words_of_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (
        "'fedexp' changes the server step without owning it; add Exclusive.SERVER_STEP to "
        "`exclusive`"
    )
    assert words in GUIDE.read_text()
    unclaimed = type("FedExP", (FedExP,), {"exclusive": frozenset[Exclusive]()})
    monkeypatch.setitem(registry.METHODS, "fedexp", unclaimed)
    with pytest.raises(RecipeError, match=re.escape(words)):
        federation.run("fedexp", rounds=1)
