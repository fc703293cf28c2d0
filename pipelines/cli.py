"""The edge of every command: its arguments, the environment, and errors for people."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.plugins.core.errors import UserError

INTERRUPTED = 128 + signal.SIGINT  # exit code, as shells have it


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A command line with the module's own words as its help, and `--root`."""
    made = argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--root", type=Path, default=Path(), help="folder of params.yaml (this one)")
    return made


def guarded(work: Callable[[argparse.Namespace, Workspace], None], options: argparse.Namespace) -> int:
    """Does the work; a UserError is printed, one line per error, and gives exit code 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    # Libraries that report every step of their own work at this level.
    for name in ("alembic", "mlflow", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        work(options, Workspace.of(options.root, os.environ))
    except UserError as error:
        sys.stderr.write("".join(f"error: {line}\n" for line in str(error).splitlines()))
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on from here\n")
        return INTERRUPTED
    return 0
