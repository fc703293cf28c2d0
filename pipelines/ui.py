"""Serves MLflow's pages on this machine only, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from pipelines import tracking
from plugins.core.errors import UserError

HOST = "127.0.0.1"
DEFAULT_PORT = 5000
PATIENCE = 120  # seconds until the pages must answer; the server's imports alone take several
NO_JOBS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # background jobs of features that nothing here uses


def serve(root: Path, port: int | None = None) -> None:
    """Runs `mlflow ui` in the foreground. Takes a free port if none is asked for and 5000 is taken."""
    port = _port(port)
    store, link = tracking.uri(root), tracking.comparison_link(root, port)
    artifacts = (root.resolve() / "mlruns" / "artifacts").as_uri()
    options = [f"--backend-store-uri={store}", f"--default-artifact-root={artifacts}", "--workers=1"]
    command = [sys.executable, "-m", "mlflow", "ui", f"--host={HOST}", f"--port={port}", *options]
    # Its own process group, so that its workers end with it however this process is asked to stop.
    server = subprocess.Popen(command, env=os.environ | tracking.QUIET | NO_JOBS, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        _wait(server, port)
        sys.stdout.write(f"\nCompare the runs:  {link}\nCtrl-C stops the server.\n")
        sys.stdout.flush()
        server.wait()
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    finally:
        _stop(server)


def _port(wanted: int | None) -> int:
    """The port to listen on, in 1..65535. UserError if the one that was asked for is taken."""
    if wanted is not None and not 0 < wanted < 65536:
        raise UserError(f"--port {wanted}: a port is a number from 1 to 65535")
    if _free(wanted or DEFAULT_PORT):
        return wanted or DEFAULT_PORT
    if wanted is not None:
        raise UserError(f"--port {wanted}: is taken by another program; leave --port out to get a free one")
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    """Returns once the pages answer."""
    until = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise UserError(f"mlflow ui: did not answer on port {port} within {PATIENCE} s; its own messages are above")


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
