"""Runs every check on one method: `pytest --pyargs fedml_noniid.contract --method
my_package:FedX`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedml_noniid.contract import checks, plugin
from fedml_noniid.contract.suite import CHECKS, Case
from fedml_noniid.core.errors import UserError
from fedml_noniid.own_code import look_in
from fedml_noniid.plugins import registry


@pytest.fixture(scope="session")
def case(pytestconfig: pytest.Config) -> Case:
    """The method that the command line names."""
    method = pytestconfig.getoption("--method")
    if not method:
        pytest.exit("--method is missing: the method's name, or its class as my_package:FedX", 4)
    look_in(Path.cwd())  # a package that is not installed lies here
    settings = plugin.values("--settings", pytestconfig.getoption("--settings"))
    neutral = plugin.values("--neutral", pytestconfig.getoption("--neutral"))
    tested = Case(method, settings, neutral or None, pytestconfig.getoption("--silo-processes"))
    try:
        registry.build(method, tested.by_method, checks.SETTING)
    except UserError as error:
        pytest.exit(f"--method {method}: {error}", 4)
    return tested


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("check", CHECKS)
def test_method(check: str, case: Case) -> None:
    """Holds, or says why it says nothing."""
    CHECKS[check].run(case)
