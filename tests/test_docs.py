"""The documentation: the site builds with no broken link, and what the pages name exists.

Pages of other sites can't be reached where the tests run: of an address elsewhere only the form is
tested.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown.extensions.toc import slugify

import fedml_noniid
from fedml_noniid import models
from fedml_noniid.core.component import Setting
from fedml_noniid.core.options import RecipeError
from fedml_noniid.data import datasets
from fedml_noniid.data.partitions import PARTITIONS
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.plugins import registry
from tests.pipelines.own_files import write_own_files
from tests.pipelines.small import ROOT
from tools import pages

DOCS = ROOT / "docs"
# Results say by which command they were made, so they may name what is gone.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "results"),
]
LINE = "\n"
FETCHED = {  # attributes that make a browser load something while it shows a page
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "script": "src",
    "source": "src",
    "video": "src",
}


class Page(HTMLParser):
    """What a built page holds: ids, links, and what a browser fetches for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {value for key in ("id", "name") if (value := found.get(key))}
        if tag == "a" and (href := found.get("href")):
            self.links.append(href)
        if (fetched := found.get(FETCHED.get(tag, ""))) and found.get("rel") not in (
            "canonical",
            "next",
            "prev",
        ):
            self.fetched.append(fetched)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages of the built site by path. With `--quiet` warnings would not count."""
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
    assert (folder / "index.html").is_file()
    return {path: Page(path) for path in sorted(folder.rglob("*.html"))}


def well_formed(address: str) -> bool:
    """Whether an address of another site can be one. Nothing is asked."""
    parts = urlsplit(address)
    host = re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}(:\d+)?", parts.netloc.lower())
    return (
        parts.scheme in ("http", "https")
        and host is not None
        and not re.search(r"[\s<>\"`]|[.,;:]$", address)
    )


def test_the_site_builds_and_every_link_leads_somewhere(site: Mapping[Path, Page]) -> None:
    """mkdocs checks links in Markdown; this also checks those that extensions and the theme
    make."""
    broken = []
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if not well_formed(link):
                    broken.append(f"{path.name}: {link}")
                continue
            if path.name == "404.html":
                # the server shows it at any address, so its links begin at the site's root
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.is_file() or (
                anchor and target in site and anchor not in site[target].ids
            ):
                broken.append(f"{path.name}: {link}")
    assert broken == []
    assert sum(len(page.links) for page in site.values()) > 1000, "links are found at all"


def test_the_site_needs_no_network(site: Mapping[Path, Page]) -> None:
    """No font, script, style or picture comes from elsewhere."""
    found = [(path.name, name) for path, page in site.items() for name in page.fetched]
    assert found
    elsewhere = [one for one in found if urlsplit(one[1]).netloc]
    assert elsewhere == []
    folder = next(path.parent for path in site if path.name == "404.html")
    styles = list(folder.rglob("*.css"))
    assert styles
    assert [
        path.name
        for path in styles
        if re.search(r"(@import|url\()\s*['\"]?(https?:)?//", path.read_text())
    ] == []


def prose(text: str) -> str:
    """Markdown without its code."""
    return re.sub(
        r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )


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
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {
        slugify(re.sub(r"[`*]", "", found), "-")
        for found in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    }


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_every_link_of_a_page_beside_the_site_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose((ROOT / page).read_text()))
    assert links
    broken = []
    for link in links:
        parts = urlsplit(link)
        target = ROOT / parts.path
        inside = target.exists() and (not parts.fragment or parts.fragment in headings(target))
        if not (well_formed(link) if parts.scheme else inside):
            broken.append(link)
    assert broken == []


def code(page: Path) -> Iterator[str]:
    """Pieces of code of a page: spans, and the lines of its blocks."""
    text = page.read_text()
    for block in re.findall(r"^```[a-z]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield from re.sub(r"\\\n\s*", "", block).splitlines()
    yield from re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    folders = "plugins|pipelines|fedml_noniid|benchmarks|tests|tools|experiments|examples|docs"
    named = {
        found for piece in code(page) for found in re.findall(rf"^(?:{folders})/[\w./-]+$", piece)
    }
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


BY_PATH = dict(pages.every_command())


def unknown(words: list[str]) -> str | None:
    """What `noniid` does not know of a command line, or None. Values are not checked."""
    path: tuple[str, ...] = ()
    while words and (*path, words[0]) in BY_PATH:
        path, words = (*path, words[0]), words[1:]
    command = BY_PATH[path]
    if getattr(command, "commands", None) and words and not words[0].startswith("-"):
        return words[0]
    known = {"--help"}.union(*(set(p.opts) | set(p.secondary_opts) for p in command.params))
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    return next((option for option in options if option not in known), None)


def commands(page: Path, name: str) -> list[list[str]]:
    """The words behind `name` of each command line of a page."""
    found = []
    for piece in code(page):
        start = re.match(rf"(?:\$ )?(?:\.venv/bin/)?{name}(?: |$)", piece)
        if start:
            words = shlex.split(piece[start.end() :], comments=True)
            found.append([word for word in words if word not in ("&&", "...")])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    lines = commands(page, "noniid")
    # VERB stands for any verb.
    assert [line for line in lines if line[:1] != ["VERB"] and unknown(line)] == []
    targets = set(
        re.findall(
            r"^([a-z][a-z-]*(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE
        )
    )
    targets = {target for line in targets for target in line.split()}
    assert [words for words in commands(page, "make") if words and words[0] not in targets] == []


def test_the_pages_of_commands_and_of_python_are_whole(site: Mapping[Path, Page]) -> None:
    ids = {path.name: page.ids for path, page in site.items()}
    assert len(BY_PATH) > 15
    assert {"-".join(("noniid", *path)) for path in BY_PATH} <= ids["command_line.html"]
    assert {f"fedml_noniid.api.{name}" for name in fedml_noniid.__all__} <= ids["python.html"]


def test_an_example_of_a_docstring_becomes_a_block() -> None:
    text = "First line.\n\n>>> a = 1\n>>> a\n1\n\nMore, with a >>> b.\n\n>>> a"
    block = "```pycon\n>>> a = 1\n>>> a\n1\n```"
    assert (
        pages.fenced(text)
        == f"First line.\n\n{block}\n\nMore, with a >>> b.\n\n```pycon\n>>> a\n```"
    )


def test_the_table_of_methods_has_every_method_and_no_other() -> None:
    rows = re.findall(r"^\| .* \|$", (DOCS / "methods.md").read_text(), flags=re.MULTILINE)[1:]
    assert sorted(row.split("|")[2].strip(" `") for row in rows) == sorted(
        ["fedavg", *registry.METHODS]
    )


@pytest.mark.parametrize(
    ("missing", "reason", "sentence"),
    [
        ("classes", "needs targets that are classes", r"with these losses: (.*?)\. All others"),
        ("features", "needs a linear classifier", r"need of it\n\n(.*?)\suse the linear layer"),
        ("activations", "needs the activations", r"(\w+) needs the activations of all layers"),
    ],
)
def test_the_page_of_networks_lists_the_methods_that_need_more(
    missing: str, reason: str, sentence: str
) -> None:
    """By the names of methods.md. There a row with a dash is another reading of the row above."""
    rows = re.findall(
        r"^\| (- )?\W*([\w+ -]+)[^|]* \| `(\w+)` \|",
        (DOCS / "methods.md").read_text(),
        flags=re.MULTILINE,
    )
    setting = Setting(n_clients=9, cohort=6, n_public=9)._replace(**{missing: False})
    refused, name = set(), ""
    for dash, found, method in rows:
        name = name if dash else found.lower()
        try:
            registry.build(method, {}, setting)
        except RecipeError as error:
            refused.add(name if reason in str(error) else f"{method}: {error}")
    (listed,) = re.findall(sentence, (DOCS / "own_network.md").read_text(), flags=re.DOTALL)
    assert sorted(re.split(r",\s|\sand the\s", listed.lower())) == sorted(refused)


def test_the_page_of_settings_names_every_choice_and_key() -> None:
    pieces = re.findall(r"`([^`\n]+)`", (DOCS / "settings.md").read_text())
    named = set(re.findall(r"\w+", " ".join(pieces)))
    keys = {
        *config.TrainSettings.model_fields,
        *config.Config.model_fields,
        *config.MachineSettings.model_fields,
    }
    options = {
        parameter.name
        for partition in PARTITIONS.values()
        for parameter in inspect.signature(partition).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert "alpha" in options
    assert {*datasets.DATASETS, *PARTITIONS, *models.MODELS, *keys, *options} - named == set()


def block(name: str) -> str:
    """The code of a part of README.md that docs/index.md shows too."""
    found = re.search(
        rf"\[start:{name}\] -->\n```[a-z]+\n(.*?)```",
        (ROOT / "README.md").read_text(),
        flags=re.DOTALL,
    )
    assert found is not None
    return found[1]


def test_the_front_page_and_the_first_deployment_are_short() -> None:
    """A reader decides on one page. What is longer has a page of its own below docs."""
    text = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(text.split()) <= 900
    first = text.partition("![")[0]
    assert "noniid run" in first and len(first.splitlines()) < 60, "it trains on the first screen"
    assert len((DOCS / "first_deployment.md").read_text().splitlines()) <= 60


def test_the_pages_stay_within_their_words() -> None:
    """Results and the reference that is made of docstrings and helps do not count."""
    words = sum(len(page.read_text().split()) for page in PAGES if page.is_relative_to(DOCS))
    assert words <= 28_000


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


def test_a_release_is_told_in_a_few_words() -> None:
    """And what breaks is told first."""
    for release in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        assert len(release.split()) <= 1350, release[:20]
        assert release.find("### Breaking") in (-1, release.find("###")), release[:20]


@pytest.mark.slow
def test_the_five_minutes_of_the_readme_end_with_a_table_and_pictures(tmp_path: Path) -> None:
    """The commands as they stand, in an empty folder, where the package is installed."""
    pytest.importorskip("palmerpenguins", reason="of the extra [dev]")
    install = "pip install palmerpenguins\n"
    assert block("five").startswith(install)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block("five").removeprefix(install)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    study = tmp_path / "study"
    last = ran.stdout[ran.stdout.rindex("report.html") - 3000 :]
    assert all(recipe in last for recipe in ("fedavg", "scaffold", "fedprox"))
    assert (study / "report" / "report.html").is_file()
    assert list((study / "partitions").glob("*/heatmap.png"))
