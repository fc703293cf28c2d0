"""Sites that took no part: nothing of a site reaches the model that is tested on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedml_noniid as nd
from fedml_noniid.api import leaving_out
from fedml_noniid.api.leaving_out import FewShot

QUIET: dict[str, Any] = {"rounds": 3, "lr": 1.0, "progress": False, "model": "logistic_regression"}
FEW: dict[str, Any] = {"shots": [4, 12, 400], "draws": 2, "steps": 8}


def wards(n: int = 40) -> pd.DataFrame:
    """Four wards; who is old is ill, but in ward d who is young."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.integers(20, 80, 4 * n).astype(float)})
    frame = frame.assign(sex=rng.choice(["f", "m"], 4 * n), ward=[*"abcd"] * n)
    return frame.assign(ill=np.where((frame.age > 50) ^ (frame.ward == "d"), "yes", "no"))


FRAME = wards()
HOLE = FRAME.assign(ill=FRAME.ill.where(FRAME.index > 1))


def left_out(frame: Any = FRAME, recipes: Any = ("fedavg",), **given: Any) -> nd.LeaveOneOut:
    how = {"label": "ill", "owner": "ward", "one_hot": ["sex"], **FEW, **QUIET}
    return nd.leave_one_out(frame, recipes, **how | given)


@pytest.fixture(scope="module")
def usual() -> nd.LeaveOneOut:
    return left_out(recipes=["fedavg", "fedprox"], seeds=[0, 1])


def test_nothing_of_a_site_reaches_the_model_without_it(usual: nd.LeaveOneOut) -> None:
    """Ward d is changed and has lost three rows. Its class `perhaps` counts as wrong there."""
    other, own = FRAME.copy(), FRAME.ward == "d"
    other.loc[own, "age"] = other.age * 1e12 + 0.123456789
    other.loc[own, "sex"] = "unknown"
    other.loc[own, "ill"] = "perhaps"
    changed = left_out(other.drop(index=other.index[own][:3]))
    before, after = (one.results["d"]["fedavg"] for one in (usual, changed))
    assert before.sha256[0] == after.sha256[0]
    assert before.data.dataset.mean == after.data.dataset.mean
    assert usual.results["a"]["fedavg"].sha256[0] != changed.results["a"]["fedavg"].sha256[0]
    row = changed.table.set_index("site").loc["d"]
    assert row[["zero_shot", "4 own", "12 own", "12 alone"]].tolist() == [0.0] * 4
    assert row.majority == 1.0


def test_the_table_says_what_the_models_predict(usual: nd.LeaveOneOut) -> None:
    table = usual.table.set_index(["recipe", "site"])
    assert table.index.tolist() == [(r, s) for r in ("fedavg", "fedprox") for s in "abcd"]
    assert (table["rows"] == 40).all() and table[["400 own", "400 alone"]].isna().all(axis=None)
    # All other wards agree, so ward d meets a model that has learned the opposite.
    zero_shot = table.loc["fedavg"].zero_shot
    assert (zero_shot[[*"abc"]] > 0.6).all() and zero_shot["d"] < 0.3
    assert table.loc[("fedavg", "d"), "12 own"] > zero_shot["d"]
    for (recipe, site), row in table.iterrows():
        order = leaving_out.stream(0, "leave one out/half", "abcd".index(site)).permutation(40)
        tested, result = FRAME[FRAME.ward == site].iloc[order[20:]], usual.results[site][recipe]
        right = [(result.predict(tested, seed) == tested.ill).mean() for seed in (0, 1)]
        assert row.zero_shot == pytest.approx(np.mean(right))
        assert row.others == pytest.approx(result.metrics.accuracy.mean())
        assert row.majority == tested.ill.value_counts().max() / 20


def test_rows_that_missing_leaves_out_are_no_rows_of_a_site() -> None:
    """Rows 0 and 1 have no class, row 7 has no age."""
    frame = HOLE.assign(age=HOLE.age.where(HOLE.index != 7))
    few = {"missing": "drop", "rounds": 1, "shots": [4], "draws": 1}
    assert left_out(frame, **few).table["rows"].tolist() == [39, 39, 40, 39]


def test_a_new_site_gets_the_mean_of_the_heads() -> None:
    """By NumPy, weighted by the clients' samples; the body is the same for all."""
    left = left_out(recipes=["fedper"], model="mlp", rounds=2, shots=[4], draws=1)
    row, result = left.table.set_index("site").loc["b"], left.results["b"]["fedper"]
    sizes = result.clients.sort_values("client").samples.to_numpy()
    heads = [result.model(client=k).state_dict() for k in range(3)]
    mean = {
        name: np.average([head[name].double().numpy() for head in heads], axis=0, weights=sizes)
        for name in heads[0]
    }
    order = leaving_out.stream(0, "leave one out/half", 1).permutation(40)[20:]
    own, dataset = FRAME[FRAME.ward == "b"].iloc[order], result.data.dataset
    x = (result.data.samples(own).double().numpy() - dataset.mean) / dataset.std
    hidden = np.maximum(x @ mean["fc1.weight"].T + mean["fc1.bias"], 0)
    answers = (hidden @ mean["fc2.weight"].T + mean["fc2.bias"]).argmax(1)
    assert row.zero_shot == pytest.approx((answers == (own.ill == "yes")).mean())
    assert not torch.equal(heads[0]["fc2.bias"], heads[1]["fc2.bias"])


def test_the_step_size_is_chosen_on_the_other_sites() -> None:
    """By hand: site a alone is for 1.0, and it is the others that decide for a."""
    scores = {"a": (0.2, 0.9), "b": (0.6, 0.5), "c": (0.7, 0.5), "d": (0.4, 0.4)}
    rows = [
        ("r", site, 5, rate, x)
        for site, xs in scores.items()
        for rate, x in zip((0.1, 1.0), xs, strict=True)
    ]
    rows.append(("r", "a", 100, 0.1, 1.0))  # no other site has so many
    trials = pd.DataFrame(rows, columns=["recipe", "site", "shots", "rate", "accuracy"])
    chosen = leaving_out._with_rates(trials)
    assert chosen.shots.tolist() == [5] * 4
    assert chosen.rate.tolist() == [0.1, 1.0, 1.0, 1.0]
    assert chosen.accuracy.tolist() == [0.2, 0.5, 0.5, 0.4]


def test_the_sentence_says_only_what_the_intervals_say() -> None:
    """By hand: 2 help, 5 harm, 20 show nothing, from 50 on it pays; 100 has one site."""
    noise = np.array([0.0, 0.01, 0.02, -0.01, -0.02, 0.005])
    changes = {
        2: noise + 0.1,
        5: noise - 0.2,
        20: noise,
        50: noise + 0.1,
        80: noise + 0.2,
        100: noise + 0.3,
    }
    table = pd.DataFrame({"recipe": "r", "site": [*"abcdef"], "zero_shot": 0.6})
    for shots, change in changes.items():
        table[f"{shots} own"], table[f"{shots} alone"] = 0.6 + change, 0.4
    table.loc[1:, ["100 own", "100 alone"]] = np.nan
    summary, sentence = leaving_out._summary(table, FewShot(shots=[*changes], draws=1, steps=1))
    assert sentence.startswith("r: fine-tuning pays from 50 own samples on, +10.1 points (")
    assert "6 sites); with 5 it does harm, -19.9 points (" in sentence
    verdicts = summary[summary.against == "zero_shot"].set_index("shots").verdict.to_dict()
    assert verdicts.pop(2) == "better"
    assert verdicts == {5: "worse", 20: "undecided", 50: "better", 80: "better", 100: "one site"}
    nothing = table[["recipe", "zero_shot", "20 own", "20 alone"]]
    assert leaving_out._summary(nothing, FewShot(shots=[20], draws=1, steps=1))[1] == (
        "r: no tried number of own samples shows that fine-tuning pays"
    )
    beside = summary[summary.against == "20 alone"].iloc[0]
    assert (beside.sites, beside.higher, beside.verdict) == (6, 6, "better")
    assert beside.difference == pytest.approx(0.2 + noise.mean())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: left_out(nd.load("digits")), ("frame is of type Data", "pandas.DataFrame")),
        (lambda: left_out(FRAME[FRAME.ward < "c"]), ("the data have 2 sites", "at least 3")),
        (lambda: left_out(owner="word"), ("'word'", "did you mean 'ward'")),
        (lambda: left_out(HOLE), ("'ill' has no value in 2 rows",)),
        (lambda: left_out(unseen=2), ("unseen = 2 is refused", "left out in turn")),
        (lambda: left_out(clients=3), ("leave_one_out: clients = 3 is refused",)),
        (lambda: left_out(target="age"), ("target = 'age' is refused", "`label`")),
        (lambda: left_out(partition="iid"), ("partition = 'iid' is refused",)),
        (lambda: left_out(shots=[]), ("leave_one_out: shots",)),
        (lambda: left_out(shots=[5, 0]), ("shots[1] = 0", "a whole number from 1")),
        (lambda: left_out(draws=0), ("draws = 0", "a whole number from 1")),
        (lambda: left_out(rounds=0), ("leave_one_out: rounds = 0",)),
        (lambda: left_out(recipes=["fedawg"]), ("leave_one_out", "did you mean 'fedavg'")),
        (
            lambda: left_out(FRAME[(FRAME.ward == "a") | (FRAME.ill == "no")]),
            ("without site 'a'", "always 'no'"),
        ),
    ],
)
def test_bad_input_is_refused_in_words_before_anything_trains(
    call: Callable[[], object], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving_out.running, "trained_results", lambda *_: pytest.fail("trains"))
    with pytest.raises(nd.UserError) as error:
        call()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_folder_keeps_the_runs_of_each_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that diverges is named."""
    few = {"shots": [4], "draws": 1, "steps": 1, "folder": tmp_path}
    table = left_out(**few).table
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"without-{k}" for k in range(4)]
    with pytest.raises(nd.UserError, match="leave_one_out: without site 'a', natural-fedavg-0"):
        left_out(**{**few, "folder": None}, lr=1e30)
    monkeypatch.setattr(leaving_out.running, "_trained", lambda *_: pytest.fail("trains again"))
    assert left_out(**few).table.equals(table)


def test_the_command_leaves_out_the_sites_of_params_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = pytest.importorskip("fedml_noniid.cli.app", reason="typer is of the extra [pipeline]")
    monkeypatch.setattr(leaving_out, "RATES", (0.1,))
    recipes = {"pull": {"recipe": "fedprox", "fedprox": {"mu": 0.5}}}
    source = {"name": "table", "root": ".", "file": "wards.csv", "label": "ill", "owner": "ward"}
    content = {
        "experiment": "wards",
        "data": {**source, "one_hot": ["sex"], "validation": 0.1, "public": 0},
        "scenario_names": ["natural"],
        "scenarios": {"natural": {"partition": "natural", "clients": 4}},
        "recipe_names": ["pull"],
        "recipes": recipes,
        "seeds": [3],
        "train": {"model": "mlp", "rounds": 1, "epochs": 2, "batch_size": 32, "lr": 0.1},
    }
    FRAME.to_csv(tmp_path / "wards.csv", index=False)
    (tmp_path / "params.yaml").write_text(json.dumps(content))  # JSON is YAML
    assert app.main(["leave-one-out", "--root", str(tmp_path)]) == 0
    printed, read = capsys.readouterr().out, pd.read_csv(tmp_path / "leave-one-out/table.csv")
    how: dict[str, Any] = {"rounds": 1, "lr": 0.1, "model": "mlp", "seeds": [3], "progress": False}
    same = nd.leave_one_out(FRAME, recipes, label="ill", owner="ward", one_hot=["sex"], **how)
    pd.testing.assert_frame_equal(pd.DataFrame(same.table), read)
    assert printed.strip() == repr(same)
    assert all(words in printed for words in ("20 alone", "pull: ", "others", "20 own, %"))


def test_fine_tuning_takes_steps_of_gradient_descent() -> None:
    """By hand. The model itself stays."""
    data = nd.from_frame(FRAME, label="ill", owner="ward", one_hot=["sex"])
    result = nd.run("fedavg", data, partition="natural", clients=4, **QUIET)
    own = FRAME[FRAME.ward == "d"][:12]
    tuned = result.fine_tune(own, own.ill, steps=2, lr=0.3).state_dict()
    before, dataset = result.model().state_dict(), result.data.dataset
    x = (data.samples(own).double() - torch.tensor(dataset.mean)) / torch.tensor(dataset.std)
    targets = torch.eye(2, dtype=torch.float64)[(own.ill == "yes").to_numpy().astype(int)]
    weight, bias = before["fc.weight"].double(), before["fc.bias"].double()
    for _ in range(2):
        slope = (torch.softmax(x @ weight.T + bias, 1) - targets) / 12  # [12, 2]
        weight, bias = weight - 0.3 * slope.T @ x, bias - 0.3 * slope.sum(0)
    torch.testing.assert_close(tuned["fc.weight"].double(), weight, atol=1e-5, rtol=0)
    torch.testing.assert_close(tuned["fc.bias"].double(), bias, atol=1e-5, rtol=0)


def test_fine_tuning_leaves_frozen_parameters() -> None:
    data = nd.from_frame(FRAME, label="ill", one_hot=["sex", "ward"])
    how = {**QUIET, "model": "mlp", "freeze": ["fc1.*"], "partition": "iid", "clients": 2}
    result = nd.run("fedavg", data, **how)
    before, tuned = result.weights[0], result.fine_tune(FRAME, FRAME.ill).state_dict()
    same = {name for name in before if torch.equal(before[name], tuned[name])}
    assert same == {"fc1.bias", "fc1.weight"}
