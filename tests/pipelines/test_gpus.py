"""Stages on a machine with GPUs, with the answers that torch would give: what starts processes
touches no CUDA, and a GPU that torch can't use is told."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.yaml_files import read_yaml
from fedml_noniid.engines import device
from fedml_noniid.pipelines.experiment import config, provenance
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import evaluate, train
from fedml_noniid.pipelines.verbs import fits
from research import study
from research.studies import Study
from tests.engines.test_device import answers
from tests.pipelines.small import PARAMS, run_stages


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("prepared")
    text = PARAMS.partition("deploy:")[0].replace("device: cpu", "device: auto")
    (folder / "params.yaml").write_text(text)
    run_stages(folder, ["prepare", "partition"])
    return Workspace.from_environment(folder, {})


@pytest.fixture
def place(prepared: Workspace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield prepared
    device._gpus.cache_clear()


def test_parents_touch_no_cuda(place: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, started = answers(monkeypatch, ["H200", "H200"], None), []

    def start(work: Any, items: Any, processes: int, display: Any, on_gpu: bool) -> Iterator[Any]:
        pickle.dumps(work)
        started.append((processes, on_gpu, str(os.getpid()) in asked.read_text()))
        return iter(())

    fits.checked(place)
    settings = config.load(place.root)
    provenance.plan(settings)
    for stage in (train, evaluate):
        monkeypatch.setattr(stage, "side_by_side", start)
    train.train(place, settings, "small")
    evaluate.evaluated(place, settings, "small")
    assert started == [(2, True, False)] * 2 and asked.read_text()


def test_what_decides_about_a_gpus_bits_is_in_the_fingerprint(
    place: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = config.load(place.root)
    more = more.model_copy(
        update={"machine": more.machine.model_copy(update={"clients_at_once": 9})}
    )

    def kinds() -> list[dict[str, str]]:
        return [provenance.machine_kind(each) for each in (config.load(place.root), more)]

    monkeypatch.setattr(device, "gpus", device.Gpus)
    one, other = kinds()
    assert {**one, "clients_at_once": "9"} == other
    assert not one.keys() & {"driver", "cudnn", "determinism"}
    gpu = device.Gpus(["H200"], "580.65.06", 91900, "")
    monkeypatch.setattr(device, "gpus", lambda: gpu)
    one, other = kinds()
    assert one != other and {**one, "clients_at_once": "9"} == other
    for changed in ({"names": ["T4"]}, {"driver": "590.1"}, {"cudnn": 92000}):
        monkeypatch.setattr(device, "gpus", lambda changed=changed: gpu._replace(**changed))
        assert kinds()[0] != one


def test_a_gpu_that_torch_cannot_use_is_one_warning(
    place: Workspace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers(monkeypatch, [], RuntimeError("The driver is too old (found version 1). Update it"))
    monkeypatch.setattr(device, "_has_card", lambda: True)
    monkeypatch.setattr(train, "side_by_side", lambda *_: iter(()))
    settings = config.load(place.root)
    with caplog.at_level(logging.WARNING):
        train.train(place, settings, "small")
    said = "training runs on the CPU, as torch can't use the GPU: The driver is too old (found vers"
    assert [record.getMessage().startswith(said) for record in caplog.records] == [True]
    of_paper = Study("fnr", "one", "paper", "", read_yaml(place.root / "params.yaml"))
    with pytest.raises(UserError, match="fnr one: size paper needs the GPU, and torch can't use"):
        study.execute(place, of_paper)
