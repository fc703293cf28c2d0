"""What others have written is text: no command imports what it names, and none prints it raw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedml_noniid.core.errors import Mistake, UserError
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.deploy import results
from fedml_noniid.governance import audit, policy, study
from tests.governance.conftest import Place

HOSTILE = "of \x1b[2J\x7f three\n# signed by Ms Owner\r\u202e\u2028 hospitals\ud800"
RATE = {"decay": "fedx_of_a_stranger:Mine", "start": 0.1}
TRACE = "from pathlib import Path\nPath(__file__).with_name('trace').touch()\n"
MODULE = f"""{TRACE}
from dataclasses import dataclass
from fedml_noniid.rates import Rate
@dataclass(frozen=True)
class Mine(Rate):
    pass
"""


COMMANDS = """
import contextlib, io, json, sys
from fedml_noniid.cli.app import main
answers = []
for words in json.loads(sys.argv[1]):
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(words)
    answers.append((code, output.getvalue(), errors.getvalue()))
print(json.dumps(answers))
"""


def answers(folder: Path, commands: list[tuple[object, ...]]) -> list[tuple[int, str, str]]:
    """The exit codes, outputs and errors of `noniid deploy` in a folder, in a new process."""
    arguments = json.dumps([["deploy", *map(str, words)] for words in commands])
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{Path.cwd()}:{folder}"},
        check=True,
        stdout=subprocess.PIPE,
    )
    return [(code, output, errors) for code, output, errors in json.loads(done.stdout)]


def sign(place: Place, content: object) -> None:
    """Signs anything, with the key of the study's owner."""
    raw = content if isinstance(content, bytes) else yaml.safe_dump(content).encode()
    key = load_pem_private_key(place.key.read_bytes(), None)
    signature = study.base64.b64encode(key.sign(study.CONTEXT + raw)).decode()
    place.study.write_bytes(raw)
    study.signature_of(place.study).write_text(
        study._Signature(owner=place.owner, signature=signature).model_dump_json()
    )


@pytest.fixture
def stranger(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A signed study that names a module, which lies where Python finds it. Its owner is in no
    policy."""
    folder = place.config.parent
    (folder / "fedx_of_a_stranger.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    place.make("fedavg", learning_rate=RATE)
    sys.modules.pop("fedx_of_a_stranger")
    assert (folder / "trace").exists(), "whoever parses the study imports the module"
    (folder / "trace").unlink()
    place.policy.write_text(policy.template("another", study.make_key(folder / "another.key")))
    return place


def test_a_strangers_study_imports_nothing(stranger: Place, kits: Path) -> None:
    """Not where it is shown, and not where it is refused."""
    folder = stranger.config.parent
    content = yaml.safe_load(stranger.config.read_text())
    del content["train_args"]["learning_rate"]  # the site's own file, which names no code
    content["tracking_args"] = {"output_dir": str(folder)}
    content["comm_args"] |= {"server": "127.0.0.1:9", "kit": f"{kits}/{{rank}}"}
    stranger.config.write_text(yaml.safe_dump(content))
    (folder / "params.yaml").write_text("experiment: of a hospital\n")
    for name in (results.MODEL, results.ROUNDS):
        (folder / name).write_text("round\n1\n")
    config = ("--config", stranger.config)
    commands = [
        ("study", "show", stranger.study),
        ("status", *config),
        ("study", "show", stranger.study, "--rank", 1, *config),
        ("study", "show", stranger.study, "--rank", 0, *config),
        ("record", folder, *config),
        ("server", *config),
        ("silo", "--rank", 1, *config),
    ]
    (shown, status, *refused) = answers(folder, commands)
    assert shown[0] == 0 and RATE["decay"] in shown[1] and "no policy was asked" in shown[1]
    assert status[::2] == (0, "") and '"rounds": 1' in status[1]
    assert [answer[:2] for answer in refused] == [(2, "")] * 3 + [(4, "")] * 2
    assert all("allowed: the owners of the policy" in error for *_, error in refused)
    assert not (folder / "trace").exists()


@pytest.mark.parametrize("key", ["name", "job"])
def test_a_study_is_shown_escaped(
    place: Place, capfd: pytest.CaptureFixture[str], key: str
) -> None:
    """A text that would clear the screen, turn the line round or look like our verdict."""
    from fedml_noniid.cli.app import main

    text = HOSTILE.replace("\ud800", "")  # YAML has no half characters
    content = yaml.safe_load(place.study.read_text())
    content["messages" if key == "job" else "name"] = {text: text} if key == "job" else text
    sign(place, content)
    assert main(["deploy", "study", "show", str(place.study)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if "signed by" in line and line.lstrip()[0] == "#"] == lines[-1:]
    (found,) = (line for line in yaml.safe_load_all("\n".join(lines)))
    assert text in (found["name"], *found["messages"]), "it is escaped, not changed"


def test_an_error_has_one_printable_line_for_each_mistake() -> None:
    error = UserError.from_mistakes(
        [Mistake(HOSTILE), Mistake("b", ("k\n",), HOSTILE, HOSTILE, "", HOSTILE)]
    )
    assert len(str(error).split("\n")) == 2
    assert str(error).replace("\n", "").isprintable()


@pytest.mark.parametrize("field", ["message", "head", "peer", "log"])
def test_a_log_of_the_other_side_is_told_escaped(
    tmp_path: Path, kits: Path, capfd: pytest.CaptureFixture[str], field: str
) -> None:
    """It claims to have got what this side has not sent."""
    from fedml_noniid.cli.app import main

    logs = [
        audit.Log(tmp_path / f"audit-{rank}.jsonl", Kit.read(kits / str(rank), rank))
        for rank in (0, 1)
    ]
    facts = {"message": "Task", "head": {"why": "x"}, "peer": "server"}
    seal = list(logs[0].seal())
    if field == "log":
        seal[0] = HOSTILE
    else:
        facts |= {field: {"why": HOSTILE} if field == "head" else HOSTILE}
    logs[1].write(audit.ARRIVED, **facts, seal=seal)
    words = [str(tmp_path / "audit-0.jsonl"), "--ca", str(kits / "ca" / "ca.crt")]
    assert main(["audit", "verify", *words, "--against", str(tmp_path / "audit-1.jsonl")]) == 2
    said = capfd.readouterr()
    assert all(line.isprintable() and "error: " in line for line in said.err.splitlines())


BOMBS = {
    "brackets": b"[" * 1000 + b"]" * 1000,
    "brackets in a key": b"name: " + b"[" * 1000 + b"]" * 1000,
    "digits": b"name: " + b"9" * 5000,
    "aliases": b"a0: &a0 [x, x]\n"
    + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (k, k, k - 1, k - 1) for k in range(1, 40)),
    "a date": b"expires: 2027-99-99",
    "nothing": b"",
    "half a tag": b"name: !!python/object:os.system {}",
}


@pytest.mark.parametrize(
    ("which", "bomb"),
    [
        *(("study", bomb) for bomb in BOMBS),
        *((which, bomb) for which in ("policy", "config") for bomb in ("aliases", "half a tag")),
        *(("signature", bomb) for bomb in ("brackets", "nothing")),
    ],
)
def test_a_file_that_is_a_bomb_is_one_line(
    place: Place, capfd: pytest.CaptureFixture[str], which: str, bomb: str
) -> None:
    """One reader reads the other files too: see tests/data/test_yaml_files.py."""
    from fedml_noniid.cli.app import main

    path = {"signature": study.signature_of(place.study)}.get(which) or getattr(place, which)
    if which == "study":
        sign(place, BOMBS[bomb])
    else:
        path.write_bytes(BOMBS[bomb])
    for more in ([], ["--rank", "1", "--config", str(place.config)]):
        code = main(["deploy", "study", "show", str(place.study), *more])
        said = capfd.readouterr()
        if code:
            assert said.out == "" and all(line.isprintable() for line in said.err.splitlines())
            assert said.err.startswith("error: ") and len(said.err) < 4000
    assert code == 2
    assert str(path) in said.err


@pytest.mark.parametrize(
    "body",
    [
        b'{"n":0,"log":"x","kind":"start","prev":"P","d":' + b"[" * 10**5 + b"]" * 10**5,
        b'{"n":0,"log":"x","kind":"start","prev":"P","d":' + b"9" * 5000,
        b'{"n":0,"log":"x","kind":"start","prev":"P","certificate":"\\ud800"',
        b'{"n":0,"log":"x","kind":"answers","prev":"P","exchange":[]',
        b'{"n":0,"log":{},"kind":[],"prev":"P"',
        b'{"n":0,"log":"x","kind":"start","prev":"P","certificate":{"a":1}',
    ],
)
def test_a_log_that_is_a_bomb_is_one_line(
    tmp_path: Path, kits: Path, capfd: pytest.CaptureFixture[str], body: bytes
) -> None:
    """As `verify` reads it, and as a process that goes on with it."""
    from fedml_noniid.cli.app import main

    path = tmp_path / "audit-1.jsonl"
    path.write_bytes(
        body.replace(b'"P"', b'"%s"' % audit.NONE.encode()) + b',"signature":"aa=="}\n'
    )
    assert main(["audit", "verify", str(path), "--ca", str(kits / "ca" / "ca.crt")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: line 1: ") and len(line) < 500
    with pytest.raises(UserError, match=str(path)):
        audit.Log(path, Kit.read(kits / "1", 1))
