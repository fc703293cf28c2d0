"""Where a cluster's scheduler listens: it writes its address into the folder of the kit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from distributed import Security

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.cluster import kit

FILE = "scheduler.json"
EVERYWHERE = ("0.0.0.0", "::", "")  # hosts that stand for all addresses of a machine
POLL_S = 0.5


class Scheduler(NamedTuple):
    """A scheduler that processes connect to."""

    address: str  # as tls://10.0.0.5:8786
    security: Security

    @property
    def host(self) -> str:
        return urlsplit(self.address).hostname or ""


def located(folder: Path, patience: float = 0) -> Scheduler:
    """The scheduler of the cluster with this kit. Raises UserError.

    `patience`: seconds to wait for its file.
    """
    security, path = kit.security(folder), folder / FILE
    until = time.monotonic() + patience
    while not path.is_file() and time.monotonic() < until:
        time.sleep(POLL_S)
    try:
        return Scheduler(str(json.loads(path.read_text())["address"]), security)
    except OSError as error:
        raise UserError(
            f"{path}: can't be read ({error.strerror or error}); `noniid cluster scheduler` "
            "writes it"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: is not the file of a scheduler") from None


def host_and_port(listen: str) -> tuple[str, int]:
    """The parts of HOST:PORT; port 0 is any free one. Raises UserError."""
    host, _, port = listen.rpartition(":")
    if host.strip("[]") in EVERYWHERE or not port.isdecimal() or int(port) >= 2**16:
        allowed = "HOST:PORT, with the one address of this machine that the workers reach"
        raise UserError(path=("--listen",), value=listen, allowed=allowed)
    return host.strip("[]"), int(port)
