"""The archives that others install: what they hold, under which licence, and that both kinds are
the same program."""

from __future__ import annotations

import email
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from ruamel.yaml import YAML

import fedml_noniid
from tests.files import contents
from tests.pipelines.small import ROOT

BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


class Built(NamedTuple):
    source: dict[str, bytes]  # the files of the source archive, below its one folder
    links: list[str]
    wheel: dict[str, bytes]  # from the checkout
    again: dict[str, bytes]  # from the source archive


def built_by(kind: str, tree: Path, folder: Path) -> Path:
    """Builds in `tree` as pip does, without a network."""
    subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(folder)], cwd=tree, check=True, capture_output=True
    )
    (made,) = folder.iterdir()
    return made


def test_cleaning_removes_outputs_and_nothing_of_the_user(tmp_path: Path) -> None:
    """Keys and certificates may lie in deploy/, which git ignores."""
    kept = ["data/raw/a.csv", "deploy/containers/kits/ca/ca.key", "mlruns/mlflow.db"]
    gone = ["deploy/loopback/a", "deploy/result.json", "deploy/stage/a", "plan/a", "runs/a/b"]
    for name in (*kept, *gone):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["make", "-f", str(ROOT / "Makefile"), "clean"], cwd=tmp_path, check=True)
    assert sorted(contents(tmp_path)) == kept


def test_make_alone_lists_the_targets() -> None:
    ran = subprocess.run(["make"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert {"repro", "test", "help"} <= {line.split()[0] for line in ran.stdout.splitlines()}
    assert ran.stderr == ""


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def copy_of_checkout(folder: Path) -> Path:
    """This checkout in another folder: setuptools leaves folders where it builds."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Archives of a copy of the checkout."""
    place = tmp_path_factory.mktemp("build")
    copy_of_checkout(place / "tree")
    archive = built_by("build_sdist", place / "tree", place / "sdist")
    wheel = built_by("build_wheel", place / "tree", place / "wheel")
    with tarfile.open(archive) as found:
        links = [entry.name for entry in found if entry.issym() or entry.islnk()]
        found.extractall(place / "unpacked", filter="data")
    (root,) = (place / "unpacked").iterdir()
    source = contents(root)
    again = built_by("build_wheel", root, place / "again")
    return Built(source, links, content(wheel), content(again))


def test_both_wheels_are_the_same_program(built: Built) -> None:
    assert built.links == []
    assert built.wheel.keys() == built.again.keys()
    differ = [name for name, found in built.wheel.items() if found != built.again[name]]
    assert [name for name in differ if not name.endswith("/RECORD")] == []


def test_the_wheel_has_all_code_and_what_it_reads(built: Built) -> None:
    rooms = ("plugins", "pipelines", "fedml_noniid")
    listed = ["git", "ls-files", "-co", "--exclude-standard", *rooms]
    tracked = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
    # Pages for those who read the checkout are not read by the program.
    named = [name for name in tracked.stdout.split() if not name.endswith(".md")]
    names = [name for name in named if (ROOT / name).is_file()]
    wanted = {
        name if name.startswith("fedml_noniid/") else f"fedml_noniid/{name}" for name in names
    }
    assert len(wanted) > 250
    found = {name for name in built.wheel if ".dist-info/" not in name}
    assert found == wanted
    assert (
        built.wheel["fedml_noniid/first_steps.ipynb"]
        == (ROOT / "examples" / "first_steps.ipynb").read_bytes()
    )


def test_the_licence_is_in_both(built: Built) -> None:
    text = (ROOT / "LICENSE").read_bytes()
    assert (
        hashlib.sha256(text).hexdigest()
        == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    )
    folder = f"fedml_noniid-{fedml_noniid.__version__}.dist-info"
    assert built.source["LICENSE"] == built.wheel[f"{folder}/licenses/LICENSE"] == text
    metadata = email.message_from_bytes(built.wheel[f"{folder}/METADATA"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert not any(found.startswith("License ::") for found in metadata.get_all("Classifier", []))


def test_the_source_archive_has_what_the_readme_names(built: Built) -> None:
    readme = built.source["README.md"].decode()
    named = {link.partition("#")[0] for link in re.findall(r"\]\(([\w./-]+(?:#[\w-]+)?)\)", readme)}
    files = {*named, *PAGES, "CITATION.cff", "requirements.lock"} - {"examples/deploy"}
    assert len(files) > 20
    assert files - built.source.keys() == set()
    assert not any(name.startswith(("tests/", "data/", "runs/")) for name in built.source)


def test_one_version_and_one_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = YAML(typ="safe").load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fedml_noniid.__version__
    assert citation["license"] == project["license"] == "Apache-2.0"
    editions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert next(name for name in editions if name != "Unreleased") == fedml_noniid.__version__
