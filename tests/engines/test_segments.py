"""Clients' memories on disk: the bits of those in RAM, also after kills; refused when damaged."""

from __future__ import annotations

import errno
import gc
import hashlib
import itertools
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.trees import tree_map
from fedml_noniid.plugins.engines import segments
from fedml_noniid.plugins.engines.memory import InMemory, Memory, memory_for
from fedml_noniid.plugins.engines.packing import flatten
from fedml_noniid.plugins.engines.segments import OnDisk
from fedml_noniid.plugins.engines.simulation import Simulation
from tests import federation

ROUNDS = 12
FORMS = ("ram", "disk")


def made(recipe: str, path: Path, form: str = "disk", **options: Any) -> Simulation:
    """Two of six clients a round: after some rounds, half of the stored rows are out of date."""
    given: dict[str, Any] = {"rounds": ROUNDS, "cohort": 2, "clients_memory": form} | options
    return federation.simulation(recipe, checkpoint=path, **given)


def memory_of(of: Simulation) -> Memory:
    return of.engine.clients.memory


def rows(of: Simulation) -> dict[str, torch.Tensor]:
    return flatten(memory_of(of).whole())


def files(path: Path) -> list[Path]:
    return sorted(path.with_suffix(".memory").glob("*.safetensors"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a checkpoint."""
    return tmp_path / "run.safetensors"


@pytest.mark.parametrize(
    "how",
    [{"engine": "sequential"}, {"engine": "sequential", "workers": 2}, {"engine": "vectorized"}],
    ids=["sequential", "workers", "vectorized"],
)
@pytest.mark.parametrize("recipe", ["scaffold", "moon+fedbn", "scaffold+fnr+rfedavg_plus+ccn"])
def test_both_forms_have_the_same_bits(recipe: str, how: dict[str, Any], tmp_path: Path) -> None:
    """Also where an Ask goes to more clients than a round has, and one round has several jobs."""
    ram, disk = (
        made(recipe, tmp_path / form, form, batch_norm=True, checkpoint_every=3, **how)
        for form in FORMS
    )
    assert federation.equal(ram.run(), disk.run())
    assert isinstance(memory_of(ram), InMemory) and isinstance(memory_of(disk), OnDisk)
    wanted, found = rows(ram), rows(disk)
    assert wanted and all(torch.equal(found[key], leaf) for key, leaf in wanted.items())
    assert memory_of(ram).sha256() == memory_of(disk).sha256()


def test_the_sha256_is_of_every_row(path: Path) -> None:
    of = made("scaffold", path, rounds=1)
    of.run()
    before, (name, *_) = memory_of(of).sha256(), memory_of(of).whole()["scaffold"]["c_i"]
    changed = tree_map(torch.clone, memory_of(of).row(5))
    changed["scaffold"]["c_i"][name].view(-1)[0] += 1
    memory_of(of).put_row(5, changed)
    assert memory_of(of).sha256() != before


def test_a_row_like_the_first_is_told_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """-0.0 equals 0.0 and has other bytes, and so has a row behind those compared at first."""
    monkeypatch.setattr(segments, "COMPARED", 24)
    values = np.zeros((5, 3), np.float32)
    values[1, 2], values[4, 0] = -0.0, 1.0
    halves = torch.ones(5, 1, dtype=torch.bfloat16)
    found = segments.memory_digests(
        {"of": {"w": torch.from_numpy(values), "b": halves}},
        {"of": {"w": torch.zeros(3), "b": halves[0]}},
        5,
    )
    ones = halves[0].view(torch.uint8).numpy().tobytes()
    wanted = [hashlib.sha256(ones + row.tobytes()).digest() for row in values]
    assert [row.tobytes() for row in found] == wanted and len({*wanted}) == 3


@pytest.mark.parametrize("forms", [("disk", "disk"), ("ram", "disk"), ("disk", "ram")])
def test_a_run_goes_on_after_any_round_in_either_form(
    forms: tuple[str, str], path: Path, tmp_path: Path
) -> None:
    whole = made("scaffold", tmp_path / "whole").run()
    for killed_in in (1, 6, ROUNDS - 1):
        for row in made("scaffold", path, forms[0]).rounds():
            if row["round"] == killed_in:
                break
        of = made("scaffold", path, forms[1])
        assert of.start_round == killed_in and federation.equal(of.run(), whole)
        shutil.rmtree(path.with_suffix(".memory"), ignore_errors=True)
        path.unlink()


def test_the_form_goes_by_size_and_the_log_says_it(caplog: pytest.LogCaptureFixture) -> None:
    plan = federation.simulation("scaffold").loop.plan
    first, places = {"m": {"w": torch.zeros(1 << 18)}}, dict.fromkeys(range(2049), 0)  # 1 MiB each
    with caplog.at_level(logging.INFO):
        assert isinstance(memory_for(plan, first, dict.fromkeys(range(9), 0)), InMemory)
        assert not caplog.records
        assert isinstance(memory_for(plan, first, places), OnDisk)
    assert "2049 clients (2.1 GB) lie on disk; memory_mb is 2048" in caplog.text
    with pytest.raises(UserError, match=r"clients_memory.*tape.*auto, ram, disk"):
        federation.simulation("scaffold", clients_memory="tape")


def test_a_checkpoint_costs_a_cohort_and_untouched_clients_take_no_space(tmp_path: Path) -> None:
    """A thousand clients in place of ten: the same bytes, but for the numbers of the clients."""
    sizes = []
    for n in (10, 1000):
        path = tmp_path / f"{n}.safetensors"
        made("scaffold", path, of=federation.federation(sizes=(2,) * n), rounds=3).run()
        sizes.append([file.stat().st_size for file in (path, *files(path))])
    assert len(sizes[0]) == 4, "the checkpoint and three rounds"
    assert np.allclose(*sizes, rtol=0, atol=100)


def test_segments_are_written_again_until_half_of_their_rows_are_in_use(path: Path) -> None:
    """Six clients: without compaction, 60 rounds would leave up to 6 segments of one row in use.

    What a checkpoint no longer names is removed one round later.
    """
    of = made("scaffold", path, rounds=60)
    memory = memory_of(of)
    assert isinstance(memory, OnDisk)
    for row in of.rounds():
        if row["round"] > 10:
            stored = sum(memory._sizes.values())
            assert sum(memory._in_use.values()) in (5, 6) and stored <= 2 * 6 + 2
            assert len(files(path)) <= 9
    assert federation.equal(
        of.outcome, made("scaffold", path.with_stem("ram"), "ram", rounds=60).run()
    )


def exits_in_save(number: int) -> Callable[[pytest.MonkeyPatch], None]:
    """A kill in the middle of the `number`-th segment."""

    def arm(patch: pytest.MonkeyPatch) -> None:
        count, save = itertools.count(1), segments._save

        def cut(name: str, *rest: Any) -> None:
            save(name, *rest)
            if next(count) == number:
                os.truncate(name, os.path.getsize(name) // 2)
                os._exit(9)

        patch.setattr(segments, "_save", cut)

    return arm


def exits_in(name: str, number: int) -> Callable[[pytest.MonkeyPatch], None]:
    """A kill before the `number`-th call of a function of the file system."""

    def arm(patch: pytest.MonkeyPatch) -> None:
        count, real = itertools.count(1), getattr(os, name)

        def last(*given: Any, **options: Any) -> Any:
            if next(count) == number:
                os._exit(9)
            return real(*given, **options)

        patch.setattr(os, name, last)

    return arm


def killed(arm: Callable[[pytest.MonkeyPatch], None], path: Path) -> None:
    """Runs in a forked process that the fault ends, as a kill would: nothing is cleaned up."""
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as patch:
            arm(patch)
            made("scaffold", path).run()
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, "the fault was not met"


@pytest.mark.parametrize(
    "arm",
    [
        exits_in_save(1),
        exits_in_save(8),
        exits_in_save(11),
        exits_in("fsync", 7),
        exits_in("fsync", 30),
        exits_in("replace", 9),
        exits_in("replace", 16),
        exits_in("unlink", 1),
        exits_in("unlink", 4),
    ],
)
def test_a_kill_anywhere_loses_nothing(
    arm: Callable[[pytest.MonkeyPatch], None], path: Path, tmp_path: Path
) -> None:
    """Inside a segment, inside one with rows of others (from the 7th on), around a rename, while
    old segments are removed."""
    whole = made("scaffold", tmp_path / "whole").run()
    killed(arm, path)
    of = made("scaffold", path)
    assert federation.equal(of.run(), whole)
    assert not list(tmp_path.glob("run.memory/.*"))


@pytest.mark.slow
def test_20_kills_at_random_moments(path: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(37)
    long: dict[str, Any] = {"rounds": 400, "cohort": 3}
    whole = made("scaffold", tmp_path / "whole", "ram", **long)
    wanted = whole.run()
    kills = starts = 0
    while kills < 20:
        starts += 1
        assert starts < 60, "the run is too short"
        child = os.fork()
        if child == 0:
            made("scaffold", path, **long).run()
            os._exit(0)
        time.sleep(rng.uniform(0.02, 0.25))
        os.kill(child, signal.SIGKILL)
        kills += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if path.exists() and made("scaffold", path, **long).start_round > 380:
            path.unlink()
    of = made("scaffold", path, **long)
    assert (
        federation.equal(of.run(), wanted) and memory_of(of).sha256() == memory_of(whole).sha256()
    )


@pytest.mark.parametrize("full_from", [1, 2, 9, 22])
def test_a_full_disk_keeps_the_last_round(
    full_from: int, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, sync = made("scaffold", tmp_path / "whole").run(), os.fsync
    count = itertools.count(1)

    def full(file: int) -> None:
        if next(count) >= full_from:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"can't be written \(No space left .*free space"):
        made("scaffold", path).run()
    monkeypatch.setattr(os, "fsync", sync)
    assert federation.equal(made("scaffold", path).run(), whole)


@pytest.fixture
def begun(path: Path) -> Path:
    """A segment of a run with a checkpoint after its third round."""
    made("scaffold", path, rounds=3).run()
    return files(path)[-1]


@pytest.mark.parametrize("place", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_one_flipped_bit_is_refused_by_file(place: float, begun: Path, path: Path) -> None:
    """In the header when the run goes on; in a row when it is read."""
    content = bytearray(begun.read_bytes())
    content[int(len(content) * place)] ^= 8
    begun.write_bytes(content)
    with pytest.raises(UserError, match=rf"{begun.name}: .*start afresh") as error:
        rows(made("scaffold", path, rounds=3))
    assert "\n" not in str(error.value)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 3)


def other(file: Path) -> None:
    """The segment of the same number of another run."""
    path = file.parent.with_name("other")
    made("scaffold", path, rounds=3, seed=9).run()
    shutil.copy(files(path)[-1], file)


@pytest.mark.parametrize("harm", [cut, other, Path.unlink, lambda file: file.write_bytes(b"PK")])
def test_a_segment_that_is_not_the_checkpoints_is_refused(
    harm: Callable[[Path], object], begun: Path, path: Path
) -> None:
    harm(begun)
    with pytest.raises(UserError, match=rf"{begun.name}: .*start afresh") as error:
        made("scaffold", path, rounds=3)
    assert "\n" not in str(error.value)


def test_a_run_without_checkpoints_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    of = federation.simulation("scaffold", clients_memory="disk")
    of.run()
    assert len(list(tmp_path.glob("noniid-memory-*/*.safetensors"))) > 1
    memory_of(of).sha256()  # waits for the last file
    del of
    gc.collect()
    assert list(tmp_path.iterdir()) == []
