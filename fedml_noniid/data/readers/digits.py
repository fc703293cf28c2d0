"""scikit-learn's bundled digits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from fedml_noniid.data.dataset import Raw

FILE = Path("datasets", "data", "digits.csv.gz")  # in the package of scikit-learn
# A bit per image: whether it is in the test set. Drawn once, by scikit-learn's train_test_split
# with test_size=0.2, stratify=target, random_state=0.
IS_TEST = (
    "000004883524104000064100934205001a00080100240028062c12001000940a009019120420f8a0028110a0"
    "00080a8820441524494240a00a0000004004d80000818020004805c400104008a0100005404800301000020e"
    "c409000224840083a8013c20a6980a0000000b08400804a0184802024041c1008004404684376a8102160044"
    "80004042a0a4180a5000840b8561c608108008004c80c02004068e00010882008100380803c008190000100e"
    "01008410a0210033282904c044c080680e0102830082008822a6402c24042108a860809081a00c0282024212"
    "0138a41500"
)


def digits(root: Path) -> Raw:
    """Reads scikit-learn's bundled digits: 1797 grey images of 8x8, values 0 to 16; `root` isn't
    used.

    Split 1437 to 360, stratified by class, once and for all: the test set doesn't depend on an
    experiment's seed.
    """
    # The package is found, not imported: with scipy and pandas, that takes longer than all the
    # rest of `noniid init`.
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None, "a dependency of this package"
    table = np.loadtxt(Path(package.origin).parent / FILE, np.int64, delimiter=",")
    x = torch.from_numpy(table[:, :-1].astype(np.uint8)).reshape(-1, 1, 8, 8)
    y = torch.from_numpy(table[:, -1].copy())
    is_test = np.unpackbits(np.frombuffer(bytes.fromhex(IS_TEST), np.uint8), count=len(y)) > 0
    classes = [str(c) for c in range(10)]
    return Raw(x[~is_test], y[~is_test], x[is_test], y[is_test], classes, unit=16)
