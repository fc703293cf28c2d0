"""Reads claims: what a paper states, and the test that decides it.

`pipelines/papers/<paper>/claims.yaml` has three sections. `studies` are written as in the paper's
params.yaml and may be `like` a study of that file. Their own settings are those of size `small`,
and the keys under `smoke` replace some of them at that size. A study's `images_per_second` is the
measured speed of one core, from which the page reckons hours. `claims` maps an ID to the keys of
`Claim`. `why` maps an ID to the keys of `Why`: experiments on the causes of verdicts. It may be
left out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from fedml_noniid.pipelines.papers.contrasts import Contrast
from fedml_noniid.pipelines.papers.studies import PAPERS, Study, folder_of, resolved
from fedml_noniid.plugins.core.errors import UserError, located
from fedml_noniid.plugins.core.options import Section, validated
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.data.yaml_files import read_yaml

FILE = "claims.yaml"
SIZES = ("smoke", "small")
MIN_SEEDS = {"smoke": 2, "small": 5}  # of a study
SPEED = "images_per_second"
SECTIONS, WHY = ("studies", "claims"), "why"
ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# Training images of each data set that a claim's study may have.
IMAGES = {"digits": 1437, "mnist": 60_000, "cifar10": 50_000}
# Keys that a SHA-256 leaves out: what a paper states, remarks, and what an experiment is for.
REMARKS, CAUSE = {"states", "where", "differs", "decimals"}, {"explains", "cause"}
BESIDE = "beside"  # the role of a number that is shown and not tested
# The seed plays no part in these numbers.
COUNTED = re.compile(r"traffic_mib\w*|bytes_(up|down)|\w+_delta_bytes|delta_bytes\w*")
ONE_LESS_SOME = (1, 1, 1, 99, "one method in of, one or more in less")
# Of each contrast: fewest and most methods in `of`, fewest and most in `less`, in words.
METHODS = {
    "level": (1, 1, 0, 0, "one method in of, none in less"),
    "difference": ONE_LESS_SOME,
    "ratio": ONE_LESS_SOME,
    "same": ONE_LESS_SOME,
    "order": (2, 99, 0, 0, "two or more methods in of, none in less"),
    "trend": (0, 1, 0, 1, "at most one method in of and in less"),
}
BETWEEN = {"difference": "less", "ratio": "by", "same": "same weights as"}


class Holds(Section):
    """The numbers that the tested quantity must be above, below, or both."""

    above: float | int | None = None
    below: float | int | None = None

    @model_validator(mode="after")
    def _some(self) -> Holds:
        if self.above is None and self.below is None:
            raise UserError("one of above and below is needed; neither is given")
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise UserError(
                f"above={self.above} is refused; allowed: a number less than below={self.below}"
            )
        return self

    @property
    def bounds(self) -> list[tuple[float, int]]:
        """Each bound, with 1 for `above` and -1 for `below`."""
        both = ((self.above, 1), (self.below, -1))
        return [(float(bound), side) for bound, side in both if bound is not None]

    @property
    def words(self) -> str:
        """`above 0`, `between -1 and 1`."""
        if self.above is not None and self.below is not None:
            return f"between {self.above:g} and {self.below:g}"
        return f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"


class Claim(Section):
    """What a paper states, and its test.

    `contrast` makes one number per seed of the `statistic` of runs: the `level` of method `of`, its
    `difference` to or `ratio` by each of `less`, the steps down in the `order` of the methods `of`,
    the slope of a `trend` over `over`, or whether `of` ends with the `same` weights as `less` (1 or
    0). `over` maps scenarios to numbers. It maps recipes to numbers if `of` is empty.
    """

    states: str  # what the paper states, in our words
    where: str  # section, table, figure
    tests: str  # what is tested, in words
    study: str
    # Every one of them must hold. A trend over scenarios has them in `over`.
    scenarios: list[str] = Field(default_factory=list)
    statistic: str = "final"
    scale: float | int = 1
    unit: str = ""
    contrast: Literal["level", "difference", "ratio", "order", "trend", "same"]
    of: list[str] = Field(default_factory=list)
    less: list[str] = Field(default_factory=list)
    over: dict[str, float | int] = Field(default_factory=dict)
    holds: Holds
    differs: str  # from the paper
    decimals: int = Field(default=2, ge=0, le=6)
    # Words -> a statistic that is shown, not tested.
    beside: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> Claim:
        least, most, least_less, most_less, allowed = METHODS[self.contrast]
        n, n_less, is_trend = len(self.of), len(self.less), self.contrast == "trend"
        if is_trend:
            most_less = n
        if not least <= n <= most or not least_less <= n_less <= most_less:
            raise UserError(f"contrast={self.contrast!r} is refused; allowed: with {allowed}")
        if is_trend != bool(self.over) or len(self.over) == 1:
            raise UserError(
                "over is refused; allowed: two or more names with their numbers, for a trend only"
            )
        if bool(self.scenarios) is (is_trend and bool(self.of)):
            raise UserError(
                "scenarios is refused; allowed: one or more, but none for a trend over scenarios"
            )
        return self

    @property
    def cells(self) -> tuple[tuple[str, str], ...]:
        """(scenario, recipe) of all runs that the claim reads."""
        scenarios, recipes = self.scenarios, [*self.of, *self.less]
        if self.contrast == "trend":
            over = list(self.over)
            scenarios, recipes = (over, recipes) if self.of else (scenarios, over)
        return tuple(itertools.product(scenarios, recipes))

    @property
    def is_counted(self) -> bool:
        """Whether the number is counted, so that no test over seeds is needed."""
        return self.contrast == "same" or COUNTED.fullmatch(self.statistic) is not None

    def contrasts(self) -> Iterator[Contrast]:
        """The numbers that must all be as the claim says, then those that stand beside it."""
        if self.contrast == "trend" and self.of:
            methods = [("of", self.of[0]), *(("less", name) for name in self.less)]
            places = [
                (f"{role} {name}", name, recipe) for name in self.over for role, recipe in methods
            ]
            yield self._contrast(f"slope of {' less '.join((*self.of, *self.less))}", places)
        for scenario in self.scenarios:
            for words, places in self._within(scenario):
                yield self._contrast(f"{scenario}: {words}", places)
        for words, statistic in self.beside.items():
            for scenario, recipe in self.cells:
                shown = f"{scenario}: {recipe}: {words}"
                one = self._contrast(shown, [(BESIDE, scenario, recipe)])
                yield one._replace(kind="level", statistic=statistic, scale=1)

    def _within(self, scenario: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
        """(words, places) of each comparison within a scenario."""
        first = self.of[0] if self.of else ""
        if self.contrast == "level":
            yield first, [("of", scenario, first)]
        elif self.contrast == "trend":
            yield "slope", [(f"of {name}", scenario, name) for name in self.over]
        elif self.contrast == "order":
            for one, other in itertools.pairwise(self.of):
                yield f"{one} less {other}", [("of", scenario, one), ("less", scenario, other)]
        else:
            for other in self.less:
                words = f"{first} {BETWEEN[self.contrast]} {other}"
                yield words, [("of", scenario, first), ("less", scenario, other)]

    def _contrast(self, words: str, places: Iterable[tuple[str, str, str]]) -> Contrast:
        at = [
            (role, {"study": self.study, "scenario": scenario, "recipe": recipe})
            for role, scenario, recipe in places
        ]
        kind = {"order": "difference", "trend": "slope"}.get(self.contrast, self.contrast)
        over = list(map(float, self.over.values()))
        return Contrast(words, kind, at, self.statistic, self.scale, over)


class Why(Claim):
    """An experiment on the cause of a verdict, written down after the verdict and before its own
    first run."""

    states: str = ""
    where: str = ""
    explains: str  # the claim's ID
    cause: str  # the suspected cause, in a sentence; it is supported if the test holds


@dataclass(frozen=True)
class Named:
    """A claim with its place in the file."""

    id: str
    paper: str
    claim: Claim
    study: Study

    @property
    def sha256(self) -> str:
        """Of the test, its study at this size, and the suspected cause."""
        return self._sha256(REMARKS)

    @property
    def test(self) -> str:
        """Of what the numbers depend on: the test and its study."""
        return self._sha256(REMARKS | CAUSE)

    def _sha256(self, without: set[str]) -> str:
        hashed = [self.claim.model_dump(exclude=without), self.study.content]
        return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()

    @property
    def items(self) -> list[str]:
        """The names of the runs that it reads."""
        return [
            f"{s}-{r}-{seed}" for s, r in self.claim.cells for seed in self.study.content["seeds"]
        ]


@dataclass(frozen=True)
class Claims:
    """The claims of one paper at a size."""

    paper: str
    size: str
    path: Path
    studies: Mapping[str, Study]
    claims: Mapping[str, Named]
    whys: Mapping[str, Named]
    speeds: Mapping[str, float]  # images a second and core, by study

    @property
    def every(self) -> Mapping[str, Named]:
        """Claims and causes."""
        return {**self.claims, **self.whys}

    def images(self, study: str, scenario: str) -> float:
        """Images that one run trains on, each as often as it is used."""
        content = self.studies[study].content
        data, train = content["data"], content["train"]
        samples = data.get("samples", IMAGES[data["name"]])
        samples = samples * (1 - data["validation"]) - data["public"]
        share = float(content["scenarios"][scenario].get("participation", 1))
        return float(samples * share * train["rounds"] * train["epochs"])

    def hours(self, study: str, cells: Iterable[tuple[str, str]] | None = None) -> float:
        """CPU hours of a study with its trials, or of some (scenario, recipe) of it, reckoned from
        the images."""
        content = self.studies[study].content
        scenarios, recipes = content["scenario_names"], content["recipe_names"]
        every = itertools.product(scenarios, recipes) if cells is None else cells
        images = sum(self.images(study, scenario) for scenario, _ in every) * len(content["seeds"])
        if cells is None and (tune := content.get("tune")):
            trials = tune["trials"] * len(tune["seeds"]) * len(recipes)
            images += trials * self.images(study, scenarios[0])
        return images / self.speeds[study] / 3600


def of_papers(size: str, root: Path) -> dict[str, Claims]:
    """The claims of every paper that has some. UserError for a bad file."""
    found: dict[str, Claims] = {}
    owners: dict[str, Path] = {}
    for paper in PAPERS:
        if (folder_of(paper, root) / FILE).is_file():
            found[paper] = claims = of_paper(paper, size, root)
            for name in claims.every:
                if name in owners:
                    raise UserError(
                        f"{claims.path}: {name}: the ID is in {owners[name]} too; allowed: another "
                        "one"
                    )
                owners[name] = claims.path
    return found


def of_paper(paper: str, size: str, root: Path) -> Claims:
    """The claims of a paper. UserError for every mistake of the file, one line each."""
    known("size", size, SIZES)
    path = folder_of(paper, root) / FILE
    found = read_yaml(path)
    for key in found:
        known(f"{path}: section", key, (*SECTIONS, WHY))
    for key in SECTIONS:
        if not isinstance(found.get(key), dict) or not found[key]:
            raise UserError(f"{path}: the section {key!r} is missing or empty")
    studies, speeds = _studies(paper, size, path, found["studies"])
    claims = dict(_claims(path, found["claims"], studies, Claim))
    whys = dict(_claims(path, found.get(WHY) or {}, studies, Why))
    for name, why in whys.items():
        if name in claims:
            raise UserError(
                f"{path}: {WHY}: {name}: is the ID of a claim too; allowed: another one"
            )
        assert isinstance(why, Why)
        known(f"{path}: {name}: claim", why.explains, claims)
    # A study runs only what a claim reads.
    for name, study in studies.items():
        every = [one for one in (*claims.values(), *whys.values()) if one.study == name]
        if not every:
            raise UserError(f"{path}: study {name!r} is in no claim")
        read = zip(*(cell for one in every for cell in one.cells), strict=True)
        narrowed = dict(study.content)
        for key, names in zip(("scenario_names", "recipe_names"), read, strict=True):
            narrowed[key] = [one for one in study.content[key] if one in names]
        studies[name] = replace(study, content=narrowed)
    named, causes = (
        {name: Named(name, paper, one, studies[one.study]) for name, one in of.items()}
        for of in (claims, whys)
    )
    return Claims(paper, size, path, studies, named, causes, speeds)


def _studies(
    paper: str, size: str, path: Path, entries: Mapping[str, Any]
) -> tuple[dict[str, Study], dict[str, float]]:
    """The studies of the file, and their images a second."""
    papers = read_yaml(path.parent / "params.yaml")["studies"]
    both = sorted(set(entries) & set(papers))
    if both:
        raise UserError(f"{path}: study {both[0]!r} is in params.yaml too; allowed: another name")
    found, speeds = {}, {}
    plain = {
        name: {key: value for key, value in settings.items() if key != SPEED}
        for name, settings in entries.items()
    }
    for name in entries:
        where = f"{path}: study {name!r}"
        study = resolved(paper, name, size, {**papers, **plain}, f"{path}: study")
        found[name] = replace(study, kind="claims")
        speeds[name] = _speed(where, name, entries)
        seeds = study.content.get("seeds") or []
        if len(seeds) < MIN_SEEDS[size]:
            raise UserError(
                f"{where}: seeds={seeds} is refused; allowed: {MIN_SEEDS['small']} or more "
                f"(smoke: {MIN_SEEDS['smoke']})"
            )
        known(f"{where}: data set", study.content["data"]["name"], IMAGES)
    return found, speeds


def _speed(where: str, name: str, entries: Mapping[str, Any]) -> float:
    """Images a second of a study, or of the first study that it is like and that has a speed."""
    while name in entries and SPEED not in entries[name]:
        name = str(entries[name].get("like"))
    speed = entries.get(name, {}).get(SPEED)
    if not isinstance(speed, int | float) or speed <= 0:
        raise UserError(f"{where}: {SPEED}={speed!r} is refused; allowed: a number above 0")
    return float(speed)


def _claims(
    path: Path, found: Mapping[str, Any], studies: Mapping[str, Study], kind: type[Claim]
) -> Iterator[tuple[str, Claim]]:
    for name, values in found.items():
        where = f"{path}: {name}"
        if not ID.fullmatch(str(name)):
            raise UserError(
                f"{where}: the ID is refused; allowed: small letters, digits and single dashes"
            )
        with located(source=where):
            claim = validated(kind, values)
        study = studies[known(f"{where}: study", claim.study, studies)]
        for scenario, recipe in claim.cells:
            known(f"{where}: scenario", scenario, study.content["scenario_names"])
            known(f"{where}: recipe", recipe, study.content["recipe_names"])
        yield str(name), claim
