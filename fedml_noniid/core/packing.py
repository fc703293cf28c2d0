"""Defines Packing: the form in which a client's update travels, if it is not a tensor for each
parameter."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from fedml_noniid.core.trees import Params


@runtime_checkable
class Packing(Protocol):
    """Packs updates for the wire, and unpacks them without loss.

    Names, shapes and dtypes of packed tensors depend on those of the update alone. So the server
    checks them before it takes memory, and simulations count the same bytes.
    """

    def pack(self, update: Params) -> Params:
        """The packed tensors of an update that the method makes."""

    def unpack(self, packed: Params, like: Params) -> Params:
        """The update, with the names, shapes and dtypes of `like`.

        Takes any numbers in `packed`, also a liar's. The server refuses those that `pack` would not
        make of the result.
        """
