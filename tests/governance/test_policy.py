"""A site's rules: each refuses a study of its own, by name; code that it does not list never
runs."""

from __future__ import annotations

import datetime
import py_compile
import sys
from collections.abc import Iterator
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from fedml_noniid import own_code
from fedml_noniid.core.errors import UserError
from fedml_noniid.governance import policy
from tests import own_package
from tests.governance.conftest import MODULE, RATE, TODAY, Place

NOISE = {"enable_dp": True, "dp_solution_type": "ldp", "mechanism_type": "gaussian"}
NOISE |= {"epsilon": 0.5, "delta": 1e-5, "sensitivity": 0.01}
YESTERDAY = TODAY - datetime.timedelta(days=1)
# The study: scaffold, 2 rounds, 2 epochs, batches of 32, 33 samples. (rules, words of the refusal)
RULES = [
    ({"expires": YESTERDAY}, "expires = .*today is 2027-03-01"),
    ({"methods": ["fed*"]}, "methods = .*the recipe has scaffold"),
    ({"max_rounds": 1}, "max_rounds = 1: the study has 2"),
    ({"max_epochs": 1}, "max_epochs = 1: the study has 2"),
    ({"max_steps": 3}, "max_steps = 3: the study has 4"),
    ({"tensors": ["deltas/*", "buffers/*", "n", "steps", "loss"]}, "wants 'upload/scaffold/"),
    ({"max_upload_mb": 0.001}, r"max_upload_mb = 0\.001: an answer has 0.0 MB"),
    ({"min_samples": 34}, "min_samples = 34: this site has 33"),
    ({"min_group": 2}, "min_group = 2: the server sees every answer"),
    ({"noise": True}, "noise = true: neither dp_args of this site nor the recipe has noise"),
    ({"max_epsilon": 10.0}, "max_epsilon = 10.0: 40 answers without a budget_epsilon spend inf"),
]
PARTS = ["n", "steps", "loss", "secure/*", "deltas/*", "upload/*"]
BUDGET = {"budget_epsilon": 0.7, "budget_delta": 1e-5}
NOISY = {"recipe": "dpsgd", "settings": {"dpsgd": {"noise": 2.0}}}
SILENT = {"recipe": "dpsgd", "settings": {"dpsgd": {"noise": 0.0, "clip": 0.0}}}
# (what study is made, rules that admit it, rules that refuse it, words of the refusal)
LIMITS = [
    # Two rounds of one exchange: 2 x 0.5 for each time that it may be answered.
    (
        {"recipe": "fedavg", "dp": NOISE},
        {"noise": True, "max_answers": 1, "max_epsilon": 1.0},
        {"max_answers": 2},
        "max_epsilon = 1.0: 4 answers without a budget_epsilon spend 2",
    ),
    (
        {"recipe": "fedavg", "dp": NOISE | BUDGET},
        {"max_epsilon": 0.7},
        {"max_epsilon": 0.6},
        "max_",
    ),
    (NOISY, {"noise": True}, {"max_rounds": 1}, "max_rounds"),
    (SILENT, {}, {"noise": True}, "noise = true: neither"),
    ({"secure_sums": 2}, {"min_group": 2}, {"min_group": 3}, "the server sees sums over 2 silos"),
    ({"secure_sums": 2}, {"min_group": 2}, {"tensors": PARTS}, "wants 'buffers/"),
    # Local steps stand in place of epochs.
    (
        {"recipe": "fedavg", "local_steps": 50},
        {"max_epochs": 1, "max_steps": 50},
        {"max_steps": 49},
        "max_steps = 49: the study has 50",
    ),
    ({"max_samples": [33, 1, 2]}, {}, {"min_samples": 34}, "min_samples"),
]


@pytest.mark.parametrize(
    ("made", "admit", "refuse", "words"), [*(({}, {}, *row) for row in RULES), *LIMITS]
)
def test_a_forbidden_study_is_refused_by_the_name_of_the_rule(
    place: Place, made: dict, admit: dict, refuse: dict, words: str
) -> None:
    place.make(**made)
    place.rules(**admit)
    place.decide()
    place.rules(**refuse)
    with pytest.raises(UserError, match=words) as error:
        place.decide()
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{place.policy}: ")


def test_code_that_the_policy_does_not_list_is_never_imported(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study is signed, and names a class of a package that the site has; so does the site's own
    file. It leaves a trace when it is imported."""
    name = "fedx_of_a_stranger"
    package = place.config.with_name(f"{name}.py")
    trace = package.with_name("trace")
    package.write_text(MODULE)
    monkeypatch.syspath_prepend(str(package.parent))
    place.make("fedavg", learning_rate=RATE)
    own_package.forget(name)
    trace.unlink()
    sha = own_code.source_of(name)
    with pytest.raises(UserError, match=f"SHA-256 {sha}; allowed: own_code in"):
        place.decide()
    assert not trace.exists()
    place.rules(own_code=[sha])
    place.decide()
    assert trace.exists(), "listed, it runs"
    package.write_text(f"{package.read_text()}# changed\n")
    own_package.forget(name)
    with pytest.raises(UserError, match="SHA-256"):
        place.decide()


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of a stranger whose hash is listed, with a folder behind a link, in a circle."""
    folder, elsewhere = tmp_path / "listed_of_a_stranger", tmp_path / "elsewhere"
    for made in (folder, elsewhere):
        made.mkdir()
    (elsewhere / "again").symlink_to(elsewhere)
    (folder / "inner").symlink_to(elsewhere)
    (folder / "__init__.py").write_text("from listed_of_a_stranger.part import ran\n")
    (folder / "part.py").write_text("ran = 'the source'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(own_code, "_only", None)
    own_code.import_only([own_code.source_of(folder.name)], "own_code")
    yield folder
    own_package.forget(folder.name)


def test_a_listed_package_runs_from_its_source(listed: Path) -> None:
    """Python would run a compiled module in its place, if it says that nobody is to check it."""
    forged, mode = listed.with_name("forged.py"), py_compile.PycInvalidationMode.UNCHECKED_HASH
    forged.write_text("ran = 'what lies in __pycache__'\n")
    cached = cache_from_source(str(listed / "part.py"))
    py_compile.compile(str(forged), cached, invalidation_mode=mode)
    assert own_code.imported("x", listed.name, "ran", "") == "the source"


@pytest.mark.parametrize("name", ["part.so", "part.abi3.so", "new.pyc", "inner/new.pyd"])
def test_other_files_that_python_imports_count(listed: Path, name: str) -> None:
    """An extension comes before the source, and a link leads to a folder."""
    (listed / "data.csv").touch()
    assert own_code.imported("x", listed.name, "ran", "") == "the source"
    own_package.forget(listed.name)
    (listed / name).write_text("anything")
    with pytest.raises(UserError, match=f"SHA-256 {own_code.source_of(listed.name)}"):
        own_code.imported("x", listed.name, "ran", "")


def test_a_site_with_more_samples_than_the_study_names_takes_no_part(place: Place) -> None:
    """A study that names no largest n is not made."""
    place.make(max_samples=[33, 1, 2])
    place.decide(samples=33)
    with pytest.raises(UserError, match=r"has 34 samples; allowed: 33, train_args.max_samples"):
        place.decide(samples=34)
    with pytest.raises(UserError, match=r"^train_args.max_samples is missing; allowed: the most"):
        place.make(max_samples=None)
    with pytest.raises(UserError, match=r"max_samples = \[3, 4\] .* or a list of 3, one for each"):
        place.make(max_samples=[3, 4])


def test_a_policy_is_checked_as_any_file(place: Place) -> None:
    """Its template has every rule with its default."""
    template, _ = policy.Policy.read(place.policy)
    assert template.model_fields_set == {*policy.Policy.model_fields}
    assert template == policy.Policy(owners={"Ms Owner": place.owner})
    place.rules(max_round=3, owners={"Mr X": "no key"}, min_samples=-1)
    with pytest.raises(UserError) as error:
        place.decide()
    said = str(error.value)
    assert [line.startswith(f"{place.policy}: ") for line in said.splitlines()] == [True] * 3
    assert "max_round is unknown (did you mean 'max_rounds'?)" in said
    assert "owners.Mr X = 'no key' is refused; allowed: the line of" in said
