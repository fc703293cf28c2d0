"""The documentation: the site builds with no broken link, and what the pages name exists.

Pages of other sites can't be reached where the tests run: of an address elsewhere only the form is
tested.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from markdown.extensions.toc import slugify

import fedml_noniid
from fedml_noniid import models
from fedml_noniid.api import settings
from fedml_noniid.data import datasets
from fedml_noniid.data.partitions import PARTITIONS
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.plugins import registry
from tests.cli.test_help import VERBS, unknown
from tests.pipelines.own_files import write_own_files
from tests.pipelines.small import ROOT

README, DOCS = ROOT / "README.md", ROOT / "docs"
# Results say by which command they were made, so they may name what is gone.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "results"),
]
LINE = "\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. mkdocs warns of links and anchors that lead nowhere; a warning is an
    error."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # the theme's news about itself
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def well_formed(address: str) -> bool:
    """Whether an address of another site can be one. Nothing is asked."""
    parts = urlsplit(address)
    host = re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}(:\d+)?", parts.netloc.lower())
    return (
        parts.scheme in ("http", "https")
        and host is not None
        and not re.search(r"[\s<>\"`]|[.,;:]$", address)
    )


def prose(text: str, spans: bool = True) -> str:
    """Markdown without its blocks of code, and without its `spans`."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text) if spans else text


# Their blocks are whole programs. Other pages have parts of files, which their own tests put
# together, or programs that take minutes.
PROGRAMS = ("own_data", "own_network", "python", "settings")
BLOCKS = [
    pytest.param(found[1], id=f"{name}:{text[: found.start()].count(LINE) + 1}")
    for name in PROGRAMS
    for text in [(DOCS / f"{name}.md").read_text()]
    for found in re.finditer(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_python_runs_alone(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder with the tables, texts and images that the pages name."""
    monkeypatch.chdir(tmp_path)
    write_own_files(tmp_path)
    shutil.rmtree("signals")  # a block makes it
    exec(compile(block, "block.py", "exec"), {"__name__": "page"})


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    found = re.findall(r"^#+ (.*)$", prose(page.read_text(), spans=False), flags=re.MULTILINE)
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in found}


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_every_link_of_a_page_beside_the_site_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose((ROOT / page).read_text()))
    assert links
    for link in links:
        parts = urlsplit(link)
        target = ROOT / parts.path
        inside = target.exists() and (not parts.fragment or parts.fragment in headings(target))
        assert well_formed(link) if parts.scheme else inside, link


def code(page: Path) -> Iterator[str]:
    """Pieces of code of a page: spans, and the lines of its blocks."""
    text = page.read_text()
    for block in re.findall(r"^```[a-z]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield from re.sub(r"\\\n\s*", "", block).splitlines()
    yield from re.findall(r"`([^`\n]+)`", prose(text, spans=False))


def commands(page: Path, name: str) -> Iterator[list[str]]:
    """The words behind `name` of each command line of a page."""
    for piece in code(page):
        if start := re.match(rf"(?:\$ )?(?:\.venv/bin/)?{name}(?: |$)", piece):
            words = shlex.split(piece[start.end() :], comments=True)
            yield [word for word in words if word not in ("&&", "...")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_files_that_a_page_names_exist(page: Path) -> None:
    lines = commands(page, "noniid")
    # VERB stands for any verb.
    assert [line for line in lines if line[:1] != ["VERB"] and unknown(line)] == []
    rules = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    assert [words for words in commands(page, "make") if words and words[0] not in targets] == []
    folders = "plugins|pipelines|fedml_noniid|benchmarks|tests|tools|experiments|examples|docs"
    pieces = "\n".join(code(page))
    named = {*re.findall(rf"^(?:{folders})/[\w./-]+$", pieces, flags=re.MULTILINE)}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_pages_of_commands_and_of_python_are_whole(site: Path) -> None:
    """And no page loads a font, script, style or picture from elsewhere."""
    pages_ = {path.name: path.read_text() for path in site.rglob("*.html")}
    ids = {name: {*re.findall(r'id="([^"]+)"', text)} for name, text in pages_.items()}
    assert len(VERBS) > 15
    assert {"-".join(("noniid", *path)) for path in VERBS} <= ids["command_line.html"]
    assert {f"fedml_noniid.api.{name}" for name in fedml_noniid.__all__} <= ids["python.html"]
    loads = r'<(?:script|img|iframe|link rel="(?:stylesheet|icon)")[^>]*(?:src|href)="?(https?:|//)'
    assert [name for name, text in pages_.items() if re.search(loads, text)] == []


def test_the_table_of_methods_has_every_method_and_no_other() -> None:
    rows = re.findall(r"^\| .* \|$", (DOCS / "methods.md").read_text(), flags=re.MULTILINE)[1:]
    assert sorted(row.split("|")[2].strip(" `") for row in rows) == sorted(
        ["fedavg", *registry.METHODS]
    )


def test_the_page_of_settings_names_every_choice_and_key() -> None:
    pieces = re.findall(r"`([^`\n]+)`", (DOCS / "settings.md").read_text())
    named = set(re.findall(r"\w+", " ".join(pieces)))
    names = {*datasets.DATASETS, *PARTITIONS, *models.MODELS, *settings.sections()}
    assert "alpha" in names and names - named - {*registry.names()} == set()
    assert {*config.Config.model_fields} - named == set()


def test_pages_are_short() -> None:
    """A reader decides on one page. Results, and the reference that is made of docstrings and
    helps, do not count."""
    text = re.sub(r"<!--.*?-->", "", README.read_text(), flags=re.DOTALL)
    assert len(text.split()) <= 900
    first = text.partition("![")[0]
    assert "noniid run" in first and len(first.splitlines()) < 60, "it trains on the first screen"
    assert len((DOCS / "first_deployment.md").read_text().splitlines()) <= 60
    assert sum(len(p.read_text().split()) for p in PAGES if p.is_relative_to(DOCS)) <= 28_000


def test_the_lines_of_fedml_are_those_of_the_project() -> None:
    """Slow tests run the project in FedML's own runner."""
    lines = re.findall(
        r"^## In a FedML project$.*?^```python\n(.*?)^```",
        (ROOT / "README.md").read_text(),
        flags=re.DOTALL | re.MULTILINE,
    )
    ours = [line.strip() for line in lines[0].splitlines() if line]
    main = (ROOT / "examples" / "fedml_project" / "main.py").read_text()
    theirs = [line.strip() for line in main.splitlines()]
    assert len(ours) == 11
    assert [line for line in theirs if line in ours] == ours, "all of them, in the same order"


@pytest.mark.slow
def test_the_five_minutes_of_the_readme_end_with_a_table_and_pictures(tmp_path: Path) -> None:
    """The commands as they stand, in an empty folder, where the package is installed."""
    pytest.importorskip("palmerpenguins", reason="of the extra [dev]")
    found = re.search(r"\[start:five\] -->\n```[a-z]+\n(.*?)```", README.read_text(), re.DOTALL)
    install = "pip install palmerpenguins\n"
    assert found is not None and found[1].startswith(install)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", found[1].removeprefix(install)]
    how = {"cwd": tmp_path, "env": {**os.environ, "PATH": path}, "capture_output": True}
    ran = subprocess.run(command, **how, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    last = ran.stdout[ran.stdout.rindex("report.html") - 3000 :]
    assert all(recipe in last for recipe in ("fedavg", "scaffold", "fedprox"))
    assert (tmp_path / "study" / "report" / "report.html").is_file()
    assert list((tmp_path / "study" / "partitions").glob("*/heatmap.png"))
    assert "dvc.lock is the certificate" in ran.stdout
