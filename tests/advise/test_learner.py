"""The learner on bases with known answers, what it does not know, and the arithmetic of leaving
out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedml_noniid.pipelines.advise import validation
from fedml_noniid.pipelines.advise.base import BASELINE, Known
from fedml_noniid.pipelines.advise.learner import Expected, Learner
from fedml_noniid.pipelines.advise.measures import MEASURES
from fedml_noniid.plugins.core.errors import UserError

USUAL = dict.fromkeys(MEASURES, 0.5) | {"clients": 20.0, "size_mean": 100.0, "classes": 10.0}


def known(name: str, gains: dict[str, float], data: str = "one", **measures: float) -> Known:
    return Known(data, name, USUAL | measures, {BASELINE: 0.0, **gains})


def two_kinds(n: int = 6) -> list[Known]:
    """n scenarios without label skew, where `a` is best, and n with it, where `b` is."""
    even = [
        known(f"even{i}", {"a": 5.0, "b": 0.0}, label_hellinger_mean=0.1 + i / 200)
        for i in range(n)
    ]
    odd = [
        known(f"odd{i}", {"a": -5.0, "b": 2.0}, "two", label_hellinger_mean=0.7 + i / 200)
        for i in range(n)
    ]
    return even + odd


@pytest.mark.parametrize(
    ("labels", "best", "gain", "last"), [(0.11, "a", 5, "b"), (0.72, "b", 2, "a")]
)
def test_the_method_of_like_scenarios_is_advised(
    labels: float, best: str, gain: float, last: str
) -> None:
    advice = Learner(two_kinds()).advise(USUAL | {"label_hellinger_mean": labels})
    assert advice.best is not None and (advice.best.method, advice.best.gain) == (
        best,
        pytest.approx(gain, abs=1e-6),
    )
    assert (
        advice.nearest.startswith("one even" if best == "a" else "two odd") and advice.reason == ""
    )
    assert {one.method for one in advice.ranked} == {"a", "b", BASELINE} and advice.ranked[
        -1
    ].method in (
        last,
        BASELINE,
    )
    assert [one.gain for one in advice.ranked] == sorted(
        (one.gain for one in advice.ranked), reverse=True
    )


def test_the_weights_by_hand() -> None:
    """Gini 0 and 1 deviate by 1/2, so they are 2 apart, which is the width: weights 1 and exp(-4 /
    8)."""
    learner = Learner(
        [known("x", {"a": 10.0}, size_gini=0.0), known("y", {"a": 0.0}, size_gini=1.0)]
    )
    assert learner.predicted(USUAL | {"size_gini": 0.0}) == pytest.approx(
        [10 / (1 + math.exp(-0.5))]
    )
    assert learner.predicted(USUAL | {"size_gini": 0.5}) == pytest.approx([5])


def test_sizes_count_by_their_ratio() -> None:
    learner = Learner(
        [known("x", {"a": 10.0}, size_mean=10.0), known("y", {"a": 0.0}, size_mean=1000.0)]
    )
    assert learner.predicted(USUAL | {"size_mean": 100.0}) == pytest.approx([5])


@pytest.mark.parametrize(
    ("n", "half"),
    [
        (8, math.inf),  # too few for a 90 % interval
        (9, 9.0),  # the 9th of 9: the outlier, 9 less the others' mean of 0
        (19, 9 / 18),  # the 18th of 19: 0 less the mean of 17 zeros and the outlier
    ],
)
def test_the_interval_by_hand(n: int, half: float) -> None:
    """Scenarios alike in everything, so each is expected to have the mean of all others; one has a
    gain of 9."""
    learner = Learner([known(str(i), {"a": 9.0 if i == 0 else 0.0}) for i in range(n)])
    assert learner.halves == pytest.approx([half])
    (found,) = (one for one in learner.ranked(USUAL) if one.method == "a")
    assert found == Expected(
        "a", pytest.approx(9 / n), pytest.approx(9 / n - half), pytest.approx(9 / n + half)
    )


def test_fedavg_is_advised_where_nothing_gains() -> None:
    learner = Learner([known(str(i), {"a": -1.0, "b": -0.1}) for i in range(10)])
    best = learner.advise(USUAL).best
    assert best == Expected(BASELINE, 0, 0, 0)


@pytest.mark.parametrize(
    ("measures", "said"),
    [
        ({"classes": 2.0}, "classes 2, the base has 10"),
        ({"label_hellinger_mean": 0.9}, "Hellinger distance 0.9, the base has 0.1 to 0.725"),
        (
            {"clients": 500.0, "share": 0.1},
            "clients 500, the base has 20; fraction of clients per round 0.1, the base",
        ),
        # Between the two kinds, far from both.
        (
            {"label_hellinger_mean": 0.4},
            "no scenario of the base has such a mix of measures: the nearest is ",
        ),
    ],
)
def test_it_says_what_it_does_not_know(measures: dict[str, float], said: str) -> None:
    advice = Learner(two_kinds()).advise(USUAL | {"label_hellinger_mean": 0.1} | measures)
    assert advice.best is None and advice.ranked == () and advice.reason.startswith(said)


@pytest.mark.parametrize(("beyond", "is_known"), [(0.09, True), (0.11, False)])
def test_a_tenth_of_the_range_beyond_the_base_is_known(beyond: float, is_known: bool) -> None:
    learner = Learner([known(str(i), {"a": 1.0}, size_gini=i / 3) for i in range(4)])
    assert (learner.why_not(USUAL | {"size_gini": 1 + beyond}) == "") is is_known


def test_what_is_not_measured_is_not_known() -> None:
    measures = {name: value for name, value in USUAL.items() if not name.startswith("feature")}
    assert (
        Learner(two_kinds()).advise(measures).reason
        == "not measured here: feature shift, feature spread"
    )


def test_a_base_of_one_scenario_is_refused() -> None:
    with pytest.raises(UserError, match="has 1 scenarios; allowed: 2 or more"):
        Learner([known("x", {"a": 1.0})])


# `a` is best on x and y, `b` on z. All are alike in their measures.
THREE = [
    known("x", {"a": 4.0, "b": 1.0}),
    known("y", {"a": 2.0, "b": -1.0}),
    known("z", {"a": -6.0, "b": 3.0}, "two"),
]


def test_leaving_one_scenario_out_by_hand() -> None:
    """Without x the means are -2 and 1, without y -1 and 2, without z 3 and 0: so b, b, a, by both
    ways to choose."""
    trials = validation.scenarios(THREE)
    assert [trial.choices for trial in trials] == [
        {"advisor": one, "best on average": one, "FedAvg": BASELINE} for one in ("b", "b", "a")
    ]
    assert [trial.regret(trial.choices["advisor"]) for trial in trials] == [3, 3, 9]
    assert [trial.regret(BASELINE) for trial in trials] == [4, 2, 3]
    assert all(
        trial.inside == (2, 2) and trial.reason == "" for trial in trials
    )  # infinite intervals


def test_leaving_a_data_set_out_by_hand() -> None:
    """Only z can be left out: without data set `one` a single scenario is left.

    FedAvg's regret counts against 3.
    """
    (trial,) = validation.data_sets(THREE)
    assert (trial.known.name, trial.average, trial.regret("a"), trial.regret("b")) == (
        "two z",
        "a",
        9,
        0,
    )


def test_fedavg_is_the_best_on_average_where_no_mean_is_above_0() -> None:
    assert validation.best_on_average(THREE) == "b"
    assert validation.best_on_average([known("x", {"a": -1.0, "b": 0.0})]) == BASELINE


def test_gains_inside_an_interval_are_counted() -> None:
    """Ten scenarios with gain 0 and one with 5: its own rest expects 0 +- 0; the others expect 0.5
    +- 5 (10 of 10)."""
    alike = [known(str(i), {"a": 5.0 if i == 0 else 0.0}) for i in range(11)]
    assert [trial.inside for trial in validation.scenarios(alike)] == [(0, 1), *[(1, 1)] * 10]
    assert np.all(Learner(alike[1:]).halves == 0)
