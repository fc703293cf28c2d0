"""From texts to whole numbers: tokens, a vocabulary, sequences of one length, and the vectors of the words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plugins.core.errors import UserError
from plugins.data.streams import stream
from plugins.data.types import Floats

PAD, UNKNOWN = 0, 1  # the first two entries of every vocabulary; PAD stands behind a sequence and nowhere else
SPECIALS = ("<pad>", "<unk>")
WIDTH = 300  # of a word's vector
GLOVE = f"glove.6B.{WIDTH}d.txt"

# Set off by blanks, dropped, or made a blank.
_PUNCTUATION = str.maketrans({**{mark: f" {mark} " for mark in "'.,()!?"}, '"': None, ";": " ", ":": " "})


def tokenise(text: str) -> list[str]:
    """The tokens of a text by the rules of torchtext's `basic_english`, as its documentation lists them.

    Lower case; ' . , ( ) ! ? are tokens of their own; double quotes vanish; ; and : and <br /> are blanks; what blanks
    part are the tokens. Other characters stay as they are ("#fail", "@user", "&quot").
    """
    return text.lower().translate(_PUNCTUATION).replace("<br />", " ").split()


def vocabulary(texts: Iterable[Sequence[str]], size: int) -> list[str]:
    """At most `size` entries: the special ones, then the most frequent tokens, ties in alphabetical order."""
    counts = Counter(token for tokens in texts for token in tokens)
    for special in SPECIALS:  # written in a text, it is no word of its own
        counts.pop(special, None)
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    return [*SPECIALS, *frequent[: size - len(SPECIALS)]]


def encode(texts: Sequence[Sequence[str]], words: Sequence[str], length: int) -> Tensor:
    """Each text's positions in `words`, cut to the first `length` tokens and padded behind, [n, length] int32.

    A token beyond the vocabulary is UNKNOWN, and so is a text without tokens.
    """
    number = {word: position for position, word in enumerate(words)} | dict.fromkeys(SPECIALS, UNKNOWN)
    found = np.full((len(texts), length), PAD, dtype=np.int32)
    for row, tokens in zip(found, texts, strict=True):
        kept = [number.get(token, UNKNOWN) for token in tokens[:length]] or [UNKNOWN]
        row[: len(kept)] = kept
    return torch.from_numpy(found)


def embedding(words: Sequence[str], root: Path) -> tuple[Tensor, str]:
    """(the words' vectors [V, 300] float32, where they are from): GloVe's if its file lies in `root`, or else drawn.

    PAD is 0. Drawn vectors are normal with deviation 1, torch.nn.Embedding's own, at which an LSTM that starts as
    torch's is not saturated. Words that GloVe lacks are drawn with the deviation of those that it has. What is drawn
    does not depend on an experiment's seed. Raises UserError for a damaged file.
    """
    drawn = stream(0, "embedding").standard_normal((len(words), WIDTH))
    drawn[PAD] = 0
    path = root / GLOVE
    if not path.is_file():
        note = f"word vectors: drawn at random (normal, deviation 1), as {path.name} is not in {root}"
        return torch.from_numpy(drawn.astype(np.float32)), note
    found = _glove(path, words)
    if not found:
        raise UserError(f"{path}: has none of the {len(words) - len(SPECIALS)} words of the vocabulary; is it {GLOVE}?")
    rows, vectors = list(found), np.stack(list(found.values()))
    drawn *= vectors.std()
    drawn[rows] = vectors
    of = len(words) - len(SPECIALS)
    note = f"word vectors: {path.name}, {len(rows)} of {of} words found, the others drawn at random"
    return torch.from_numpy(drawn.astype(np.float32)), note


def _glove(path: Path, words: Sequence[str]) -> dict[int, Floats]:
    """The vectors of those `words` that a GloVe file has, by position. UserError names the first damaged line."""
    # Bytes: the file has 400,000 lines, of which few are wanted. It is UTF-8.
    wanted = {word.encode(): position for position, word in enumerate(words) if position >= len(SPECIALS)}
    found = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            word, _, numbers = line.partition(b" ")
            if numbers.count(b" ") != WIDTH - 1:
                wrong = len(numbers.split())
                raise UserError(f"{path}: line {number} has {wrong} numbers, not {WIDTH}; unpack glove.6B.zip again")
            position = wanted.get(word)
            if position is not None:
                try:
                    vector = np.array([float(part) for part in numbers.split()])
                except ValueError:
                    vector = np.full(WIDTH, np.nan)
                if len(vector) != WIDTH or not np.isfinite(vector).all():
                    raise UserError(f"{path}: line {number}: not a word and {WIDTH} numbers; unpack glove.6B.zip again")
                found[position] = vector
    return found
