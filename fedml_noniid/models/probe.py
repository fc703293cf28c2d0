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
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from fedml_noniid.core.data import cross_entropy, masked_mean
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.task import Output
from fedml_noniid.core.trees import Params, Tree, n_bytes, row, tree_map
from fedml_noniid.models.model import Model
from fedml_noniid.models.modules import converted, is_plain, our_name
from fedml_noniid.models.own import OwnNetwork, Template
from fedml_noniid.models.rows import row_of
from fedml_noniid.own_code import running

BATCH, PADDED = 4, 1  # samples of the step; those of them that are padding, where some are
# Relative differences that rounding stays below; other numbers are the same or not.
CLOSE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 1e-1}
MOST_EXACT = 64 << 20  # bytes of frozen parameters; float64 would take twice as much beside them
LARGE = 100.0  # times first values: beyond a limit that a forward may set
OURS = vars(nn.Module()).keys()  # attributes that each module has
T = TypeVar("T")


class Given(NamedTuple):
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


class Reference(NamedTuple):
    """What plain torch makes of an untouched module."""

    steps: tuple[Step, ...]  # two in training, then a pass in evaluation
    seeded: bool  # whether the steps draw from torch's own generator
    changing: tuple[str, ...]  # plain attributes that the second step changes again


def probed(network: OwnNetwork, n_classes: int, tokens: int = 0) -> OwnNetwork:
    """The network with what was found out; `tokens`: the size of the vocabulary, for text.

    UserError for a network that can't be trained as it is.
    """
    asked, network = network.head, _started(replace(network, out=n_classes, head=""))
    network, inputs = _compared(network, n_classes, tokens)
    network = _featured(network, asked, inputs)
    inputs = inputs._replace(buffers={name: inputs.buffers[name] for name in network.state})
    templates: dict[object, Template] = {
        (network.head, train): network.template(train) for train in (False, True)
    }
    kept = templates[network.head, True].scope.kept
    reason = network.sequential_only or _padding(network, inputs) or _side_by_side(network, inputs)
    if reason and kept:
        more = f" and {len(kept) - 3} more" if len(kept) > 3 else ""
        reason += f"; as it is stays {', '.join(kept[:3])}{more}"
    # The others hold large tensors in float64.
    return replace(network, sequential_only=reason, plain=False, templates=templates)


def as_row(network: OwnNetwork, tokens: int = 0) -> Model:
    """The probed network as a row of our blocks, if a step is the same; otherwise as it is."""
    row, side = None if network.inputs else row_of(network), replace(network, plain=False)
    if row is None:
        return network
    params, buffers = network.init(torch.Generator().manual_seed(0))
    mask = torch.ones(BATCH)
    mask[-PADDED:] = 0
    samples = _samples(network, network.n_classes, tokens)
    inputs = _exact(network, Given(params, buffers, *samples, torch.tensor(7), mask))
    try:
        expected, actual = (
            _step(each, inputs)._replace(outputs={"": _evaluated(each, inputs).logits})
            for each in (side, row)
        )
    except Exception:  # of many kinds, where a block is another one than it seems
        return network
    return network if _difference(expected, actual) else row


def _samples(
    network: OwnNetwork, n_classes: int, tokens: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Samples [B, ...] and labels [B]."""
    generator = torch.Generator().manual_seed(seed)
    size = (BATCH, *network.shape)
    x = torch.randint(tokens, size, generator=generator) if tokens else None
    x = torch.randn(size, generator=generator) if x is None else x
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


def _exact(network: OwnNetwork, inputs: Given) -> Given:
    """In float64; as they are where the frozen parameters are large."""
    if n_bytes(_split(network, inputs.params)[0]) > MOST_EXACT:
        return inputs

    def exact(tree: Params) -> Params:
        floats = {name for name, leaf in tree.items() if leaf.is_floating_point()}
        return {name: leaf.double() if name in floats else leaf for name, leaf in tree.items()}

    return inputs._replace(
        params=exact(inputs.params), buffers=exact(inputs.buffers), x=inputs.x.double()
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


def _compared(network: OwnNetwork, n_classes: int, tokens: int) -> tuple[OwnNetwork, Given]:
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
    first, second = (
        Given(params, buffers, *_samples(network, n_classes, tokens, seed), torch.tensor(7 + seed))
        for seed in range(2)
    )
    exact = _exact(network, first)
    also = exact._replace(x=second.x.to(exact.x.dtype), y=second.y, key=second.key)
    for inputs in ((exact, also), (first, second)):
        try:
            with _kept(network, inputs[0].params):
                return _as_in_torch(network, *inputs)
        except UserError:  # perhaps of code that makes float32 by itself
            if inputs[0] is first:
                raise
    raise AssertionError("the last one returns or raises")


@contextmanager
def _kept(network: OwnNetwork, params: Params) -> Iterator[None]:
    """UserError if what runs inside changes frozen parameters, whose memory all passes share."""

    def digests() -> dict[str, bytes]:
        frozen, _ = _split(network, params)
        return {
            name: hashlib.sha256(leaf.cpu().contiguous().numpy().data).digest()
            for name, leaf in frozen.items()
        }

    before = digests()
    try:
        yield
    finally:
        for name, digest in digests().items():
            if digest != before[name]:
                raise _changed(network, name)


def _as_in_torch(network: OwnNetwork, first: Given, second: Given) -> tuple[OwnNetwork, Given]:
    """With plain passes that equal those of plain torch, and the arguments of their first step."""
    reference = _reference(network, first, second)
    if _not_finite(reference) and not network.tokens:  # perhaps the user's samples have no signs
        first, second = (inputs._replace(x=inputs.x.abs()) for inputs in (first, second))
        reference = _reference(network, first, second)
    if layer := _not_finite(reference):
        raise _refused(network, f"{layer} is not finite (NaN or infinite)", "finite outputs")
    for step in reference.steps:
        if what := _difference(step, step, 0):  # NaN and infinity differ from themselves
            raise _refused(network, f"{what} is not finite (NaN or infinite)", "finite numbers")
    again, _ = _torch_step(network, _loaded(network, first), first, train=True)
    if _difference(reference.steps[0], again, 0):
        raise _refused(
            network,
            "two passes with the same parameters, samples and random numbers differ",
            "draws in training only, from torch's own generator",
        )
    trained = {name for step in reference.steps for name in step.gradient}
    logits = reference.steps[0].outputs[""]
    if not trained:
        raise _refused(network, "no parameter has a gradient", "one that is trained")
    network = replace(
        network,
        plain=True,
        vocabulary=logits.shape[2] if logits.ndim == 3 else 0,
        dropping=False,
        frozen=network.frozen | (first.params.keys() - trained),
        state=_changing(network, first.buffers, reference),
        seeded=reference.seeded,
        sequential_only="its pass draws from torch's own generator" if reference.seeded else "",
    )
    network = replace(network, channels_last=not _unlike(network, first, second, reference))
    if error := not network.channels_last and _unlike(network, first, second, reference):
        raise error
    return replace(network, dropping=True), first


def _unlike(
    network: OwnNetwork, first: Given, second: Given, reference: Reference
) -> UserError | None:
    """The error of passes that are not those of plain torch.

    They run in another order than plain torch's: what a pass leaves behind shows.
    """
    after = [first.buffers | step.buffers for step in reference.steps]
    passes = (
        (1, second._replace(buffers=after[0]), True),
        (2, first._replace(buffers=after[1]), False),
        (0, first, True),
    )
    try:
        for number, inputs, train in passes:
            step = _running(
                network, partial(_watched, network, inputs, train), "a step of training"
            )
            if what := _difference(reference.steps[number], step):
                return _refused(network, *_why(reference, what))
    except UserError as error:
        return error
    return None


def _why(reference: Reference, what: str) -> tuple[str, str]:
    """Why passes are not those of plain torch, and what is allowed. `what` differs first."""
    if reference.changing:
        name = reference.changing[0]
        return f"{what} depends on {name}, which passes change", "a buffer (register_buffer)"
    return (
        f"{what} is another one than in plain torch",
        "passes that find parameters and buffers in their modules, and keep nothing else",
    )


def _changing(network: OwnNetwork, first: Params, reference: Reference) -> frozenset[str]:
    """The buffers that training changes; the others are constants."""
    once, twice, evaluated = reference.steps
    changed = {
        name
        for name, leaf in first.items()
        if not (torch.equal(once.buffers[name], leaf) and torch.equal(twice.buffers[name], leaf))
    }
    for name in sorted(changed):
        if not first[name].is_floating_point():
            raise _refused(
                network,
                f"training changes {name}, a buffer of whole numbers, of which there is no mean",
                "a buffer of floating-point numbers",
            )
    for name in sorted(first):
        if not torch.equal(twice.buffers[name], evaluated.buffers[name]):
            raise _refused(
                network, f"a pass in evaluation changes the buffer {name}", "changes in training"
            )
    return frozenset(changed)


def _reference(network: OwnNetwork, first: Given, second: Given) -> Reference:
    """Trains the untouched module by plain torch."""
    module = _loaded(network, first)
    steps, seeded, attributes = [], False, []
    for inputs, train in ((first, True), (second, True), (first, False)):
        what = f"a {'step of training' if train else 'pass'} with samples of shape {network.shape}"
        step, draws = _running(network, partial(_torch_step, network, module, inputs, train), what)
        if draws and not train:
            raise _refused(network, "its pass draws in evaluation", "draws in training only")
        steps.append(step)
        seeded |= draws
        attributes.append(_attributes(module))
    # Some limit their weights, which at first are within the limits.
    for name, leaf in module.named_parameters():
        if name not in network.frozen:
            leaf.data *= LARGE
    # It may fail: such weights are no real ones.
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):
        module.train()
        network.apply(module, first.x.clone())
    _check_parameters(network, module, first, LARGE)
    before, after, _ = attributes
    changing = [name for name, values in after.items() if name in before and values != before[name]]
    counts = [name for name in changing if isinstance(after[name], int)]
    if counts:
        raise _refused(
            network,
            f"each pass changes {counts[0]}, a number in an attribute",
            "a buffer of floating-point numbers",
        )
    return Reference(tuple(steps), seeded, tuple(changing))


def _loaded(network: OwnNetwork, inputs: Given) -> nn.Module:
    """An untouched module with parameters and buffers, whose plain dropouts drop nothing."""
    module = network.untouched()
    converted(module, next(iter(inputs.params.values())))
    for name, leaf in module.named_parameters():
        first = inputs.params[name]
        leaf.data = first if name in network.frozen else first.clone()
    for name, buffer in module.named_buffers():
        buffer.data = inputs.buffers.get(our_name(name), buffer).clone()
    for part in module.modules():
        if isinstance(part, _DropoutNd) and is_plain(part):
            part.forward = lambda x: x
    return module


def _torch_step(
    network: OwnNetwork, module: nn.Module, inputs: Given, train: bool
) -> tuple[Step, bool]:
    """A step by plain torch, or a pass in evaluation; whether it draws from torch's generator."""
    x = inputs.x.clone()
    module.train(train)
    module.zero_grad()
    with (
        _recorded(module) as outputs,
        torch.random.fork_rng(devices=[]),
        torch.set_grad_enabled(train),
    ):
        torch.manual_seed(int(inputs.key))
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
            _loss(logits, inputs).backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    if not torch.equal(x, inputs.x):
        raise _refused(network, "its forward changes the samples", "a forward that leaves them")
    _check_parameters(network, module, inputs)
    gradient: Params = {}
    for name, leaf in module.named_parameters():
        if leaf.grad is not None and leaf.grad.is_sparse:
            raise _refused(network, f"the gradient of {name} is sparse", "sparse=False")
        if leaf.grad is not None:
            gradient[name] = leaf.grad.clone()
    named = {our_name(name): leaf.clone() for name, leaf in module.named_buffers()}
    return Step(gradient, {name: named[name] for name in inputs.buffers}, outputs), draws


def _check_parameters(
    network: OwnNetwork, module: nn.Module, inputs: Given, factor: float = 1
) -> None:
    """`factor`: of those that are trained."""
    for name, leaf in module.named_parameters():
        first = inputs.params[name]
        if not torch.equal(leaf, first if name in network.frozen else factor * first):
            raise _changed(network, name)


def _changed(network: OwnNetwork, name: str) -> UserError:
    return _refused(network, f"its forward changes {name}", "a forward that leaves it")


@contextmanager
def _recorded(module: nn.Module) -> Iterator[Params]:
    """Yields the outputs of the submodules, by name, in the order of a pass."""
    outputs: Params = {}

    def record(name: str, _: nn.Module, __: object, out: object) -> None:
        if isinstance(out, Tensor):
            outputs[name] = out.detach().clone()

    hooks = [
        part.register_forward_hook(partial(record, name)) for name, part in module.named_modules()
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _attributes(module: nn.Module) -> dict[str, object]:
    """Numbers and tensors in plain attributes, the latter as lists of numbers, by name."""
    values: dict[str, object] = {}
    for path, part in module.named_modules():
        for name in vars(part).keys() - OURS:
            leaves = [
                leaf.tolist() if isinstance(leaf, Tensor) else leaf
                for leaf in tree_leaves(vars(part)[name])
                if isinstance(leaf, Tensor | int | float)
            ]
            values[f"{path}.{name}" if path else name] = leaves[0] if len(leaves) == 1 else leaves
    return values


def _not_finite(reference: Reference) -> str:
    """The first output that is not finite, if the logits are not."""
    for step in reference.steps:
        if not step.outputs[""].isfinite().all():
            return next(
                _output(name) for name, leaf in step.outputs.items() if not leaf.isfinite().all()
            )
    return ""


def _output(name: str) -> str:
    return f"the output of {name}" if name else "its output"


def _difference(ours: Step, theirs: Step, close: float | None = None) -> str:
    """What differs first between two steps; "" if they are the same. `close`: as in `_close`."""
    kinds = (_output, "the gradient of {}".format, "the buffer {}".format)
    for kind, field in zip(kinds, ("outputs", "gradient", "buffers"), strict=True):
        other = getattr(theirs, field)
        for name, leaf in getattr(ours, field).items():
            if name not in other or not _close(leaf, other[name], close):
                return kind(name)
    return ""


def _watched(network: OwnNetwork, inputs: Given, train: bool) -> Step:
    """A step of what will train, or a pass in evaluation, with the submodules' outputs."""
    module = network.template(train, next(iter(inputs.params.values()))).module
    with _recorded(module) as outputs:
        step = (
            _step(network, inputs) if train else Step({}, _evaluated(network, inputs).buffers, {})
        )
    return step._replace(outputs=outputs)


def _step(network: Model, inputs: Given) -> Step:
    """A step of one client, by autograd."""
    fixed, trained = _split(network, inputs.params)
    params = {name: leaf.detach().requires_grad_() for name, leaf in trained.items()}
    with torch.enable_grad():
        out = network(fixed | params, inputs.buffers, inputs.x, True, inputs.mask, inputs.key)
        loss = _loss(out.logits, inputs)
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    gradient = {name: leaf for name, leaf in zip(params, grads, strict=True) if leaf is not None}
    return Step(gradient, tree_map(Tensor.detach, out.buffers), {})


def _split(network: Model, params: Params) -> tuple[Params, Params]:
    """The frozen parameters, which the clients share, and the trained ones."""
    fixed = {name: leaf for name, leaf in params.items() if name in network.frozen}
    return fixed, {name: leaf for name, leaf in params.items() if name not in fixed}


def _loss(logits: Tensor, inputs: Given) -> Tensor:
    """A loss that has a gradient: cross-entropy of one output has none. Each token counts with
    another weight."""
    if logits.ndim == 3:
        weights = torch.linspace(1, 2, logits.shape[1], dtype=logits.dtype).unsqueeze(-1)
        values = (weights * logits.log_softmax(-1).square()).mean((1, 2))
        return masked_mean(values, inputs.mask)
    if logits.shape[-1] > 1:
        return cross_entropy(logits, inputs.y, inputs.mask)
    return masked_mean((logits - 1).square().squeeze(-1), inputs.mask)


def _evaluated(network: Model, inputs: Given) -> Output:
    with torch.no_grad():
        return network(inputs.params, inputs.buffers, inputs.x, False)


def _featured(network: OwnNetwork, head: str, inputs: Given) -> OwnNetwork:
    """With a classifier, if a linear layer makes the logits: `head`, or the last one of a pass."""
    module = network.template(False, next(iter(inputs.params.values()))).module
    linear = {
        part: name
        for name, part in module.named_modules()
        # The network itself has no name to go by, and a parametrised layer no weight of its own.
        if isinstance(part, nn.Linear) and name and "weight" in part._parameters
    }
    if head and head not in linear.values():
        raise UserError(path=("head",), value=head, allowed=", ".join(linear.values()) or "none")
    passed: list[str] = []
    hooks = [
        part.register_forward_hook(lambda part, *_: passed.append(linear[part])) for part in linear
    ]
    _evaluated(network, inputs)
    for hook in hooks:
        hook.remove()
    name = head or next(reversed(passed), "")
    if name in passed:
        featured = replace(network, head=name)
        # Other buffers, as they may be added behind the classifier, and may be 0 at first.
        other = inputs._replace(buffers=tree_map(_moved, inputs.buffers))
        out = _evaluated(featured, other)
        logits = featured.classify(inputs.params, out.features)
        if out.features.ndim == 2 and _close(logits, out.logits):
            return featured
    if head:
        raise _refused(network, f"{head} does not make the logits", "a linear layer that does")
    return network


def _moved(leaf: Tensor) -> Tensor:
    return 1.1 * leaf + 0.1 if leaf.is_floating_point() else leaf


def _padding(network: OwnNetwork, inputs: Given) -> str:
    """Why padding can't be told from samples; "" if it can: other numbers there change nothing."""
    mask = torch.ones(BATCH)
    mask[-PADDED:] = 0
    other = inputs.x.clone()
    other[-PADDED:] = inputs.x[0] if network.tokens else 3 * other[-PADDED:] + 1
    side = replace(network, plain=False)
    plain = _step(side, inputs._replace(mask=mask))
    padded = _step(side, inputs._replace(mask=mask, x=other))
    return "samples of a batch change each other's numbers" if _difference(plain, padded) else ""


def _side_by_side(network: OwnNetwork, inputs: Given) -> str:
    """Why vmap can't take the network; "" if two clients side by side are as each alone."""

    def stacked(tree: Tree) -> Tree:
        return tree_map(lambda leaf: torch.stack([leaf, leaf * 1.1]), tree)

    mask = torch.ones(2, BATCH)
    mask[0, -PADDED:] = 0
    fixed, trained = _split(network, inputs.params)
    both = Given(
        stacked(trained),
        stacked(inputs.buffers),
        torch.stack([inputs.x, inputs.x.flip(0)]),
        torch.stack([inputs.y, inputs.y.flip(0)]),
        torch.tensor([7, 8]),
        mask,
    )
    ways = {"training": _lifted, "a hook": _inside}
    for what, way in ways.items():
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # vmap then takes one client at a time, and more slowly than the sequential engine.
                warnings.filterwarnings("error", "There is a performance drop")
                lifted = way(network, fixed, both)
        except Exception as error:  # of any kind: the code is the user's
            return f"{what} under vmap: {type(error).__name__}: {' '.join(str(error).split())[:80]}"
        for k in range(2):
            client = row(dict(zip(Given._fields, both, strict=True)), k)
            left = int(client["mask"].sum())
            client |= {"x": client["x"][:left], "y": client["y"][:left], "mask": None}
            client["params"] |= fixed
            alone = _step(network, Given(**client))
            beside = Step(row(lifted.gradient, k), row(lifted.buffers, k), {})
            if _difference(alone, beside):
                return f"{what} under vmap is another one"
    return ""


def _lifted(network: OwnNetwork, fixed: Params, both: Given) -> Step:
    """As the engine trains: the pass under vmap, autograd outside."""
    side = replace(network, plain=False)

    def step(*fields: Any) -> tuple[Tensor, Params]:
        client = Given(*fields)
        out = side(fixed | client.params, client.buffers, client.x, True, client.mask, client.key)
        return _loss(out.logits, client), out.buffers

    params = {name: leaf.detach().requires_grad_() for name, leaf in both.params.items()}
    with torch.enable_grad():
        losses, buffers = torch.func.vmap(step)(*both._replace(params=params))
        grads = torch.autograd.grad(losses.sum(), list(params.values()), allow_unused=True)
    gradient = {name: leaf for name, leaf in zip(params, grads, strict=True) if leaf is not None}
    return Step(gradient, tree_map(Tensor.detach, buffers), {})


def _inside(network: OwnNetwork, fixed: Params, both: Given) -> Step:
    """As hooks take gradients: inside vmap."""
    side = replace(network, plain=False)

    def step(*fields: Any) -> tuple[Params, Params]:
        client = Given(*fields)

        def loss(params: Params) -> tuple[Tensor, Params]:
            out = side(fixed | params, client.buffers, client.x, True, client.mask, client.key)
            return _loss(out.logits, client), out.buffers

        grads: tuple[Params, Params] = torch.func.grad(loss, has_aux=True)(client.params)
        return grads

    return Step(*torch.func.vmap(step)(*both), {})


def _close(x: Tensor, y: Tensor, close: float | None = None) -> bool:
    """Whether two tensors are the same, up to `close` of the largest number; None: up to
    rounding."""
    if x.shape != y.shape or not x.numel():
        return x.shape == y.shape
    close = CLOSE.get(x.dtype, 0) if close is None else close
    scale = max(float(x.abs().max()), 1e-6)
    return bool((x - y).abs().max() <= close * scale)
