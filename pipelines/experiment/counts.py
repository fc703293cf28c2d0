"""Traffic as the papers count it, and FNR-FL's two measures of efficiency."""

from __future__ import annotations

MIB = 2**20
# The methods of FNR-FL's table 3. A combination with FNR-FL is not in the table and is counted by
# the same rule.
FNR_TABLE = {"fedavg", "fedprox", "scaffold", "scaffold_i", "moon", "fednova", "fnr", "fnr_authors"}


def fnr_mib(composition: str, model_bytes: int, client_rounds: int) -> float | None:
    """MiB of a whole run by FNR-FL's table 3: two models per client and round (one down, one up),
    three with SCAFFOLD.

    The table leaves out FNR-FL's own extra traffic (the refined models, feature norms) and
    SCAFFOLD's fourth model. The result is None for other methods. Table 3's 8920 are 10 clients x
    10 rounds x 2 x 44.6 MiB, so its "MB" are MiB.
    """
    methods = set(composition.split("+"))
    if not methods <= FNR_TABLE:
        return None
    return (3 if methods & {"scaffold", "scaffold_i"} else 2) * model_bytes * client_rounds / MIB


def delta_bytes(composition: str, feature_size: int, cohort: int) -> int | None:
    """Bytes of delta per client and round by rFedAvg's table III, without its 760 bytes of
    serialisation.

    4 d for rFedAvg+. For rFedAvg, 4 d times the number of sampled clients. None for other methods.
    """
    methods = set(composition.split("+"))
    if methods & {"rfedavg", "rfedavg_authors"}:
        return 4 * feature_size * cohort
    return 4 * feature_size if methods & {"rfedavg_plus", "rfedavg_plus_authors"} else None


def kappa(accuracy: float, seconds: float) -> float:
    """FNR-FL, section 6.2: accuracy (a fraction) times 10^4, divided by the seconds of all
    rounds."""
    return accuracy * 1e4 / seconds


def rho(accuracy: float, mib: float) -> float:
    """FNR-FL, section 6.2: accuracy (a fraction) times 10^4, divided by the MiB of all rounds."""
    return accuracy * 1e4 / mib
