"""The messages between server and silos, and the check of the uploads.

FedML 0.8.30 looks at the type of a message's content. This file alone deals with that:
- Down, to the silos: never a plain `dict`; FedML would send one of its values to each silo. A `Down` is a NamedTuple.
- Up, to the server: always a plain `dict`; FedML would call `.to(device)` on the values of anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plugins.core.component import Ask
from plugins.core.errors import NonFiniteError, UserError
from plugins.core.trees import Params, Tree, tree_map
from plugins.engines.packing import flatten, unflatten

Up = dict[str, Any]
# The parts of a silo's reply; `upload` is by component; n, steps and loss are 0-d.
PARTS = ("deltas", "buffers", "upload", "n", "steps", "loss")
STOPPED = "the server stopped the run: "  # begins the error of a silo that was told to stop
KEYS = {"client", "exchange", "leaves", "error"}


class Down(NamedTuple):
    """Server to silos, the same to all of them."""

    exchange: int  # counts the Asks of a run from 0
    round: int  # 0 before the first
    ask: Ask | None  # None: nothing is left to do
    terms: str  # fingerprint of the server's configuration
    counted: tuple[int, ...] = ()  # clients, ascending: the server counted their answers to the previous Ask
    stop: str = ""  # why the run is given up


def down(exchange: int, round_: int, ask: Ask | None, terms: str, counted: tuple[int, ...] = ()) -> Down:
    """A message to the silos."""
    return Down(exchange, round_, None if ask is None else mapped(_compact, ask), terms, counted)


def mapped(fn: Callable[[Tensor], Tensor], ask: Ask) -> Ask:
    """The Ask with `fn` of every tensor."""
    trees: dict[str, Any] = {key: tree_map(fn, getattr(ask, key)) for key in ("params", "buffers", "shared", "each")}
    return ask._replace(**trees)


def name(ask: Ask) -> str:
    """The job of an Ask, for error messages."""
    return f"{ask.owner}.{ask.job}" if ask.owner else ask.job


def stop(reason: str) -> Down:
    """The server's last message to the silos when it gives the run up."""
    return Down(-1, 0, None, "", stop=reason)


def up(client: int, exchange: int, row: Tree | None) -> Up:
    """A silo's answer; `row` has the keys of PARTS, or is None if the Ask was not to this silo."""
    leaves = {} if row is None else tree_map(_compact, flatten(row))
    return {"client": client, "exchange": exchange, "leaves": leaves, "error": ""}


def failure(client: int, error: str) -> Up:
    """A silo's last message, which says why the silo can't go on."""
    return {"client": client, "exchange": -1, "leaves": {}, "error": error}


def opened(message: object, client: int, sent: Down, schema: Tree) -> Tree | None:
    """The reply in a silo's upload, in the structure of `schema` (one silo's reply); None if the silo was not asked.

    Raises UserError that names the silo if the upload is no answer to `sent`: a tensor is missing or unknown, a shape
    or dtype is wrong, a number is not finite.
    """
    where = f"round {sent.round}, silo {client} (rank {client + 1})"
    if type(message) is not dict or message.keys() != KEYS:
        raise UserError(f"{where}: upload is not one of this protocol; all silos must run this release")
    if message["error"]:
        raise UserError(f"{where}: {message['error']}")
    if message["client"] != client or message["exchange"] != sent.exchange:
        raise UserError(
            f"{where}: upload says client {message['client']}, exchange {message['exchange']}; "
            f"expected client {client}, exchange {sent.exchange}"
        )
    leaves: Params = message["leaves"]
    if sent.ask is None or client not in sent.ask.to:
        if leaves:
            raise UserError(f"{where}: upload has {len(leaves)} tensors, but this silo was not asked")
        return None
    where = f"{where}, job {name(sent.ask)!r}"
    expected = flatten(schema)
    for key in (*expected, *leaves):
        if key not in leaves:
            raise UserError(f"{where}: upload lacks {key!r}; expected {_form(expected[key])}")
        if key not in expected:
            raise UserError(f"{where}: upload has {key!r}, which the server did not ask for")
        leaf = leaves[key]
        if not isinstance(leaf, Tensor) or _form(leaf) != _form(expected[key]):
            found = _form(leaf) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise UserError(f"{where}: upload's {key!r} is {found}; expected {_form(expected[key])}")
        if not torch.isfinite(leaf).all():
            raise NonFiniteError(
                f"{where}: upload's {key!r} is not finite; lower the learning rate or the method's coefficients"
            )
    if leaves["n"] < 1:
        raise UserError(f"{where}: upload counts n = {int(leaves['n'])} samples; at least 1")
    return unflatten(leaves, schema)


def _form(leaf: Tensor) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"


def _compact(leaf: Tensor) -> Tensor:
    """The same values and strides, without unused memory: pickling a view would send the whole storage."""
    tight = leaf.untyped_storage().nbytes() == math.prod(leaf.shape) * leaf.element_size()
    return leaf if tight else leaf.clone()
