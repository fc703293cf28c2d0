"""params.yaml: what is accepted, and that each mistake is one line with file, key, value and what
is allowed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment import check, config
from fedml_noniid.pipelines.experiment.provenance import of_training
from fedml_noniid.pipelines.stages.deploy import deployment_of
from fedml_noniid.plugins import registry
from fedml_noniid.plugins.registry import METHODS
from tests.leaking import Peek

ROOT = Path(__file__).parents[2]
FILE = (ROOT / "params.yaml").read_text()
# What stands in place of the chosen values, which the next tuning may change.
RECIPES = """\
  fedavg: {}
  fedavgm: {}
  fedprox: {fedprox: {mu: 0.1}}
  scaffold: {}
  fnr: {fnr: {p: 0.5}}
  fednnnn: {fednnnn: {beta: 0.7, gamma: 0.8}}
  ccn: {ccn: {T: 0.5}}
  fednlr: {fednlr: {a1: 0.45, a2: 0.3}}
  rfedavg: {rfedavg: {lam: 0.001}}
  rfedavg_plus: {rfedavg_plus: {lam: 0.001}}
"""
GOOD = FILE[: FILE.index("  fedavg:")] + RECIPES + FILE[FILE.index("\nseeds:") :]
SEEDS = next(line for line in GOOD.splitlines() if line.startswith("seeds:"))
TUNE = GOOD[GOOD.index("\ntune:") : GOOD.index("\ndeploy:")]


def refusals(folder: Path, *changes: tuple[str, str], text: str = GOOD) -> list[str]:
    """What `noniid check` refuses in a changed params.yaml, a line each."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / "params.yaml").write_text(text)
    try:
        check.check(config.load(folder))
    except UserError as error:
        return str(error).splitlines()
    return []


def loaded(folder: Path, *changes: tuple[str, str]) -> config.Config:
    """The settings of a changed params.yaml, in which `noniid check` finds no mistake."""
    assert refusals(folder, *changes) == []
    return config.load(folder)


SCENARIO = "partition: dirichlet, clients: 20, participation: 1.0, alpha: 0.1"
# A change of params.yaml -> where the mistake is, and a part of what it says. That every key
# refuses values of another kind and beyond its ends is tested in tests/pipelines/test_options.py.
CASES: list[tuple[str, str, str, str]] = [
    ("experiment: digits-label-skew", "experiment: ../x", "experiment", "without slashes"),
    (
        "experiment: digits-label-skew",
        f"experiment: {'ö' * 101}",
        "experiment",
        "at most 200 bytes",
    ),
    (SEEDS, f"seeds: [0, {2**70}]", "seeds[1]", "is refused; allowed: a whole number from 0"),
    ("fnr: {p: 0.5}", f"fnr: {{epochs: {2**64}}}", "recipes.fnr.fnr.epochs", "is refused"),
    (
        "name: digits",
        "name: digitz",
        "data.name",
        "did you mean 'digits'?); allowed: digits",
    ),
    ("name: digits", "name: digits\n  sises: [8, 8]", "data.sises", "did you mean 'size'"),
    ("validation: 0.1", "# gone", "data.validation", "is missing"),
    ("alpha: 0.1", "alpha: .nan", "scenarios.dirichlet.alpha", "a number above 0"),
    ("alpha: 0.1", "alhpa: 0.1", "scenarios.dirichlet.alhpa", "did you mean 'alpha'"),
    ("alpha: 0.1", "alpha: 0.1, nois: {}", "scenarios.dirichlet.nois", "did you mean 'noise'"),
    (SCENARIO, "clients: 20, partition: similarity", "scenarios.dirichlet.s", "is missing"),
    (SCENARIO, "clients: 20, partition: mixed, alpha: 1", "scenarios.dirichlet.alpha", "beta"),
    (
        "alpha: 0.1",
        "alpha: 0.1, noise: {form: levl}",
        "scenarios.dirichlet.noise.form",
        "did you mean 'level'?); allowed: level, equal, space",
    ),
    (
        "alpha: 0.1",
        "alpha: 0.1, noise: {sigma: 0.5, from: level}",
        "scenarios.dirichlet.noise.from",
        "did you mean 'form'?); allowed: sigma, form",
    ),
    ("partition: dirichlet", "partition: dirichlett", "scenarios.dirichlet.partition", "shards"),
    ("scenario_names: [dirichlet]", "scenario_names: [dirichle]", "scenario_names", "did you mean"),
    ("scenario_names: [dirichlet]", "scenario_names: [a.1]", "scenario_names[0]", "dots"),
    ("scenario_names: [dirichlet]", "scenario_names: []", "scenario_names", "at least 1"),
    (
        "scenario_names: [dirichlet]",
        f"scenario_names: [{'d' * 300}]",
        "scenario_names[0]",
        "at most 100 characters",
    ),
    ("recipe_names: [fedavg", "recipe_names: [fedagv", "recipe_names[0]", "did you mean 'fedavg'"),
    ("recipe_names: [fedavg", "recipe_names: [fedavg, fedavg", "recipe_names", "named twice"),
    ("{p: 0.5}", "{q: 0.5}", "recipes.fnr.fnr.q", "allowed: p"),
    ("fnr: {fnr: {p: 0.5}}", "fnr: {ccn: {T: 1.0}}", "recipes.fnr.ccn", "allowed: fnr"),
    ("fnr: {fnr: {p: 0.5}}", "fnr: {fnr: 0.5}", "recipes.fnr.fnr", "keys with values"),
    ("  scaffold: {}", "  scaffold: false", "recipes.scaffold", "keys with values"),
    (
        "  momentum: null",
        "  callbacks: {early_stop: false}",
        "train.callbacks.early_stop",
        "keys with values",
    ),
    ("  scaffold: {}", "  scaffold: {1: 2}", "recipes.scaffold: the key 1 is", "allowed: text"),
    ("  scaffold: {}", "  scaffold: {train: {null: 2}}", "recipes.scaffold.train", "key None is"),
    ("lr: 0.1", "lr: {start: 0.1, 1: 2}", "train.lr[1] = 1 is refused", "allowed: text"),
    ("  scaffold: {}", "  scafold: {}", "recipes.scafold", "did you mean 'scaffold'"),
    ("  scaffold: {}", f"  {'s' * 300}: {{recipe: scaffold}}", "recipes.", "at most 100 char"),
    (
        "experiment: digits-label-skew",
        "experiment:",
        "experiment = null is refused",
        "allowed: text",
    ),
    ("  momentum: null", "  metrics: [3]", "train.metrics", "a list of metrics, or {metric: op"),
    ("lr: 0.1", "lr: {start: 0.1, decay: step, every: 0}", "train.lr", "(rounds, from 1 up)"),
    (SEEDS, "seeds: [0, 1, 1]", "seeds", "1 is named twice"),
    ("model_options: {}", "model_options: {hiden: 3}", "train.model_options.hiden", "'hidden'"),
    ("lr: 0.1", "lr: {start: 0.1, decay: cosin}", "train.lr", "did you mean 'cosine'"),
    ("optimizer: sgd", "optimiser: sgd", "train.optimiser", "did you mean 'optimizer'"),
    ("memory_mb: 2048", "memory: 2048", "machine.memory", "did you mean 'memory_mb'"),
    ("silos: 3", "silos: 21", "deploy.silos", "2 to 20, the clients of scenario 'dirichlet'"),
    ("  seed: 0", "  seed: 7", "deploy.seed", "allowed: 0, 1, 2"),
    (
        "  scaffold: {}",
        "  scaffold: {train: {epochs: 3}}",
        "recipes.scaffold.train.epochs",
        "lr, mom",
    ),
    ("experiment:", "experment:", "experment", "did you mean 'experiment'"),
    (TUNE, "\nchoose: {grid: {moon: {mu: [1]}}}\n", "choose.grid.moon is a method of no", "train"),
    *(
        (TUNE, f"\ntune: {{{text}}}\n", where, part)
        for text, where, part in (
            ("seeds: [9], grid: {trian: {lr: [1]}}", "tune.grid.trian", "did you mean 'train'"),
            ("seeds: [9], grid: {train: {lr: [1, -1]}}", "tune.grid.train.lr", "above 0"),
            ("seeds: [9], grid: {train: {epochs: [1]}}", "tune.grid.train.epochs", "lr, momentum"),
            ("seeds: [9], grid: {train: {lr: 0.1}}", "tune.grid.train.lr", "a list"),
            ("seeds: [9], grid: {fnr: {p: [1, 0.5, 1]}}", "tune.grid.fnr.p", "each of them once"),
            ("seeds: [9], grid: {fnr: {p: []}}", "tune.grid.fnr.p", "each of them once"),
            ("seeds: [9], grid: {fnr: {p: [2]}}", "tune.grid.fnr.p", "from 0 to 1"),
            ("seeds: [9], grid: {fnr: {q: [1]}}", "tune.grid.fnr.q", "allowed: p"),
            ("seeds: [9], grid: {}", "tune.grid", "at least 1"),
            (
                "seeds: [9], grid: {moon: {mu: [1]}}",
                "tune.grid.moon is a method of no",
                "train, cc",
            ),
            ("seeds: [0, 9], grid: {fnr: {p: [1]}}", "tune.seeds", "other seeds"),
            ("seeds: [9, 9], grid: {fnr: {p: [1]}}", "tune.seeds", "9 is named twice"),
            ("seeds: [9], scenario: dirichle, grid: {fnr: {p: [1]}}", "tune.scenario", "did you"),
            ("seeds: [9], recipes: [fnrr], grid: {fnr: {p: [1]}}", "tune.recipes", "'fnr'"),
            (
                "seeds: [9], trails: 2, grid: {fnr: {p: [1]}}",
                "tune.trails",
                "did you mean 'trials'",
            ),
        )
    ),
]


@pytest.mark.parametrize(("old", "new", "where", "part"), CASES)
def test_a_mistake_is_named(tmp_path: Path, old: str, new: str, where: str, part: str) -> None:
    lines = refusals(tmp_path, (old, new))
    assert any(line.startswith(f"params.yaml: {where}") and part in line for line in lines), lines
    assert len(new) < 300 or all(len(line) < 300 for line in lines), "what is very long is cut"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (GOOD.replace("  lr: 0.1", "  lr: 0.1\n  lr: 0.2"), "'lr' is there twice"),
        (GOOD.replace("train:", "train: ["), "not YAML"),
        *((text, "holds no settings; allowed keys: experiment") for text in ("", "[]", "3")),
    ],
)
def test_a_file_that_is_not_read_as_it_looks_is_refused(
    tmp_path: Path, text: str, part: str
) -> None:
    (line,) = refusals(tmp_path, text=text)
    assert "params.yaml: " in line and part in line


def test_what_is_read_is_what_was_meant(tmp_path: Path) -> None:
    """A scenario called `on`, and 1e-3: YAML 1.1 takes them for true and for text.

    An entry may be empty, and may have another name than its recipe.
    """
    settings = loaded(
        tmp_path,
        ("[dirichlet]", "[on]"),
        ("\n  dirichlet: {", "\n  on: {"),
        ("scenario: dirichlet", "scenario: on"),
        ("  lr: 0.1", "  lr: 1e-3"),
        ("  scaffold: {}", "  scaffold:\n  mine: {recipe: scaffold+fnr, fnr: {p: 0.2}}"),
    )
    assert settings.deploy is not None
    assert (
        settings.scenario_names == list(settings.scenarios) == [settings.deploy.scenario] == ["on"]
    )
    assert settings.units()[0].key == "on-fedavg-0" and settings.train.lr == 0.001
    found = {name: of.settings for name, of in settings.recipes.items()}
    assert (found["mine"], found["scaffold"]) == ({"fnr": {"p": 0.2}}, {})
    assert settings.composition("mine") == "scaffold+fnr"


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    changes = [
        ("name: digits", "name: x"),
        ("alpha: 0.1", "alpha: -1"),
        ("{p: 0.5}", "{q: 0.5, p: x}"),
        ("mlp", "x"),
    ]
    places = {line.split()[1] for line in refusals(tmp_path, *changes)}
    assert places == {
        "data.name",
        "scenarios.dirichlet.alpha",
        "recipes.fnr.fnr.p",
        "recipes.fnr.fnr.q",
        "train.model",
    }


def test_check_composes_every_recipe(tmp_path: Path) -> None:
    """SCAFFOLD divides by the step size, and FNR-FL needs a public split: known only from the other
    settings."""
    first, second = refusals(
        tmp_path, ("optimizer: sgd", "optimizer: adam"), ("public: 100", "public: 0")
    )
    assert first.startswith("params.yaml: recipes.scaffold: scaffold: optimizer = 'adam'")
    assert second.startswith("params.yaml: recipes.fnr: fnr: needs a public split")
    assert [path.name for path in tmp_path.iterdir()] == ["params.yaml"], "nothing is written"


def test_a_leak_says_so_in_its_name_and_needs_no_public_split(tmp_path: Path) -> None:
    """The name is in every folder, table, plot and MLflow page. With public: 0 the clients can hold
    all training images."""
    registry.register(Peek)
    leaking = "{recipe: peek}"
    no_grid = ("    fnr: {p: [0.3, 0.5, 0.7]}\n", "")
    (line,) = refusals(tmp_path, ("fnr: {fnr: {p: 0.5}}", f"fnr: {leaking}"), no_grid)
    assert "recipes.fnr" in line and "trains on the test set" in line
    assert "call the entry 'fnr-leak'" in line
    everything = [
        ("validation: 0.1", "validation: 0.0"),
        ("public: 100", "public: 0"),
        ("scaffold, fnr, fednnnn", "scaffold, fnr-leak, fednnnn"),
        no_grid,
    ]
    named = ("  fnr: {fnr: {p: 0.5}}", f"  fnr-leak: {leaking}")
    assert refusals(tmp_path, *everything, named) == []
    (line,) = refusals(tmp_path, *everything, (named[0], "  fnr-leak: {recipe: fnr}"))
    assert "fnr: needs a public split, but public is 0" in line


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            [("momentum: null", "momentum: 0.5"), ("  scaffold: {}", "  scaffold: {recipe: sgdm}")],
            "recipes.scaffold: sgdm: momentum = 0.5 and sgdm.gamma = 0.9",
        ),
        (
            [("  scaffold: {}", "  scaffold: {recipe: sgdm, train: {momentum: 0.5}}")],
            "recipes.scaffold: sgdm: momentum = 0.5 and sgdm.gamma = 0.9",
        ),
        (
            [
                ("  scaffold: {}", "  scaffold: {}\n  centralised: {}"),
                ("  recipe: fednnnn", "  recipe: centralised"),
            ],
            "recipes.centralised: 'centralised' is for simulations and can't be deployed",
        ),
        (
            [("fnr: {fnr: {p: 0.5}}", "fnr: {recipe: fednnnn, fednnnn: {variant: norm}}")],
            "variant = 'norm' is unknown (did you mean 'norm_norm'?)",
        ),
        (
            [
                ("scenario_names: [dirichlet]", "scenario_names: [dirichlet, dirichlet-b]"),
                ("scenarios:\n", "scenarios:\n  dirichlet-b: {partition: iid, clients: 4}\n"),
                ("recipe_names: [fedavg", "recipe_names: [b-fedavg, fedavg"),
                ("  fedavg: {}", "  fedavg: {}\n  b-fedavg: {recipe: fedprox}"),
            ],
            "recipe_names: dirichlet-b-fedavg would be two items, as scenario-recipe",
        ),
    ],
)
def test_check_finds_what_single_settings_do_not_show(
    tmp_path: Path, changes: list[tuple[str, str]], told: str
) -> None:
    assert told in "\n".join(refusals(tmp_path, *changes))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "research" / "experiments").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_experiments_that_come_with_the_project_are_good(path: Path, tmp_path: Path) -> None:
    beside = [path.parent / "cost.py", *(ROOT / "research" / "methods").glob("*.py")]
    for file in beside:  # a callback of one of them, methods of all
        shutil.copy(file, tmp_path)
    assert refusals(tmp_path, text=path.read_text()) == []


def test_a_recipe_may_have_training_settings_of_its_own(tmp_path: Path) -> None:
    """In its items, its deployment and their fingerprints; no other recipe changes."""
    before = loaded(tmp_path)
    own = "  scaffold: {train: {lr: 0.05, weight_decay: 0.01, momentum: null}}"
    settings = loaded(tmp_path, ("  scaffold: {}", own), ("recipe: fednnnn", "recipe: scaffold"))
    changed = {"lr": 0.05, "weight_decay": 0.01}
    assert settings.train_of("scaffold").model_dump() == settings.train.model_dump() | changed
    assert settings.train_of("fedavg") is settings.train and settings.train.lr == 0.1
    for unit in settings.units():
        wanted = (
            {f"train.{key}": value for key, value in changed.items()}
            if unit.recipe == "scaffold"
            else {}
        )
        assert settings.params(unit) == before.params(unit) | wanted
        assert (of_training(settings, unit) == of_training(before, unit)) is not bool(wanted)
    assert settings.deploy is not None
    assert deployment_of(settings, settings.deploy).train_args.lr == 0.05
    assert not {"data", "scenario", *config.Recipe.model_fields} & METHODS.keys(), (
        "they are keys beside methods"
    )
