"""What every stage's command line shares: its arguments, and errors for people."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable

from plugins.core.errors import UserError


def run(
    stage: Callable[[argparse.Namespace], None], description: str | None, arguments: list[str], *options: str
) -> int:
    """Parses `options` (all required; `seed` is a number), runs the stage; a UserError is printed and gives 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    # Libraries that report every step of their own work at this level.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    for option in options:
        parser.add_argument(f"--{option}", required=True, type=int if option == "seed" else str)
    return guarded(stage, parser.parse_args(arguments))


def guarded(work: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """Does the work; a UserError is printed, one line per error, and gives exit code 2."""
    try:
        work(options)
    except UserError as error:
        sys.stderr.write("".join(f"error: {line}\n" for line in str(error).splitlines()))
        return 2
    return 0
