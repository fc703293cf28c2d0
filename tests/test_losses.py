"""Losses and metrics against torch and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as sk
from torch import Tensor

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.losses import CROSS_ENTROPY, CrossEntropy, Loss
from fedml_noniid.losses import BCE, LOSSES, MSE, Huber, MultiLabel, NextToken, Regression
from fedml_noniid.metrics import METRICS

CLIENTS, BATCH, OUTPUTS = 3, 7, 4
BUILT: dict[str, Loss] = {name: kind() for name, kind in LOSSES.items() if kind.per_target}
BUILT["wide"] = Huber(2.5)


def drawn(loss: Loss, *rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Outputs [..., C] and targets."""
    generator = torch.Generator().manual_seed(len(rows))
    outputs = 3 * torch.randn(*rows, OUTPUTS, generator=generator, dtype=dtype)
    if loss.classes:
        return outputs, torch.randint(OUTPUTS, rows, generator=generator)
    y = torch.randn(*rows, OUTPUTS, generator=generator, dtype=dtype)
    return outputs, (y > 0.3).to(dtype) if isinstance(loss, MultiLabel) else y


TORCH = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "huber": F.huber_loss,
    "wide": lambda outputs, y: F.huber_loss(outputs, y, delta=2.5),
    "bce": F.binary_cross_entropy_with_logits,
}


@pytest.mark.parametrize("name", BUILT)
def test_a_mean_is_torchs_and_padding_is_left_out(name: str) -> None:
    loss = BUILT[name]
    outputs, y = drawn(loss, BATCH)
    torch.testing.assert_close(loss.mean(outputs, y, None), TORCH[name](outputs, y))
    mask = torch.arange(BATCH) < 4
    wanted = TORCH[name](outputs[:4], y[:4])
    outputs[4:] = 1e3  # padding, which must not count
    torch.testing.assert_close(loss.mean(outputs, y, mask), wanted)
    torch.testing.assert_close(loss.total(outputs[:4], y[:4]), 4 * wanted)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [(BATCH,), (CLIENTS, BATCH)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", BUILT)
def test_a_gradient_has_autograds_bits(
    name: str, dtype: torch.dtype, rows: tuple[int, ...], masked: bool
) -> None:
    loss = BUILT[name]
    outputs, y = drawn(loss, *rows, dtype=dtype)
    counts = torch.tensor([5, 3, 0]) if len(rows) == 2 else torch.tensor(5)  # the last has none
    mask = torch.arange(BATCH) < counts.unsqueeze(-1) if masked else None
    mask = mask if mask is None else mask.view(rows)
    watched = outputs.clone().requires_grad_()
    value = loss.mean(watched, y, mask)
    (wanted,) = torch.autograd.grad(value.sum(), watched)
    grads, losses = loss.gradient(outputs, y, mask)
    assert torch.equal(grads, wanted) and grads.abs().sum() > 0
    assert torch.equal(losses, loss.values(outputs, y))


def scored(loss: Loss, outputs: Tensor, y: Tensor, *sizes: int) -> dict[str, float]:
    """The metrics of samples that lie in sets of these sizes."""
    parts = zip(outputs.split(sizes), y.split(sizes), strict=True)
    found = [loss.statistics(loss.predictions(out, y), y) for out, y in parts]
    assert all(len(one) == loss.n_statistics(OUTPUTS) for one in found)
    every = loss.scores(torch.stack(found), torch.tensor(sizes, dtype=torch.float64))
    every = every | loss.of_all(loss.predictions(outputs, y), y)
    assert every.keys() <= METRICS.keys() and every.keys() >= {*loss.metrics}
    return {key: value.item() for key, value in every.items()}


@pytest.mark.parametrize("sizes", [(40,), (1, 25, 14)], ids=str)
def test_metrics_are_scikit_learns_over_all_sets_together(sizes: tuple[int, ...]) -> None:
    outputs, y = drawn(CROSS_ENTROPY, 40)
    found = scored(CROSS_ENTROPY, outputs, y, *sizes)
    assert found == {"accuracy": sk.accuracy_score(y, outputs.argmax(1))}

    outputs, y = drawn(MSE(), 40)
    y[:, 1] += 1e4  # a mean far from 0 costs no digits
    outputs = y + 0.3 * outputs
    assert scored(MSE(), outputs, y, *sizes) == pytest.approx(
        {
            "r2": sk.r2_score(y, outputs),
            "mae": sk.mean_absolute_error(y, outputs),
            "rmse": sk.mean_squared_error(y, outputs) ** 0.5,
        },
        rel=1e-9,
    )

    outputs, y = drawn(BCE(), 40)
    outputs = outputs.round()  # with ties
    said = outputs > 0
    assert scored(BCE(), outputs, y, *sizes) == pytest.approx(
        {
            "macro_f1": sk.f1_score(y, said, average="macro"),
            "micro_f1": sk.f1_score(y, said, average="micro"),
            "auc": sk.roc_auc_score(y, outputs, average="macro"),
        },
        rel=1e-12,
    )


def test_what_is_not_defined_is_nan() -> None:
    y = torch.ones(5, 1, dtype=torch.float64)
    constant = MSE().scores(MSE().statistics(y * 2, y)[None], torch.tensor([5.0]))
    assert constant["r2"].isnan() and constant["rmse"] == 1
    nobody = BCE().of_all(y, y) | BCE().scores(torch.zeros(1, 3), torch.tensor([5.0]))
    assert all(value.isnan() for value in nobody.values())


def test_a_label_that_does_not_occur_is_left_out() -> None:
    y = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    outputs = torch.tensor([[1.0, -1.0], [-1.0, -1.0], [-2.0, -1.0]])
    found = BCE().scores(BCE().statistics(outputs, y)[None], torch.tensor([3.0]))
    assert found["macro_f1"] == pytest.approx(2 / 3)  # of label 0: 1 hit, said once, true twice
    assert BCE().of_all(outputs, y)["auc"] == 1


def test_other_values_are_never_trained_with_the_gradient_of_their_parent() -> None:
    class Doubled(CrossEntropy):
        def values(self, outputs: Tensor, y: Tensor) -> Tensor:
            return 2 * super().values(outputs, y)

    class Absolute(Regression):
        def values(self, outputs: Tensor, y: Tensor) -> Tensor:
            return (outputs - y).abs().mean(-1)

    assert not Doubled.written and not Absolute.written
    assert all(loss.written for loss in BUILT.values())


TOKENS, LENGTH = 6, 5


def sentences() -> tuple[Tensor, Tensor]:
    """Logits [BATCH, T, V] and labels, a third of which don't count; none of the last sample."""
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(BATCH, LENGTH, TOKENS, generator=generator, dtype=torch.float64)
    y = torch.randint(TOKENS, (BATCH, LENGTH), generator=generator).double()
    y[torch.rand(BATCH, LENGTH, generator=generator) < 0.3] = -100
    y[-1, 1:] = -100
    return logits, y


def test_next_token_is_the_mean_over_tokens_and_labels_below_0_do_not_count() -> None:
    (logits, y), loss = sentences(), NextToken()
    labels, counted = y[:, 1:].long(), y[:, 1:] != -100
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
    mask = torch.arange(BATCH) < 4
    every, some = (losses[:n].sum().item() / counted[:n].sum().item() for n in (BATCH, 4))
    assert loss.mean(logits, y, None).item() == pytest.approx(every, rel=1e-12)
    both = loss.mean(torch.stack([logits, logits]), torch.stack([y, y]), torch.stack([mask] * 2))
    assert both.tolist() == pytest.approx([some] * 2, rel=1e-12)
    by_sample = losses.sum(1) / counted.sum(1).clamp(min=1)
    torch.testing.assert_close(loss.values(logits, y), by_sample)
    hits = (logits[:, :-1].argmax(-1) == labels)[counted].double().mean().item()
    for sizes in ((BATCH,), (1, BATCH - 1)):
        assert scored(loss, logits, y, *sizes) == pytest.approx(
            {"token_accuracy": hits, "perplexity": np.exp(every)}, rel=1e-12
        )


def test_an_impossible_token_without_a_label_gives_no_nan() -> None:
    logits, y = sentences()
    y[0, 1:] = torch.tensor([1.0, -100, 1, 1])
    logits[0, 1, 0] = -torch.inf  # log p of token 0, where no label counts
    watched = logits.requires_grad_()
    NextToken().mean(watched, y, None).backward()
    assert watched.grad is not None and watched.grad.isfinite().all()


@pytest.mark.parametrize(
    ("label", "vocabulary", "message"),
    [
        (0.5, None, "a target is 0.5; allowed: tokens, whole numbers from 0, or -100"),
        (-1.0, TOKENS, "a target is -1; allowed: tokens, 0 to 5, or -100"),
        (6.0, TOKENS, "a target is 6; allowed: tokens, 0 to 5, or -100"),
        (1.0, 0, r"the network gives \[B, n_classes\]; allowed: \[B, T, V\]"),
    ],
)
def test_labels_of_tokens_are_tokens_of_the_network(
    label: float, vocabulary: int | None, message: str
) -> None:
    y = torch.tensor([[label, -100.0]])
    with pytest.raises(UserError, match=message):
        NextToken().check(y, vocabulary)
    NextToken().check(torch.tensor([[5.0, -100.0]]), TOKENS)
    with pytest.raises(UserError, match=r"gives \[B, T, V\]; allowed: loss next_token"):
        MSE().check(y, TOKENS)
