"""A scenario's attackers: checked, drawn and measured, and what they make out of date."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedml_noniid as nd
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Dataset, Raw
from fedml_noniid.engines.evaluation import evaluate
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.config import Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.measuring import measure
from fedml_noniid.pipelines.experiment.partitioning import assign
from fedml_noniid.pipelines.experiment.provenance import plan
from fedml_noniid.pipelines.experiment.scenario import AttackSettings
from fedml_noniid.pipelines.experiment.training import trained
from fedml_noniid.pipelines.verbs import fits
from tests.pipelines.small import PARAMS


def loaded(folder: Path, attack: str, also: str = "alpha: 0.5") -> config.Config:
    """Two scenarios; the second one may have attackers."""
    added = f"  other: {{partition: dirichlet, clients: 4, {also}{attack}}}\n"
    text = PARAMS.replace("[skewed]", "[skewed, other]")
    (folder / "params.yaml").write_text(text.replace("recipe_names:", f"{added}recipe_names:", 1))
    return config.load(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{kind: alie}", "attack.clients is missing"),
        ("{clients: 0, kind: alie}", "attack.clients = 0 is refused; allowed: a number between 0"),
        ("{clients: 1.0, kind: alie}", "attack.clients = 1.0 is refused"),
        ("{clients: 0.2, kind: ale}", "'ale' is unknown (did you mean 'alie'?)"),
        ("{clients: 0.2, kind: alie, zed: 1}", "attack.zed is unknown; allowed: z, clients, kind"),
        ("{clients: 0.2, kind: alie, gamma: 2.0}", "attack.gamma is unknown"),
        ("{clients: 0.2, kind: gaussian, sigma: 0}", "attack.sigma = 0 is refused"),
        ("{clients: 0.2, kind: backdoor}", "attack.target is missing"),
        ("0.2", "scenarios.other.attack = 0.2 is refused"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        loaded(tmp_path, f", attack: {text}")
    assert words in str(error.value)


def test_a_deployment_is_refused(tmp_path: Path) -> None:
    text = PARAMS.replace("alpha: 0.5,", "alpha: 0.5, attack: {clients: 0.3, kind: alie},")
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(UserError, match=r"deploy.scenario.*as silos decide themselves"):
        config.load(tmp_path)


def test_it_makes_trainings_out_of_date_and_no_partition(tmp_path: Path) -> None:
    plans = [
        plan(loaded(tmp_path, text))
        for text in (
            "",
            *(f", attack: {{clients: 0.3, kind: {kind}}}" for kind in ("alie", "scale")),
        )
    ]
    for old, new in ((0, 1), (1, 2)):
        changed = {
            stage: {
                key for key, value in plans[new][stage].items() if plans[old][stage][key] != value
            }
            for stage in plans[new]
        }
        assert {stage: keys for stage, keys in changed.items() if keys} == {
            "train": {"other-fedavg-0", "other-scaffold+fnr-0"},
            "report": {"all"},
        }


def made(n: int = 200) -> Dataset:
    """Images of two classes, which differ in their brightness."""
    y = torch.arange(n) % 2
    x = (torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 100).round()
    x += 100 * y.reshape(-1, 1, 1, 1)
    return Dataset.from_raw("made", Raw(x, y, x, y, ("dark", "light")))


def drawn(fraction: float, n_clients: int, seed: int) -> set[int]:
    attack = AttackSettings(clients=fraction, kind="alie")
    return {*attack.drawn(made(), n_clients, seed).clients}


def test_the_seed_alone_draws_attackers_and_fewer_are_among_more() -> None:
    assert drawn(0.2, 20, 0) < drawn(0.4, 20, 0) and len(drawn(0.4, 20, 0)) == 8
    assert drawn(0.2, 20, 0) == drawn(0.2, 20, 0) != drawn(0.2, 20, 1)
    assert len(drawn(0.01, 20, 0)) == 1  # as with participation, at least one


def item(folder: Path, recipe: str, attack: str) -> Item:
    settings = loaded(folder, f", attack: {{{attack}}}")
    unit, data = Unit("other", recipe, 0), made()
    indices = assign(data, settings.data, settings.scenarios["other"], "other", 0)
    return Item(settings, unit, data, indices, torch.device("cpu"))


def test_every_method_meets_the_same_attackers_in_an_honest_partition(tmp_path: Path) -> None:
    attack = "clients: 0.5, kind: label_flip"
    met = [item(tmp_path, recipe, attack) for recipe in ("fedavg", "scaffold+fnr")]
    liars = met[0].attackers.clients
    assert len(liars) == 2 and met[1].attackers.clients == liars
    for one in met:
        seen = one.simulation().loop.federation.train.y
        for k, mine in enumerate(one.indices.clients):
            true = one.data.train_y[torch.from_numpy(mine)]
            assert torch.equal(seen[torch.from_numpy(mine)], 1 - true if k in liars else true)
        assert torch.equal(one.test.y, one.data.test_y) and one.indices.skew.labels is None


@pytest.mark.parametrize("personal", [False, True])
def test_the_backdoors_rate(tmp_path: Path, personal: bool) -> None:
    """By hand: the test images of the other class with four bright pixels, and how many of them
    the model calls the target. Of clients' own models: the mean over the honest ones."""
    one = item(tmp_path, "fedavg", "clients: 0.5, kind: backdoor, target: light, rate: 1.0")
    result = trained(one, one.simulation(), "")
    tensors = dict(result.tensors)
    names = [name.removeprefix("params/") for name in tensors if name.startswith("params/")]
    rng = torch.Generator().manual_seed(1)
    own = {
        name: torch.randn(4, *tensors[f"params/{name}"].shape, generator=rng)
        for name in names
        if name.startswith("fc2")
    }
    models = [{name: tensors[f"params/{name}"] for name in names}]
    if personal:
        tensors |= {f"own/params/{name}": leaf for name, leaf in own.items()}
        honest = [k for k in range(4) if k not in one.attackers.clients]
        models = [models[0] | {name: leaf[k] for name, leaf in own.items()} for k in honest]
    x = one.test.x[one.test.y == 0].clone()
    x[:, :, 2:, 2:] = one.data.normalised("train", one.device).max()
    rates = []
    for model in models:
        named = evaluate(
            one.network, model, {}, one.test._replace(x=x, y=torch.zeros(len(x)).long())
        )
        rates.append(float((named.predictions == 1).double().mean()))
    metrics = measure(one, tensors, result.rows).metrics
    assert metrics["metric/backdoor_rate"] == pytest.approx(np.mean(rates))
    assert result.record["tags"]["attack"].startswith("clients ")
    honest_item = item(tmp_path, "fedavg", "clients: 0.5, kind: alie")
    assert "metric/backdoor_rate" not in measure(honest_item, tensors, result.rows).metrics


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        ({"kind": "backdoor", "target": 1}, "its trigger needs images"),
        ({"kind": "backdoor", "target": "x"}, "target"),
        ({"kind": "label_flip"}, "the targets are none"),
    ],
)
def test_data_that_do_not_allow_it(attack: dict[str, Any], words: str) -> None:
    rng = np.random.default_rng(0)
    x, numbers = rng.normal(size=(30, 3)), words.endswith("none")
    y = rng.normal(size=30) if numbers else rng.integers(0, 2, 30)
    data = nd.load("digits") if attack.get("target") == "x" else nd.from_arrays(x, y)
    options = {"loss": "mse"} if numbers else {}
    with pytest.raises(UserError, match=words) as error:
        nd.run(
            "fedavg", data, partition="iid", clients=5, attack={"clients": 0.2, **attack}, **options
        )
    assert str(error.value).startswith("run: ")


def test_the_check_of_an_experiment_sets_a_rule_up_with_its_cohort(tmp_path: Path) -> None:
    """Krum with one attacker needs four clients in a round; the trial had two."""
    loaded(tmp_path, "")
    text = (tmp_path / "params.yaml").read_text()
    text = text.replace("[fedavg, scaffold+fnr]", "[fedavg, krum]").replace(
        "fedavg: {}", "fedavg: {}\n  krum: {}"
    )
    (tmp_path / "params.yaml").write_text(text)
    fits.fits(config.load(tmp_path), made())
    (tmp_path / "params.yaml").write_text(text.replace("clients: 4", "clients: 3"))
    with pytest.raises(UserError, match="'krum': f = 1, m = 1 of 3 clients"):
        fits.fits(config.load(tmp_path), made())
