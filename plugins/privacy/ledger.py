"""The privacy ledger of a silo: a file that counts every release, and refuses when the budget is
spent.

A line of JSON per release, on the disk before the answer leaves. A release that is repeated, with
the same answer to the same question and the same noise, is counted once. So a kill between line and
answer costs at most what that answer costs. The ledger is about the samples, not about a run: it
outlives both.

Each line has the SHA-256 of itself and of all lines before it, and the file `<ledger>.head` the
last of them. So a line that is changed, removed or cut off is found. Who may write both files can
make them anew: they guard against mistakes and lost data, not against the silo's owner.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import weakref
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedml_noniid.plugins.core.errors import UserError, located, shown
from fedml_noniid.plugins.core.options import check_options
from fedml_noniid.plugins.data.files import Lines, opened, write_whole, writing
from fedml_noniid.plugins.privacy.accounting import epsilon

LOG = logging.getLogger(__name__)
FORMAT = "noniid privacy ledger 1"
REMEDY = "restore both files from a backup, or begin with new samples"


class BudgetError(UserError):
    """A release that the budget does not allow."""


@dataclass(frozen=True)
class Budget:
    """The most that may be spent of each sample."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Release:
    """Describes what leaves: Gaussian noise on something about one unit, `count` times."""

    id: str  # of the answer to this question, in this noise
    unit: str  # what is hidden: "sample", or "silo" for all of its samples; for readers
    noise: float  # noise multiplier, see `accounting.epsilon`; 0: none
    count: int = 1
    what: str = ""  # for readers


class Ledger:
    """Counts the releases of one silo. One process has it at a time."""

    def __init__(self, path: Path, budget: Budget | None, owner: str) -> None:
        """Use `open`."""
        self.path, self.budget, self.owner = path, budget, owner
        self._head = path.with_name(f"{path.name}.head")
        # Noise multiplier -> releases, of all units: what is about a silo is about each sample.
        self._counts = Counter[float]()
        self._ids: set[str] = set()
        self._file, self._lines, self._chain = Lines(path), 0, ""
        self._headed = 0  # lines that the head counts
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with opened(path.with_name(f"{path.name}.lock"), "ab", private=True) as file:
                self._lock = os.dup(file.fileno())
        self.close = weakref.finalize(self, os.close, self._lock)  # lets other processes have it

    @classmethod
    def open(cls, path: Path, budget: Budget | None = None, owner: str = "") -> Ledger:
        """The ledger in a file; it is made if there is none. None: no budget, releases are counted.

        UserError names a file that is damaged, cut off, of another owner, or in use.
        """
        ledger = cls(path, budget, owner)
        try:
            ledger._begin()
        except UserError:
            ledger.close()
            raise
        return ledger

    def spend(self, release: Release) -> None:
        """Counts a release before it leaves; one that is counted already is not counted again.

        BudgetError if the budget does not allow it; then nothing is counted. UserError if the file
        can't be written.
        """
        self._write_head()  # it is behind if the disk was full
        if release.id in self._ids:
            return
        if self.budget is not None:
            counts = self._counts + _counted(release)
            found, most = epsilon(counts, self.budget.delta), self.budget.epsilon
            if found > most:
                raise BudgetError(
                    f"{self.path}: the privacy budget does not allow this answer: epsilon per "
                    f"sample would be {found:.4g} at delta {self.budget.delta:g}, and the "
                    f"budget is {most:g}"
                )
        self._append(asdict(release))
        self._count(release)
        self._write_head()

    def epsilon(self, delta: float) -> float:
        """What has been spent of each sample."""
        return epsilon(self._counts, delta)

    def _begin(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{self.path}: another process uses this privacy ledger") from None
        self._read()
        if not self._lines:
            LOG.warning("%s: a new privacy ledger begins; nothing has been spent in it", self.path)
            self._append({"format": FORMAT, "owner": self.owner})
        self._write_head()

    def _count(self, release: Release) -> None:
        self._ids.add(release.id)
        self._counts.update(_counted(release))

    def _append(self, fields: dict[str, Any]) -> None:
        chain = _chained(self._chain, fields)
        self._file.add(json.dumps({**fields, "chain": chain}).encode())
        self._lines, self._chain = self._lines + 1, chain

    def _write_head(self) -> None:
        if self._headed < self._lines:
            head = json.dumps({"lines": self._lines, "chain": self._chain})
            write_whole(self._head, head, private=True)
            self._headed = self._lines

    def _read(self) -> None:
        try:
            lines = [*self._file.read()]  # what a kill has cut off never left
            head = json.loads(self._head.read_bytes()) if self._head.exists() else {"lines": 0}
            parsed = [dict(json.loads(line)) for line in lines]
            counted, last = int(head["lines"]), head.get("chain")
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise UserError(f"{self.path}: is no privacy ledger ({error}); {REMEDY}") from None
        # A kill may have come between a line and the head.
        if not 0 <= len(lines) - counted <= 1:
            raise UserError(
                f"{self.path}: has {len(lines)} lines, and its head counts {counted}; {REMEDY}"
            )
        for number, fields in enumerate(parsed, start=1):
            chain = fields.pop("chain", "")
            if chain != _chained(self._chain, fields):
                raise UserError(f"{self.path}: line {number} was changed; {REMEDY}")
            if number == 1 and fields != {"format": FORMAT, "owner": self.owner}:
                raise UserError(
                    f"{self.path}: is the privacy ledger of {shown(fields.get('owner'))}; this is "
                    f"{self.owner!r}; {REMEDY}"
                )
            if number == counted and chain != last:
                raise UserError(f"{self.path}: {self._head.name} is of another file; {REMEDY}")
            self._lines, self._chain = number, chain
            if number > 1:
                with located(source=f"{self.path}: line {number}"):
                    check_options(Release, fields)
                self._count(Release(**fields))
        self._headed = counted


def _counted(release: Release) -> Counter[float]:
    return Counter({release.noise: release.count})


def _chained(before: str, fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()
