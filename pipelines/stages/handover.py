"""Hands a stage's command to the warm process of `noniid run`, if there is one
(`pipelines.tools.warm`).

It imports little: without a warm process, nothing is lost.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

WARM = "NONIID_WARM"  # environment variable: the folder of the sockets
OTHER = "other"  # the socket of all stages that have none of their own
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ACCEPTED = b"+"
CRASHED = 1


def handed_over(arguments: Sequence[str], folder: str | None = None) -> int | None:
    """Returns the exit code of a stage in the warm process, or None if it has to run here.

    `arguments`: of the command. `folder`: where it runs, this process's by default. The stage has
    the descriptors 0 to 2 and the environment of this process. A signal to this process goes on to
    the stage. If the stage dies of a signal, so does this process.
    """
    place = os.environ.get(WARM)
    if not place or len(arguments) != 1:
        return None
    import contextlib
    import json
    import socket
    import sys

    (stage,) = arguments
    path = os.path.join(place, stage)
    request = json.dumps([stage, folder or os.getcwd(), dict(os.environ)]).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:

        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(OSError):
                server.send(bytes([number]))

        # A signal waits until it is known where the stage runs.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        before = {number: signal.getsignal(number) for number in PASSED_ON}
        answer = b""
        try:
            server.connect(path if os.path.exists(path) else os.path.join(place, OTHER))
            socket.send_fds(server, [request], [0, 1, 2])
            if server.recv(1) != ACCEPTED:
                return None
            for number in PASSED_ON:
                signal.signal(number, pass_on)
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            with contextlib.suppress(ConnectionResetError):
                answer = server.recv(4)
        except OSError:  # nobody serves there
            return None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    if not answer:
        sys.stderr.write(
            f"error: {stage}: its process has ended with `noniid run`; the same command goes on\n"
        )
        return CRASHED
    code = int.from_bytes(answer, "big", signed=True)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code
