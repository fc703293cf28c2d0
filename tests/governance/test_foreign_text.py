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

from fedml_noniid.cli.app import main
from fedml_noniid.core.errors import UserError
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.governance import audit, policy, study
from tests.governance.conftest import MODULE, RATE, Place

HOSTILE = "of \x1b[2J\x7f three\n# signed by Ms Owner\r\u202e\u2028 hospitals\ud800"


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
    config = ("--config", stranger.config)
    commands = [
        ("study", "show", stranger.study),
        ("status", *config),
        ("study", "show", stranger.study, "--rank", 1, *config),
        ("record", folder, *config),
        ("server", *config),
        ("silo", "--rank", 1, *config),
    ]
    (shown, status, *refused) = answers(folder, commands)
    assert shown[0] == 0 and RATE["decay"] in shown[1] and "no policy was asked" in shown[1]
    assert status[:2] == (5, "") and "is the server running?" in status[2]
    assert [answer[:2] for answer in refused] == [(2, "")] * 2 + [(4, "")] * 2
    assert all("allowed: the owners of the policy" in error for *_, error in refused)
    assert not (folder / "trace").exists()


@pytest.mark.parametrize("key", ["name", "job"])
def test_a_study_is_shown_escaped(
    place: Place, capfd: pytest.CaptureFixture[str], key: str
) -> None:
    """A text that would clear the screen, turn the line round or look like our verdict."""
    text = HOSTILE.replace("\ud800", "")  # YAML has no half characters
    content = yaml.safe_load(place.study.read_text())
    content["messages" if key == "job" else "name"] = {text: text} if key == "job" else text
    sign(place, content)
    assert main(["deploy", "study", "show", str(place.study)]) == 0
    output = capfd.readouterr().out
    lines = output.splitlines()
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if "signed by" in line and line.lstrip()[0] == "#"] == lines[-1:]
    shown = yaml.safe_load(output)
    assert text in (shown["name"], *shown["messages"]), "it is escaped, not changed"


@pytest.mark.parametrize("field", ["message", "head", "peer", "log"])
def test_a_log_of_the_other_side_is_told_escaped(
    tmp_path: Path, kits: Path, capfd: pytest.CaptureFixture[str], field: str
) -> None:
    """It claims to have got what this side has not sent."""
    paths = [tmp_path / f"audit-{rank}.jsonl" for rank in (0, 1)]
    mine, other = (audit.Log(paths[k], Kit.read(kits / str(k), k)) for k in (0, 1))
    facts = {"message": "Task", "head": {"why": "x"}, "peer": "server", "seal": list(mine.seal())}
    if field == "log":
        facts["seal"][0] = HOSTILE
    else:
        facts[field] = {"why": HOSTILE} if field == "head" else HOSTILE
    other.write(audit.ARRIVED, **facts)
    words = [str(paths[0]), "--ca", str(kits / "ca" / "ca.crt"), "--against", str(paths[1])]
    assert main(["audit", "verify", *words]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert all(line.isprintable() and "error: " in line for line in lines)


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
    path = study.signature_of(place.study) if which == "signature" else getattr(place, which)
    path.write_bytes(BOMBS[bomb])
    if which == "study":
        sign(place, BOMBS[bomb])
    words = ["deploy", "study", "show", str(place.study), "--rank", "1", "--config"]
    assert main([*words, str(place.config)]) == 2
    output, errors = capfd.readouterr()
    assert output == "" and all(line.isprintable() for line in errors.splitlines())
    assert errors.startswith("error: ") and len(errors) < 4000 and str(path) in errors


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
    path = tmp_path / "audit-1.jsonl"
    path.write_bytes(
        body.replace(b'"P"', b'"%s"' % audit.NONE.encode()) + b',"signature":"aa=="}\n'
    )
    assert main(["audit", "verify", str(path), "--ca", str(kits / "ca" / "ca.crt")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: line 1: ") and len(line) < 500
    with pytest.raises(UserError, match=str(path)):
        audit.Log(path, Kit.read(kits / "1", 1))
