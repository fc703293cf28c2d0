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
ROOMS = ("plugins", "pipelines", "fedml_noniid")
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


class Built(NamedTuple):
    source: dict[str, bytes]  # the files of the source archive, below its one folder
    links: list[str]
    wheel: dict[str, bytes]  # from the source archive


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
    with tarfile.open(built_by("build_sdist", place / "tree", place / "sdist")) as found:
        links = [entry.name for entry in found if entry.issym() or entry.islnk()]
        found.extractall(place / "unpacked", filter="data")
    (root,) = (place / "unpacked").iterdir()
    source = contents(root)
    with zipfile.ZipFile(built_by("build_wheel", root, place / "wheel")) as archive:
        return Built(source, links, {name: archive.read(name) for name in archive.namelist()})


def test_the_wheel_has_all_code_and_what_it_reads(built: Built) -> None:
    """It was built from the source archive, so that has it too."""
    listed = ["git", "ls-files", "-co", "--exclude-standard", *ROOMS]
    tracked = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
    # Pages for those who read the checkout are not read by the program.
    named = [name for name in tracked.stdout.split() if not name.endswith(".md")]
    names = [name for name in named if (ROOT / name).is_file()]
    wanted = {f"fedml_noniid/{name.removeprefix('fedml_noniid/')}": name for name in names}
    found = {name for name in built.wheel if ".dist-info/" not in name}
    assert found == wanted.keys() and len(wanted) > 250 and built.links == []
    assert [name for name in found if built.wheel[name] != (ROOT / wanted[name]).read_bytes()] == []


def test_the_licence_is_in_both(built: Built) -> None:
    text = (ROOT / "LICENSE").read_bytes()
    digest = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert hashlib.sha256(text).hexdigest() == digest
    folder = f"fedml_noniid-{fedml_noniid.__version__}.dist-info"
    assert built.source["LICENSE"] == built.wheel[f"{folder}/licenses/LICENSE"] == text
    metadata = email.message_from_bytes(built.wheel[f"{folder}/METADATA"])
    assert metadata["License-Expression"] == "Apache-2.0"


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
    edition = re.search(r"^## \[(\d.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert edition and edition[1] == citation["version"] == fedml_noniid.__version__
    assert citation["license"] == project["license"] == "Apache-2.0"
