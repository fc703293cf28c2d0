"""EMNIST, from a folder, from its archive or from the network."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import Literal

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Raw
from fedml_noniid.data.readers import idx
from fedml_noniid.data.readers.download import archive

PAGE = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
ARCHIVE = "gzip.zip"


def emnist(
    root: Path,
    *,
    split: Literal["byclass", "balanced", "letters", "digits", "mnist", "bymerge"] = "byclass",
) -> Raw:
    """EMNIST (Cohen et al.

    2017, arXiv:1702.05373): letters and digits, grey, 28x28, white on black, 0 to 255.

    `byclass` has 62 classes (digits, upper and lower case), `bymerge` and `balanced` 47, `letters`
    26 (its labels, 1 to 26, become 0 to 25), `digits` and `mnist` 10. The files
    emnist-<split>-{train,test}-{images-idx3,labels-idx1}-ubyte are read from <root>/EMNIST/raw,
    unpacked or as .gz. If they are missing, they are taken from the archive gzip.zip in that
    folder, which is downloaded if it is missing too. The files hold each image transposed
    (TensorFlow Datasets' page of EMNIST says so); here it is upright. Raises UserError for a failed
    download or a damaged file.
    """
    # Imported here, since it takes seconds and other data sets don't need it.
    from torchvision.datasets import EMNIST

    raw = root / "EMNIST" / "raw"
    names = [
        f"emnist-{split}-{part}-{end}"
        for part in ("train", "test")
        for end in (idx.IMAGES, idx.LABELS)
    ]

    needed = (
        f"put {', '.join(names)} (or each as .gz) or, without them, {ARCHIVE} into {raw} ({PAGE} "
        "has it)"
    )
    classes = list(EMNIST.classes_split_dict[split])
    first = 1 if split == "letters" else 0
    labels = range(first, len(classes))
    missing = [name for name in names if idx.path_of(raw, name) is None]
    if not missing:
        train_x, train_y, test_x, test_y = idx.parts(raw, names, labels, needed)
    elif len(missing) < len(names) and not (raw / ARCHIVE).is_file():
        # One forgotten file is no reason to download half a gigabyte.
        raise UserError(f"{raw / missing[0]}: there is no such file; {needed}")
    else:
        packed = archive(raw / ARCHIVE, EMNIST.url, EMNIST.md5, needed)
        # In a temporary folder, because `raw` may be read-only.
        with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(packed) as file:
            for name in names:
                (Path(temporary) / f"{name}.gz").write_bytes(file.read(f"gzip/{name}.gz"))
            train_x, train_y, test_x, test_y = idx.parts(Path(temporary), names, labels, needed)
    train_x, test_x = (x.transpose(2, 3).contiguous() for x in (train_x, test_x))
    return Raw(train_x, train_y - first, test_x, test_y - first, classes[first:])
