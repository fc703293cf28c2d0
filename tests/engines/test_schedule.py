"""Schedules: numbers by hand, and what holds for all of them. Nothing is trained."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedml_noniid.core.errors import UserError
from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.engines.schedule import (
    SECOND,
    Devices,
    Exchange,
    Waits,
    Work,
    drawn,
    schedule,
    windows,
)

FREE = Exchange(0, 0)
ALL = Waits()
KINDS = {
    "all": ALL,
    "deadline": Waits(deadline=SECOND),
    "partial": Waits(deadline=SECOND, partial=True),
    "first": Waits(first=7, asked=10),
    "buffer": Waits(buffer=5, concurrency=10),
    "async": Waits(buffer=1, concurrency=10),
}


def work(*step_us: int, steps: int = 2, links: int = 0, **changes: object) -> Work:
    """Clients with these devices and so many local steps; messages take no time."""
    n = len(step_us)
    devices = Devices(step_us, (links,) * n, (links,) * n)
    return replace(Work(devices, 3, (steps,) * n, (1,) * n, (FREE,)), **changes)


def ends(one: Work, waits: Waits, rounds: int = 2) -> list[int]:
    return [step.ends for step in schedule(one, waits, len(one.steps), rounds).plan]


def test_rounds_by_hand() -> None:
    """Two steps take 20, 40 and 80 microseconds."""
    three = work(10, 20, 40)
    assert ends(three, ALL) == [80, 160]
    dropped = schedule(three, Waits(deadline=50), 3, 2)
    assert [step.ends for step in dropped.plan] == [50, 100]
    assert dropped.plan[1][1:] == ((0, 1, 2), (2,), {}, (1, 1, 1), 50, True)
    assert dropped.absent(0, 0, (0, 1, 2)) == () and dropped.absent(2, 1, (0, 2)) == (2,)
    first = schedule(three, Waits(first=2, asked=3), 3, 1).plan[0]
    assert (first.ends, first.late, first.wasted) == (40, (2,), 40)


def test_partial_work_by_hand() -> None:
    three = work(10, 20, 40)
    fits = schedule(three, Waits(50, partial=True), 3, 2)
    assert [step.ends for step in fits.plan] == [40, 80]  # 20, 40 and one step of 40
    assert fits.plan[0].steps == {2: 1} and not fits.plan[0].late
    assert (fits.steps(1, 1), fits.steps(1, 2)) == (0, 1)
    late = schedule(three, Waits(30, partial=True), 3, 1).plan[0]  # one step of 40 is one at least
    assert (late.ends, late.steps, late.late, late.wasted) == (30, {1: 1, 2: 1}, (2,), 30)


def test_if_nobody_is_in_time_the_quickest_counts() -> None:
    made = schedule(work(10, 20, 40), Waits(deadline=5), 3, 2)
    assert [step.ends for step in made.plan] == [20, 40]
    assert made.plan[0].late == (1, 2) and made.plan[0].wasted == 20 + 20
    assert made.nobody_in_time == 2
    assert not schedule(work(10, 20, 40), Waits(deadline=20), 3, 2).nobody_in_time


def test_links_and_further_exchanges_by_hand() -> None:
    """10 bytes down and 5 up at 3 bytes per microsecond: 3.33 and 1.67, each rounded up."""
    assert ends(work(10, 20, links=3 * SECOND, exchanges=(Exchange(10, 5),)), ALL) == [46, 92]
    # Then all that have answered take a pass of one batch: 10 and 20 microseconds.
    asked_again = work(10, 20, exchanges=(FREE, Exchange(0, 0, passes=1)))
    assert ends(asked_again, ALL) == [60, 120]
    assert ends(asked_again, Waits(deadline=30)) == [40, 80]
    # A pass in training, and an exchange before round 1.
    assert ends(work(10, 20, exchanges=(Exchange(0, 0, passes=1),)), ALL) == [60, 120]
    assert ends(work(10, 20, before=(Exchange(0, 0, passes=1),)), ALL) == [60, 100]


def test_windows_by_hand() -> None:
    """Client 0 is there at 0 to 49 of each 100 microseconds, client 1 at 70 to 99."""
    times = ((50, 100, 0), (30, 100, 70))
    shifts = work(10, 10)
    shifts = replace(shifts, devices=replace(shifts.devices, windows=times))
    made = schedule(shifts, ALL, 2, 5).plan
    # 20 microseconds each. At 40 and 90 the one who is there goes before its end.
    assert [step.asked for step in made] == [(0,), (0,), (0,), (1,), (1,)]
    assert [step.ends for step in made] == [20, 40, 60, 90, 110]
    assert [step.in_time for step in made] == [True, True, False, True, False]


def test_a_buffer_by_hand() -> None:
    """Work of 10, 20 and 45 microseconds, all train at once, a step at two answers.

    10, 20: clients 0 and 1, of w_0. 30, 40: both, of w_1. 45, 50: client 2 of w_0, client 0 of w_2.
    """
    made = schedule(work(5, 10, 22, steps=2), Waits(buffer=2, concurrency=3), 2, 3)
    assert [step.ends for step in made.plan] == [20, 40, 50]
    assert [step.asked for step in made.plan] == [(0, 1), (0, 1), (0, 2)]
    assert [made.staleness(t) for t in (1, 2, 3)] == [(0, 0), (0, 0), (0, 2)]
    assert made.staleness(0) == (2,)


def test_fedasync_by_hand() -> None:
    """Work of 10 and 25 microseconds; at 50 both answer, client 0 first."""
    made = schedule(work(10, 25, steps=1), Waits(buffer=1, concurrency=2), 1, 7)
    assert [(step.ends, *step.asked, *step.versions) for step in made.plan] == [
        (10, 0, 0),
        (20, 0, 1),
        (25, 1, 0),
        (30, 0, 2),
        (40, 0, 4),
        (50, 0, 5),
        (50, 1, 3),
    ]


def test_cohorts_are_those_without_a_clock() -> None:
    made = schedule(work(*range(1, 9)), Waits(deadline=10), 3, 5)
    assert [made.cohort(t) for t in range(1, 7)] == [
        *(draw_cohort(3, t, 8, 3) for t in range(1, 6)),
        (),
    ]


def test_a_run_until_a_time() -> None:
    three = work(10, 20, 40)  # rounds of 80
    assert len(schedule(three, ALL, 3, 5, until=239).plan) == 2
    assert len(schedule(three, ALL, 3, 3, until=240).plan) == 3
    for rounds, until, words in (
        (2, 240, "allowed: an earlier time, or more rounds than 2"),
        (5, 79, "allowed: a later time: no round is over before it"),
    ):
        with pytest.raises(UserError, match=words):
            schedule(three, ALL, 3, rounds, until=until)


def test_a_buffer_that_is_never_full_is_refused() -> None:
    short = work(10, 10, 40)
    short = replace(short, devices=replace(short.devices, windows=((50, 100, 0),) * 3))
    assert schedule(short, Waits(buffer=2, concurrency=3), 2, 9).plan[8].asked == (0, 1)
    with pytest.raises(UserError, match=r"only 2 of 3 clients can answer.*at most 2"):
        schedule(short, Waits(buffer=3, concurrency=3), 3, 9)


def uneven(n: int, seed: int, dropout: float, shifts: bool) -> Work:
    speeds = drawn(n, seed, 20.0, 10.0, (2.0, 0.5))
    times = windows(n, seed, 20 * SECOND, 60 * SECOND) if shifts else ()
    devices = replace(speeds, dropout=dropout, windows=times)
    message = Exchange(50_000, 50_000)
    return Work(devices, seed, (8,) * n, (4,) * n, (message,))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    st.integers(0, 1 << 30),
    st.sampled_from((0.0, 0.2)),
    st.booleans(),
)
def test_what_holds_for_every_schedule(kind: str, seed: int, dropout: float, shifts: bool) -> None:
    one, waits, rounds = uneven(12, seed, dropout, shifts), KINDS[kind], 30
    made = schedule(one, waits, 6, rounds)
    assert schedule(one, waits, 6, 10).plan == made.plan[:10]
    assert made.sha256 == schedule(one, waits, 6, rounds).sha256
    assert made.sha256 != schedule(one, waits, 6, rounds - 1).sha256
    clock, began = [0, *(step.ends for step in made.plan)], []
    for t, step in enumerate(made.plan, 1):
        assert list(step.asked) == sorted({*step.asked}) and {*step.late} < {*step.asked}
        assert clock[t - 1] <= clock[t] and min(made.staleness(t)) >= 0
        if waits.deadline and step.in_time and not shifts:
            assert clock[t] - clock[t - 1] <= waits.deadline
        for client, version in zip(step.asked, step.versions, strict=True):
            takes = one.trains(client, step.steps.get(client))
            if client not in step.late:  # no model is there before it is made
                assert clock[version] + takes <= step.ends
                began.append((clock[version], step.ends, client))
    if waits.buffer:  # nobody trains twice at a time
        for client in range(12):
            mine = sorted(span[:2] for span in began if span[2] == client)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))
