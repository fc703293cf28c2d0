"""Comparisons by the virtual clock, against numbers by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from scipy.stats import t as student

from fedml_noniid.metrics import METRICS
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.reporting import clock

ACCURACY = METRICS["accuracy"]
NOTHING: dict[str, Any] = dict.fromkeys(("key", "composition"), "") | {
    **{key: {} for key in ("tags", "final", "made", "evaluation")},
    **dict.fromkeys(("client_accuracy", "files", "notes"), ()),
}


def run(
    recipe: str, seed: int, tests: Sequence[tuple[float, float]], scenario: str = "s", **params: Any
) -> ItemResult:
    """`tests`: (virtual seconds, accuracy)."""
    rows = tuple({"round": t, "clock_s": at, "test_accuracy": a} for t, (at, a) in enumerate(tests))
    of_run = {"scenario": scenario, "recipe": recipe, "seed": seed, "params": params, "rows": rows}
    return ItemResult(**NOTHING | of_run)


def rising(at: float, end: float = 48.0) -> list[tuple[float, float]]:
    """0.2 from second 1 on, 0.8 from `at` on."""
    return [(1.0, 0.2), (at, 0.8), (end, 0.8)]


def test_all_are_read_on_one_grid_until_the_first_is_over() -> None:
    curves = clock.read([run("a", 0, rising(10.5)), run("b", 0, rising(20, 96.0))])
    frame = curves["s", "a"]
    assert [*frame.index] == pytest.approx([*range(1, 49)])
    assert frame[0].tolist() == [0.2] * 10 + [0.8] * 38  # the newest model that was tested
    assert curves["s", "b"][0].tolist() == [0.2] * 19 + [0.8] * 29
    # A run that has an end in virtual seconds lasts until then.
    end: dict[str, Any] = {"train.until_s": 96.0}
    (longer,) = clock.read([run("a", 0, rising(10.5), **end)]).values()
    assert longer.index[-1] == 96 and longer[0].iloc[-1] == 0.8


def test_a_test_that_is_not_measured_and_a_second_one_at_a_time_do_not_count() -> None:
    tests = [(1.0, 0.2), (2.0, 0.3), (2.0, 0.4), (3.0, math.nan), (48.0, 0.5)]
    ((frame,),) = [clock.read([run("a", 0, tests)]).values()]
    assert frame[0].tolist()[:4] == [0.2, 0.4, 0.4, 0.4]


def test_a_goal_is_reached_when_three_readings_have_it() -> None:
    """95 % of 0.8 is 0.76: three readings of 0.8, the first one at second 11. A single one at
    second 5 does not count."""
    lucky = [(1.0, 0.2), (5.0, 0.9), (5.5, 0.2), *rising(10.5)[1:]]
    curves = clock.read([run("a", 0, lucky)])
    assert clock.goal_of(curves) == pytest.approx(0.76)
    assert clock.seconds_to(0.76, curves["s", "a"]) == {0: pytest.approx(13)}


def test_the_table_pairs_seeds_on_a_logarithmic_scale() -> None:
    """a: 13, 23 and 33 s. b: 8, 13 and 13 s. c reaches it once."""
    runs = [run("a", seed, rising(at)) for seed, at in enumerate((10.5, 20.5, 30.5))]
    runs += [run("b", seed, rising(at)) for seed, at in enumerate((5.5, 10.5, 10.5))]
    runs += [run("c", seed, rising(at)) for seed, at in enumerate((5.5, 47.5, 47.5))]
    header, a, b, c = clock.table(clock.read(runs), ACCURACY)
    assert header == [
        *("scenario", "method", "at 12 s, %", "at 24 s, %", "at 36 s, %", "at 48 s, %"),
        *("s to 76.00 %", "times as fast"),
    ]
    assert a == ["s", "a", "40.00", "60.00", "80.00", "80.00", "23.0 ± 10.0", "1.00 (1.00 to 1.00)"]
    logs = [math.log(13 / 8), math.log(23 / 13), math.log(33 / 13)]
    mean = sum(logs) / 3
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logs) / 2)
    half = student.ppf(0.975, 2) * deviation / math.sqrt(3)
    low, middle, high = (math.exp(x) for x in (mean - half, mean, mean + half))
    assert b[-2:] == ["11.3 ± 2.9", f"{middle:.2f} ({low:.2f} to {high:.2f})"]
    assert c[-2:] == ["1 of 3 reach it", "-"]
    assert "76.00 %, 95 % of what the first line" in clock.note(clock.read(runs), ACCURACY)
