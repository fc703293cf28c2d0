"""The folder of `folder=`: finished runs are not trained again, and `nd.results` loads them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedml_noniid as nd
from fedml_noniid.pipelines.experiment import provenance

SPLIT = nd.partition(nd.load("digits"), "dirichlet", clients=5, alpha=1.0)


class Begun(nd.Callback):
    """Counts the runs that begin; the process dies as run `last` does."""

    count, last = 0, 0

    def on_start(self, run: Any) -> None:
        Begun.count += 1
        if Begun.count == Begun.last:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _none_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Begun, "count", 0)


def shown(results: nd.Results) -> tuple[object, ...]:
    settings = [result.settings for result in results]
    return repr(results), results.failed, settings, results.rounds.to_csv(), repr(results.summary)


@pytest.mark.filterwarnings("ignore:lr-1e.30-.* has no result")
def test_a_killed_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def swept() -> nd.Results:
        how = {"over": {"lr": [0.1, 1e30]}, "seeds": [0, 1], "callbacks": [Begun()]}
        return nd.sweep(["fedavg", "scaffold"], SPLIT, **how, rounds=2, folder=tmp_path)

    monkeypatch.setattr(Begun, "last", 3)
    with pytest.raises(KeyboardInterrupt):
        swept()
    part = nd.results(tmp_path)
    assert [len(result.seeds) for result in part] == [1, 1, 0, 0]
    assert part.failed["lr-0_1-fedavg-1"] == "it is not trained yet"
    whole = swept()
    assert Begun.count == 3 + 6  # what was done is known, later also what diverged
    assert shown(swept()) == shown(nd.results(tmp_path)) == shown(whole) and Begun.count == 9
    nd.results(tmp_path).save(tmp_path / "copy")
    assert (
        nd.results(tmp_path / "copy")[0].model(1).state_dict().keys() == whole[0].weights[1].keys()
    )


def test_what_has_changed_is_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(data: nd.Data = SPLIT.data, **options: Any) -> list[str]:
        """What is said to have changed."""
        how = {"partition": "iid", "clients": 4, "rounds": 1, "callbacks": [Begun()], **options}
        nd.run("fedavg", data, folder=tmp_path, **how)
        again = f"run: runs in {tmp_path} are trained again: other (.*)\n"
        return re.findall(again, capsys.readouterr().err)

    unknown, code = Begun(), ["code, versions or machine"]
    unknown.kept = object()  # type: ignore[attr-defined]  # which no file can hold
    assert other() == other() == [] and Begun.count == 1
    assert other(lr=0.2) == other() == ["train.lr"]
    assert other(nd.load("digits", normalise="half")) == ["data.normalise, data"]
    assert other() == ["data.normalise, data"]
    assert other(callbacks=[Begun(), nd.Callback()]) == code
    assert other(callbacks=[unknown]) == other(callbacks=[unknown]) == code
    monkeypatch.setattr(provenance, "code", lambda *_: "edited")
    assert other() == code
    (tmp_path / "evaluation" / "iid-fedavg-0" / "metrics.json").write_text("{}")
    assert other() == code and Begun.count == 10


def test_each_run_has_a_line_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    results = nd.sweep(["fedavg", "fedprox"], SPLIT, rounds=2)
    first, second = (f"{100 * result.metrics['accuracy'][0]:.2f} %" for result in results)
    lines = rf"""sweep: 1 of 2: dirichlet-fedavg-0 {first}, \d+ s left
sweep: 2 of 2: dirichlet-fedprox-0 {second}
sweep: 2 made in \d+ s
"""
    nd.run("fedavg", SPLIT, rounds=1, progress=False)
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(lines, err), err


def test_data_from_memory(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((40, 3))
    data, others = (nd.from_arrays(part, np.arange(40) % 2) for part in (x, 1 - x))
    split = nd.partition(data, indices=[range(10), range(10, 30)])
    ran = nd.run("fedavg", split, rounds=1, folder=tmp_path)
    assert shown(nd.results(tmp_path)) == shown(nd.Results([ran]))
    assert (nd.results(tmp_path, data)[0].predict(x) == ran.predict(x)).all()
    for folder, given, words in (
        (tmp_path, None, r"results: 'arrays' was data in memory; allowed: results\(folder, data\)"),
        (tmp_path, others, "results: data are others than those of the runs"),
        (tmp_path / "none", None, "results: .* has no readable results.json .*; allowed: the"),
    ):
        with pytest.raises(nd.UserError, match=f"^{words}"):
            nd.results(folder, given)[0].model()
