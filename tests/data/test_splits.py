import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.splits import hold_out
from fedml_noniid.data.subsample import subsample

label_arrays = st.lists(st.integers(5, 40), min_size=2, max_size=6).map(
    lambda sizes: np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
)


@settings(deadline=None, max_examples=60)
@given(
    labels=label_arrays,
    validation=st.sampled_from([0, 0.1, 0.25, 0.9]),
    each=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_parts_are_disjoint_ascending_and_together_everything(labels, validation, each, seed):
    n_classes = labels.max() + 1
    if each and (0.1 * np.bincount(labels)).min() < 2 and validation == 0.9:
        each = 0  # nothing left to take
    split = hold_out(labels, validation, each * n_classes, seed)
    again = hold_out(labels, validation, each * n_classes, seed)
    assert all(map(np.array_equal, split, again))
    assert np.array_equal(hold_out(labels, validation, 0, seed).validation, split.validation)
    assert all((np.diff(part) > 0).all() for part in split)
    assert sorted(np.concatenate(split)) == list(range(len(labels)))
    assert (np.bincount(labels[split.train], minlength=n_classes) > 0).all()
    assert (np.bincount(labels[split.public], minlength=n_classes) == each).all()
    share = validation * np.bincount(labels)
    assert (np.abs(np.bincount(labels[split.validation], minlength=n_classes) - share) <= 1).all()


def test_the_largest_public_set_leaves_one_sample_of_the_rarest_class():
    labels = np.repeat([0, 1, 2], [4, 9, 9])
    assert np.bincount(labels[hold_out(labels, 0, 11, seed=0).public]).tolist() == [3, 4, 4]
    for validation, public, words in (
        (0, 12, "public = 12 is refused; allowed: 3 to 11 ("),
        (0, 2, "public = 2 is refused; allowed: 3 to 11 ("),
        (0.0001, 0, "validation = 0.0001 is refused; allowed: 0, or a share"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            hold_out(labels, validation, public, seed=0)
    with pytest.raises(UserError, match="allowed: none "):
        hold_out(np.repeat([0, 1], [1, 9]), 0, 2, seed=0)
    with pytest.raises(UserError, match="samples = 501 is refused; allowed: 3 to 22"):
        subsample(labels, 501)


@settings(deadline=None, max_examples=60)
@given(labels=label_arrays, share=st.sampled_from([0.0, 0.1, 0.37, 0.9, 1.0]))
def test_fewer_samples_keep_the_classes_in_proportion(labels, share):
    sizes = np.bincount(labels)
    wanted = max(len(sizes), round(share * len(labels)))
    kept = subsample(labels, wanted)
    assert len(kept) == wanted and (np.diff(kept) > 0).all()
    own = np.bincount(labels[kept], minlength=len(sizes))
    assert (own > 0).all()
    assert (np.abs(own - wanted / len(labels) * sizes) <= len(sizes)).all()
    assert (kept == subsample(labels, wanted)).all()
