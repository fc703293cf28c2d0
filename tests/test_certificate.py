"""The contract's tests as a product: each check finds the mistake that it is for, and the
certificate says what holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedml_noniid.contract import checks, plugin
from fedml_noniid.contract.certificate import certificate
from fedml_noniid.contract.checks import NotTriedError
from fedml_noniid.contract.suite import CHECKS, Case
from fedml_noniid.core.errors import UserError
from fedml_noniid.plugins.registry import METHODS
from tests import own_package
from tests.recipe_table import PARAMETERS
from tests.test_contract import NEUTRAL

NAME = "stranger.fedx:FedX"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "stranger"]:
        del sys.modules[name]


HEAD = """\
import random
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedml_noniid.core.component import *
from fedml_noniid.core.component import Answer, Change, Component, Exclusive, Needs
from fedml_noniid.core.randomness import normal
from fedml_noniid.core.trees import scale, sub, tree_map, zeros_like

seen = []


@dataclass(frozen=True)
class FedX(Component):
    \"\"\"Has a mistake.\"\"\"

    name: ClassVar[str] = "fedx"
"""
# Mistake -> (the body of the class, the checks that find it, words of one of them).
MISTAKES = {
    "does nothing": ("    mu: float = 0.1\n", {"acts"}, "give FedAvg"),
    "keeps a count in its module": (
        """
    def gradient_term(self, w, client):
        return scale(0.1 * (len(seen) % 7 + 1), sub(w, client.params))

    def report(self, trace, client):
        seen.append(1)
        return Answer()
""",
        {"state", "parity-workers", "resume-sequential"},
        "a second run has other bits",
    ),
    "draws from a global generator": (
        """
    def gradient_term(self, w, client):
        return scale(random.random(), sub(w, client.params))
""",
        {"state", "parity-workers", "gradient_term"},
        "a second run has other bits",
    ),
    "mixes the clients in its gradient term": (
        """
    def gradient_term(self, w, client):
        return tree_map(lambda w, w_t: 0.1 * (w - w_t) / (1 + w.abs().sum()), w, client.params)
""",
        {"gradient_term", "parity-float64"},
        "",
    ),
    "goes by the numbers of the clients": (
        """
    weights: ClassVar[str] = "uniform"

    def weigh(self, server):
        return torch.tensor([1.0 + k for k in server.cohort])
""",
        {"numbering"},
        "not close",
    ),
    "declares a pass that it does not read": (
        """
    needs: ClassVar[Needs] = Needs(local_set=True)

    def gradient_term(self, w, client):
        return scale(0.1, sub(w, client.params))
""",
        {"needs"},
        "declares Needs(local_set=...) and reads nothing of it",
    ),
    "reads what it does not declare": (
        """
    def report(self, trace, client):
        return Answer({"z": client.local_set.mean(lambda batch: {"x": batch.x})["x"]})
""",
        {"acts", "needs", "wire"},
        "methods that declare Needs(local_set=True)",
    ),
    "steps without owning it": (
        """
    def step(self, server):
        return Change(params=scale(0.5, server.params))
""",
        {"acts", "needs", "neutral-sequential"},
        "changes the server step without owning it",
    ),
    "changes the received model": (
        """
    def gradient_term(self, w, client):
        return scale(0.1, sub(w, client.params))

    def report(self, trace, client):
        for leaf in client.params.values():
            leaf.mul_(0.5)
        return Answer()
""",
        {"inputs", "wire"},
        "changes in place",
    ),
    "changes the replies": (
        """
    needs: ClassVar[Needs] = Needs(replies=Replies.MODELS)

    def step(self, server):
        for leaf in server.replies.deltas.values():
            leaf.data.mul_(0.5)  # torch does not count it
        return Change()

    def gradient_term(self, w, client):
        return scale(0.1, sub(w, client.params))
""",
        {"inputs"},
        "reply: deltas",
    ),
    "is not neutral where it says so": (
        """
    mu: float = 0.1

    def gradient_term(self, w, client):
        return scale(self.mu + 1e-3, sub(w, client.params))
""",
        {"neutral-sequential", "neutral-vectorized"},
        "not FedAvg's bits",
    ),
    "goes by its own name": (
        """
    def gradient_term(self, w, client):
        return scale(0.1 * len(self.name), sub(w, client.params))
""",
        {"with-scaffold", "with-ccn"},
        "sequential: ",
    ),
    "has a factor for each number": (
        """
    def update_factor(self, client):
        return {name: torch.full_like(w, 0.5) for name, w in client.params.items()}
""",
        {"update_factor"},
        "fc1.weight: [5, 6]",
    ),
    "sends what its ranges refuse": (
        """
    needs: ClassVar[Needs] = Needs(loss=True)
    ranges: ClassVar[dict] = {"z": Range(0, 1)}

    def gradient_term(self, w, client):
        return scale(0.1, sub(w, client.params))

    def report(self, trace, client):
        return Answer({"z": -trace.loss})
""",
        {"wire", "silos-pair"},
        "z",
    ),
    "draws for clients, by their numbers": (
        """
    def prepare(self, client):
        z = normal(client.key, 1)[0]
        return {"z": tree_map(lambda leaf: z.to(leaf.dtype).expand(leaf.shape), client.params)}

    def gradient_term(self, w, client):
        return tree_map(torch.mul, client.prepared["z"], sub(w, client.params))
""",
        {"numbering"},
        "draws random numbers, which go by the client",
    ),
    "keeps state of another shape": (
        """
    def init_server(self, server):
        return {"n": torch.zeros(1)}

    def step(self, server):
        return Change({"n": torch.cat([server.state["n"], server.state["n"]])})

    def gradient_term(self, w, client):
        return scale(0.1, sub(w, client.params))
""",
        {"state"},
        "tensors with the names, shapes and dtypes of the server's",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_check_finds_its_mistake(place: Path, mistake: str) -> None:
    """By the checks that are for it, and by none other than it must be."""
    body, finders, words = MISTAKES[mistake]
    own_package.write(place, "stranger", HEAD + body)
    case = Case(NAME, {}, {"mu": 0.0} if "mu:" in body else {})
    found = {}
    for name in finders:
        if name.startswith(("wire", "silos")):
            pytest.importorskip("fedml", reason="silos need [silo]")
        with pytest.raises((AssertionError, UserError, NotTriedError)) as error:
            CHECKS[name].run(case)
        found[name] = str(error.value)
    assert any(words in text for text in found.values()), found


def test_a_sound_method_holds_and_the_rest_says_why(place: Path) -> None:
    own_package.write(place, "stranger")
    case, results = Case(NAME, {"mu": 0.3}), {}
    for name in ("entry", "acts", "needs", "neutral-sequential", "update_factor", "with-fedprox"):
        try:
            CHECKS[name].run(case)
            results[name] = "passed", ""
        except NotTriedError as why:
            results[name] = "skipped", str(why)
    lines = certificate(NAME, results, ["mu=0"]).splitlines()
    assert lines[0] == "Certificate of fedx (stranger.fedx.FedX)"
    assert "holds (3):" in lines and "was not tried (3):" in lines
    assert "    no neutral hyper-parameters are given, such as --neutral mu=0" in lines
    assert "    it has no update_factor" in lines
    assert "    refused, with both names and the reason" in lines
    assert lines[-1].startswith("left out: state, inputs")
    CHECKS["neutral-sequential"].run(Case(NAME, {"mu": 0.3}, {"mu": 0.0}))


@pytest.mark.slow  # 10 seconds for each method
@pytest.mark.parametrize("method", sorted(METHODS))
def test_our_own_methods_are_certified(method: str) -> None:
    """With the hyper-parameters of the table of recipes, by all checks that can be tried."""
    pytest.importorskip("yaml", reason="of the extra [silo]")
    case, not_tried = Case(method, PARAMETERS.get(method, {}), NEUTRAL.get(method)), set[str]()
    for name, check in CHECKS.items():
        try:
            check.run(case)
        except NotTriedError:
            not_tried.add(name)
    # Without clients there are no silos, no wire and no batches of clients to try.
    assert method == "centralised" or len(not_tried) < len(CHECKS) / 2
    assert not_tried.isdisjoint({"entry", "acts", "state", "draws", "needs", "parity-float64"})


def test_an_order_that_matters_is_found(place: Path) -> None:
    """Of two methods that share something outside of their states."""
    body = """
    def broadcast(self, server):
        seen.append(self.name)
        return {}

    def gradient_term(self, w, client):
        return scale(0.1 if seen[-1] == self.name else 0.2, sub(w, client.params))


@dataclass(frozen=True)
class FedW(FedX):
    name: ClassVar[str] = "fedw"

    def gradient_term(self, w, client):
        return None
"""
    own_package.write(place, "stranger", HEAD + body)
    recipe = "stranger.fedx.FedX+stranger.fedx.FedW"
    with pytest.raises(AssertionError):
        checks.order_decides_about_rounding_only(recipe, {}, "sequential")


def test_hyper_parameters_of_the_command_line() -> None:
    given = ["mu=0.5", "n=3", "form=soft", "flag=true", "norm=none"]
    wanted = {"mu": 0.5, "n": 3, "form": "soft", "flag": True, "norm": "none"}
    assert plugin.values("--settings", given) == wanted
    with pytest.raises(pytest.UsageError, match="--neutral mu: allowed: key=value"):
        plugin.values("--neutral", ["mu"])


@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        ("krum", {"f": 1}, "'krum': f = 1, m = 1 of 3 clients"),
        ("fedbuff", {}, "'fedbuff' is for simulations"),
    ],
)
def test_silos_are_not_tried_with_a_method_that_refuses_three_of_them(
    method: str, settings: dict[str, object], why: str
) -> None:
    pytest.importorskip("yaml", reason="of the extra [silo]")
    for name in ("wire", "silos-pair"):
        with pytest.raises(NotTriedError, match=why):
            CHECKS[name].run(Case(method, settings))
