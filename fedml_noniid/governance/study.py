"""The study file: what its owner has signed. The server and all silos of a run hold to it.

It has every setting that they must share, the code that runs, and the messages of the run: jobs,
and names, dtypes and shapes of all tensors that go down and up. The signature is over the bytes of
the file as they lie, and stands beside it, in `<file>.sig`.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import yaml
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from fedml_noniid.core.errors import MISSING, UserError, located, shown
from fedml_noniid.core.options import Count, CountOrNone, Section, validated
from fedml_noniid.core.trees import Params, tree_map, zeros_like
from fedml_noniid.credentials import certificates
from fedml_noniid.data.files import write_whole
from fedml_noniid.data.shards import Shard
from fedml_noniid.data.yaml_files import json_of, loaded
from fedml_noniid.deploy import settings, wire
from fedml_noniid.deploy.exit_codes import PolicyError
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.settings import Deployment, Terms
from fedml_noniid.deploy.wire import Down, RefusedError
from fedml_noniid.engines.callbacks import Callback
from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.engines.packing import flatten
from fedml_noniid.governance.secure import liars, vectors
from fedml_noniid.governance.secure import server as secure
from fedml_noniid.governance.secure.silo import CHECK, SUM, requested
from fedml_noniid.own_code import OURS, files_of, sha256_of

CONTEXT = b"noniid study 1\n"  # before the signed bytes: a key's other signatures say nothing here
SHARED = ("common_args", "model_args", "train_args", "device_args")  # sections of a Deployment
OF_SERVER = {"callbacks", "metrics"}  # keys of train_args that stay in the server's own file
# Parts of this package that no process of a deployment computes with.
NOT_DEPLOYED = ("api", "cli", "contract", "pipelines")
SECURE = "secure/"  # what an answer has for secure sums
ASK_AGAIN = "ask the study's owner for both files again"
Forms = dict[str, str]  # name of a tensor -> dtype and shape, such as "float32 [16, 8]"


def _key(text: str) -> str:
    try:
        Ed25519PublicKey.from_public_bytes(base64.b64decode(text, validate=True))
    except ValueError:
        allowed = "the line of an owner's .pub file (`noniid deploy study key`)"
        raise UserError(value=text, allowed=allowed) from None
    return text


PublicKey = Annotated[str, AfterValidator(_key)]  # of Ed25519, base64


class Messages(Section):
    """The tensors of one job: from the server to a silo, and back. `added`: what leaves in secure
    sums alone."""

    down: Forms
    up: Forms
    added: Forms = Field(default={})

    @property
    def up_bytes(self) -> int:
        """The size of an answer's tensors. Those that are added up leave at each level that any
        silo has, with 64 bits for 32."""
        added = 2 * vectors.LEVELS * sum(map(size, self.added.values()))
        return sum(map(size, self.up.values())) + added


class Asks(Section):
    """How many questions a silo may be asked, see `Terms.comm_round`."""

    begin: CountOrNone
    round: Count
    finish: CountOrNone
    tests: CountOrNone


class Study(Section):
    """A study file."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    expires: datetime.date  # the last day
    silos: list[str]  # by the names in their certificates
    common_args: settings.CommonArgs
    model_args: settings.ModelArgs
    train_args: settings.TrainArgs
    device_args: settings.DeviceArgs
    fingerprint: str  # of all that these settings make, see `settings.terms`
    code: dict[str, str]  # package -> SHA-256 of its source; ours is among them
    asks: Asks
    messages: dict[str, Messages]  # by job
    may_end_early: bool = False  # a callback of the server may stop the run before its last round

    @model_validator(mode="after")
    def _runs(self) -> Study:
        names = [certificates.name(k + 1) for k in range(self.train_args.client_num_in_total)]
        if self.silos != names:
            raise UserError(
                path=("silos",), value=self.silos, allowed=f"{', '.join(names)}: as train_args say"
            )
        if self.train_args.max_samples is None:
            allowed = "the most samples of a silo, or a list with a number for each rank"
            raise UserError(MISSING, path=("train_args", "max_samples"), allowed=allowed)
        return self

    def refuse_message(self, exchange: int, round_: int, job: str, table: wire.Table) -> None:
        """Raises RefusedError unless the study has such a message to a silo.

        Called before a tensor is read: it bounds sizes too.
        """
        source, asks, rounds = (
            f"exchange {exchange}, round {round_}",
            self.asks,
            self.train_args.rounds,
        )
        if job not in self.messages and not (job in (SUM, CHECK) and self.train_args.secure_sums):
            known = ", ".join(self.messages)
            raise RefusedError("study", f"{source}: job {shown(job)}; the study has only {known}")
        first = asks.begin + (round_ - 1) * asks.round if round_ else 0
        last = first + (asks.round if round_ else asks.begin) - 1 + asks.tests + asks.finish
        if not (0 <= round_ <= rounds and first <= exchange <= last):
            raise RefusedError("study", f"{source}: the study of {rounds} rounds has none like it")
        sent, expected = forms(table), self._expected(job, table)
        for key in {**expected, **sent}:
            mine, theirs = expected.get(key, "no tensor"), sent.get(key, "no tensor")
            if mine != theirs:
                why = f"{source}, job {job!r}: {shown(key)} is {theirs}; the study says {mine}"
                raise RefusedError("study", why)

    def _expected(self, job: str, table: wire.Table) -> Forms:
        """The tensors that a question may have. A sum is over any of the silos, and of what the
        answer to any question has."""
        if job == CHECK:
            return forms({"shared/nonce": liars.NONCE})
        if job != SUM:
            return self.messages[job].down

        def rows(key: str) -> int:
            shape = table[key].shape if key in table else ()
            return shape[0] if shape else 0

        tensors = [len(message.added) for message in self.messages.values()]
        asked = rows("shared/levels")
        levels = asked if asked in tensors else max(tensors)
        return request(min(rows("shared/clients"), len(self.silos)), levels)

    def last_round(self, client: int) -> int:
        """The last round in which a silo is asked: the seed draws the cohorts. 0 if the run may end
        at any round."""
        train, seed = self.train_args, self.common_args.random_seed
        size, n = train.per_round, len(self.silos)
        rounds = range(0 if self.may_end_early else train.rounds, 0, -1)
        return next((t for t in rounds if client in draw_cohort(seed, t, n, size)), 0)

    def check_end(self, train: settings.TrainArgs) -> None:
        """UserError if a callback may stop the run, and the silos would not believe it."""
        if may_stop(train) and not self.may_end_early:
            raise UserError(
                path=("train_args", "callbacks"),
                value=train.callbacks,
                allowed="callbacks that stop no run; or those with which the study was made",
            )

    def refuse_answer(self, job: str, leaves: Params) -> None:
        """Raises RefusedError unless an answer to a job, before any sum, has the tensors that the
        study names."""
        message = self.messages[job]
        expected = {
            key: message.up[key] for key in message.up if not key.startswith(SECURE)
        } | message.added
        if (sent := forms(leaves)) != expected:
            other = sorted(sent.items() ^ expected.items())
            why = f"job {job!r}: the answer and the study differ in {shown(other[0][0])}"
            raise RefusedError("study", why)

    def check_terms(self, terms: Terms) -> None:
        """UserError unless this process runs what was signed."""
        code = {OURS: source_of_ours(), **terms.code}
        other = [name for name in self.code | code if self.code.get(name) != code.get(name)]
        if other:
            raise UserError(
                f"the code of {', '.join(map(repr, other))} is not what was signed; install the "
                "release with which the study was made"
            )
        if self.fingerprint != terms.fingerprint:
            raise UserError(
                "the data file's public samples, or the model's fixed parameters, are not those "
                "with which the study was made"
            )


@dataclass(frozen=True)
class Signed:
    """A study, its owner and its name among all studies."""

    study: Study
    owner: str  # the public key
    sha256: str  # of the file, hexadecimal

    @staticmethod
    def read(path: Path, owners: Collection[str]) -> Signed:
        """The study in a file, once the signature is checked, and that its owner is one of these
        public keys. Raises UserError; PolicyError for another owner."""
        content, owner = read_signed(path)
        if owner not in owners:
            raise PolicyError(
                f"{path}: is signed by {owner}",
                allowed=f"the owners of the policy: {', '.join(owners)}",
            )
        with located(source=str(path)):
            study = validated(Study, loaded(content, str(path)))
        return Signed(study, owner, hashlib.sha256(content).hexdigest())

    def check_date(self, today: datetime.date) -> None:
        """RefusedError if the study is over."""
        if today > self.study.expires:
            raise RefusedError(
                "study",
                f"the study {self.study.name!r} expired on {self.study.expires}; ask its owner "
                "for one that was signed anew",
            )


class _Signature(Section):
    owner: PublicKey
    signature: str


def read_signed(path: Path) -> tuple[bytes, str]:
    """(content, owner's public key) of a study file, once the signature is checked; nothing of the
    content is parsed. Raises UserError."""
    content, signature = certificates.read(path, ASK_AGAIN), signature_of(path)
    try:
        signed = validated(_Signature, json_of(certificates.read(signature, ASK_AGAIN)))
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(signed.owner))
        key.verify(base64.b64decode(signed.signature), CONTEXT + content)
    except InvalidSignature:
        raise UserError(f"{path}: was changed after it was signed; {ASK_AGAIN}") from None
    except ValueError as error:
        raise UserError(f"{signature}: is no signature ({error}); {ASK_AGAIN}") from None
    return content, signed.owner


def signature_of(path: Path) -> Path:
    """The file of a study's signature."""
    return path.with_name(f"{path.name}.sig")


def make_key(path: Path) -> str:
    """Writes a new key of an owner, and beside it the public key, which is returned.

    UserError if the file exists.
    """
    if path.exists():
        raise UserError(f"{path}: exists; allowed: another path")
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_whole(path, pem, private=True)
    public = _public(key)
    write_whole(path.with_suffix(".pub"), f"{public}\n")
    return public


def public_key(path: Path) -> str:
    """The public key in a .pub file. Raises UserError."""
    content = certificates.read(path, "`noniid deploy study key` writes it").decode(
        errors="replace"
    )
    with located(source=str(path)):
        return _key(content.strip())


def sign(path: Path, key: Path) -> str:
    """Signs a study file as it lies; returns the owner's public key. Raises UserError."""
    content = certificates.read(path, "`noniid deploy study make` writes it")
    with located(source=str(path)):
        validated(Study, loaded(content, str(path)))
    try:
        private = load_pem_private_key(
            certificates.read(key, "`noniid deploy study key` makes it", private=True), None
        )
    except certificates.BROKEN:
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise UserError(f"{key}: is no key of `noniid deploy study key`")
    made = base64.b64encode(private.sign(CONTEXT + content)).decode()
    signature = _Signature(owner=_public(private), signature=made)
    write_whole(signature_of(path), signature.model_dump_json())
    return signature.owner


def make(deployment: Deployment, shard: Shard, name: str, expires: datetime.date) -> Study:
    """The study of a deployment; `shard`: the server's data, whose shapes are those of all sites.

    Runs one round with one made-up sample, to see the messages. Raises UserError.
    """
    shape = tuple(shard.parts["test"].x.shape[1:])
    network = deployment.network(shape, shard.n_classes, shard.embedding)
    recipe = deployment.train_args.recipe
    terms = settings.terms(deployment, recipe, network, shard.parts.get("public"))
    asks = terms.algorithm.exchanges
    content: dict[str, object] = {
        "name": name,
        "expires": expires,
        "silos": [certificates.name(k + 1) for k in range(deployment.silos)],
        **{section: getattr(deployment, section) for section in SHARED},
        "fingerprint": terms.fingerprint,
        "code": {OURS: source_of_ours(), **terms.code},
        "asks": Asks(begin=asks.begin, round=asks.round, finish=asks.finish, tests=terms.tests),
        "messages": messages(terms, shard),
        # Nobody knows before the run which round is the last one of a silo, if a method chooses.
        "may_end_early": may_stop(deployment.train_args) or terms.algorithm.chooser is not None,
    }
    return validated(Study, content)


def may_stop(train: settings.TrainArgs) -> bool:
    """Says whether one of the callbacks may end a run before its last round."""
    return any(type(callback).stop is not Callback.stop for callback in train.built_callbacks())


def messages(terms: Terms, shard: Shard) -> dict[str, Messages]:
    """The messages of a run, by job."""
    return {wire.name(down.question): message for down, message in exchanges(terms, shard)}


def exchanges(terms: Terms, shard: Shard) -> Iterator[tuple[Down, Messages]]:
    """The exchanges of a run of one round with one sample: each message to all silos that are
    asked, and the tensors of one of these silos."""
    short = replace(terms, plan=replace(terms.plan, rounds=1), secure_sums=0)
    run = ServerRun(short, shard)
    while (ask := run.down.ask) is not None:
        down, whole = wire.row_of(run.down, ask.to[0]), run.schema
        up, added = flatten(whole), Params()
        if terms.secure_sums:
            up, added = flatten(secure.announced(whole, terms.silos)), vectors.added(up)
        message = Messages(down=forms(wire.tensors(down)), up=forms(up), added=forms(added))
        yield run.down, message
        # Only its shapes count: a rate that is too high, and diverges, is not for a study to find.
        reply = wire.unpacked(
            tree_map(torch.nan_to_num, whole), terms.algorithm.packing(ask.job), run.down.question
        )
        run.feed(dict.fromkeys(ask.to, reply | {"deltas": zeros_like(reply["deltas"])}))


def request(silos: int, tensors: int) -> Forms:
    """The tensors of a request for a sum."""
    return {f"shared/{key}": form for key, form in forms(requested(silos, tensors)).items()}


def text(study: Study) -> str:
    """The file's text."""
    return _dumped(study.model_dump(by_alias=True, exclude={"train_args": OF_SERVER}))


def shown_text(path: Path) -> tuple[str, str]:
    """(text, owner's public key) of anybody's study, for people: nothing that it names is imported.

    Comments are left out, and what would act on a terminal is escaped. Raises UserError.
    """
    content, owner = read_signed(path)
    return _dumped(loaded(content, str(path))), owner


class _Dumper(yaml.SafeDumper):
    """Writes each text on one line, with what is not printable escaped."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_multi_representer(dict, _Dumper.represent_dict)  # the parser's ordered ones too


def _dumped(content: object) -> str:
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=math.inf))


def forms(tensors: Mapping[str, Tensor | wire.Entry]) -> Forms:
    """Dtypes and shapes in words."""
    return {key: wire.form(leaf) for key, leaf in tensors.items()}


def source_of_ours() -> str:
    """The SHA-256 of the source of this package that a deployment runs, C++ too."""
    return sha256_of(files_of_ours())


def files_of_ours() -> list[Path]:
    """All sources but those of NOT_DEPLOYED."""
    files = [file for ending in (".py", ".cpp") for file in files_of(OURS, (ending,))]
    top = files[0].parent
    return [file for file in files if file.relative_to(top).parts[0] not in NOT_DEPLOYED]


def size(form: str) -> int:
    """Bytes of a tensor in words."""
    dtype, shape = form.split(" ", 1)
    return int(math.prod(json.loads(shape))) * wire.DTYPES[dtype].itemsize


def _public(key: Ed25519PrivateKey) -> str:
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()
