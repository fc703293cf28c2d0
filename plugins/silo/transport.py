"""Limits for FedML 0.8.30's gRPC: its fixed ports, its address table, its calls home, and peers that vanish.

Its messages are pickled, without encryption and authentication; docs/deploying.md says what that means.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
import pickle
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from plugins.core.errors import UserError
from plugins.data.files import write_whole

BASE_PORT = 8890  # hard-coded in FedML, as is listening on all interfaces
SETTLE_S = 1.0  # how long a server that listens looks for silos; see `wait_for_server`
WATCH_S, STRIKES = 2.0, 5  # seconds between two checks of a peer, failed checks until it counts as gone

Addresses = Mapping[int, str]  # rank -> host


def name(rank: int) -> str:
    """The name of a process in messages."""
    return "server (rank 0)" if rank == 0 else f"silo {rank - 1} (rank {rank})"


def check_port(rank: int) -> None:
    """UserError if the port of `rank` is taken. FedML would share it (SO_REUSEPORT), and both runs would hang."""
    for host in ("", "127.0.0.1"):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # Closing connections of the last run don't matter, but listeners do.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, BASE_PORT + rank))
            except OSError as error:
                raise UserError(
                    f"port {BASE_PORT + rank} of {name(rank)} can't be used ({error.strerror}); FedML's ports are "
                    f"fixed at {BASE_PORT} + rank, so end the process that has it"
                ) from None


@contextmanager
def claim(wait_s: float) -> Iterator[None]:
    """Keeps other loopback runs on this machine off FedML's ports. UserError if one still holds them after `wait_s`.

    A port that is free now is not enough: another loopback run imports FedML for half a minute before it listens.
    """
    path = Path(tempfile.gettempdir()) / f"fedml-ports-{BASE_PORT}.lock"
    end = time.monotonic() + wait_s
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666)) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > end:
                    raise UserError(
                        f"another loopback run has held FedML's ports, {BASE_PORT} and up, for {wait_s:.0f} s "
                        f"({path}); let it end first"
                    ) from None
                time.sleep(0.2)
        yield


def write_addresses(path: Path, addresses: Addresses) -> None:
    """Writes FedML's table of addresses."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("receiver_id", "ip"))
    table.writerows(sorted(addresses.items()))
    write_whole(path, text.getvalue())


def read_addresses(path: Path, silos: int) -> dict[int, str]:
    """FedML's table, checked: columns receiver_id,ip and a row for the server and for each silo. Raises UserError."""
    try:
        rows = list(csv.reader(path.read_text().splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"{path}: can't be read ({reason}); comm_args.grpc_ipconfig_path names this file") from None
    if not rows or rows[0] != ["receiver_id", "ip"]:
        first = ",".join(rows[0]) if rows else ""
        raise UserError(f"{path}: first line {first!r}; FedML wants exactly 'receiver_id,ip'")
    if any(len(row) != 2 or not row[0].isdigit() or not row[1] for row in rows[1:]):
        raise UserError(f"{path}: every line after the first must be a rank and an address, such as '1,10.0.0.7'")
    found = {int(rank): host for rank, host in rows[1:]}
    missing = [str(rank) for rank in range(silos + 1) if rank not in found]
    if missing:
        raise UserError(f"{path}: no address for rank {', '.join(missing)}; ranks 0 (server) to {silos} need one")
    return found


@contextmanager
def no_phoning_home() -> Iterator[None]:
    """`fedml.init` asks FedML's host for its configuration, whatever `using_mlops` says; here it gets an empty one."""
    from fedml.core.mlops.mlops_configs import MLOpsConfigs

    kept = MLOpsConfigs.__dict__["fetch_all_configs"]
    MLOpsConfigs.fetch_all_configs = staticmethod(lambda: ({}, {}, {"LOG_SERVER_URL": ""}, {}))
    try:
        yield
    finally:
        MLOpsConfigs.fetch_all_configs = kept


def listens(host: str, rank: int, timeout_s: float = 1.0) -> bool:
    """Whether the process of `rank` accepts connections."""
    try:
        with socket.create_connection((host, BASE_PORT + rank), timeout_s):
            return True
    except OSError:
        return False


def wait_for_server(addresses: Addresses, timeout_s: float) -> None:
    """Returns when the server listens and has looked for silos. Raises UserError after `timeout_s`.

    A silo that starts before the server fails. A silo that the server finds during its search reports twice, gets the
    model twice, and can then block the server for ever while it trains.
    """
    end = time.monotonic() + timeout_s
    while not listens(addresses[0], 0):
        if time.monotonic() > end:
            raise UserError(
                f"no server at {addresses[0]}:{BASE_PORT} after {timeout_s:.0f} s; start it, or mend the address table"
            )
        time.sleep(0.2)
    time.sleep(SETTLE_S)


def tell(addresses: Addresses, sender: int, receiver: int, content: object, timeout_s: float = 5.0) -> None:
    """Sends the last message of a process that can't go on, as a model and without FedML's managers.

    Raises nothing: a receiver that is gone can't be told.
    """
    import grpc
    from fedml.core.distributed.communication.grpc import grpc_comm_manager_pb2, grpc_comm_manager_pb2_grpc
    from fedml.core.distributed.communication.message import Message
    from fedml.cross_silo.server.message_define import MyMessage

    kind = MyMessage.MSG_TYPE_C2S_SEND_MODEL_TO_SERVER if receiver == 0 else MyMessage.MSG_TYPE_S2C_SYNC_MODEL_TO_CLIENT
    message = Message(kind, sender, receiver)
    message.add_params(MyMessage.MSG_ARG_KEY_MODEL_PARAMS, content)
    message.add_params(MyMessage.MSG_ARG_KEY_NUM_SAMPLES, 0)
    message.add_params(MyMessage.MSG_ARG_KEY_CLIENT_INDEX, str(receiver - 1))
    request = grpc_comm_manager_pb2.CommRequest(client_id=sender, message=pickle.dumps(message))
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(f"{addresses[receiver]}:{BASE_PORT + receiver}", options=options) as channel:
        try:
            grpc_comm_manager_pb2_grpc.gRPCCommManagerStub(channel).sendMessage(request, timeout=timeout_s)
        except grpc.RpcError:
            return


class Watch:
    """Checks the ports of some peers. Calls `lost(rank)` once, when a peer that was seen or expected is gone.

    FedML waits for ever for a peer that was killed.
    """

    def __init__(self, peers: Addresses, lost: Callable[[int], None]) -> None:
        self._peers, self._lost = peers, lost
        self._over, self._expected = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def expect(self) -> None:
        """All peers are known to be there, even if no check has found them yet."""
        self._expected.set()

    def stop(self) -> None:
        """From now on, peers may leave."""
        self._over.set()

    def _look(self) -> None:
        strikes = dict.fromkeys(self._peers, -1)  # failed checks since the last success; -1: not seen yet
        while not self._over.wait(WATCH_S):
            for rank, host in self._peers.items():
                if listens(host, rank):
                    strikes[rank] = 0
                elif strikes[rank] >= 0 or self._expected.is_set():
                    strikes[rank] += 1
                if strikes[rank] == STRIKES and not self._over.is_set():
                    self._lost(rank)
                    return
