"""The clients' devices and the server's waiting, of a scenario of params.yaml."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import PrivateAttr, model_serializer, model_validator

from fedml_noniid.core.errors import UserError, located
from fedml_noniid.core.options import Below1, Count, Positive, Section
from fedml_noniid.engines.absences import whole_numbers
from fedml_noniid.engines.schedule import Devices, Waits, drawn, microseconds, windows

COLUMNS = ("client", "step_us", "down_bytes_s", "up_bytes_s")
OWNER = "owner"  # may stand in place of `client`
SPEEDS = ("step_ms", "spread", "down_mbit", "up_mbit")  # what a file has in their place


class DeviceSettings(Section):
    """How long the clients' work takes on a virtual clock: drawn by the seed, or as in a file."""

    step_ms: Positive | None = None  # of a local step on the fastest device
    spread: Positive | None = None  # the slowest device takes so many times that; None: 1
    down_mbit: Positive | None = None  # of the fastest link; None: messages take no time
    up_mbit: Positive | None = None
    file: str | None = None  # relative to the experiment's root; columns as COLUMNS, or with OWNER
    dropout: Below1 = 0.0  # the probability that a client's work of a round is lost
    on_s: Positive | None = None  # a client is available for so long
    every_s: Positive | None = None  # in each period of this length
    # of the file, by client or owner, once it is read
    _rows: dict[int | str, tuple[int, ...]] = PrivateAttr({})

    @model_validator(mode="after")
    def _fits(self) -> DeviceSettings:
        if (self.step_ms is None) is (self.file is None):
            both = "neither is" if self.file is None else "both are"
            raise UserError(f"{both} given", allowed="one of step_ms and file")
        if self.file is not None and (beside := [key for key in SPEEDS if getattr(self, key)]):
            raise UserError(f"{beside[0]} is given beside a file", allowed="one of them")
        if self.spread is not None and self.spread < 1:
            raise UserError(path=("spread",), value=self.spread, allowed="a number from 1 up")
        if (self.on_s is None) is not (self.every_s is None):
            raise UserError("one of on_s and every_s is given", allowed="both or none")
        if self.on_s is not None and self.every_s is not None and self.on_s > self.every_s:
            allowed = f"at most every_s, {self.every_s:g}"
            raise UserError(path=("on_s",), value=self.on_s, allowed=allowed)
        return self

    @model_serializer
    def _shown(self) -> dict[str, object]:
        """What counts; of a file also the hash of its numbers, so that items depend on it."""
        keys = type(self).model_fields
        values = {key: value for key in keys if (value := getattr(self, key)) is not None}
        if self.file is not None:
            content = repr(sorted(self._rows.items())).encode()
            values["sha256"] = hashlib.sha256(content).hexdigest() if self._rows else None
        return values

    def read(self, root: Path, n_clients: int) -> None:
        """Reads the file, if there is one. UserError for its mistakes."""
        if self.file is not None:
            with located("file"):
                self._rows = _rows(root / self.file, n_clients)

    def devices(self, n_clients: int, seed: int, owners: Sequence[str] = ()) -> Devices:
        """The devices of a run with this seed; `owners`: of the clients, [N], if they have names.

        UserError for a file by owners that lacks one.
        """
        if self.step_ms is None:
            by_owner = any(isinstance(key, str) for key in self._rows)
            keys: Sequence[int | str] = owners if by_owner else range(n_clients)
            missing = [key for key in keys if key not in self._rows]
            if missing or not keys:
                why = "names owners, clients have none"
                if missing:
                    why = f"lacks owner {missing[0]!r}"
                allowed = "a line for each client's owner, of data that name them"
                raise UserError(f"{self.file}: {why}", allowed=allowed)
            step_us, down, up = zip(*(self._rows[key] for key in keys), strict=True)
            speeds = Devices(step_us, down, up)
        else:
            links = (self.down_mbit or 0.0, self.up_mbit or 0.0)
            speeds = drawn(n_clients, seed, self.step_ms, self.spread or 1.0, links)
        times: tuple[tuple[int, int, int], ...] = ()
        if self.on_s is not None and self.every_s is not None:
            length, period = microseconds(self.on_s), microseconds(self.every_s)
            times = windows(n_clients, seed, length, period)
        return Devices(speeds.step_us, speeds.down, speeds.up, self.dropout, times)


class WaitSettings(Section):
    """When a server's step comes: `all` have answered, a deadline, the first ones, or a buffer."""

    deadline_s: Positive | None = None
    late: Literal["drop", "partial"] | None = None  # the answer of a client that is too slow
    first: Count | None = None  # answers that count
    sampled: Count | None = None  # clients that are asked for them
    buffer: Count | None = None  # FedBuff's K
    concurrency: Count | None = None  # clients that train at a time

    @model_validator(mode="after")
    def _one(self) -> WaitSettings:
        pairs = (("deadline_s", "late"), ("first", "sampled"), ("buffer", "concurrency"))
        chosen = [pair for pair in pairs if any(getattr(self, key) is not None for key in pair)]
        if len(chosen) > 1 or any(getattr(self, key) is None for pair in chosen for key in pair):
            allowed = "all, or one of {deadline_s, late}, {first, sampled}, {buffer, concurrency}"
            raise UserError(value=self.chosen, allowed=allowed)
        if self.first and self.sampled and self.first > self.sampled:
            allowed = f"at most sampled, {self.sampled}"
            raise UserError(path=("first",), value=self.first, allowed=allowed)
        return self

    @property
    def chosen(self) -> dict[str, Any]:
        """Key -> value; empty if the server waits for all."""
        return self.model_dump(exclude_none=True)

    def check(self, n_clients: int) -> None:
        """UserError if there are not so many clients."""
        for key in ("sampled", "buffer", "concurrency"):
            value = getattr(self, key)
            if value is not None and value > n_clients:
                raise UserError(path=(key,), value=value, allowed=f"1 to {n_clients} clients")

    @property
    def built(self) -> Waits:
        """As a schedule takes it."""
        return Waits(
            microseconds(self.deadline_s),
            self.late == "partial",
            *(self.first or 0, self.sampled or 0, self.buffer or 0, self.concurrency or 0),
        )


def _rows(path: Path, n_clients: int) -> dict[int | str, tuple[int, ...]]:
    """The numbers of each client, or of each owner. UserError with file and line for what they must
    not be.

    An owner may have several equal lines, as in a table of samples.
    """
    rows: dict[int | str, tuple[int, ...]] = {}
    limits = (n_clients - 1, None, None, None)
    for source, (key, *speeds) in whole_numbers(path, COLUMNS, limits, named=OWNER):
        if not speeds[0]:
            raise UserError(f"{source}: {key} has step_us = 0", allowed="from 1 up")
        if key in rows and (isinstance(key, int) or rows[key] != tuple(speeds)):
            differing = zip(COLUMNS[1:], rows[key], speeds, strict=True)
            values = [f"{name} = {a} and {b}" for name, a, b in differing if a != b]
            why = f"client {key} is named twice"
            if isinstance(key, str):
                why = f"owner {key!r} has {', '.join(values)}"
            raise UserError(f"{source}: {why}", allowed="once, or for an owner the same numbers")
        rows[key] = tuple(speeds)
    clients = [key for key in rows if isinstance(key, int)]
    if not rows or 0 < len(clients) < n_clients:
        raise UserError(f"{path}: has {len(rows)} clients", allowed=f"0 to {n_clients - 1}")
    return rows
