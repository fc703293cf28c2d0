"""Clients' memories on disk: the bits of those in RAM, also after kills; refused when damaged."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import n_bytes
from fedml_noniid.engines import client_state_file
from fedml_noniid.engines.client_state_file import ClientStateFile
from fedml_noniid.engines.memory import InMemory, Memory
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.run import Outcome
from fedml_noniid.engines.simulation import Simulation
from tests import federation
from tests.walks import thinned

ROUNDS = 8
FORMS = ("ram", "disk")


def made(recipe: str, path: Path | None, form: str = "disk", **options: Any) -> Simulation:
    """Two of six clients a round: after some rounds, half of the stored rows are out of date."""
    given: dict[str, Any] = {"rounds": ROUNDS, "cohort": 2, "clients_memory": form} | options
    return federation.simulation(recipe, checkpoint=path, **given)


def memory_of(of: Simulation) -> Memory:
    return of.engine.clients.memory


def rows(of: Simulation) -> dict[str, torch.Tensor]:
    return flatten(memory_of(of).whole())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a checkpoint."""
    return tmp_path / "run.safetensors"


@pytest.fixture(scope="module")
def whole() -> Outcome:
    """The end of a run that nothing stops."""
    return made("scaffold", None, "ram").run()


@pytest.mark.parametrize(
    ("recipe", "how"),
    thinned(
        itertools.product(
            ["scaffold", "moon+fedbn", "scaffold+fnr"],
            [
                {"engine": "sequential"},
                {"engine": "sequential", "workers": 2},
                {"engine": "vectorized"},
            ],
        )
    ),
)
def test_both_forms_have_the_same_bits(recipe: str, how: dict[str, Any], tmp_path: Path) -> None:
    """Also where an Ask goes to more clients than a round has, and one round has several jobs."""
    ram, disk = (
        made(recipe, tmp_path / form, form, batch_norm=True, checkpoint_every=3, **how)
        for form in FORMS
    )
    assert federation.equal(ram.run(), disk.run())
    assert isinstance(memory_of(ram), InMemory) and isinstance(memory_of(disk), ClientStateFile)
    wanted, found = rows(ram), rows(disk)
    assert wanted and all(torch.equal(found[key], leaf) for key, leaf in wanted.items())
    assert memory_of(ram).sha256() == memory_of(disk).sha256()


@pytest.mark.parametrize("forms", [("disk", "disk"), ("ram", "disk"), ("disk", "ram")])
def test_a_run_goes_on_after_any_round_in_either_form(
    forms: tuple[str, str], path: Path, whole: Outcome
) -> None:
    for killed_in in (1, ROUNDS - 1):
        for row in made("scaffold", path, forms[0]).rounds():
            if row["round"] == killed_in:
                break
        of = made("scaffold", path, forms[1])
        assert of.start_round == killed_in and federation.equal(of.run(), whole)
        path.unlink()


def test_untouched_clients_take_no_space_and_a_checkpoint_33_bytes_each(tmp_path: Path) -> None:
    """A thousand clients in place of ten. Three rounds of two clients write six rows at most, each
    in two blocks of 4 KiB at most."""
    sizes = []
    for n in (10, 1000):
        path = tmp_path / f"{n}.safetensors"
        made("scaffold", path, data=federation.federation(sizes=(2,) * n), rounds=3).run()
        sizes.append(path.stat().st_size)
        assert path.with_suffix(".memory").stat().st_blocks * 512 <= 6 * 2 * 4096
    assert np.isclose(sizes[1] - sizes[0], 33 * 990, rtol=0, atol=100)


def test_a_checkpoint_has_the_rows_of_its_round(path: Path) -> None:
    """Between two checkpoints a client's row is replaced again and again, in one slot."""
    for row in made("scaffold", path, cohort=6, checkpoint_every=4).rounds():
        if row["round"] == 7:
            break
    of = made("scaffold", path, cohort=6, checkpoint_every=4)
    wanted = made("scaffold", None, "ram", cohort=6, rounds=4)
    wanted.run()
    assert of.start_round == 4
    assert all(torch.equal(leaf, rows(wanted)[key]) for key, leaf in rows(of).items())


def test_the_system_may_take_a_part_of_a_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def partly(real: Callable[..., int]) -> Callable[..., int]:
        return lambda file, buffers, offset: real(file, [buffers[0][:7]], offset)

    wanted = made("scaffold", None, "ram", rounds=3).run()
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, partly(getattr(os, name)))
    assert federation.equal(made("scaffold", path, rounds=3).run(), wanted)


def exits_in(name: str, number: int) -> Callable[[pytest.MonkeyPatch], None]:
    """A kill before the `number`-th call of a function of the file system; of a write, in it."""

    def arm(patch: pytest.MonkeyPatch) -> None:
        count, real = itertools.count(1), getattr(os, name)

        def last(*given: Any, **options: Any) -> Any:
            if next(count) == number:
                if name == "pwritev":
                    file, (buffer,), offset = given
                    real(file, [buffer[: len(buffer) // 2]], offset)
                os._exit(9)
            return real(*given, **options)

        patch.setattr(os, name, last)

    return arm


def killed(arm: Callable[[pytest.MonkeyPatch], None], path: Path, **how: Any) -> None:
    """Runs in a forked process that the fault ends, as a kill would: nothing is cleaned up."""
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as patch:
            arm(patch)
            made("scaffold", path, **how).run()
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, "the fault was not met"


@pytest.mark.parametrize(
    "arm",
    [
        exits_in("pwritev", 1),
        exits_in("pwritev", 30),
        exits_in("fsync", 7),
        exits_in("fsync", 30),
        exits_in("replace", 5),
    ],
)
def test_a_kill_anywhere_loses_nothing(
    arm: Callable[[pytest.MonkeyPatch], None], path: Path, whole: Outcome
) -> None:
    """Inside a row, before a sync, around the rename of a checkpoint."""
    killed(arm, path)
    assert federation.equal(made("scaffold", path).run(), whole)


@pytest.mark.parametrize("full_from", [2, 9])
def test_a_full_disk_keeps_the_last_round(
    full_from: int, path: Path, whole: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, count = os.fsync, itertools.count(1)

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
    """The file of a run with a checkpoint after its third round."""
    made("scaffold", path, rounds=3).run()
    return path.with_suffix(".memory")


@pytest.mark.parametrize("byte", [0, -1])
def test_one_flipped_bit_is_refused_when_the_row_is_read(
    byte: int, begun: Path, path: Path
) -> None:
    memory, content = memory_of(made("scaffold", path, rounds=3)), begun.read_bytes()
    assert isinstance(memory, ClientStateFile)
    for client in np.flatnonzero(memory._slots != client_state_file.NEVER).tolist():
        damaged = bytearray(content)
        begin = memory._offset(client, memory._slots[client])
        damaged[begin + byte % n_bytes(memory.first)] ^= 8
        begun.write_bytes(damaged)
        said = rf"{begun.name}: damaged \(the row of client {client} [^\n]*start afresh$"
        with pytest.raises(UserError, match=said):
            memory.row(client)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def other(file: Path) -> None:
    """The file of another run."""
    path = file.with_name("other")
    made("scaffold", path, rounds=3, seed=9).run()
    shutil.copy(path.with_suffix(".memory"), file)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("harm", [cut, other, Path.unlink])
def test_a_file_without_the_rows_of_the_checkpoint_is_refused(
    harm: Callable[[Path], object], form: str, begun: Path, path: Path
) -> None:
    harm(begun)
    with pytest.raises(UserError, match=rf"{begun.name}: (damaged|missing)[^\n]*start afresh$"):
        rows(made("scaffold", path, form, rounds=3))


def test_a_file_that_another_process_uses_is_refused(begun: Path, path: Path) -> None:
    first = made("scaffold", path, rounds=5)
    child = os.fork()
    if child == 0:
        try:
            made("scaffold", path, rounds=5)
        except UserError as error:
            os._exit(f"{begun.name}: another run uses it; wait" in str(error))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert federation.equal(first.run(), made("scaffold", None, "ram", rounds=5).run())


def test_a_run_without_checkpoints_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it runs: a kill leaves none."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    of = federation.simulation("scaffold", clients_memory="disk")
    of.run()
    memory = memory_of(of)
    assert isinstance(memory, ClientStateFile)
    assert os.fstat(memory._file.fileno()).st_size and not list(tmp_path.iterdir())
