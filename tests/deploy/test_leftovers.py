"""What a process leaves behind on a disk: temporary folders of killed writers, folders of its
libraries, its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fedml_noniid.cli.app import main
from fedml_noniid.credentials import authority
from fedml_noniid.deploy import results, settings
from fedml_noniid.governance import policy
from fedml_noniid.processes import launch, loopback
from tests.deploy import world
from tests.deploy.federation_server import address


def killed(path: Path) -> Path:
    """The folder that a writer of `path` leaves when it is killed in the middle: by a real writer's
    process."""
    before = set(path.parent.iterdir())
    code = (
        "import os, sys; from pathlib import Path; from fedml_noniid.data.files import "
        "write_whole; "
        "write_whole(Path(sys.argv[1]), lambda _: os.kill(os.getpid(), 9))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    (left,) = set(path.parent.iterdir()) - before
    return left


def test_keys_that_a_killed_command_left_are_removed(tmp_path):
    kits = tmp_path / "kits"
    code = (
        "import os, sys; from pathlib import Path; from fedml_noniid.credentials import "
        "authority; "
        "os.fsync = lambda _: os.kill(os.getpid(), 9); authority.make(Path(sys.argv[1]), 1)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(kits)], check=False).returncode == -9
    assert [path.name[:4] for path in kits.iterdir()] == [".ca."]
    authority.make(kits, 1)
    assert {path.name for path in kits.iterdir()} == {"ca", "0", "1"}


def test_a_process_removes_what_it_left_and_its_log_has_one_line_per_line(tmp_path):
    """The log of a silo whose server says control characters; the file is that of a real
    process."""
    code = (
        "import logging, sys; from pathlib import Path; from fedml_noniid.deploy import "
        "exit_codes; from fedml_noniid.processes import launch\n"
        "def no(self): logging.getLogger('fedml_noniid.x').warning('server: %s', 'a\\nround 9 "
        "of 9\\x1b[2J\\u202e')\n"
        "def bad(self): no(self); raise exit_codes.QuorumError("
        "'the server ended the run: x\\nerror: y\\x1b[2J')\n"
        "launch.Process._silo = bad\n"
        "sys.exit(launch.run(1, Path(sys.argv[1])))"
    )
    with loopback.Processes(world.deployment("fedavg"), world.parts(), tmp_path) as processes:
        ours, theirs = (killed(processes.output / f"silo-{k}.safetensors") for k in (1, 4))
    done = subprocess.run(
        [sys.executable, "-c", code, str(processes.config)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    warning, error = done.stderr.splitlines()
    assert warning.endswith(" server: a\\nround 9 of 9\\x1b[2J\\u202e")
    assert error == "error: the server ended the run: x\\nerror: y\\x1b[2J"
    assert not ours.exists() and theirs.exists()  # of killed writers
    lines = launch.log_file(processes.output, 1).read_text().splitlines()
    assert [line.partition(" ")[2].partition(" ")[2] for line in lines] == [
        "server: a\\nround 9 of 9\\x1b[2J\\u202e",
        "error: the server ended the run: x\\nerror: y\\x1b[2J",
    ]


def test_status_after_the_end_says_that_the_run_is_over(tmp_path, capsys, all_kits):
    """Before the run, nobody answers. After it, the server's files do."""
    places = {"kit": str(all_kits / "{rank}"), "study": str(tmp_path / "study.yaml")}
    content = {"comm_args": {"server": address(), **places}}
    content["train_args"] = {"max_samples": 70}
    content["tracking_args"] = {"output_dir": str(tmp_path)}
    config, model = tmp_path / "config.yaml", tmp_path / results.MODEL
    config.write_text(settings.check(content, "test").yaml())
    policy.admit_own(settings.check(content, "test"), world.shards_of()[0], tmp_path)
    assert main(["deploy", "status", "--config", str(config)]) == 5
    assert "is the server running?" in capsys.readouterr().err
    model.write_bytes(b"weights")
    (tmp_path / results.ROUNDS).write_text("round\n1\n2\n")
    assert main(["deploy", "status", "--config", str(config)]) == 0
    assert json.loads(capsys.readouterr().out) == {"over": True, "rounds": 2, "model": str(model)}
