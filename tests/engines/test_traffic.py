"""Bytes up and down, in models (M), as the methods promise."""

from __future__ import annotations

import pytest
import torch

from fedml_noniid.core.trees import n_bytes
from fedml_noniid.engines.plan import initial_model
from tests import federation
from tests.recipe_table import ALONE

N, COHORT, D, C = 6, 4, 5, federation.N_CLASSES
FLOAT = 4  # bytes


def model(batch_norm: bool) -> tuple[int, int]:
    """(bytes of the parameters, bytes of parameters and buffers)."""
    params, buffers = initial_model(federation.network(batch_norm), 3, torch.zeros(1))
    return n_bytes(params), n_bytes(params) + n_bytes(buffers)


def traffic(
    recipe: str, cohort: int = COHORT, batch_norm: bool = False, rounds: int = 3
) -> list[tuple[float, float]]:
    """(up, down) of each round."""
    settings = {"fnr": {"fnr": {"p": 0.5}}}.get(recipe)
    rows = federation.run(
        recipe, settings, cohort=cohort, batch_norm=batch_norm, rounds=rounds
    ).rows
    return [(row["bytes_up"], row["bytes_down"]) for row in rows]


@pytest.mark.parametrize("batch_norm", [False, True])
def test_fnr_moves_two_models_and_a_third_for_the_refined(batch_norm: bool) -> None:
    """Up: M + C + 1, and M again from the floor(4 * 0.5) = 2 that are refined; down: M, and C to
    those."""
    _, m = model(batch_norm)
    up = COHORT * (m + (C + 1) * FLOAT) + 2 * m
    down = COHORT * m + 2 * C * FLOAT
    assert traffic("fnr", batch_norm=batch_norm) == [(up, down)] * 3


def test_rfedavg_sends_the_table_of_the_others() -> None:
    """2M + d up + (N - 1) d down; before round 1 everybody gets w_0 and sends delta_0, and then has
    w_0."""
    _, m = model(False)
    up, down = COHORT * (m + D * FLOAT), COHORT * (N - 1) * D * FLOAT
    first, *later = traffic("rfedavg")
    assert later == [(up, COHORT * m + down)] * 2
    assert first == (up + N * D * FLOAT, N * m + down)


def test_rfedavg_plus_sends_one_mean_and_no_model_twice() -> None:
    """Full participation: 2M + d up + d down; w_{t+1} goes down once, to be mapped, and is trained
    on in round t+1."""
    _, m = model(False)
    first, *later = traffic("rfedavg_plus", cohort=N)
    assert later == [(N * (m + D * FLOAT), N * (m + D * FLOAT))] * 2
    # w_0 with the first maps, then w_1.
    assert first == (N * D * FLOAT + N * (m + D * FLOAT), N * m + N * D * FLOAT + N * m)


GENERATOR = 6 * (3 + C) + 6 + D * 6 + D  # numbers of FedGen's: 3 of noise and C, 6 hidden, D

# Beside the model up and down: (parameters up, numbers up, parameters down, numbers down), per
# client and round.
BESIDE = {
    "ccn": (0, D, 0, 0),
    "datasharing": (0, 0, 0, 0),
    "fedavgm": (0, 0, 0, 0),
    "fedasync": (0, 0, 0, 0),
    "fedbuff": (0, 0, 0, 0),
    "fedcm": (0, 0, 1, 0),
    "feddc": (1, 0, 1, 0),
    "feddecorr": (0, 0, 0, 0),
    "feddf": (0, 0, 0, 0),
    "feddyn": (0, 0, 0, 0),
    "fedavg": (0, 0, 0, 0),
    "fedexp": (0, 0, 0, 0),
    "fedftg": (0, C, 0, 0),
    "fedgen": (0, C, 0, GENERATOR + 1),
    "fedlc": (0, 0, 0, 0),
    "fedlesam": (0, 0, 0, 0),
    "fednlr": (0, 0, 0, 0),
    "fednnnn": (0, 0, 0, 0),
    "fednova": (0, 1, 0, 0),
    "fednsam": (0, 0, 1, 0),
    "fednova,mu=0.2": (0, 2, 0, 0),
    "fedntd": (0, 0, 0, 0),
    "fedprox": (0, 0, 0, 0),
    "fedrs": (0, 0, 0, 0),
    "fedsam": (0, 0, 0, 0),
    "fsl": (0, 0, 0, 0),
    "moon": (0, 0, 0, 0),
    "qfedavg": (0, 1, 0, 0),
    "scaffold": (1, 0, 1, 0),  # control variates have no buffers
    "scaffold_i": (1, 0, 1, 0),
    "sgdm": (1, 0, 1, 0),
    "sgdm_local": (0, 0, 0, 0),
    "sgdm_server": (0, 0, 0, 0),
}


@pytest.mark.parametrize("entry", BESIDE)
def test_what_a_method_moves_beside_the_model(entry: str) -> None:
    params, m = model(batch_norm=True)
    params_up, up, params_down, down = BESIDE[entry]
    recipe, settings = ALONE[entry]
    rows = federation.run(recipe, settings, batch_norm=True, rounds=2, epochs=1).rows
    for row in rows:
        assert row["bytes_up"] == COHORT * (m + params_up * params + up * FLOAT)
        assert row["bytes_down"] == COHORT * (m + params_down * params + down * FLOAT)


def test_fedbabu_moves_the_body_only() -> None:
    """53 numbers without the classifier's 5 * 3 + 3."""
    assert traffic("fedbabu") == [(COHORT * 35 * FLOAT, COHORT * 35 * FLOAT)] * 3


def test_a_linear_probe_moves_the_classifier_only() -> None:
    assert traffic("linear_probe") == [(COHORT * 18 * FLOAT, COHORT * 18 * FLOAT)] * 3


def test_ifca_sends_all_models_and_then_one() -> None:
    """(K + 1) M down; M and the choice, K numbers, up."""
    _, m = model(True)
    rows = federation.run("ifca", {"ifca": {"clusters": 3}}, batch_norm=True).rows
    up, down = COHORT * (m + 3 * FLOAT), COHORT * 4 * m
    assert [(row["bytes_up"], row["bytes_down"]) for row in rows] == [(up, down)] * 3


def test_fed3r_asks_everybody_once_for_sums() -> None:
    """Before round 1: w_0 down; (D + 1)(D + 2) / 2 + (D + 1) C numbers of 8 bytes up."""
    _, m = model(False)
    sums = ((D + 1) * (D + 2) // 2 + (D + 1) * C) * 8
    first, *rest = traffic("fed3r")
    assert first == (COHORT * m + N * sums, COHORT * m + N * m)
    assert rest == [(COHORT * m, COHORT * m)] * 2


def test_ccvr_asks_everybody_once_for_statistics() -> None:
    """After the last round: M down, C (d + d (d + 1) / 2 + 1) up.

    Nobody holds the new model yet.
    """
    _, m = model(False)
    *first, last = traffic("ccvr")
    assert first == [(COHORT * m, COHORT * m)] * 2
    assert last == (COHORT * m + N * C * (D + D * (D + 1) // 2 + 1) * FLOAT, COHORT * m + N * m)


def test_centralised_training_counts_as_one_client() -> None:
    """It gets the model and gives it back; what bringing all data there would cost is not
    counted."""
    _, m = model(False)
    assert traffic("centralised") == [(m, m)] * 3
