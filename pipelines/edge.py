"""The edge of every process: logging, errors for people, and exit codes."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import REMEDIES

WRONG_INPUT = 2  # exit codes, as shells have them
INTERRUPTED = 128 + signal.SIGINT


def guarded(work: Callable[[], int | None]) -> int:
    """Does the work and returns the exit code.

    A UserError is printed, one line per error, and gives 2.
    """
    # Tensors of some megabytes in large pages: getting small ones from Linux costs more than what
    # is calculated in them. torch reads this once, with its first tensor.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Imports make many objects and no garbage: looking for it takes a tenth of a start.
    gc.set_threshold(20_000)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.raiseExceptions = False  # on a full disk, a line that can't be logged is no traceback
    # Libraries that report every step of their own work at this level.
    for name in ("alembic", "mlflow", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return work() or 0
    except UserError as error:
        tell(error)
        return WRONG_INPUT
    except OSError as error:  # of a file that no other code expects to fail
        if error.errno not in REMEDIES:
            raise
        tell(
            UserError(
                f"{error.filename or 'the output'}: {error.strerror}; {REMEDIES[error.errno]}"
            )
        )
        return WRONG_INPUT
    except RuntimeError as error:
        if not str(error).startswith("Symlink loop"):  # so says pathlib
            raise
        tell(UserError(str(error), allowed="a path that ends at a file or a folder"))
        return WRONG_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on from here\n")
        return INTERRUPTED


def tell(error: UserError) -> None:
    """Prints an error, one line per mistake."""
    sys.stderr.write("".join(f"error: {line}\n" for line in str(error).splitlines()))
