"""Tries a user's network before it runs. Plain torch trains the untouched module, and what will
train is compared with it. What is unsound is refused, what vmap can't take trains one client at a
time.

All is computed in float64, where a wrong row can't be taken for rounding; in float32 if the user's
code insists on it, or if the frozen parameters are large. All passes share these. Dropouts that
draw from keys drop nothing in the comparison with plain torch. All else that draws has the same
seed on both sides.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedml_noniid.core.data import cross_entropy, masked_mean
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params, Tree, n_bytes, row, tree_map
from fedml_noniid.models.model import Model
from fedml_noniid.models.modules import converted, hooked, is_plain, our_name
from fedml_noniid.models.own import OwnNetwork, Template
from fedml_noniid.models.rows import row_of
from fedml_noniid.own_code import running

BATCH, PADDED = 4, 1  # samples of the step; those of them that are padding, where some are
# Relative differences that rounding stays below; other numbers are the same or not.
CLOSE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 1e-1}
MOST_EXACT = 64 << 20  # bytes of frozen parameters; float64 would take twice as much beside them
LARGE = 100.0  # times first values: beyond a limit that a forward may set
LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Batch(NamedTuple):
    """The arguments of a step: of one client, or of several side by side."""

    params: Params
    buffers: Params
    x: Tensor
    y: Tensor
    key: Tensor
    mask: Tensor | None = None


class Step(NamedTuple):
    """What a step gives, or a pass in evaluation."""

    gradient: Params
    buffers: Params
    outputs: Params  # of the submodules in the order of the pass, where they are recorded


def probed(network: OwnNetwork, n_classes: int, tokens: int = 0) -> OwnNetwork:
    """The network with what was found out; `tokens`: the size of the vocabulary, for text.

    UserError for a network that can't be trained as it is.
    """
    head, network = network.head, _started(replace(network, out=n_classes, head=""))
    network, batch = _compared(network, n_classes, tokens)
    network = _with_head(network, head, batch)
    batch = batch._replace(buffers={name: batch.buffers[name] for name in network.state})
    templates: dict[object, Template] = {
        (network.head, train): network.template(train) for train in (False, True)
    }
    kept = templates[network.head, True].scope.kept
    reason = network.sequential_only or _padding(network, batch) or _side_by_side(network, batch)
    if reason and kept:
        named = [*kept[:3], "..."] if kept[3:] else kept
        reason += f"; as it is stays {', '.join(named)}"
    # The others hold large tensors in float64.
    return replace(network, sequential_only=reason, plain=False, templates=templates)


def as_row(network: OwnNetwork, tokens: int = 0) -> Model:
    """The probed network as a row of our blocks, if a step is the same; otherwise as it is."""
    blocks = None if network.inputs else row_of(network)
    if blocks is None:
        return network
    mask = torch.ones(BATCH)
    mask[-PADDED:] = 0
    params, buffers = network.init(torch.Generator().manual_seed(0))
    samples = _samples(network, network.n_classes, tokens)
    batch = _exact(network, Batch(params, buffers, *samples, torch.tensor(7), mask))
    try:
        expected, actual = (
            _step(each, batch)._replace(outputs={"": _logits(each, batch)})
            for each in (replace(network, plain=False), blocks)
        )
    except Exception:  # of many kinds, where a block is another one than it seems
        return network
    return network if _difference(expected, actual) else blocks


def _samples(
    network: OwnNetwork, n_classes: int, tokens: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Samples [B, ...] and labels [B]."""
    generator = torch.Generator().manual_seed(seed)
    size = (BATCH, *network.shape)
    if tokens:
        x = torch.randint(tokens, size, generator=generator)
    else:
        x = torch.randn(size, generator=generator)
    first = 0
    for spec in network.inputs.values():  # 0 and 1 are numbers of any vocabulary
        last = first + spec.size
        if spec.whole:
            x[:, first:last] = torch.randint(2, (BATCH, spec.size), generator=generator).to(x.dtype)
        first = last
    y = torch.randint(n_classes, (BATCH,), generator=generator)
    return x, y


def _refused(network: OwnNetwork, what: str, allowed: str) -> UserError:
    return UserError(f"model {network.name!r}: {what}", allowed=allowed)


def _exact(network: OwnNetwork, batch: Batch) -> Batch:
    """In float64; as they are where the frozen parameters are large."""
    if n_bytes(_split(network, batch.params)[0]) > MOST_EXACT:
        return batch

    def exact(leaf: Tensor) -> Tensor:
        return leaf.double() if leaf.is_floating_point() else leaf

    return batch._replace(
        params=tree_map(exact, batch.params),
        buffers=tree_map(exact, batch.buffers),
        x=batch.x.double(),
    )


def _running(network: OwnNetwork, call: Callable[[], T], what: str) -> T:
    """What the user's code returns. UserError with its place if it fails."""
    return running(f"model {network.name!r}: {what}", call, "forward")


def _started(network: OwnNetwork) -> OwnNetwork:
    """With all buffers, and the parameters that ask for no gradient."""
    module = _running(network, network.untouched, "making it")
    fixed = {name for name, leaf in module.named_parameters() if not leaf.requires_grad}
    state = {our_name(name) for name, _ in module.named_buffers()} - {""}
    if not any(leaf.requires_grad for leaf in module.parameters()):
        raise _refused(network, "no parameter has a gradient", "one that is trained")
    return replace(network, frozen=frozenset(fixed), state=frozenset(state))


def _compared(network: OwnNetwork, n_classes: int, tokens: int) -> tuple[OwnNetwork, Batch]:
    """As `_as_in_torch`, with parameters and samples of its own."""
    params, buffers = network.init(torch.Generator().manual_seed(0))
    others, _ = network.init(torch.Generator().manual_seed(0))
    if any(not torch.equal(leaf, others[name]) for name, leaf in params.items()):
        raise _refused(
            network,
            "its first values differ between two calls with one seed",
            "draws from torch's own generator only",
        )
    del others  # it may be large
    network = replace(network, fixed=_split(network, params)[0])
    samples, (x, y) = (_samples(network, n_classes, tokens, seed) for seed in range(2))
    plain = Batch(params, buffers, *samples, torch.tensor(7))
    for first in (_exact(network, plain), plain):
        second = first._replace(x=x.to(first.x.dtype), y=y, key=torch.tensor(8))
        try:
            with _fixed(network, first.params):
                return _as_in_torch(network, first, second)
        except UserError:  # perhaps of code that makes float32 by itself
            if first is plain:
                raise
    raise AssertionError("the last one returns or raises")


@contextmanager
def _fixed(network: OwnNetwork, params: Params) -> Iterator[None]:
    """UserError if what runs inside changes frozen parameters, whose memory all passes share."""

    def digest(leaf: Tensor) -> bytes:
        return hashlib.sha256(leaf.cpu().contiguous().numpy().data).digest()

    frozen, _ = _split(network, params)
    before = tree_map(digest, frozen)
    try:
        yield
    finally:
        for name, leaf in frozen.items():
            if digest(leaf) != before[name]:
                raise _changed(network, name)


def _as_in_torch(network: OwnNetwork, first: Batch, second: Batch) -> tuple[OwnNetwork, Batch]:
    """With plain passes that equal those of plain torch, and the arguments of their first step."""
    steps, seeded = _reference(network, first, second)
    if _not_finite(steps) and not network.tokens:  # perhaps the user's samples have no signs
        first, second = (batch._replace(x=batch.x.abs()) for batch in (first, second))
        steps, seeded = _reference(network, first, second)
    if what := _not_finite(steps):
        raise _refused(network, f"{what} is not finite (NaN or infinite)", "finite numbers")
    again, _ = _torch_step(network, _loaded(network, first), first, train=True)
    if _difference(steps[0], again, 0):
        raise _refused(
            network,
            "two passes with the same parameters, samples and random numbers differ",
            "draws in training only, from torch's own generator",
        )
    trained = {name for step in steps for name in step.gradient}
    logits = steps[0].outputs[""]
    network = replace(
        network,
        plain=True,
        vocabulary=logits.shape[2] if logits.ndim == 3 else 0,
        dropping=False,
        frozen=network.frozen | (first.params.keys() - trained),
        state=_changing(network, first.buffers, *steps),
        seeded=seeded,
        sequential_only="its pass draws from torch's own generator" if seeded else "",
    )
    network = replace(network, channels_last=not _unlike(network, first, second, steps))
    if error := not network.channels_last and _unlike(network, first, second, steps):
        raise error
    return replace(network, dropping=True), first


def _unlike(
    network: OwnNetwork, first: Batch, second: Batch, steps: list[Step]
) -> UserError | None:
    """The error of passes that are not those of plain torch.

    They run in another order than plain torch's: what a pass leaves behind shows.
    """
    once, twice, evaluated = steps
    passes = (
        (twice, second._replace(buffers=first.buffers | once.buffers), True),
        (evaluated, first._replace(buffers=first.buffers | twice.buffers), False),
        (once, first, True),
    )
    try:
        for expected, batch, train in passes:
            step = _running(network, partial(_watched, network, batch, train), "a step of training")
            if what := _difference(expected, step):
                return _refused(
                    network,
                    f"{what} is another one than in plain torch",
                    "passes that find parameters and buffers in their modules, and keep what "
                    "changes in a buffer (register_buffer)",
                )
    except UserError as error:
        return error
    return None


def _changing(
    network: OwnNetwork, first: Params, once: Step, twice: Step, evaluated: Step
) -> frozenset[str]:
    """The buffers that training changes; the others are constants."""
    changed = {
        name
        for name, leaf in first.items()
        if not (torch.equal(once.buffers[name], leaf) and torch.equal(twice.buffers[name], leaf))
    }
    for name in sorted(first):
        if name in changed and not first[name].is_floating_point():
            raise _refused(
                network,
                f"training changes {name}, a buffer of whole numbers, of which there is no mean",
                "a buffer of floating-point numbers",
            )
        if not torch.equal(twice.buffers[name], evaluated.buffers[name]):
            raise _refused(
                network, f"a pass in evaluation changes the buffer {name}", "changes in training"
            )
    return frozenset(changed)


def _reference(network: OwnNetwork, first: Batch, second: Batch) -> tuple[list[Step], bool]:
    """What plain torch makes of the untouched module: two steps of training, then a pass in
    evaluation; and whether the steps draw from torch's own generator."""
    module = _loaded(network, first)
    steps, seeded, counts = [], False, []
    for batch, train in ((first, True), (second, True), (first, False)):
        what = f"a {'step of training' if train else 'pass'} with samples of shape {network.shape}"
        step, draws = _running(network, partial(_torch_step, network, module, batch, train), what)
        if draws and not train:
            raise _refused(network, "its pass draws in evaluation", "draws in training only")
        steps.append(step)
        seeded |= draws
        counts.append(_counts(module))
    # Some limit their weights, which at first are within the limits.
    for name, leaf in module.named_parameters():
        if name not in network.frozen:
            leaf.data *= LARGE
    # It may fail: such weights are no real ones.
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):
        module.train()
        outputs = [network.apply(module, first.x.clone()), *(step.outputs[""] for step in steps)]
        if all(y.min() >= 0 and y.max() <= 1 and y.any() for y in outputs):
            LOG.warning(
                "model %r: its outputs stay between 0 and 1, as behind a softmax or a sigmoid; the "
                "losses cross_entropy, bce and next_token take logits",
                network.name,
            )
    _check_parameters(network, module, first, LARGE)
    for name, count in counts[1].items():
        if counts[0].get(name, count) != count:
            raise _refused(
                network,
                f"each pass changes {name}, a number in an attribute",
                "a buffer of floating-point numbers",
            )
    return steps, seeded


def _counts(module: nn.Module) -> dict[str, int]:
    """The whole numbers in the attributes of a module and its parts, by name."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, int)
    }


def _loaded(network: OwnNetwork, batch: Batch) -> nn.Module:
    """An untouched module with parameters and buffers, whose plain dropouts drop nothing."""
    module = network.untouched()
    converted(module, next(iter(batch.params.values())))
    for name, leaf in module.named_parameters():
        first = batch.params[name]
        leaf.data = first if name in network.frozen else first.clone()
    for name, buffer in module.named_buffers():
        buffer.data = batch.buffers.get(our_name(name), buffer).clone()
    for part in module.modules():
        if isinstance(part, _DropoutNd) and is_plain(part):
            part.forward = lambda x: x
    return module


def _torch_step(
    network: OwnNetwork, module: nn.Module, batch: Batch, train: bool
) -> tuple[Step, bool]:
    """A step by plain torch, or a pass in evaluation; whether it draws from torch's generator."""
    x = batch.x.clone()
    module.train(train)
    module.zero_grad()
    with (
        _recorded(module) as outputs,
        torch.random.fork_rng(devices=[]),
        torch.set_grad_enabled(train),
    ):
        torch.manual_seed(int(batch.key))
        before = torch.get_rng_state()
        logits = network.apply(module, x)
        draws = not torch.equal(before, torch.get_rng_state())
        if not isinstance(logits, Tensor):
            raise _refused(
                network,
                f"its forward gives a {type(logits).__name__}",
                "one tensor, the logits; a module around it can pick them out",
            )
        wanted = [BATCH, network.n_classes]
        if [*logits.shape[:2]] != wanted or logits.ndim > 3:
            raise _refused(
                network,
                f"gives {[*logits.shape]} for {BATCH} samples",
                f"logits {wanted}, one for each class (of tokens: {[*wanted, 'V']})",
            )
        if train:
            _loss(logits, batch).backward()  # type: ignore[no-untyped-call]  # untyped in torch
    if not torch.equal(x, batch.x):
        raise _refused(network, "its forward changes the samples", "a forward that leaves them")
    _check_parameters(network, module, batch)
    gradient = {
        name: leaf.grad for name, leaf in module.named_parameters() if leaf.grad is not None
    }
    for name, grad in gradient.items():
        if grad.is_sparse:
            raise _refused(network, f"the gradient of {name} is sparse", "sparse=False")
    named = {our_name(name): leaf for name, leaf in module.named_buffers()}
    buffers = {name: named[name].clone() for name in batch.buffers}
    return Step(tree_map(torch.clone, gradient), buffers, outputs), draws


def _check_parameters(
    network: OwnNetwork, module: nn.Module, batch: Batch, factor: float = 1
) -> None:
    """UserError if a pass has changed parameters, but for the `factor` of those that are
    trained."""
    for name, leaf in module.named_parameters():
        first = batch.params[name]
        if not torch.equal(leaf, first if name in network.frozen else factor * first):
            raise _changed(network, name)


def _changed(network: OwnNetwork, name: str) -> UserError:
    return _refused(network, f"its forward changes {name}", "a forward that leaves it")


@contextmanager
def _recorded(module: nn.Module) -> Iterator[Params]:
    """Yields the outputs of the submodules, by name, in the order of a pass."""
    outputs: Params = {}

    def record(name: str, _: object, out: object) -> None:
        if isinstance(out, Tensor):
            outputs[name] = out.detach().clone()

    with hooked(module, record):
        yield outputs


def _not_finite(steps: list[Step]) -> str:
    """What is not finite first; "" if all is: NaN and infinity differ from themselves."""
    return next((what for step in steps if (what := _difference(step, step, 0))), "")


def _difference(ours: Step, theirs: Step, close: float | None = None) -> str:
    """What differs first between two steps; "" if they are the same. `close`: as in `_close`."""
    kinds = {"outputs": "the output of", "gradient": "the gradient of", "buffers": "the buffer"}
    for field, kind in kinds.items():
        other = getattr(theirs, field)
        for name, leaf in getattr(ours, field).items():
            if name not in other or not _close(leaf, other[name], close):
                return f"{kind} {name}" if name else "its output"
    return ""


def _close(x: Tensor, y: Tensor, close: float | None = None) -> bool:
    """Whether two tensors are the same, up to `close` of the largest number; None: up to
    rounding."""
    if x.shape != y.shape or not x.numel():
        return x.shape == y.shape
    close = CLOSE.get(x.dtype, 0) if close is None else close
    scale = max(float(x.abs().max()), 1e-6)
    return bool((x - y).abs().max() <= close * scale)


def _watched(network: OwnNetwork, batch: Batch, train: bool) -> Step:
    """A step of what will train, or a pass in evaluation, with the submodules' outputs."""
    template = network.template(train, next(iter(batch.params.values())))
    with _recorded(template.module) as outputs, torch.set_grad_enabled(train):
        if train:
            return _step(network, batch)._replace(outputs=outputs)
        out = network(batch.params, batch.buffers, batch.x, False)
    return Step({}, out.buffers, outputs)


def _step(network: Model, batch: Batch) -> Step:
    """A step of one client, by autograd."""
    fixed, trained = _split(network, batch.params)
    params = {name: leaf.detach().requires_grad_() for name, leaf in trained.items()}
    with torch.enable_grad():
        loss, buffers = _loss_of(network, fixed, batch._replace(params=params))
    return Step(_gradient(loss, params), tree_map(Tensor.detach, buffers), {})


def _loss_of(network: Model, fixed: Params, batch: Batch) -> tuple[Tensor, Params]:
    """The loss of a pass in training, and the buffers behind it. `fixed`: frozen parameters."""
    params = fixed | batch.params
    out = network(params, batch.buffers, batch.x, True, batch.mask, batch.key)
    return _loss(out.logits, batch), out.buffers


def _gradient(loss: Tensor, params: Params) -> Params:
    """Of the parameters that the loss depends on."""
    grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    return {name: leaf for name, leaf in zip(params, grads, strict=True) if leaf is not None}


def _split(network: Model, params: Params) -> tuple[Params, Params]:
    """The frozen parameters, which the clients share, and the trained ones."""
    fixed = {name: leaf for name, leaf in params.items() if name in network.frozen}
    return fixed, {name: leaf for name, leaf in params.items() if name not in fixed}


def _loss(logits: Tensor, batch: Batch) -> Tensor:
    """A loss that has a gradient: cross-entropy of one output has none. Each token counts with
    another weight."""
    if logits.ndim == 3:
        weights = torch.linspace(1, 2, logits.shape[1], dtype=logits.dtype).unsqueeze(-1)
        values = (weights * logits.log_softmax(-1).square()).mean((1, 2))
        return masked_mean(values, batch.mask)
    if logits.shape[-1] > 1:
        return cross_entropy(logits, batch.y, batch.mask)
    return masked_mean((logits - 1).square().squeeze(-1), batch.mask)


def _logits(network: Model, batch: Batch) -> Tensor:
    """In evaluation."""
    with torch.no_grad():
        return network(batch.params, batch.buffers, batch.x, False).logits


def _with_head(network: OwnNetwork, head: str, batch: Batch) -> OwnNetwork:
    """With a classifier, if a linear layer makes the logits: `head`, or the last one of a pass."""
    module = network.template(False, next(iter(batch.params.values()))).module
    # The network itself has no name to go by, and a parametrised layer no weight of its own.
    linear = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and name and "weight" in part._parameters
    ]
    if head and head not in linear:
        raise UserError(path=("head",), value=head, allowed=", ".join(linear) or "none")
    passed: list[str] = []
    with hooked(module, lambda name, *_: passed.append(name), nn.Linear):
        _logits(network, batch)
    passed = [name for name in passed if name in linear]
    name = head or next(reversed(passed), "")
    if name in passed:
        featured = replace(network, head=name)
        # Other buffers, as they may be added behind the classifier, and may be 0 at first.
        buffers = {
            name: 1.1 * leaf + 0.1 if leaf.is_floating_point() else leaf
            for name, leaf in batch.buffers.items()
        }
        with torch.no_grad():
            out = featured(batch.params, buffers, batch.x, False)
        logits = featured.classify(batch.params, out.features)
        if out.features.ndim == 2 and _close(logits, out.logits):
            return featured
    if head:
        raise _refused(network, f"{head} does not make the logits", "a linear layer that does")
    return network


def _padding(network: OwnNetwork, batch: Batch) -> str:
    """Why padding can't be told from samples; "" if it can: other numbers there change nothing."""
    mask = torch.ones(BATCH)
    mask[-PADDED:] = 0
    other = batch.x.clone()
    other[-PADDED:] = batch.x[0] if network.tokens else 3 * other[-PADDED:] + 1
    side = replace(network, plain=False)
    plain, padded = (_step(side, batch._replace(mask=mask, x=x)) for x in (batch.x, other))
    return "samples of a batch change each other's numbers" if _difference(plain, padded) else ""


def _side_by_side(network: OwnNetwork, batch: Batch) -> str:
    """Why vmap can't take the network; "" if two clients side by side are as each alone."""

    def stacked(tree: Tree) -> Tree:
        return tree_map(lambda leaf: torch.stack([leaf, leaf * 1.1]), tree)

    mask = torch.ones(2, BATCH)
    mask[0, -PADDED:] = 0
    fixed, trained = _split(network, batch.params)
    both = Batch(
        stacked(trained),
        stacked(batch.buffers),
        torch.stack([batch.x, batch.x.flip(0)]),
        torch.stack([batch.y, batch.y.flip(0)]),
        torch.tensor([7, 8]),
        mask,
    )
    for what in ("training", "a hook"):
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # vmap then takes one client at a time, and more slowly than the sequential engine.
                warnings.filterwarnings("error", "There is a performance drop")
                lifted = _lifted(replace(network, plain=False), fixed, both, what == "a hook")
        except Exception as error:  # of any kind: the code is the user's
            return f"{what} under vmap: {type(error).__name__}: {' '.join(str(error).split())[:80]}"
        for k in range(2):
            client = Batch(**row(both._asdict(), k))
            left = int(mask[k].sum())
            client = client._replace(x=client.x[:left], y=client.y[:left], mask=None)
            alone = _step(network, client._replace(params=fixed | client.params))
            beside = Step(row(lifted.gradient, k), row(lifted.buffers, k), {})
            if _difference(alone, beside):
                return f"{what} under vmap is another one"
    return ""


def _lifted(network: OwnNetwork, fixed: Params, both: Batch, inside: bool) -> Step:
    """A step of several clients under vmap, with autograd outside of it, as the engine trains; or
    `inside`, as hooks take gradients."""

    def loss(params: Params, *others: Any) -> tuple[Tensor, Params]:
        return _loss_of(network, fixed, Batch(params, *others))

    if inside:
        gradient, buffers = torch.func.vmap(torch.func.grad(loss, has_aux=True))(*both)
        return Step(gradient, buffers, {})
    params = {name: leaf.detach().requires_grad_() for name, leaf in both.params.items()}
    with torch.enable_grad():
        losses, buffers = torch.func.vmap(loss)(*both._replace(params=params))
        gradient = _gradient(losses.sum(), params)
    return Step(gradient, tree_map(Tensor.detach, buffers), {})
