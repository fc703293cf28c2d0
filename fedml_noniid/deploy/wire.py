"""The messages between server and silos: as objects, as bytes, and the check of the uploads.

On the network a message is a head (JSON), and perhaps tensors: a table (JSON), then their bytes. A
silo has one stream. It says Hello and hears Welcome; then the server sends Tasks, and the silo
answers each with one Answer. A stream ends after the Task "over" or "stop", or with a Refusal.
Sizes are checked before memory is taken. Nothing here makes objects of a type that the sender
chooses.

Under stock FedML 0.8.30 the type of a message's content matters. This file alone deals with that:
- Down, to the silos: never a plain `dict`; FedML would send one of its values to each silo. A
  `Down` is a NamedTuple.
- Up, to the server: always a plain `dict`; FedML would call `.to(device)` on the values of anything
  else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from torch import Tensor

from fedml_noniid.core.algorithm import TRAIN
from fedml_noniid.core.component import Ask, Component
from fedml_noniid.core.errors import PublicError
from fedml_noniid.core.losses import CROSS_ENTROPY, Loss
from fedml_noniid.core.options import Range, RecipeError
from fedml_noniid.core.packing import Packing
from fedml_noniid.core.received import received
from fedml_noniid.core.trees import Params, Tree, row, tree_map
from fedml_noniid.engines import client_tests
from fedml_noniid.engines.packing import flatten, unflatten
from fedml_noniid.models.layers import VARIANCE

CHUNK_BYTES = 1 << 20  # of tensors in one frame
MAX_FRAME_BYTES = 2 << 20  # gRPC refuses a longer one by its length, before it arrives
MAX_HEAD_BYTES = 1 << 16
MAX_TENSOR_BYTES = 1 << 48  # torch fails on larger shapes
FLOATS, INTS = ("float64", "float32", "float16", "bfloat16"), ("int64", "int32", "int16", "int8")
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*FLOATS, *INTS, "uint8", "bool")
}
# The parts of a silo's reply; `upload` is by component; n, steps and loss are 0-d.
PARTS = ("deltas", "buffers", "upload", "n", "steps", "loss")
TREES = ("params", "buffers", "shared", "each")  # the tensors of an Ask
NOT_COUNTED = -1  # the exchange before any: no answer has been counted yet
# No number of an upload is larger. The server's arithmetic then stays finite in float32: a product
# of three such numbers is 2^90, and float32 ends at 2^128, so 2^38 of them may be added up. An
# update that helps is far smaller.
MAX_MAGNITUDE = 2.0**30
OTHER_CONFIGURATION = (
    "its configuration is not the server's; train_args, model_args, device_args, random_seed, the "
    "public samples that a method uses, and the packages of methods that are not ours must be the "
    "same on both"
)
REMEDY = "lower the learning rate or the method's coefficients"
Ranges = Mapping[str, Range]  # by name of a tensor of an upload, or of a tree of them
# Of heads: each is a line in the other side's audit log.
Name = Annotated[str, Field(max_length=200)]
Words = Annotated[str, Field(max_length=500)]
Integer = Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)]
Up = dict[str, Any]  # a silo's answer, as in UPLOAD; our transport adds "sha256", its `digest`
UPLOAD = {"client", "exchange", "leaves"}


class RefusedError(PublicError):
    """A message that is not taken.

    `name` is one word for counts and tests; the message says why.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why[:1000])  # a name in a table may have megabytes
        self.name = name


# Messages as objects
# --------------------------------------------------------------------------------------------------


class Down(NamedTuple):
    """Server to silos."""

    exchange: int  # counts the Asks of a run from 0
    round: int  # 0 before the first
    ask: Ask | None  # None: nothing is left to do
    terms: str  # fingerprint of the server's configuration
    # By client: the last exchange in which the server counted the client's answer.
    counted: Mapping[int, int] = {}
    step: int = 0  # of an exchange with secure sums: questions have even ones, sums odd ones
    sha256: str = ""  # the `digest` of its tensors, where it is known

    @property
    def at(self) -> tuple[int, int]:
        """(exchange, step)."""
        return self.exchange, self.step

    @property
    def question(self) -> Ask:
        """The Ask of a message that has one."""
        assert self.ask is not None, "there is something to do"
        return self.ask


def mapped(fn: Callable[[Tensor], Tensor], ask: Ask) -> Ask:
    """The Ask with `fn` of every tensor."""
    trees: dict[str, Any] = {key: tree_map(fn, getattr(ask, key)) for key in TREES}
    return ask._replace(**trees)


def compact(leaf: Tensor) -> Tensor:
    """The same values and strides, without unused memory: pickling a view would send the whole
    storage."""
    return leaf if leaf.untyped_storage().nbytes() == leaf.nbytes else leaf.clone()


def name(ask: Ask) -> str:
    """The job of an Ask, for error messages."""
    return f"{ask.owner}.{ask.job}" if ask.owner else ask.job


def silo(client: int) -> str:
    """A silo in messages."""
    return f"silo {client} (rank {client + 1})"


def row_of(down: Down, client: int) -> Down:
    """The message as one silo receives it: its row of `each`, and nothing about the others."""
    ask = down.question
    position = ask.to.index(client)
    ask = received(ask, position)
    mine = ask._replace(to=(client,), each=row(ask.each, slice(position, position + 1)))
    return down._replace(ask=mine, counted={client: down.counted.get(client, NOT_COUNTED)})


def tensors(down: Down) -> Params:
    """The tensors of a message, flat."""
    return flatten({key: getattr(down.ask, key) for key in TREES})


def nested(flat: Params) -> dict[str, Tree]:
    """The trees of an Ask from its flat tensors."""
    trees: dict[str, Tree] = {key: {} for key in TREES}
    for key, leaf in flat.items():
        *path, last = key.split("/")
        inner: Any = trees
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = leaf
    return trees


def up(client: int, exchange: int, reply: Tree | None) -> Up:
    """A silo's answer; `reply` has the keys of PARTS, or is None if the Ask was not to this
    silo."""
    return {
        "client": client,
        "exchange": exchange,
        "leaves": {} if reply is None else tree_map(compact, flatten(reply)),
    }


def packed(reply: Tree, packing: Packing | None) -> Tree:
    """A silo's reply with its update as it travels. RecipeError if the update would be another
    one."""
    if packing is None:
        return reply
    sent = packing.pack(reply["deltas"])
    if changed := _changed(packing.unpack(sent, reply["deltas"]), reply["deltas"]):
        raise RecipeError(f"the method's packing changes its update, in {changed!r}")
    return reply | {"deltas": sent}


def unpacked(reply: Tree, packing: Packing | None, ask: Ask) -> Tree:
    """The inverse of `packed`, for the reply to an Ask."""
    like = received(ask, 0).params
    return reply if packing is None else reply | {"deltas": packing.unpack(reply["deltas"], like)}


def _changed(tensors: Params, others: Params) -> str:
    """The first tensor that differs; "" if none does."""
    return next((key for key in others if not torch.equal(tensors[key], others[key])), "")


# Messages as bytes
# --------------------------------------------------------------------------------------------------


class Head(BaseModel):
    """The head of a message: its keys and no other, of exactly their types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @property
    def has_tensors(self) -> bool:
        """Whether tensors follow."""
        return False

    def frame(self) -> bytes:
        """The head as bytes."""
        return self.model_dump_json().encode()


class Sealed(Head):
    """The head of a message of a stream. Its sender's `Witness` seals it (`governance.audit`);
    the first one has the sender's certificate, in PEM."""

    seal: tuple[Name, Integer, Name, Name] | None = None
    certificate: Annotated[str, Field(max_length=4096)] = ""


class Hello(Sealed):
    """A silo comes. `session`: of its process; `study`: the SHA-256 of its study; `samples`:
    n_k."""

    session: Annotated[str, Field(max_length=32)]
    study: Name
    samples: Integer


class Welcome(Sealed):
    """The reply to Hello."""

    run: Name


class Answer(Sealed):
    """What a silo says to a Task: an upload follows, or `failed` says why there is none."""

    exchange: Integer
    step: Integer = 0
    failed: Words = ""

    @property
    def has_tensors(self) -> bool:
        return not self.failed

    @property
    def at(self) -> tuple[int, int]:
        """(exchange, step)."""
        return self.exchange, self.step


class Task(Sealed):
    """What a silo has to do. Tensors follow "ask"; nothing follows the others. `counted`: the last
    exchange in which this silo's answer was counted."""

    kind: Literal["ask", "over", "stop"]
    why: Words = ""
    exchange: Integer = 0
    step: Integer = 0
    round: Integer = 0
    job: Name = ""
    owner: Name = ""
    counted: Integer = 0

    @property
    def has_tensors(self) -> bool:
        return self.kind == "ask"

    @staticmethod
    def from_down(down: Down) -> Task:
        """The head of a message to one silo."""
        (counted,) = down.counted.values()
        return Task(
            kind="ask",
            exchange=down.exchange,
            step=down.step,
            round=down.round,
            job=down.question.job,
            owner=down.question.owner,
            counted=counted,
        )


class Refusal(Head):
    """The name of a RefusedError and its message."""

    name: Name
    why: Words


class Entry(Head):
    """A tensor in a table."""

    dtype: str
    shape: Annotated[tuple[int, ...], Field(max_length=16)]
    order: tuple[int, ...]  # the axes, from the outermost in memory to the innermost

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @model_validator(mode="after")
    def _is_a_tensor(self) -> Entry:
        known = self.dtype in DTYPES and sorted(self.order) == [*range(len(self.shape))]
        largest = math.prod(max(n, 1) for n in self.shape) * 8
        if not known or min(self.shape, default=0) < 0 or largest > MAX_TENSOR_BYTES:
            raise ValueError("is no tensor")
        return self


Table = dict[str, Entry]
TABLE = TypeAdapter(Table)
H = TypeVar("H", bound=Head)


def parsed(frame: bytes, kind: type[H]) -> H:
    """The head in a frame. Raises RefusedError."""
    if len(frame) > MAX_HEAD_BYTES:
        raise RefusedError("oversize", f"head of {len(frame)} bytes; allowed: {MAX_HEAD_BYTES}")
    try:
        return kind.model_validate_json(frame)
    except ValidationError:
        keys = ", ".join(kind.model_fields)
        raise RefusedError("malformed", f"head must have the keys {keys} and no other") from None


def table(frame: bytes) -> Table:
    """The tensors that follow, by name, in the sender's order. Raises RefusedError."""
    try:
        return TABLE.validate_json(frame)
    except ValidationError:
        raise RefusedError("malformed", "this is no table of tensors") from None


def table_of(tensors: Params) -> Table:
    """The table of tensors."""
    return {
        key: Entry(dtype=_dtype(leaf), shape=tuple(leaf.shape), order=_order(leaf))
        for key, leaf in tensors.items()
    }


def body(entries: Table, tensors: Params) -> Iterator[bytes | memoryview]:
    """Tensors as frames: their table, then the bytes of one after the other."""
    yield TABLE.dump_json(entries)
    for key, leaf in tensors.items():
        flat = leaf.detach().permute(entries[key].order).contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


def digest(tensors: Params | None) -> str:
    """The SHA-256 of tensors as they are sent; of nothing, if none follow the head."""
    made = sha256()
    for frame in () if tensors is None else body(table_of(tensors), tensors):
        made.update(frame)
    return made.hexdigest()


def with_digest(down: Down) -> Down:
    """The message with the digest of its tensors, if all silos get the same ones."""
    return down if flatten(down.question.each) else down._replace(sha256=digest(tensors(down)))


class Body:
    """Takes the bytes behind a table, frame by frame. A check of the table comes before."""

    def __init__(self, entries: Table, dropped: object = False) -> None:
        """Reserves memory for the tensors, unless their bytes are to be dropped."""
        # Memory of its own: matrix products round differently at addresses that are not aligned.
        self._leaves = {
            key: torch.empty([entry.shape[axis] for axis in entry.order], dtype=DTYPES[entry.dtype])
            for key, entry in entries.items()
            if not dropped
        }
        self._entries, self.left = entries, size_of(entries)
        views = (leaf.reshape(-1).view(torch.uint8) for leaf in self._leaves.values())
        self._parts = deque(view.numpy().data for view in views if view.numel())

    def take(self, frame: bytes) -> None:
        """Takes the next frame. Raises RefusedError if it is too long."""
        if len(frame) > self.left:
            why = f"a frame of {len(frame)} bytes; expected: {self.left} more"
            raise RefusedError("oversize", why)
        rest, self.left = memoryview(frame), self.left - len(frame)
        while rest and self._parts:
            part = self._parts.popleft()
            n = min(len(part), len(rest))
            part[:n], rest = rest[:n], rest[n:]
            if n < len(part):
                self._parts.appendleft(part[n:])

    def tensors(self) -> Params:
        """The tensors, once nothing is `left`."""
        return {
            key: leaf.permute([self._entries[key].order.index(axis) for axis in range(leaf.dim())])
            for key, leaf in self._leaves.items()
        }


class Message(NamedTuple, Generic[H]):
    """A message that has arrived or left whole."""

    head: H
    table: Table  # empty if no tensors follow the head
    sha256: str  # of the frames behind its head
    tensors: Params  # of an arrived one, unless they were dropped


# Called with the head and the table of a message before a byte of its tensors is read. It returns
# whether they are dropped, or raises RefusedError.
Look = Callable[[Any, Table], object]
# Called with (name in the other side's certificate, whether the message leaves, message) of every
# message before it leaves, and once it has arrived whole. It returns the head to send.
Witness = Callable[[str, bool, Message[Any]], Head]


def unwitnessed(_: str, leaves: bool, message: Message[Head]) -> Head:
    """A `Witness` that sees nothing."""
    return message.head


def arriving(
    kind: type[H], look: Look = lambda *_: False
) -> Generator[Message[H] | None, bytes, None]:
    """Reads a message from the frames that are sent to this generator: it yields None after each,
    the message after the last. An empty frame stands for the end of the stream.

    Raises RefusedError at the first frame that is wrong.
    """
    digest, head, entries, rest = sha256(), None, Table(), None
    while rest is None or rest.left:
        if not (frame := (yield None)):
            raise RefusedError("truncated", "the message ended too early")
        if head is None:
            head = parsed(frame, kind)
            rest = None if head.has_tensors else Body({})
            continue
        digest.update(frame)
        if rest is None:
            entries = table(frame)
            rest = Body(entries, look(head, entries))
        else:
            rest.take(frame)
    assert head is not None, "it comes first"
    yield Message(head, entries, digest.hexdigest(), rest.tensors())


def leaving(
    head: Head,
    tensors: Params | None,
    witnessed: Callable[[Message[Head]], Head],
    known: str = "",
) -> Iterator[bytes]:
    """The frames of a message. `witnessed` is called before the first one, and returns the head
    that is sent. `known`: the `digest` of the tensors, if it has been computed."""
    entries = table_of(tensors or {})
    sent = witnessed(Message(head, entries, known or digest(tensors), {}))
    return chain([sent.frame()], map(bytes, () if tensors is None else body(entries, tensors)))


def size_of(entries: Table) -> int:
    """The bytes behind a table."""
    return sum(entry.size for entry in entries.values())


def _order(leaf: Tensor) -> tuple[int, ...]:
    """The axes by their place in memory: it decides how matrix products round, so it travels too.

    A tensor with holes arrives contiguous.
    """
    axes = range(leaf.dim())
    strides = leaf.stride()
    order = sorted(axes, key=lambda axis: (-strides[axis], leaf.shape[axis] == 1))
    return tuple(order if leaf.permute(order).is_contiguous() else axes)


# The check of an upload
# --------------------------------------------------------------------------------------------------


def ranges(components: Iterable[Component], loss: Loss = CROSS_ENTROPY) -> Ranges:
    """The ranges of what these components upload, and of all other numbers that have one."""
    allowed_ranges = {"n": Range(1), "steps": Range(0)}
    allowed_ranges |= {
        f"upload/{key}": allowed for key, allowed in client_tests.ranges(loss).items()
    }
    return allowed_ranges | {
        f"upload/{c.name}/{key}": allowed for c in components for key, allowed in c.ranges.items()
    }


def allowed(key: str, ranges: Ranges) -> Range:
    """The numbers that the tensor `key` of an upload may have."""
    of_kind = Range(0) if key.endswith(VARIANCE) else Range()
    matching = next((ranges[name] for name in ranges if f"{key}/".startswith(f"{name}/")), of_kind)
    return replace(
        matching,
        low=max(matching.low, -MAX_MAGNITUDE),
        high=min(matching.high, MAX_MAGNITUDE),
        open="",
    )


def opened(
    message: object,
    client: int,
    sent: Down,
    schema: Tree,
    limits: Ranges,
    packing: Packing | None = None,
) -> Tree | None:
    """The reply in a silo's upload of the structure `schema` (one silo's reply), unpacked; None if
    the silo was not asked.

    Raises RefusedError that names the silo if the upload is no answer to `sent`: a tensor is
    missing or unknown, a shape or dtype is wrong, a number is not finite or beyond its range, or an
    update is not packed as `packing` does. NaN stands for a training loss that was withheld.
    """
    source = f"round {sent.round}, {silo(client)}"
    if type(message) is not dict or message.keys() - {"sha256"} != UPLOAD:
        raise RefusedError(
            "malformed",
            f"{source}: upload is not one of this protocol; all silos must run this release",
        )
    if (message["client"], message["exchange"]) != (client, sent.exchange):
        raise RefusedError(
            "stale",
            f"{source}: upload says client {message['client']}, exchange {message['exchange']}; "
            f"expected client {client}, exchange {sent.exchange}",
        )
    if sent.ask is None or client not in sent.ask.to:
        return None
    leaves: Params = message["leaves"]
    source = f"{source}, job {name(sent.ask)!r}"
    fit(leaves, schema, source)
    sent_reply = unflatten(leaves, schema)
    reply = unpacked(sent_reply, packing, sent.ask)
    for key, leaf in flatten(reply).items():
        if (key, name(sent.ask)) == ("loss", TRAIN) and leaf.isnan():
            continue  # a silo with privacy noise withholds it
        limit = allowed(key, limits)
        broken = leaf[leaf % 1 != 0][:1] if limit.whole else ()
        for number in (*leaf.aminmax(), *broken) if leaf.numel() else ():
            if not number.isfinite():
                raise RefusedError(
                    "non-finite", f"{source}: upload's {key!r} is not finite; {REMEDY}"
                )
            # Of tensors: the ends are rounded to the dtype.
            if number not in limit:
                raise RefusedError(
                    "range",
                    f"{source}: upload's {key!r} has {number.item():g}; allowed: "
                    f"{'whole numbers ' * limit.whole}{limit}; {REMEDY}",
                )
    if packing is not None and (
        key := _changed(packing.pack(reply["deltas"]), sent_reply["deltas"])
    ):
        raise RefusedError(
            "packed",
            f"{source}: upload's 'deltas/{key}' is no packed update: packed again, it is another "
            "one; all silos must run this release",
        )
    return reply


def fit(leaves: Mapping[str, object], schema: Tree, source: str) -> None:
    """Raises RefusedError unless tensors, or the entries of a table, have names, dtypes and shapes
    of the schema."""
    expected = flatten(schema)
    for key in (*expected, *leaves):
        if key not in leaves:
            raise RefusedError(
                "missing", f"{source}: upload lacks {key!r}; expected {form(expected[key])}"
            )
        if key not in expected:
            raise RefusedError(
                "extra", f"{source}: upload has {key!r}, which the server did not ask for"
            )
        sent, wanted = form(leaves[key]), form(expected[key])
        if sent != wanted:
            kind = "shape" if sent.split()[0] == wanted.split()[0] else "dtype"
            raise RefusedError(kind, f"{source}: upload's {key!r} is {sent}; expected {wanted}")


def form(leaf: object) -> str:
    """Dtype and shape in words."""
    if not isinstance(leaf, Tensor | Entry):
        return type(leaf).__name__
    return f"{_dtype(leaf)} {list(leaf.shape)}"


def _dtype(leaf: Tensor | Entry) -> str:
    return str(leaf.dtype).removeprefix("torch.")
