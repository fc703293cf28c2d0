"""What users get wrong, through the stages prepare and partition: one clear line each, and nothing
is written."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedml_noniid.pipelines.stages import __main__ as stage
from tests.data.reading import draw, idx
from tests.pipelines.small import PARAMS, run_stages

PARTITION = "partition"


@dataclass(frozen=True)
class Case:
    """A mistake: what lies under `raw`, the lines of params.yaml, and words of the answer."""

    said: tuple[str, ...]
    make: Callable[[Path], object] = lambda raw: None
    data: str = "name: digits"
    split: str = "validation: 0.1, public: 10"
    scenario: str = "partition: iid, clients: 4"
    stage: str = "prepare"


# Files as their makers write them, and ways to damage them.


def mnist(raw: Path, **changed: bytes | None) -> None:
    """Twenty training and ten test images; `changed`: other contents by the first letters of a
    file's name."""
    folder = raw / "MNIST" / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for kind, n in (("train", 20), ("t10k", 10)):
        files = {
            f"{kind}-images-idx3-ubyte": idx(rng.integers(0, 256, (n, 28, 28))),
            f"{kind}-labels-idx1-ubyte": idx(np.arange(n) % 10),
        }
        for name, content in files.items():
            other = changed.get(name.replace("-", "_").split("_idx")[0], content)
            (folder / name).write_bytes(content if other is None else other)


def cinic(raw: Path) -> Path:
    folder = raw / "cinic-10"
    names = [
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ]
    for part in ("train", "valid", "test"):
        for name in names:
            draw(folder / part / name / "0.png", size=(32, 32))
    return folder


def leaf(raw: Path, name: str, x: Any, y: Any, **changed: Any) -> None:
    """One user's samples in train and in test, `changed` in train."""
    for part in ("train", "test"):
        content = {"users": ["u"], "num_samples": [len(y)], "user_data": {"u": {"x": x, "y": y}}}
        if part == "train":
            content |= changed
        (raw / name / part).mkdir(parents=True)
        (raw / name / part / "all.json").write_text(json.dumps(content))


def femnist(raw: Path, pixel: float = 0.0, label: int = 1, **changed: Any) -> None:
    image = [0.0] * 783
    leaf(raw, "femnist", [[*image, pixel], [*image, 1.0]], [0, label], **changed)


def tweets(raw: Path, *rows: str) -> None:
    (raw / "sent140").mkdir(parents=True)
    good = [
        f'"{4 * (i % 2)}","{i}","Mon","NO_QUERY","user{i % 3}","some words {i}"' for i in range(12)
    ]
    text = "".join(f"{row}\n" for row in (*good, *rows))
    (raw / "sent140" / "training.1600000.processed.noemoticon.csv").write_bytes(
        text.encode("latin-1")
    )


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def archive(raw: Path, name: str, half: bool) -> None:
    """A tar.gz with one file that isn't the original."""
    raw.mkdir(exist_ok=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("cifar-10-batches-py/data_batch_1"), io.BytesIO())
    content = packed.getvalue()
    (raw / name).write_bytes(content[: len(content) // 2] if half else content)


def batches(raw: Path) -> None:
    folder = raw / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"):
        (folder / name).write_bytes(b"not the original")


MNIST, CINIC, FEMNIST = "name: mnist", "name: cinic10", "name: femnist"
TWEETS = "name: sent140, users: 3"
LABELS = "train-labels-idx1-ubyte"

CASES = {
    # Damaged or missing files
    "MNIST's images cut off": Case(
        ("train-images-idx3-ubyte", "damaged or truncated"),
        lambda raw: mnist(raw, train_images=idx(np.zeros((20, 28, 28)))[:-1]),
        MNIST,
    ),
    "MNIST's labels above 9": Case(
        (LABELS, "0 to 9"), lambda raw: mnist(raw, train_labels=idx(np.full(20, 12))), MNIST
    ),
    "MNIST with too few labels": Case(
        (LABELS, "number of"), lambda raw: mnist(raw, train_labels=idx(np.zeros(19))), MNIST
    ),
    "MNIST of the original's size, but not the original": Case(
        ("t10k-images-idx3-ubyte", "isn't the original"),
        lambda raw: mnist(raw, t10k_images=idx(np.zeros((10_000, 28, 28)))),
        MNIST,
    ),
    "MNIST's archive cut off": Case(
        ("train-images-idx3-ubyte.gz", "damaged or truncated"),
        lambda raw: (
            mnist(raw),
            (raw / "MNIST/raw/train-images-idx3-ubyte").unlink(),
            (raw / "MNIST/raw/train-images-idx3-ubyte.gz").write_bytes(
                gzip.compress(idx(np.zeros((20, 28, 28))))[:-9]
            ),
        ),
        MNIST,
    ),
    "CIFAR-10's archive cut off": Case(
        ("cifar-10-python.tar.gz",),
        lambda raw: archive(raw, "cifar-10-python.tar.gz", half=True),
        "name: cifar10",
    ),
    "another archive than CIFAR-10's": Case(
        ("cifar-10-python.tar.gz",),
        lambda raw: archive(raw, "cifar-10-python.tar.gz", half=False),
        "name: cifar10",
    ),
    "CIFAR-10's batches with wrong checksums": Case(("data_batch_1",), batches, "name: cifar10"),
    "CINIC-10 without a class": Case(
        ("frog",), lambda raw: shutil.rmtree(cinic(raw) / "train/frog"), CINIC
    ),
    "no CINIC-10": Case(("CINIC-10.tar.gz", "datashare.ed.ac.uk"), data=CINIC),
    "no FEMNIST": Case(("femnist/train", "preprocess.sh"), data=FEMNIST),
    "FEMNIST cut off": Case(
        ("all.json", "JSON"),
        lambda raw: (femnist(raw), cut(raw / "femnist/train/all.json")),
        FEMNIST,
    ),
    "FEMNIST's pixels NaN": Case(
        ("'u'", "nan"), lambda raw: femnist(raw, pixel=float("nan")), FEMNIST
    ),
    "FEMNIST's pixels above 1": Case(
        ("'u'", "1.5", "0 to 1"), lambda raw: femnist(raw, pixel=1.5), FEMNIST
    ),
    "FEMNIST's labels above 61": Case(
        ("'u'", "62", "0 to 61"), lambda raw: femnist(raw, label=62), FEMNIST
    ),
    "FEMNIST's users twice": Case(
        ("'u'", "twice"), lambda raw: femnist(raw, users=["u", "u"], num_samples=[2, 2]), FEMNIST
    ),
    "no Sentiment140": Case(("sent140", "trainingandtestdata.zip"), data=TWEETS),
    "a tweet with a column too few": Case(
        ("line 13", "5 columns"), lambda raw: tweets(raw, '"0","1","Mon","Q","me"'), TWEETS
    ),
    "a neutral tweet": Case(
        ("line 13", "'2'", "0 (neg"),
        lambda raw: tweets(raw, '"2","1","Mon","Q","me","so so"'),
        TWEETS,
    ),
    "tweets cut off": Case(
        ("line", "truncated"), lambda raw: tweets(raw, '"0","1","Mon","Q","me","so'), TWEETS
    ),
    "too few users": Case(("3 users", "users=500"), tweets, "name: sent140"),
    "GloVe of another width": Case(
        ("glove.6B.300d.txt", "line 1", "300"),
        lambda raw: (tweets(raw), (raw / "glove.6B.300d.txt").write_text("words 0.1 0.2\n")),
        TWEETS,
    ),
    # Options
    "a data set that isn't": Case(("'minst'", "did you mean 'mnist'"), data="name: minst"),
    "an option that isn't": Case(
        ("data.sise is unknown", "did you mean 'size'"), data="name: digits, sise: [8, 8]"
    ),
    "a size of 0": Case(("size", "0"), data="name: digits, size: [0, 8]"),
    "a normalisation that isn't": Case(
        ("'chanel'", "channel, half, none"), data="name: digits, normalise: chanel"
    ),
    "a deviation of 0": Case(
        ("[0.1307, 0]", "above 0"), data="name: digits, normalise: [0.1307, 0]"
    ),
    # Partitions that can't be
    "everything held out": Case(("validation",), split="validation: 1.0, public: 0"),
    "so much held out that no class could be whole": Case(
        ("params.yaml: data.validation = 0.9999",),
        split="validation: 0.9999, public: 10",
        stage=PARTITION,
    ),
    "more public samples than there are": Case(
        ("public",), split="validation: 0.1, public: 2000", stage=PARTITION
    ),
    "no concentration": Case(
        ("alpha",), scenario="partition: dirichlet, clients: 4, alpha: 0", stage=PARTITION
    ),
    "more clients than samples": Case(
        ("clients", "2000"), scenario="partition: iid, clients: 2000", stage=PARTITION
    ),
    "least sizes that don't add up": Case(
        ("min_size", "400"),
        scenario="partition: quantity, clients: 4, min_size: 400",
        stage=PARTITION,
    ),
    "next to impossible": Case(
        ("attempts",),
        scenario="partition: dirichlet, clients: 40, alpha: 0.001, min_size: 30",
        stage=PARTITION,
    ),
    "more classes than there are": Case(
        ("classes_per_client", "11"),
        scenario="partition: shards, clients: 4, classes_per_client: 11",
        stage=PARTITION,
    ),
    "classes that don't come out even": Case(
        ("multiples of 5",), scenario="partition: two_classes, clients: 7", stage=PARTITION
    ),
    "mixed with other numbers": Case(
        ("10, one per class",), scenario="partition: mixed, clients: 5", stage=PARTITION
    ),
    "a similarity in per cent": Case(
        (".s = 10", "0 to 1"), scenario="partition: similarity, clients: 4, s: 10", stage=PARTITION
    ),
    "users that aren't known": Case(
        ("'digits' doesn't say whose",), scenario="partition: natural, clients: 4", stage=PARTITION
    ),
    "noise below 0": Case(
        ("sigma",), scenario="partition: iid, clients: 4, noise: {sigma: -1}", stage=PARTITION
    ),
    "a grid finer than the pixels": Case(
        ("'space'", "[1, 8, 8]"),
        scenario="partition: iid, clients: 99, noise: {sigma: 1, form: space}",
        stage=PARTITION,
    ),
    "an option of another partition": Case(
        (".beta is unknown",),
        scenario="partition: dirichlet, clients: 4, alpha: 1, beta: 1",
        stage=PARTITION,
    ),
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared digits."""
    folder = tmp_path_factory.mktemp("digits")
    (folder / "params.yaml").write_text(PARAMS)
    run_stages(folder, ("prepare",))
    return folder / "data" / "digits.safetensors"


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line_and_nothing_written(
    name: str,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = CASES[name]
    for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(
            proxy, "http://127.0.0.1:9"
        )  # nobody listens there: no test asks the network
    case.make(tmp_path / "raw")
    lines = [line for line in PARAMS.splitlines() if not line.startswith(("data: ", "  skewed: "))]
    at = lines.index("scenarios:") + 1
    lines[at:at] = [f"  skewed: {{{case.scenario}}}"]
    (tmp_path / "params.yaml").write_text(
        "\n".join([*lines, f"data: {{{case.data}, root: raw, {case.split}}}", ""])
    )
    if case.stage == PARTITION:
        (tmp_path / "data").mkdir()
        shutil.copy(digits, tmp_path / "data")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert stage.main([case.stage, "--root", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("error: ") and "Traceback" not in said
    assert all(part in said for part in case.said), said
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
