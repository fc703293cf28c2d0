"""The deploy stage and `noniid deploy loopback`: what they hand to the loopback run, and that other
weights fail them.

Loopback runs have their own tests.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from fedml_noniid.cli.app import main
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.indices import INDICES, Indices, read_indices
from fedml_noniid.pipelines.stages import __main__ as stage
from fedml_noniid.pipelines.verbs import repro
from fedml_noniid.processes import loopback
from tests.files import contents

Change = Callable[..., None]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the stages before this one have run; the recipe needs the public split."""
    folder = tmp_path_factory.mktemp("study")
    content = yaml.safe_load((Path(__file__).parents[2] / "params.yaml").read_text())
    content["data"] |= {"name": "digits", "public": 50}
    skewed = {"partition": "dirichlet", "clients": 5, "alpha": 0.5, "participation": 0.5}
    content |= {"scenarios": {"skewed": skewed}, "scenario_names": ["skewed"]}
    content["deploy"] = {"recipe": "fnr", "scenario": "skewed", "seed": 1, "silos": 3, "rounds": 1}
    (folder / "params.yaml").write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert stage.main(["prepare"]) == stage.main(["partition"]) == 0
    return folder


@pytest.fixture
def prepared(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """A copy of it is the working folder; the function changes params.yaml."""
    shutil.copytree(study, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)

    def change(**sections: dict) -> None:
        content = yaml.safe_load(Path("params.yaml").read_text())
        for name, values in sections.items():
            content[name] |= values
        Path("params.yaml").write_text(yaml.safe_dump(content))

    return change


def skewed(**more: object) -> dict:
    scenario = {"partition": "dirichlet", "clients": 5, "alpha": 0.5, "participation": 0.5}
    return {"skewed": scenario | more}


def indices() -> Indices:
    return read_indices(Path("partitions/skewed-1") / INDICES)


def positions(parts: list) -> list[int]:
    return sorted(int(i) for part in parts for i in part)


@pytest.mark.parametrize("silos", [3, 5])
def test_equal_weights(prepared, monkeypatch, silos):
    """As many silos as the scenario has clients take its partition; otherwise one like it is
    made. All silos are there, whatever the scenario's availability is."""
    train = {"local_steps": 3, "drop_last": True, "augment": True, "precision": "bf16"}
    noisy = skewed(noise={"sigma": 0.5}, availability={"rate": 0.9})
    prepared(deploy={"silos": silos}, train=train, scenarios=noisy)
    seen = []

    def simulated(deployment, parts, folder):
        seen.append((deployment, parts))
        return loopback.simulate(deployment, parts)

    monkeypatch.setattr(loopback, "run", simulated)
    assert stage.main(["deploy"]) == 0
    ((deployment, parts),) = seen
    clients = indices().clients
    assert len(parts.clients) == silos == deployment.silos and len(parts.public.y) == 50
    assert positions(parts.clients) == positions(clients)
    equal = [part.tolist() for part in parts.clients] == [part.tolist() for part in clients]
    assert equal is (silos == 5)
    assert {key: getattr(deployment.train_args, key) for key in train} == train
    noise = parts.train.noise
    levels = [noise.std[noise.row[client]].unique().item() for client in parts.clients]
    assert levels == pytest.approx([k / (silos - 1) * levels[-1] for k in range(silos)])
    record = json.loads(Path("deploy/result.json").read_text())
    assert record["deployed_sha256"] == record["simulated_sha256"] and record["recipe"] == "fnr"


@pytest.mark.parametrize(
    ("kind", "silos"),
    [("natural", 3), pytest.param("natural_grouped", 6, marks=pytest.mark.slow)],
)
def test_users_stay_whole_with_another_number_of_silos(prepared, monkeypatch, kind, silos):
    """`natural` draws among the users that had been drawn, `natural_grouped` groups them again."""
    data = Dataset.read(Path("data/digits.safetensors"))
    owned = dataclasses.replace(data, train_owner=torch.arange(len(data.train_y)) % 20)
    owned.save(Path("data/digits.safetensors"))
    users = {"users": 12} if kind == "natural_grouped" else {}
    scenario = {"partition": kind, "clients": 7, "participation": 1.0, **users}
    prepared(scenarios={"skewed": scenario}, deploy={"silos": silos})
    assert stage.main(["partition"]) == 0
    seen = []
    monkeypatch.setattr(loopback, "run", lambda _, parts, __: seen.append(parts) or "same")
    monkeypatch.setattr(loopback, "simulate", lambda *_: "same")
    assert stage.main(["deploy"]) == 0
    before = {i % 20 for i in positions(indices().clients)}
    owners = [{int(i) % 20 for i in part} for part in seen[0].clients]
    assert len(owners) == silos and set.union(*owners) <= before
    assert len(set.union(*owners)) == sum(map(len, owners)) == (3 if kind == "natural" else 12)


@pytest.mark.usefixtures("prepared")
def test_other_weights(monkeypatch, capsys):
    monkeypatch.setattr(loopback, "run", lambda *_: "0" * 64)
    assert stage.main(["deploy"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: the silos' weights {'0' * 64} are not the simulation's ")
    assert not Path("deploy/result.json").exists()


@pytest.mark.parametrize(
    ("options", "recipe", "silos"),
    [([], "fnr", 3), (["--recipe", "tuned-prox", "--silos", "4"], "fedprox", 4)],
)
def test_loopback_runs_the_studys_settings_and_data(prepared, monkeypatch, options, recipe, silos):
    """The samples are those of the study's own partition, with its noise."""
    tuned = {"recipe": "fedprox", "fedprox": {"mu": 0.25}, "train": {"lr": 0.03}}
    prepared(
        recipes={"tuned-prox": tuned},
        scenarios=skewed(noise={"sigma": 0.5}),
        train={"model_options": {"hidden": 7}, "batch_size": 5},
    )
    asked, ran = [], []
    monkeypatch.setattr(repro, "repro", lambda place, stage, show: asked.append(stage))
    monkeypatch.setattr(loopback, "compare", lambda *arguments: ran.append(arguments))
    assert main(["deploy", "loopback", "--out", "out", *options]) == 0
    ((deployment, parts, *_),) = ran
    train = deployment.train_args
    assert (asked, train.recipe, deployment.silos) == (["partition"], recipe, silos)
    assert (deployment.model_args.model_options, train.batch_size) == ({"hidden": 7}, 5)
    assert recipe == "fnr" or (train.settings, train.lr) == ({"fedprox": {"mu": 0.25}}, 0.03)
    assert positions(parts.clients) == positions(indices().clients)
    assert parts.train.noise is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--recipe fnrr", "--recipe fnrr: recipe 'fnrr': method 'fnrr' is unknown (did you mean"),
        ("--recipe scaffold+feddyn", "--recipe scaffold+feddyn: 'feddyn' and 'scaffold' can't be"),
        ("--silos 1", "--silos = 1 is refused; allowed: a whole number from 2"),
        ("--silos 6", "--silos = 6 is refused; allowed: 2 to 5, the clients of scenario"),
        ("--secure-sums 5", "--secure-sums = 5 is refused; allowed: 0 (the server sees each"),
        ("--recipe ditto --secure-sums 2", "--recipe ditto: recipe 'ditto' can't run with tra"),
        ("--recipe fedper --secure-sums 2", "--recipe fedper: recipe 'fedper' can't run with"),
        ("--recipe ccn --secure-sums 2", "--recipe ccn: recipe 'ccn' can't run with train_a"),
        ("--out .", ".: holds .items, and no run on this machine wrote that"),
    ],
)
def test_loopback_refuses_what_it_can_not_run_before_dvc_does(
    prepared, monkeypatch, capsys, options, said
):
    """The option is named, as its key may not be in the file."""
    content = yaml.safe_load(Path("params.yaml").read_text())
    del content["deploy"]
    Path("params.yaml").write_text(yaml.safe_dump(content))
    before = contents(Path())
    monkeypatch.setattr(repro, "repro", lambda *_: pytest.fail("DVC runs"))
    assert main(["deploy", "loopback", *options.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")
    assert contents(Path()) == before


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"deploy": {"secure_sums": 4}}, "deploy.secure_sums = 4 is refused"),
        ({"train": {"precision": "tf32"}}, "train.precision = 'tf32' is unknown"),
    ],
)
def test_a_mistake_has_the_key_of_params_yaml(prepared, capsys, sections, said):
    """FedML's keys are others."""
    prepared(**sections)
    assert stage.main(["deploy"]) == 2
    assert capsys.readouterr().err.startswith(f"error: params.yaml: {said}; allowed: ")
