"""The deploy stage: what it hands to the loopback run, and that other weights fail it.

Loopback runs have their own tests.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml

from fedml_noniid.cli.app import main
from fedml_noniid.pipelines.stages import __main__ as stage
from fedml_noniid.pipelines.tools import repro
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.dataset import Dataset
from fedml_noniid.plugins.silo import launch, loopback

PARAMS = Path(__file__).parents[2] / "params.yaml"


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A folder in which the stages before this one have run; the recipe needs the public split."""
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load(PARAMS.read_text())
    content["data"] |= {"name": "digits", "public": 50}
    content["scenarios"] = {
        "skewed": {"partition": "dirichlet", "clients": 5, "alpha": 0.5, "participation": 0.5}
    }
    content["scenario_names"] = ["skewed"]
    content["deploy"] = {"recipe": "fnr", "scenario": "skewed", "seed": 1, "silos": 3, "rounds": 1}
    Path("params.yaml").write_text(yaml.safe_dump(content))
    assert stage.main(["prepare"]) == 0
    assert stage.main(["partition"]) == 0
    return content


@pytest.mark.parametrize("silos", [3, 5])
def test_equal_weights(prepared, monkeypatch, silos):
    """As many silos as the scenario has clients take its partition; otherwise one like it is
    made."""
    prepared["deploy"]["silos"] = silos
    prepared["train"] |= {"local_steps": 3, "drop_last": True, "augment": True, "precision": "bf16"}
    prepared["scenarios"]["skewed"] |= {
        "noise": {"sigma": 0.5},
        "availability": {"rate": 0.9},
    }  # but all are there
    Path("params.yaml").write_text(yaml.safe_dump(prepared))
    seen = []

    def simulated(deployment, parts, folder):
        seen.append((deployment, parts))
        return loopback.simulate(deployment, parts)

    monkeypatch.setattr(loopback, "run", simulated)
    assert stage.main(["deploy"]) == 0
    ((deployment, parts),) = seen
    indices = json.loads(Path("partitions/skewed-1/indices.json").read_text())
    assert len(parts.clients) == silos == deployment.silos
    assert sorted(i for part in parts.clients for i in part.tolist()) == sorted(
        i for part in indices["clients"] for i in part
    )
    assert ([part.tolist() for part in parts.clients] == indices["clients"]) is (silos == 5)
    assert len(parts.public.y) == 50
    assert deployment.train_args.cohort == 2
    assert (deployment.train_args.local_steps, deployment.train_args.drop_last) == (3, True)
    assert deployment.train_args.augment and deployment.train_args.precision == "bf16"
    levels = [
        parts.train.noise.std[parts.train.noise.row[client]].unique().item()
        for client in parts.clients
    ]
    assert (
        levels == pytest.approx([k / (silos - 1) * levels[-1] for k in range(silos)])
        and levels[-1] > 0
    )
    record = json.loads(Path("deploy/result.json").read_text())
    assert record["deployed_sha256"] == record["simulated_sha256"]
    assert record["recipe"] == "fnr"


@pytest.mark.parametrize(
    ("kind", "silos"), [("natural", 3), ("natural_grouped", 3), ("natural_grouped", 6)]
)
def test_users_stay_whole_with_another_number_of_silos(prepared, monkeypatch, kind, silos):
    """`natural` draws among the users that had been drawn, `natural_grouped` groups them again."""
    path = Path("data/digits.safetensors")
    data = Dataset.read(path)
    dataclasses.replace(data, train_owner=torch.arange(len(data.train_y)) % 20).save(path)
    options = {"users": 12} if kind == "natural_grouped" else {}
    prepared["scenarios"]["skewed"] = {
        "partition": kind,
        "clients": 7,
        "participation": 1.0,
        **options,
    }
    prepared["deploy"]["silos"] = silos
    Path("params.yaml").write_text(yaml.safe_dump(prepared))
    assert stage.main(["partition"]) == 0
    seen = []
    monkeypatch.setattr(loopback, "run", lambda _, parts, __: seen.append(parts) or "same")
    monkeypatch.setattr(loopback, "simulate", lambda *_: "same")
    assert stage.main(["deploy"]) == 0
    before = {
        i % 20
        for part in json.loads(Path("partitions/skewed-1/indices.json").read_text())["clients"]
        for i in part
    }
    users = [{int(i) % 20 for i in part} for part in seen[0].clients]
    assert len(users) == silos and set.union(*users) <= before
    assert len(set.union(*users)) == sum(map(len, users)) == (3 if kind == "natural" else 12)


def test_a_run_that_fails(prepared, monkeypatch, capsys):
    """The cause is one line, though the error in the log has two."""

    def fail(_, __, folder):
        log = launch.log_file(folder, 0)
        log.parent.mkdir(parents=True)
        log.write_text(
            "ERROR:fedml_noniid.plugins.silo.launch:error: round 1: the disk is full\nand will "
            "stay so\n"
        )
        raise UserError(loopback.failure([2, 0, None], folder))

    monkeypatch.setattr(loopback, "run", fail)
    assert stage.main(["deploy"]) == 2
    log = Path("deploy/stage/fedml-0.log").resolve()
    assert (
        capsys.readouterr().err == f"error: server (rank 0): round 1: the disk is full; see {log}\n"
    )
    assert not Path("deploy/result.json").exists()


def test_other_weights(prepared, monkeypatch, capsys):
    monkeypatch.setattr(loopback, "run", lambda *_: "0" * 64)
    assert stage.main(["deploy"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"error: deploy: recipe 'fnr' ended with weights {'0' * 64} on FedML's silos and "
    )
    assert said.count("\n") == 1
    assert not Path("deploy/result.json").exists()


@pytest.mark.parametrize(
    ("options", "recipe", "silos"),
    [
        ([], "fnr", 3),
        (["--recipe", "tuned-prox", "--silos", "4"], "fedprox", 4),
        (["--recipe", "moon+ccn"], "moon+ccn", 3),
    ],
)
def test_loopback_in_a_study_runs_its_settings_and_data(
    prepared, monkeypatch, options, recipe, silos
):
    """Not the packaged digits: the samples are those of the study's own partition, with its
    noise."""
    prepared["recipes"]["tuned-prox"] = {
        "recipe": "fedprox",
        "fedprox": {"mu": 0.25},
        "train": {"lr": 0.03},
    }
    prepared["scenarios"]["skewed"] |= {"noise": {"sigma": 0.5}}
    prepared["train"] |= {"model_options": {"hidden": 7}, "batch_size": 5}
    Path("params.yaml").write_text(yaml.safe_dump(prepared))
    Path("dvc.yaml").write_text("stages: {}\n")
    asked, ran = [], []
    monkeypatch.setattr(repro, "repro", lambda place, stage: asked.append((place.root, stage)) or 0)
    monkeypatch.setattr(loopback, "compare", lambda *given: ran.append(given))
    assert main(["deploy", "loopback", "--out", "out", *options]) == 0
    assert asked == [(Path.cwd(), "partition")]
    ((deployment, parts, out, _),) = ran
    assert (deployment.train_args.recipe, deployment.silos, out) == (recipe, silos, Path("out"))
    assert (
        deployment.model_args.model_options == {"hidden": 7}
        and deployment.train_args.batch_size == 5
    )
    assert deployment.common_args.random_seed == 1 and deployment.train_args.rounds == 1
    if recipe == "fedprox":
        assert deployment.train_args.settings == {"fedprox": {"mu": 0.25}}
        assert deployment.train_args.lr == 0.03
    indices = json.loads(Path("partitions/skewed-1/indices.json").read_text())
    assert sorted(i for own in parts.clients for i in own.tolist()) == sorted(
        i for own in indices["clients"] for i in own
    )
    assert parts.train.noise is not None


def test_loopback_in_a_study_refuses_what_it_can_not_run(prepared, monkeypatch, capsys):
    Path("dvc.yaml").write_text("stages: {}\n")
    monkeypatch.setattr(repro, "repro", lambda place, stage: 0)
    for options, message in (
        (
            ["--recipe", "fnrr"],
            (
                "params.yaml: recipes.fnrr: recipe 'fnrr': method 'fnrr' is unknown (did you mean "
                "'fnr'?)"
            ),
        ),
        (
            ["--silos", "6"],
            (
                "params.yaml: deploy.silos = 6 is refused; allowed: 2 to 5, the clients of "
                "scenario "
                "'skewed'"
            ),
        ),
    ):
        assert main(["deploy", "loopback", *options]) == 2
        assert message in capsys.readouterr().err
    assert not Path("deploy").exists()
