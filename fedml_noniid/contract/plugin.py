"""The part of pytest: options that name a method, and the certificate at the end.

pytest loads it through our entry point, in every run. It acts only where the command names
`fedml_noniid.contract`, and imports nothing else before.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

SUITE = "fedml_noniid.contract"
RESULTS = pytest.StashKey[dict[str, tuple[str, str]]]()  # check -> outcome, why
LOADED = "the options of fedml_noniid.contract"
SEVERAL: dict[str, Any] = {"action": "append", "default": []}
OPTIONS: dict[str, dict[str, Any]] = {
    "--method": {"metavar": "my_package:FedX", "help": "the method: its name, or its class"},
    "--settings": SEVERAL
    | {
        "metavar": "mu=0.1",
        "help": "a hyper-parameter with which the method acts visibly; may be repeated",
    },
    "--neutral": SEVERAL
    | {
        "metavar": "mu=0",
        "help": "a hyper-parameter with which the method is FedAvg; may be repeated",
    },
    "--silo-processes": {"action": "store_true", "help": "also run silos as processes"},
}


def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> None:
    """Adds our options, before pytest parses its arguments."""
    arguments = [str(word) for word in early_config.invocation_params.args]
    named = {SUITE, f"{SUITE}.test_method", str(Path(__file__).parent)}
    if not named & {word.partition("::")[0].rstrip("/") for word in arguments}:
        return
    group = parser.getgroup(SUITE, "the contract of fedml-noniid, for a method of yours")
    for name, how in OPTIONS.items():
        group.addoption(name, **how)
    early_config.pluginmanager.register(Certificate(), LOADED)
    pytest.register_assert_rewrite(f"{SUITE}.checks", f"{SUITE}.silos")


def values(option: str, pairs: list[str]) -> dict[str, object]:
    """Hyper-parameters of `key=value` words. UsageError."""
    options: dict[str, object] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise pytest.UsageError(f"{option} {pair}: allowed: key=value, such as mu=0.1")
        flags: dict[str, object] = {"true": True, "false": False}
        try:
            options[key] = flags[text] if text in flags else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[key] = text  # a word
    return options


class Certificate:
    """Collects what the checks find, and writes it down."""

    @pytest.hookimpl
    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[RESULTS] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        check = getattr(item, "callspec", None)
        name = None if check is None else check.params.get("check")
        if name is not None and (report.when == "call" or report.failed):
            why = ""
            if report.skipped:
                why = str(report.longrepr[2]).removeprefix("Skipped: ")
            elif report.failed and call.excinfo is not None:
                why = " ".join(str(call.excinfo.value).split())[:300]
            item.config.stash[RESULTS][name] = report.outcome, why
        return report

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        method, results = config.getoption("--method"), config.stash[RESULTS]
        if not method or not results:
            return
        from fedml_noniid.contract.certificate import certificate

        terminalreporter.section("certificate")
        terminalreporter.write(certificate(method, results, config.getoption("--neutral")))
