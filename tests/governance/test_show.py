"""What `noniid methods show` prints of a recipe's messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedml_noniid import extras
from fedml_noniid.cli.app import main
from fedml_noniid.data import shards
from tests.deploy import world


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What is printed, with single spaces."""
    assert main(["methods", "show", *map(str, words)]) == 0
    said = capsys.readouterr()
    assert said.err == "" and max(map(len, said.out.splitlines())) <= 118
    return " ".join(said.out.split())


def test_a_recipe_shows_what_leaves_what_comes_and_what_stays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(capsys, "fnr+scaffold")
    assert out.startswith("fnr+scaffold: composes")
    for words in (
        "Secure sums are refused: recipe 'fnr+scaffold' can't run",
        "In each round train: 3 of 3 silos the server sends 40,016 bytes params/*:",
        "shared/scaffold/c/*: Line 4: c, beside x. fc1.weight float32 [64, 64],",
        "deltas/*: update: the silo's parameters minus the received ones",
        "n int64 []: number of training samples; with local noise the study's max_samples",
        "fnr.refine: 1 of 3 silos the server sends 40 bytes each/fnr/delta float32 [1, 10]: Lines",
        "from round to round: scaffold/c_i/*: c_i = 0.",
        "Answer (seal, certificate, exchange, step, failed): What a silo says to a Task",
    ):
        assert words in out


def test_secure_sums(capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe that needs sums shows what is hidden, another one what the server would see."""
    out = shown(capsys, "scaffold", "--secure-sums", 4)
    assert "Messages of one silo, with sums over 4 silos or more. Shapes: of mlp, 4 silos." in out
    assert "sum int64 [L]: all tensors that are added up, masked" in out
    before, _, hidden = out.partition("the server sees only the sum over silos of 40,016 bytes")
    assert "deltas/" in hidden and "deltas/" not in before.partition("the silo sends")[2]
    out = shown(capsys, "fnr", "--secure-sums", 4)
    assert "Secure sums are refused: recipe 'fnr' can't run" in out and "deltas/*: update" in out
    assert main(["methods", "show", "scaffold", "--secure-sums", "1"]) == 2
    assert "train_args.secure_sums = 1" in capsys.readouterr().err


def test_a_recipe_for_simulations_says_why_nothing_is_sent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "No deployment: 'centralised' is for simulations and" in shown(capsys, "centralised")
    assert main(["methods", "show", "centralised", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_the_model_the_silos_and_the_settings_of_a_deployment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As JSON. Its own recipe has no say; its settings count for the methods that are shown."""
    made = world.deployment("fednova+scaffold", secure_sums=0)
    files = {"shard": str(tmp_path / "{rank}.safetensors")}
    made = made.model_copy(update={"data_args": made.data_args.model_copy(update=files)})
    shards.write(files["shard"], world.parts())
    config = tmp_path / "fedml_config.yaml"
    config.write_text(made.yaml())
    assert main(["methods", "show", "scaffold", "--config", str(config), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["recipe"], told["silos"], told["secure_sums"]) == ("scaffold", 3, 0)
    (exchange,) = told["exchanges"]
    assert exchange["turns"][0]["up"]["deltas/fc1.weight"] == {
        "form": "float32 [8, 16]",
        "bytes": 512,
        "what": "update: the silo's parameters minus the received ones",
    }
    (tmp_path / "0.safetensors").unlink()
    assert main(["methods", "show", "scaffold", "--config", str(config)]) == 2
    assert "data_args.shard names the data file of rank 0" in capsys.readouterr().err


def test_without_the_packages_of_deployments_the_method_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    out = shown(capsys, "fedprox")
    assert out.startswith("fedprox: ") and "mu = 0.01" in out
    assert out.endswith("pip install 'fedml-noniid[silo]'")
