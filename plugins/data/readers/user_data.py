"""Classes, owners, test set and notes of a user's data, the same for tables, arrays and images."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.plugins.core.errors import UserError, nearest, shown
from fedml_noniid.plugins.core.options import Range
from fedml_noniid.plugins.data.checks import refusal
from fedml_noniid.plugins.data.dataset import Raw
from fedml_noniid.plugins.data.streams import stream
from fedml_noniid.plugins.data.types import Ints

Share = Annotated[float, Range(0, 1, "()")]
TEST_SHARE = 0.2  # of the samples that becomes the test set, if none is given
MAX_LISTED = 5  # names that a message or a note lists
FRACTION = r"[-+]?\d*[.,]\d*[1-9]\d*(e[-+]?\d+)?"  # a number that isn't whole


class Rows(NamedTuple):
    """Says which samples train and which test, with their labels and owners."""

    train: Ints  # rows of the first table
    test: Ints  # rows of the last table
    y: list[Ints]  # [n] and [m]
    classes: list[str]
    owners: list[Ints] | None  # [n] and [m]
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
        )


def listed(names: Sequence[str], most: int = MAX_LISTED) -> str:
    """`a, b, c and 4 more`, in one line."""
    more = len(names) - most
    return ", ".join(" ".join(name.split()) for name in names[:most]) + (
        f" and {more} more" if more > 0 else ""
    )


def cut(labels: Ints, owners: Ints | None, fraction: float, where: str) -> tuple[Ints, Ints, str]:
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
    place = np.arange(len(order)) - np.repeat(
        np.cumsum(drawable) - drawable, drawable
    )  # within its owner
    drawn = np.floor((place + 1) * many / size + offset) > np.floor(place * many / size + offset)
    is_test = np.zeros(len(labels), dtype=bool)
    is_test[order] = drawn
    for label in np.setdiff1d(labels, labels[~is_test]):
        is_test[np.flatnonzero(labels == label)[0]] = False
    if not is_test.any():
        whose = "" if owners is None else ", and no owner has two"
        raise UserError(
            f"{where}: {len(labels)} samples are too few to cut a test set from{whose}; add a "
            "test set"
        )
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    by = "by label" if owners is None else "by owner and label"
    note = f"test set: {len(test)} of {len(labels)} samples, drawn {by} with a fixed seed"
    return train, test, note


def classified(
    texts: Sequence[Sequence[str]],
    where: Sequence[str],
    at: Callable[[int], str],
    names: Sequence[str] | None = None,
) -> tuple[list[str], list[Ints]]:
    """(the classes, the labels as their numbers) of labels as text: those of training, and of the
    test set if there is one.

    The names are sorted: as numbers if all are whole numbers, otherwise as text; `names` has them
    in another order. `where` begins a message on each of `texts`, `at(i)` names label i. UserError
    for fewer than two classes, for measurements and identifiers in place of classes, and for test
    labels that no training sample has.
    """
    train = texts[0]
    found = set(train)
    for i, label in enumerate(train):
        if re.fullmatch(FRACTION, label.strip()):
            raise UserError(
                f"{where[0]} is {label!r} in {at(i)}, a measurement; allowed: whole numbers or "
                f"text (with {len(found)} different values it looks like a regression target, and "
                "the methods here classify: make classes of it, such as below and above the "
                "median, or choose another label)"
            )
    if len(found) < 2:
        raise UserError(
            f"{where[0]} is always {shown(next(iter(found)))}; at least 2 classes are needed"
        )
    if 2 * len(found) > len(train):
        raise UserError(
            f"{where[0]} has {len(found)} different labels in {len(train)} samples; allowed: "
            "classes with 2 samples or more on average (is it an identifier or a regression "
            "target, or are these too few rows?)"
        )
    if names is None:
        whole = all(re.fullmatch(r"-?\d{1,300}", label) for label in found)
        names = sorted(found, key=lambda label: (int(label), label)) if whole else sorted(found)
    elif sorted(names) != sorted(found):
        odd = sorted(set(names) ^ found) or sorted(
            name for name in found if list(names).count(name) > 1
        )
        raise UserError(f"{where[0]}: classes has to name each class once; not so: {listed(odd)}")
    number = {name: i for i, name in enumerate(names)}
    for i, label in enumerate(texts[-1]):
        if label not in number:
            raise UserError(
                f"{where[-1]} is {shown(label)} in {at(i)}, but no training sample "
                f"is{nearest(label, names)}; allowed: {listed(names, 10)}"
            )
    y = [np.array([number[label] for label in part], dtype=np.int64) for part in texts]
    return list(names), y


def rows_of(
    classes: list[str],
    y: list[Ints],
    owners: Sequence[Sequence[Any]] | None,
    test_share: float | None,
    sources: Sequence[str],
) -> Rows:
    """The rows that train and that test. `y`: the labels [n], and those of the test set if there
    is one.

    `owners` are names or numbers, as the labels; they get numbers from 0 in the sorted order of
    their names in all parts. `sources` names the training set and, if it is given, the test set.
    UserError as in `cut`, and for a `test_share` beside a given test set.
    """
    notes, numbers = [], None
    alike = Counter(map(_plainly, classes))
    if same := [repr(name) for name in classes if alike[_plainly(name)] > 1]:
        notes.append(f"classes that differ only in blanks or case: {', '.join(same)}")
    if owners is not None:
        number = {name: i for i, name in enumerate(sorted(set().union(*owners)))}
        numbers = [np.array([number[name] for name in part], np.int64) for part in owners]
    if len(y) == 2:
        if test_share is not None:
            raise refusal("test_share", test_share, f"none, since {sources[-1]} is the test set")
        train, test = map(np.arange, map(len, y))
    else:
        whose = None if numbers is None else numbers[0]
        train, test, note = cut(y[0], whose, test_share or TEST_SHARE, sources[0])
        notes.append(note)
        y = [y[0][train], y[0][test]]
        numbers = None if numbers is None else [numbers[0][train], numbers[0][test]]
    if len(lacking := np.setdiff1d(y[0], y[1])):
        notes.append(f"classes without a test sample: {listed([classes[c] for c in lacking])}")
    if numbers is not None:
        notes += _owners_apart(*numbers)
    return Rows(train, test, y, classes, numbers, notes)


def _plainly(name: str) -> str:
    return " ".join(name.split()).casefold()


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
    """A note on the test samples that are equal to a training sample, byte by byte."""
    if train_x.shape[1:] != test_x.shape[1:] or train_x.dtype is not test_x.dtype:
        return []  # images before they are scaled

    def digests(x: Tensor) -> list[bytes]:
        return [blake2b(row.tobytes(), digest_size=16).digest() for row in x.contiguous().numpy()]

    known = set(digests(train_x))
    n = sum(digest in known for digest in digests(test_x))
    return [f"{n} of {len(test_x)} test samples are equal to a training sample"] if n else []
