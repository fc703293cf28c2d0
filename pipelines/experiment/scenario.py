"""A scenario of params.yaml: how the data are divided among the clients, and their skews."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, model_serializer, model_validator
from torch import Tensor

from fedml_noniid.core.errors import UserError, located, together
from fedml_noniid.core.options import (
    Below1,
    Count,
    Fraction,
    NonNegative,
    OneOf,
    OpenSection,
    Section,
    Share,
)
from fedml_noniid.data import noise, partitions
from fedml_noniid.data.checks import ClassName
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.engines import absences
from fedml_noniid.engines.cohort import cohort_size
from fedml_noniid.own_code import defaults_by_name, is_own, source_with_files

SKEWS = ("noise", "label_noise", "rotation", "drift")  # beside the options of its partition
PAIRS = "pairs of two classes such as [[1, 2], [3, 4]]; [] for clients that keep their labels"


class NoiseSettings(Section):
    """Gaussian noise on each client's samples: feature skew."""

    sigma: NonNegative  # on the scale where pixels are 0 to 1
    form: Literal["level", "equal", "space"] = "level"

    def deviations(self, n_clients: int, data: Dataset) -> Tensor:
        """The standard deviation of each client's noise in normalised units, [N, ...].

        UserError for unfit data.
        """
        if data.inputs:
            raise UserError("noise is refused for samples with several inputs", allowed="none")
        return noise.deviations(
            self.form, self.sigma, n_clients, tuple(data.train_x.shape[1:]), data.scale
        )

    def amounts(self, n_clients: int, data: Dataset) -> Tensor:
        """Each client's standard deviation on the scale of sigma, averaged over a sample, [N].

        UserError as above.
        """
        return noise.amounts(
            self.form, self.sigma, n_clients, tuple(data.train_x.shape[1:]), data.scale
        )


class LabelNoiseSettings(Section):
    """Wrong labels among each client's training samples."""

    rate: Fraction  # the probability that a label is wrong
    form: Literal["equal", "level"] = "equal"
    kind: Literal["symmetric", "pair"] = "symmetric"

    @property
    def words(self) -> str:
        """`equal label noise, rate 0.2, symmetric`."""
        return f"{self.form} label noise, rate {self.rate:g}, {self.kind}"


class RotationSettings(Section):
    """An angle for each client's images: feature skew. Quarter turns need no interpolation."""

    # Client i has the angle number i modulo their number.
    degrees: Annotated[list[Annotated[int, OneOf(lambda: (0, 90, 180, 270))]], Field(min_length=1)]

    @property
    def words(self) -> str:
        """`images rotated by 0, 90 degrees`."""
        return f"images rotated by {', '.join(map(str, self.degrees))} degrees"


class DriftSettings(Section):
    """Concept drift: clients swap the labels of two classes from some round on."""

    at: Count  # the first round with other labels
    # Client i swaps the pair number i modulo their number; an empty one swaps nothing.
    swap: list[list[ClassName]]
    kind: Literal["sudden", "incremental", "recurrent"] = "sudden"
    # Rounds from one group of clients to the next, or until the first labels come back.
    every: Count | None = None

    @model_validator(mode="after")
    def _fits(self) -> DriftSettings:
        if (self.kind == "sudden") is (self.every is not None):
            needed = "null; a sudden drift has no second round"
            if self.kind != "sudden":
                needed = f"a number of rounds, which {self.kind} drift needs"
            raise UserError(where=("every",), value=self.every, allowed=needed)
        if not any(self.swap) or any(
            pair and (len(pair) != 2 or str(pair[0]) == str(pair[1])) for pair in self.swap
        ):
            raise UserError(where=("swap",), value=self.swap, allowed=PAIRS)
        return self

    @property
    def last(self) -> int:
        """The last round in which labels change."""
        steps = {"incremental": len(self.swap) - 1, "recurrent": 1}.get(self.kind, 0)
        return self.at + steps * (self.every or 0)

    @property
    def words(self) -> str:
        """`sudden drift from round 20, swapped classes 1-7, 3-4`."""
        pairs = ", ".join("-".join(map(str, pair)) or "none" for pair in self.swap)
        often = "" if self.every is None else f" every {self.every}"
        return f"{self.kind} drift from round {self.at}{often}, swapped classes {pairs}"


class AvailabilitySettings(Section):
    """The clients that are missing from rounds: at random, or as a file lists them."""

    rate: Below1 | None = None  # the fraction that misses a round
    file: str | None = None  # relative to the experiment's root; columns as `absences.COLUMNS`
    _missing: absences.Missing | None = PrivateAttr(None)  # what the file lists, once it is read

    @model_validator(mode="after")
    def _one(self) -> AvailabilitySettings:
        if (self.rate is None) is (self.file is None):
            given = "both are" if self.file is not None else "neither is"
            raise UserError(f"{given} given", allowed="one of rate and file")
        return self

    @model_serializer
    def _shown(self) -> dict[str, object]:
        """What is given; of a file also the hash of what it lists, so that items depend on it."""
        if self.file is None:
            return {"rate": self.rate}
        listed = None if self._missing is None else absences.text(self._missing)
        return {"file": self.file, "sha256": listed and hashlib.sha256(listed.encode()).hexdigest()}

    def read(self, root: Path, rounds: int, n_clients: int) -> None:
        """Reads the file, if there is one. UserError for its mistakes."""
        if self.file is not None:
            with located("file"):
                self._missing = absences.read(root / self.file, rounds, n_clients)

    def absent(self, seed: int) -> absences.Absent:
        """The clients that do not answer in a run with this seed."""
        if self.rate is not None:
            return absences.sometimes(self.rate, seed)
        assert self._missing is not None, "`load` reads the file"
        return absences.listed(self._missing)

    @property
    def words(self) -> str:
        """`20 % of the clients missing per round`."""
        if self.rate is not None:
            return f"{100 * self.rate:g} % of the clients missing per round"
        return f"clients missing as in {self.file}"


def _partition(name: str) -> str:
    partitions.find(name)
    return name


class Scenario(OpenSection):
    """How the data are divided among the clients.

    The partition's own parameters stand beside these keys.
    """

    partition: Annotated[str, AfterValidator(_partition)]
    clients: Count
    participation: Share = 1.0
    noise: NoiseSettings | None = None
    label_noise: LabelNoiseSettings | None = None
    rotation: RotationSettings | None = None
    drift: DriftSettings | None = None
    availability: AvailabilitySettings | None = None

    @model_validator(mode="after")
    def _fits(self) -> Scenario:
        """Finds mistakes before the first stage. Only the partition can check its parameters on the
        data."""
        groups: dict[tuple[str, ...], list[Any]] = {}
        if self.rotation is not None:
            groups["rotation", "degrees"] = [*self.rotation.degrees]
        if self.drift is not None:
            groups["drift", "swap"] = self.drift.swap
        with together() as checked:
            with checked():
                partitions.check(self.partition, self.options, type(self).model_fields)
            for where, values in groups.items():
                with checked(*where):
                    if len(values) > self.clients:
                        raise UserError(
                            value=values, allowed=f"at most one per client, {self.clients}"
                        )
        return self

    @property
    def resolved(self) -> dict[str, Any]:
        """The scenario with the defaults of its partition, and the cohort."""
        options = defaults_by_name(self.partition, partitions.PARTITIONS)
        return options | self.model_dump() | {"cohort": self.cohort}

    def own_code(self) -> dict[str, str]:
        """The user's partition, if it is his own: name -> SHA-256 of its source and
        files."""
        name = self.partition
        return {name: source_with_files(name, self.options)} if is_own(name) else {}

    @property
    def cohort(self) -> int:
        """M, clients per round."""
        return cohort_size(self.participation, self.clients)
