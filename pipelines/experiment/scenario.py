"""A scenario of params.yaml: how the data are divided among the clients, and their skews."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    model_serializer,
    model_validator,
)
from torch import Tensor

from fedml_noniid.core.errors import UserError, located, together
from fedml_noniid.core.options import (
    Below1,
    Count,
    Fraction,
    NonNegative,
    OneOf,
    OpenSection,
    Range,
    Section,
    Share,
    check_options,
)
from fedml_noniid.data import noise, partitions
from fedml_noniid.data.checks import ClassName, class_numbers
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.streams import stream
from fedml_noniid.data.unseen import checked
from fedml_noniid.engines import absences, attackers
from fedml_noniid.engines.attackers import Attackers
from fedml_noniid.engines.cohort import cohort_size
from fedml_noniid.own_code import defaults_by_name, defaults_of, is_own, source_with_files
from fedml_noniid.pipelines.experiment.devices import DeviceSettings, WaitSettings

SKEWS = ("noise", "label_noise", "rotation", "drift")  # beside the options of its partition
# Keys that change no split of the data.
OF_RUN = ("availability", "attack", "devices", "waits")
PAIRS = "pairs of two classes such as [[1, 2], [3, 4]]; [] for clients that keep their labels"


def pairs(values: Mapping[str, object]) -> str:
    """`sigma 0.1, form level`."""
    return ", ".join(f"{key} {value}" for key, value in values.items())


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


class RotationSettings(Section):
    """An angle for each client's images: feature skew. Quarter turns need no interpolation."""

    # Client i has the angle number i modulo their number.
    degrees: Annotated[list[Annotated[int, OneOf(lambda: (0, 90, 180, 270))]], Field(min_length=1)]


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
            raise UserError(path=("every",), value=self.every, allowed=needed)
        if not any(self.swap) or any(
            pair and (len(pair) != 2 or str(pair[0]) == str(pair[1])) for pair in self.swap
        ):
            raise UserError(path=("swap",), value=self.swap, allowed=PAIRS)
        return self

    @property
    def last(self) -> int:
        """The last round in which labels change."""
        steps = {"incremental": len(self.swap) - 1, "recurrent": 1}.get(self.kind, 0)
        return self.at + steps * (self.every or 0)


class AvailabilitySettings(Section):
    """The clients that are missing from rounds: at random, or as a file lists them."""

    rate: Below1 | None = None  # the fraction that misses a round
    file: str | None = None  # relative to the experiment's root; columns as `absences.COLUMNS`
    _missing: absences.Missing | None = PrivateAttr(None)  # what the file lists, once it is read

    @model_validator(mode="after")
    def _one(self) -> AvailabilitySettings:
        if (self.rate is None) is (self.file is None):
            count = "both are" if self.file is not None else "neither is"
            raise UserError(f"{count} given", allowed="one of rate and file")
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


def _all(waits: object) -> object:
    return {} if waits == "all" else waits


class AttackSettings(OpenSection):
    """Clients that lie, in their samples or in their updates. Options of the kind stand beside."""

    # the fraction that attacks: max(1, round(fraction x clients)) of them
    clients: Annotated[float, Range(0, 1, open="()")]
    kind: Annotated[str, OneOf(lambda: attackers.KINDS)]
    n_factor: Count = 1  # an attacker claims so many times its samples

    @model_validator(mode="after")
    def _fits(self) -> AttackSettings:
        check_options(attackers.KINDS[self.kind], self.options, type(self).model_fields)
        return self

    @model_serializer
    def _shown(self) -> dict[str, object]:
        """All options with their defaults, so that items depend on them."""
        options = defaults_of(attackers.KINDS[self.kind])
        claimed = {} if self.n_factor == 1 else {"n_factor": self.n_factor}
        return {"clients": self.clients, "kind": self.kind, **claimed, **options, **self.options}

    def drawn(self, data: Dataset, n_clients: int, seed: int) -> Attackers:
        """The attackers of a run with this seed. UserError for unfit data."""
        attackers.refuse_data(self.kind, data)
        options = defaults_of(attackers.KINDS[self.kind]) | self.options
        if "target" in options:
            target = class_numbers(("attack", "target"), data.classes, [options["target"]])
            options["target"] = target[0]
        order = stream(seed, "attackers").permutation(n_clients).tolist()
        clients = sorted(order[: cohort_size(self.clients, n_clients)])
        return Attackers(self.kind, options, tuple(clients), seed, self.n_factor)


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
    devices: DeviceSettings | None = Field(default=None, exclude_if=lambda value: value is None)
    waits: Annotated[WaitSettings, BeforeValidator(_all)] = Field(
        default=WaitSettings(), exclude_if=lambda value: not value.chosen
    )
    attack: AttackSettings | None = Field(default=None, exclude_if=lambda value: value is None)
    # Owners that take no part: how many, or their names. They are left out before anything is
    # fitted to the data.
    unseen: Annotated[int | list[str], BeforeValidator(checked)] | None = Field(
        default=None, exclude_if=lambda value: value is None
    )

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
            for path, values in groups.items():
                with checked(*path):
                    if len(values) > self.clients:
                        raise UserError(
                            value=values, allowed=f"at most one per client, {self.clients}"
                        )
            with checked():
                self._check_waits()
        return self

    def _check_waits(self) -> None:
        """UserError if the server can't wait so."""
        counted = self.waits.first or self.waits.buffer
        if self.devices is None and self.waits.chosen:
            raise UserError("waits needs devices, whose time it is about", allowed="all")
        if self.devices is not None and self.availability is not None:
            allowed = "one of them; devices has dropout, on_s and every_s"
            raise UserError("devices and availability are given", allowed=allowed)
        if self.participation != 1 and counted:
            raise UserError(
                "says how many clients take part, and so does waits",
                path=("participation",),
                allowed="one of them",
            )
        with located("waits"):
            self.waits.check(self.clients)

    def read_files(self, root: Path, rounds: int) -> None:
        """Reads the files that it names. UserError for their mistakes."""
        if self.availability is not None:
            with located("availability"):
                self.availability.read(root, rounds, self.clients)
        if self.devices is not None:
            with located("devices"):
                self.devices.read(root, self.clients)

    def described(self, *keys: str) -> list[str]:
        """`noise (sigma 0.1, form level)` for each of these keys that is set, in the words of
        params.yaml."""
        sections = self.model_dump(exclude_none=True)
        shown = {key: values for key in keys if (values := sections.get(key))}
        for values in shown.values():
            values.pop("sha256", None)
        return [f"{key} ({pairs(values)})" for key, values in shown.items()]

    @property
    def files(self) -> list[str]:
        """The files that it names."""
        sections = (self.availability, self.devices)
        return [section.file for section in sections if section is not None and section.file]

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
        """M, clients per round whose answers count."""
        if counted := self.waits.first or self.waits.buffer:
            return counted
        return cohort_size(self.participation, self.clients)
