"""Bad input to the API ends in a UserError: a line for each mistake, which names the argument and
what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import TensorDataset

import fedml_noniid as nd
from fedml_noniid.core.errors import among

DATA = nd.load("digits")
SPLIT = nd.partition(DATA, "iid", clients=4)
RESULTS = nd.sweep(["fedavg"], SPLIT, over={"lr": [0.1, 0.2]}, rounds=1, progress=False)
X, Y = np.random.default_rng(0).random((40, 3)), np.arange(40) % 2
FRAME = pd.DataFrame({"age": X[:, 0], "ill": Y, "ward": np.where(Y, "a", "b")})
WRONG: dict[str, Any] = {"patience": "x", "min_delta": float("nan"), "after": -5}
Call = Callable[[], Any]
ROWS = nd.from_frame(FRAME[["age", "ill"]], label="ill", missing="drop")
NUMBERS = nd.from_frame(FRAME[["age"]].assign(risk=FRAME.age / 2), target="risk")
OF_NUMBERS: dict[str, Any] = {"partition": "iid", "clients": 2, "loss": "mse", "rounds": 1}
KEPT = np.random.default_rng(0)


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


def lists(indices: Any, **given: Any) -> Call:
    return lambda: nd.partition(DATA, indices=indices, **given)


def predict(x: Any, **given: Any) -> Call:
    return lambda: RESULTS[0].predict(x, **given)


def fine_tune(**given: Any) -> Call:
    own = {"x": DATA.dataset.test_x[:2], "y": ["1", "2"]}
    return lambda: RESULTS[0].fine_tune(**own | given)


def even(labels: Any, n_clients: int, *, jitter: float = 0.0) -> Any:
    return np.array_split(np.arange(len(labels)), n_clients)


def top(outputs: Any, labels: Any, *, k: float = 0.0) -> Any:
    return [k] if 1 / k else None


def accuracy(outputs: Any, labels: Any) -> float:
    return 1.0


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
    # index lists of one's own
    (
        lists([]),
        ("partition: indices = [] is refused", "allowed: a list of arrays, one per client"),
    ),
    (lists("ab"), ("partition: indices = 'ab' is refused",)),
    (lists({0: [1]}), ("partition: indices = {0: [1]} is refused",)),
    (lists([[0, 1], []]), ("partition: indices[1] = [] is refused", "from 0 to 1436")),
    (lists([[0.5]]), ("partition: indices[0] = [0.5] is refused",)),
    (lists([[True, False]]), ("partition: indices[0] = [True, False] is refused",)),
    (lists([0, 1]), ("partition: indices[0] = 0 is refused",)),
    (lists([[0], [1437]]), ("partition: indices[1] = [1437] is refused",)),
    (lists([[-1]]), ("partition: indices[0] = [-1] is refused",)),
    (lists([[1, 2], [3, 2]]), ("partition: indices: 2 is there 2 times; allowed: once",)),
    (lists([np.ma.array([1, 3], mask=[0, 1])]), ("partition: indices[0][1] is masked",)),
    (lists([[0]], partition="iid"), ("indices are refused beside partition and clients",)),
    (lists([[0]], clients=2), ("indices are refused beside partition and clients",)),
    (lists([[0]], alpha=0.1), ("partition: alpha is unknown",)),
    (lists([range(1437)], public=10), ("public = 10 is refused; allowed: 0, as the clients have",)),
    (run(data=DATA, partition="given-12", clients=3), ("run: partition 'given-12' is unknown",)),
    # partitions of one's own
    (
        partition(lambda labels, n_clients: np.array_split(KEPT.permutation(len(labels)), 4)),
        ("<lambda>() returned another partition when it was called again with the",),
    ),
    (
        partition(lambda n_clients: [][5]),
        ("partition <lambda>() failed", "test_errors.py, line", "IndexError: list"),
    ),
    (
        partition(lambda labels, n_clients: labels.fill(3)),
        ("partition <lambda>() failed", "ValueError: assignment destin"),
    ),
    (partition(lambda n_clients: [[0], []], clients=2), ("<lambda>()[1] = [] is refused",)),
    (partition(lambda n_clients: [[0], [0.5]], clients=2), ("<lambda>()[1] = [0.5] is refused",)),
    (partition(lambda n_clients: [[0], [10**6]], clients=2), ("()[1] = [1000000] is refused",)),
    (partition(lambda n_clients: [[0, 1], [1]], clients=2), ("1 is there 2 times; allowed: once",)),
    (
        partition(lambda n_clients: [[0]], clients=2),
        ("returned 1 arrays; allowed: 2, one for each",),
    ),
    (partition(lambda n_clients: None), ("<lambda>() = None is refused; allowed: a list of arra",)),
    (partition(even, jiter=1), ("jiter is no argument (did you mean 'jitter'?)",)),
    (partition(even, jitter="1"), ("jitter = '1' is refused; allowed: a number",)),
    (partition("nowhere:cut"), ("partition 'nowhere:cut' can't be imported, ModuleNot",)),
    (partition(f"{__name__}:X"), ("is a ndarray; allowed: a function of your",)),
    (partition(5), ("partition = 5 is refused; allowed: text",)),
    (partition(lambda owners, n_clients: []), ("'digits' doesn't say whose samples are whose",)),
    # readers of one's own
    (lambda: nd.load(lambda: 5), ("the function returned 5; allowed: (x, y), ",)),
    (lambda: nd.load(lambda: 1 / 0), ("failed", "test_errors.py, line", "ZeroDivisionError: ")),
    (lambda: nd.load(lambda: {"x": [[1.0]] * 4}), ("y is missing",)),
    (lambda: nd.load(lambda: {"x": [[1.0]], "y": [0], "z": 0}), ("z is unknown; allowed: ",)),
    (lambda: nd.load(lambda: ([[1.0, np.nan]] * 8, [0, 1] * 4)), ("data set", "x", "nan")),
    (lambda: nd.load(lambda: [7, 8, 9]), ("the function returned [7, 8, 9]",)),
    (lambda: nd.load(lambda: TensorDataset(torch.zeros(4, 2))), ("data set", "dataset[0] = ")),
    # metrics of one's own
    (run(metrics={top: {"ks": 2}}), ("run: metrics", "top.ks is unknown (did you mean 'k'?)")),
    (run(metrics={top: {"k": "2"}}), ("top.k = '2' is refused", "a number from -1e+38 to 1e+38")),
    (run(metrics=[top]), ("metric 'top' failed", "test_errors.py, line", "ZeroDivisionError")),
    (run(metrics={top: {"k": 1.0}}), ("metric 'top' returned [1.0]", "a finite number or NaN")),
    (run(metrics=[accuracy]), ("metric 'accuracy': the name 'accuracy' is refused", "letters")),
    (partition("iid", clients=2, noise={1: 2}), ("noise: the key 1 is refused; allowed: text",)),
    (run(metrics=["margin"]), ("run: metrics = 'margin' is unknown; allowed: a function of your",)),
    (run(metrics=["nowhere:f1"]), ("metric 'nowhere:f1' can't be imported, ModuleNot",)),
    (
        run(metrics=[5]),
        ("run: metrics = [5] is refused; allowed: a list of metrics, or {metric: ",),
    ),
    # models in use
    (predict(np.zeros((2, 8, 8))), ("x is float64 [2, 8, 8]; allowed: numbers [n, 1, 8, 8]",)),
    (predict(np.full((2, 1, 8, 8), 0.5)), ("x[0, 0, 0, 0] = 0.5", "whole numbers from 0 to 255")),
    (
        predict(np.full((1, 1, 8, 8), -1)),
        (
            "predict: x",
            "is refused; allowed: whole numbers from 0",
        ),
    ),
    (predict("text"), ("predict: x is <U4",)),
    (predict(FRAME), ("predict: x is object",)),
    (predict(DATA.dataset.test_x, seed=7), ("model: seed = 7 has no result; allowed: 0",)),
    (predict(X, client=1), ("model: client = 1 is refused; allowed: none, as all have one model",)),
    (lambda: ROWS.samples(pd.DataFrame({"ag": [3]})), ("x: column 'age' is unknown",)),
    (lambda: ROWS.samples(pd.DataFrame({"age": ["old"]})), ("x: column 'age' is 'old' in row 1",)),
    # Without its row, the classes behind it would move up.
    (
        lambda: ROWS.samples(pd.DataFrame({"age": [1.0, None, -1.0]})),
        ("x: column 'age' has no value in row 2; allowed: fill or ",),
    ),
    (fine_tune(y=["1"]), ("y = ['1'] is refused; allowed: a class for each of the 2 samples",)),
    (fine_tune(y=3), ("fine_tune: y = 3 is refused",)),
    (fine_tune(y=["1", "ten"]), ("y: class 'ten' is unknown; allowed: 0, 1, 2, 3",)),
    (fine_tune(y=[["1"], ["2"]]), ("allowed: text, numbers",)),
    (fine_tune(steps=0), ("fine_tune: steps = 0 is refused",)),
    (fine_tune(lr=0), ("fine_tune: lr = 0 is refused",)),
    (fine_tune(seed=9), ("seed = 9 has no result",)),
    (fine_tune(lr=1e38), ("fine_tune: the weights stop being finite; take a smaller lr",)),
    (fine_tune(x=X), ("fine_tune: x is float64 [40, 3]",)),
    (
        lambda: nd.run("fedavg", NUMBERS, **OF_NUMBERS).fine_tune(X[:1], [0.5]),
        ("fine_tune: the targets are no classes",),
    ),
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
    for caller, call in (("run", run(rounds=10**6, folder=folder)), ("save", RESULTS.save)):
        with pytest.raises(nd.UserError, match=rf"^{caller}: folder .*(can't be written|a path)"):
            call(*[folder] * (caller == "save"))


def test_results_that_are_not_there() -> None:
    for call, words in (
        (lambda: RESULTS.compare("fedprox"), "compare: 'fedprox' has no result; allowed: fedavg"),
        (lambda: RESULTS.compare("fedav"), "compare: 'fedav' has no result .did you mean 'fedavg'"),
        (RESULTS[2:].plot, "plot: there are no results"),
        (lambda: RESULTS["fedavg"], r"results\['fedavg'\] is refused; allowed: .*; names: none"),
        (
            lambda: RESULTS[:1]["fedav"],
            r"results\['fedav'\] .*did you mean 'fedavg'.*names: fedavg",
        ),
        (lambda: RESULTS[1.5], r"results\[1.5\] is refused"),
    ):
        with pytest.raises(nd.UserError, match=f"^{words}"):
            call()
    assert RESULTS[2:].rounds.empty
    assert RESULTS[:1]["fedavg"] is RESULTS[0] is RESULTS[np.int64(0)] and RESULTS[1] in RESULTS


def test_a_near_match_stands_in_place_of_a_long_list() -> None:
    names = [f"method{i}" for i in range(9)]
    first = ", ".join(names[:8])
    short = {"allowed": f"{first}, ... (9 in all), or yours", "meant": "method8"}
    assert among("metod8", names, "or yours") == short
    assert among("xyz", names) == {"allowed": ", ".join(names), "meant": ""}
    assert among("x", ()) == {"allowed": "none", "meant": ""}
