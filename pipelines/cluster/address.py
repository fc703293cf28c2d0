"""Where a cluster's scheduler listens, and how its processes prove that they belong to it."""

from __future__ import annotations

import ipaddress
import json
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from distributed import Security

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.cluster import kit
from fedml_noniid.pipelines.experiment.workspace import Cluster

FILE = "scheduler.json"  # name of the file that a scheduler writes into the folder of its kit
PREFIX = "file:"
CONNECT, LISTEN = "--cluster", "--listen"  # the options that take an address
POLL_S = 0.5


class Scheduler(NamedTuple):
    """A scheduler that processes connect to."""

    address: str  # as tls://10.0.0.5:8786
    security: Security

    @property
    def host(self) -> str:
        return urlsplit(self.address).hostname or ""


def located(cluster: Cluster, patience: float = 0, option: str = CONNECT) -> Scheduler:
    """The scheduler of a cluster. Raises UserError.

    `patience`: seconds to wait for its file. `option`: where the user gave the address.
    """
    address, folder = cluster.address, cluster.kit
    if address.startswith(PREFIX):
        path = Path(address.removeprefix(PREFIX))
        folder, address = folder or path.parent, _written(path, patience)
    return Scheduler(address, _security(address, folder, option))


def absolute(cluster: Cluster) -> Cluster:
    """The same for processes in other folders."""
    address, folder = cluster.address, cluster.kit
    if address.startswith(PREFIX):
        address = f"{PREFIX}{Path(address.removeprefix(PREFIX)).resolve()}"
    return Cluster(address, None if folder is None else folder.resolve())


def _security(address: str, folder: Path | None, option: str) -> Security:
    scheme = checked(address, option).scheme
    if scheme == "tcp":
        return Security(require_encryption=False)
    if folder is None:
        raise UserError(path=(option,), value=address, allowed=f"it with --kit FOLDER; {kit.MAKE}")
    return kit.security(folder)


def checked(address: str, option: str) -> SplitResult:
    """The parts of an address that a process may connect to, or listen at. Raises UserError.

    Port 0 is any free one, to listen at. `option`: where the user gave the address.
    """
    file = "" if option == LISTEN else f" {PREFIX}FOLDER/{FILE},"
    allowed = f"tls://HOST:PORT,{file} or tcp://127.0.0.1:PORT for this machine alone"
    refused = UserError(path=(option,), value=address, allowed=allowed)
    try:
        parts = urlsplit(address)
        is_whole = parts.hostname is not None and parts.port is not None
    except ValueError:  # of the port
        raise refused from None
    if parts.scheme not in ("tls", "tcp") or not is_whole:
        raise refused
    if parts.scheme == "tcp" and not is_loopback(parts.hostname or ""):
        raise UserError(
            "is refused: without TLS, everybody who reaches this port could run code here",
            path=(option,),
            value=address,
            allowed=allowed,
        )
    return parts


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def _written(path: Path, patience: float) -> str:
    """The address in a scheduler's file."""
    until = time.monotonic() + patience
    while not path.is_file() and time.monotonic() < until:
        time.sleep(POLL_S)
    try:
        return str(json.loads(path.read_text())["address"])
    except OSError as error:
        raise UserError(
            f"{path}: can't be read ({error.strerror or error}); `noniid cluster scheduler` "
            "writes it"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: is not the file of a scheduler") from None
