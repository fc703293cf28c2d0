"""The papers' tables and figures. All studies share the store of finished work with `make repro`.

python -m fedml_noniid.pipelines.papers list                        # every table and figure
python -m fedml_noniid.pipelines.papers run rfedavg --size smoke    # a paper's studies and its report
python -m fedml_noniid.pipelines.papers build rf-tab1 --size smoke  # the studies of one target, and the target alone
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from fedml_noniid.pipelines import cli
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers import report
from fedml_noniid.pipelines.papers.studies import PAPERS, RESULTS, SIZES, of_paper
from fedml_noniid.pipelines.papers.targets.spec import of_targets, paper_of

log = logging.getLogger(__name__)


def _run(options: argparse.Namespace, place: Workspace) -> None:
    if options.command == "list":
        for name in PAPERS:
            for one in of_targets(name, place.root).values():
                sys.stdout.write(f"{one.id:<12} {report.TITLES[name]:<10} {one.title}\n")
        return
    # Imported here: it imports torch and mlflow, which takes seconds.
    from fedml_noniid.pipelines.papers.study import execute, settled

    whole = options.command == "run"
    paper = options.name if whole else paper_of(options.name, place.root)
    studies = of_paper(paper, options.size, place.root)
    target = None if whole else of_targets(paper, place.root)[options.name]
    for name in studies if target is None else target.studies:
        execute(place, studies[name])
    if target is None:
        done, of = settled(place.root, studies.values())
        log.info("%s %s: %d of the paper's %d items are settled", paper, options.size, done, of)
        report.run(place, paper, options.size)
        return
    folder = RESULTS / "single" / f"{target.id}-{options.size}"
    built = report.write(paper, options.size, place.root, {target.id: target}, folder)
    sys.stdout.write("\n" + (built.folder / f"{target.id}.md").read_text())


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = cli.parser("fedml_noniid.pipelines.papers", __doc__)
    parser.add_argument("command", choices=["list", "run", "build"])
    parser.add_argument("name", nargs="?", default="", help="a paper (run), a table or figure (build)")
    parser.add_argument("--size", choices=SIZES, default="smoke")
    return cli.guarded(_run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
