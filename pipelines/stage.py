"""The command line of every DVC stage: `python -m pipelines.stage train --scenario S --recipe R --seed N`.

torch and mlflow take seconds to import, far longer than a small item takes to train. Under `python -m pipelines.warm`
a process that has them already is forked for each stage; without it the stage runs here.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys

STAGES = ("prepare", "partition", "train", "evaluate", "report", "deploy", "study", "paper")
INTERRUPTED = 128 + signal.SIGINT  # exit code, as shells have it
ADDRESS = "FEDML_NONIID_WARM"  # environment variable: the socket of the process to be forked


def main(arguments: list[str]) -> int:
    """Runs the stage `arguments[0]`; returns its exit code."""
    if not arguments or arguments[0] not in STAGES:
        sys.stderr.write(f"error: stage {arguments[:1]} is unknown; allowed: {', '.join(STAGES)}\n")
        return 2
    address = os.environ.get(ADDRESS)
    try:
        return forward(address, arguments) if address and os.path.exists(address) else run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def run(arguments: list[str]) -> int:
    """Runs the stage in this process."""
    code: int = importlib.import_module(f"pipelines.{arguments[0]}").main(arguments[1:])
    return code


def forward(address: str, arguments: list[str]) -> int:
    """Has a fork of the warm process run the stage with our folder, environment, input and outputs."""
    request = json.dumps({"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(request)
        # Our end stays open until the answer: if we are killed, the stage notices and goes as well.
        answer = connection.recv(1)
    return answer[0] if answer else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
