"""Settings of methods that the ranges of their options cannot refuse, and pairs that do not
compose."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from fedml_noniid.core.component import Setting
from fedml_noniid.core.options import RecipeError
from fedml_noniid.plugins import registry
from tests.methods import by_hand as hand

SETTING = Setting(3, 3, "sgd", hand.LR, n_public=4)
SERVER, CORRECTION = "server step", "can't be combined"
FAMILY = ("rfedavg", "rfedavg_plus")
CLASHES: dict[str, tuple[str, ...]] = {
    "both own the proximal term": ("fedprox+fednova", "fedprox+feddyn", "fedprox+feddc"),
    SERVER: (
        *(f"fedadam+{other}" for other in ("fednnnn", "feddyn", "feddc", "sgdm_server", "fedyogi")),
        *(f"fedexp+{other}" for other in ("fedadam", "fednnnn", "feddyn", "feddc", "fedavgm")),
        "fednnnn+sgdm_server",
        "fedavgm+sgdm_server",
        "feddyn+sgdm_server",
    ),
    CORRECTION: (
        *(f"feddc+{other}" for other in ("scaffold", "feddyn", "fednnnn", "fednova")),
        *(f"feddyn+{other}" for other in ("scaffold", "fednnnn", "fednova")),
        *(f"fednova+{other}" for other in ("qfedavg", "sgdm")),
        *(f"fedcm+{other}" for other in ("scaffold", "feddyn", "feddc")),
    ),
    "both own the local optimiser": (
        "sgdm+sgdm_local",
        "feddyn_authors+sgdm_local",
        "fedcm+sgdm",
        *(f"{method}+sgdm_local" for method in ("fedcm", "feddc", "scaffold")),
    ),
    "both own the point of the gradient": ("fedsam+fedlesam",),
    "logits of the local loss": ("fedlc+fedrs",),
    "classifier": ("ccvr+fedbabu",),
    "'fed3r' takes no local step": ("fed3r+scaffold", "fed3r+linear_probe"),
    "leave the shared part as it is": tuple(
        f"fedrep+{other}" for other in ("scaffold", "feddc", "fedcm", "fednova")
    ),
    "nothing would be averaged": ("fedbabu+linear_probe", "fedper+linear_probe"),
    "training on the server": ("feddf+fedftg", "fsl+feddf"),
    "feature distribution regulariser": ("+".join(FAMILY),),
    "keeps the batch norms on the clients": tuple(
        f"{other}+fedbn" for other in ("fnr", "feddf", "fedftg", "fsl")
    ),
    "keeps the classifier on the clients, and .* whole models": tuple(
        f"{other}+{kept}"
        for other in ("fnr", "feddf", "fedftg", "fsl")
        for kept in ("fedper", "fedrep")
    ),
    "keeps the classifier on the clients, and .* one that all share": tuple(
        f"{other}+fedper" for other in ("fedbabu", "fedrs", "fedgen", "ccvr")
    ),
    "a client is tested with one": (
        *(f"{kept}+{own}" for kept in ("fedbn", "fedper") for own in ("ditto", "apfl", "fedrod")),
        *map("+".join, combinations(("ditto", "apfl", "fedala", "fedrod", "finetune"), 2)),
    ),
    "averages no model": tuple(
        f"{other}+fedproto" for other in ("fedprox", "fedavgm", "fedbn", "ditto", "fedlc")
    ),
    "no clients": tuple(
        f"{other}+centralised" for other in ("fedprox", "fnr", "datasharing", "scaffold")
    ),
}


@pytest.mark.parametrize("method", ["scaffold", "fedcm"])
def test_a_step_size_of_the_server_is_a_server_step(method: str) -> None:
    """With their defaults SCAFFOLD and FedCM leave the step to others."""
    for other in ("fednnnn", "sgdm_server"):
        registry.build(f"{method}+{other}", {}, SETTING)
        with pytest.raises(RecipeError, match=SERVER):
            registry.build(f"{method}+{other}", {method: {"server_lr": 0.5}}, SETTING)


LOCAL: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    *(
        (method, {}, given, rf"{method}: .*{value}.*allowed: sgd without momentum")
        for method in ("feddc", "scaffold", "fedcm")
        for given in ({"optimizer": "adam"}, {"optimizer": "rmsprop"}, {"momentum": 0.5})
        for value in given.values()
    ),
    ("fednova", {"mu": 0.1}, {"optimizer": "adam"}, "fednova: mu = 0.1 .*'adam'.* sgd"),
    ("fednova", {"mu": 1 / hand.LR}, {}, "fednova: mu = 2.0 .* below 1 / lr = 2.0"),
    *(
        (form, {"gamma": 0.7}, options, f"{form}: .*{words}")
        for form in ("sgdm", "sgdm_local")
        for options, words in (
            ({"optimizer": "adam"}, "optimizer = 'adam'"),
            ({"optimizer": "rmsprop"}, "optimizer = 'rmsprop'"),
            ({"momentum": 0.5}, "momentum = 0.5 and .*gamma = 0.7"),
        )
    ),
]


@pytest.mark.parametrize(("method", "settings", "local", "words"), LOCAL)
def test_local_training_that_a_method_cannot_use(
    method: str, settings: dict[str, Any], local: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        hand.run(method, {method: settings}, **local)


@pytest.mark.parametrize(
    ("method", "settings", "local"),
    [
        *((form, {"gamma": 0.7}, {"momentum": 0.7}) for form in ("sgdm", "sgdm_local")),
        *(("sgdm_server", {}, of) for of in ({"momentum": 0.5}, {"optimizer": "adam"})),
        ("qfedavg", {}, {"optimizer": "rmsprop", "lr": 0.01}),  # rFedAvg's on Sent140
    ],
)
def test_local_training_that_a_method_can_use(
    method: str, settings: dict[str, Any], local: dict[str, Any]
) -> None:
    hand.run(method, {method: settings}, rounds=1, **local)


DP = {"dp": "paper", "clip": 1.0}
OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    *(
        (method, options, words)
        for method in FAMILY
        for options, words in (
            ({"dp": "paper", "sigma": 1.0}, "clip = 0.0 must be above 0 .*_delta_norm_median"),
            ({"sigma": 1.0}, "dp = 'none'"),
            ({"clip": 1.0}, "dp = 'none'"),
        )
    ),
    *((method, {"dp": "repo"}, "dp = 'repo' is unknown") for method in FAMILY[:2]),
    *(
        ("fednlr", {"mu": mu}, "mu = .* must be layer=number")
        for mu in ("fc1", "fc1=", "=2", "fc1=two", "fc1 = 2", "fc1=2,conv1=3")
    ),
    *(
        ("fednlr", {"mu": mu}, "mu = .* must be layer=number")
        for mu in ("fc1=0.5", "fc1=nan", "fc1=inf")
    ),
    ("fednlr", {"mu": "fc1=2 fc1=3"}, "mu = 'fc1=2 fc1=3' names a layer twice"),
]


PUBLIC = "needs a public split, but public is 0"
SETTINGS: list[tuple[str, dict[str, Any], Setting, str]] = [
    *(
        (recipe, {}, Setting(3, 3), f"{recipe}: {PUBLIC}")
        for recipe in ("datasharing", "feddf", "fsl")
    ),
    *((method, {}, Setting(1, 1), f"^{method}: .*at least 2, got 1") for method in FAMILY),
    *(
        (method, DP, Setting(3, 3, deployed=True), f"{method}: the noise .* the run's seed")
        for method in FAMILY
    ),
]


@pytest.mark.parametrize(
    ("recipe", "settings", "setting", "words"),
    [
        *((recipe, {}, SETTING, words) for words, of in CLASHES.items() for recipe in of),
        *((name, {name: of}, SETTING, f"{name}.*{words}") for name, of, words in OPTIONS),
        *((name, {name: of}, setting, words) for name, of, setting, words in SETTINGS),
    ],
)
def test_what_does_not_compose(
    recipe: str, settings: dict[str, Any], setting: Setting, words: str
) -> None:
    """Methods, options of one, and options in a federation."""
    with pytest.raises(RecipeError, match=words):
        registry.build(recipe, settings, setting)


@pytest.mark.parametrize(
    ("recipe", "settings", "setting"),
    [
        # no clip, no optimiser
        ("feddyn_authors+sgdm_local", {"feddyn_authors": {"clip": 0.0}}, SETTING),
        *(
            (recipe, {}, SETTING)
            for recipe in (
                *("sgdm+sgdm_server", "fednnnn+sgdm_local", "scaffold_i+sgdm_local"),
                *("fedrep+scaffold_i", "centralised"),
            )
        ),
        *(
            (f"fed3r+{other}", {"fed3r": {"fine_tune": True}}, SETTING)
            for other in ("scaffold", "linear_probe", "fnr")
        ),
        *((method, {}, Setting(3, 3, deployed=True)) for method in FAMILY),
        *((method, {method: DP}, Setting(3, 3)) for method in FAMILY),
        *((method, {}, Setting(3, 1)) for method in FAMILY),
    ],
)
def test_what_composes(recipe: str, settings: dict[str, Any], setting: Setting) -> None:
    registry.build(recipe, settings, setting)
