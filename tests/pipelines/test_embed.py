"""`data.embed` in an experiment: stage `prepare` writes vectors and knows what made them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedml_noniid as nd
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.pipelines.experiment import config, provenance
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import deploy
from fedml_noniid.pipelines.verbs import fits
from tests import own_package
from tests.pipelines.small import PARAMS, run_stages

NETS = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, n_classes, width=6):
        super().__init__()
        self.hidden, self.out = nn.Linear(64, width), nn.Linear(width, n_classes)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x.flatten(1))))
"""
PLAIN = PARAMS.replace("[fedavg, scaffold+fnr]", "[fedavg, fed3r]").replace(
    "scaffold+fnr: {fnr: {p: 0.5}}", "fed3r: {}"
)
EMBED = "{model: NETS:Net, model_options: {width: 6}, init: w.pt}"


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study with a network of its own beside it, of a name that no other test imports."""
    name = f"nets_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    embed = EMBED.replace("NETS", name)
    params = PLAIN.replace("public: 50}", f"public: 50, embed: {embed}}}")
    params = params.replace("model: mlp", "model: logistic_regression")
    (tmp_path / "params.yaml").write_text(params.replace("{recipe: fedavg,", "{recipe: fed3r,"))
    save(tmp_path, 0)
    return tmp_path


def save(folder: Path, seed: int) -> None:
    """Made weights of the hidden layer; the classifier is not in the file."""
    generator = torch.Generator().manual_seed(seed)
    state = {
        "hidden.weight": torch.randn(6, 64, generator=generator),
        "hidden.bias": torch.randn(6, generator=generator),
    }
    torch.save(state, folder / "w.pt")


BY_NORM = """\

def by_norm(samples, n_clients):
    order = (samples**2).sum(1).argsort()
    assert (samples != 0).any(), "zeros are no samples"
    return [order[k::n_clients] for k in range(n_clients)]
"""


def test_a_partition_by_the_samples_is_not_checked_before_the_vectors_are_made(study: Path) -> None:
    (nets,) = study.glob("nets_*.py")
    nets.write_text(NETS + BY_NORM)
    params = (study / "params.yaml").read_text()
    old = "partition: dirichlet, clients: 4, alpha: 0.5"
    assert old in params
    new = f"partition: '{nets.stem}:by_norm', clients: 4"
    (study / "params.yaml").write_text(params.replace(old, new))
    place = Workspace.from_environment(study, {})
    fits.checked(place)
    run_stages(study, ("prepare", "partition"))
    nets.write_text(NETS + BY_NORM.replace("return ", "return [order[:1]] + "))
    own_package.forget(nets.stem)
    settings = config.load(study)
    with pytest.raises(UserError, match=r"by_norm"):
        fits.fits(settings, Dataset.read(place.dataset(settings.data.name)))


def test_the_prepared_data_are_vectors_and_all_stages_take_them(study: Path) -> None:
    """As in Python, to the bit; what is checked before has their shape."""
    place = Workspace.from_environment(study, {})
    settings, _ = fits.checked(place)
    assert settings.own_extras, "`noniid run` asks the stage plan each time"
    run_stages(study, ("prepare", "partition", "train"))
    found = Dataset.read(study / "data" / "digits.safetensors")
    assert found.train_x.shape == (1437, 6) and found.train_x.dtype == torch.float32
    embed = settings.data.embed
    assert embed is not None
    data = nd.embed(nd.load("digits"), embed.model, model_options={"width": 6}, init=study / "w.pt")
    assert data.dataset.checksum == found.checksum
    split = nd.partition(data, "dirichlet", clients=4, alpha=0.5, validation=0.1, public=50, seed=0)
    train = settings.train.model_dump(
        include={"model", "rounds", "epochs", "batch_size", "optimizer", "lr", "device"}
    )
    here = nd.run("fed3r", split, seeds=[0], **train)
    record = (study / "runs" / "skewed-fed3r-0" / "run.json").read_text()
    assert here.sha256[0] in record
    deployment, parts = deploy.prepared(place, deploy.planned(study))
    assert parts.train.x.shape[1] == 6 and deployment.train_args.recipe == "fed3r"


def hashes(study: Path) -> dict[str, str]:
    return provenance.preparing(config.load(study))


def test_what_the_vectors_are_made_of_is_in_the_plan(study: Path) -> None:
    """The weights' content, the network's source, its options, the batch, what is taken."""
    params, (source,) = study / "params.yaml", study.glob("nets_*.py")
    first = hashes(study)
    save(study, 1)
    seen = [first, hashes(study)]
    source.write_text(NETS.replace("torch.relu", "torch.tanh"))
    own_package.forget(source.stem)
    seen.append(hashes(study))
    for old, new in (
        ("init: w.pt", "init: w.pt, batch: 100"),
        ("batch: 100", "batch: 100, layer: hidden"),
        ("layer: hidden", "layer: hidden, normalise: length"),
    ):
        params.write_text(params.read_text().replace(old, new))
        seen.append(hashes(study))
    assert len({found["digits"] for found in seen}) == len(seen)


def test_a_study_without_it_does_not_depend_on_networks(study: Path) -> None:
    """Its settings are hashed as before there was `embed`: null is as good as nothing."""
    params = study / "params.yaml"
    params.write_text(PLAIN)
    plain = config.load(study)
    assert "embed" not in plain.data.model_dump()
    found = provenance.files("fedml_noniid.pipelines.stages.prepare")
    assert not [path for path in found if path.parent.name == "models"]
    assert not [path for path in found if path.name == "simulation.py"]
    before = provenance.plan(plain)
    params.write_text(PLAIN.replace("public: 50}", "public: 50, embed: null}"))
    assert provenance.plan(config.load(study)) == before


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("width: 6", "with: 6", r"data\.embed\.model_options\.with is unknown"),
        ("init: w.pt", "init: v.pt", r"data\.embed\.init: v\.pt can't be read"),
        ("init: w.pt", "layer: last", r"data\.embed\.layer = 'last' is refused"),
        ("init: w.pt", "bach: 1", r"data\.embed\.bach is unknown \(did you mean 'batch'\?\)"),
        ("width: 6", "width: 7", r"data\.embed\.init: hidden\.weight has shape \[6, 64\]"),
    ],
)
def test_mistakes_name_the_key_before_anything_runs(
    study: Path, old: str, new: str, words: str
) -> None:
    params = study / "params.yaml"
    params.write_text(params.read_text().replace(old, new))
    with pytest.raises(UserError, match=rf"^params\.yaml: {words}") as error:
        fits.checked(Workspace.from_environment(study, {}))
    assert len(str(error.value).splitlines()) == 1
