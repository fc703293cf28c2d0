"""No file repeats a paper's sentence: no eight words in a row stand in a paper's text."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.pipelines.small import ROOT

TEXTS = ROOT.parent / "shared" / "papers"  # beside the checkout, not part of it
RUN = 8  # words
LETTERS = 7  # different words of letters only: rows of a table are no sentences
SUFFIXES = {".md", ".py", ".yaml", ".yml", ".j2", ".ipynb", ".toml"}
NUMBERS = "reported.yaml"  # a paper's tables, with the names of their columns
TITLE = re.compile(r"\A\s*.*|^#.*$", re.MULTILINE)  # of the paper, of a section
REFERENCES = re.compile(r"^\W*references\W*$", re.IGNORECASE | re.MULTILINE)
REFERENCE = re.compile(r"^\W*\d+[].].*$", re.MULTILINE)  # [1] or 1., to the end of the line


def runs(text: str) -> Iterator[tuple[str, ...]]:
    """All runs of `RUN` words with letters enough."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    for run in zip(*(words[k:] for k in range(RUN)), strict=False):
        if len({word for word in run if word.isalpha()}) >= LETTERS:
            yield run


def body(text: str) -> str:
    """Without titles and references, and without hyphens at line ends."""
    before, *after = REFERENCES.split(text)
    whole = TITLE.sub("", before + "".join(REFERENCE.sub("", part) for part in after))
    return re.sub(r"(?<=\w)-\s*\n\s*", "", whole)


def test_a_repeated_sentence_is_found() -> None:
    text = """
A title
We find that eight words in a row are many, e-
ven here.
## References
- [1] Others. Eight words of a title of some paper.
Appendix
The appendix counts.
"""
    assert {*runs("we find: that eight words in a row")} < {*runs(body(text))}
    assert "title" not in body(text) and "even here" in body(text) and "Appendix" in body(text)


def test_no_file_repeats_a_sentence_of_a_paper() -> None:
    texts = sorted(TEXTS.glob("*.txt"))
    if not texts:
        pytest.skip("the papers' texts are no part of the repository: ../shared/papers is missing")
    titles = {run for path in texts for run in runs("\n".join(TITLE.findall(path.read_text())))}
    theirs = {
        run: path.stem
        for path in texts
        for run in runs(body(path.read_text()))
        if run not in titles
    }
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    ours = [ROOT / name for name in listed.splitlines() if not name.endswith(NUMBERS)]
    found = {
        f"{path.relative_to(ROOT)}: {theirs[run]}: {' '.join(run)}"
        for path in ours
        if path.suffix in SUFFIXES and path.is_file()
        for run in runs(path.read_text())
        if run in theirs
    }
    assert sorted(found) == []
