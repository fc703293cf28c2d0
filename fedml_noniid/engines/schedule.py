"""Computes who trains when, from which model and for how many steps, before the first round.

Every time is a whole number of microseconds on a virtual clock. So sums and comparisons are exact,
and the order of events can't depend on a rounding; ties go by the client's number. Nothing here
reads a learned number: a schedule is a pure function of seed, devices, steps and bytes, and the
schedule of a shorter run is its beginning.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.streams import Streams, stream
from fedml_noniid.engines.cohort import draw_cohort

SECOND = 1_000_000  # microseconds
ALWAYS = 1 << 62  # microseconds for which a client without a window stays


def microseconds(seconds: float | None) -> int:
    """A time above 0 as whole microseconds, at least one; 0 for none."""
    return max(1, round(SECOND * seconds)) if seconds else 0


@dataclass(frozen=True)
class Devices:
    """Holds the speeds of the clients' devices, an entry per client."""

    step_us: tuple[int, ...]  # microseconds of one local step
    down: tuple[int, ...]  # bytes per second; 0: a message takes no time
    up: tuple[int, ...]
    dropout: float = 0.0  # the probability that a client's work of a round is lost
    # (length, period, beginning of the first) of each client's windows, in microseconds; (): always
    windows: tuple[tuple[int, int, int], ...] = ()

    def stays(self, client: int, now: int) -> int:
        """For how many microseconds a client is available from `now` on; 0: it is away."""
        if not self.windows:
            return ALWAYS
        length, period, begin = self.windows[client]
        return max(0, length - (now - begin) % period)

    def available(self, now: int) -> tuple[int, list[int]]:
        """(the time from `now` on at which somebody is available, the clients that are)."""
        clients = [k for k in range(len(self.step_us)) if self.stays(k, now)]
        return (now, clients) if clients else self.available(self.next_arrival(now))

    def next_arrival(self, now: int) -> int:
        """When the next window of any client begins."""
        return min(now + period - (now - begin) % period for _, period, begin in self.windows)


class Exchange(NamedTuple):
    """Counts what an exchange costs each client that takes part in it."""

    down: int  # bytes
    up: int
    passes: int = 0  # over the client's own samples, beside the local steps of training


@dataclass(frozen=True)
class Work:
    """Describes the clients' work, from which every duration follows."""

    devices: Devices
    seed: int
    steps: tuple[int, ...]  # of a whole local training, by client
    passes: tuple[int, ...]  # batches of one pass over the own samples, by client
    exchanges: tuple[Exchange, ...]  # of a round; the first one is training
    before: tuple[Exchange, ...] = ()  # exchanges before round 1

    def takes(self, client: int, exchange: Exchange, steps: int = 0) -> int:
        """The microseconds from the server's message to the whole answer."""
        devices = self.devices
        links = ((exchange.down, devices.down[client]), (exchange.up, devices.up[client]))
        wire = sum(-(-size * SECOND // rate) for size, rate in links if rate)
        return wire + (steps + exchange.passes * self.passes[client]) * devices.step_us[client]

    def trains(self, client: int, steps: int | None = None) -> int:
        """The microseconds of a local training; `steps`: None for all."""
        return self.takes(client, self.exchanges[0], self.steps[client] if steps is None else steps)

    @cached_property
    def durations(self) -> tuple[float, ...]:
        """The seconds of each client's local training."""
        return tuple(self.trains(k) / SECOND for k in range(len(self.steps)))

    def waits(self, exchanges: Sequence[Exchange], clients: Sequence[int]) -> int:
        """The microseconds until all of some clients have answered each of some exchanges."""
        return sum(max(self.takes(k, exchange) for k in clients) for exchange in exchanges)


class Waits(NamedTuple):
    """Says when a server's step comes; by default, when all clients of the cohort have answered."""

    deadline: int = 0  # microseconds after which answers are late; 0: none
    partial: bool = False  # whether slow clients take fewer steps, at least one
    first: int = 0  # the answers that count; 0: all
    asked: int = 0  # clients that are asked for them
    buffer: int = 0  # FedBuff's K: answers to a step, from whatever model; 0: rounds
    concurrency: int = 0  # clients that train at a time for a buffer


class Step(NamedTuple):
    """Describes one step of the server."""

    ends: int  # microseconds since the beginning
    asked: tuple[int, ...]  # ascending
    late: tuple[int, ...]  # clients among them whose answers do not count
    steps: dict[int, int]  # local steps of the clients that do not take all
    versions: tuple[int, ...]  # by `asked`: how many steps the server had taken for the sent model
    wasted: int  # microseconds of work that did not count
    in_time: bool = True  # False: the quickest client counts, although it is late as well


@dataclass(frozen=True)
class Schedule:
    """Holds the steps of a run; they are numbered from 1."""

    plan: tuple[Step, ...]

    def cohort(self, t: int) -> tuple[int, ...]:
        """The clients of step `t`; none after the last one."""
        return self.plan[t - 1].asked if t <= len(self.plan) else ()

    def steps(self, t: int, client: int) -> int:
        """The local steps of a client in step `t`; 0: all of them."""
        return self.plan[t - 1].steps.get(client, 0)

    def absent(self, t: int, exchange: int, asked: tuple[int, ...]) -> tuple[int, ...]:
        """The clients that are late in step `t`, as `engines.absences` has it."""
        return self.plan[t - 1].late if t else ()

    def staleness(self, t: int) -> tuple[int, ...]:
        """By client of step `t`: how many steps the server took since it sent the model; in step 0,
        the most of the run."""
        if t == 0:
            return (max(max(self.staleness(t)) for t in range(1, len(self.plan) + 1)),)
        return tuple(t - 1 - version for version in self.plan[t - 1].versions)

    @property
    def nobody_in_time(self) -> int:
        """Counts the rounds that waited for one client, as nobody was in time."""
        return sum(not step.in_time for step in self.plan)

    @cached_property
    def sha256(self) -> str:
        """The hash of all steps."""
        content = [[*step[:3], sorted(step.steps.items()), *step[4:]] for step in self.plan]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def schedule(work: Work, waits: Waits, cohort: int, rounds: int, until: int = 0) -> Schedule:
    """The first `rounds` steps of the server, or those until `until` (microseconds) if it is above
    0. UserError if there are none, or if `rounds` end earlier."""
    steps = buffered(work, waits) if waits.buffer else synchronous(work, waits, cohort)
    if not until:
        return Schedule(tuple(itertools.islice(steps, rounds)))
    first = itertools.islice(steps, rounds + 1)
    plan = tuple(itertools.takewhile(lambda step: step.ends <= until, first))
    if not 0 < len(plan) <= rounds:
        raise UserError(
            f"until_s = {until / SECOND:g} is refused",
            allowed=f"an earlier time, or more rounds than {rounds}"
            if plan
            else "a later time: no round is over before it",
        )
    return Schedule(plan)


def synchronous(work: Work, waits: Waits, cohort: int) -> Iterator[Step]:
    """Rounds that begin together, and end when all that count have answered, or at the deadline.

    If nobody would be in time, the quickest client counts, and the round is as long as its work.
    """
    devices, everybody = work.devices, range(len(work.steps))
    lost = Streams(work.seed, "dropout")
    now = work.waits(work.before, everybody) if work.before else 0
    for t in itertools.count(1):
        now, there = devices.available(now)
        size = min(waits.asked or cohort, len(there))
        asked = tuple(there[at] for at in draw_cohort(work.seed, t, len(there), size))
        draws = lost(t).random(len(everybody)) if devices.dropout else [1.0] * len(everybody)
        steps = _shortened(work, waits, asked)
        due = {k: work.trains(k, steps.get(k)) for k in asked}
        order = sorted(asked, key=lambda k: (due[k], k))
        answers = [k for k in order if draws[k] >= devices.dropout]
        answers = [k for k in answers if due[k] <= devices.stays(k, now)]
        answers = [k for k in answers if not waits.deadline or due[k] <= waits.deadline]
        counted = answers[: waits.first or None] or order[:1]
        length = due[counted[-1]]
        if waits.deadline and len(counted) < len(asked):
            length = max(length, waits.deadline)
        late = tuple(k for k in asked if k not in counted)
        wasted = sum(min(length, due[k]) for k in late)
        now += length + work.waits(work.exchanges[1:], counted)
        yield Step(now, asked, late, steps, (t - 1,) * len(asked), wasted, bool(answers))


def _shortened(work: Work, waits: Waits, asked: Sequence[int]) -> dict[int, int]:
    """The steps of the clients that take as many as fit before the deadline, and at least one."""
    if not waits.partial:
        return {}
    slow = [k for k in asked if work.steps[k] and work.trains(k) > waits.deadline]
    fit = {k: (waits.deadline - work.trains(k, 0)) // work.devices.step_us[k] for k in slow}
    return {k: max(1, steps) for k, steps in fit.items()}


def buffered(work: Work, waits: Waits) -> Iterator[Step]:
    """FedBuff's steps: the server steps at every `buffer`-th answer, and `concurrency` clients
    train at a time.

    A client whose answer lies in the buffer waits for the step, as the server has no newer model
    for it. So it is in a step once, and (step, client) names its random numbers. Who comes back
    between two answers begins at the second. UserError if the buffer would never be full.
    """
    devices, n = work.devices, len(work.steps)
    takes = [work.trains(k) for k in range(n)]
    able = sum(not devices.windows or takes[k] <= devices.windows[k][0] for k in range(n))
    if able < waits.buffer:
        raise UserError(
            f"buffer = {waits.buffer} is refused: only {able} of {n} clients can answer while they "
            "are available",
            allowed=f"at most {able}",
        )
    pick, lost = Streams(work.seed, "async"), Streams(work.seed, "dropout")
    idle, queue, buffer = [*range(n)], list[tuple[int, int, int]](), list[tuple[int, int]]()
    now = work.waits(work.before, range(n)) if work.before else 0
    draws = answers = version = wasted = 0
    while True:
        there = [k for k in idle if devices.stays(k, now)] if devices.windows else [*idle]
        while there and len(queue) < waits.concurrency:
            client = there.pop(int(pick(draws).integers(len(there))))
            idle.remove(client)
            heapq.heappush(queue, (now + takes[client], client, version))
            draws += 1
        if not queue:
            now = devices.next_arrival(now)
            continue
        now, client, base = heapq.heappop(queue)
        answers += 1
        is_lost = bool(devices.dropout) and lost(answers).random() < devices.dropout
        if is_lost or takes[client] > devices.stays(client, now - takes[client]):
            wasted += takes[client]
            idle = sorted([*idle, client])
            continue
        buffer.append((client, base))
        if len(buffer) == waits.buffer:
            clients, versions = zip(*sorted(buffer), strict=True)
            yield Step(now, clients, (), {}, versions, wasted)
            idle, buffer = sorted([*idle, *clients]), []
            version, wasted = version + 1, 0


def drawn(n: int, seed: int, step_ms: float, spread: float, links: Sequence[float]) -> Devices:
    """Devices whose steps take `step_ms` to `spread` times that, evenly on a logarithmic scale.

    `links`: Mbit/s (down, up) of the fastest link, 0 for none. The slowest link has the fraction
    1 / `spread` of it; a client's link is drawn beside its processor.
    """
    draws = stream(seed, "devices").random((n, 2)).tolist()
    # The last bit of a power may differ between machines; rounded to a microsecond it rarely does,
    # and `Schedule.sha256` shows it.
    steps = tuple(max(1, round(1000 * step_ms * spread**slow)) for slow, _ in draws)
    down, up = (
        tuple(max(1, round(125_000 * link / spread**slow)) if link else 0 for _, slow in draws)
        for link in links
    )
    return Devices(steps, down, up)


def windows(n: int, seed: int, length: int, period: int) -> tuple[tuple[int, int, int], ...]:
    """For each client a window of `length` in every `period` (microseconds), which begins at a
    drawn time."""
    begins = stream(seed, "windows").integers(0, period, n).tolist()
    return tuple((length, period, begin) for begin in begins)
