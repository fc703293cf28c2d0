"""Which stages a table or figure needs, and building it alone.

python -m pipelines.papers stages rf-tab1 --size smoke   # the names of DVC's stages for `dvc repro`
python -m pipelines.papers build rf-tab1 --size smoke    # prints it; files in papers/<paper>/<size>/single/<id>
python -m pipelines.papers list                          # every table and figure
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from pipelines import cli, config, paper
from pipelines.studies import PAPERS, SIZES
from pipelines.targets.spec import of_targets, paper_of


def _run(options: argparse.Namespace) -> None:
    root = config.root()
    if options.command == "list":
        for name in PAPERS:
            for target in of_targets(name, root).values():
                sys.stdout.write(f"{target.id:<12} {paper.TITLES[name]:<10} {target.title}\n")
        return
    owner = paper_of(options.id, root)
    target = of_targets(owner, root)[options.id]
    if options.command == "stages":
        names = (f"pipelines/{owner}/dvc.yaml:study@{options.size}-{study}" for study in target.studies)
        sys.stdout.write(" ".join(names) + "\n")
        return
    place = paper.write(owner, options.size, root, {target.id: target}, f"single/{target.id}").folder
    sys.stdout.write("\n" + (place / f"{target.id}.md").read_text())


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["stages", "build", "list"])
    parser.add_argument("id", nargs="?", default="", help="as rf-tab1 or nnnn-fig13")
    parser.add_argument("--size", choices=SIZES, default="smoke")
    return cli.guarded(_run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
