"""The papers' own counts: table 3 of FNR-FL and table III of rFedAvg, as printed."""

from __future__ import annotations

import pytest

from fedml_noniid.pipelines.experiment import counts

RESNET18_MIB = 44.599  # of the authors' state dict, whose classifier has 1000 outputs


@pytest.mark.parametrize(
    ("composition", "printed"),
    [
        ("fnr", 8920),
        ("fedavg", 8920),
        ("fedprox", 8920),
        ("scaffold", 13380),
        ("moon", 8920),
        ("fednova", 8920),
    ],
)
def test_fnrs_table_3(composition: str, printed: int) -> None:
    """10 clients, 10 rounds."""
    found = counts.fnr_mib(composition, round(RESNET18_MIB * counts.MIB), 100)
    assert found == pytest.approx(printed, abs=0.5)
    assert counts.fnr_mib("fednnnn", 1, 1) is None


@pytest.mark.parametrize(
    ("accuracy", "seconds", "kappa", "traffic", "rho"),
    [
        (0.9976, 6060, 1.6462, 8920, 1.1184),
        (0.7425, 6840, 1.0855, 13380, 0.5549),
        (0.8393, 6006, 1.3974, 8920, 0.9409),
    ],
)
def test_kappa_and_rho_of_table_3(
    accuracy: float, seconds: int, kappa: float, traffic: int, rho: float
) -> None:
    assert counts.kappa(accuracy, seconds) == pytest.approx(kappa, abs=1e-4)
    assert counts.rho(accuracy, traffic) == pytest.approx(rho, abs=1e-4)


@pytest.mark.parametrize(
    ("composition", "d", "cohort", "printed"),
    [
        ("rfedavg", 512, 20, 56160),
        ("rfedavg", 256, 20, 35680),
        ("rfedavg", 512, 100, 280800),
        ("rfedavg", 256, 100, 178400),
        ("rfedavg_plus", 512, 20, 2808),
        ("rfedavg_plus", 256, 100, 1784),
    ],
)
def test_rfedavgs_table_3(composition: str, d: int, cohort: int, printed: int) -> None:
    """The paper's numbers hold 760 bytes of serialisation per vector, which we leave out."""
    vectors = 1 if composition == "rfedavg_plus" else cohort
    assert counts.delta_bytes(composition, d, cohort) == printed - 760 * vectors
    assert counts.delta_bytes("scaffold", d, cohort) is None
