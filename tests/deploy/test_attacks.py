"""Attacks on the server's port, over the real socket, while a federation runs.

None executes anything or changes a bit.

Silo 3 (rank 4) is the traitor: it has a good certificate. Each of its bad answers costs it one
exchange, so the run has as many rounds as there may be such attacks. The honest silos' average is
FedAvg's over silos 0, 1 and 2.
"""

from __future__ import annotations

import datetime
import json
import os
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import grpc
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from grpc._cython import cygrpc

from benchmarks.attacks import outcome
from fedml_noniid.credentials import authority, certificates
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.deploy import silo_client, silo_server, wire
from fedml_noniid.deploy.coordinator import Coordinator
from fedml_noniid.deploy.exit_codes import LostError
from fedml_noniid.deploy.settings import CommArgs
from fedml_noniid.deploy.silo_client import SiloClient
from fedml_noniid.deploy.silo_server import SiloServer
from fedml_noniid.deploy.stream import SERVICE
from tests.deploy import world
from tests.deploy.federation_server import (
    LONG,
    METHODS,
    Federation,
    Stream,
    Traitor,
    address,
    body,
    framed,
    hello,
    hello_of,
    sent,
)
from tests.processes import until

ROUNDS = 40
HOUR = datetime.timedelta(hours=1)
GROWTH = 100 << 20  # bytes of memory that all attacks together may cost
FEDML = "/gRPCCommManager/sendMessage"  # where FedML 0.8.30 unpickles what arrives (CVE-2026-5536)


class Exploit:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacks")


@pytest.fixture(scope="module")
def payload(place: Path) -> bytes:
    return pickle.dumps(Exploit(place / "executed"))


@pytest.fixture(scope="module")
def traitor(all_kits: Path, place: Path) -> Iterator[Traitor]:
    """In a federation whose end is checked."""
    with pytest.MonkeyPatch.context() as patch:
        # The traitor sends more than its share. The test of the limit sets it again.
        patch.setattr(silo_server, "MAX_CALLS", 1e9)
        patch.setattr(silo_server, "CALLS_PER_S", 1e9)
        comm = {"quorum": 3, "deadline_s": 600.0}
        deployment = world.deployment("fedavg", ROUNDS, comm, client_num_in_total=4)
        federation = Federation(all_kits, deployment, honest=(0, 1, 2))
        with federation, Traitor(federation, 3) as traitor:
            traitor.task()
            before = psutil.Process().memory_info().rss
            yield traitor
            unharmed(federation, traitor, before, place)


@pytest.fixture
def federation(traitor) -> Federation:
    return traitor.federation


def unharmed(federation: Federation, traitor: Traitor, before: float, place: Path) -> None:
    """The server still answers, and the run ends with the bits of the undisturbed simulation."""
    while traitor.task() is not None:
        assert silo_client.status(federation.comm, federation.kits / "0")["there"] == [0, 1, 2, 3]
        traitor.fail()
    assert federation.ended() and federation.error is None
    expected = world.simulated("fedavg", {}, True, rounds=ROUNDS)
    assert world.digest(federation.server_run.loop.outcome) == world.digest(expected)
    assert not (place / "executed").exists()
    assert psutil.Process().memory_info().rss - before < GROWTH


def own_line(
    comm: CommArgs, ca: bytes, key: bytes | None = None, certificate: bytes | None = None
) -> grpc.Channel:
    """A connection with a certificate that no kit would allow."""
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    return grpc.secure_channel(
        comm.server, credentials, [("grpc.ssl_target_name_override", certificates.SERVER)]
    )


def signed(
    kits: Path, name: str, first: datetime.timedelta, last: datetime.timedelta
) -> tuple[bytes, bytes]:
    """(key, certificate) of this name, by the CA of the kits, valid between these times from
    now."""
    ca, key, now = authority._CA.read(kits), authority.new_key(), certificates.now()
    builder = x509.CertificateBuilder(
        issuer_name=ca.certificate.subject,
        subject_name=authority.subject(name),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now + first,
        not_valid_after=now + last,
    )
    purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    made = builder.add_extension(purpose, critical=False).sign(ca.key, SHA256())
    return authority.private_pem(key), made.public_bytes(Encoding.PEM)


# Connections

# (first moment, last moment, from now) of a certificate -> what becomes of its calls.
PRESENT = (-HOUR, HOUR)
FOREIGN_NAMES = ("silo-5", "silo-0", "silo-01", "Silo-1", "silo-1 ", "silo-1.example.org", "admin")


@pytest.mark.parametrize(
    ("name", "valid", "expected"),
    [
        ("silo-1", (-2 * HOUR, -HOUR), "unavailable"),
        ("silo-1", (HOUR, 2 * HOUR), "unavailable"),
        *((name, PRESENT, "name") for name in FOREIGN_NAMES),
    ],
)
def test_a_certificate_out_of_its_time_or_of_a_foreign_name_is_refused(
    federation, traitor, all_kits, name, valid, expected
):
    """Those of the federation are server and silo-1 to silo-4."""
    ca = (all_kits / "1" / "ca.crt").read_bytes()
    with own_line(federation.comm, ca, *signed(all_kits, name, *valid)) as line:
        assert {sent(line, method, traitor.hello) for method in METHODS} == {expected}


@pytest.mark.parametrize("identity", ["plaintext", "no certificate", "another CA"])
def test_a_caller_without_a_certificate_of_this_ca_is_refused(
    federation, traitor, all_kits, others_kits, identity
):
    ca, comm = (all_kits / "1" / "ca.crt").read_bytes(), federation.comm
    files = [others_kits / "1" / file for file in ("own.key", "own.crt")]
    pems = [file.read_bytes() for file in files] if identity == "another CA" else []
    plain = identity == "plaintext"
    with grpc.insecure_channel(comm.server) if plain else own_line(comm, ca, *pems) as line:
        assert {sent(line, method, traitor.hello) for method in METHODS} == {"unavailable"}


def test_a_silo_may_not_ask_for_the_status_and_the_server_s_kit_is_no_silo(federation, traitor):
    assert sent(traitor.line, "Status", b"{}") == "call"
    with federation.line(0) as line:
        assert sent(line, "Session", traitor.hello) == "call"


def test_a_silo_that_poses_as_the_server_gets_nothing_from_a_silo(all_kits):
    """A thief has the kit of silo 2 and listens at the server's address."""
    own, heard = certificates.Kit.read(all_kits / "2", 2), []
    handler = SimpleNamespace(service=lambda details: heard.append(details.method))
    server = grpc.server(ThreadPoolExecutor(2, "impostor"), handlers=[handler])
    credentials = grpc.ssl_server_credentials([(own.key, own.certificate)], own.ca, True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    silo = SiloClient(
        CommArgs(server=f"127.0.0.1:{port}", lost_s=0.5), all_kits / "1", 0, hello_of()
    )
    with pytest.raises(LostError, match="has no certificate of this federation"):
        silo.__enter__()
    silo.__exit__()
    server.stop(None).wait(LONG)
    assert heard == []


def test_a_revoked_certificate_ends_living_streams_and_opens_none(kits, monkeypatch):
    """The task that comes after the revocation does not go out."""
    monkeypatch.setattr(silo_server, "RECHECK_S", 0.05)
    comm = CommArgs(server=address())
    coordinator = Coordinator(comm, 2, "study", "run")
    with (
        SiloServer(comm, kits / "0", coordinator),
        silo_client.channel(comm, Kit.read(kits / "1", 1)) as living,
    ):
        stream = Stream(living, hello())
        stream.read(wire.Welcome)
        authority.revoke(kits, 1)
        assert sent(living, "Session", hello(session="next")) == "certificate"
        assert stream.outcome() == "certificate"
        assert coordinator.status()["there"] == []  # so the server does not wait for this silo


# Identity


def test_a_silo_can_not_speak_for_another(federation, traitor):
    """The certificate says who calls; another's session does not help."""
    named = framed(json.loads(traitor.hello) | {"client": 0})
    assert sent(traitor.line, "Session", named) == "malformed"
    traitor.task()
    stolen = hello(session=federation.calls[0]._hello.session)
    assert sent(traitor.line, "Session", stolen) == "ok"  # it has replaced itself, and nobody else
    assert traitor.stream.outcome() == "replaced"
    traitor.stream, traitor.hello = None, hello(session="next")
    traitor.task()
    assert federation.coordinator.status()["there"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"exchange": -1}, "stale"),
        ({"exchange": 1 << 62}, "stale"),
        ({"exchange": 10**30}, "malformed"),
        ({"exchange": 1 << 31}, "stale"),
        ({"session": "own"}, "malformed"),
        ({"exchange": 3.0}, "malformed"),
        ({"exchange": None}, "malformed"),
        ({"failed": ["x"]}, "malformed"),
        ({"kind": "stop"}, "malformed"),
    ],
)
def test_an_answer_to_another_exchange_is_refused(federation, traitor, values, refusal):
    assert traitor.answer(*body(federation.answer()), **values) == refusal


def wait_for_uploads(federation: Federation) -> None:
    """Until the server has the answers of the honest silos."""
    until(lambda: {0, 1, 2} <= federation.coordinator._answers.keys(), "the answers")


# Pickle and garbage


def test_the_exploit_works_where_something_unpickles(tmp_path):
    """Otherwise the tests below would prove nothing."""
    pickle.loads(pickle.dumps(Exploit(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


def test_no_other_method_is_there(traitor, payload):
    """FedML's methods get the message as FedML's .proto has it: client_id = 1, message = 2."""
    request = b"\x08\x01\x12" + bytes([len(payload)]) + payload
    assert len(payload) < 128
    for path in (
        FEDML,
        FEDML.replace("sendMessage", "handleReceiveMessage"),
        "/CommunicationService/sendMessage",
        *("Nope", "session", "Session/", f"/{SERVICE}.Session", "/Session"),
        "/grpc.health.v1.Health/Check",
    ):
        for message in (request, payload, traitor.hello):
            assert sent(traitor.line, path, message) == "unimplemented"


def test_a_head_that_is_none_is_refused(federation, traitor, payload):
    """Pickles, random bytes, unknown keys, deep JSON: as the first message, and as an answer."""
    request, random_ = b"\x08\x01\x12" + bytes([len(payload)]) + payload, random.Random(0)
    heads = [
        *(payload, request, len(payload).to_bytes(8, "little") + payload),
        *(random_.randbytes(size) for size in (1, 2, 7, 8, 9, 100, 1000, 60_000)),
        *(b"[" * 60_000, b'{"run":' * 9_000),
        *(
            framed(json.loads(traitor.hello) | more)
            for more in ({"kind": "finish"}, {"__class__": "Down"}, {"py/object": "x"})
        ),
    ]
    for head in heads:
        assert sent(traitor.line, "Session", head) == "malformed"
    assert sent(traitor.line, "Session", b"[" * 100_000) == "oversize"
    assert sent(traitor.line, "Status", payload) == "call"
    for head in (payload, b"[" * 60_000):
        assert traitor.say(head) == "malformed"
    assert traitor.say(b"") == sent(traitor.line, "Session", b"") == "truncated"
    for key in ("leaves", "message", "__reduce__", "py/object"):
        assert traitor.answer(**{key: payload.hex()}) == "malformed"


@pytest.mark.parametrize(
    "table",
    [
        lambda payload: payload,
        lambda payload: framed({"n": {"dtype": "int64", "shape": [], "order": payload.hex()}}),
        lambda payload: b"[" * 100_000,
        lambda payload: b'{"n":' * 100_000,
        lambda payload: framed({"n": {"dtype": "uint8", "shape": [1 << 62], "order": [0]}}),
    ],
    ids=["pickle", "pickle within", "deep list", "deep object", "4 EiB"],
)
def test_a_table_that_is_none_is_refused(traitor, payload, table):
    assert traitor.answer(table(payload)) == "malformed"


# Sizes


@pytest.mark.parametrize("n", [2 << 30, 1 << 44], ids=["2 GiB", "16 TiB"])
def test_a_table_that_announces_too_much_is_refused_before_memory_is_taken(federation, traitor, n):
    traitor.task()
    entries = json.loads(body(federation.answer())[0])
    entries["deltas/more"] = {"dtype": "uint8", "shape": [n], "order": [0]}
    assert traitor.answer(framed(entries)) == "extra"


def test_a_frame_over_the_limit_is_not_taken(federation, traitor):
    """3 MB as any message, as table, and as data."""
    big = bytes(3 << 20)
    assert sent(traitor.line, "Session", big) == "resource_exhausted"
    assert sent(traitor.line, "Status", big) in ("call", "resource_exhausted")  # the first to come
    assert traitor.say(big) == "resource_exhausted"
    assert traitor.answer(big) == "resource_exhausted"
    traitor.task()
    assert traitor.answer(body(federation.answer())[0], big) == "resource_exhausted"


# Floods


def test_a_flood_of_one_silo_does_not_stop_the_others(federation, traitor, monkeypatch):
    """1,000 calls of the traitor as fast as possible, while the others answer."""
    traitor.task()
    wait_for_uploads(federation)
    federation.go.clear()
    opened = traitor.fail()
    monkeypatch.setattr(silo_server, "MAX_CALLS", 20.0)
    monkeypatch.setattr(silo_server, "CALLS_PER_S", 2.0)
    call, codes = traitor.line.unary_unary(f"/{SERVICE}/Session"), Counter[str]()
    for i in range(20):
        calls = [call.future(hello("other terms"), timeout=LONG) for _ in range(50)]
        if i == 5:
            federation.go.set()
        codes.update(outcome(each.exception()) for each in calls)
    wait_for_uploads(federation)
    # Every call is bad. The server reads 20 of them at once, and 2 more in each second.
    assert codes.keys() == {"configuration", "rate"} and codes["configuration"] < 500
    monkeypatch.undo()
    assert traitor.task() == opened


def test_every_option_is_one_that_grpc_knows():
    """It ignores others without a word."""
    library = Path(cygrpc.__file__).read_bytes()
    unknown = [
        key
        for key, _ in silo_client.OPTIONS + silo_server.BOUNDS
        if key.encode() + b"\0" not in library
    ]
    assert unknown == []
