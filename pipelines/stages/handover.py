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
    """The exit code of the stage `arguments[-1]` in the warm process, or None if it has to run
    here.

    `folder`: where it runs, this process's by default. The stage has the descriptors 0 to 2, the
    environment and the umask of this process. A signal to this process goes on to the stage. If the
    stage dies of a signal, so does this process.
    """
    place = os.environ.get(WARM)
    if not place:
        return None
    import array
    import contextlib
    import json
    import socket
    import sys

    with socket.socket(socket.AF_UNIX) as server:
        own = os.path.join(place, arguments[-1])
        try:
            server.connect(own if os.path.exists(own) else os.path.join(place, OTHER))
        except OSError:  # it has ended
            return None

        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(OSError):
                server.sendall(bytes([number]))

        umask = os.umask(0)
        os.umask(umask)
        request = json.dumps(
            [list(arguments), folder or os.getcwd(), dict(os.environ), umask]
        ).encode()
        descriptors = array.array("i", [0, 1, 2])
        # A signal waits until it is known where the stage runs.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        before = {number: signal.getsignal(number) for number in PASSED_ON}
        answer = b""
        try:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)
            server.sendmsg([len(request).to_bytes(4, "big")], [rights])
            server.sendall(request)
            if server.recv(1) != ACCEPTED:
                return None
        except OSError:  # it has ended
            return None
        else:
            for number in PASSED_ON:
                signal.signal(number, pass_on)
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            with contextlib.suppress(ConnectionResetError):
                answer = server.recv(4)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
    if len(answer) < 4:
        sys.stderr.write(
            f"error: {arguments[-1]}: its process has ended with `noniid run`; the same command "
            "goes on\n"
        )
        return CRASHED
    code = int.from_bytes(answer, "big", signed=True)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code
