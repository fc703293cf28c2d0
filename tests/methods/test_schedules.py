"""Learning-rate schedules: their rates, and methods that use the rate of the round."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedml_noniid.contract.checks import close
from fedml_noniid.core.errors import UserError
from fedml_noniid.rates import Cosine, Exponential, Rate, rate_of
from tests import federation
from tests.methods import by_hand as hand
from tests.methods import test_feddyn, test_fednova, test_scaffold
from tests.recipe_table import ALONE


def rates(of: Rate, rounds: int) -> list[float]:
    return [of.at_round(t, rounds) for t in range(1, rounds + 1)]


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        (0.4, [0.4, 0.4, 0.4, 0.4]),
        ({"start": 0.4}, [0.4, 0.4, 0.4, 0.4]),
        ({"start": 0.4, "warm_up": 3}, [0.1, 0.2, 0.3, 0.4]),
        ({"start": 0.4, "decay": "exponential", "factor": 0.5, "warm_up": 1}, [0.2, 0.4, 0.2, 0.1]),
        # Two rounds of warm-up leave two: cos(0) and cos(pi / 2).
        ({"start": 0.4, "decay": "cosine", "warm_up": 2}, [0.4 / 3, 0.8 / 3, 0.4, 0.2]),
        ({"start": 0.4, "decay": "step", "factor": 0.5, "at": [2, 3]}, [0.4, 0.2, 0.1, 0.1]),
        ({"start": 0.4, "decay": "step", "factor": 0.5, "every": 2}, [0.4, 0.4, 0.2, 0.2]),
    ],
)
def test_rates_worked_out_by_hand(setting: Any, wanted: list[float]) -> None:
    of = rate_of(setting)
    assert rates(of, 4) == pytest.approx(wanted, rel=1e-12)
    assert of.at_round(0, 4) == of.at_round(1, 4), "exchanges before the first round have its rate"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            {"start": 0.4, "decay": "cosin"},
            "decay 'cosin' is unknown (did you mean 'cosine'?); allowed: none, step",
        ),
        ({"decay": "cosine"}, "start is missing"),
        ({"start": -1, "decay": "cosine"}, "start = -1 is refused"),
        ({"start": math.nan}, "start = nan is refused; allowed: a number above 0"),
        (
            {"start": 0.4, "decay": "cosine", "end": 0.5},
            "end = 0.5 is refused; allowed: at most start = 0.4",
        ),
        (
            {"start": 0.4, "decay": "exponential", "every": 3},
            "every is unknown; allowed: start, warm_up, factor, decay",
        ),
        ({"start": 0.4, "decay": "exponential", "factor": 1.5}, "factor = 1.5 is refused"),
        (
            {"start": 0.4, "decay": "step"},
            "decay = step needs either `every` (rounds, from 1 up) or `at`",
        ),
        ({"start": 0.4, "decay": "step", "every": 2, "at": [3]}, "decay = step needs either"),
        ({"start": 0.4, "decay": "step", "at": [0]}, "at[0] = 0 is refused"),
        ({"start": 0.4, "decay": "step", "at": 3}, "at = 3 is refused; allowed: a list"),
        (
            {"start": 0.4, "decay": "nowhere.Rate"},
            "decay 'nowhere.Rate' can't be imported, ModuleNotFoundError",
        ),
        ({"start": 0.4, "decay": "math.sqrt"}, "decay 'math.sqrt' is no subclass of Rate"),
        ({"start": 0.4, "decay": 3}, "decay 3 is unknown"),
    ],
)
def test_bad_schedules_are_refused(setting: Any, words: str) -> None:
    with pytest.raises(UserError) as error:
        rate_of(setting)
    assert words in str(error.value) and "\n" not in str(error.value)


class Rising(Rate):
    """A schedule of a user who got a sign wrong."""

    def decayed(self, p: int, rounds: int) -> float:
        return self.start * (1 + p)


def test_a_rate_above_its_start_is_refused() -> None:
    """Methods are checked against `start`: FedNova's mu below 1 / eta."""
    of = rate_of({"start": 0.4, "decay": f"{__name__}.Rising"})
    assert of.at_round(1, 3) == 0.4
    with pytest.raises(
        UserError, match=r"lr: Rising gives 0\.8 in round 2; allowed: above 0, at most 0\.4"
    ):
        of.at_round(2, 3)
    with pytest.raises(UserError, match=r"lr: Rising failed, .*test_schedules.py, line .*TypeErr"):
        Rising(None).at_round(2, 3)  # type: ignore[arg-type]  # its author's mistake is tested


HALVED = Exponential(hand.LR, factor=0.5)
REFERENCES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[[], Any]]] = {
    "scaffold": ("scaffold", {}, {}, test_scaffold.Reference),
    "fednova": ("fednova", {}, {}, lambda: test_fednova.Reference(0.0, 0.0)),
    "fednova, momentum and mu": (
        "fednova",
        {"fednova": {"mu": test_fednova.MU}},
        {"momentum": test_fednova.RHO},
        lambda: test_fednova.Reference(test_fednova.RHO, test_fednova.MU),
    ),
    "feddyn": ("feddyn", test_feddyn.PLAIN, {}, test_feddyn.Reference),
}


@pytest.mark.parametrize("entry", REFERENCES)
def test_methods_use_the_rate_of_the_round(engine: str, entry: str) -> None:
    """Rates 0.5, 0.25, 0.125: SCAFFOLD's c_i divides by K eta_t, FedNova's a with mu has eta_t."""
    recipe, settings, local, made = REFERENCES[entry]
    options = local | {"rounds": 3, "cohort": 2, "batch_size": 1}
    ran = hand.run(recipe, settings, engine=engine, lr=HALVED, **options)
    reference = made()
    for t, cohort, batches in ran.rounds():
        reference.lr = 0.5**t
        reference.round(cohort, batches)
    hand.same(ran.outcome.params, reference.w)
    assert not hand.identical(ran, hand.run(recipe, settings, engine=engine, **options))


DECAYING = Cosine(0.1, warm_up=1)


# Those that read the rate, beside the steps themselves.
@pytest.mark.parametrize("entry", ["scaffold", "feddc", "fednova,mu=0.2", "qfedavg", "fnr"])
def test_engines_agree_on_a_schedule(entry: str) -> None:
    recipe, settings = ALONE[entry]
    options: Any = {"dtype": torch.float64, "batch_norm": True, "epochs": 1, "lr": DECAYING}
    a, b = (
        federation.run(recipe, settings, engine=engine, **options)
        for engine in ("sequential", "vectorized")
    )
    close(b.params, a.params, 1e-9)
    close(b.evaluated, a.evaluated, 1e-9)
