"""The page of the claims: made of the committed numbers, and its first table says no more than the
verdicts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.reporting.comparison import interval
from fedml_noniid.pipelines.reporting.summary import spread
from research import answers, forest
from research.answers import NO, NOT_SHOWN, ONLY_IF, YES
from research.claims import of_papers
from research.committed import Committed, when_written
from research.contrasts import by_seed
from research.page import Page
from research.studies import PAPERS
from research.verdicts import HELD, LEVELS, NO_GAIN, NOT_HELD, UNDECIDED
from tests.pipelines.small import ROOT
from tests.research.test_claims import ABC, A, judged, one, whole, written

RESULTS = ROOT / "docs" / "results"
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")
# FedAvg on all that the method needs, where that is more: at every client the public images.
RIVALS = {"fnr": "sharing"}
QUOTE = re.compile(rf"([^()]*)(?:\(|, )({NUMBER.pattern}) to ({NUMBER.pattern})\)")


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The repository's page, without runs."""
    return Page(of_papers("small", ROOT), tmp_path_factory.mktemp("root"), Committed(RESULTS))


def test_the_committed_page_is_made_of_the_committed_numbers(
    committed: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files but pictures, to the byte."""
    monkeypatch.setattr(forest, "drawn", lambda *_: b"a picture, which takes a second")
    made = committed.files()
    for name, content in made.items():
        assert name.endswith(".png") or content == (RESULTS / name).read_bytes(), name
    text = made["claims.md"].decode()
    assert len(text.splitlines()) < 400
    table = text.partition("\n\n| method |")[2].partition("\n\n")[0]
    assert table.count("\n| [") == len(PAPERS) and " - " not in table, "a number is missing"


# What the README's table says, as one looks the numbers up: of each method its gains, with half an
# interval where the claim's study was not tuned, and the sentences under the table.
CELLS = {
    "fednnnn": "{nnnn-gain-mnist-fresh}, {nnnn-gain-cifar-fresh}",
    "fnr": "{fnr-gain-label-tuned: fnr less fedavg}",
    "ccn": "{ccn-gain-fedavg-fresh: alpha01: fedavg+ccn less fedavg|half}",
    "fednlr": "{nlr-gain-shards2-fresh|half}",
    "rfedavg": "{rf-gain-mnist-silo-fresh: rfedavg_plus less fedavg}, {rf-gain-cifar-tuned}",
}
NOTES = (
    "over it FedNNNN gains {nnnn-over-server-step-mnist}, {nnnn-over-server-step-cifar}.",
    "over FedAvg with them FNR-FL gains {fnr-over-sharing-label}, untuned; with as many gradient "
    "images {fnr-over-half-label|word}.",
    "is {rf-gain-mnist-silo-fresh|word}, and level with rFedAvg.",
)
UNTUNED = {"ccn-gain-fedavg-fresh", "nlr-gain-shards2-fresh", "fnr-over-sharing-label"}
WORDS = {  # what the README's words mean
    "nnnn-gain-mnist-fresh": HELD,
    "nnnn-gain-cifar-fresh": HELD,
    "nnnn-over-server-step-cifar": NO_GAIN,
    "rf-plus-over-rfedavg-fresh": NO_GAIN,
    "rf-gain-cifar-tuned": UNDECIDED,
}
FIELD = re.compile(r"\{([a-z0-9-]+)(?:: ([^{}|]+))?(?:\|(half|word))?\}")


def test_the_short_table_of_the_readme_has_the_committed_numbers(committed: Page) -> None:
    """Its cells, and what stands under it, are made again from the claims' committed values."""
    verdicts = {one.named.id: one for one in committed.every}
    contents = {id_: one.named.study.content for id_, one in verdicts.items()}

    def filled(match: re.Match[str]) -> str:
        id_, part, form = match.groups()
        if form == "word":
            return verdicts[id_].word
        values = verdicts[id_].values
        mean = spread(by_seed(values[values["part"].str.endswith(part or "")]).values())
        ends = interval(mean)
        assert mean is not None and ends is not None
        assert ("tune" not in contents[id_]) is (id_ in UNTUNED), id_
        half = f"{mean.mean:z.1f} +- {(ends[1] - ends[0]) / 2:.1f}"
        return half if form else f"{mean.mean:+.1f}"

    assert {id_: verdicts[id_].word for id_ in WORDS} == WORDS
    readme = (ROOT / "README.md").read_text()
    for paper, cell in CELLS.items():
        answer = answers.of_paper(paper, ROOT)
        assert answer is not None
        (row,) = re.findall(rf"^\|.*\(docs/protocols/{paper}\.md\).*\|$", readme, re.MULTILINE)
        _, use, points, time = [text.strip() for text in row.strip("|").split("|")]
        assert (use, points) == (answer.use, FIELD.sub(filled, cell)), row
        runs = committed.runs[committed.runs["paper"] == paper]
        costs = answers.line(answer, verdicts, runs).costs
        assert rounded(time, float(costs.partition("time ")[2].partition(" ")[0])), (row, costs)
    public = contents["fnr-gain-label-tuned"]["data"]["public"]
    low = float(answers.filled("{nlr-gain-shards2-fresh: fedavg|level}", verdicts))
    under = " ".join(readme.partition("## The five papers")[2].partition("## The same")[0].split())
    for note in (
        *(FIELD.sub(filled, note) for note in NOTES),
        f"has {public:,} labelled images that FedAvg lacks.",
        f"are untuned, FedNLR at {low:.0f} % accuracy.",
        "MNIST has 14 x 14 pixels, CIFAR-10 16 x 16 from 12,500 images",
        "A paper's own scale was not run.",
        "(docs/results/claims.md)",
    ):
        assert note in under, note
    read = {match[0] for match in FIELD.findall(" ".join([*CELLS.values(), *NOTES]))}
    data = [contents[id_]["data"] for id_ in read]
    sizes = {one["name"]: (*one["size"], one.get("samples")) for one in data}
    assert sizes == {"mnist": (14, 14, None), "cifar10": (16, 16, 12500)}


@pytest.mark.parametrize("paper", PAPERS)
def test_a_protocol_quotes_the_committed_numbers(committed: Page, paper: str) -> None:
    """Each interval of "What our runs show so far", and the mean before it, is one of a claim."""
    parts = [
        spread(by_seed(of).values())
        for one in committed.every
        if one.named.paper == paper
        for _, of in one.values.groupby("part", sort=False)
    ]
    known = [(of.mean, *ends) for of in parts if of and (ends := interval(of))]
    text = (ROOT / "docs" / "protocols" / f"{paper}.md").read_text()
    quotes = QUOTE.findall(text.partition("## What our runs show")[2])
    assert len(quotes) > 5
    for before, low, high in quotes:
        assert any(
            rounded(low, min(k * a, k * b))
            and rounded(high, max(k * a, k * b))
            and any(rounded(number, k * mean) for number in NUMBER.findall(before))
            for mean, a, b in known
            for k in (1, -1, 100)  # as it is, turned round, in percent
        ), f"{before}({low} to {high})"


def rounded(text: str, number: float) -> bool:
    """Whether a text is a number, to the text's decimals."""
    decimals = len(text.partition(".")[2])
    return float(text) == pytest.approx(number, abs=0.5 * 10**-decimals + 1e-9)


@pytest.mark.parametrize("paper", PAPERS)
def test_the_words_of_an_answer_fit_its_verdicts(committed: Page, paper: str) -> None:
    """By the rules of docs/claims.md the verdicts leave one word, or yes and only if."""
    answer = answers.of_paper(paper, ROOT)
    assert answer is not None
    every = [*committed.verdicts, *committed.fresh]
    of = {one.named.id: one for one in every if one.named.paper == paper}
    rival = RIVALS.get(paper, "fedavg")
    gains = {
        id_: one
        for id_, one in of.items()
        if one.claim.contrast == "difference"
        and LEVELS.fullmatch(one.claim.statistic)
        and rival in one.claim.less
        and (one.claim.holds.above or 0) >= 0
        and when_written(one.named, committed.facts, True).startswith("written down before")
    }
    tuned = {id_ for id_, one in gains.items() if "tune" in one.named.study.content}
    held = {id_ for id_, one in gains.items() if one.word == HELD}
    # Over several methods it may be another one that excludes the gain.
    excluded = {
        id_
        for id_, one in gains.items()
        if one.claim.less == [rival]
        and (one.word == NOT_HELD or (one.word == NO_GAIN and not one.is_post_hoc))
    }
    if held & tuned:
        words, reasons = {YES, ONLY_IF}, held & tuned
    elif excluded and not held:
        words, reasons = {NO}, excluded
    else:
        words, reasons = {NOT_SHOWN}, tuned
    assert answer.use in words and set(answer.because) <= reasons
    assert (answer.use == ONLY_IF) <= bool(answer.condition)
    is_untuned = answer.use == NO and not excluded & tuned
    assert ("with both tuned not" in answer.condition) == is_untuned
    if paper == "fnr":
        assert of["fnr-regulariser"].word == NOT_HELD, "what no scale changes says so"
    said = " ".join([*answer.shown, *answer.caveat, *answer.no_scale])
    typed = re.findall(r"[-+]\d[\d.]*|\d+\.\d\d+", re.sub(r"\{.*?\}|CIFAR-10", "", said))
    assert set(typed) <= {"0.45"}, f"measured numbers are filled in, never typed: {typed}"


def test_numbers_are_filled_into_the_words(tmp_path: Path) -> None:
    """a less b is 10 points, half width 2.776 / sqrt(5); c is a but for 0.01 on two seeds each."""
    like_a = [A[0] + 0.01, A[1] - 0.01, *A[2:]]
    claim = {"less": ["b", "c"], "beside": {"its bytes": "bytes_up"}, "printed": {"effect": 3}}
    verdicts = {"c0": judged(tmp_path, claim, runs=ABC | {"c": like_a})[0]}
    for words, text in (
        ("so: {c0: a less b} points", "so: +10.00 (+8.76 to +11.24) points"),
        ("{c0}", "+0.00 (-0.88 to +0.88)"),
        ("{c0: near: a less c}", "+0.00 (-0.88 to +0.88)"),
        ("{c0: a|level} and {c0: b|level} %, {c0|seeds}", "73.00 and 63.00 %, 5"),
        ("{c0: a: its bytes|%}", "1000.0 %"),  # 10 bytes on every seed: no interval
        ("{c0|verdict} {c0|printed}", "undecided +3.00"),
        ("{c0: no such part} {c0: its bytes}", "- -"),  # of none, and of three methods
    ):
        assert answers.filled(words, verdicts) == text
    with pytest.raises(UserError, match="claim 'c1' is unknown"):
        answers.filled("{c1}", verdicts)


def test_costs_are_ratios_seed_by_seed(tmp_path: Path) -> None:
    """3, 3, 6, 3, 3 seconds by 2: mean 1.8, deviation 0.6708, half width 2.776 * 0.3."""
    written(tmp_path, {})
    for recipe, seconds, mib in (("a", [3.0, 3, 6, 3, 3], 6), ("b", [2.0] * 5, 4)):
        for seed, took in enumerate(seconds):
            metrics = {"traffic_mib": mib}
            one(tmp_path, "near", recipe, seed, [0.5, 0.6], seconds=took, metrics=metrics)
    page = whole(tmp_path)
    cost = {"where": "here", "study": "own", "scenario": "near", "of": "a"}
    costs = [cost | {"less": "b"}, cost | {"less": "c"}]
    words = {"method": "A", "idea": "an idea", "use": "no", "because": ["c0"], "caveat": ["none"]}
    answer = answers.Answer(**words, shown=["{c0}"], costs=costs)
    line = answers.line(answer, {"c0": page.verdicts[0]}, page.runs)
    assert line.costs == "here: time 1.80 (0.97 to 2.63), bytes 1.50<br>-"
