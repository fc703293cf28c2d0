"""Reads claims: what a paper states, and the test that decides it.

`research/papers/<paper>/claims.yaml` has four sections. `studies` are written as in the paper's
params.yaml and may be `like` a study of that file. Their own settings are those of size `small`,
and the keys under `smoke` replace some of them at that size. `claims` maps an ID to the keys of
`Claim`. `fresh` has claims that were written after the verdicts on `claims`, for seeds that no run
had seen. `why` maps an ID to the keys of `Why`: experiments on the causes of verdicts. The last two
may be left out. The claims of a section are adjusted among themselves.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedml_noniid.core.errors import UserError, located
from fedml_noniid.core.options import Range, Section, validated
from fedml_noniid.data.checks import known
from fedml_noniid.data.yaml_files import read_yaml
from research.contrasts import Contrast
from research.studies import PAPERS, Study, folder_of, resolved

FILE = "claims.yaml"
SIZES = ("smoke", "small")
MIN_SEEDS = {"smoke": 2, "small": 5}  # of a study
ID = Annotated[str, Field(pattern="^[a-z0-9]+(-[a-z0-9]+)*$")]
# Keys that a SHA-256 leaves out: what a paper states, remarks, and what an experiment is for.
REMARKS = {"states", "where", "differs", "decimals", "ours", "printed", "withdrawn", "seen"}
CAUSE, MARGIN = {"explains", "cause"}, {"margin"}
BESIDE = "beside"  # the role of a number that is shown and not tested
# The seed plays no part in these numbers.
COUNTED = re.compile(r"traffic_mib\w*|bytes_(up|down)|\w+_delta_bytes|delta_bytes\w*")
# Of each contrast: how many methods `less` names.
LESS = {
    "level": Range(0, 0),
    "difference": Range(1),
    "ratio": Range(1),
    "same": Range(1),
    "trend": Range(0, 1),
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
    def description(self) -> str:
        """`above 0`, `between -1 and 1`."""
        if self.above is not None and self.below is not None:
            return f"between {self.above:g} and {self.below:g}"
        return f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"


class Printed(Section):
    """What the paper's tables have beside a claim."""

    effect: float | int  # in the claim's unit; over several methods the least favourable one
    fedavg: float | int | None = None  # %: FedAvg's accuracy in the same column


class Claim(Section):
    """What a paper states, and its test.

    `contrast` makes one number per seed of the `statistic` of runs: the `level` of method `of`, its
    `difference` to or `ratio` by each of `less`, whether it ends with the `same` weights as `less`
    (1 or 0), or the slope of a `trend` over `over`, which maps scenarios to numbers.
    """

    states: str  # what the paper states, in our words
    where: str  # section, table, figure
    tests: str  # what is tested, in words
    study: str
    # Every one of them must hold. A trend has them in `over`.
    scenarios: list[str] = Field(default_factory=list)
    statistic: str = "final"
    scale: float | int = 1
    unit: str = ""
    contrast: Literal["level", "difference", "ratio", "trend", "same"]
    of: Annotated[list[str], Field(min_length=1, max_length=1)]
    less: list[str] = Field(default_factory=list)
    over: dict[str, float | int] = Field(default_factory=dict)
    holds: Holds
    # A number larger than `above`: if the tested one is below it, the verdict is "no gain above".
    margin: float | int | None = None
    ours: bool = False  # whether the test is of a question of ours that the sentence raises
    printed: Printed | dict[str, Printed] | None = None  # of all scenarios, or of each
    withdrawn: str = ""  # why the page leaves it out; it is still judged and counted
    differs: str  # from the paper
    decimals: int = Field(default=2, ge=0, le=6)
    # Words -> a statistic that is shown, not tested.
    beside: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> Claim:
        is_trend, n = self.contrast == "trend", len(self.less)
        if n not in LESS[self.contrast]:
            raise UserError(
                path=("less",), value=self.less, allowed=f"{LESS[self.contrast]} methods"
            )
        if is_trend != bool(self.over) or len(self.over) == 1:
            allowed = "two or more scenarios with their numbers, for a trend only"
            raise UserError(path=("over",), value=self.over, allowed=allowed)
        if is_trend == bool(self.scenarios):
            allowed = "one or more, but none for a trend"
            raise UserError(path=("scenarios",), value=self.scenarios, allowed=allowed)
        above, below = self.holds.above, self.holds.below
        if self.margin is not None and (below is not None or above is None or self.margin <= above):
            allowed = "a number larger than `holds.above`, without `holds.below`"
            raise UserError(path=("margin",), value=self.margin, allowed=allowed)
        if isinstance(self.printed, dict):
            for scenario, _ in self.cells:
                with located("printed"):
                    known("scenario", scenario, self.printed)
        return self

    @property
    def cells(self) -> tuple[tuple[str, str], ...]:
        """(scenario, recipe) of all runs that the claim reads."""
        scenarios = self.over if self.contrast == "trend" else self.scenarios
        return tuple(itertools.product(scenarios, [*self.of, *self.less]))

    @property
    def is_counted(self) -> bool:
        """Whether the number is counted, so that no test over seeds is needed."""
        return self.contrast == "same" or COUNTED.fullmatch(self.statistic) is not None

    def contrasts(self) -> Iterator[Contrast]:
        """The numbers that must all be as the claim says, then those that stand beside it."""
        (method,) = self.of
        if self.contrast == "trend":
            methods = [("of", method), *(("less", name) for name in self.less)]
            places = [
                (f"{role} {name}", name, recipe) for name in self.over for role, recipe in methods
            ]
            yield self._contrast(f"slope of {' less '.join((method, *self.less))}", places)
        for scenario in self.scenarios:
            if self.contrast == "level":
                yield self._contrast(f"{scenario}: {method}", [("of", scenario, method)])
            for other in self.less:
                description = f"{scenario}: {method} {BETWEEN[self.contrast]} {other}"
                yield self._contrast(
                    description, [("of", scenario, method), ("less", scenario, other)]
                )
        for note, statistic in self.beside.items():
            for scenario, recipe in self.cells:
                shown = f"{scenario}: {recipe}: {note}"
                contrast = self._contrast(shown, [(BESIDE, scenario, recipe)])
                yield contrast._replace(kind="level", statistic=statistic, scale=1)

    def _contrast(self, description: str, places: Iterable[tuple[str, str, str]]) -> Contrast:
        at = [
            (role, {"study": self.study, "scenario": scenario, "recipe": recipe})
            for role, scenario, recipe in places
        ]
        kind = "slope" if self.contrast == "trend" else self.contrast
        over = list(map(float, self.over.values()))
        return Contrast(description, kind, at, self.statistic, self.scale, over)


class Why(Claim):
    """An experiment on the cause of a verdict, written down after the verdict and before its own
    first run."""

    states: str = ""
    where: str = ""
    seen: list[str] = Field(default_factory=list)  # methods with runs that were known before
    explains: str  # the claim's ID
    cause: str  # the suspected cause, in a sentence; it is supported if the test holds


class File(Section):
    """A file claims.yaml."""

    studies: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    claims: Annotated[dict[ID, Claim], Field(min_length=1)]
    fresh: dict[ID, Claim] = Field(default_factory=dict)
    why: dict[ID, Why] = Field(default_factory=dict)

    @property
    def every(self) -> dict[str, Claim]:
        """All claims and causes."""
        return {**self.claims, **self.fresh, **self.why}

    @model_validator(mode="after")
    def _fits(self) -> File:
        for section, claims in (("fresh", self.fresh), ("why", self.why)):
            for name in claims:
                if name in self.claims or (claims is self.why and name in self.fresh):
                    with located(section, name):
                        raise UserError("the ID is that of a claim too; allowed: another one")
        for name, why in self.why.items():
            with located("why", name):
                known("claim", why.explains, self.claims)
                for recipe in why.seen:
                    known("seen: recipe", recipe, [*why.of, *why.less])
        return self


@dataclass(frozen=True)
class Named:
    """A claim with its place in the file."""

    id: str
    paper: str
    claim: Claim
    study: Study

    @property
    def sha256(self) -> str:
        """Of the test, its margin, its study at this size, and the suspected cause."""
        return self._sha256(REMARKS if self.claim.margin is not None else REMARKS | MARGIN)

    @property
    def sha256_without_margin(self) -> str:
        """As `sha256`, of the claim before it had a margin."""
        return self._sha256(REMARKS | MARGIN)

    @property
    def test(self) -> str:
        """Of what the numbers depend on: the test and its study."""
        return self._sha256(REMARKS | CAUSE | MARGIN)

    def _sha256(self, without: set[str]) -> str:
        looks = [self.study.looks] if self.study.looks else []
        hashed = [self.claim.model_dump(exclude=without), self.study.content, *looks]
        return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of seeds at which it is judged, ascending; the last has all of them."""
        return self.study.looks or (len(self.study.content["seeds"]),)

    def seeds(self, look: int) -> list[int]:
        """The seeds up to a look, counted from 0."""
        chosen: list[int] = self.study.content["seeds"][: self.looks[look]]
        return chosen

    def items(self, look: int) -> list[str]:
        """The names of the runs that it reads at a look, counted from 0."""
        return [f"{s}-{r}-{seed}" for s, r in self.claim.cells for seed in self.seeds(look)]

    def reached(self, ended: Collection[str]) -> int:
        """The last look with all of its runs among these; -1 if there is none."""
        looks = range(len(self.looks))
        return max((look for look in looks if set(self.items(look)) <= set(ended)), default=-1)


@dataclass(frozen=True)
class Claims:
    """The claims of one paper at a size."""

    paper: str
    size: str
    path: Path
    studies: Mapping[str, Study]
    claims: Mapping[str, Named]
    fresh: Mapping[str, Named]
    whys: Mapping[str, Named]

    @property
    def every(self) -> Mapping[str, Named]:
        """All claims and causes."""
        return {**self.claims, **self.fresh, **self.whys}


def of_papers(size: str, root: Path) -> dict[str, Claims]:
    """The claims of every paper that has some. UserError for a bad file."""
    by_paper: dict[str, Claims] = {}
    owners: dict[str, Path] = {}
    for paper in PAPERS:
        if (folder_of(paper, root) / FILE).is_file():
            by_paper[paper] = claims = of_paper(paper, size, root)
            for name in claims.every:
                if name in owners:
                    raise UserError(f"{claims.path}: {name}: the ID is in {owners[name]} too")
                owners[name] = claims.path
    return by_paper


def of_paper(paper: str, size: str, root: Path) -> Claims:
    """The claims of a paper. UserError for every mistake of the file, one line each."""
    known("size", size, SIZES)
    path = folder_of(paper, root) / FILE
    with located(source=str(path)):
        file = validated(File, read_yaml(path))
        studies = _studies(paper, size, path, file)
        for name, claim in file.every.items():
            with located(name):
                content = studies[known("study", claim.study, studies)].content
                for scenario, recipe in claim.cells:
                    known("scenario", scenario, content["scenario_names"])
                    known("recipe", recipe, content["recipe_names"])
        # A study runs only what a claim reads.
        for name, study in studies.items():
            cells = [
                cell for claim in file.every.values() if claim.study == name for cell in claim.cells
            ]
            if not cells:
                raise UserError(f"study {name!r} is in no claim")
            narrowed = dict(study.content)
            for index, key in enumerate(("scenario_names", "recipe_names")):
                read = {cell[index] for cell in cells}
                narrowed[key] = [name for name in study.content[key] if name in read]
            studies[name] = replace(study, content=narrowed)
    claims, fresh, whys = (
        {name: Named(name, paper, claim, studies[claim.study]) for name, claim in named.items()}
        for named in (file.claims, file.fresh, file.why)
    )
    return Claims(paper, size, path, studies, claims, fresh, whys)


def _studies(paper: str, size: str, path: Path, file: File) -> dict[str, Study]:
    """The studies of the file, which may be `like` one of the paper's params.yaml."""
    papers = read_yaml(path.parent / "params.yaml")["studies"]
    studies = {}
    for name in file.studies:
        if name in papers:
            raise UserError(f"study {name!r} is in params.yaml too; allowed: another name")
        study = resolved(paper, name, size, {**papers, **file.studies}, f"{path}: study")
        seeds = study.content.get("seeds") or []
        if len(seeds) < MIN_SEEDS[size]:
            raise UserError(
                path=("studies", name, "seeds"),
                value=seeds,
                allowed=f"{MIN_SEEDS['small']} or more (smoke: {MIN_SEEDS['smoke']})",
            )
        if study.looks and (
            sorted({*study.looks, 1}) != [1, *study.looks] or study.looks[-1] != len(seeds)
        ):
            raise UserError(
                path=("studies", name, "looks"),
                value=[*study.looks],
                allowed=f"ascending numbers of seeds from 2, the last {len(seeds)}: all of them",
            )
        studies[name] = replace(study, kind="claims")
    return studies
