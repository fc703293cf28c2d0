"""A claim: what a paper states, and the test that decides it.

`pipelines/papers/<paper>/claims.yaml` has them.

The file has three sections. `studies` are written as in the paper's params.yaml and may be `like` a
study of that file. Their own settings are those of size `small`, and the keys under `smoke` replace
some of them at that size. A study's `images_per_second` is the measured speed of one core, from
which the page reckons hours. `claims` maps an ID to the keys of `Claim`. `why` maps an ID to the
keys of `Why`: experiments on the causes of verdicts. It may be left out.
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

from fedml_noniid.pipelines.papers.studies import Study, folder_of, resolved
from fedml_noniid.plugins.core.errors import UserError, located
from fedml_noniid.plugins.core.options import Section, validated
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.data.yaml_files import read_yaml

FILE = "claims.yaml"
SIZES = ("smoke", "small")
LEAST_SEEDS = 5  # of a study, at size small
SPEED = "images_per_second"
SECTIONS, WHY = ("studies", "claims"), "why"
ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# Training images of each data set that a claim's study may have.
IMAGES = {"digits": 1437, "mnist": 60_000, "cifar10": 50_000}
# Keys that a SHA-256 leaves out: what a paper states, remarks, and what an experiment is for.
SAID, CAUSE = {"states", "where", "differs", "decimals"}, {"explains", "cause"}
CONTRASTS = Literal["level", "difference", "ratio", "order", "trend", "same"]


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
    scenarios: list[str] = Field(
        default_factory=list
    )  # every one of them must hold; a trend over scenarios has them in `over`
    statistic: str = "final"
    scale: float | int = 1
    unit: str = ""
    contrast: CONTRASTS
    of: list[str] = Field(default_factory=list)
    less: list[str] = Field(default_factory=list)
    over: dict[str, float | int] = Field(default_factory=dict)
    holds: Holds
    differs: str  # from the paper
    decimals: int = Field(default=2, ge=0, le=6)
    beside: dict[str, str] = Field(
        default_factory=dict
    )  # words -> a statistic that is shown, not tested

    @model_validator(mode="after")
    def _fits(self) -> Claim:
        needs = {
            "level": (len(self.of) == 1 and not self.less, "one method in of, none in less"),
            "difference": (
                len(self.of) == 1 and bool(self.less),
                "one method in of, one or more in less",
            ),
            "ratio": (
                len(self.of) == 1 and bool(self.less),
                "one method in of, one or more in less",
            ),
            "same": (
                len(self.of) == 1 and bool(self.less),
                "one method in of, one or more in less",
            ),
            "order": (
                len(self.of) > 1 and not self.less,
                "two or more methods in of, none in less",
            ),
            "trend": (
                len(self.of) <= 1 and len(self.less) <= len(self.of),
                "at most one method in of and in less",
            ),
        }
        fits, allowed = needs[self.contrast]
        if not fits:
            raise UserError(f"contrast={self.contrast!r} is refused; allowed: with {allowed}")
        if (self.contrast == "trend") != bool(self.over) or len(self.over) == 1:
            raise UserError(
                "over is refused; allowed: two or more names with their numbers, for a trend only"
            )
        if bool(self.scenarios) is (self.contrast == "trend" and bool(self.of)):
            raise UserError(
                "scenarios is refused; allowed: one or more, but none for a trend over scenarios"
            )
        return self

    @property
    def cells(self) -> tuple[tuple[str, str], ...]:
        """(scenario, recipe) of all runs that the claim reads."""
        scenarios, recipes = self.scenarios, [*self.of, *self.less]
        if self.contrast == "trend":
            scenarios, recipes = (
                (list(self.over), recipes) if self.of else (scenarios, list(self.over))
            )
        return tuple((scenario, recipe) for scenario in scenarios for recipe in recipes)


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
        return self._sha256(SAID)

    @property
    def test(self) -> str:
        """Of what the numbers depend on: the test and its study."""
        return self._sha256({*SAID, *CAUSE})

    def _sha256(self, without: set[str]) -> str:
        said = [self.claim.model_dump(exclude=without), self.study.content]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

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

    def images(self, study: str, scenario: str) -> float:
        """Images that one run trains on, each as often as it is used."""
        content = self.studies[study].content
        data, train = content["data"], content["train"]
        held = data.get("samples", IMAGES[data["name"]]) * (1 - data["validation"]) - data["public"]
        share = float(content["scenarios"][scenario].get("participation", 1))
        return float(held * share * train["rounds"] * train["epochs"])

    def hours(self, study: str, cells: Iterable[tuple[str, str]] | None = None) -> float:
        """CPU hours of a study with its trials, or of some (scenario, recipe) of it, reckoned from
        the images."""
        content = self.studies[study].content
        every = (
            itertools.product(content["scenario_names"], content["recipe_names"])
            if cells is None
            else cells
        )
        images = sum(self.images(study, scenario) for scenario, _ in every) * len(content["seeds"])
        if cells is None and (tune := content.get("tune")):
            trials = tune["trials"] * len(tune["seeds"]) * len(content["recipe_names"])
            images += trials * self.images(study, content["scenario_names"][0])
        return images / self.speeds[study] / 3600


def of_paper(paper: str, size: str, root: Path) -> Claims:
    """The claims of a paper. UserError for every mistake of the file, one line each."""
    known("size", size, SIZES)
    folder = folder_of(paper, root)
    path = folder / FILE
    found = read_yaml(path)
    for key in found:
        known(f"{path}: section", key, (*SECTIONS, WHY))
    for key in SECTIONS:
        if not isinstance(found.get(key), dict) or not found[key]:
            raise UserError(f"{path}: the section {key!r} is missing or empty")
    studies, speeds = _studies(
        paper, size, path, found["studies"], read_yaml(folder / "params.yaml")["studies"]
    )
    claims = dict(_claims(path, found["claims"], studies, paper, Claim))
    whys = dict(_claims(path, found.get(WHY) or {}, studies, paper, Why))
    for name, why in whys.items():
        if name in claims:
            raise UserError(
                f"{path}: {WHY}: {name}: is the ID of a claim too; allowed: another one"
            )
        assert isinstance(why.claim, Why)
        known(f"{path}: {name}: claim", why.claim.explains, claims)
    every = [*claims.values(), *whys.values()]
    used = {
        name: {cell for one in every if one.claim.study == name for cell in one.claim.cells}
        for name in studies
    }
    for name, cells in used.items():
        if not cells:
            raise UserError(f"{path}: study {name!r} is in no claim")
    narrowed = {name: _only(study, used[name]) for name, study in studies.items()}
    claims, whys = (
        {name: replace(one, study=narrowed[one.claim.study]) for name, one in own.items()}
        for own in (claims, whys)
    )
    return Claims(paper, size, path, narrowed, claims, whys, speeds)


def _studies(
    paper: str, size: str, path: Path, own: Mapping[str, Any], papers: Mapping[str, Any]
) -> tuple[dict[str, Study], dict[str, float]]:
    both = sorted(set(own) & set(papers))
    if both:
        raise UserError(f"{path}: study {both[0]!r} is in params.yaml too; allowed: another name")
    where, speeds, plain = f"{path}: study", {}, {}
    for name, settings in own.items():
        plain[name] = {key: value for key, value in settings.items() if key != SPEED}
        speed = _speed(name, own)
        if not isinstance(speed, int | float) or speed <= 0:
            raise UserError(
                f"{where} {name!r}: {SPEED}={speed!r} is refused; allowed: a number above 0"
            )
        speeds[name] = float(speed)
    found = {name: resolved(paper, name, size, {**papers, **plain}, where) for name in own}
    for name, study in found.items():
        seeds = study.content.get("seeds") or []
        if len(seeds) < (LEAST_SEEDS if size == "small" else 2):
            raise UserError(
                f"{where} {name!r}: seeds={seeds} is refused; allowed: {LEAST_SEEDS} or more "
                "(smoke: 2)"
            )
        known(f"{where} {name!r}: data set", study.content["data"]["name"], IMAGES)
    return {name: replace(study, kind="claims") for name, study in found.items()}, speeds


def _speed(name: str, own: Mapping[str, Any]) -> object:
    """Images a second of a study, or of the first study that it is like and that has a speed."""
    seen: set[str] = set()
    while name in own and name not in seen:
        if SPEED in own[name]:
            return own[name][SPEED]
        seen.add(name)
        name = str(own[name].get("like"))
    return None


def _claims(
    path: Path,
    found: Mapping[str, Any],
    studies: Mapping[str, Study],
    paper: str,
    kind: type[Claim],
) -> Iterator[tuple[str, Named]]:
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
        yield str(name), Named(str(name), paper, claim, study)


def _only(study: Study, cells: set[tuple[str, str]]) -> Study:
    """The study with the scenarios and recipes that claims read, in its order."""
    scenarios, recipes = ({cell[axis] for cell in cells} for axis in (0, 1))
    names = {
        "scenario_names": [name for name in study.content["scenario_names"] if name in scenarios],
        "recipe_names": [name for name in study.content["recipe_names"] if name in recipes],
    }
    return replace(study, content={**study.content, **names})
