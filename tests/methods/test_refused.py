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
from tests.recipe_table import CHOOSING, UNSOUND

SETTING = Setting(3, 3, "sgd", hand.LR, n_public=4)
SERVER, CORRECTION = "server step", "can't be combined"
FAMILY = ("rfedavg", "rfedavg_plus")
OF_ONE_MODEL, WITHOUT_NOISE = (
    "what belongs to one model",
    "without that noise|needs a batch together",
)
# What is said -> the pairs, in both orders. The names of both stand in the message.
CLASHES: dict[str, tuple[str, ...]] = {
    "both own the proximal term": ("fedprox+fednova", "fedprox+feddyn", "fedprox+feddc"),
    SERVER: (
        *(f"fedadam+{other}" for other in ("fednnnn", "feddyn", "feddc", "sgdm_server", "fedyogi")),
        *(f"fedexp+{other}" for other in ("fedadam", "fednnnn", "feddyn", "feddc", "fedavgm")),
        *(f"sgdm_server+{other}" for other in ("fednnnn", "fedavgm", "feddyn")),
    ),
    CORRECTION: (
        *(f"feddc+{other}" for other in ("scaffold", "feddyn", "fednnnn", "fednova")),
        *(f"feddyn+{other}" for other in ("scaffold", "fednnnn", "fednova")),
        *(f"fednova+{other}" for other in ("qfedavg", "sgdm")),
        *(f"fedcm+{other}" for other in ("scaffold", "feddyn", "feddc")),
        *(f"fedrod+{other}" for other in ("fedrs", "fedlc", "fedbabu", "ccvr", "fedper", "fedbn")),
        *(f"topk+{other}" for other in ("fnr", "dpfedavg", "centred_clipping", "qsgd")),
    ),
    "both own the local optimiser": (
        "sgdm+sgdm_local",
        "feddyn_authors+sgdm_local",
        "fedcm+sgdm",
        *(f"{method}+sgdm_local" for method in ("fedcm", "feddc", "scaffold")),
    ),
    "both own the point of the gradient": ("fedsam+fedlesam",),
    "both own the clients' weights": ("median+ccn",),
    "both own the clients' average": ("median+fednova", "fedbuff+fednova"),
    "both own the refinement": ("bucketing+fnr",),
    "both own the cohort, and each chooses the clients": ("oort+powd",),
    "logits of the local loss": ("fedlc+fedrs",),
    "classifier": ("ccvr+fedbabu",),
    "takes no local step": ("fed3r+scaffold", "fed3r+linear_probe", "fed3r+fedproto"),
    "leave the shared part as it is": tuple(
        f"fedrep+{other}" for other in ("scaffold", "feddc", "fedcm", "fednova")
    ),
    "starts local training elsewhere": tuple(
        f"fedala+{other}" for other in ("scaffold", "fednova", "feddyn", "feddc", "fedcm")
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
    OF_ONE_MODEL: ("fedbuff+scaffold", "fedbuff+rfedavg_plus", "ifca+scaffold"),
    "adds their updates to one": ("fedbuff+fnr", "fedbuff+feddf", "cfl+fnr"),
    "asks them about one": ("ifca+ccvr",),
    "no client has it": ("ifca+fedadam",),
    WITHOUT_NOISE: tuple(
        f"dpsgd+{other}"
        for other in (
            *("ccn", "qfedavg", "fedsam", "ditto", "scaffold_i", "rfedavg_plus", "feddecorr"),
            *("fedrs", "rpowd"),
        )
    ),
    "more of a client than its bounded update": tuple(
        f"dpfedavg+{other}"
        for other in ("ccvr", "rfedavg_plus", "fnr", "ccn", "qfedavg", "centred_clipping", "oort")
    ),
    "dpfedavg": ("dpfedavg+fednova", "dpfedavg+fedexp"),
}


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        *((pair, words) for words, pairs in CLASHES.items() for pair in pairs),
        *UNSOUND.items(),
    ],
)
def test_a_pair_that_is_refused_names_both_and_the_reason(pair: str, words: str) -> None:
    a, b = pair.split("+")
    for recipe in (pair, f"{b}+{a}"):
        with pytest.raises(RecipeError, match=rf"^(?=.*'{a}')(?=.*'{b}').*({words})"):
            registry.build(recipe, {}, Setting(9, 6, "sgd", hand.LR, n_public=15))


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
SILOS, SIX = Setting(3, 3, deployed=True), Setting(6, 6, n_public=15)
CLIPPED = {"clip": 1.0, "noise": 0.0}
# (method, its options, the federation, what is said)
SETTINGS: list[tuple[str, dict[str, Any], Setting, str]] = [
    *(
        (recipe, {}, Setting(3, 3), f"{recipe}: {PUBLIC}")
        for recipe in ("datasharing", "feddf", "fsl")
    ),
    *((method, {}, Setting(1, 1), f"^{method}: .*at least 2, got 1") for method in FAMILY),
    *((method, DP, SILOS, f"{method}: the noise .* the run's seed") for method in FAMILY),
    *((method, {}, SILOS, f"'{method}' is for simulations") for method in ("fedbuff", "fedasync")),
    ("centralised", {}, SILOS, "may not leave their silos"),
    ("tests.leaking:Peek", {}, SILOS, "trains on the test set"),
    *((method, {"d": 3} if method != "oort" else {}, SILOS, "fewer silos") for method in CHOOSING),
    ("powd", {"d": 3}, Setting(6, 4), "d = 3 candidates for a cohort of 4 of 6 clients"),
    ("rpowd", {"d": 7}, Setting(6, 4), "d = 7 candidates"),
    ("dpfedavg", {}, Setting(6, 4, norms=True), "dpfedavg: the network has batch norms"),
    ("dpfedavg", {}, SILOS, "the server's noise comes from random_seed, which every silo"),
    ("dpfedavg", {"clip": 0.0}, SIX, "is a multiple of clip, and clip = 0 is no limit"),
    (
        "dpsgd",
        {"clip": 0.0, "noise": 1.0},
        SIX,
        r"noise = 1\.0 is a multiple of clip, and clip = 0",
    ),
    ("dpsgd", CLIPPED, Setting(6, 4, no_sample_gradients="it mixes"), "and it mixes; allowed"),
    ("krum", {"f": 4}, SIX, "f of at most the clients .or buckets. in a round - 3"),
    ("krum", {"f": 1, "m": 6}, SIX, "m of at most these - f"),
    ("krum", {}, Setting(3, 3), "'krum': f = 1, m = 1 of 3 clients"),
    ("trimmed_mean", {}, Setting(4, 4), "trims nobody"),
    ("bucketing", {"s": 6}, SIX, "into one bucket"),
]


@pytest.mark.parametrize(
    ("method", "options", "setting", "words"),
    [
        *((method, options, SETTING, f"{method}.*{words}") for method, options, words in OPTIONS),
        *SETTINGS,
    ],
)
def test_what_a_method_can_not_be(
    method: str, options: dict[str, Any], setting: Setting, words: str
) -> None:
    """Options of one method, and options in a federation."""
    with pytest.raises(RecipeError, match=words):
        registry.build(method, {method: options} if options else {}, setting)


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
        *((method, {}, SILOS) for method in FAMILY),
        ("dpsgd", {"dpsgd": {"clip": 0.0, "noise": 0.0}}, Setting(6, 4, no_sample_gradients="no")),
        *((method, {method: DP}, Setting(3, 3)) for method in FAMILY),
        *((method, {}, Setting(3, 1)) for method in FAMILY),
    ],
)
def test_what_composes(recipe: str, settings: dict[str, Any], setting: Setting) -> None:
    registry.build(recipe, settings, setting)
