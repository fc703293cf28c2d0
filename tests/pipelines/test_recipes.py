"""The command that says what there is to compose."""

from __future__ import annotations

import re

import pytest

from fedml_noniid.cli.app import main
from fedml_noniid.plugins import registry


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return main(["methods", *arguments]), *capsys.readouterr()


def test_the_list_has_every_method_with_hyper_parameters_defaults_and_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    blocks = dict(re.findall(r"^(\S+)\n((?: .*\n)+)", out, re.MULTILINE))
    assert list(blocks) == ["fedavg", *sorted(registry.METHODS)]
    for method in registry.METHODS:
        text = " ".join(blocks[method].split())
        assert all(f"{key} = " in text for key in registry.hyper_parameters(method))
        assert "http" in text
    assert "mu = 0.01" in out and "https://arxiv.org/abs/1812.06127" in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("fnr+scaffold", ("fnr+scaffold: composes\n", "1 / M", "2 per round", "labelled samples")),
        (
            "fednova --source",
            ("2007.07481", "  nu = direction | weights\n", "\nclass FedNova(Component):\n"),
        ),
    ],
)
def test_a_recipe_that_composes_says_what_it_does(
    capsys: pytest.CaptureFixture[str], words: str, parts: tuple[str, ...]
) -> None:
    """And of one method its paper, defaults and source."""
    code, out, err = run(capsys, "show", *words.split())
    assert (code, err) == (0, "") and all(part in out for part in parts)


def test_a_recipe_that_does_not_compose_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "show", "feddyn+scaffold")
    assert (code, out) == (2, "") and "can't be combined: both own" in err
