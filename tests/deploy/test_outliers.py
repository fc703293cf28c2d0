"""One silo that sends far too much: it is left out and named, and the run goes on with the bits of
a run in which it was absent."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params
from fedml_noniid.deploy.outliers import Outliers, norms
from fedml_noniid.governance.secure.silo import CHECK, SUM
from tests.deploy.federation_server import Federation
from tests.governance.secure.test_secure_sums import federation

Leaves = Callable[[Params], Params]


class Silos(NamedTuple):
    silos: int
    quorum: int
    least: int = 0  # of a secure sum


THREE = Silos(3, 2)


def filled(value: float) -> Leaves:
    """All that the model and the methods get, in place of an answer."""
    return lambda leaves: {
        key: torch.full_like(leaf, value) if key.startswith(("deltas", "upload")) else leaf
        for key, leaf in leaves.items()
    }


def run_with(
    lie: Leaves,
    since: int,
    kits: Path,
    folder: Path,
    recipe: str = "fedavg",
    of: Silos = THREE,
    **train: object,
) -> tuple[Federation, str]:
    """A run in which silo 1 lies from a round on, and its digest."""
    comm, more = {"quorum": of.quorum, "gone_s": 0.2}, {"rounds": 4} | train
    running = federation(recipe, of.silos, of.least, kits, folder, comm=comm, **more)

    def changed(client: int, leaves: Params) -> Params:
        answers = {"deltas/fc1.weight", SUM} & {*leaves}
        lies = client == 1 and running.server_run._round >= since and answers
        return lie(leaves) if lies else leaves

    running.changed = changed
    return running, running.run()


@pytest.mark.parametrize(
    ("lie", "since", "silos", "recipe"),
    [
        (filled(1e2), 1, 3, "fedavg"),
        (filled(1e9), 4, 3, "scaffold"),
        (filled(1e5), 2, 5, "feddyn"),
        (filled(-1e8), 1, 9, "fedavg"),
    ],
)
def test_a_silo_that_sends_far_too_much_is_left_out_and_named(
    lie: Leaves,
    since: int,
    silos: int,
    recipe: str,
    all_kits: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        running, digest = run_with(
            lie, since, all_kits, tmp_path, recipe, Silos(silos, silos // 2 + 1)
        )
    missing = running.server_run.missing
    assert digest == running.simulated()
    assert {(t, *left) for (t, _), left in missing.items()} == {(t, 1) for t in range(since, 5)}
    assert "silo 1 (rank 2)" in caplog.text


@pytest.mark.parametrize(
    ("value", "why"), [(1e8, "the new model's outputs"), (1e5, "most silos can't answer")]
)
@pytest.mark.parametrize("recipe", ["fedavg", "scaffold", "fedexp", "fedper"])
def test_a_round_that_spoils_the_model_is_repeated_without_the_silo_that_stands_out(
    value: float,
    why: str,
    recipe: str,
    all_kits: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The bound lets the lie through, so the model is spoilt, at once or for the next round."""
    with caplog.at_level(logging.WARNING):
        running, digest = run_with(
            filled(value), 2, all_kits, tmp_path, recipe, max_norm_ratio=1e15
        )
    assert digest == running.simulated()
    missing = running.server_run.missing
    assert {(t, *left) for (t, _), left in missing.items()} == {(2, 1), (3, 1), (4, 1)}
    assert "round 2 is repeated, and the run goes on without silo 1 (rank 2)" in caplog.text
    assert why in caplog.text or value == 1e5


def test_where_nobody_stands_out_a_run_that_diverges_ends(all_kits: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lower"):
        run_with(lambda leaves: leaves, 9, all_kits, tmp_path, learning_rate=1e12)


def test_ratios_are_those_by_hand() -> None:
    sent = {
        "deltas/a": torch.tensor([3.0, 0.0]),
        "deltas/b": torch.tensor([[4.0]]),
        "upload/scaffold/dc/a": torch.tensor([1.0]),
        "n": torch.tensor(7),
        "loss": torch.tensor(1e9),
    }
    assert norms(sent) == {"deltas": 5.0, "upload/scaffold/dc": 1.0}
    outliers = Outliers(10.0)

    def refused(*lengths: float) -> set[int]:
        outliers.norms = {k: {"deltas": length} for k, length in enumerate(lengths)}
        return {*outliers.refused("train", range(len(lengths)))}

    assert refused(1.0, 2.0, 30.0) == {2}  # the median is 2
    assert refused(1.0, 20.0) == {1}  # of two, the lower one
    assert refused(0.0, 0.0, 1e-9) == {2} and not refused(0.0, 0.0, 0.0)
    assert not refused(5.0, 5.0, 5.0)
    outliers.count("train", range(3))
    outliers.restore(outliers.state())
    # One that sends nearly nothing does not make an outlier of another: earlier rounds count.
    assert not refused(1e-6, 4.0)


def added(number: int, to_masks: bool = False) -> Leaves:
    """A masked vector, and so the sum, with this much more at each place; `to_masks`: also what the
    silo then says of its masks."""
    return lambda leaves: {
        key: leaf + number if key == SUM or to_masks else leaf for key, leaf in leaves.items()
    }


ADDED, MASKED = "it has added far larger numbers than it said", "other silos have another mask"


@pytest.mark.parametrize(
    ("lie", "of", "since", "recipe"),
    [
        ((added(2**55), ADDED), Silos(5, 3, 2), 1, "fedavg"),
        ((added(-(2**57), to_masks=True), MASKED), Silos(5, 3, 2), 1, "fedavg"),
        ((added(2**61), ADDED), Silos(9, 5, 3), 3, "scaffold"),
    ],
)
def test_a_silo_that_adds_more_to_a_sum_than_it_said_is_found(
    lie: tuple[Leaves, str],
    of: Silos,
    since: int,
    recipe: str,
    all_kits: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The round goes on with another set, and the next ones with all others."""
    with caplog.at_level(logging.WARNING):
        running, digest = run_with(lie[0], since, all_kits, tmp_path, recipe, of)
    assert digest == running.simulated() and len(running.server_run.loop.rows) == 4
    missing = {t: left for (t, _), left in running.server_run.missing.items()}
    assert len(missing[since]) == of.least and 1 in missing[since]
    assert all(missing[t] == {1} for t in range(since + 1, 5))
    assert f"refused from silo-2 (outlier): round {since}: {lie[1]}" in caplog.text


@pytest.mark.parametrize("since", [1, 2, 4])
def test_a_round_that_no_other_set_can_end_is_lost(
    since: int, all_kits: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three silos, the two others may not be added up again. The run goes on with them."""
    with caplog.at_level(logging.WARNING):
        running, _ = run_with(added(2**61), since, all_kits, tmp_path, "fedavg", Silos(3, 2, 2))
    rows = running.server_run.loop.rows
    assert [row["round"] for row in rows] == [t for t in range(1, 5) if t != since]
    assert f"round {since} is lost" in caplog.text
    assert {*running.server_run.outliers.left_out} == {1}


def test_a_silo_shows_what_it_has_added_once(all_kits: Path, tmp_path: Path) -> None:
    running, _ = run_with(added(2**61), 1, all_kits, tmp_path, "fedavg", Silos(5, 3, 2))
    shown = [leaves[CHECK] for leaves in running.sent if CHECK in leaves]
    # Eight sums of each part over each of four streams: nothing else of the masks.
    assert len(shown) == 5 and {tuple(one.shape) for one in shown} == {
        (5, 2, 8)
    }  # model and buffers
