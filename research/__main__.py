"""`python -m research`: the papers' tables and figures, and their claims as tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedml_noniid.cli import app as noniid
from fedml_noniid.cli.verb import group
from research.cli import claims, papers

app = group(
    "The five papers: their tables and figures, and their claims as tests.",
    "python -m research papers list",
    "python -m research claims fednnnn --size smoke",
)
papers.add(app)
claims.add(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of this process. Returns the exit code."""
    return noniid.main(arguments, app, "python -m research")


if __name__ == "__main__":
    sys.exit(main())
