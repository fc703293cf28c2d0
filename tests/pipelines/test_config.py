"""params.yaml: what is accepted, and that each mistake is one line with file, key, value and what
is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedml_noniid.pipelines.experiment import check, config
from fedml_noniid.pipelines.experiment.provenance import of_training
from fedml_noniid.pipelines.stages.deploy import deployment_of
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.recipes import METHODS
from tests.recipe_table import REPORTED

ROOT = Path(__file__).parents[2]
GOOD = (ROOT / "params.yaml").read_text()
SEEDS = next(line for line in GOOD.splitlines() if line.startswith("seeds:"))
TUNE = GOOD[GOOD.index("\ntune:") : GOOD.index("\ndeploy:")]


def mistakes(tmp_path: Path, *changes: tuple[str, str]) -> list[str]:
    """The lines that a changed params.yaml is refused with."""
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        config.load(tmp_path)
    return str(error.value).splitlines()


def test_the_default_experiment_is_good() -> None:
    settings = config.load(ROOT)
    assert {"fedavg", "fedprox", "scaffold", "fnr", "fednnnn", "ccn", "fednlr", "rfedavg"} <= set(
        settings.recipe_names
    )
    assert len(settings.seeds) >= 3
    assert settings.train.local.rate.start == settings.train.lr


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        (
            "experiment: digits-label-skew",
            "experiment: ../x",
            ["experiment: '../x' is refused", "without slashes"],
        ),
        ("experiment: digits-label-skew", "experiment: a\\b", ["experiment: 'a\\\\b' is refused"]),
        (
            "experiment: digits-label-skew",
            f"experiment: {'ö' * 101}",
            ["is refused", "at most 200 bytes"],
        ),
        (
            "rounds: 40",
            f"rounds: {10**20}",
            [f"train.rounds = {10**20} is refused", "less than or equal to 1000000000"],
        ),
        (
            "rounds: 40",
            "rounds: 2000000000",
            ["train.rounds = 2000000000", "less than or equal to 1000000000"],
        ),
        ("epochs: 2 ", f"epochs: {10**20} ", ["train.epochs", "less than or equal to 1000000000"]),
        (
            "local_steps: 0",
            "local_steps: 9999999999",
            ["train.local_steps", "less than or equal to 1000000000"],
        ),
        ("public: 100", f"public: {10**12}", ["data.public", "less than or equal to 1000000000"]),
        ("clients: 20", f"clients: {10**12}", ["clients", "less than or equal to 1000000000"]),
        (SEEDS, f"seeds: [0, {2**70}]", [f"seeds.1 = {2**70} is refused", "less than"]),
        (
            "fnr: {p: 0.5}",
            f"fnr: {{epochs: {2**64}}}",
            [f"recipes.fnr.fnr.epochs = {2**64} is refused", "64 bits"],
        ),
        (
            "model_options: {}",
            f"model_options: {{hidden: {10**12}}}",
            ["'hidden'", "at most 1000000"],
        ),
        (
            "name: digits",
            "name: digitz",
            ["data.name", "'digitz'", "did you mean 'digits'", "mnist"],
        ),
        (
            "validation: 0.1",
            "validation: -0.1",
            ["data.validation", "-0.1", "greater than or equal to 0"],
        ),
        ("validation: 0.1", "validation: 1.0", ["data.validation", "1.0", "less than 1"]),
        ("validation: 0.1", "# gone", ["data.validation is missing"]),
        ("public: 100", "public: 1.5", ["data.public", "1.5", "integer"]),
        ("alpha: 0.1", "alpha: -0.1", ["scenarios.dirichlet", "alpha=-0.1", "above 0"]),
        ("alpha: 0.1", "alpha: 0", ["scenarios.dirichlet", "alpha=0", "above 0"]),
        ("alpha: 0.1", "alpha: .nan", ["scenarios.dirichlet", "alpha=nan", "above 0"]),
        ("alpha: 0.1", "alpha: .inf", ["scenarios.dirichlet", "alpha=inf", "above 0"]),
        ("alpha: 0.1", "alpha: little", ["scenarios.dirichlet", "alpha='little'", "above 0"]),
        ("alpha: 0.1", "alpha: true", ["scenarios.dirichlet", "alpha=True", "above 0"]),
        ("alpha: 0.1", "alhpa: 0.1", ["scenarios.dirichlet", "'alhpa'", "did you mean 'alpha'"]),
        *(
            (
                "partition: dirichlet, clients: 20, participation: 1.0, alpha: 0.1",
                f"clients: 20, {text}",
                parts,
            )
            for text, parts in (
                (
                    "partition: similarity, s: 1.5",
                    ["scenarios.dirichlet", "s=1.5", "a number from 0 to 1"],
                ),
                ("partition: similarity", ["scenarios.dirichlet", "s is missing"]),
                ("partition: quantity, beta: 0", ["scenarios.dirichlet", "beta=0", "above 0"]),
                ("partition: mixed, alpha: 1", ["scenarios.dirichlet", "'alpha'", "beta"]),
                (
                    "partition: two_classes, sizes: power",
                    ["scenarios.dirichlet", "sizes='power'", "power_law"],
                ),
                (
                    "partition: two_classes, total: .nan",
                    ["scenarios.dirichlet", "total=nan", "above 0"],
                ),
                (
                    "partition: iid_unbalanced, exponent: x",
                    ["scenarios.dirichlet", "exponent='x'", "above 0"],
                ),
                (
                    "partition: shards_equal, shards_per_client: 0",
                    ["shards_per_client=0", "above 0"],
                ),
                ("partition: natural, users: 5", ["scenarios.dirichlet", "'users'", "min_samples"]),
                (
                    "partition: natural_grouped, users: all",
                    ["scenarios.dirichlet", "users='all'", "above 0"],
                ),
                (
                    "partition: natural, min_samples: 0",
                    ["scenarios.dirichlet", "min_samples=0", "above 0"],
                ),
            )
        ),
        *(
            ("alpha: 0.1", f"alpha: 0.1, noise: {text}", ["scenarios.dirichlet.noise", *parts])
            for text, parts in (
                ("{sigma: -1}", ["noise.sigma = -1", "greater than or equal to 0"]),
                ("{sigma: .inf}", ["noise.sigma = inf", "finite"]),
                ("{sigma: much}", ["noise.sigma = 'much'", "number"]),
                ("{form: level}", ["noise.sigma is missing"]),
                (
                    "{sigma: 0.5, form: levl}",
                    ["'levl'", "did you mean 'level'", "level, equal, space"],
                ),
                (
                    "{sigma: 0.5, from: level}",
                    ["unknown key", "did you mean 'form'", "allowed: sigma, form"],
                ),
                ("0.5", ["noise = 0.5"]),
            )
        ),
        ("augment: false", "augment: 1", ["train.augment", "1", "boolean"]),
        (
            "partition: dirichlet",
            "partition: dirichlett",
            ["'dirichlett'", "did you mean 'dirichlet'", "shards"],
        ),
        (
            "clients: 20",
            "clients: 0",
            ["scenarios.dirichlet.clients", "0", "greater than or equal to 1"],
        ),
        (
            "participation: 1.0",
            "participation: 0",
            ["scenarios.dirichlet.participation", "greater than 0"],
        ),
        (
            "scenario_names: [dirichlet]",
            "scenario_names: [dirichle]",
            ["scenario_names", "did you mean 'dirichlet'"],
        ),
        (
            "scenario_names: [dirichlet]",
            "scenario_names: [a.1]",
            ["scenario_names.0", "'a.1'", "letters", "dots"],
        ),
        ("scenario_names: [dirichlet]", "scenario_names: []", ["scenario_names", "at least 1"]),
        (
            "recipe_names: [fedavg",
            "recipe_names: [fedagv",
            ["recipe_names", "'fedagv'", "did you mean 'fedavg'"],
        ),
        (
            "recipe_names: [fedavg",
            "recipe_names: [fedavg, fedavg",
            ["recipe_names", "fedavg", "twice"],
        ),
        ("{p: 0.5}", "{q: 0.5}", ["recipes: fnr", "no hyper-parameter 'q'", "allowed: p"]),
        ("{p: 0.5}", "{p: high}", ["recipes: fnr", "fnr: p", "'high'", "number"]),
        ("fnr: {fnr: {p: 0.5}}", "fnr: {ccn: {T: 1.0}}", ["recipes: fnr", "'ccn'", "allowed: fnr"]),
        (
            "fnr: {fnr: {p: 0.5}}",
            "fnr: {fnr: 0.5}",
            ["recipes: fnr", "fnr = 0.5", "hyper-parameter"],
        ),
        ("  scaffold: {}", "  scafold: {}", ["recipes: scafold", "did you mean 'scaffold'"]),
        (SEEDS, "seeds: [0, 1, 1]", ["seeds", "1 is named twice"]),
        (SEEDS, "seeds: [0, 1, x]", ["seeds.2", "'x'", "integer"]),
        ("model: mlp", "model: mpl", ["train.model", "'mpl'", "did you mean 'mlp'"]),
        (
            "model_options: {}",
            "model_options: {hiden: 3}",
            ["train", "'hiden'", "did you mean 'hidden'"],
        ),
        ("lr: 0.1", "lr: .nan", ["train.lr", "nan", "finite"]),
        ("lr: 0.1", "lr: 0", ["train.lr", "0", "greater than 0"]),
        ("lr: 0.1", "lr: fast", ["train.lr", "'fast'", "number"]),
        ("optimizer: sgd", "optimiser: sgd", ["train.optimiser", "did you mean 'optimizer'"]),
        ("engine: auto", "engine: vectorised", ["train.engine", "did you mean 'vectorized'"]),
        ("threads: 1", "threads: 0", ["train.threads", "0", "greater than or equal to 1"]),
        ("threads: 1", "threads: 100000", ["train.threads", "100000", "less than or equal to 256"]),
        (
            "memory_mb: 2048",
            "memory_mb: 0",
            ["machine.memory_mb", "0", "greater than or equal to 1"],
        ),
        (
            "memory_mb: 2048",
            "memory: 2048",
            ["machine.memory", "did you mean 'memory_mb'", "processes"],
        ),
        (
            "processes: null",
            "processes: 5000",
            ["machine.processes", "5000", "less than or equal to 1024"],
        ),
        ("processes: null", "processes: two", ["machine.processes", "'two'", "integer"]),
        ("device: auto", "device: tpu", ["train.device", "'tpu'", "cuda"]),
        (SEEDS, f"seeds: [0, {2**63}]", ["seeds.1", str(2**63), "less than"]),
        (SEEDS, "seeds: [0, -1]", ["seeds.1", "-1", "greater than or equal to 0"]),
        ("silos: 3", "silos: 21", ["deploy.silos", "21", "2 to 20", "'dirichlet'"]),
        ("silos: 3", "silos: 1", ["deploy.silos", "1", "greater than or equal to 2"]),
        (
            "  scaffold: {}",
            f"  {'s' * 300}: {{recipe: scaffold}}",
            ["recipes", "at most 100 characters"],
        ),
        (
            "scenario_names: [dirichlet]",
            f"scenario_names: [{'d' * 300}]",
            ["scenario_names.0", "at most 100 char"],
        ),
        (
            "experiment: digits",
            f"experiment: {'digits' * 100}",
            ["experiment", "at most 200 bytes"],
        ),
        ("alpha: 0.1", f"alpha: {'9' * 400}", ["scenarios.dirichlet", "alpha=9999", "above 0"]),
        ("  lr: 0.1", f"  lr: {'9' * 400}", ["train.lr", "9999"]),
        ("public: 100", f"public: -{'9' * 400}", ["data.public", "-9999"]),
        ("{p: 0.5}", f"{{p: {'9' * 400}}}", ["recipes: fnr", "fnr: p"]),
        ("  seed: 0", "  seed: 7", ["deploy.seed", "7", "0, 1, 2"]),
        *(
            ("  scaffold: {}", f"  scaffold: {{train: {text}}}", ["recipes.scaffold.train", *parts])
            for text, parts in (
                (
                    "{epochs: 3}",
                    ["'epochs' can't be set for one recipe", "allowed: lr, momentum, weight_decay"],
                ),
                ("{lrr: 1}", ["'lrr'", "did you mean 'lr'"]),
                ("{lr: 0}", ["train.lr = 0 is refused", "greater than 0"]),
                ("{momentum: 1}", ["train.momentum = 1 is refused", "less than 1"]),
                ("{weight_decay: much}", ["train.weight_decay = 'much'", "number"]),
            )
        ),
        *(
            (TUNE, f"\ntune: {{{text}}}\n", ["tune", *parts])
            for text, parts in (
                (
                    "seeds: [9], grid: {trian: {lr: [1]}}",
                    ["tune.grid: section 'trian'", "did you mean 'train'"],
                ),
                (
                    "seeds: [9], grid: {train: {lr: [1, -1]}}",
                    ["tune.grid: train.lr = -1 is refused", "greater than 0"],
                ),
                (
                    "seeds: [9], grid: {train: {epochs: [1]}}",
                    ["tune.grid: train: 'epochs'", "allowed: lr, momentum"],
                ),
                ("seeds: [9], grid: {train: {lr: 0.1}}", ["tune.grid.train.lr = 0.1", "list"]),
                (
                    "seeds: [9], grid: {fnr: {p: [1, 0.5, 1]}}",
                    ["tune.grid: fnr.p = [1, 0.5, 1]", "each of them once"],
                ),
                (
                    "seeds: [9], grid: {fnr: {p: []}}",
                    ["tune.grid: fnr.p = []", "each of them once"],
                ),
                ("seeds: [9], grid: {fnr: {p: [2]}}", ["tune.grid: fnr: p = 2 must lie in [0, 1]"]),
                (
                    "seeds: [9], grid: {fnr: {q: [1]}}",
                    ["tune.grid", "no hyper-parameter 'q'", "allowed: p"],
                ),
                ("seeds: [9], grid: {}", ["tune.grid = {} is refused", "at least 1"]),
                ("seeds: [], grid: {fnr: {p: [1]}}", ["tune.seeds = []", "at least 1"]),
                (
                    "seeds: [0, 9], grid: {fnr: {p: [1]}}",
                    ["tune.seeds: 0 is refused", "other seeds"],
                ),
                ("seeds: [9, 9], grid: {fnr: {p: [1]}}", ["tune.seeds: 9 is named twice"]),
                (
                    "seeds: [9], scenario: dirichle, grid: {fnr: {p: [1]}}",
                    ["tune.scenario: 'dirichle'", "did you mean"],
                ),
                (
                    "seeds: [9], recipes: [fnrr], grid: {fnr: {p: [1]}}",
                    ["tune.recipes: 'fnrr'", "did you mean 'fnr'"],
                ),
                (
                    "seeds: [9], trials: 1, grid: {fnr: {p: [1]}}",
                    ["tune.trials = 1", "greater than or equal to 2"],
                ),
                (
                    "seeds: [9], trails: 2, grid: {fnr: {p: [1]}}",
                    ["'tune.trails'", "did you mean 'trials'"],
                ),
            )
        ),
        ("experiment:", "experment:", ["experment", "did you mean 'experiment'"]),
        ("  lr: 0.1", "  lr: 0.1\n  lr: 0.2", ["line ", "'lr' is there twice"]),
        ("train:", "train: [", ["not YAML"]),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, old: str, new: str, parts: list[str]) -> None:
    found = mistakes(tmp_path, (old, new))
    assert all(line.startswith("params.yaml: ") for line in found)
    assert any(all(part in line for part in parts) for line in found), found
    assert len(new) < 300 or all(len(line) < 300 for line in found), "what is very long is cut"


def test_a_scenario_may_be_called_on(tmp_path: Path) -> None:
    """Which is true in YAML 1.1."""
    text = GOOD.replace("[dirichlet]", "[on]").replace("\n  dirichlet: {", "\n  on: {")
    (tmp_path / "params.yaml").write_text(text.replace("scenario: dirichlet", "scenario: on"))
    settings = config.load(tmp_path)
    assert (
        settings.scenario_names == list(settings.scenarios) == [settings.deploy.scenario] == ["on"]
    )
    assert settings.units()[0].key == "on-fedavg-0"
    check.check(settings)


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    changes = [
        ("name: digits", "name: x"),
        ("alpha: 0.1", "alpha: -1"),
        ("{p: 0.5}", "{q: 0.5, p: x}"),
        ("mlp", "x"),
    ]
    found = mistakes(tmp_path, *changes)
    assert len(found) == 5, found


@pytest.mark.parametrize("text", ["", "[]", "3"])
def test_a_file_without_settings_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(
        UserError, match=r"params\.yaml: holds no settings; allowed keys: experiment"
    ):
        config.load(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"params\.yaml: can't be read"):
        config.load(tmp_path)


def test_numbers_are_read_as_dvc_reads_them(tmp_path: Path) -> None:
    """YAML 1.1 takes 1e-3 for text."""
    (tmp_path / "params.yaml").write_text(GOOD.replace("  lr: 0.1", "  lr: 1e-3"))
    assert config.load(tmp_path).train.lr == 0.001


def test_an_entry_without_settings_may_be_empty(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(GOOD.replace("  scaffold: {}", "  scaffold:"))
    assert config.load(tmp_path).recipes["scaffold"].settings == {}


def test_an_entry_may_have_a_name_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(
        GOOD.replace(
            "  scaffold: {}", "  scaffold: {}\n  mine: {recipe: scaffold+fnr, fnr: {p: 0.2}}"
        )
    )
    settings = config.load(tmp_path)
    assert settings.composition("mine") == "scaffold+fnr"
    assert settings.recipes["mine"].settings == {"fnr": {"p": 0.2}}


@pytest.mark.parametrize(
    "options",
    [
        {"partition": "similarity", "s": 0, "remainder": "dealt"},
        {"partition": "two_classes", "sizes": "power_law", "total": None, "exponent": 2},
        {"partition": "iid_unbalanced", "sizes": "lognormal", "sigma": 0.5},
        {"partition": "natural", "min_samples": 20},
        {"partition": "natural_grouped", "users": None},
    ],
)
def test_options_of_partitions(options: dict[str, object]) -> None:
    scenario = config.Scenario.model_validate({"clients": 20, **options})
    assert {"partition": scenario.partition, **scenario.options} == options


def test_noise_stands_beside_the_options_of_the_partition() -> None:
    entry = {"partition": "dirichlet", "clients": 20, "alpha": 0.5, "noise": {"sigma": 0.5}}
    scenario = config.Scenario.model_validate(entry)
    assert scenario.noise is not None
    assert (scenario.noise.sigma, scenario.noise.form, scenario.options) == (
        0.5,
        "level",
        {"alpha": 0.5},
    )
    assert config.Scenario(partition="iid", clients=20).noise is None


@pytest.mark.parametrize(("share", "cohort"), [(1.0, 20), (0.5, 10), (0.01, 1)])
def test_participation_is_a_share_of_the_clients(share: float, cohort: int) -> None:
    assert config.Scenario(partition="iid", clients=20, participation=share).cohort == cohort


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


def test_check_accepts_the_default(tmp_path: Path) -> None:
    assert refusals(tmp_path) == []


def test_check_composes_every_recipe(tmp_path: Path) -> None:
    """SCAFFOLD divides by the step size, and FNR-FL needs a public split: known only from the other
    settings."""
    lines = refusals(tmp_path, ("optimizer: sgd", "optimizer: adam"), ("public: 100", "public: 0"))
    assert len(lines) == 2
    assert lines[0].startswith("params.yaml: recipes.scaffold: scaffold: optimizer = 'adam'")
    assert lines[1].startswith("params.yaml: recipes.fnr: fnr: needs a public split")
    assert [path.name for path in tmp_path.iterdir()] == ["params.yaml"], "nothing is written"


def test_a_leak_has_to_say_so_in_its_name(tmp_path: Path) -> None:
    """The name is in every folder, table, plot and MLflow page."""
    leaking = "fnr: {recipe: fnr_authors, fnr_authors: {p: 0.5, public_data: test}}"
    (line,) = refusals(tmp_path, ("fnr: {fnr: {p: 0.5}}", leaking))
    assert (
        "recipes.fnr" in line
        and "trains on the test set" in line
        and "call the entry 'fnr-leak'" in line
    )
    named = [
        ("scaffold, fnr, fednnnn", "scaffold, fnr-leak, fednnnn"),
        (
            "  fnr: {fnr: {p: 0.5}}",
            "  fnr-leak: {recipe: fnr_authors, fnr_authors: {p: 0.5, public_data: test}}",
        ),
    ]
    assert refusals(tmp_path, *named) == []


def test_a_leak_reads_the_test_set_and_needs_no_public_split(tmp_path: Path) -> None:
    """With public: 0 the clients can hold all training images, as in FNR-FL's repository."""
    everything = [
        ("validation: 0.1", "validation: 0.0"),
        ("public: 100", "public: 0"),
        ("scaffold, fnr, fednnnn", "scaffold, fnr-leak, fednnnn"),
    ]
    leaking = "  fnr-leak: {recipe: fnr_authors, fnr_authors: {p: 0.5, public_data: test}}"
    assert refusals(tmp_path, *everything, ("  fnr: {fnr: {p: 0.5}}", leaking)) == []
    sound = leaking.replace("test", "train_holdout")
    (line,) = refusals(tmp_path, *everything, ("  fnr: {fnr: {p: 0.5}}", sound))
    assert "fnr_authors: needs a public split, but public is 0" in line


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
            "deploy.recipe = 'centralised' can't be deployed: ",
        ),
        (
            [
                (
                    "fnr: {fnr: {p: 0.5}}",
                    "fnr: {recipe: fnr_authors, fnr_authors: {fnr_reg: squared}}",
                )
            ],
            "fnr_reg = 'squared' is unknown (did you mean 'squared_live'?)",
        ),
    ],
)
def test_check_finds_what_single_settings_do_not_show(
    tmp_path: Path, changes: list[tuple[str, str]], told: str
) -> None:
    assert told in "\n".join(refusals(tmp_path, *changes))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_experiments_that_come_with_the_project_are_good(path: Path, tmp_path: Path) -> None:
    assert refusals(tmp_path, text=path.read_text()) == []


def test_a_recipe_may_have_training_settings_of_its_own(tmp_path: Path) -> None:
    """In its items, its deployment and their fingerprints; no other recipe changes."""
    (tmp_path / "params.yaml").write_text(GOOD)
    before = config.load(tmp_path)
    own = [
        ("  scaffold: {}", "  scaffold: {train: {lr: 0.05, weight_decay: 0.01, momentum: null}}")
    ]
    assert refusals(tmp_path, *own, ("recipe: fednnnn", "recipe: scaffold")) == []
    settings = config.load(tmp_path)
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
    assert deployment_of(settings, settings.deploy).train_args.learning_rate == 0.05
    assert not {"data", "scenario", *config.Recipe.model_fields} & METHODS.keys(), (
        "they are keys beside methods"
    )


def test_the_experiment_of_all_methods_has_all_methods_and_the_reported_combinations() -> None:
    """ "fedavg+x" is x."""
    path = ROOT / "experiments" / "methods.yaml"
    settings = config.checked(config.read_yaml(path), path.name)
    compositions = {settings.composition(name) for name in settings.recipe_names}
    assert {"fedavg", *METHODS, *REPORTED} <= compositions
