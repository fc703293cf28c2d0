"""Silos on a fake GPU. Those on a real one are in tests/engines/test_on_gpu.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.fake_gpu import fake_gpu
from fedml_noniid.core.data import Samples
from fedml_noniid.core.trees import leaves
from fedml_noniid.data.shards import Shard
from fedml_noniid.deploy import server_run, wire
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.settings import DeviceArgs
from fedml_noniid.deploy.silo import Silo
from tests.deploy import world
from tests.recipe_table import DEPLOYED_ALONE
from tests.walks import thinned

GPU = DeviceArgs(using_gpu=True)


def faked(shard: Shard) -> dict[str, Samples]:
    return {
        name: Samples(torch.empty_like(part.x), torch.zeros_like(part.y))
        for name, part in shard.parts.items()
    }


@pytest.mark.parametrize(
    ("recipe", "methods"), thinned(DEPLOYED_ALONE.values(), 1, 24), ids=DEPLOYED_ALONE
)
def test_no_method_mixes_devices(
    recipe: str, methods: dict[str, dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        DeviceArgs,
        "of_silo",
        property(lambda args: torch.device("cuda:0" if args.using_gpu else "cpu")),
    )
    monkeypatch.setattr(server_run, "weights_sha256", lambda _: "")  # fake tensors have no bytes
    terms = replace(world.terms(recipe, methods, batch_norm=True, rounds=1), device=GPU)
    real, sent = world.shards_of(), 0
    with fake_gpu():
        first, *others = [replace(shard, parts=faked(shard)) for shard in real]
        silos = [Silo(terms, k, shard) for k, shard in enumerate(others)]
        server = ServerRun(terms, first)
        while (down := server.down).ask is not None:
            replies = {}
            for k in down.ask.to:
                answer = silos[k].answer(down)
                sent += any(True for _ in leaves(answer))
                assert {leaf.device.type for leaf in leaves(answer)} == {"cpu"}
                packing = terms.algorithm.packing(down.ask.job)
                replies[k] = wire.unpacked(answer, packing, down.ask)
                assert silos[k].engine.clients.device.type == "cuda"
            server.feed(replies)
    assert sent
