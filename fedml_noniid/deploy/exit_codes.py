"""The ways in which a process ends, and their exit codes."""

from __future__ import annotations

from fedml_noniid.core.errors import UserError


class QuorumError(UserError):
    """Too few silos answered, and the server has given the run up.

    It can be started again, and goes on.
    """


class LostRoundError(QuorumError):
    """A silo has spoilt a sum, and the others may not be added up without it."""


class PolicyError(UserError):
    """The policy of this site refuses the study. Only its owner can change that."""


class BrokenError(UserError):
    """The process can't go on for a reason that may pass, such as a full disk.

    It can be started again, and goes on.
    """


class LostError(UserError):
    """The server can't be reached."""


class StoppedError(BaseException):
    """The process was asked to stop.

    It can be started again, and goes on. Nothing on the way catches this.
    """


CODES: dict[type[BaseException], int] = {
    BrokenError: 1,
    UserError: 2,
    QuorumError: 3,
    PolicyError: 4,
    LostError: 5,
    StoppedError: 6,
}


def code(error: BaseException) -> int:
    """The exit code of an error."""
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
