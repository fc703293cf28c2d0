"""The noise of local privacy: its distribution, what it depends on, its secret, and the clip."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedml_noniid.core.errors import NonFiniteError, UserError
from fedml_noniid.core.options import Range
from fedml_noniid.privacy import local
from fedml_noniid.privacy.ledger import Ledger, Release
from fedml_noniid.privacy.local import Noise, derived, gaussian, run_key, secret

KEY = bytes(range(32))
ANYTHING: Callable[[str], Range] = lambda name: Range()  # noqa: E731, an argument of many calls


def noise(**changed: object) -> Noise:
    """With C = 6.5 and sigma = 1 unless said otherwise."""
    return replace(Noise(KEY, 6.5, 1.0), **changed)


def test_the_first_numbers_are_those_of_the_key_stream():
    """RFC 8439, A.1, test vector 1: the stream of key 0 and nonce 0 begins with these 16 bytes, u
    and then v."""
    stream = bytes.fromhex("76b8e0ada0f13d90 405d6ae55386bd28")
    u, v = ((int.from_bytes(stream[at : at + 8], "little") >> 11) / 2**53 for at in (0, 8))
    radius = math.sqrt(-2 * math.log(u + 2**-53))
    expected = [radius * math.cos(2 * math.pi * v), radius * math.sin(2 * math.pi * v)]
    assert gaussian(bytes(32), (2,)).tolist() == pytest.approx(expected, rel=1e-12)
    assert gaussian(bytes(32), ()).item() == pytest.approx(expected[0], rel=1e-12)
    assert gaussian(bytes(32), (0, 3)).shape == (0, 3)


@pytest.mark.parametrize(("byte", "first"), [(0, math.sqrt(2 * 53 * math.log(2))), (255, 0.0)])
def test_no_stream_gives_an_infinite_number(byte, first, monkeypatch):
    """u has 53 bits. All 0 is the largest number, all 1 is u = 1 and the smallest."""
    encryptor = SimpleNamespace(update=lambda zeros: bytes([byte]) * len(zeros))
    monkeypatch.setattr(local, "Cipher", lambda *_: SimpleNamespace(encryptor=lambda: encryptor))
    z = gaussian(KEY, (4,))
    assert z.isfinite().all()
    assert z[0].item() == pytest.approx(first)


def test_fields_are_not_taken_for_others():
    """However the bytes are cut, and under another key."""
    cut = [(b"abc",), (b"ab", b"c"), (b"a", b"bc"), (b"", b"abc"), (b"abc", b""), (), (b"",)]
    found = [derived(key, *fields) for key in (KEY, bytes(32)) for fields in cut]
    assert len({*found}) == len(found) and {len(key) for key in found} == {32}


def drawn(key: Noise, question: bytes, answer: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The noise that was added: the clip takes nothing of these small answers."""
    return key.protect(answer, question, {}, ANYTHING)[name] - answer[name]


def test_noise_belongs_to_secret_run_silo_question_answer_and_name(tmp_path):
    """The same comes twice, anything else has noise of its own: no two are equal or correlated."""
    n, model = 20_000, {"params/w": torch.ones(3)}
    answer = {key: torch.full((n,), 1e-3, dtype=torch.float64) for key in "ab"}
    other = answer | {"b": answer["b"] + 1e-12}
    near = {"params/w": torch.tensor([1.0, 1.0, np.nextafter(np.float32(1), np.float32(2))])}
    head = [4, 2, "train", "", 3, "terms"]

    def of(
        file: int = 1, run: str = "run", terms: str = "terms", silo: int = 0, sigma: float = 1.0
    ) -> Noise:
        return Noise.from_key(run_key(tmp_path / f"{file}", run, terms, silo), 2.0, sigma)

    first = drawn(of(), of().digest(head, model), answer, "a")
    assert torch.equal(first, drawn(of(), of().digest(head, model), answer, "a"))
    asked = of().digest(head, model)
    others = [drawn(of(), asked, answer, "b"), drawn(of(), asked, other, "a")]
    heads = [[*head[:i], "x", *head[i + 1 :]] for i in range(len(head))]
    renamed = {"params/v": model["params/w"]}
    for question in (*((one, model) for one in heads), (head, near), (head, renamed)):
        others.append(drawn(of(), of().digest(*question), answer, "a"))
    unknown = (Noise.from_key(run_key(None, "run", "terms", 0), 2.0, 1.0) for _ in range(2))
    changed = of(run="another run"), of(terms="other terms"), of(silo=1), of(file=2)
    for key in (*changed, of(sigma=1.0 + 1e-15), replace(of(), clip=2.0), *unknown):
        others.append(drawn(key, key.digest(head, model), answer, "a"))
    for a, b in itertools.combinations([first, *others], 2):
        assert abs((a * b).mean().item()) < 5 / math.sqrt(n)


def test_two_scales_of_one_question_do_not_give_the_answer_back(tmp_path):
    """y_i = x + s_i z with one z would give x = (s1 y2 - s2 y1) / (s1 - s2). With two, an error of
    s1 s2 sqrt(2) / (s1 - s2) is left. The ledger counts both, and each once after a restart."""
    n, (s1, s2), question = 20_000, (96.9, 10.8), {"params/w": torch.ones(3)}
    answer = {"w": torch.full((n,), 1e-3, dtype=torch.float64)}
    ledger, found = Ledger.open(tmp_path / "1.ledger"), []
    for sigma in (s1, s2, s1, s2):
        at = Noise.from_key(run_key(tmp_path / "1", "run", "terms", 0), 2.0, sigma)
        asked = at.digest([4, 2, "train"], question)
        ledger.spend(Release(at.release(asked, answer), "silo", sigma / 2))
        found.append(at.protect(answer, asked, {}, ANYTHING)["w"])
    y1, y2, *again = found
    assert torch.equal(y1, again[0]) and torch.equal(y2, again[1])
    error = (s1 * y2 - s2 * y1) / (s1 - s2) - answer["w"]
    assert error.std().item() == pytest.approx(s1 * s2 * math.sqrt(2) / (s1 - s2), rel=0.05)
    assert len(ledger.path.read_text().splitlines()) == 1 + 2


def test_the_clip_is_that_of_all_tensors_together():
    """||(3, 4, 12)|| = 13, and C = 6.5 halves it.

    One tensor at a time, (3, 4) would be left alone.
    """
    answer = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[12.0]])}
    found = noise(sigma=0.0).protect(answer, b"", {}, ANYTHING)
    assert found["a"].tolist() == [1.5, 2.0] and found["b"].tolist() == [[6.0]]
    within = noise(sigma=0.0, clip=13.0).protect(answer, b"", {}, ANYTHING)
    assert all(torch.equal(within[name], leaf) for name, leaf in answer.items())
    zero = noise(sigma=0.0).protect({"a": torch.zeros(2)}, b"", {}, ANYTHING)
    assert zero["a"].tolist() == [0.0, 0.0]
    assert Noise.from_key(KEY, 13.0, 1.0).clip == 6.5  # two answers are at most 13 apart


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_has_no_norm_is_refused_by_its_name(value):
    """min(1, C / nan) is 1 in Python: the whole answer would leave as it is. The server may have
    sent the number."""
    answer = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0, 2.0])}
    lies = ({"b": torch.tensor([1.0, value])}, {}), ({}, {"b": torch.full((2,), value)})
    for changed, known in lies:
        with pytest.raises(NonFiniteError, match=r"^b: is not finite"):
            noise().protect(answer | changed, b"", known, ANYTHING)
    large = {"a": torch.tensor([1e300, 1.0], dtype=torch.float64)}  # its square is infinite
    assert noise(sigma=0.0).protect(large, b"", {}, ANYTHING)["a"].norm() <= 6.5


def test_running_statistics_are_clipped_by_their_change():
    """102 - 90 = 12, of which half is left: 96."""
    answer = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([102.0])}
    found = noise(sigma=0.0).protect(answer, b"", {"b": torch.tensor([90.0])}, ANYTHING)
    assert found["a"].tolist() == [1.5, 2.0] and found["b"].tolist() == [96.0]


def test_generators_that_others_can_seed_have_no_effect():
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state()
        found.append(noise().protect({"a": torch.zeros(5)}, b"question", {}, ANYTHING)["a"])
        assert torch.equal(torch.get_rng_state(), before), "it draws nothing there"
    assert torch.equal(*found)


def test_a_secret_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    path = tmp_path / "kits" / "1.noise.key"
    made = secret(path)
    assert len(made) == 32 and path.read_bytes() == made == secret(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len({made, secret(tmp_path / "2"), secret(None), secret(None)}) == 4


@pytest.mark.parametrize(
    ("length", "mode"), [(0, 0o600), (31, 0o600), (33, 0o600), (32, 0o640), (32, 0o604)]
)
def test_a_secret_of_another_length_or_that_others_can_read_is_refused(tmp_path, length, mode):
    path = tmp_path / "secret"
    path.write_bytes(bytes(length))
    path.chmod(mode)
    said = rf"secret: is not the secret of a silo's noise \({length} bytes, mode {mode:o}.; allowed"
    with pytest.raises(UserError, match=said):
        secret(path)


def test_a_secret_that_lies_elsewhere_is_refused(tmp_path):
    secret(tmp_path / "secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "folder").mkdir(mode=0o700)
    for name, why in (("link", "is not the secret"), ("folder", "the secret .* can't be read")):
        with pytest.raises(UserError, match=f"{name}: {why}"):
            secret(tmp_path / name)
