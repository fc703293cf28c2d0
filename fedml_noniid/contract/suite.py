"""The checks of one method, by name: what `pytest --pyargs fedml_noniid.contract` runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedml_noniid import extras
from fedml_noniid.contract import checks
from fedml_noniid.contract.checks import ENGINES, NotTriedError
from fedml_noniid.core.component import Component, Setting
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import RecipeError
from fedml_noniid.plugins import registry

# Methods of ours that a method is composed with: a drift correction, a proximal term, weights, a
# server step, a refinement, rates of neurons.
PARTNERS = ("scaffold", "fedprox", "ccn", "fednnnn", "fnr", "fednlr")


@dataclass(frozen=True)
class Case:
    """A method under test.

    `name`: its name, or its class as package.module:name. `settings`: hyper-parameters with which
    it acts visibly. `neutral`: hyper-parameters with which it is FedAvg, beside those of
    `settings`; None if there are none. `processes`: whether silos run as processes too.
    """

    name: str
    settings: Mapping[str, object] = field(default_factory=dict)
    neutral: Mapping[str, object] | None = None
    processes: bool = False

    @property
    def kind(self) -> type[Component]:
        """Its class. UserError."""
        return registry.method(self.name)

    @property
    def by_method(self) -> dict[str, dict[str, object]]:
        """The hyper-parameters by method, as recipes take them."""
        return {self.kind.name: dict(self.settings)}


class Check(NamedTuple):
    """A check: its group and what it says of a method, in words."""

    group: str
    description: str
    run: Callable[[Case], None]


def _plain(check: Callable[..., None], **how: Any) -> Callable[[Case], None]:
    """A check of checks.py, which takes a recipe and hyper-parameters."""
    return lambda case: check(case.name, case.by_method, **how)


def _in_folder(check: Callable[..., None], **how: Any) -> Callable[[Case], None]:
    """One that writes files."""

    def run(case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            check(case.name, case.by_method, folder=Path(folder), **how)

    return run


def _entry(case: Case) -> None:
    """Its hyper-parameters are taken, and its class says what it does."""
    registry.build(case.name, case.by_method, checks.SETTING)
    docstring = case.kind.__doc__ or ""
    assert docstring and not docstring.startswith(f"{case.kind.__name__}("), (
        "its class has no docstring"
    )


def _neutral(case: Case, engine: str) -> None:
    if case.neutral is None:
        raise NotTriedError("no neutral hyper-parameters are given, such as --neutral mu=0")
    settings = {case.kind.name: {**case.settings, **case.neutral}}
    checks.neutral_is_fedavg(case.name, settings, engine)


def _draws(case: Case) -> None:
    checks.draws_from_keys_of_its_own(case.kind, registry.METHODS)


def _federated(case: Case) -> None:
    """NotTriedError for a method that pools all data."""
    if case.kind(**dict[str, Any](case.settings)).needs.pooled:
        raise NotTriedError("it pools all data, so there are no clients")


def _numbering(case: Case) -> None:
    _federated(case)
    try:
        checks.numbering_does_not_matter(case.name, case.by_method)
    except AssertionError:
        if not checks.draws_for_clients(case.name, case.by_method):
            raise
        reason = "it draws random numbers, which go by the client's number, or breaks ties by it"
        raise NotTriedError(reason) from None


def _composes(case: Case, other: str) -> None:
    if case.kind.name == other:
        raise NotTriedError("it is that method")
    if not checks.composes_or_is_refused(case.name, other, case.by_method):
        raise NotTriedError("refused, with both names and the reason")


def _silos(name: str, *packages: str) -> Callable[[Case], None]:
    """A check of silos.py, which needs packages of the extra `silo`."""

    def run(case: Case) -> None:
        try:
            extras.require(extras.SILO, *packages)
        except UserError as error:
            raise NotTriedError(str(error)) from None
        from fedml_noniid.contract import silos

        if name == "processes_equal_simulation" and not case.processes:
            raise NotTriedError("the option --silo-processes runs it")
        _federated(case)
        try:
            registry.build(case.name, case.by_method, Setting(3, 3, n_public=15, deployed=True))
        except RecipeError as error:  # it needs more clients in a round, or is for simulations
            raise NotTriedError(str(error)) from None
        getattr(silos, name)(case.name, case.by_method)

    return run


def _for_clients(run: Callable[[Case], None]) -> Callable[[Case], None]:
    """The check, for methods that have clients."""

    def first(case: Case) -> None:
        _federated(case)
        run(case)

    return first


CHECKS: dict[str, Check] = {
    "entry": Check("contract", "is found by its name, takes its hyper-parameters", _entry),
    "acts": Check("contract", "changes FedAvg's result", _plain(checks.does_something)),
    "state": Check(
        "contract",
        "keeps nothing on its object, and the structure of its state; repeats to the bit",
        _plain(checks.keeps_its_state_and_repeats),
    ),
    "inputs": Check(
        "contract",
        "changes nothing that a hook is given",
        _for_clients(_plain(checks.changes_nothing_that_it_is_given)),
    ),
    "draws": Check("contract", "draws from random keys of its own", _draws),
    "numbering": Check(
        "contract",
        "does not depend on the numbers of the clients",
        _numbering,
    ),
    "gradient_term": Check(
        "contract",
        "has an elementwise gradient_term",
        _plain(checks.gradient_term_of_several_is_that_of_each),
    ),
    "update_factor": Check(
        "contract",
        "has an update_factor of one number per row",
        _plain(checks.update_factor_is_a_number_per_row),
    ),
    "needs": Check(
        "needs and claims",
        "declares what it reads and reads what it declares; owns what it changes",
        _plain(checks.reads_what_it_needs),
    ),
    **{
        f"neutral-{engine}": Check(
            "neutral",
            f"is FedAvg to the bit with its neutral hyper-parameters, {engine}",
            partial(_neutral, engine=engine),
        )
        for engine in ENGINES
    },
    **{
        f"with-{other}": Check(
            "composition",
            f"composes with {other}, in any order and under any name, to the bit",
            partial(_composes, other=other),
        )
        for other in PARTNERS
    },
    "parity-float64": Check(
        "parity", "sequential = vectorized, float64, batch norm", _plain(checks.engines_agree)
    ),
    "parity-float32": Check(
        "parity",
        "sequential = vectorized, float32",
        _plain(checks.engines_agree, dtype=torch.float32, batch_norm=False),
    ),
    "parity-images": Check(
        "parity",
        "sequential = vectorized on convolutions, with all that is recorded",
        _plain(checks.engines_agree_on_images),
    ),
    "parity-workers": Check(
        "parity",
        "sequential = two worker processes, to the bit",
        _in_folder(checks.processes_agree, processes=2),
    ),
    **{
        f"resume-{engine}": Check(
            "resume",
            f"goes on after any round to the same bits, {engine}",
            _in_folder(checks.resumes, engine=engine),
        )
        for engine in ENGINES
    },
    "wire": Check(
        "wire",
        "its messages survive the wire, and the server takes them",
        _silos("messages_survive_the_wire", "yaml"),
    ),
    "silos-pair": Check(
        "cross-silo",
        "its FedML pair has the bits of the simulation",
        _silos("pair_equals_simulation"),
    ),
    "silos-processes": Check(
        "cross-silo",
        "a server and three silos as processes have the bits of the simulation",
        _silos("processes_equal_simulation"),
    ),
}
