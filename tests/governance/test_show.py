"""What `noniid methods show` prints of a recipe's messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
        "In each round train: 3 of 3 silos the server sends 40,016 bytes params/fc1.weight",
        "shared/scaffold/c/fc1.weight float32 [64, 64]: Line 4: c, beside x.",
        "deltas/fc1.weight float32 [64, 64]: update: the silo's parameters minus the received ones",
        "n int64 []: number of training samples; with local noise the study's max_samples",
        "fnr.refine: 1 of 3 silos the server sends 40 bytes each/fnr/delta float32 [1, 10]: Lines",
        "from round to round: scaffold/c_i/fc1.weight float32 [64, 64]: c_i = 0.",
        "Answer (seal, certificate, exchange, step, failed): What a silo says to a Task",
    ):
        assert words in out


def test_the_model_the_silos_and_the_settings_of_a_deployment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As JSON. Its own recipe has no say; its settings count for the methods that are shown."""
    made = world.deployment("fednova+scaffold", secure_sums=0)
    files = made.data_args.model_copy(update={"shard": str(tmp_path / "{rank}.safetensors")})
    shards.write(files.shard, world.parts())
    config = tmp_path / "fedml_config.yaml"
    config.write_text(made.model_copy(update={"data_args": files}).yaml())
    assert main(["methods", "show", "scaffold", "--config", str(config), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["recipe"], told["silos"], told["secure_sums"]) == ("scaffold", 3, 0)
    update = told["exchanges"][0]["turns"][0]["up"]["deltas/fc1.weight"]
    assert (update["form"], update["bytes"]) == ("float32 [8, 16]", 512)
    (tmp_path / "0.safetensors").unlink()
    assert main(["methods", "show", "scaffold", "--config", str(config)]) == 2
    assert "data_args.shard names the data file of rank 0" in capsys.readouterr().err
