"""Callbacks around the rounds of a run: columns, stops, states, mistakes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.engines.callbacks import (
    Callback,
    CurrentRun,
    EarlyStop,
    Exchange,
    RoundEnd,
    Row,
    callback_of,
)
from fedml_noniid.engines.checkpoint import Checkpoints
from fedml_noniid.engines.run import Checkpointing
from fedml_noniid.engines.simulation import Simulation
from tests import federation


def simulation(recipe: str, *callbacks: Callback, rounds: int = 9, **options: Any) -> Simulation:
    """With the test set as validation split too."""
    made = federation.simulation(recipe, rounds=rounds, **options)
    of = replace(made.loop.federation, validation=federation.federation().test)
    # FedBABU and others that act after the last round are among the recipes.
    return Simulation(made.algorithm, of, made.loop.plan, callbacks)


def rows(*losses: float) -> list[Row]:
    return [{"round": t, "validation_loss": loss} for t, loss in enumerate(losses, start=1)]


@pytest.mark.parametrize(
    ("options", "losses", "stops"),
    [
        ({"patience": 2}, [3, 2, 2.5, 2.4, 1], 4),  # rounds 3 and 4 are no better than round 2
        ({"patience": 2}, [3, 2, 2.5, 1.9, 2, 2], 6),
        ({"patience": 2}, [3, math.nan, 4, math.nan, 4, 4], 5),  # evaluated every second round
        ({"patience": 1, "min_delta": 0.5}, [3, 2.6], 2),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.4], 0),
        ({"patience": 1, "after": 4}, [3, 4, 5, 6], 4),
        ({"patience": 3}, [5, 4, 3, 2, 1], 0),
        ({"patience": 1}, [3, 3], 2),
    ],
)
def test_when_a_run_stops_early(options: dict[str, Any], losses: list[float], stops: int) -> None:
    callback = EarlyStop(**options)
    said = [callback.stop(rows(*losses[:t])) for t in range(1, len(losses) + 1)]
    found = next((t for t, why in enumerate(said, start=1) if why), 0)
    assert found == stops
    if stops:
        assert "validation_loss has not improved for" in said[stops - 1]


@dataclass
class After(Callback):
    """Stops after a round."""

    last: int = 2

    def stop(self, rows: Sequence[Row]) -> str:
        return "enough" if rows[-1]["round"] == self.last else ""


@pytest.mark.parametrize(
    "recipe", ["fedavg", "fedbabu+ccn", "ccvr+scaffold", "scaffold+fnr", "fednnnn", "fedbn"]
)
def test_a_stopped_run_is_a_shorter_run(recipe: str) -> None:
    """Also for methods that act on the last round's model; the last round is evaluated, though it
    is not a second one."""
    settings = {"scaffold+fnr": {"fnr": {"p": 0.5}}}.get(recipe, {})
    options: dict[str, Any] = {"settings": settings, "batch_norm": True, "evaluate_every": 2}
    stopped, short = (
        simulation(recipe, After(3), **options),
        simulation(recipe, rounds=3, **options),
    )
    assert federation.equal(stopped.run(), short.run())
    assert ("ccvr" in recipe) is bool(stopped.algorithm.exchanges.finish)
    assert (stopped.loop.over, stopped.loop.done, stopped.loop.stopped) == (True, 3, "enough")
    assert stopped.remarks["stopped"] == "after round 3: enough" and "stopped" not in short.remarks


@dataclass
class Watcher(Callback):
    """Counts, measures, and keeps what it has seen."""

    seen: list[int] = field(default_factory=list)
    exchanges: int = 0

    def on_exchange(self, exchange: Exchange) -> None:
        self.exchanges += 1

    def measure(self, end: RoundEnd) -> Mapping[str, float | torch.Tensor]:
        params, _ = end.model
        length = torch.cat([leaf.flatten() for leaf in params.values()]).norm()
        for leaf in params.values():
            leaf.zero_()  # copies: the run goes on with its own
        return {"length": length, "seen": len(self.seen), "watcher/first": params["fc1.bias"][:2]}

    def on_round(self, run: CurrentRun, row: Row) -> None:
        self.seen.append(run.done)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_columns_and_tensors_of_a_callback(engine: str) -> None:
    ran, plain = (
        simulation("scaffold", Watcher(), rounds=3, engine=engine),
        simulation("scaffold", rounds=3, engine=engine),
    )
    out, wanted = ran.run(), plain.run()
    assert federation.equal_models(out, wanted), "watching changes nothing"
    assert [row["seen"] for row in out.rows] == [0, 1, 2]
    length = torch.cat([leaf.flatten() for leaf in out.params.values()]).norm().item()
    assert out.rows[-1]["length"] == pytest.approx(length, rel=1e-6)
    assert out.tensors["watcher/first"].tolist() == [[0.0, 0.0]] * 3
    watcher = ran.loop.callbacks[-1]
    assert isinstance(watcher, Watcher) and watcher.exchanges == 3 and watcher.seen == [1, 2, 3]


@pytest.mark.parametrize("killed", [1, 2, 4])
def test_a_killed_run_goes_on_with_its_callbacks(killed: int, tmp_path: Path) -> None:
    """The same bits, rows and states; also where the last checkpoint is that of the stopped run."""

    def made() -> Simulation:
        written = Checkpointing(Checkpoints(tmp_path / "c", "f"))
        return simulation(
            "fedbabu+scaffold", Watcher(), EarlyStop(2, min_delta=9), After(4), written
        )

    whole = simulation("fedbabu+scaffold", Watcher(), EarlyStop(2, min_delta=9), After(4))
    whole.run()
    assert whole.loop.done == 3, "the first is always an improvement"
    run = made().rounds()
    for _ in range(min(killed, 3)):
        next(run)
    resumed = made()
    assert resumed.start_round == min(killed, 3)
    assert federation.equal(resumed.run(), whole.outcome)
    assert resumed.loop.stopped == whole.loop.stopped != ""
    states = [[callback.state() for callback in of.loop.callbacks[2:4]] for of in (resumed, whole)]
    assert states[0] == states[1]


class Broken(Callback):
    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


class Raises(Callback):
    def on_round(self, run: CurrentRun, row: Row) -> None:
        _ = row["test_acuracy"]


class Measures(Broken):
    def measure(self, end: RoundEnd) -> Any:
        return self.found(end) if callable(self.found) else self.found  # type: ignore[attr-defined]  # given


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (
            Raises(),
            (
                "callback Raises: on_round failed, .*test_callbacks.py, line .*: KeyError: "
                "'test_acuracy'"
            ),
        ),
        (
            Measures(found=[1]),
            r"callback Measures: measure returned \[1\]; allowed: a dict of numbers",
        ),
        (Measures(found={"a": "b"}), "measure returned 'a': 'b'; allowed: numbers or tensors"),
        (Measures(found={"a": True}), "measure returned 'a': True; allowed: numbers"),
        (Measures(found={"a b": 1.0}), "measure returned 'a b': 1.0; allowed: .*names of letters"),
        (
            Measures(found={"test_loss": 1.0}),
            "measure returned 'test_loss', a column that is there already",
        ),
        (
            Measures(found={"round": 1.0}),
            "measure returned 'round', a column that is there already",
        ),
        (
            Measures(found=lambda end: {f"at_{end.number}": 1.0}),
            "round 2: columns at_1, at_2 are not those of round 1",
        ),
        (
            Measures(found=lambda end: end.nothing),
            "callback Measures: measure failed, .*line .*AttributeError",
        ),
    ],
)
def test_mistakes_name_callback_and_place(callback: Callback, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        simulation("fedavg", callback).run()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [torch.zeros(1), {1: 2}, (1, 2), {1, 2}])
def test_a_state_that_json_can_not_hold_is_refused(value: object, tmp_path: Path) -> None:
    """{1: 2} and (1, 2) would come back as other values. Before the first round, if it is there."""
    written = Checkpointing(Checkpoints(tmp_path / "c", ""))
    with pytest.raises(
        UserError, match=r"callback Broken: what = .* can't be kept in a checkpoint as JSON"
    ):
        simulation("fedavg", Broken(what=value), written)


def test_early_stop_needs_a_validation_split() -> None:
    without = replace(federation.simulation("fedavg").loop.federation, validation=None)
    made = federation.simulation("fedavg")
    with pytest.raises(
        UserError,
        match=r"early_stop: needs a validation split, and there is none; set validation",
    ):
        Simulation(made.algorithm, without, made.loop.plan, [EarlyStop()])
    with pytest.raises(
        UserError, match="early_stop: with fedbn each client has a model of its own"
    ):
        simulation("fedbn", EarlyStop(), batch_norm=True)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "early_stp",
            {},
            "callback 'early_stp' is unknown (did you mean 'early_stop'?); allowed: early_stop, ",
        ),
        ("early_stop", {"patience": 0}, "early_stop.patience = 0 is refused"),
        ("early_stop", {"patience": 2.5}, "patience = 2.5 is refused; allowed: a whole number"),
        ("early_stop", {"on": 3}, "early_stop.on = 3 is refused"),
        (
            "early_stop",
            {"best": 1.0},
            "early_stop.best is unknown; allowed: patience, on, min_delta, after",
        ),
        (
            "tests.nowhere.X",
            {},
            "callback 'tests.nowhere.X' can't be imported, ModuleNotFoundError",
        ),
        ("tests.federation.run", {}, "callback 'tests.federation.run' is no subclass of Callback"),
        (
            f"{__name__}.After",
            {"lst": 3},
            "After.lst is unknown (did you mean 'last'?); allowed: last",
        ),
    ],
)
def test_names_and_options(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        callback_of(name, options)
    assert words in str(error.value) and "\n" not in str(error.value)
