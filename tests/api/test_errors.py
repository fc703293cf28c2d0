"""Bad input to the API ends in a UserError: a line for each mistake, which names the argument and
what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot

import fedml_noniid as nd
from fedml_noniid.core.errors import among

DATA = nd.load("digits")
SPLIT = nd.partition(DATA, "iid", clients=4)
X, Y = np.random.default_rng(0).random((40, 3)), np.arange(40) % 2
FRAME = pd.DataFrame({"age": X[:, 0], "ill": Y, "ward": np.where(Y, "a", "b")})
WRONG: dict[str, Any] = {"patience": "x", "min_delta": float("nan"), "after": -5}
Call = Callable[[], Any]


def run(recipe: Any = "fedavg", data: Any = SPLIT, **given: Any) -> Call:
    return lambda: nd.run(recipe, data, **{"rounds": 1, "progress": False, **given})


def sweep(recipes: Any = ("fedavg",), data: Any = SPLIT, **given: Any) -> Call:
    return lambda: nd.sweep(recipes, data, **{"rounds": 1, "progress": False, **given})


def partition(name: Any = "dirichlet", data: Any = DATA, **given: Any) -> Call:
    return lambda: nd.partition(data, name, **{"clients": 4, **given})


def frame(table: Any = FRAME, **given: Any) -> Call:
    return lambda: nd.from_frame(table, **{"label": "ill", "owner": "ward", **given})


def arrays(x: Any = X, y: Any = Y, *test: Any, **given: Any) -> Call:
    return lambda: nd.from_arrays(x, y, *test, **given)


# Each line of the error has to have all words of one tuple.
CASES: list[tuple[Call, *tuple[tuple[str, ...], ...]]] = [
    # names
    (lambda: nd.load("digit"), ("data set 'digit' is unknown", "did you mean 'digits'")),
    (lambda: nd.load("digits", sise=8), ("sise is unknown", "did you mean 'size'")),
    (
        lambda: nd.load("made_tweets", normalise=[5, 2]),
        ("normalise = [5, 2] is refused", "allowed: channel", "tokens"),
    ),
    (
        partition("dirichlett", alpha=1.0),
        ("partition: partition = 'dirichlett'", "did you mean 'dirichlet'"),
    ),
    (
        partition(alpa=1.0),
        ("partition: alpa is no argument", "did you mean 'alpha'", "allowed: seed, validation"),
    ),
    (partition(), ("partition: alpha is missing",)),
    (partition("iid", alpha=1.0), ("partition: alpha is unknown", "allowed: partition, clients")),
    (partition(alpha=1.0, lr=0.1), ("partition: lr is no argument",)),
    (partition(alpha=1.0, fnr={}), ("partition: fnr is no argument",)),
    (partition("iid", participation=0.5), ("partition: participation is no argument",)),
    (partition(None), ("partition: partition is missing",)),
    (run("scafold"), ("run: recipe 'scafold'", "did you mean 'scaffold'")),
    (run("fedavgg"), ("run: recipe 'fedavgg'", "did you mean 'fedavg'?")),
    (run("FedAvg"), ("run: recipe 'FedAvg'", "did you mean 'fedavg'?")),
    (run("scaffold+FedDyn"), ("method 'FedDyn' is unknown", "did you mean 'feddyn'?")),
    (run(optimizer="SGD"), ("optimizer = 'SGD' is unknown", "did you mean 'sgd'?")),
    (run(optimizer="adamm"), ("optimizer = 'adamm' is unknown", "did you mean 'adam'?")),
    (run(Momentum=0.9), ("run: Momentum is no argument", "did you mean 'momentum'?")),
    (run("scaffold+feddyn"), ("run:", "'feddyn' and 'scaffold' can't be combined")),
    (run("scaffold+scaffold"), ("run:", "names a method twice")),
    (run(None), ("run: recipe None is refused", "allowed: a name")),
    (run(["fedavg"]), ("run: recipe ['fedavg'] is refused",)),
    (
        run(epoch=1),
        ("run: epoch is no argument", "did you mean 'epochs'", "allowed: seeds, validation"),
    ),
    (run(seed=0), ("run: seed is no argument", "did you mean 'seeds'")),
    (run("scaffold+fedprox", mu=0.1), ("run: mu is no argument", "fedprox={'mu': ...}")),
    (
        run("fedprox", fedprox={"muu": 0.1}),
        ("fedprox.muu is unknown", "did you mean 'mu'"),
    ),
    (run(fnr={"p": 0.3}), ("run: fnr is part of no recipe", "allowed: fedavg")),
    (run(model="mlpp"), ("run: model", "'mlpp'", "did you mean 'mlp'")),
    (
        run(model_options={"hiden": 3}),
        ("run: model_options.hiden is unknown", "did you mean 'hidden'"),
    ),
    # what belongs together
    (run(data=DATA), ("run: partition is missing", "what `partition` returned")),
    (run(data=DATA, partition="iid"), ("run: clients is missing",)),
    (run(clients=4), ("run: clients is given twice", "allowed: in `partition` only")),
    (run(alpha=0.1), ("run: alpha is given twice",)),
    (run("fnr"), ("run: fnr: needs a public split, but public is 0",)),
    (run(model="lstm"), ("run: model: model 'lstm' takes text only",)),
    # values
    (run(rounds=0), ("run: rounds = 0 is refused",)),
    (run(rounds="3"), ("run: rounds = '3' is refused", "whole number")),
    (run(rounds=True), ("run: rounds = True is refused", "whole number")),
    (run(lr=float("nan")), ("run: lr = nan is refused", "a number above 0")),
    (run(lr=1e308), ("run: lr = 1e+308 is refused", "a number above 0, at most 1e+38")),
    (run(lr={"start": 3.5e38}), ("run: lr.start = 3.5e+38 is refused", "at most 1e+38")),
    (run("dpfedavg", dpfedavg={"noise": 1e308}), ("dpfedavg.noise = 1e+308", "0 to 1e+38")),
    (run("fedadam", fedadam={"tau": 1e308}), ("fedadam.tau = 1e+308", "at most 1e+38")),
    (run("fedntd", fedntd={"tau": 1e308}), ("fedntd.tau = 1e+308", "at most 1e+38")),
    (
        run(lr=-1, epochs=0),
        ("run: lr = -1 is refused", "above 0"),
        ("run: epochs = 0 is refused",),
    ),
    (run(participation=1.5), ("run: participation = 1.5 is refused",)),
    (run(availability={"rate": 2}), ("run: availability.rate = 2 is refused",)),
    (run(availability={"file": "none.csv"}), ("run: availability.file: none.csv: can't be read",)),
    (run(device="tpu"), ("run: device", "'tpu' is unknown", "allowed: auto, cpu")),
    (run(processes=0), ("run: processes = 0 is refused",)),
    (
        run("fedprox", fedprox=0.3),
        ("fedprox = 0.3 is refused", "allowed: keys with values"),
    ),
    (
        run("fedprox", fedprox={"mu": "a"}),
        ("fedprox.mu = 'a' is refused", "a number from 0 to 1e+38"),
    ),
    (partition(alpha=-1), ("partition: alpha = -1 is refused", "allowed: a number above 0")),
    (partition(alpha=1.0, clients=0), ("partition: clients = 0 is refused",)),
    (
        partition("iid", clients=10**6),
        ("partition: clients = 1000000 is refused", "allowed: 1 to 1437"),
    ),
    (
        partition("iid", clients=500, validation=0.9, seed=3),
        ("partition: clients = 500 is refused", "validation and public hold out", "of 1437)"),
    ),
    (partition("iid", seed=-1), ("partition: seed = -1 is refused", "allowed: 0 to")),
    (partition("iid", seed=[0]), ("partition: seed = [0] is refused",)),
    (partition("iid", validation=1.0), ("partition: validation = 1.0 is refused",)),
    (partition("iid", public=10**6), ("partition: public = 1000000 is refused", "allowed: 10 to")),
    (
        partition("iid", noise={"sigm": 0.4}),
        ("partition: noise.sigma is missing",),
        ("partition: noise.sigm is unknown", "did you mean 'sigma'"),
    ),
    (
        partition("natural"),
        ("partition: partition natural", "'digits' doesn't say whose samples are whose"),
    ),
    # seeds
    (run(seeds=0), ("run: seeds = 0 is refused", "list")),
    (run(seeds=[]), ("run: seeds = [] is refused",)),
    (run(seeds=[0, 1, 0]), ("run: seeds: 0 is named twice",)),
    (run(seeds=[0, -1]), ("run: seeds[1] = -1 is refused",)),
    (run(seeds=[0.5]), ("run: seeds[0] = 0.5 is refused", "whole number")),
    (sweep(seeds="012"), ("sweep: seeds = '012' is refused", "list")),
    # the kind of the data
    (
        run(data="digits"),
        (
            "run: data is of type str",
            "load, from_frame, from_texts, from_arrays, from_dataset, partition",
        ),
    ),
    (sweep(data=FRAME), ("sweep: data is of type DataFrame", "from_frame")),
    (
        partition("iid", data=SPLIT),
        ("partition: data is of type Split", "load, from_frame, from_texts, from_arrays"),
    ),
    (lambda: nd.load("digits", root=5), ("root = 5 is refused", "allowed: a path")),
    (frame(FRAME.to_dict()), ("frame is a dict", "allowed: a pandas.DataFrame")),
    (frame(label="il"), ("label: column 'il' is unknown", "did you mean 'ill'")),
    (frame(label=None), ("label is missing", "or `target`")),
    (frame(featurs=["age"]), ("featurs is unknown", "did you mean 'features'")),
    (arrays(layuot="CHW"), ("layuot is unknown", "did you mean 'layout'")),
    (frame(owner=None), ("column 'ward'", "allowed: numbers")),
    (frame(features="age"), ("features = 'age' is refused", "allowed: a list")),
    (frame(test_share=2), ("test_share = 2 is refused", "allowed: a number between 0 and 1")),
    (frame(normalise=3), ("normalise = 3 is refused", "allowed: channel, half, none")),
    (
        lambda: nd.from_texts(FRAME, text="wart", label="ill"),
        ("text: column 'wart'", "did you mean 'ward'"),
    ),
    (
        lambda: nd.from_texts(FRAME, text="ward", label="ill", length=0),
        ("length = 0 is refused", "from 1 to"),
    ),
    (
        lambda: nd.from_texts(FRAME, text="ward", label="ill", vectors=5),
        ("vectors = 5 is refused",),
    ),  # type: ignore[arg-type]  # that is the mistake
    (arrays(y=Y[:3]), ("y is int64 [3]", "one for each of x")),
    (arrays(x=X * np.nan), ("x[0, 0] = nan is refused", "allowed: finite numbers")),
    (arrays([[1.0, 2.0], [3.0]]), ("x is no array", "allowed: what numpy.asarray takes")),
    (arrays(X, Y, X), ("test_y is missing",)),
    (arrays(owner=Y[:3]), ("owner is int64 [3]", "allowed: whole numbers or text [40]")),
    # sweeps
    (sweep("fedavg"), ("sweep: recipes = 'fedavg' is refused", "allowed: a list of recipes")),
    (sweep([]), ("sweep: recipes = [] is refused",)),
    (sweep({}), ("sweep: recipes = {} is refused",)),
    (sweep(["fedavg", 5]), ("sweep: recipe 5 is refused",)),
    (sweep(["fedavg", "fnr", "fedavg"]), ("sweep: recipe fedavg is named twice",)),
    (sweep({"weak": 5}), ("sweep: recipe weak = 5 is refused", "allowed: {'recipe': name")),
    (sweep({"weak": None}), ("sweep: recipe 'weak': method 'weak' is unknown",)),
    (
        sweep({"a": {"recipe": "fedavg", "train": {"epochs": 1}}}),
        ("sweep: train.epochs is unknown",),
    ),
    (sweep(over=["lr"]), ("sweep: over = ['lr'] is refused", "allowed: argument -> values")),
    (sweep(over={"lrr": [1]}), ("sweep: lrr is no argument", "did you mean 'lr'")),
    (sweep(over={"lr": 0.1}), ("sweep: over: lr = 0.1 is refused", "allowed: a list of values")),
    (
        sweep(over={"lr": [0.1, 0.1]}),
        ("sweep: over: lr = [0.1, 0.1] is refused", "each of them once"),
    ),
    (sweep(over={"lr": [0.1, "x"]}), ("sweep: lr = 'x' is refused", "number")),
    (sweep(over={"lr": [0.1]}, lr=0.1), ("sweep: over: lr is given twice",)),
    (sweep(over={"seeds": [[0]]}), ("sweep: over: seeds is given twice",)),
    (
        sweep({"mine": {"recipe": "fedavg", "train": {"lr": 0.05}}}, over={"lr": [0.1]}),
        ("sweep: over: lr is refused, as recipe 'mine' has lr of its own; allowed: one of them",),
    ),
    (
        sweep({"fednnnn": {"fednnnn": {"beta": 0.5}}}, over={"fednnnn": [{"beta": 0.1}]}),
        ("sweep: over: fednnnn is refused, as recipe 'fednnnn' has beta of its own",),
    ),
    (sweep(over={"alpha": [0.1]}), ("sweep: alpha is given twice", "allowed: in `partition` only")),
    (sweep(over={"folder": ["a"]}), ("sweep: folder is no argument",)),
    (lambda: nd.EarlyStop(patience=-1), ("EarlyStop: patience = -1 is refused", "from 1 to")),
    (
        lambda: nd.EarlyStop(**WRONG),
        ("EarlyStop: patience = 'x' is refused", "whole number"),
        ("EarlyStop: min_delta = nan is refused",),
        ("EarlyStop: after = -5 is refused",),
    ),
    # a round that no memory holds
    (run(local_steps=10**9), ("run: local_steps = 1000000000 is refused", "0 to 100000000")),
    (run(epochs=10**9), ("run: epochs = 1000000000 is refused", "1 to 100000000")),
    (
        run(local_steps=10**7, batch_size=32),
        ("run: local_steps = 10000000 is refused", "360 samples would read", "at most 100000000"),
    ),
    (run(epochs=10**6), ("run: epochs = 1000000 is refused", "360 samples would read 360000000")),
    # what training finds
    (run(lr=1e30), ("run: fedavg, seed 0: round 1, client 0", "not finite", "lower lr")),
    (
        sweep(over={"lr": [1e29, 1e30]}),
        ("sweep: lr-1e+29-fedavg-0: round 1", "not finite"),
        ("sweep: lr-1e+30-fedavg-0: round 1", "not finite"),
    ),
]


@pytest.mark.parametrize(
    ("call", "wanted"), [(call, wanted) for call, *wanted in CASES], ids=[str(c[1]) for c in CASES]
)
def test_one_clear_line_per_mistake(call: Call, wanted: list[tuple[str, ...]]) -> None:
    with pytest.raises(nd.UserError) as caught:
        call()
    lines = str(caught.value).splitlines()
    assert len(lines) == len(wanted), lines
    for line, words in zip(lines, wanted, strict=True):
        assert [word for word in words if word not in line] == [], line
        # Arguments, and not the sections of params.yaml.
        assert not any(
            key in line for key in ("params.yaml", "scenarios", "recipe_names", "deploy")
        ), line


@pytest.mark.parametrize("folder", [5, "file", "file/below"])
def test_a_folder_that_cant_be_written_is_refused_before_training(
    tmp_path: Path, folder: Any
) -> None:
    (tmp_path / "file").write_text("")
    folder = folder if isinstance(folder, int) else tmp_path / folder
    with pytest.raises(nd.UserError, match=r"^run: folder .*(can't be written|allowed: a path)"):
        nd.run("fedavg", SPLIT, rounds=10**9, progress=False, folder=folder)
    with pytest.raises(nd.UserError, match=r"^save: folder .*(can't be written|allowed: a path)"):
        nd.run("fedavg", SPLIT, rounds=1, progress=False).save(folder)


def test_results_that_are_not_there() -> None:
    results = nd.sweep(["fedavg"], SPLIT, over={"lr": [0.1, 0.2]}, rounds=1, progress=False)
    wrong: list[Any] = [object(), "x"]
    for call, words in (
        (lambda: results.compare("fedprox"), "compare: 'fedprox' has no result; allowed: fedavg"),
        (lambda: results.compare("fedav"), "compare: 'fedav' has no result .did you mean 'fedavg'"),
        (results[2:].plot, "plot: there are no results"),
        (lambda: results.plot(*wrong[:1]), "plot: ax = <object .*; allowed: one Axes"),
        (lambda: results[0].plot(*wrong[1:]), "plot: ax = 'x' is refused; allowed: one Axes"),
        (lambda: results[:1].plot_clients(*wrong[1:]), "plot: ax = 'x' is refused"),
        (lambda: results.plot(pyplot.gca()), "plot: ax is one panel, but there are 2 settings"),
        (lambda: results["fedavg"], r"results\['fedavg'\] is refused; allowed: .*; names: none"),
        (
            lambda: results[:1]["fedav"],
            r"results\['fedav'\] .*did you mean 'fedavg'.*names: fedavg",
        ),
        (lambda: results[1.5], r"results\[1.5\] is refused"),
    ):
        with pytest.raises(nd.UserError, match=f"^{words}"):
            call()
    assert results[2:].rounds.empty
    assert results[:1]["fedavg"] is results[0] is results[np.int64(0)] and results[1] in results


def test_a_near_match_stands_in_place_of_a_long_list() -> None:
    names = [f"method{i}" for i in range(9)]
    first = ", ".join(names[:8])
    short = {"allowed": f"{first}, ... (9 in all), or yours", "meant": "method8"}
    assert among("metod8", names, "or yours") == short
    assert among("xyz", names) == {"allowed": ", ".join(names), "meant": ""}
    assert among("metod7", names[:8]) == {"allowed": first, "meant": "method7"}
    assert among("x", ()) == {"allowed": "none", "meant": ""}
