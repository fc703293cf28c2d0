"""Tokens, vocabulary, sequences, word vectors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.text import GLOVE, PAD, WIDTH, embedding, encode, tokenise, vocabulary

# torchtext's documentation of basic_english, in its order: what is replaced by what.
DOCUMENTED = [
    ("'", " '  "),
    ('"', ""),
    (".", " . "),
    ("<br />", " "),
    (",", " , "),
    ("(", " ( "),
    (")", " ) "),
    ("!", " ! "),
    ("?", " ? "),
    (";", " "),
    (":", " "),
]


@given(st.text(st.sampled_from("aB'\".,()!?;:<br /> \t\u00e9&#") | st.characters()))
def test_tokens_follow_the_documented_rules_one_after_the_other(text: str) -> None:
    wanted = text.lower()
    for old, new in DOCUMENTED:
        wanted = wanted.replace(old, new)
    assert tokenise(text) == re.sub(r"\s+", " ", wanted).split()


def test_vocabulary_most_frequent_first_ties_alphabetically() -> None:
    texts = [["b", "c", "b"], ["a", "c", "d"], ["e", "d", "b"]]  # b 3, c 2, d 2, a 1, e 1
    assert vocabulary(texts, 100) == ["<pad>", "<unk>", "b", "c", "d", "a", "e"]
    assert vocabulary(texts, 5) == ["<pad>", "<unk>", "b", "c", "d"]
    assert vocabulary([], 5) == ["<pad>", "<unk>"]
    odd = [["<pad>", "a", "<unk>", "<pad>"]]  # special tokens in a text are unknown
    assert vocabulary(odd, 10) == ["<pad>", "<unk>", "a"]
    assert encode(odd, ["<pad>", "<unk>", "a"], 5).tolist() == [[1, 2, 1, 1, 0]]


def test_sequences_are_cut_and_padded_behind() -> None:
    words = ["<pad>", "<unk>", "a", "b"]
    found = encode([["a", "b", "a", "b"], ["b"], ["x", "a"], []], words, 3)
    assert found.dtype == torch.int32
    assert found.tolist() == [[2, 3, 2], [3, 0, 0], [1, 2, 0], [1, 0, 0]]


# vectors

WORDS = ["<pad>", "<unk>", "the", "naïve", "zzz"]


def glove(folder: Path, lines: Sequence[tuple[str, object]]) -> Path:
    """A file as GloVe's: each line a word and WIDTH times a number, or a whole line's end."""
    rest = [v if isinstance(v, str) else " ".join([str(v)] * WIDTH) for _, v in lines]
    (folder / GLOVE).write_text(
        "".join(f"{word} {end}\n" for (word, _), end in zip(lines, rest, strict=True))
    )
    return folder / GLOVE


def test_without_a_file_vectors_are_drawn_and_the_note_says_so(tmp_path: Path) -> None:
    """150,000 numbers: the mean has a deviation of 0.0026."""
    found, note = embedding(["<pad>", "<unk>", *map(str, range(500))], tmp_path)
    assert found.shape == (502, WIDTH) and found.dtype == torch.float32
    assert found[PAD].abs().max() == 0
    assert found[1:].mean().item() == pytest.approx(0, abs=0.01)
    assert found[1:].std().item() == pytest.approx(1, abs=0.01)
    assert "drawn at random" in note and GLOVE in note
    # Two words with +0.5 and -0.5: a deviation of 0.5 also for what is drawn.
    glove(tmp_path, [("a", 9), ("naïve", -0.5), ("the", 0.5), ("<unk>", 7)])
    vectors, note = embedding(WORDS, tmp_path)
    assert vectors[2].tolist() == [0.5] * WIDTH and vectors[3].tolist() == [-0.5] * WIDTH
    drawn, _ = embedding(WORDS, tmp_path / "nowhere")
    assert torch.allclose(vectors[[1, 4]], 0.5 * drawn[[1, 4]])
    assert "2 of 3 words found" in note and GLOVE in note


GOOD = ("a", 1.0)
DAMAGED = [
    ([GOOD, ("b", "1 2 3")], "line 2: not a word and 300 numbers"),
    ([GOOD, GOOD, ("the", " ".join(["1"] * 299))], "line 3: not a word and 300 numbers"),
    (
        [("the", " ".join(["1"] * 50))],
        "line 1: not a word and 300 numbers",
    ),  # glove.6B.50d under the wrong name
    ([GOOD, ("the", " ".join(["nan"] * 300))], "line 2: not a word and 300 numbers"),
    ([("the", " ".join(["x"] * 300))], "line 1: not a word and 300 numbers"),
    ([("the", " ".join(["1"] * 299) + " ")], "line 1: not a word and 300 numbers"),
    ([GOOD], "has none of the 3 words"),
    ([], "has none of the 3 words"),
]


@pytest.mark.parametrize(("lines", "message"), DAMAGED)
def test_a_damaged_file_is_one_line_that_names_the_place(
    tmp_path: Path, lines: list[tuple[str, object]], message: str
) -> None:
    path = glove(tmp_path, lines)
    with pytest.raises(UserError) as caught:
        embedding(WORDS, tmp_path)
    assert (
        str(path) in str(caught.value)
        and message in str(caught.value)
        and "\n" not in str(caught.value)
    )
