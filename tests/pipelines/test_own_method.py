"""A method of one's own in an experiment: its code counts in what was trained with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedml_noniid import own_code
from fedml_noniid.core.errors import UserError
from fedml_noniid.engines.run import Outcome
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.pipelines.experiment import config, provenance, search
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.training import trained
from fedml_noniid.pipelines.experiment.workspace import Workspace
from tests import own_package
from tests.pipelines.small import PARAMS, run_stages


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study with a package beside its params.yaml, of a name that no other test imports."""
    package = f"stranger_{tmp_path.name.replace('-', '_')}"
    own_package.write(tmp_path, package)
    entry = f"mine: {{recipe: scaffold+{package}.fedx.FedX, fedx: {{mu: 0.2}}}}"
    params = PARAMS.replace("[fedavg, scaffold+fnr]", "[fedavg, mine]")
    params = params.replace("scaffold+fnr: {fnr: {p: 0.5}}", entry)
    (tmp_path / "params.yaml").write_text(params.replace("recipe: fedavg,", "recipe: mine,"))
    return tmp_path


def hashes(study: Path) -> dict[str, object]:
    plan = provenance.plan(config.load(study))
    return {"deploy": plan["deploy"]} | plan["train"]


def test_a_changed_line_trains_what_has_the_method_again_and_nothing_else(study: Path) -> None:
    first = hashes(study)
    assert config.load(study).own_extras, "`noniid run` asks the stage plan each time"
    (file,) = study.glob("*/fedx.py")
    file.write_text(file.read_text().replace("self.mu * (w", "2 * self.mu * (w"))
    own_package.forget(file.parent.name)
    second = hashes(study)
    assert {key for key in first if first[key] != second[key]} == {"deploy", "skewed-mine-0"}


def test_what_it_imports_of_ours_counts(study: Path) -> None:
    """Also what only a parent's file needs: a method may extend one of ours."""
    settings = config.load(study)
    assert provenance._file("fedml_noniid.plugins.fnr.algorithm") is not None
    before = provenance.files(*provenance._modules(settings, "mine"))
    (file,) = study.glob("*/fedx.py")
    imported = "from fedml_noniid.plugins.fnr.algorithm import FNR\n"
    (file.parent / "more.py").write_text(imported)
    after = provenance.files(*provenance._modules(settings, "mine"))
    assert {path.parent.name for path in {*after} - {*before}} >= {"fnr"}


def test_it_trains_and_its_code_is_in_the_record(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result is refused if a file was edited, or one came that the package did not have."""
    (file,) = study.glob("*/fedx.py")
    settings, run, edit = config.load(study), Simulation.run, list[tuple[Path, str]]()
    run_stages(study, ("prepare", "partition"))
    item = Item.load(Workspace.from_environment(study, {}), settings, settings.units()[1])

    def edited(simulation: Simulation) -> Outcome:
        for path, source in edit:
            path.write_text(source)
        return run(simulation)

    monkeypatch.setattr(Simulation, "run", edited)
    params = trained(item, item.simulation(), "fingerprint").record["params"]
    assert params["own_code"] == settings.own_code("mine") != {}
    assert params["fedx.mu"] == 0.2
    refused = "the result of skewed-mine-0 is refused: "
    for path, words in (
        (file.with_name("late.py"), "a file of fedx was changed during the run"),
        (file, rf"the source of {file.parent.name} was changed after .* had imported {file};"),
    ):
        edit[:] = [(path, f"{own_package.METHOD}# edited\n")]
        with pytest.raises(UserError, match=f"^{refused}{words}"):
            trained(item, item.simulation(), "fingerprint")


def test_a_result_of_our_edited_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the file; a reload would leave old objects in other modules."""
    own_code.check_unchanged(own_code.OURS)
    spec, _ = own_code._imported["fedml_noniid.rates"]
    monkeypatch.setitem(own_code._imported, "fedml_noniid.rates", (spec, "other"))
    with pytest.raises(UserError, match=r"imported \S+/rates\.py; start the process again$"):
        own_code.check_unchanged(own_code.OURS)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("mu: 0.2", "mu: -1", r"recipes\.mine\.fedx\.mu = -1 is refused"),
        ("fedx.FedX", "fedx.FedY", r"recipes\.mine: recipe .* can't be imported"),
        ("mine: {recipe", "a.b.C: {recipe", r"recipes\.a\.b\.C = .*: .*a path is for `recipe:`"),
    ],
)
def test_mistakes_name_the_entry(study: Path, old: str, new: str, words: str) -> None:
    params = study / "params.yaml"
    params.write_text(params.read_text().replace(old, new))
    with pytest.raises(UserError, match=rf"params\.yaml: {words}"):
        config.load(study)


def test_tuning_takes_its_hyper_parameters(study: Path) -> None:
    """By the method's name, and with the checks that ours have."""
    params = study / "params.yaml"
    tune = "tune: {seeds: [9], recipes: [mine], grid: {fedx: {mu: [0.1, 0.2]}}}\n"
    params.write_text(params.read_text() + tune)
    settings = config.load(study)
    assert [len(points) for points in search.tuning(settings).points.values()] == [2]
    params.write_text(params.read_text().replace("[0.1, 0.2]", "[-1, 0.2]"))
    with pytest.raises(UserError, match=r"tune\.grid\.fedx\.mu = -1 is refused"):
        config.load(study)
