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
from tests import own_package
from tests.governance.conftest import TODAY, Place

NOISE = {"enable_dp": True, "dp_solution_type": "ldp", "mechanism_type": "gaussian"}
NOISE |= {"epsilon": 0.5, "delta": 1e-5, "sensitivity": 0.01}
YESTERDAY = TODAY - datetime.timedelta(days=1)
# rule -> (its value, what the study has). The study: scaffold, 2 rounds, 2 epochs, batches of 32,
# 33 samples.
RULES = {
    "expires": (YESTERDAY, "today is 2027-03-01"),
    "methods": (["fed*"], "the recipe has scaffold"),
    "max_rounds": (1, "the study has 2"),
    "max_epochs": (1, "the study has 2"),
    "max_steps": (3, "the study has 4"),
    "tensors": (["deltas/*", "buffers/*", "n", "steps", "loss"], "wants 'upload/scaffold/"),
    "max_upload_mb": (0.001, "an answer has 0.0 MB"),
    "min_samples": (34, "this site has 33"),
    "min_group": (2, "the server sees every answer"),
    "noise": (True, "neither dp_args of this site nor the recipe has noise"),
    "max_epsilon": (10.0, "40 answers without a budget_epsilon spend inf"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_forbidden_study_is_refused_by_the_name_of_the_rule(place: Place, rule: str) -> None:
    value, words = RULES[rule]
    place.decide()
    place.rules(**{rule: value})
    with pytest.raises(UserError) as error:
        place.decide()
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{place.policy}: {rule} = ") and words in line


def test_every_rule_that_refuses_is_named_at_once(place: Place) -> None:
    place.rules(**{rule: value for rule, (value, _) in RULES.items()})
    with pytest.raises(UserError) as error:
        place.decide()
    assert len(error.value.mistakes) == len(RULES)


def test_epsilons_add_up_over_all_answers(place: Place) -> None:
    """Two rounds of one exchange: 2 x 0.5 for each time that it may be answered."""
    place.make("fedavg", dp=NOISE)
    place.rules(noise=True, max_answers=1, max_epsilon=1.0)
    place.decide()
    place.rules(max_answers=2)
    with pytest.raises(UserError, match="4 answers without a budget_epsilon spend 2"):
        place.decide()


@pytest.mark.parametrize("settings", [{"noise": 0.0}, {"noise": 0.0, "clip": 0.0}])
def test_a_method_of_privacy_without_its_noise_has_none(place: Place, settings: dict) -> None:
    place.rules(noise=True)
    place.make("dpsgd", settings={"dpsgd": {"noise": 2.0}})
    place.decide()
    place.make("dpsgd", settings={"dpsgd": settings})
    with pytest.raises(UserError, match="noise = true: neither"):
        place.decide()


def test_a_budget_of_the_ledger_is_enough(place: Place) -> None:
    place.make("fedavg", dp=NOISE | {"budget_epsilon": 0.7, "budget_delta": 1e-5})
    place.rules(max_epsilon=0.7)
    place.decide()
    place.rules(max_epsilon=0.6)
    with pytest.raises(UserError, match="max_epsilon"):
        place.decide()


def test_the_smallest_group_of_a_sum_is_that_of_the_study(place: Place) -> None:
    place.make("scaffold", secure_sums=2)
    place.rules(min_group=2, tensors=["n", "steps", "loss", "secure/*", "deltas/*", "upload/*"])
    with pytest.raises(UserError, match="wants 'buffers/"):
        place.decide()
    place.rules(tensors=["*"])
    place.decide()
    place.rules(min_group=3)
    with pytest.raises(UserError, match="min_group = 3: the server sees sums over 2 silos"):
        place.decide()


def test_local_steps_stand_in_place_of_epochs(place: Place) -> None:
    place.make("fedavg", local_steps=50)
    place.rules(max_epochs=1, max_steps=50)
    place.decide()
    place.rules(max_steps=49)
    with pytest.raises(UserError, match="max_steps = 49: the study has 50"):
        place.decide()


def test_code_that_the_policy_does_not_list_is_never_imported(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study is signed, and names a class of a package that the site has; so does the site's own
    file. It leaves a trace when it is imported."""
    trace = place.config.with_name("trace")
    package = place.config.with_name("fedx_of_a_stranger.py")
    package.write_text(
        f"import pathlib\npathlib.Path({str(trace)!r}).touch()\n"
        "from dataclasses import dataclass\n"
        "from fedml_noniid.rates import Rate\n"
        "@dataclass(frozen=True)\nclass Mine(Rate):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(place.config.parent))
    rate = {"decay": "fedx_of_a_stranger:Mine", "start": 0.1}
    place.make("fedavg", learning_rate=rate)
    del sys.modules["fedx_of_a_stranger"]
    trace.unlink()
    with pytest.raises(UserError, match=r"SHA-256 [0-9a-f]{64}; allowed: own_code in") as error:
        place.decide()
    assert not trace.exists()
    sha = own_code.source_of("fedx_of_a_stranger")
    assert sha in str(error.value)
    place.rules(own_code=[sha])
    place.decide()
    assert trace.exists(), "listed, it runs"
    package.write_text(f"{package.read_text()}# changed\n")
    del sys.modules["fedx_of_a_stranger"]
    with pytest.raises(UserError, match="SHA-256"):
        place.decide()


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of a stranger whose hash is listed."""
    folder = tmp_path / "listed_of_a_stranger"
    folder.mkdir()
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
    forged = listed.with_name("forged.py")
    forged.write_text("ran = 'what lies in __pycache__'\n")
    for name in ("part", "later"):
        cached = cache_from_source(str(listed / f"{name}.py"))
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(forged), cached, invalidation_mode=mode)
    assert own_code.imported("x", listed.name, "ran", "") == "the source"


@pytest.mark.parametrize("name", ["part.so", "part.abi3.so", "new.pyc", "inner/new.pyd"])
def test_other_files_that_python_imports_count(listed: Path, name: str) -> None:
    """An extension comes before the source, and a link leads to a folder."""
    elsewhere = listed.with_name("elsewhere")
    elsewhere.mkdir()
    (elsewhere / "again").symlink_to(elsewhere)  # a circle
    (listed / "inner").symlink_to(elsewhere)
    (listed / "data.csv").touch()
    assert own_code.imported("x", listed.name, "ran", "") == "the source"
    own_package.forget(listed.name)
    (listed / name).write_text("anything")
    first = own_code.source_of(listed.name)
    with pytest.raises(UserError, match=f"SHA-256 {first}"):
        own_code.imported("x", listed.name, "ran", "")
    (listed / name).write_text("anything else")
    assert own_code.source_of(listed.name) != first


def test_where_code_lies_in_a_package_counts(listed: Path) -> None:
    """The start of a file moves to the end of the one before it: joined, both are the same."""
    first, second = listed / "__init__.py", listed / "part.py"
    assert (before := own_code.source_of(listed.name)) == own_package.sha256_of(listed)
    first.write_text(first.read_text() + second.read_text())
    second.write_text("")
    assert own_code.source_of(listed.name) == own_package.sha256_of(listed) != before


def test_a_site_with_more_samples_than_the_study_names_takes_no_part(place: Place) -> None:
    place.make(max_samples=[33, 1, 2])
    place.decide(samples=33)
    words = (
        r"shards/1\.safetensors: has 34 samples; allowed: 33, train_args.max_samples of the study"
    )
    with pytest.raises(UserError, match=words):
        place.decide(samples=34)


def test_a_study_that_names_no_largest_n_is_not_made(place: Place) -> None:
    with pytest.raises(UserError, match=r"^train_args.max_samples is missing; allowed: the most"):
        place.make(max_samples=None)
    with pytest.raises(UserError, match=r"max_samples = \[3, 4\] .* or a list of 3, one for each"):
        place.make(max_samples=[3, 4])


def test_a_policy_is_checked_as_any_file(place: Place) -> None:
    place.rules(max_round=3, owners={"Mr X": "no key"}, min_samples=-1)
    with pytest.raises(UserError) as error:
        place.decide()
    lines = str(error.value).splitlines()
    assert len(lines) == 3 and all(line.startswith(f"{place.policy}: ") for line in lines)
    assert any("max_round is unknown (did you mean 'max_rounds'?)" in line for line in lines)
    assert any("owners.Mr X = 'no key' is refused; allowed: the line of" in line for line in lines)


def test_the_template_has_every_rule_with_its_default(place: Place) -> None:
    from fedml_noniid.governance.policy import Policy

    found, _ = Policy.read(Path(place.policy))
    assert found.model_fields_set == {*Policy.model_fields}
    assert found == Policy(owners={"Ms Owner": place.owner})
