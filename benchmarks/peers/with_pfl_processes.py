"""Measures pfl-research in several processes that share each cohort, with pfl's own distributed
context over gloo.

The argument is the number of processes.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys

from benchmarks.peers.harness import TURNS, main


def start_others() -> None:
    """Starts the other processes.

    They do the same work and write their results beside this one's.
    """
    result, processes, job = sys.argv[1:]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    # The variables of torchrun. pfl reads them when it is imported.
    common = {
        "TORCHELASTIC_RUN_ID": "bench",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    inherited = {
        key: value for key, value in os.environ.items() if key != TURNS
    }  # they follow the first process
    for rank in range(1, int(processes)):
        other = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, f"{result}.{rank}", processes, job],
            env=inherited | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        atexit.register(other.kill)
    os.environ.update(common | {"RANK": "0", "LOCAL_RANK": "0"})


if __name__ == "__main__":
    if "RANK" not in os.environ and sys.argv[2] != "1":
        start_others()
    from benchmarks.peers.with_pfl import measure

    main(measure)
