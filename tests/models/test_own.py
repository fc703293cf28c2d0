"""A user's `nn.Module`: what is found out about it, and that it trains as in torch, in every
engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedml_noniid as nd
from fedml_noniid.contract.checks import close
from fedml_noniid.contract.federation import PLAN
from fedml_noniid.core.component import HEAD, overrides
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import RecipeError
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.plan import initial_model
from fedml_noniid.models import build, factories
from fedml_noniid.models.own import OwnNetwork
from fedml_noniid.models.probe import probed
from fedml_noniid.models.rows import OwnRow
from fedml_noniid.models.settings import ModelSettings, build_network
from fedml_noniid.plugins.registry import METHODS
from tests import federation
from tests.models import own_networks
from tests.recipe_table import ALONE
from tests.walks import thinned

OWN = "tests.models.own_networks"
SHAPE = (6,)


def own(name: str = "Small", head: str = "", **options: object) -> OwnNetwork:
    """Not as blocks of ours, though it may be a row of them."""
    factories.check(f"{OWN}:{name}", options)
    facts = {"input_shape": SHAPE, "n_classes": own_networks.CLASSES, "embedding": None}
    return factories.own_network(f"{OWN}:{name}", options, facts, head)


@pytest.mark.parametrize(
    ("name", "reason", "head"),
    [
        ("Small", "", "out"),
        ("Averages", "", ""),  # its logits are not those of the classifier alone
        ("Soft", "", ""),
        ("Draws", "its pass draws from torch's own generator", "out"),
        ("Branches", "training under vmap", "out"),
        ("Centred", "samples of a batch change each other's numbers", "out"),
    ],
)
def test_what_is_found_out(name: str, reason: str, head: str) -> None:
    found = own(name)
    assert found.sequential_only.startswith(reason) and bool(found.sequential_only) is bool(reason)
    assert found.head == head and found.feature_size == (5 if head else 0)
    assert found.draws is (name in ("Small", "Draws"))
    told = federation.simulation("fedavg", model=found).remarks.get("one_by_one", "")
    assert told.endswith(found.sequential_only) and bool(told) is bool(reason)


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (nn.Softmax(1), True),
        (nn.Sigmoid(), True),
        (nn.LogSoftmax(1), False),
        (nn.ReLU(), False),
        (nn.Threshold(1e9, 0), False),  # zeros at first, as of a classifier that starts at zero
        (nn.Identity(), False),
    ],
)
def test_outputs_that_are_no_logits_are_told(
    last: nn.Module, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    probed(OwnNetwork("net", partial(nn.Sequential, nn.Linear(3, 4), last), (3,)), 4)
    assert ("take logits" in caplog.text) is told


@pytest.mark.parametrize(
    ("model", "options", "head", "message"),
    [
        (f"{OWN}:Small", {"hiden": 4}, "", r"model_options.hiden is unknown \(did you mean 'hidd"),
        (f"{OWN}:Small", {}, "fc1", "head = 'fc1' is refused; allowed: fc, out"),
        ("mlp", {}, "fc1", "head = 'fc1' is refused with model 'mlp'"),
    ],
)
def test_what_is_refused(model: str, options: dict[str, int], head: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(model, SHAPE, 3, options, head=head)


ROWS_OF_IMAGES = ("convolutions", "Pooled", "Functions")
USES = ("features", "personal", "fixed_classifier", "fixed_body", "whole_models")
USING = [
    entry
    for entry, (recipe, settings) in ALONE.items()
    if recipe == "fedavg"
    or any(getattr(METHODS[recipe](**settings.get(recipe, {})).needs, use) for use in USES)
    or overrides(METHODS[recipe](), "own_model")
]


@pytest.mark.parametrize("entry", thinned(USING, 0))
def test_engines_agree(entry: str) -> None:
    """With batch norm and dropout, on ragged clients: two processes to the bit."""
    recipe, settings = ALONE[entry]
    options = {"dtype": torch.float64, "model": own(), "rounds": 2, "epochs": 1}
    alone = federation.run(recipe, settings, **options)
    beside = federation.run(recipe, settings, engine="vectorized", **options)
    for part in ("params", "evaluated", "buffers"):
        close(getattr(beside, part), getattr(alone, part), 1e-8)
    close(flatten(beside.personal), flatten(alone.personal), 1e-8)
    if recipe in ("fedavg", "fedbn", "fnr", "ditto"):
        two = federation.run(recipe, settings, workers=2, **options)
        assert federation.equal(two, alone)


@pytest.mark.parametrize("name", ["Draws", "Averages"])
def test_odd_networks_repeat_to_the_bit(name: str) -> None:
    options = {"model": own(name), "rounds": 2}
    one, again, two = (
        federation.run("scaffold", workers=workers, **options) for workers in (1, 1, 2)
    )
    assert federation.equal(one, again) and federation.equal(one, two)


@pytest.mark.parametrize("method", thinned(sorted(METHODS), 1))
def test_without_features_a_method_runs_or_is_refused(method: str) -> None:
    """No method gets numbers in place of features: they would be NaN, and the run not finite."""
    recipe, settings = next((entry for entry in ALONE.values() if entry[0] == method), (method, {}))
    needs = METHODS[method](**settings.get(method, {})).needs
    simulation = partial(
        federation.simulation, recipe, settings, model=own("Soft"), rounds=1, cohort=6
    )
    mixes = not federation.takes_norms(recipe, settings)  # it has batch norms
    if mixes or needs.features or needs.classifier or needs.activations or HEAD in needs.personal:
        with pytest.raises(RecipeError, match=method):
            simulation()
    else:
        assert all(leaf.isfinite().all() for leaf in simulation().run().evaluated.values())


IMAGES = federation.images()


@pytest.mark.parametrize(
    ("name", "options", "is_row"),
    [
        ("convolutions", {}, True),
        ("Pooled", {}, True),
        ("Small", {}, True),
        ("Fixed", {}, True),
        ("Functions", {}, True),
        ("convolutions", {"padding_mode": "reflect"}, False),
        ("convolutions", {"window": 3}, False),
        ("Pooled", {"size": 2}, False),
        ("Functions", {"twice": True}, False),  # a layer twice
        ("Soft", {}, False),
        ("Draws", {}, False),
    ],
)
def test_a_row_of_our_blocks_is_found_and_trains_alike(
    name: str, options: dict[str, Any], is_row: bool
) -> None:
    """With the draws of dropout, in both engines: the module itself is the reference."""
    vectors = name not in ROWS_OF_IMAGES
    of = federation.federation(torch.float64) if vectors else IMAGES
    shape = tuple(of.train.x.shape[1:])
    found = build(f"{OWN}:{name}", shape, own_networks.CLASSES, options)
    assert isinstance(found, OwnRow) is is_row
    if not is_row:
        return
    how = {"data": of, "dtype": torch.float64, "rounds": 2, "lr": 0.05}
    expected = federation.run("scaffold", model=found.own, **how)
    for engine in ("sequential", "vectorized"):
        ended = federation.run("scaffold", model=found, engine=engine, **how)
        for part in ("params", "buffers"):
            close(getattr(ended, part), getattr(expected, part), 1e-9)
    first, _ = initial_model(found, PLAN["seed"], of.train.x)
    moved = {key for key, leaf in expected.params.items() if not torch.equal(leaf, first[key])}
    assert moved >= {f"{found.head.name}.weight", f"{found.head.name}.bias"} - found.frozen


def test_frozen_parameters_are_never_sent_or_changed() -> None:
    net = own("Fixed")
    found = federation.simulation("fedavg", model=net)
    first, _ = initial_model(net, PLAN["seed"], torch.zeros(()))
    ended = found.run().params
    assert net.frozen == {"fc.weight", "fc.bias"}
    assert found.loop.state.params.keys() == first.keys() - net.frozen
    assert all(torch.equal(ended[name], first[name]) for name in net.frozen)


def test_fedbn_keeps_batch_norms_and_no_other_buffers() -> None:
    found = federation.simulation("fedbn", model=own("Averages"))
    found.run()
    assert found.loop.state.buffers.keys() == {"seen"}
    personal = found.engine.clients.memory.whole()["own"]
    assert personal["params"].keys() == {"norm.weight", "norm.bias"}
    assert personal["buffers"].keys() == {"norm.mean", "norm.var"}


SPLIT = nd.partition(nd.load("digits"), "dirichlet", clients=3, alpha=0.5)
Network = str | nn.Module | Callable[..., nn.Module]


def digits(model: Network, **given: object) -> nd.Result:
    return nd.run("fedavg", SPLIT, model=model, rounds=1, epochs=1, progress=False, **given)


def test_a_class_a_function_a_name_and_an_object() -> None:
    by_name = digits(f"{OWN}:pictures", model_options={"width": 3})
    by_function = digits(own_networks.pictures, model_options={"width": 3})
    assert by_name.sha256 == by_function.sha256 != digits(own_networks.pictures).sha256
    local = digits(lambda n_classes: nn.Sequential(nn.Flatten(), nn.Linear(64, n_classes)))
    assert local.weights[0]["1.weight"].shape == (10, 64)
    with pytest.raises(nd.UserError, match="model = 3 is refused; allowed: logistic_regression"):
        digits(3)  # type: ignore[arg-type]  # the wrong kind is what is tested
    with pytest.raises(nd.UserError, match=r"run: model = 'mpl' is unknown \(did you mean 'mlp'"):
        digits("mpl")


def test_an_object_starts_from_its_own_parameters_for_every_seed() -> None:
    torch.manual_seed(5)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = [leaf.detach().clone() for leaf in module.parameters()]
    found = digits(module, lr=1e-12, seeds=[0, 1])
    for seed in (0, 1):
        for name, first in module.named_parameters():
            leaf = found.weights[seed][name]
            torch.testing.assert_close(leaf, first.detach(), rtol=0, atol=1e-9)
    assert all(map(torch.equal, before, module.parameters()))
    assert found.predict(SPLIT.data.dataset.test_x[:2].numpy(), seed=0).shape == (2,)


@pytest.mark.parametrize("write", [save_file, torch.save])
def test_first_values_from_a_file(write: Callable[..., None], tmp_path: Path) -> None:
    """A state dict of torch, without its classifier."""
    torch.manual_seed(9)
    state = own_networks.Small().state_dict()
    state["norm.running_var"] = torch.full((5,), 2.0)
    path = tmp_path / ("w.safetensors" if write is save_file else "w.pt")
    kept = {name: leaf for name, leaf in state.items() if not name.startswith("out.")}
    write(kept, path)
    network = partial(ModelSettings, model=f"{OWN}:Small", init=str(path))
    net = build_network(network(freeze=["fc.*"]), SHAPE, 3)
    params, buffers = initial_model(net, 0, torch.zeros(()))
    drawn, _ = initial_model(own(), 0, torch.zeros(()))
    assert torch.equal(params["fc.weight"], state["fc.weight"])
    assert torch.equal(buffers["norm.var"], state["norm.running_var"])
    assert torch.equal(params["out.weight"], drawn["out.weight"])
    assert net.frozen == {"fc.weight", "fc.bias"}
    ended = federation.run("scaffold", model=net).params
    assert torch.equal(ended["fc.weight"], state["fc.weight"])
    assert not torch.equal(ended["norm.weight"], state["norm.weight"])
    assert network().model_code().keys() == {f"{OWN}:Small", str(path)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "nowhere.pt"}, "init: nowhere.pt can't be read"),
        ({"init": "text.pt"}, "init: .*text.pt can't be read"),
        ({"init": "wrong.safetensors"}, "init: fc.wieght is no tensor of the network.*'fc.weight'"),
        ({"init": "large.safetensors"}, r"init: fc.bias has shape \[6\]; allowed: \[5\]"),
        ({"freeze": ["fcc.*"]}, "freeze = 'fcc.*' is refused; allowed: a pattern of fc"),
        ({"freeze": ["*"]}, "freeze: nothing would be left to train"),
    ],
)
def test_first_values_that_do_not_fit(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.pt").write_text("no state dict")
    save_file({"fc.wieght": torch.zeros(5, 6)}, "wrong.safetensors")
    save_file({"fc.bias": torch.zeros(6)}, "large.safetensors")
    with pytest.raises(UserError, match=message):
        build_network(ModelSettings(**{"model": f"{OWN}:Small"} | options), SHAPE, 3)
