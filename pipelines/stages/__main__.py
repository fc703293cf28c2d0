"""Runs one stage of dvc.yaml. The stages in the order of their dependencies:

plan       hashes of the settings and code of each stage -> plan/<stage>.json
prepare    a data set's own files -> data/<name>.safetensors
partition  which client holds which samples -> partitions/<scenario>-<seed>/
train      every recipe on every partition -> runs/<scenario>-<recipe>-<seed>/
evaluate   the final models, per class and per client -> evaluation/<scenario>-<recipe>-<seed>/
report     tables, pictures and sentences -> report/
deploy     one recipe through FedML cross-silo, compared with its simulation -> deploy/result.json
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fedml_noniid.pipelines import edge
from fedml_noniid.pipelines.experiment.workspace import Workspace

STAGES = ("plan", "prepare", "partition", "train", "evaluate", "report", "deploy")


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code.

    It is DVC's: a stage starts without what people's commands need.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fedml_noniid.pipelines.stages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--root", type=Path, default=Path(), help="folder of params.yaml (this one)"
    )
    parser.add_argument("stage", choices=STAGES, metavar=" | ".join(STAGES))
    options = parser.parse_args(arguments)
    return edge.guarded(
        lambda: run(options.stage, Workspace.from_environment(options.root, os.environ))
    )


def run(stage: str, workspace: Workspace) -> None:
    """Runs one stage."""
    importlib.import_module(f"fedml_noniid.pipelines.stages.{stage}").run(workspace)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
