"""Serves MLflow's pages on this machine only, until Ctrl-C.

With a tracking server, only prints the link.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.tracking import runs, view
from fedml_noniid.pipelines.tracking.store import Store

HOST = "127.0.0.1"
DEFAULT_PORT = 5000


def serve(store: Store, experiment: str, port: int | None = None) -> None:
    """Serves the prepared view on `port`. The default is 5000, or a free port if 5000 is taken."""
    client = store.client()
    with store.guarded():
        experiment_id = runs.experiment_id(store, client, experiment)
        view.prepare(client, experiment_id)
    if store.is_server:
        sys.stdout.write(f"Compare the runs:  {view.link(store.shown, experiment_id)}\n")
        return
    port = _free(DEFAULT_PORT, 0) if port is None else _free(port)
    command = [
        *(sys.executable, "-m", "mlflow", "server", f"--host={HOST}", f"--port={port}"),
        "--workers=1",
        f"--backend-store-uri={store.address}",
        f"--default-artifact-root={store.folder / 'artifacts'}",
    ]
    link = view.link(f"http://{HOST}:{port}", experiment_id)
    sys.stdout.write(f"Compare the runs, in some seconds:  {link}\nCtrl-C stops the server.\n")
    sys.stdout.flush()
    # A process group of its own: its workers end with it, however this process ends.
    server = subprocess.Popen(command, start_new_session=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if server.wait():
            raise UserError(
                f"mlflow server: ended with code {server.returncode}; its own messages are above"
            )
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


def _free(*ports: int) -> int:
    """The first free port of `ports`; 0 stands for any port. UserError if none is free."""
    for port in ports:
        try:
            with socket.create_server((HOST, port)) as server:
                return int(server.getsockname()[1])
        except (OSError, OverflowError) as error:
            reason = error
    raise UserError(f"port {ports[0]} can't be used ({reason}); --port names another")
