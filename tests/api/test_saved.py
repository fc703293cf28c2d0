"""The folder of `folder=`: finished runs are not trained again, and `nd.results` loads them."""

from __future__ import annotations

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


def test_what_has_changed_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trains(data: nd.Data = SPLIT.data, **options: Any) -> bool:
        how = {"partition": "iid", "clients": 4, "rounds": 1, "callbacks": [Begun()], **options}
        before = Begun.count
        nd.run("fedavg", data, folder=tmp_path, progress=False, **how)
        return Begun.count > before

    unknown = Begun()
    unknown.kept = object()  # type: ignore[attr-defined]  # which no file can hold
    assert trains() and not trains()
    assert trains(lr=0.2) and trains(nd.load("digits", normalise="half")) and trains()
    assert trains(callbacks=[Begun(), nd.Callback()])
    assert trains(callbacks=[unknown]) and trains(callbacks=[unknown])
    monkeypatch.setattr(provenance, "code", lambda *_: "edited")
    assert trains() and not trains()
    (tmp_path / "evaluation" / "iid-fedavg-0" / "metrics.json").write_text("{}")
    assert trains()


def test_data_from_memory(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((40, 3))
    data, others = (nd.from_arrays(part, np.arange(40) % 2) for part in (x, 1 - x))
    split = nd.partition(data, indices=[range(10), range(10, 30)])
    ran = nd.run("fedavg", split, rounds=1, folder=tmp_path)
    assert shown(nd.results(tmp_path)) == shown(nd.Results([ran]))
    assert (nd.results(tmp_path, data)[0].predict(x) == ran.predict(x)).all()
    for given, words in (
        ((tmp_path,), r"results: 'arrays' was data in memory; allowed: results\(folder, data\)"),
        ((tmp_path, others), "results: data are others than those of the runs"),
        ((tmp_path / "none",), "results: .* has no readable results.json .*; allowed: the"),
    ):
        with pytest.raises(nd.UserError, match=f"^{words}"):
            nd.results(*given)[0].model()
