"""Noise and augmentation in a run: who sees what, the same in both engines, after a restart, and
none where there is none."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedml_noniid.contract.checks import close, close_together
from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import (
    Answer,
    Ask,
    Client,
    Component,
    Needs,
    Public,
    Setting,
    Trace,
)
from fedml_noniid.core.data import Batch
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.task import Output
from fedml_noniid.core.trees import Params
from fedml_noniid.data.batches import in_order
from fedml_noniid.data.noise import deviations, per_sample
from fedml_noniid.engines.clients import PASS_BATCH, Clients
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.plan import LocalTraining, Plan, Start
from fedml_noniid.engines.sequential import Sequential
from fedml_noniid.models import build
from fedml_noniid.plugins.baselines.datasharing import DataSharing
from tests import federation
from tests.recipe_table import PARAMETERS
from tests.walks import thinned

N = len(federation.SIZES)
SHAPE = (1, 6, 6)
SETTING = Setting(N, N, n_public=15)
RECIPES = (
    "fedavg",
    "rfedavg_plus",
    "ccn",
    "fednlr",
    "fnr",
    "moon",
    "qfedavg",
    "datasharing+ccn",
    "centralised",
    "scaffold+fnr+rfedavg_plus+ccn",
)


def skewed(
    form: str = "level", sigma: float = 0.5, dtype: torch.dtype = torch.float64
) -> federation.Federation:
    """Six ragged clients with images of 6 x 6, in noise."""
    of = federation.images(dtype)
    std = deviations(form, sigma, N, SHAPE, torch.tensor([2.0]))
    return replace(of, train=of.train._replace(noise=per_sample(std, of.clients, of.train.x)))


def network(batch_norm: bool = True) -> Any:
    return build("mlp", SHAPE, federation.N_CLASSES, {"hidden": 5, "batch_norm": batch_norm})


def simulation(recipe: str, **options: Any) -> Any:
    settings = {method: PARAMETERS[method] for method in recipe.split("+") if method in PARAMETERS}
    return federation.simulation(recipe, settings, model=network(), **options)


@pytest.mark.parametrize(
    ("recipe", "form"), thinned(itertools.product(RECIPES, ["level", "space"]), every=4)
)
def test_engines_agree(recipe: str, form: str) -> None:
    """1 to 12 samples in batches of 4: clients differ in steps, and last batches are short."""
    outcomes, states = [], []
    for engine in ("sequential", "vectorized"):
        run = simulation(recipe, data=skewed(form), augment=True, engine=engine)
        outcomes.append(run.run())
        states.append(
            flatten({"state": run.loop.state.slices, "memory": run.engine.clients.memory.whole()})
        )
    close(outcomes[1].params, outcomes[0].params, 1e-8)
    close(outcomes[1].evaluated, outcomes[0].evaluated, 1e-8)
    close_together(states[1], states[0], 1e-8)


@pytest.mark.parametrize(
    ("recipe", "form", "engine"),
    thinned(
        itertools.product(
            ["scaffold+fnr+rfedavg_plus+ccn", "centralised"],
            ["level", "equal", "space"],
            ["sequential", "vectorized"],
        ),
        0,
        4,
    ),
)
def test_sigma_0_is_no_noise_to_the_bit(recipe: str, form: str, engine: str) -> None:
    found = simulation(recipe, data=skewed(form, 0.0), engine=engine).run()
    assert federation.equal(
        found, simulation(recipe, data=federation.images(), engine=engine).run()
    )


# who sees what
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Spy(Component):
    """Keeps what a client sees in each pass."""

    name: ClassVar[str] = "spy"
    needs: ClassVar[Needs] = Needs(local_set=True, public=Public.UNLABELLED)
    seen: dict[str, list[Tensor]] = field(default_factory=dict)

    def penalty(self, w: Params, out: Output, batch: Batch, client: Client) -> Tensor | None:
        self.seen.setdefault("steps", []).append(batch.x)
        return None

    def look(self, client: Client) -> Answer:
        passes = {"own": client.local_set, "public": client.public}
        self.seen.update({name: [batch.x for batch in of] for name, of in passes.items()})
        return Answer()

    def report(self, trace: Trace, client: Client) -> Answer:
        return self.look(client)

    def answer(self, client: Client) -> Answer:
        self.seen["shuffled"] = [batch.x for batch in client.public.shuffled(client.key, 1, 4)]
        return self.look(client)


def looked(
    of: federation.Federation,
    client: int,
    job: str = "train",
    round_: int = 1,
    augment: bool = False,
    seed: int = 0,
) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """(what a client sees, what lies there) in the passes of one job, batch by batch."""
    spy, training = Spy(), LocalTraining(lr=0.1, epochs=2, batch_size=4, augment=augment)
    plan = Plan(network(False), training, 1, 1, seed)
    start = Start.from_plan(Algorithm.compose([spy], SETTING), plan, of.train.x)
    store = Clients(start, Federation.from_indices(of.train, of.clients, of.test, public=of.public))
    owner = "" if job == "train" else "spy"
    Sequential(store).answer(Ask(job, (client,), start.params, owner=owner), round_)
    orders: dict[str, Any] = {
        "steps": (store.steps(client, round_), of.train),
        "own": (store.local_set(client), of.train),
        "public": (in_order(np.arange(len(of.public.y)), PASS_BATCH), of.public),
    }
    lies = {
        name: list(torch.split(at.x[torch.from_numpy(positions.index)], list(positions.sizes)))
        for name, (positions, at) in orders.items()
    }
    return spy.seen, lies


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_who_sees_noise() -> None:
    """A client's batches and passes over its local set have noise. The public split has none, nor
    has a client with deviation 0."""
    seen, lies = looked(skewed(), 3)
    assert not any(
        (x == y).any()
        for name in ("steps", "own")
        for x, y in zip(seen[name], lies[name], strict=True)
    )
    assert same(seen["public"], lies["public"])
    seen, lies = looked(skewed(), 0)
    assert all(same(seen[name], lies[name]) for name in ("steps", "own", "public"))


def eps(part: str = "own", **options: Any) -> Tensor:
    """The noise of client 3 in one pass, by default in round 1 of training."""
    of = options.pop("of", None) or skewed("equal")
    seen, lies = looked(of, options.pop("client", 3), **options)
    return torch.cat([x - y for x, y in zip(seen[part], lies[part], strict=True)])


def test_noise_is_fresh_in_each_round_job_pass_and_step_and_each_client_has_its_own() -> None:
    of = skewed("equal")
    twins = replace(of, clients=[of.clients[3]] * 6)
    wanted = eps(of=of)
    assert torch.equal(eps(of=of), wanted), "the same key draws the same numbers"
    others = [
        eps(of=of, round_=2),
        eps(of=of, job="look"),
        eps(of=of, seed=1),
        eps(of=twins, client=4),
    ]
    assert torch.equal(eps(of=twins), wanted)
    assert all(other.shape == wanted.shape and not (other == wanted).any() for other in others)
    steps = eps("steps", of=of)  # two epochs of twelve samples
    assert len(torch.unique(torch.cat([steps, wanted]).flatten())) == 36 * 36


def test_augmentation_is_for_training_only() -> None:
    """Batches of training are cropped and flipped; a pass over one's own samples, and a further
    job's batches of the public split, are as they lie."""
    seen, lies = looked(federation.images(), 3, augment=True)
    assert not same(seen["steps"], lies["steps"])
    assert all(
        set(x.flatten().tolist()) <= set(y.flatten().tolist())
        for x, y in zip(torch.cat(seen["steps"]), torch.cat(lies["steps"]), strict=True)
    )
    assert same(seen["own"], lies["own"]) and same(seen["public"], lies["public"])
    assert torch.equal(eps(augment=True), eps(augment=False)), "nor in noise"
    seen, lies = looked(skewed(), 3, job="look", augment=True)
    assert "steps" not in seen and same(seen["public"], lies["public"])
    assert [len(batch) for batch in seen["shuffled"]] == [4, 4, 4, 3]
    shuffled, lie = (
        sorted(torch.cat(of).flatten(1).tolist()) for of in (seen["shuffled"], lies["public"])
    )
    assert shuffled == lie


@pytest.mark.parametrize("shape", [(6,), (1, 4, 6), (3, 6, 4), (1, 30)])
def test_what_can_not_be_cropped_is_refused(shape: tuple[int, ...]) -> None:
    local = LocalTraining(lr=0.1, epochs=1, batch_size=4, augment=True)
    with pytest.raises(
        UserError, match=r"augment = true is refused for samples of .*at least 5 x 5"
    ):
        local.check(shape, torch.device("cpu"))


def test_samples_that_all_share_stay_clean() -> None:
    of = skewed("equal")
    whole = Federation.from_indices(of.train, of.clients, of.test, public=of.public)
    used = whole.used_by(Algorithm.compose([DataSharing()], SETTING))
    joined = federation.Federation(used.train, list(used.clients.values()), of.test, of.public)
    seen, lies = looked(joined, 3)
    changed = torch.cat(seen["own"]).ne(torch.cat(lies["own"])).flatten(1)
    assert changed[:12].all() and not changed[12:].any() and len(changed) == 12 + 15
