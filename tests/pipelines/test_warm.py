"""The process that stages are forked from: an interrupt ends the command, also one that would go on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.pipelines.small import ROOT

# Stands in for DVC with --keep-going: an interrupt ends nothing here, and the next stage is begun.
GOES_ON = """
import pathlib, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.readline()
ended = subprocess.run([sys.executable, "-m", "pipelines.stage", "report"])
pathlib.Path(sys.argv[1]).write_text(str(ended.returncode))
"""


def test_after_an_interrupt_no_stage_is_begun(tmp_path: Path) -> None:
    went_on = tmp_path / "went on"
    command = [sys.executable, "-m", "pipelines.warm", sys.executable, "-c", GOES_ON, str(went_on)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.wait(60) == 128 + signal.SIGINT
    assert not went_on.exists()


def test_the_command_s_exit_code_is_its_own() -> None:
    command = [sys.executable, "-m", "pipelines.warm", sys.executable, "-c", "raise SystemExit(7)"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 7
