"""One walk over all studies, tables, figures and claims of the five papers: they are sound, and
what they name exists."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from fedml_noniid.pipelines.experiment import check
from fedml_noniid.pipelines.experiment.config import checked
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.plugins import registry
from research import claims, verbs
from research.report import build, builder
from research.runs import Measured
from research.studies import PAPERS, SIZES, Study, of_paper
from research.table import addresses
from research.targets import NOT_HERE, Target, of_targets
from tests.pipelines.small import ROOT

TARGETS = [one for paper in PAPERS for one in of_targets(paper, ROOT).values()]
TABLES = [one for one in TARGETS if one.kind == "table"]
# What stands in tables beside the paper's own lines.
OURS = ("(leak)", "regulariser off", "Data sharing", "noisy test", "sent", "last round")
NO_PICTURE = ("table", "settings", "activations", "network", "example-network")
ALONE = {"FedAvg", "FedProx", "SCAFFOLD", "MOON", "FedNova"}  # of fnr-tab5
# A word of a title -> the methods that its runs must have.
METHODS: dict[str, set[str]] = {
    "FedAvg": set(),
    "FedProx": {"fedprox"},
    "Scaffold": {"scaffold"},
    "SCAFFOLD": {"scaffold"},
    "SGDM": {"sgdm"},
    "FedNova": {"fednova"},
    "FedBABU": {"fedbabu"},
    "FedRS": {"fedrs"},
    "FedLC": {"fedlc"},
    "CCVR": {"ccvr"},
    "FedDyn": {"feddyn"},
    "FedNLR": {"fednlr"},
    "MOON": {"moon"},
    "FNR-FL": {"fnr"},
    "FedNNNN": {"fednnnn"},
    "q-FedAvg": {"qfedavg"},
    "rFedAvg": {"rfedavg"},
    "rFedAvg+": {"rfedavg_plus"},
}


def all_studies(size: str) -> Iterator[Study]:
    """Those of tables and figures, and those of claims."""
    for paper in PAPERS:
        yield from of_paper(paper, size, ROOT).values()
        if size in claims.SIZES:
            yield from claims.of_paper(paper, size, ROOT).studies.values()


@pytest.mark.parametrize("size", SIZES)
def test_every_study_passes_every_check_that_comes_before_the_data(size: str) -> None:
    for study in all_studies(size):
        if not study.is_run:
            assert size == "small", f"{study.paper} {study.name}: its data or hours are dear"
            continue
        settings = checked(study.content, study.name)
        check.check(settings)
        assert settings.machine.checkpoint_every == 1, "rounds may take minutes"
        assert all(" " not in name for name in settings.recipe_names)
        if size == "smoke":
            assert settings.data.name in ("digits", "made_tweets") and settings.train.rounds <= 6
        if size == "small":
            assert settings.data.name in ("mnist", "cifar10")
        for name in settings.recipe_names:
            entry = study.content["recipes"][name] or {}
            leaks = "test" in str(entry) and "public_data" in str(entry)
            assert not leaks or "leak" in name, f"{study.name}: {name} leaks and does not say so"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.id)
def test_a_target_names_a_kind_and_runs_that_exist(target: Target, tmp_path: Path) -> None:
    """At size paper every address is run, so all is missing before the first run."""
    assert callable(builder(target))
    assert target.protocol
    built = build(target, Measured(target.paper, "paper", tmp_path))
    assert NOT_HERE not in (*built.missing, *itertools.chain(*built.table))
    panels, lines = target.spec.get("panels", []), target.spec.get("lines", {})
    places = {panel["title"] for panel in panels} | set(target.spec.get("columns", ()))
    for line in (*dict(lines).values(), *dict(target.spec.get("rows", {})).values()):
        assert set(line.get("at", {}) if isinstance(line, Mapping) else ()) <= places
    for panel in target.spec.get("picture", {"panels": {}})["panels"].values():
        assert set(panel.get("columns", ())) <= set(target.spec["columns"])
        assert panel.get("level") in (None, *target.spec["rows"])
    if target.kind in ("curves", "accuracy", "norms", "path", "convergence"):
        assert len(built.missing) == len(panels) * len(lines)
    if target.kind == "table":
        assert len(built.missing) == sum("study" in at for at in addresses(target).values())


@pytest.mark.parametrize("target", TABLES, ids=lambda target: target.id)
def test_titles_of_a_table_are_the_papers(target: Target) -> None:
    """Every line of the paper is there in its order. What is ours is named as such."""
    reported = target.reported or {"rows": {}, "columns": []}
    for axis in ("rows", "columns"):
        ours, theirs = dict(target.spec[axis]), list(reported[axis])
        if not theirs:
            continue
        assert [title for title in ours if title in theirs] == theirs
        for title in set(ours) - set(theirs):
            is_alone = target.id == "fnr-tab5" and title in ALONE
            assert is_alone or any(mark in title for mark in OURS), title
        assert {of["reported"] for of in ours.values() if "reported" in of} <= set(theirs)
    for row in reported["rows"].values():
        assert len(row) == len(reported["columns"])


@pytest.mark.parametrize("target", TABLES, ids=lambda target: target.id)
def test_a_cell_is_a_run_of_the_methods_in_its_title(target: Target) -> None:
    studies = of_paper(target.paper, "paper", ROOT)
    for (row, column), at in addresses(target).items():
        title = row if target.spec.get("methods", "rows") == "rows" else column
        words = [word.strip() for word in title.split("+")] if title not in METHODS else [title]
        if "study" not in at or not set(words) <= set(METHODS):
            continue
        content = studies[at["study"]].content
        entry = content["recipes"][at["recipe"]] or {}
        # An option of a method may be a method of its own, such as scaffold_i.
        names = registry.parse(str(entry.get("recipe", at["recipe"])))
        found = {re.sub("_(i|authors|server)$", "", name) for name in names}
        wanted = set[str]().union(*(METHODS[word] for word in words))
        if "Norm" in f"{row} {column}" and target.paper == "ccn":
            wanted |= {"ccn"}
        if "fednnnn" in (entry.get("recipe") or "") and "FedNNNN" not in words:
            found -= {"fednnnn"}  # with gamma 0 it weighs all clients alike
        assert found == wanted, (row, column)


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_is_made_from_runs(paper: str, tmp_path: Path) -> None:
    """Size smoke, from digits to the report: nothing is missing, every figure is drawn."""
    folder = verbs.run(Workspace.from_environment(tmp_path, {}), paper, "smoke")
    for target in of_targets(paper, tmp_path).values():
        text = (folder / f"{target.id}.md").read_text()
        assert "Not there yet" not in text, target.id
        if target.kind not in NO_PICTURE or "picture" in target.spec:
            picture = (folder / f"{target.id}.png").read_bytes()
            assert picture.startswith(b"\x89PNG") and len(picture) < 200_000, target.id
    assert "data:image/png;base64," in (folder / "report.html").read_text()
