"""The messages of one gRPC stream, with time limits: the same for the server and for a silo.

An event loop in a thread of its own runs all streams of a process.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from typing import Any, TypeVar

from fedml_noniid.core.trees import Params
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.wire import H, RefusedError

SERVICE = "fedml_noniid.Federation"
MIN_TRANSFER_S = 60.0  # the least time for a message; more if the deadline is later
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", wire.MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", wire.MAX_FRAME_BYTES),
]
T = TypeVar("T")


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process. Its thread ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()
    return loop


def wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in the event loop, and waits for its result in another thread."""
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()
    except CancelledError:  # so gRPC says that the other side has cancelled the call
        raise RefusedError("truncated", "the stream was cancelled") from None


@asynccontextmanager
async def within(seconds: float | None, what: str) -> AsyncIterator[None]:
    """Raises RefusedError if this takes longer: `what` has not happened."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise RefusedError("silent", f"{what} within {seconds:g} s") from None


class Stream:
    """One side's end of a stream. All messages of a process pass here, on server and silos."""

    def __init__(self, call: Any, who: str, deadline_s: float, witness: wire.Witness) -> None:
        """`call`: gRPC's object. `who`: the name in the other side's certificate.

        `witness` is called in the event loop with every message that has arrived or left whole.
        """
        self.call, self.who, self._witness = call, who, witness
        self._rest_s = max(deadline_s, MIN_TRANSFER_S)
        # Monotonic seconds: since then, the next message is waited for, and nothing of it is there.
        self.idle_since = math.inf

    async def read(
        self, kind: type[H], head_s: float | None, look: wire.Look = lambda *_: False
    ) -> wire.Message[H]:
        """The next message; its head is there within `head_s` seconds. Raises RefusedError.

        `look` sees head and table before a byte of the tensors is read.
        """
        steps, name = wire.arriving(kind, look), kind.__name__
        next(steps)
        self.idle_since = time.monotonic() if head_s is None else math.inf
        async with within(head_s, f"no {name} came"):
            frame = await self.call.read()
        self.idle_since = math.inf
        message = steps.send(frame)
        async with within(self._rest_s, f"the {name} did not end"):
            while message is None:
                message = steps.send(await self.call.read())
        self._witness(self.who, False, message)
        return message

    async def write(self, head: wire.Head, tensors: Params | None = None, known: str = "") -> None:
        """Sends a message, see `wire.leaving`. Raises RefusedError if the other side does not take
        it."""
        frames = wire.leaving(head, tensors, partial(self._witness, self.who, True), known)
        async with within(self._rest_s, f"the {type(head).__name__} was not taken"):
            with suppress(asyncio.InvalidStateError):  # the call has ended; reading says why
                for frame in frames:
                    await self.call.write(frame)
