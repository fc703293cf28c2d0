"""The callbacks for TensorBoard and Weights & Biases write what rounds.csv has, on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fedml_noniid as nd
from fedml_noniid import extras
from tests.pipelines.small import ROOT

SPLIT = {"partition": "iid", "clients": 3, "rounds": 3, "seeds": [5], "progress": False}
# In a process of its own, as wandb leaves threads and processes behind.
WANDB = """
import json, sys, warnings
warnings.simplefilter("ignore")
import fedml_noniid as nd
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore
from pathlib import Path

folder, how = Path(sys.argv[1]), json.loads(sys.argv[2])
callbacks = {"wandb": {"folder": str(folder)}}
result = nd.run("fedavg", nd.load("digits"), callbacks=callbacks, **how)
(path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
store, rows = DataStore(), []
store.open_for_scan(str(path))
while (data := store.scan_data()) is not None:
    (record := Record()).ParseFromString(data)
    if record.WhichOneof("record_type") == "history":
        row = {item.key: json.loads(item.value_json) for item in record.history.item}
        rows.append((row["round"], row["test_accuracy"]))
assert rows == list(zip(result.rounds["round"], result.rounds["test_accuracy"])), rows
print("the same numbers")
"""


def test_tensorboard_has_each_number_of_each_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="of the extra [tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data, callbacks = nd.load("digits"), {"tensorboard": {"folder": str(tmp_path)}}
    result = nd.run("fednova", data, **SPLIT, callbacks=callbacks)
    assert result.sha256 == nd.run("fednova", data, **SPLIT).sha256
    (folder,) = tmp_path.glob("fednova-5-*")
    events, rounds = EventAccumulator(str(folder)), result.rounds.dropna(axis=1)
    events.Reload()
    assert set(events.Tags()["scalars"]) == {*rounds} - {"seed"}
    shown = [(event.step, event.value) for event in events.Scalars("test_accuracy")]
    accuracy = rounds["test_accuracy"].astype("float32")
    assert shown == [*zip(rounds["round"], accuracy, strict=True)]


@pytest.mark.slow
def test_wandb_has_them_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="of the extra [wandb]")
    command = [sys.executable, "-c", WANDB, str(tmp_path), json.dumps(SPLIT)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "the same numbers" in ended.stdout, ended.stderr


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_named_before_round_1(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    with pytest.raises(nd.UserError, match=rf"pip install 'fedml-noniid\[{name}\]'"):
        nd.run("fedavg", nd.load("digits"), **SPLIT, callbacks={name: {}})
