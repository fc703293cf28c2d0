"""A run that was killed after any round goes on to the same bits."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.engines.checkpoint import Checkpoint, Checkpoints
from tests import federation

ROUNDS = 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a checkpoint."""
    return tmp_path / "run.safetensors"


def killed_in(round_: int, path: Path, recipe: str, **options: Any) -> None:
    """Runs until the round is done and saved."""
    for row in federation.simulation(recipe, checkpoint=path, rounds=ROUNDS, **options).rounds():
        if row["round"] == round_:
            break  # and nobody asks for the next one


def test_a_checkpoint_is_written_every_k_rounds_and_at_the_end(path: Path) -> None:
    killed_in(3, path, "scaffold", checkpoint_every=2)
    assert federation.simulation("scaffold", checkpoint=path, rounds=ROUNDS).start_round == 2
    killed_in(3, path, "scaffold", checkpoint_every=3)
    resumed = federation.simulation("scaffold", checkpoint=path, rounds=ROUNDS, checkpoint_every=3)
    assert resumed.start_round == 3
    assert federation.equal(resumed.run(), federation.run("scaffold", rounds=ROUNDS))
    assert federation.simulation("scaffold", checkpoint=path, rounds=ROUNDS).start_round == 4


RECIPE = r"recipe 'fedavg'.*this run has recipe"


@pytest.mark.parametrize(
    ("other", "how", "words"),
    [
        ("fedavg", {"fingerprint": "two"}, "another configuration.*'one'.*'two'"),
        ("fedavg", {"batch_norm": True}, "another model"),
        ("scaffold", {}, f"{RECIPE} 'scaffold'"),
        ("fedprox", {}, f"{RECIPE} 'fedprox'"),  # which has the same tensors
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    other: str, how: dict[str, Any], words: str, path: Path
) -> None:
    federation.run("fedavg", checkpoint=path, fingerprint="one")
    with pytest.raises(UserError, match=rf"run\.safetensors.*{words}"):
        federation.simulation(other, checkpoint=path, **{"fingerprint": "one"} | how)


def test_tensors_are_read_into_memory_of_their_own(tmp_path: Path) -> None:
    """Aligned as torch aligns: the last bit of a matrix product depends on where its operands
    begin."""
    path = tmp_path / "c.safetensors"
    trees = {str(n): torch.arange(float(n)) for n in (1, 3, 5, 7)}
    trees["view"] = torch.arange(6.0).reshape(2, 3).T
    of = Checkpoints(path, "")
    of.write(Checkpoint(1, trees, "", [], [], [], False))
    found = of.read(trees).trees
    assert [leaf.data_ptr() % 64 for leaf in found.values()] == [0] * 5
    assert torch.equal(found["view"], trees["view"])


def flipped(place: float) -> Callable[[bytes], bytes]:
    def damaged(content: bytes) -> bytes:
        bit = int(8 * len(content) * place) + 3
        return (
            content[: bit // 8]
            + bytes([content[bit // 8] ^ 1 << bit % 8])
            + content[bit // 8 + 1 :]
        )

    return damaged


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run of SCAFFOLD, by suffix."""
    path = tmp_path_factory.mktemp("run") / "run.safetensors"
    federation.run("scaffold", checkpoint=path, rounds=2)
    return {suffix: path.with_suffix(suffix).read_bytes() for suffix in (".safetensors", ".rounds")}


@pytest.mark.parametrize("suffix", [".safetensors", ".rounds"])
@pytest.mark.parametrize(
    "harm",
    [
        *map(flipped, (0.0, 0.05, 0.2, 0.4, 0.8, 0.999)),
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: b"PK\x03\x04 other",
        lambda content: safetensors.torch.save({"w": torch.zeros(1)}, {"checkpoint": "{}"}),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    harm: Callable[[bytes], bytes], suffix: str, files: dict[str, bytes], path: Path
) -> None:
    """In the head, in the state of SCAFFOLD, in the records of a round: never other weights."""
    for name, content in files.items():
        path.with_suffix(name).write_bytes(harm(content) if name == suffix else content)
    with pytest.raises(
        UserError, match=rf"run\{suffix}: .*(delete it|delete both) to start afresh"
    ) as error:
        federation.simulation("scaffold", checkpoint=path, rounds=3)
    assert "\n" not in str(error.value)


def test_the_records_of_another_run_are_refused(tmp_path: Path) -> None:
    """Two runs with the same settings: each checkpoint goes with its own records, also before they
    are missing."""
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    for path in paths:
        federation.run("fedavg", checkpoint=path, rounds=1)
    shutil.copy(paths[1], paths[0])
    with pytest.raises(
        UserError,
        match=r"a\.rounds: is not of run [0-9a-f]{16}, which a\.safetensors is of; restore",
    ):
        federation.simulation("fedavg", checkpoint=paths[0])
    paths[1].with_suffix(".rounds").unlink()
    with pytest.raises(
        UserError,
        match=r"b\.rounds: can't be read \(No such file or directory\); restore it beside",
    ):
        federation.simulation("fedavg", checkpoint=paths[1])


def test_a_checkpoint_writes_only_the_new_rounds(path: Path) -> None:
    """The state has the same size after every round, and the records grow by the same bytes."""
    sizes = []
    for _ in federation.simulation("fedavg", checkpoint=path, rounds=9).rounds():
        if path.exists():
            sizes.append((path.stat().st_size, path.with_suffix(".rounds").stat().st_size))
    state, rounds = zip(*sizes, strict=True)
    assert max(state) - min(state) < 20, "the digits of numbers"
    grown = [after - before for before, after in itertools.pairwise(rounds)]
    assert max(grown) - min(grown) < 80, "the digits of numbers"


def test_the_records_of_lost_rounds_are_cut_off(path: Path, tmp_path: Path) -> None:
    """A kill may come after the records of a round are written and before its state."""
    for row in federation.simulation("fedavg", checkpoint=path, rounds=3).rounds():
        if row["round"] == 2:
            shutil.copy(path, tmp_path / "of round 2")
    shutil.move(tmp_path / "of round 2", path)
    resumed = federation.simulation("fedavg", checkpoint=path, rounds=3)
    assert resumed.start_round == 2
    assert federation.equal(resumed.run(), federation.run("fedavg", rounds=3))
    assert federation.simulation("fedavg", checkpoint=path, rounds=3).start_round == 3


def test_a_file_for_its_owner_alone_is_so_under_every_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        of = Checkpoints(tmp_path / "private.safetensors", "", private=True)
        of.write(Checkpoint(1, {"w": torch.zeros(3)}, "", [], [{"round": 1}], [{}], False))
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()] == [0o600] * 2
