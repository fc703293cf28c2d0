"""From texts to whole numbers: tokens, a vocabulary, sequences of one length, and the vectors of
the words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import MOST, Range
from fedml_noniid.data.streams import stream
from fedml_noniid.data.types import Floats
from fedml_noniid.data.user_files import GLOVE, WIDTH

PAD, UNKNOWN = (
    0,
    1,
)  # the first two entries of every vocabulary; PAD is only at the end of a sequence
SPECIALS = ("<pad>", "<unk>")
Vocabulary = Annotated[int, Range(len(SPECIALS) + 1, MOST)]  # tokens that are told apart
Length = Annotated[int, Range(1, 1000)]  # tokens of a text

# Characters that get blanks around them, are removed, or become a blank.
_PUNCTUATION = str.maketrans(
    {**{mark: f" {mark} " for mark in "'.,()!?"}, '"': None, ";": " ", ":": " "}
)


def tokenise(text: str) -> list[str]:
    """The tokens of a text by the rules of torchtext's `basic_english`, as its documentation lists
    them.

    Text becomes lower case; ' . , ( ) ! ? are tokens of their own; double quotes vanish; ; and :
    and <br /> become blanks; blanks separate tokens. Other characters stay as they are ("#fail",
    "@user", "&quot").
    """
    return text.lower().translate(_PUNCTUATION).replace("<br />", " ").split()


def vocabulary(texts: Iterable[Sequence[str]], size: int) -> list[str]:
    """At most `size` entries: the special ones, then the most frequent tokens, ties in alphabetical
    order."""
    counts = Counter(token for tokens in texts for token in tokens)
    for special in SPECIALS:  # if a text contains one, it is not a word
        counts.pop(special, None)
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    return [*SPECIALS, *frequent[: size - len(SPECIALS)]]


def encode(texts: Sequence[Sequence[str]], vocabulary: Sequence[str], length: int) -> Tensor:
    """Each text's positions in `vocabulary`, [n, length] int32, cut to the first `length` tokens
    and padded at the end.

    A token that isn't in the vocabulary is UNKNOWN; a text without tokens is one UNKNOWN.
    """
    number = {word: position for position, word in enumerate(vocabulary)} | dict.fromkeys(
        SPECIALS, UNKNOWN
    )
    ids = np.full((len(texts), length), PAD, dtype=np.int32)
    for row, tokens in zip(ids, texts, strict=True):
        known = [number.get(token, UNKNOWN) for token in tokens[:length]] or [UNKNOWN]
        row[: len(known)] = known
    return torch.from_numpy(ids)


def read_texts(
    train: Sequence[str],
    test: Sequence[str],
    source: Sequence[str],
    root: Path,
    size: int,
    length: int,
    noun: str,
) -> tuple[Tensor, Tensor, Tensor, list[str], list[str]]:
    """(tokens of the training texts, those of the test texts, vectors, notes, the vocabulary).

    The vocabulary is made of the `source` texts and has `size` entries at most. See
    `encode` for `length` and `embedding` for `root`. `noun`: "tweets", for the notes. Raises
    UserError as these.
    """
    first, second = ([tokenise(text) for text in part] for part in (train, test))
    entries = vocabulary(map(tokenise, source), size)
    vectors, note = embedding(entries, root)
    train_x, test_x = encode(first, entries, length), encode(second, entries, length)
    cut = sum(len(tokens) > length for part in (first, second) for tokens in part)
    unknown = 100 * (test_x == UNKNOWN).sum().item() / (test_x != PAD).sum().item()
    notes = [
        f"vocabulary of {len(entries)} entries, which {unknown:.1f} % of the test tokens are not "
        "in",
        f"{cut} of {len(first) + len(second)} {noun} cut to {length} tokens",
        note,
    ]
    return train_x, test_x, vectors, notes, entries


def embedding(vocabulary: Sequence[str], root: Path) -> tuple[Tensor, str]:
    """(the words' vectors [V, 300] float32, their origin): GloVe's if `root` has its file,
    otherwise drawn.

    PAD is 0. Drawn vectors are normal with deviation 1, as in torch.nn.Embedding; an LSTM with
    torch's initial weights is not saturated by them. Words that GloVe lacks are drawn with the
    deviation of GloVe's vectors. The draws do not depend on an experiment's seed. Raises UserError
    for a damaged file.
    """
    drawn = stream(0, "embedding").standard_normal((len(vocabulary), WIDTH))
    drawn[PAD] = 0
    path = root / GLOVE
    if not path.is_file():
        note = (
            f"word vectors: drawn at random (normal, deviation 1), as {path.name} is not in {root}"
        )
        return torch.from_numpy(drawn.astype(np.float32)), note
    read, n = _glove(path, vocabulary), len(vocabulary) - len(SPECIALS)
    if not read:
        raise UserError(f"{path}: has none of the {n} words of the vocabulary; is it {GLOVE}?")
    vectors = np.stack(list(read.values()))
    drawn *= vectors.std()
    drawn[list(read)] = vectors
    note = f"word vectors: {path.name}, {len(read)} of {n} words found, the others drawn at random"
    return torch.from_numpy(drawn.astype(np.float32)), note


def _glove(path: Path, vocabulary: Sequence[str]) -> dict[int, Floats]:
    """The vectors that a GloVe file has for `vocabulary`, by position.

    UserError names the first damaged line.
    """
    # As bytes (UTF-8), because only few of the 400,000 lines are needed.
    wanted = {
        word.encode(): position
        for position, word in enumerate(vocabulary)
        if position >= len(SPECIALS)
    }
    by_id = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            word, _, numbers = line.partition(b" ")
            wrong = numbers.count(b" ") != WIDTH - 1
            if not wrong and word in wanted:
                try:
                    vector = np.array([float(part) for part in numbers.split()])
                    by_id[wanted[word]] = vector
                    wrong = len(vector) != WIDTH or not np.isfinite(vector).all()
                except ValueError:
                    wrong = True
            if wrong:
                raise UserError(
                    f"{path}: line {number}: not a word and {WIDTH} numbers; unpack glove.6B.zip "
                    "again"
                )
    return by_id
