"""`python -m research`: its mistakes are one line, as those of `noniid`."""

from __future__ import annotations

import os

import pytest

from fedml_noniid.pipelines.experiment.workspace import CLUSTER
from research.__main__ import main


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("papers run", "missing argument 'PAPER'; `python -m research papers run --help` shows"),
        ("papers run cnn", "paper 'cnn' is unknown (did you mean 'ccn'?); allowed: fnr"),
        (
            "papers run ccn --size smok",
            "size 'smok' is unknown (did you mean 'smoke'?); allowed: smoke, small, paper",
        ),
        ("papers run ccn --size", "option '--size' requires an argument"),
        (
            "papers build ccn-tab11",
            "table or figure 'ccn-tab11' is unknown (did you mean 'ccn-tab1'?)",
        ),
        ("claims --cluster none", "none/ca.crt: can't be read"),
        ("papers run fnr --cluster none", "none/ca.crt: can't be read"),
        ("papers build fnr-tab4 --cluster none", "none/ca.crt: can't be read"),
    ],
)
def test_a_mistake_is_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and line in error
    assert CLUSTER not in os.environ


def test_help_names_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "papers" in shown and "claims" in shown and "python -m research" in shown
