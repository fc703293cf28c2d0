"""What a process leaves behind on a disk: temporary folders of killed writers, folders of its
libraries, its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fedml_noniid.credentials import authority
from fedml_noniid.processes import launch, loopback
from tests.deploy import world


def killed(path: Path) -> Path:
    """The folder that a writer of `path` leaves when it is killed in the middle: by a real writer's
    process."""
    before = set(path.parent.iterdir())
    code = """if True:
        import os, sys
        from pathlib import Path
        from fedml_noniid.data.files import write_whole
        write_whole(Path(sys.argv[1]), lambda _: os.kill(os.getpid(), 9))
    """
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    (left,) = set(path.parent.iterdir()) - before
    return left


def test_keys_that_a_killed_command_left_are_removed(tmp_path):
    killed(tmp_path / "ca")
    authority.make(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"ca", "0", "1"}


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
