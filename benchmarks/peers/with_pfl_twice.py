"""Measures pfl-research in two processes that share each cohort, with pfl's own distributed context over gloo."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys

from benchmarks.peers.harness import TURNS, main


def start_second() -> None:
    """Starts the second process. It does the same work and writes its result beside this one's."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    # The variables of torchrun. pfl reads them when it is imported.
    common = {
        "TORCHELASTIC_RUN_ID": "bench", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    result, *rest = sys.argv[1:]
    inherited = {key: value for key, value in os.environ.items() if key != TURNS}  # it follows the first process
    second = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, f"{result}.second", *rest],
        env=inherited | common | {"RANK": "1", "LOCAL_RANK": "1"},
    )
    atexit.register(second.kill)
    os.environ.update(common | {"RANK": "0", "LOCAL_RANK": "0"})


if __name__ == "__main__":
    if "RANK" not in os.environ:
        start_second()
    from benchmarks.peers.with_pfl import measure

    main(measure)
