"""A silo with the extra [silo] alone, as processes of an interpreter that has nothing more.

NONIID_SILO_PYTHON names the interpreter; `make test-silo` makes one with FedML 0.9.6.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from fedml_noniid import extras
from tests.deploy.test_fedml_project import ENVIRONMENT, copied, project

PYTHON = os.environ.get("NONIID_SILO_PYTHON", "")
DEADLINE_S = 600.0  # four processes import FedML at once
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * DEADLINE_S),
    pytest.mark.skipif(not PYTHON, reason="NONIID_SILO_PYTHON names no interpreter with [silo]"),
]
# FedML's own dependencies bring these two.
LACKING = {*extras.MODULES[extras.PIPELINE]} - {"jinja2", "markdown_it", "typer"}
FACTS = """
import json, sys
from importlib.metadata import version
from importlib.util import find_spec
installed = [name for name in json.loads(sys.argv[1]) if find_spec(name)]
print(json.dumps([version("fedml"), installed]))
"""
PREPARE = """
import sys
from pathlib import Path
from fedml_noniid.processes import loopback
from tests.deploy import world
deployment, parts = world.deployment("scaffold+ccn", rounds=3), world.parts(public=False)
print(loopback.Processes(deployment, parts, Path(sys.argv[1])).config)
print(loopback.simulate(deployment, parts))
"""


def ran(folder: Path, *arguments: str) -> str:
    """What the interpreter prints."""
    done = subprocess.run(
        [PYTHON, *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def fedml_version(folder: Path) -> str:
    """The version of FedML, where nothing of the pipeline is installed."""
    version, installed = json.loads(ran(folder, "-c", FACTS, json.dumps(sorted(LACKING))))
    assert installed == []
    return str(version)


def test_a_deployment_ends_with_the_weights_of_the_simulation(tmp_path: Path) -> None:
    """By the verbs of the command line, and so do the checks of its logs."""
    fedml_version(tmp_path)
    config, simulated = ran(tmp_path, "-c", PREPARE, str(tmp_path / "run")).split()[-2:]
    noniid = [PYTHON, "-m", "fedml_noniid"]
    silos = [["silo", "--rank", str(rank)] for rank in (1, 2, 3)]
    processes = [
        subprocess.Popen(
            [*noniid, "deploy", *words, "--config", config],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for words in (["server"], *silos)
    ]
    try:
        said = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 4, said
    assert re.findall(r"^weights ([0-9a-f]{64}) in ", said[0], re.MULTILINE) == [simulated]
    output, ca = tmp_path / "run" / "run", str(tmp_path / "run" / "kits" / "0" / "ca.crt")
    mine, theirs = (str(output / f"audit-{rank}.jsonl") for rank in (1, 0))
    verify = ("-m", "fedml_noniid", "audit", "verify", mine, "--ca", ca, "--against", theirs)
    assert "agree with it" in ran(tmp_path, *verify)
    replay = ("-m", "fedml_noniid", "audit", "replay", "--rank", "1", "--config", config)
    assert ran(tmp_path, *replay).count("the same SHA-256") >= 3


@pytest.mark.usefixtures("ports")
def test_the_project_of_the_page_ends_with_the_weights_of_the_simulation(tmp_path: Path) -> None:
    """FedML's own runner and gRPC, with the addresses in the form of its version."""
    is_new = not fedml_version(tmp_path).startswith("0.8.")
    changes = [("fedml_config.yaml", '"ip.csv"', '"ip_0.9.6.csv"')] if is_new else []
    folder = copied(tmp_path, *changes)
    with project(folder, PYTHON) as processes:
        codes = [process.wait(DEADLINE_S) for process in processes]
    assert codes == [0] * 4, folder
    (_, simulated), (_, deployed) = map(str.split, ran(folder, "simulation.py").splitlines()[-2:])
    assert simulated == deployed and len(simulated) == 64
