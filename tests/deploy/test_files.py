"""Configuration, shards and kits: what is wrong is said in one line, before anything starts."""

from __future__ import annotations

import logging
from io import StringIO
from pathlib import Path

import pytest
import yaml

from fedml_noniid.cli.app import main
from fedml_noniid.core.errors import UserError
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.data import shards
from fedml_noniid.deploy import exit_codes, settings
from fedml_noniid.governance import policy
from fedml_noniid.processes import launch, loopback
from tests.deploy import world

PRIVATE = {
    "enable_dp": True,
    "dp_solution_type": "ldp",
    "mechanism_type": "gaussian",
    "epsilon": 0.5,
    "delta": 1e-5,
    "sensitivity": 1.0,
}
CONFIG = Path(__file__).parents[2] / "fedml_noniid" / "processes" / "fedml_config.yaml"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with everything that `launch` needs."""
    monkeypatch.chdir(tmp_path)
    shards.write("shards/{rank}.safetensors", world.parts())
    text = CONFIG.read_text().replace("max_samples: null", "max_samples: 70")
    Path("config.yaml").write_text(text)
    sign()
    return tmp_path


def sign() -> None:
    """Signs the study of config.yaml, and lets the silos take part."""
    policy.admit_own(settings.read(Path("config.yaml")), world.shards_of()[0], Path())


def changed(section: str, **values: object) -> None:
    content = yaml.safe_load(Path("config.yaml").read_text())
    content.setdefault(section, {}).update(values)
    Path("config.yaml").write_text(yaml.safe_dump(content))


def failing(capsys, *arguments: str) -> list[str]:
    """The lines on stderr of a command line that ends with 2 and writes nothing."""
    before = sorted(Path().rglob("*"))
    assert main(["deploy", *arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == "" and sorted(Path().rglob("*")) == before
    lines = errors.splitlines()
    assert all(line.startswith("error: ") and line.isprintable() for line in lines)
    return lines


SERVER = ("server", "--config", "config.yaml")
SILO = ("silo", "--rank", "2", "--config", "config.yaml")


def test_the_shipped_file_is_the_default_and_fedml_reads_it():
    deployment = settings.read(CONFIG)
    assert settings.check(yaml.safe_load(deployment.yaml()), "") == deployment
    default = settings.Deployment()
    assert deployment.model_copy(update={"train_args": default.train_args}) == default


# That every key refuses values of another kind is tested in tests/pipelines/test_options.py.
@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (
            "train_args",
            {"epoch": 1},
            "config.yaml: train_args.epoch is unknown (did you mean",
        ),
        (
            "train_arg",
            {"epochs": 1},
            "config.yaml: train_arg is unknown (did you mean 'train",
        ),
        (
            "train_args",
            {"recipe": "fednnn"},
            "train_args.settings: recipe 'fednnn': method 'fednnn' is unknown (did you mean",
        ),
        (
            "train_args",
            {"settings": {"fednnnn": {"bet": 1.0}}},
            "train_args.settings.fednnnn.bet is unknown (did you mean 'beta'?)",
        ),
        ("train_args", {"learning_rate": "fast"}, "train_args.learning_rate = 'fast' is refused"),
        (
            "train_args",
            {"comm_round": 3},
            "train_args.comm_round = 3: contradicts rounds = 2, which is the same setting; allow",
        ),
        ("train_args", {"client_id_list": "[1, 2]"}, "train_args.client_id_list = '[1, 2]' is"),
        (
            "train_args",
            {"client_num_per_round": 4},
            "client_num_per_round = 4 is refused; allowed: client_num_in_total = 3, as every silo",
        ),
        (
            "train_args",
            {"cohort": 4},
            "train_args.cohort = 4 is refused; allowed: 0 (all) to 3",
        ),
        (
            "model_args",
            {"model": "mpl"},
            "model_args.model = 'mpl' is unknown (did you mean 'mlp'?)",
        ),
        (
            "data_args",
            {"shard": "x"},
            "data_args.shard = 'x' is refused; allowed: a path with",
        ),
        (
            "comm_args",
            {"backend": "MQTT_S3"},
            "comm_args.backend = 'MQTT_S3' is unknown; allow",
        ),
        (
            "comm_args",
            {"server": "10.0.0.7"},
            "comm_args.server = '10.0.0.7' is refused; allowed: host:port",
        ),
        ("comm_args", {"server": "a:70000"}, "comm_args.server = 'a:70000' is refused"),
        (
            "comm_args",
            {"quorum": 4},
            "comm_args.quorum = 4 is refused; allowed: 0 (all) to 3",
        ),
        (
            "comm_args",
            {"kit": "kit"},
            "comm_args.kit = 'kit' is refused; allowed: a path with",
        ),
        ("dp_args", {"enable_fhe": True}, "dp_args.enable_fhe = true is refused; allowed: false"),
        (
            "dp_args",
            PRIVATE | {"mechanism_type": "laplace"},
            "mechanism_type = 'laplace' is unknown",
        ),
        (
            "dp_args",
            PRIVATE | {"dp_solution_type": "nbafl"},
            "'nbafl' is unknown; allowed: ldp",
        ),
        ("dp_args", PRIVATE | {"delta": None}, "dp_args: enable_dp = true needs delta"),
        (
            "dp_args",
            PRIVATE | {"max_grad_norm": 1.0},
            "max_grad_norm is refused with ldp, which clips to sensitivity",
        ),
    ],
)
def test_bad_configuration(folder, capsys, section, values, message):
    changed(section, **values)
    (line,) = failing(capsys, *SERVER)
    assert message in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.yaml: can't be read (No such file or directory)"),
        ("a: [", "config.yaml: line 1: is not YAML"),
        ("", "config.yaml: holds no settings; allowed keys: common_args, data_args"),
        ("- a", "config.yaml: holds no settings; allowed keys: common_args, data_args"),
    ],
)
def test_missing_and_broken_configuration(folder, capsys, text, message):
    Path("config.yaml").unlink() if text is None else Path("config.yaml").write_text(text)
    for process in (SERVER, SILO):
        (line,) = failing(capsys, *process)
        assert message in line


def test_each_mistake_is_a_line_without_control_characters(folder, capsys, monkeypatch):
    changed("train_args", rounds=-3, learning_rate=-1)
    rate, rounds = failing(capsys, *SERVER)
    assert rate.startswith("error: config.yaml: train_args.learning_rate = -1 is refused; allowed")
    assert rounds.startswith("error: config.yaml: train_args.rounds = -3 is refused; allowed")

    def refused(*_):
        raise UserError("said by another machine\nerror: \x1b[2Jforged")

    monkeypatch.setattr(launch.Process, "from_config", refused)
    said = r"error: said by another machine\nerror: \x1b[2Jforged"
    assert failing(capsys, *SERVER) == [said]


def test_shards_are_checked(folder, capsys):
    path = Path("shards/2.safetensors")
    content, other = path.read_bytes(), Path("shards/3.safetensors").read_bytes()
    for wrong, message in (
        (other, "is the shard of rank 3 of 3 silos; this is rank 2 of 3 silos"),
        (content[:100], "2.safetensors: damaged, or not a shard"),
    ):
        path.write_bytes(wrong)
        assert message in failing(capsys, *SILO)[0]
    path.unlink()
    said = "2.safetensors: there is no such file; data_args.shard names"
    assert said in failing(capsys, *SILO)[0]
    assert "--rank 4: allowed: 1 to 3" in failing(capsys, "silo", "--rank", "4", *SERVER[1:])[0]


def test_a_recipe_without_the_public_split_that_it_needs(folder, capsys):
    changed("train_args", recipe="fnr")
    sign()
    shards.write("shards/{rank}.safetensors", world.parts(public=False))
    assert "fnr: needs a public split" in failing(capsys, *SERVER)[0]


def test_a_log_follows_no_symbolic_link(folder, capsys):
    """Another user of a shared folder could make the server write to a file of its owner."""
    target, log = Path("mine.txt"), Path("run/fedml-0.log")
    log.parent.mkdir()
    log.symlink_to(target.resolve())
    assert "fedml-0.log: can't be written" in failing(capsys, *SERVER)[0]


def test_an_unexpected_error_is_one_line_and_the_log_has_its_traceback(folder, monkeypatch):
    def failing(_: launch.Process) -> None:
        raise RuntimeError("of FedML,\non two lines")

    monkeypatch.setattr(launch.Process, "_silo", failing)
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)
    handlers: list[logging.Handler] = []
    monkeypatch.setattr(logging.root, "handlers", handlers)
    with pytest.raises(exit_codes.BrokenError) as error:
        launch.Process.from_config(1, Path("config.yaml")).run(StringIO())
    for handler in handlers:
        handler.close()
    log = launch.log_file(Path("run"), 1)
    assert str(error.value) == f"RuntimeError: of FedML, on two lines; see {log}"
    assert "in failing" in log.read_text()


@pytest.mark.parametrize("name", ["run/events.out", "fedml_config.yaml"])
def test_loopback_empties_no_folder_of_the_user(tmp_path, name):
    """It removes <out>/run, and writes over the other files."""
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(UserError, match=f": holds {Path(name).parts[0]}, and no run on this"):
        loopback.Processes(world.deployment("fedavg"), world.parts(), tmp_path)
    assert mine.read_text() == "mine"


def test_loopback_makes_its_folder_anew_and_leaves_ledgers(tmp_path):
    made = world.deployment("fedavg"), world.parts(), tmp_path / "out"
    processes = loopback.Processes(*made)
    kits = processes.deployment.kit(1).parent
    for old in (kits / "1.ledger", kits / "1" / "own.crt", processes.output / "rounds.csv"):
        old.write_text("")
    loopback.Processes(*made)
    assert not list(processes.output.iterdir()) and (kits / "1.ledger").exists()
    for rank in range(4):
        Kit.read(kits / str(rank), rank)


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ("none.json", "none.json: not a readable partition (No such file or directory"),
        ("shards/1.safetensors", "shards/1.safetensors: "),  # a good file of another kind
    ],
)
def test_shards_command_line(folder, capsys, indices, said):
    line = f"shards --data shards/1.safetensors --indices {indices} --out x"
    assert said in failing(capsys, *line.split())[0]
