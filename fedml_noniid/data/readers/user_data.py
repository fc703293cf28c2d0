"""Classes, owners, test set and notes of a user's data, the same for tables, arrays and images."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedml_noniid.core.errors import UserError, closest, shown
from fedml_noniid.core.losses import IGNORED
from fedml_noniid.core.options import Range
from fedml_noniid.data.checks import refusal
from fedml_noniid.data.dataset import Raw
from fedml_noniid.data.precision import merged
from fedml_noniid.data.strata import are_labels, strata
from fedml_noniid.data.streams import stream
from fedml_noniid.data.types import Floats, Ints

if TYPE_CHECKING:  # it takes half a second to import, and images have no labels of text
    import pandas as pd

Share = Annotated[float, Range(0, 1, "()")]
TEST_SHARE = 0.2  # of the samples that becomes the test set, if none is given
FAR = 10  # from here on, a mean or a deviation of a target gets a note
MAX_LISTED = 5  # names that a message or a note lists
PIECE = 2**20  # bytes that are copied at a time
FRACTION = r"[-+]?\d*[.,]\d*[1-9]\d*(e[-+]?\d+)?"  # a number that isn't whole


class Rows(NamedTuple):
    """Says which samples train and which test, with their labels and owners."""

    train: Ints  # rows of the first table
    test: Ints  # rows of the last table
    y: list[NDArray[Any]]  # [n] and [m]; [n, t] and [m, t] float32 of targets
    classes: list[str]  # or the names of the targets
    owners: list[Ints] | None  # [n] and [m]
    owner_names: list[str]  # by number
    notes: list[str]

    def raw(
        self,
        xs: Sequence[Tensor],
        unit: float,
        before: Sequence[str] = (),
        after: Sequence[str] = (),
        embedding: Tensor | None = None,
    ) -> Raw:
        """The data set of samples `xs`: of both parts, or of all samples if the test set was cut.

        `before` and `after` are notes around those on the rows.
        """
        if len(xs) == 1:
            xs = [xs[0][self.train], xs[0][self.test]]
        notes = [*before, *self.notes, *after, *_repeated(*xs)]
        train_y, test_y = map(torch.from_numpy, self.y)
        train_owner, test_owner = (
            map(torch.from_numpy, self.owners) if self.owners else (None, None)
        )
        return Raw(
            *(xs[0], train_y, xs[1], test_y, self.classes, unit),
            train_owner,
            test_owner,
            embedding,
            notes,
            owner_names=self.owner_names,
        )


def listed(names: Sequence[str], most: int = MAX_LISTED) -> str:
    """`a, b, c and 4 more`, in one line."""
    more = len(names) - most
    return ", ".join(" ".join(name.split()) for name in names[:most]) + (
        f" and {more} more" if more > 0 else ""
    )


def apart(
    cells: Mapping[str, Sequence[Any]], owner: str, names: Sequence[str], sources: Sequence[str]
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """(the cells of the samples of the owners `names`, the cells of the others by part).

    `cells`: of each column, those of each part, of which one has the owners. `sources` begin a
    message on each part. UserError if a part is then empty.
    """
    is_apart = [positions(labels_of(part), names) >= 0 for part in cells[owner]]
    for source, rows in zip(sources, is_apart, strict=True):
        if rows.all():
            raise UserError(f"{source}: all are of owners that take no part")
    taken: dict[str, Any] = {}
    others: dict[str, list[Any]] = {}
    for column, parts in cells.items():
        pairs = [*zip(parts, is_apart, strict=True)]
        taken[column] = np.concatenate([np.asarray(part[rows]) for part, rows in pairs])
        if not isinstance(parts[0], np.ndarray):
            taken[column] = labels_of(taken[column])
        others[column] = [part[~rows] for part, rows in pairs]
    return taken, others


def with_unseen(raw: Raw, x: Tensor, label: Any, owner: Any, names: Sequence[str]) -> Raw:
    """The data set with the samples `x` [n, ...] of the owners `names` apart, read as its own.

    A class that only they have is a number below 0.
    """
    label, n = labels_of(label), len(raw.classes)
    others = {*label.categories} - {*raw.classes}
    y = positions(label, [*raw.classes, *sorted(others)])
    return replace(
        raw,
        unseen_x=x.to(raw.train_x.dtype),
        unseen_y=torch.from_numpy(np.where(y < n, y, n - 1 - y)),
        unseen_owner=torch.from_numpy(positions(labels_of(owner), names)),
        unseen_names=names,
    )


def cut(
    labels: Ints, owners: Ints | None, fraction: float, source: str, what: str = "label"
) -> tuple[Ints, Ints, str]:
    """(training rows, test rows, a note): rows ascend; together they are all of `labels` [n].

    The only row of a label trains, as does the only row of an owner. Of each owner's n other rows,
    round(fraction n) are for the test, at least one and never all of its rows. Without owners, all
    rows count as those of one owner. The rows of an owner are stratified by label: they are sorted
    by label, at random within a label, and drawn by systematic sampling (Madow 1944). So each label
    gets its share of the test rows, rounded up or down. Every label keeps a training row. The draws
    have the seed 0 and don't depend on an experiment's seed. UserError if no row is left for the
    test.
    """
    rng = stream(0, "own data/test")
    owner = np.zeros(len(labels), dtype=np.int64) if owners is None else owners
    order = np.lexsort((rng.random(len(labels)), labels, owner))
    free = np.bincount(labels)[labels] > 1
    order = order[free[order]]
    sizes = np.bincount(owner)
    drawable = np.bincount(owner[free], minlength=len(sizes))
    # Rounded: 0.1 * 70 is a bit more than 7.
    n_test = np.floor(np.round(fraction * drawable, 9) + 0.5).clip(
        np.minimum(1, sizes - 1), sizes - 1
    )
    n_test = n_test.clip(0, drawable).astype(np.int64)
    size, many, offset = (
        np.repeat(values, drawable) for values in (drawable, n_test, rng.random(len(sizes)))
    )
    rank = np.arange(len(order)) - np.repeat(
        np.cumsum(drawable) - drawable, drawable
    )  # within its owner
    drawn = np.floor((rank + 1) * many / size + offset) > np.floor(rank * many / size + offset)
    is_test = np.zeros(len(labels), dtype=bool)
    is_test[order] = drawn
    for label in np.setdiff1d(labels, labels[~is_test]):
        is_test[np.flatnonzero(labels == label)[0]] = False
    if not is_test.any():
        whose = "" if owners is None else ", and no owner has two"
        raise UserError(
            f"{source}: {len(labels)} samples are too few to cut a test set from{whose}; add a "
            "test set"
        )
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    by = f"by {what}" if owners is None else f"by owner and {what}"
    note = f"test set: {len(test)} of {len(labels)} samples, drawn {by} with a fixed seed"
    return train, test, note


def labels_of(values: Any) -> pd.Categorical:
    """Whole numbers or texts [n] as text: each different one once, and which one a sample has."""
    import pandas as pd

    return pd.Categorical(values).rename_categories(str)


def positions(labels: pd.Categorical, names: Sequence[str]) -> Ints:
    """The position of each label in `names`, [n]; -1 if it is not there."""
    numbers: Ints = labels.set_categories(names).codes.astype(np.int64)
    return numbers


def first(labels: pd.Categorical, wrong: Callable[[str], object]) -> int | None:
    """The first sample with a label that is `wrong`; None if there is none."""
    is_wrong = labels.isin([text for text in labels.categories if wrong(text)])
    return int(is_wrong.argmax()) if is_wrong.any() else None


def classified(
    labels: Sequence[pd.Categorical],
    sources: Sequence[str],
    at: Callable[[int], str],
    names: Sequence[str] | None = None,
) -> tuple[list[str], list[Ints]]:
    """(the classes, the labels as their numbers) of `labels`: those of training, and of the test
    set if there is one.

    The names are sorted: as numbers if all are whole numbers, otherwise as text; `names` has them
    in another order. `sources` begin a message on each of `labels`, `at(i)` names label i.
    UserError for fewer than two classes, for measurements and identifiers in place of classes, and
    for test labels that no training sample has.
    """
    classes, n = [*labels[0].remove_unused_categories().categories], len(labels[0])
    i = first(labels[0], lambda text: re.fullmatch(FRACTION, text.strip()))
    if i is not None:
        raise UserError(
            f"{sources[0]} is {labels[0][i]!r} in {at(i)}, a measurement; allowed: whole numbers "
            f"or text (with {len(classes)} different values it looks like a regression target: of "
            "a table, name the column in `target` in place of `label`; arrays have floats; and "
            "choose a loss for it, such as mse)"
        )
    if len(classes) < 2:
        raise UserError(
            f"{sources[0]} is always {shown(classes[0])}; at least 2 classes are needed"
        )
    if 2 * len(classes) > n:
        raise UserError(
            f"{sources[0]} has {len(classes)} different labels in {n} samples; allowed: "
            "classes with 2 samples or more on average (is it an identifier or a regression "
            "target, or are these too few rows?)"
        )
    if names is None:
        whole = all(re.fullmatch(r"-?\d{1,300}", label) for label in classes)
        names = sorted(classes, key=lambda label: (int(label) if whole else 0, label))
    elif sorted(names) != sorted(classes):
        odd = {*names} ^ {*classes} or {name for name in classes if [*names].count(name) > 1}
        raise UserError(
            f"{sources[0]}: classes has to name each class once; not so: {listed(sorted(odd))}"
        )
    y = [positions(part, names) for part in labels]
    if (y[-1] < 0).any():
        i = int((y[-1] < 0).argmax())
        raise UserError(
            f"{sources[-1]} is {shown(labels[-1][i])} in {at(i)}, but no training sample is",
            allowed=listed(names, 10),
            meant=closest(labels[-1][i], names),
        )
    return [*names], y


def rows_of(
    classes: list[str],
    y: list[NDArray[Any]],
    owners: Sequence[Any] | None,
    test_share: float | None,
    sources: Sequence[str],
) -> Rows:
    """The rows that train and that test. `y`: the labels [n] or the targets [n, t], and those of
    the test set if there is one. `classes`: their names.

    `owners` are names or numbers, as the labels; they get numbers from 0 in the sorted order of
    their names in all parts. `sources` names the training set and, if it is given, the test set.
    UserError as in `cut`, and for a `test_share` beside a given test set.
    """
    notes, numbers, owner_names = alike("classes", classes), None, list[str]()
    if owners is not None:
        numbers, owner_names = _numbered(owners)
        notes += [] if isinstance(owners[0], np.ndarray) else alike("owners", owner_names)
    if len(y) == 2:
        if test_share is not None:
            raise refusal("test_share", test_share, f"none, since {sources[-1]} is the test set")
        train, test = map(np.arange, map(len, y))
    else:
        whose = None if numbers is None else numbers[0]
        labels, what = y[0], "label"
        if labels.ndim == 2:
            labels, what = strata(labels, labels, classes).train, "stratum of the target"
        train, test, note = cut(labels, whose, test_share or TEST_SHARE, sources[0], what)
        notes.append(note)
        y = [y[0][train], y[0][test]]
        numbers = None if numbers is None else [numbers[0][train], numbers[0][test]]
    if y[0].ndim == 2:
        notes += _of_targets(y, classes)
    elif len(lacking := np.setdiff1d(y[0], y[1])):
        notes.append(f"classes without a test sample: {listed([classes[c] for c in lacking])}")
    if numbers is not None:
        notes += _owners_apart(*numbers)
    return Rows(train, test, y, classes, numbers, owner_names, notes)


def _numbered(owners: Sequence[Any]) -> tuple[list[Ints], list[str]]:
    """(the owners [n] and [m] by their numbers in the sorted order of their names in all parts, the
    names)."""
    import pandas as pd

    values = [np.asarray(part) for part in owners]
    # int64 and uint64 have no common type of whole numbers.
    kind = object if len({part.dtype for part in values}) > 1 else None
    whole = pd.Categorical(np.concatenate(values, dtype=kind))
    numbers = np.split(whole.codes.astype(np.int64), np.cumsum([*map(len, owners)])[:-1])
    return numbers, [*map(str, whole.categories)]


def targets(
    ys: Sequence[Floats], names: list[str], sources: Sequence[str], at: Callable[[int], str]
) -> tuple[list[str], list[NDArray[Any]]]:
    """(`names`, the targets as float32) of targets [n, t] of training, and of the test set if there
    is one.

    `sources` has the words that a message begins with, for each of `ys`. `at(i)` names row i.
    Raises UserError for a target that float32 can't hold, and for one that all training samples
    have alike, unless the targets are labels of which others differ.
    """
    numbers: list[NDArray[Any]] = []
    for y, source in zip(ys, sources, strict=True):
        with np.errstate(over="ignore"):  # becomes infinite, and is refused
            narrow = y.astype(np.float32)
        wrong = ~np.isfinite(narrow)
        if wrong.any():
            i, t = (int(index) for index in np.argwhere(wrong)[0])
            named = f" ({names[t]})" if len(names) > 1 else ""
            raise UserError(
                f"{source} is {y[i, t]} in {at(i)}{named}", allowed="finite numbers of float32"
            )
        if (alike := merged(y, narrow)).any():
            name = f" ({names[alike.argmax()]})" if len(names) > 1 else ""
            raise UserError(
                f"{source}{name}: float32 can't tell its values apart; subtract a constant"
            )
        numbers.append(narrow)
    same = np.flatnonzero((numbers[0] == numbers[0][0]).all(0)).tolist()
    if len(same) < len(names) and _are_tokens(numbers[0]):  # those of a prompt have no label
        same = [t for t in same if numbers[0][0, t] != IGNORED]
    # Of several labels, one may be rare: a note says so.
    if len(same) == len(names) or (same and not are_labels(*numbers)):
        named = f" ({listed([names[t] for t in same])})" if len(names) > 1 else ""
        always = numbers[0][0, same].tolist()
        raise UserError(f"{sources[0]} is always {always}{named}; there is nothing to learn")
    return names, numbers


def _are_tokens(y: Floats) -> bool:
    """Whether targets are tokens of sequences, some of which don't count."""
    ignored = y == IGNORED
    return bool(ignored.any() and (ignored | ((y >= 0) & (y == y.round()))).all())


def _of_targets(ys: Sequence[Floats], names: Sequence[str]) -> list[str]:
    """Notes on targets that a loss of squares learns badly, and on labels of nobody."""
    rare = [name for name, column in zip(names, ys[0].T, strict=True) if not column.any()]
    if are_labels(*ys):
        return [f"labels that no training sample has: {listed(rare)}"] if rare else []
    if _are_tokens(ys[0]):
        return []
    mean, deviation = ys[0].mean(0, dtype=np.float64), ys[0].std(0, dtype=np.float64)
    far = (abs(mean) > FAR) | (deviation > FAR)
    if not far.any():
        return []
    t = int(far.argmax())
    return [
        f"target {names[t]!r} has mean {mean[t]:.4g} and deviation {deviation[t]:.4g}; mse and "
        "huber are made for about 0 and 1: scale it, or take a small lr"
    ]


def alike(what: str, names: Sequence[str]) -> list[str]:
    """A note on the names that a person would read as one."""
    plain = [" ".join(name.split()).casefold() for name in names]
    often = Counter(plain)
    same = [repr(name) for name, folded in zip(names, plain, strict=True) if often[folded] > 1]
    return [f"{what} that differ only in blanks or case: {listed(same, 10)}"] if same else []


def _owners_apart(train: Ints, test: Ints) -> list[str]:
    """Notes on the owners that have samples in one part only."""
    notes = []
    for first, second, lacking, then in (
        (train, test, "test", "a client of only these has no test accuracy of its own"),
        (test, train, "training", "their test samples belong to no client"),
    ):
        n = len(np.setdiff1d(first, second))
        if n:
            notes.append(
                f"{n} of {len(np.union1d(train, test))} owners have no {lacking} sample: {then}"
            )
    return notes


def _repeated(train_x: Tensor, test_x: Tensor) -> list[str]:
    """A note on the test samples that are equal to a training sample, by a hash of their bytes."""
    if train_x.shape[1:] != test_x.shape[1:] or train_x.dtype is not test_x.dtype:
        return []  # images before they are scaled
    n = int(np.isin(_hashes(test_x), _hashes(train_x)).sum())
    return [f"{n} of {len(test_x)} test samples are equal to a training sample"] if n else []


def _hashes(x: Tensor) -> NDArray[np.uint64]:
    """A number of 64 bits for the bytes of each sample, [n].

    Of a million samples, two that differ have the same number with a chance of one to 10^7.
    """
    rows = x.contiguous().numpy().reshape(len(x), -1).view(np.uint8)
    width = rows.shape[1]
    n_words = -(-width // 8)
    first, second = np.random.default_rng(0).integers(1, 2**64, (2, n_words), np.uint64)
    hashes = [np.empty(0, np.uint64)]
    for piece in np.array_split(rows, 1 + rows.size // PIECE):
        whole = np.zeros((len(piece), 8 * n_words), np.uint8)
        whole[:, :width] = piece
        mixed = whole.view(np.uint64) * (first | np.uint64(1))
        mixed = (mixed ^ (mixed >> np.uint64(32))) * (second | np.uint64(1))
        hashes.append((mixed ^ (mixed >> np.uint64(29))).sum(1, dtype=np.uint64))
    return np.concatenate(hashes)
