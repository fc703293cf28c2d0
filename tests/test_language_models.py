"""Fine-tuning of frozen networks and language models: runs, memory, and the page about it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

import fedml_noniid as nd
from fedml_noniid.contract.checks import close
from fedml_noniid.core.errors import UserError
from fedml_noniid.losses import Regression

ROOT = Path(__file__).parents[1]
V, T, N = 12, 8, 90


class Adapted(nn.Module):
    """Predicts a token from the one before; trained is the adapter B A."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(first)
        self.embed, self.body = nn.Embedding(V, 16), nn.Linear(16, V)
        for leaf in self.parameters():
            leaf.data = torch.randn(leaf.shape, generator=generator)
            leaf.requires_grad_(requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(4, 16) / 4), nn.Parameter(torch.zeros(V, 4))

    def forward(self, ids: Tensor) -> Tensor:  # [B, T] -> [B, T, V]
        h = self.embed(ids)
        logits: Tensor = self.body(h) + h @ self.a.T @ self.b.T
        return logits


def counting() -> nd.Data:
    """Sequences that count by the step of their owner; the first two tokens are a prompt."""
    rng = np.random.default_rng(0)
    owner = np.arange(N) % 3
    ids = (rng.integers(0, V, N)[:, None] + (1 + owner // 2)[:, None] * np.arange(T)) % V
    labels = ids.astype(np.float32)
    labels[:, :2] = -100
    return nd.from_arrays({"ids": ids}, labels, owner=owner)


HOW: dict[str, Any] = {"partition": "natural", "clients": 3, "loss": "next_token", "rounds": 4}
HOW |= {"lr": 0.5, "batch_size": 8, "progress": False}


def run(recipe: str = "fedavg", data: nd.Data | None = None, **more: Any) -> nd.Result:
    return nd.run(recipe, counting() if data is None else data, **{"model": Adapted} | HOW | more)


def test_a_language_model_learns_alike_in_all_engines() -> None:
    one, two, beside = (
        run("scaffold", **how)
        for how in ({"engine": "sequential"}, {"processes": 2}, {"engine": "vectorized"})
    )
    assert one.sha256 == two.sha256
    close(beside.weights[0], one.weights[0], 1e-4)
    last = one.rounds.iloc[-1]
    assert last["test_token_accuracy"] > one.rounds["test_token_accuracy"].iloc[0] + 0.1
    assert 1 < last["test_perplexity"] < one.rounds["test_perplexity"].iloc[0] < V * V
    assert one.classes[["target", "samples"]].to_numpy().tolist() == [["all", 18]]
    assert one.predict({"ids": np.zeros((2, T), int)}).shape == (2, T)
    assert "token accuracy" in repr(one)


class Together(Regression):
    """Scores a row as a whole."""

    def statistics(self, predictions: Tensor, y: Tensor) -> Tensor:
        return super().statistics(predictions[:, [0]] + predictions[:, [1]], y[:, :1])

    def values(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - y).square().sum(-1)


def test_a_loss_that_can_not_score_single_targets_is_refused_before_training() -> None:
    x = np.random.default_rng(0).normal(size=(60, 3))
    with pytest.raises(nd.UserError, match=r"Together can't score a single target.*per_target"):
        run(data=nd.from_arrays(x, x[:, :2]), model="mlp", loss=Together, partition="iid")


@pytest.mark.parametrize("recipe", ["fedavg", "fedexp", "ditto"])
def test_what_was_trained_is_saved_alone_and_completed_from_the_base(
    recipe: str, tmp_path: Path
) -> None:
    whole, saved = run(recipe), run(recipe, save="trained", folder=tmp_path)
    assert whole.sha256 == saved.sha256
    sizes = [len(one.files[0].run["model.safetensors"]) for one in (whole, saved)]
    n, base = 16 * 4 + V * 4, V * 16 + V * 16 + V  # numbers that are trained, and others
    copies = {"fedavg": 1, "fedexp": 2, "ditto": 4}[recipe]  # of the trained ones
    assert 4 * copies * n < sizes[1] < 4 * (copies * n + base) < sizes[0]
    (again,) = nd.results(tmp_path, counting())
    x = {"ids": np.arange(2 * T).reshape(2, T) % V}
    for name, leaf in whole.weights[0].items():
        assert torch.equal(again.weights[0][name], leaf)
    client = 1 if recipe == "ditto" else None
    assert (again.predict(x, client=client) == whole.predict(x, client=client)).all()


def test_another_base_than_that_of_the_run_is_refused() -> None:
    module = Adapted()
    saved = run(model=module, save="trained")
    before = module.body.weight.clone()
    tuned = saved.model()
    with torch.no_grad():
        for leaf in tuned.parameters():
            leaf.add_(1)
    assert torch.equal(module.body.weight, before), "the predictor has copies"
    module.body.weight.data += 1
    with pytest.raises(nd.UserError, match=r"the 3 frozen parameters .*body.bias.* not those of"):
        saved.model()


class Merging(Adapted):
    """Puts the adapter into the frozen weight when it is evaluated."""

    def forward(self, ids: Tensor) -> Tensor:
        self.body.weight.data += not self.training
        return super().forward(ids)


def test_a_network_that_changes_what_is_frozen_is_refused() -> None:
    with pytest.raises(UserError, match=r"its forward changes body\.weight"):
        run(model=Merging)


HALF_A_BILLION = """
from pathlib import Path
import numpy as np, torch
from torch import nn
import fedml_noniid as nd

class Lora(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(4, width)), nn.Parameter(torch.zeros(width, 4))

    def forward(self, x):
        return torch.relu(x @ self.weight.T + x @ self.a.T @ self.b.T)

torch.set_num_threads(1)
width, layers = 4096, 30
net = nn.Sequential(*(Lora(width) for _ in range(layers)), nn.Linear(width, 2))
frozen = sum(leaf.nbytes for leaf in net.parameters() if not leaf.requires_grad)
x = np.random.default_rng(0).normal(size=(10, width))
data = nd.from_arrays(x, np.arange(10) % 2)
how = {"partition": "iid", "clients": 1, "rounds": 1, "epochs": 1, "engine": "sequential"}
nd.run("fedavg", data, model=net, save="trained", progress=False, **how)
most = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print(frozen, 1024 * int(most))
"""


@pytest.mark.slow
@pytest.mark.skipif(psutil.virtual_memory().available < 8e9, reason="needs 8 GB of free memory")
def test_half_a_billion_frozen_parameters_lie_in_memory_once() -> None:
    """2 GB; the process without them takes less than 1 GB."""
    ended = subprocess.run(
        [sys.executable, "-c", HALF_A_BILLION],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    frozen, most = map(int, ended.stdout.split())
    assert frozen > 2e9 and most < 1.5 * frozen < 6e9


PAGE = (ROOT / "docs" / "fine_tuning.md").read_text()
CODE = re.findall(r"^```(?:python|sh)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
# What the page says of its runs, measured.
MEASURED = """
import json

tested = data.dataset.test_x.long(), data.dataset.test_y.long()
theirs = back.eval().net(input_ids=tested[0], labels=tested[1]).loss
own = [c for c in nd.run("fedavg", split, rounds=1, **how).weights[0] if "lora_" in c]
first = Lora().state_dict()
print(json.dumps({
    "accuracy": fedavg.rounds.test_token_accuracy.tolist(),
    "perplexity": [float(theirs.exp()), float(fedavg.metrics.perplexity[0])],
    "bytes": [int(one.rounds.bytes_up.iloc[0]) for one in (fedavg, scaffold, ffa, fedsa)],
    "trained": [sum(4 * first[c].numel() for c in own if part in c) for part in "AB"],
    "merged": float((merged.eval()(tested[0]).logits - fedavg.model()(tested[0])).abs().max()),
    "saved": len(fedavg.files[0].run["model.safetensors"]),
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # half a dozen runs, and five processes that import transformers
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("peft", "transformers"))),
    reason="needs transformers and peft, of the extra dev",
)
def test_the_page_runs_and_says_what_is_measured(tmp_path: Path) -> None:
    module, program, tokens, shell = CODE
    (tmp_path / "lm.py").write_text(module)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "HF_HUB_OFFLINE": "1"}

    def ran(*command: str) -> str:
        ended = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    said = ran("-W", "ignore", "-c", program + tokens + MEASURED)
    (line,) = re.findall(r'^\{"accuracy.*', said, flags=re.MULTILINE)
    measured = json.loads(line)
    assert measured["accuracy"][-1] > measured["accuracy"][0] > 1 / 60
    theirs, ours = measured["perplexity"]
    assert ours == pytest.approx(theirs, rel=1e-5)
    a, b = measured["trained"]
    assert measured["bytes"] == [4 * (a + b), 8 * (a + b), 4 * b, 4 * a]
    assert measured["merged"] < 1e-4 and a + b < measured["saved"] < a + b + 4_000

    for command in shell.replace("\\\n", "").splitlines():
        said = ran("-W", "ignore", "-m", "fedml_noniid", *shlex.split(command)[1:])
    assert "the same weights" in said
