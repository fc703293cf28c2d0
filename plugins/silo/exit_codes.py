"""The ways in which a process ends, and their exit codes."""

from __future__ import annotations

from fedml_noniid.plugins.core.errors import UserError


class QuorumError(UserError):
    """Too few silos answered, and the server has given the run up.

    It can be started again, and goes on.
    """


class NotAdmittedError(UserError):
    """The other side refuses this process for good: certificate, configuration, or a second process
    of one silo."""


class SetBackError(UserError):
    """The memories of a silo and of the server are not of the same moment."""


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


def one_line(text: str, limit: int = 1000) -> str:
    """The text, cut, with control characters escaped: another machine may have written it."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit]
    )[:limit]


CODES: dict[type[BaseException], int] = {
    BrokenError: 1,
    UserError: 2,
    QuorumError: 3,
    NotAdmittedError: 4,
    LostError: 5,
    StoppedError: 6,
}


def code(error: BaseException) -> int:
    """The exit code of an error."""
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
