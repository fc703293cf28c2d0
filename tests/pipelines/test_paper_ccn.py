"""CCN's tables and figures: they are the paper's, their studies are sound, and pictures say what
the numbers say."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedml_noniid.pipelines.experiment.config import read_yaml
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers import report as stage
from fedml_noniid.pipelines.papers import study
from fedml_noniid.pipelines.papers.runs import Measured
from fedml_noniid.pipelines.papers.studies import SIZES, of_paper
from fedml_noniid.pipelines.papers.targets import Built, address, build, builder, of_targets
from fedml_noniid.plugins import recipes
from tests.pipelines.by_hand import assert_titles_as_reported, paper, run, sound
from tests.pipelines.small import ROOT

# A warning of mlflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

TARGETS = ["ccn-fig1", "ccn-fig2", "ccn-tab1", "ccn-tab2", "ccn-tab3"]
TABLES = ["ccn-tab1", "ccn-tab2", "ccn-tab3"]
SCHEMES = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox",
    "SCAFFOLD": "scaffold",
    "SGDM": "sgdm",
    "FedNova": "fednova",
    "FedBABU": "fedbabu",
}
PNG = b"\x89PNG\r\n"


def test_the_paper_s_tables_and_figures_are_there() -> None:
    found = of_targets("ccn", ROOT)
    assert sorted(found) == TARGETS
    for target in found.values():
        assert builder(target) is not None and len(target.protocol) > 2


@pytest.mark.parametrize("name", TABLES)
def test_titles_are_those_of_the_reported_numbers(name: str) -> None:
    assert_titles_as_reported(of_targets("ccn", ROOT)[name])


@pytest.mark.parametrize("name", ["ccn-tab1", "ccn-tab2"])
def test_printed_gains_are_differences_but_for_the_one_that_is_misprinted(name: str) -> None:
    reported = read_yaml(ROOT / "pipelines" / "papers" / "ccn" / "reported.yaml")[name]
    odd = {
        (scheme, column)
        for scheme, row in reported["rows"].items()
        for place, column in enumerate(reported["columns"][2:])
        if abs(row[place + 2] - row[place] - reported["gains"][scheme][place + 2]) > 0.005
    }
    assert odd == ({("FedNova", "Normalized, 10 Clients")} if name == "ccn-tab2" else set())


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_is_a_run_of_its_scheme_in_its_setting(name: str) -> None:
    """Normalised cells run the scheme of their title with ccn, original ones without; so is the
    skew the title's."""
    target, studies = of_targets("ccn", ROOT)[name], of_paper("ccn", "paper", ROOT)
    for row, own in target.spec["rows"].items():
        for column, other in target.spec["columns"].items():
            at, title = address(name, column, own, other), f"{row} {column}"
            content = studies[at["study"]].content
            assert (
                at["scenario"] in content["scenario_names"]
                and at["recipe"] in content["recipe_names"]
            )
            (scheme,) = (method for word, method in SCHEMES.items() if word in title)
            expected = set() if scheme == "fedavg" else {scheme}
            assert set(recipes.parse(at["recipe"])) == expected | (
                {"ccn"} if "Norm" in title else set()
            )
            scenario = content["scenarios"][at["scenario"]]
            alpha, clients = re.search(r"=(\S+?)(,|$| )", title), re.search(r"(\d+) Clients", title)
            if alpha:
                assert scenario["alpha"] == float(alpha[1]) and scenario["clients"] == (
                    100 if name[-1] == "3" else 50
                )
            else:
                assert clients is not None and scenario["clients"] == int(clients[1])
            assert content["train"]["optimizer"] == (
                "sgd" if scheme in ("scaffold", "sgdm", "fednova") else "adam"
            )


def test_the_exact_setting_is_the_paper_s() -> None:
    """Section IV-A: VGG-16, two local epochs, 200 rounds, batches of 64; the data sets of the
    tables."""
    studies = of_paper("ccn", "paper", ROOT)
    for one in studies.values():
        train = one.content["train"]
        assert (train["model"], train["epochs"], train["rounds"], train["batch_size"]) == (
            "vgg16",
            2,
            200,
            64,
        )
        assert one.content["data"]["name"] == one.name.split("-")[0].replace(
            "similarity", "cinic10"
        )
        assert all(
            entry["ccn"]["T"] < 1
            for name, entry in one.content["recipes"].items()
            if "+ccn" in name
        )
    assert studies["femnist-sgd"].content["data"]["size"] == [32, 32]


@pytest.mark.parametrize("size", SIZES)
def test_every_study_is_a_sound_experiment(size: str, tmp_path: Path) -> None:
    for one in of_paper("ccn", size, ROOT).values():
        settings = sound(one, tmp_path)
        assert all(" " not in name and "leak" not in name for name in settings.recipe_names)
        if size == "smoke":
            assert settings.data.name == "digits" and settings.train.rounds <= 6
        if size == "small":
            assert settings.data.name in ("mnist", "cifar10")
            assert settings.data.options.get("size") == {"cifar10": [16, 16]}.get(
                settings.data.name
            )


def test_smoke_has_no_more_than_150_items() -> None:
    contents = [one.content for one in of_paper("ccn", "smoke", ROOT).values()]
    items = [len(c["seeds"]) * len(c["scenario_names"]) * len(c["recipe_names"]) for c in contents]
    assert 100 <= sum(items) <= 150


SIMILARITY = """\
f:
  kind: similarity
  title: A figure
  protocol: []
  study: one
  scenario: near
  original: a
  normalised: b
  apart: 3
"""


def cosines(*rounds: list[float]) -> dict[str, torch.Tensor]:
    values = torch.tensor(rounds)
    weights = torch.tensor([0.25, 0.25, 0.5]).double().expand(len(rounds), 3).contiguous()
    return {"round/similarity_to_global": values, "ccn/weights": weights}


def made(root: Path) -> Built:
    return build(of_targets("ccn", root)["f"], Measured("ccn", "smoke", root))


def rows(built: Built) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(built.files["csv"].decode())))


def test_similarity(tmp_path: Path) -> None:
    """Client 3: 0.5, 0.7 (mean 0.6) becomes 0.7, 0.9 (0.8) on seed 0, and 0.6 becomes 0.7 on seed
    1: +0.2 and +0.1.

    Mean +0.15, deviation 0.1 / sqrt(2) = 0.07071. The others: 0.9 becomes 0.8 on both, a difference
    without a spread.
    """
    paper(tmp_path, SIMILARITY)
    run(tmp_path, "near", "a", 0, [0.1, 0.2], recorded=cosines([0.9, 0.9, 0.5], [0.9, 0.9, 0.7]))
    run(tmp_path, "near", "b", 0, [0.1, 0.2], recorded=cosines([0.8, 0.8, 0.7], [0.7, 0.9, 0.9]))
    run(tmp_path, "near", "a", 1, [0.1, 0.2], recorded=cosines([0.9, 0.9, 0.6], [0.9, 0.9, 0.6]))
    run(tmp_path, "near", "b", 1, [0.1, 0.2], recorded=cosines([0.8, 0.8, 0.6], [0.8, 0.8, 0.8]))
    run(
        tmp_path, "near", "b", 2, [0.1, 0.2], recorded=cosines([0.1, 0.1, 0.1], [0.1, 0.1, 0.1])
    )  # alone
    built = made(tmp_path)
    assert built.files["png"].startswith(PNG) and built.missing == ()
    client, others, weight = built.words
    assert (
        "with FedAvg and 0.7500 normalised: +0.15000, 95 % interval -0.48531 to +0.78531 over"
        in client
    )
    assert "0.6000 with FedAvg" in client and client.startswith("Client 3: ")
    assert client.endswith("over 2 seeds: undecided.")
    assert "is 0.9000 with FedAvg and 0.8000 normalised: -0.10000" in others
    assert (
        "a weight of 0.500 on average, where an equal weight is 0.333; client 3 has most" in weight
    )
    line = rows(built)[5]  # seed 0, round 2, client 3
    assert (line["seed"], line["round"], line["client"]) == ("0", "2", "3")
    assert float(line["similarity_original"]) == pytest.approx(0.7, abs=1e-6)
    assert float(line["similarity_normalised"]) == pytest.approx(0.9, abs=1e-6)
    assert float(line["weight_normalised"]) == 0.5 and len(rows(built)) == 2 * 2 * 3


def test_similarity_on_one_seed_and_with_parts_missing(tmp_path: Path) -> None:
    paper(tmp_path, SIMILARITY)
    assert made(tmp_path).missing == ("original", "normalised")
    run(tmp_path, "near", "a", 0, [0.1], recorded=cosines([0.9, 0.9, 0.5]))
    assert made(tmp_path) == Built((), {}, (), ("normalised",))
    run(tmp_path, "near", "b", 1, [0.1], recorded=cosines([0.9, 0.9, 0.5]))
    assert made(tmp_path).missing == ("a seed that both have",)
    run(tmp_path, "near", "b", 0, [0.1], recorded=cosines([0.9, 0.9, 0.25]))
    built = made(tmp_path)
    assert "normalised: -0.25000 on one seed: no evidence either way" in built.words[0]


def test_a_change_that_is_undecided_is_said(tmp_path: Path) -> None:
    """+0.3 and -0.1: mean 0.1, half an interval 12.7062 * 0.4 / 2 = 2.54124."""
    paper(tmp_path, SIMILARITY)
    for seed, end in ((0, 0.8), (1, 0.4)):
        run(tmp_path, "near", "a", seed, [0.1], recorded=cosines([0.9, 0.9, 0.5]))
        run(tmp_path, "near", "b", seed, [0.1], recorded=cosines([0.9, 0.9, end]))
    told = "+0.10000, 95 % interval -2.44124 to +2.64124 over 2 seeds: undecided."
    assert told in made(tmp_path).words[0]


CONVERGENCE = """\
f:
  kind: convergence
  title: A figure
  protocol: []
  scale: 100
  panels: [{title: Left, study: one, scenario: near}, {title: Right, study: one, scenario: far}]
  lines:
    {A: {recipe: a}, "A, normalised": {recipe: b}, C: {recipe: c}, "C, normalised": {recipe: d}}
  dashed: {A: "A, normalised", C: "C, normalised"}
"""


def test_convergence(tmp_path: Path) -> None:
    """Eight rounds, so a quarter is two.

    A gains 4, 2, then 0, and at last -1, -3 points; C gains 1 in every round.

    First quarter: A (4 + 2) / 2 = 3, C 1, mean 2. Last: A (-1 - 3) / 2 = -2, C 1, mean -0.5. Above:
    2 + 8 of 16.
    """
    paper(tmp_path, CONVERGENCE)
    base = [0.5] * 8
    gains = [0.04, 0.02, 0, 0, 0, 0, -0.01, -0.03]
    run(tmp_path, "near", "a", 0, base)
    run(tmp_path, "near", "b", 0, [x + g for x, g in zip(base, gains, strict=True)])
    run(tmp_path, "near", "b", 1, [0.99] * 8)  # has no partner
    run(tmp_path, "near", "c", 0, base)
    run(tmp_path, "near", "c", 1, [0.1] * 8)  # nor has this
    run(tmp_path, "near", "d", 0, [0.51] * 8)
    built = made(tmp_path)
    assert built.files["png"].startswith(PNG)
    assert built.words == (
        "Left: the normalised line is above the original in 10 of 16 rounds of 2 schemes; on "
        "average by +2.00 points "
        "in the first quarter of the rounds and by -0.50 in the last; after the last round it "
        "is ahead for C.",
    )
    assert built.missing == ("Right, A", "Right, A, normalised", "Right, C", "Right, C, normalised")


def test_convergence_without_runs(tmp_path: Path) -> None:
    built = made(paper(tmp_path, CONVERGENCE))
    assert built.words == () and built.files == {} and len(built.missing) == 8


def test_figure_1_end_to_end(tmp_path: Path) -> None:
    """From digits to the report, in a folder of its own; the normalisation prefers the client that
    is apart."""
    shutil.copytree(
        ROOT / "pipelines" / "papers" / "ccn", tmp_path / "pipelines" / "papers" / "ccn"
    )
    here = Workspace.of(tmp_path, {})
    study.execute(here, of_paper("ccn", "smoke", tmp_path)["similarity"])
    stage.run(here, "ccn", "smoke")
    place = tmp_path / "papers" / "built" / "ccn" / "smoke"
    assert {f"{name}.md" for name in TARGETS} < set(os.listdir(place / "report"))
    assert (place / "report" / "ccn-fig1.png").stat().st_size < 200_000
    assert "Not there yet: FedAvg, Original" in (place / "report" / "ccn-tab1.md").read_text()
    with (place / "report" / "ccn-fig1.csv").open() as file:
        found: list[Any] = list(csv.DictReader(file))
    assert len(found) == 2 * 6 * 3
    weights = {
        k: [float(row["weight_normalised"]) for row in found if row["client"] == k] for k in "123"
    }
    assert min(weights["3"]) > max(weights["1"] + weights["2"])
    assert all(sum(three) == pytest.approx(1) for three in zip(*weights.values(), strict=True))
    held = (
        (place / "studies" / "similarity" / "partitions" / "three-0" / "clients.csv")
        .read_text()
        .splitlines()
    )
    assert len({line.split(",")[1] for line in held[1:]}) == 1, "clients of equal size"
