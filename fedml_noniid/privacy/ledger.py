"""The privacy ledger of a silo: a file that counts every release, and refuses when the budget is
spent.

A line of JSON per release, on the disk before the answer leaves. A release that is repeated, with
the same answer to the same question and the same noise, is counted once. So a kill between line and
answer costs at most what that answer costs. The ledger is about the samples, not about a run: it
outlives both.

A ledger that was changed is found, see `privacy.chained`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import weakref
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from fedml_noniid.core.errors import PublicError, UserError, located
from fedml_noniid.core.options import check_options
from fedml_noniid.data.files import opened, writing
from fedml_noniid.privacy.accounting import epsilon
from fedml_noniid.privacy.chained import ChainedLines

LOG = logging.getLogger(__name__)
REMEDY = "restore both files from a backup, or begin with new samples"


class BudgetError(PublicError):
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
        self.path, self.budget = path, budget
        self._lines = ChainedLines(path, "privacy ledger", owner, REMEDY)
        # Noise multiplier -> releases, of all units: what is about a silo is about each sample.
        self._counts = Counter[float]()
        self._ids: set[str] = set()
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

        BudgetError if the budget does not allow it; then nothing is counted. The server reads it:
        the numbers are in the log alone. UserError if the file can't be written.
        """
        self._lines.write_head()  # it is behind if the disk was full
        if release.id in self._ids:
            return
        if self.budget is not None:
            counts = self._counts + _counted(release)
            spent, most = epsilon(counts, self.budget.delta), self.budget.epsilon
            if spent > most:
                LOG.warning(
                    "%s: epsilon per sample would be %.4g at delta %g, and the budget is %g",
                    *(self.path, spent, self.budget.delta, most),
                )
                why = "budget_epsilon: the privacy budget does not allow this answer"
                raise BudgetError(why).below(source=str(self.path))
        self._lines.add(asdict(release))
        self._count(release)
        self._lines.write_head()

    def epsilon(self, delta: float) -> float:
        """What has been spent of each sample."""
        return epsilon(self._counts, delta)

    def _begin(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{self.path}: another process uses this privacy ledger") from None
        for number, fields in enumerate(self._lines.read(), start=2):
            with located(source=f"{self.path}: line {number}"):
                check_options(Release, fields)
            self._count(Release(**fields))

    def _count(self, release: Release) -> None:
        self._ids.add(release.id)
        self._counts.update(_counted(release))


def _counted(release: Release) -> Counter[float]:
    return Counter({release.noise: release.count})
