"""Server and silos are lost and made again from their files, and silos answer too late: the
simulation's bits.

Without FedML and without a network, so that every recipe can go through it. `python -m benchmarks
chaos` kills real processes.
"""

from __future__ import annotations

import dataclasses
import random
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.attacks import read
from fedml_noniid.core.component import Ask
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import leaves
from fedml_noniid.deploy import settings, wire
from fedml_noniid.deploy.results import RunFile
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.deploy.wire import Down
from fedml_noniid.engines.absences import listed
from tests.deploy import world
from tests.recipe_table import DEPLOYED_ALONE
from tests.recipe_table import settings as table
from tests.walks import thinned

N = len(world.SIZES)
LOST, LATE = 0.15, 0.2  # chance of a process at each step, of an answer


class Federation:
    """A server and silos whose only memory is in files."""

    def __init__(
        self,
        recipe: str,
        methods: dict,
        folder: Path,
        cohort: int = 0,
        rounds: int = 3,
        **train: object,
    ) -> None:
        train |= {"settings": methods, "cohort": cohort}
        self.deployment = world.deployment(recipe, rounds, **train)
        self.data, self.folder = world.parts(), folder
        network = self.deployment.network((1, 4, 4), world.CLASSES, None)
        self.terms = settings.terms(self.deployment, recipe, network, self.data.public)
        self.server = self.new_server()
        self.silos = [self.new_silo(k) for k in range(N)]

    def new_server(self, run: str = "a run") -> ServerRun:
        (shard, *_), file = world.shards_of(self.data), RunFile(self.folder / "server", run)
        callbacks = self.deployment.train_args.built_callbacks()
        return ServerRun(self.terms, shard, callbacks, file=file)

    def new_silo(self, k: int, run: str = "") -> Silo:
        file = RunFile(self.folder / f"{k}", run or self.server.run)
        return Silo(self.terms, k, world.shards_of(self.data)[k + 1], file)


def received(flat: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors after a way over the network."""
    sent = wire.leaving(wire.Answer(exchange=0), flat, lambda message: message.head)
    return read(sent, wire.Answer).tensors


def message(down: Down, client: int) -> Down:
    """What a silo receives of a message."""
    own = wire.row_of(down, client)
    trees = wire.nested(received(wire.tensors(own)))
    return own._replace(ask=Ask(own.ask.job, (client,), **trees, owner=own.ask.owner))


def run(federation: Federation, rng: random.Random | None = None) -> None:
    """To the end.

    With `rng`, processes are lost and answers late at random, and once each in any case.
    """
    lost = late = 0
    while (down := federation.server.down).ask is not None:
        ups = {}
        for k in down.ask.to:
            if rng and (rng.random() < LOST or not lost):
                lost, federation.silos[k] = lost + 1, federation.new_silo(k)
            up = wire.up(k, down.exchange, federation.silos[k].answer(message(down, k)))
            ups[k] = up | {"leaves": received(up["leaves"])}
        if rng and (rng.random() < LOST or lost == 1):
            lost, federation.server = lost + 1, federation.new_server()
            continue
        missing = [k for k in ups if rng and (rng.random() < LATE or not late)][: len(ups) - 1]
        late += len(missing)
        federation.server.without(missing)
        federation.server.feed(
            federation.server.open({k: up for k, up in ups.items() if k not in missing})
        )


@pytest.mark.parametrize(
    ("recipe", "methods"), thinned(DEPLOYED_ALONE.values(), 1, 4), ids=DEPLOYED_ALONE
)
def test_lost_processes_and_late_answers(recipe, methods, tmp_path):
    federation = Federation(recipe, methods, tmp_path)
    run(federation, random.Random(recipe))
    server = federation.server
    expected = world.simulated(recipe, methods, True, rounds=3, absent=listed(server.missing))
    assert world.digest(server.loop.outcome) == world.digest(expected)
    world.compare(server.loop.rows, expected.rows)


@pytest.mark.parametrize(
    "recipe", ["scaffold+fnr", "scaffold+fnr+rfedavg_plus+ccn", "datasharing+moon+ccn+fednlr"]
)
def test_compositions_with_a_cohort(recipe, tmp_path):
    methods, scenario = table(recipe), {"cohort": 2, "rounds": 6}
    federation = Federation(recipe, methods, tmp_path, **scenario)
    run(federation, random.Random(recipe))
    absent = listed(federation.server.missing)
    expected = world.simulated(recipe, methods, True, absent=absent, **scenario)
    assert world.digest(federation.server.loop.outcome) == world.digest(expected)


def test_a_silo_receives_its_own_row_only(tmp_path):
    """rFedAvg's other clients' means are [M, N - 1, d]; a silo gets [1, N - 1, d], and knows its
    own counts only."""
    federation = Federation("rfedavg", table("rfedavg"), tmp_path)
    server = federation.server
    first = {k: federation.silos[k].answer(message(server.down, k)) for k in range(N)}
    down = server.feed(first)
    whole, own = down.ask.each["rfedavg"], wire.row_of(down, 1)
    for key, leaf in own.ask.each["rfedavg"].items():
        assert leaf.shape[0] == 1 and torch.equal(leaf[0], whole[key][1])
    assert (own.ask.to, dict(own.counted)) == ((1,), {1: 0})
    size = sum(leaf.numel() for leaf in leaves({"each": own.ask.each}))
    assert size * N == sum(leaf.numel() for leaf in leaves({"each": down.ask.each}))


def test_files_that_do_not_belong_to_the_run(tmp_path):
    federation = Federation("scaffold", {}, tmp_path)
    run(federation)
    words = r"1: is the memory of silo 1 \(rank 2\) in run a run; this is silo 1 .* another"
    with pytest.raises(UserError, match=words):
        federation.new_silo(1, "another")
    test = federation.data.test
    federation.data = dataclasses.replace(federation.data, test=test._replace(x=test.x + 1))
    words = "server: is a checkpoint of another configuration or of other data"
    with pytest.raises(UserError, match=words):
        federation.new_server()
    with pytest.raises(UserError, match=words):
        Federation("fedprox", table("fedprox"), tmp_path)
    assert {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()
    } == dict.fromkeys(("0", "1", "2", "server", "server.previous", "server.rounds"), 0o600)


def test_a_side_that_was_set_back_is_refused(tmp_path):
    """The silo has lost its disk, so its c_i is not the one in the server's c."""
    federation = Federation("scaffold", {}, tmp_path)
    server = federation.server
    server.feed({k: federation.silos[k].answer(message(server.down, k)) for k in range(N)})
    (tmp_path / "2").unlink()
    words = r"silo 2 \(rank 3\): the server goes on behind exchange 0, and this silo's"
    with pytest.raises(UserError, match=words):
        federation.new_silo(2).answer(message(server.down, 2))


@contextmanager
def full_disk(n_bytes: int) -> Iterator[None]:
    """No file of this process can become longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_the_old_checkpoint_and_the_run_goes_on_from_there(tmp_path):
    """The same for a silo's memory, whose answer is not sent then."""
    federation = Federation("scaffold", {}, tmp_path)
    server = federation.server
    answers = {k: federation.silos[k].answer(message(server.down, k)) for k in range(N)}
    old = [(tmp_path / name).read_bytes() for name in ("server", "0")]
    with full_disk(1000), pytest.raises(UserError, match="can't be written"):
        server.feed(answers)
    federation.server = federation.new_server()
    with full_disk(100), pytest.raises(UserError, match="can't be written"):
        federation.silos[0].answer(message(federation.server.down, 0))
    assert [(tmp_path / name).read_bytes() for name in ("server", "0")] == old
    federation.silos = [federation.new_silo(k) for k in range(N)]
    run(federation)
    expected = world.simulated("scaffold", {}, True, rounds=3)
    assert world.digest(federation.server.loop.outcome) == world.digest(expected)


@pytest.mark.parametrize("name", ["server", "server.rounds", "1"])
def test_one_flipped_bit_is_refused_by_file(name, tmp_path):
    """Of the server's two files, and of a silo's memory; else the run goes on with other
    weights."""
    federation = Federation("scaffold", {}, tmp_path)
    run(federation)
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1 << 4
    for damaged in (content, content[:-3]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"/{name}: .*(delete it|delete both) to start"):
            federation.new_silo(1) if name == "1" else federation.new_server()
