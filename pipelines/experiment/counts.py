"""Traffic as the papers count it, beside what was really sent, and FNR-FL's two measures of efficiency."""

from __future__ import annotations

MIB = 2**20
# The methods of FNR-FL's table 3; a combination with FNR-FL is not in it and is counted by the same rule.
FNR_TABLE = {"fedavg", "fedprox", "scaffold", "scaffold_i", "moon", "fednova", "fnr", "fnr_authors"}


def fnr_mib(composition: str, model_bytes: int, client_rounds: int) -> float | None:
    """MiB of a whole run by FNR-FL's table 3: a model down and one up per client and round, three with SCAFFOLD.

    It leaves out what FNR-FL itself adds (the refined models, feature norms) and SCAFFOLD's fourth. None for other
    methods. Table 3's 8920 are 10 clients x 10 rounds x 2 x 44.6 MiB, so its "MB" are MiB.
    """
    methods = set(composition.split("+"))
    if not methods <= FNR_TABLE:
        return None
    return (3 if methods & {"scaffold", "scaffold_i"} else 2) * model_bytes * client_rounds / MIB


def delta_bytes(composition: str, feature_size: int, cohort: int) -> int | None:
    """Bytes of delta that a client receives per round by rFedAvg's table III, less its 760 bytes of serialisation.

    4 d for rFedAvg+, and as many times that as clients are sampled for rFedAvg. None for other methods.
    """
    methods = set(composition.split("+"))
    if methods & {"rfedavg", "rfedavg_authors"}:
        return 4 * feature_size * cohort
    return 4 * feature_size if methods & {"rfedavg_plus", "rfedavg_plus_authors"} else None


def kappa(accuracy: float, seconds: float) -> float:
    """FNR-FL, section 6.2: accuracy (a share) times 10^4 by the seconds of all rounds."""
    return accuracy * 1e4 / seconds


def rho(accuracy: float, mib: float) -> float:
    """FNR-FL, section 6.2: accuracy (a share) times 10^4 by the MiB of all rounds."""
    return accuracy * 1e4 / mib
