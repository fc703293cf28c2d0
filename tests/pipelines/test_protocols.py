"""The page of each paper in docs/protocols names the choices that its studies make and the paper
does not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from fedml_noniid.pipelines.papers.studies import PAPERS, of_paper
from tests.pipelines.small import ROOT


def choices(content: Mapping[str, Any]) -> Iterator[str]:
    """What stands for each choice of a study on the page, as a regular expression."""
    if content["data"]["name"] != "sent140":
        yield "normalise"
    for name in content["scenario_names"]:
        scenario = content["scenarios"][name]
        if scenario["partition"] in ("dirichlet", "quantity", "mixed", "iid_unbalanced"):
            yield "`min_size`"
        if scenario["partition"] == "dirichlet":
            yield "`cap"
    for name in content["recipe_names"]:
        methods = str((content["recipes"][name] or {}).get("recipe", name)).split("+")
        # They average the models uniformly by default, where the other methods weigh them by size.
        for method, title in (("scaffold", "SCAFFOLD"), ("feddyn", "FedDyn")):
            if method in methods:
                yield rf"{title}[^|]*average.*uniform|{title} averaged by size"


@pytest.mark.parametrize("paper", PAPERS)
def test_a_papers_page_names_what_its_studies_choose(paper: str) -> None:
    page = (ROOT / "docs" / "protocols" / f"{paper}.md").read_text()
    wanted = {
        choice
        for study in of_paper(paper, "paper", ROOT).values()
        for choice in choices(study.content)
    }
    assert {choice for choice in wanted if not re.search(choice, page)} == set()
