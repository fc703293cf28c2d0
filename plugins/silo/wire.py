"""The messages between server and silos, and the check of the uploads.

Under stock FedML 0.8.30 the type of a message's content matters. This file alone deals with that:
- Down, to the silos: never a plain `dict`; FedML would send one of its values to each silo. A
  `Down` is a NamedTuple.
- Up, to the server: always a plain `dict`; FedML would call `.to(device)` on the values of anything
  else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fedml_noniid.plugins.core.component import Ask, Component
from fedml_noniid.plugins.core.options import Range
from fedml_noniid.plugins.core.trees import Params, Tree, row, tree_map
from fedml_noniid.plugins.engines import client_tests
from fedml_noniid.plugins.engines.packing import flatten, unflatten
from fedml_noniid.plugins.models.layers import VARIANCE
from fedml_noniid.plugins.silo.frames import Leaf, RefusedError, form

Up = dict[str, Any]
# The parts of a silo's reply; `upload` is by component; n, steps and loss are 0-d.
PARTS = ("deltas", "buffers", "upload", "n", "steps", "loss")
KEYS = {"client", "exchange", "leaves"}
TREES = ("params", "buffers", "shared", "each")  # the tensors of an Ask
NOT_COUNTED = -1  # the exchange before any: no answer has been counted yet
# No number of an upload is larger. The server's arithmetic then stays finite in float32: a product
# of three such numbers is 2^90, and float32 ends at 2^128, so 2^38 of them may be added up. An
# update that helps is far smaller.
MAX_MAGNITUDE = 2.0**30
REMEDY = "lower the learning rate or the method's coefficients"
Ranges = Mapping[str, Range]  # by name of a tensor of an upload, or of a tree of them


class Down(NamedTuple):
    """Server to silos."""

    exchange: int  # counts the Asks of a run from 0
    round: int  # 0 before the first
    ask: Ask | None  # None: nothing is left to do
    terms: str  # fingerprint of the server's configuration
    # By client: the last exchange in which the server counted the client's answer.
    counted: Mapping[int, int] = {}


def mapped(fn: Callable[[Tensor], Tensor], ask: Ask) -> Ask:
    """The Ask with `fn` of every tensor."""
    trees: dict[str, Any] = {key: tree_map(fn, getattr(ask, key)) for key in TREES}
    return ask._replace(**trees)


def down(
    exchange: int,
    round_: int,
    ask: Ask | None,
    terms: str,
    counted: Mapping[int, int] | None = None,
) -> Down:
    """A message to the silos, without unused memory behind its tensors."""
    return Down(
        exchange, round_, None if ask is None else mapped(_compact, ask), terms, counted or {}
    )


def name(ask: Ask) -> str:
    """The job of an Ask, for error messages."""
    return f"{ask.owner}.{ask.job}" if ask.owner else ask.job


def silo(client: int) -> str:
    """A silo in messages."""
    return f"silo {client} (rank {client + 1})"


def row_of(down: Down, client: int) -> Down:
    """The message as one silo receives it: its own row of `each`, and nothing about the others."""
    ask = down.ask
    assert ask is not None, "there is something to do"
    position = ask.to.index(client)
    own = ask._replace(to=(client,), each=row(ask.each, slice(position, position + 1)))
    return down._replace(ask=own, counted={client: down.counted.get(client, NOT_COUNTED)})


def tensors(down: Down) -> Params:
    """The tensors of a message, flat."""
    assert down.ask is not None, "there is something to do"
    return flatten({key: getattr(down.ask, key) for key in TREES})


def nested(flat: Params) -> dict[str, Tree]:
    """The trees of an Ask from its flat tensors.

    Raises RefusedError for a name that is none of an Ask's.
    """
    trees: dict[str, Tree] = {key: {} for key in TREES}
    for key, leaf in flat.items():
        *path, last = key.split("/")
        inner: Any = trees
        for part in path:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if not path or path[0] not in TREES or not isinstance(inner, dict) or last in inner:
            raise RefusedError("malformed", f"message has a tensor {key!r}, which no Ask has")
        inner[last] = leaf
    return trees


def up(client: int, exchange: int, reply: Tree | None) -> Up:
    """A silo's answer; `reply` has the keys of PARTS, or is None if the Ask was not to this
    silo."""
    leaves = {} if reply is None else tree_map(_compact, flatten(reply))
    return {"client": client, "exchange": exchange, "leaves": leaves}


def ranges(components: Iterable[Component]) -> Ranges:
    """The ranges of what these components upload, and of all other numbers that have one."""
    found = {"n": Range(1), "steps": Range(0)}
    found |= {f"upload/{key}": allowed for key, allowed in client_tests.RANGES.items()}
    return found | {
        f"upload/{c.name}/{key}": allowed for c in components for key, allowed in c.ranges.items()
    }


def allowed(key: str, ranges: Ranges) -> Range:
    """The numbers that the tensor `key` of an upload may have."""
    if key == "n":
        return ranges[key]  # the limit is what the silo said when it joined
    names = [name for name in ranges if f"{key}/".startswith(f"{name}/")]
    found = ranges[names[0]] if names else Range(0) if key.endswith(VARIANCE) else Range()
    return Range(max(found.low, -MAX_MAGNITUDE), min(found.high, MAX_MAGNITUDE))


def opened(message: object, client: int, sent: Down, schema: Tree, limits: Ranges) -> Tree | None:
    """The reply in a silo's upload, in the structure of `schema` (one silo's reply); None if the
    silo was not asked.

    Raises RefusedError that names the silo if the upload is no answer to `sent`: a tensor is
    missing or unknown, a shape or dtype is wrong, a number is not finite or beyond its range.
    """
    where = f"round {sent.round}, {silo(client)}"
    if type(message) is not dict or message.keys() != KEYS:
        raise RefusedError(
            "malformed",
            f"{where}: upload is not one of this protocol; all silos must run this release",
        )
    if message["client"] != client or message["exchange"] != sent.exchange:
        raise RefusedError(
            "stale",
            f"{where}: upload says client {message['client']}, exchange {message['exchange']}; "
            f"expected client {client}, exchange {sent.exchange}",
        )
    leaves: Params = message["leaves"]
    if sent.ask is None or client not in sent.ask.to:
        if leaves:
            raise RefusedError(
                "extra", f"{where}: upload has {len(leaves)} tensors, but this silo was not asked"
            )
        return None
    where = f"{where}, job {name(sent.ask)!r}"
    fit(leaves, schema, where)
    for key, leaf in leaves.items():
        limit = allowed(key, limits)
        for number in leaf.aminmax() if leaf.numel() else ():
            if not number.isfinite():
                raise RefusedError(
                    "non-finite", f"{where}: upload's {key!r} is not finite; {REMEDY}"
                )
            if (
                not limit.low <= number <= limit.high
            ):  # of tensors: the ends are rounded to the dtype
                why = f"upload's {key!r} has {number.item():g}, which must {limit}; {REMEDY}"
                raise RefusedError("range", f"{where}: {why}")
    return unflatten(leaves, schema)


def fit(leaves: Mapping[str, Leaf] | Params, schema: Tree, where: str) -> None:
    """Raises RefusedError unless tensors, or the entries of a table, have names, dtypes and shapes
    of the schema."""
    expected = flatten(schema)
    for key in (*expected, *leaves):
        if key not in leaves:
            raise RefusedError(
                "missing", f"{where}: upload lacks {key!r}; expected {form(expected[key])}"
            )
        if key not in expected:
            raise RefusedError(
                "extra", f"{where}: upload has {key!r}, which the server did not ask for"
            )
        found: object = leaves[key]
        told = form(found) if isinstance(found, Leaf | Tensor) else type(found).__name__
        if told != form(expected[key]):
            same = isinstance(found, Leaf | Tensor) and found.dtype == expected[key].dtype
            raise RefusedError(
                "shape" if same else "dtype",
                f"{where}: upload's {key!r} is {told}; expected {form(expected[key])}",
            )


def _compact(leaf: Tensor) -> Tensor:
    """The same values and strides, without unused memory: pickling a view would send the whole
    storage."""
    tight = leaf.untyped_storage().nbytes() == math.prod(leaf.shape) * leaf.element_size()
    return leaf if tight else leaf.clone()


def same_samples(n: int, known: int | None, where: str) -> None:
    """Raises RefusedError if a silo counts another number of samples than it did before."""
    if known is not None and n != known:
        raise RefusedError(
            "samples",
            f"{where}: upload counts n = {n} samples; it was {known} before, and may not change",
        )
