"""Tries a user's network in one step of training, before it runs: what is unsound is refused, what
vmap can't take trains one client at a time.

All is computed in float64, where a wrong row can't be taken for rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fedml_noniid.plugins.core.data import cross_entropy, masked_mean
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.task import Output
from fedml_noniid.plugins.core.trees import Params, Tree, row, tree_map
from fedml_noniid.plugins.models.model import Model
from fedml_noniid.plugins.models.own import OwnNetwork
from fedml_noniid.plugins.models.rows import row_of
from fedml_noniid.plugins.own_code import running

BATCH, PADDED = 4, 1  # samples of the step; those of them that are padding, where some are
CLOSE = 1e-7  # relative difference that rounding in float64 stays below
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
    """What a step gives."""

    gradient: Params
    buffers: Params


def probed(network: OwnNetwork, n_classes: int, tokens: int = 0) -> OwnNetwork:
    """The network with what was found out; `tokens`: the size of the vocabulary, for text.

    UserError for a network that can't be trained as it is.
    """
    x, y = _samples(network, n_classes, tokens)
    asked, network = network.head, _started(replace(network, out=n_classes, head=""))
    params, buffers = network.init(torch.Generator().manual_seed(0))
    others, _ = network.init(torch.Generator().manual_seed(0))
    if any(not torch.equal(leaf, others[name]) for name, leaf in params.items()):
        raise _refused(
            network,
            "its first values differ between two calls with one seed",
            "draws from torch's own generator only",
        )
    given = Given(_exact(params), _exact(buffers), x.double(), y, torch.tensor(7))
    network = _passing(network, given)
    network = _changing(network, given)
    network = _featured(replace(network, head=asked), given)
    given = given._replace(buffers={name: given.buffers[name] for name in network.state})
    for train in (False, True):
        network.template(train)
    reason = network.sequential_only or _padding(network, given) or _side_by_side(network, given)
    return replace(network, sequential_only=reason, plain=False)


def as_row(network: OwnNetwork, tokens: int = 0) -> Model:
    """The probed network as a row of our blocks, if a step is the same; otherwise as it is."""
    row, side = None if network.inputs else row_of(network), replace(network, plain=False)
    if row is None:
        return network
    x, y = _samples(network, network.n_classes, tokens)
    params, buffers = network.init(torch.Generator().manual_seed(0))
    mask = torch.ones(BATCH)
    mask[-PADDED:] = 0
    given = Given(_exact(params), _exact(buffers), x.double(), y, torch.tensor(7), mask)
    try:
        one, two = _step(side, given), _step(row, given)
        same = _close(_evaluated(side, given).logits, _evaluated(row, given).logits)
        apart = max(_apart(one.gradient, two.gradient), _apart(one.buffers, two.buffers))
    except Exception:  # of many kinds, where a block is another one than it seems
        return network
    return row if same and apart < CLOSE else network


def _samples(network: OwnNetwork, n_classes: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Samples [B, ...] and labels [B]."""
    generator = torch.Generator().manual_seed(0)
    size = (BATCH, *network.shape)
    x = torch.randint(tokens, size, generator=generator) if tokens else None
    x = torch.randn(size, generator=generator) if x is None else x
    first = 0
    for one in network.inputs.values():  # 0 and 1 are numbers of any vocabulary
        last = first + one.size
        if one.whole:
            x[:, first:last] = torch.randint(2, (BATCH, one.size), generator=generator).to(x.dtype)
        first = last
    y = torch.randint(n_classes, (BATCH,), generator=generator)
    return x, y


def _refused(network: OwnNetwork, what: str, allowed: str) -> UserError:
    return UserError(f"model {network.name!r}: {what}", allowed=allowed)


def _exact(tree: Params) -> Params:
    return {
        name: leaf.double() if leaf.is_floating_point() else leaf for name, leaf in tree.items()
    }


def _running(network: OwnNetwork, call: Callable[[], T], what: str) -> T:
    """What the user's code returns. UserError with its place if it fails."""
    return running(f"model {network.name!r}: {what}", call, "forward")


def _started(network: OwnNetwork) -> OwnNetwork:
    """With all buffers, and the parameters that ask for no gradient."""
    module, _ = _running(network, network.new, "making it")
    fixed = {name for name, leaf in module.named_parameters() if not leaf.requires_grad}
    state = frozenset(name for name, _ in module.named_buffers())
    return replace(network, frozen=frozenset(fixed), state=state)


def _step(network: Model, given: Given) -> Step:
    """A step of one client, by autograd."""
    params = {name: leaf.detach().requires_grad_() for name, leaf in given.params.items()}
    with torch.enable_grad():
        out = network(params, given.buffers, given.x, True, given.mask, given.key)
        loss = _loss(out.logits, given)
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    gradient = {name: leaf for name, leaf in zip(params, grads, strict=True) if leaf is not None}
    return Step(gradient, tree_map(Tensor.detach, out.buffers))


def _loss(logits: Tensor, given: Given) -> Tensor:
    """A loss that has a gradient: cross-entropy of one output has none."""
    if logits.shape[-1] > 1:
        return cross_entropy(logits, given.y, given.mask)
    return masked_mean((logits - 1).square().squeeze(-1), given.mask)


def _evaluated(network: Model, given: Given) -> Output:
    with torch.no_grad():
        return network(given.params, given.buffers, given.x, False)


def _passing(network: OwnNetwork, given: Given) -> OwnNetwork:
    """With plain passes that were run: their output, their generator, what they leave alone."""
    network = replace(network, plain=True)
    kept = given._replace(params=tree_map(torch.clone, given.params), x=given.x.clone())
    out = _running(
        network, partial(_evaluated, network, given), f"a pass of samples of shape {network.shape}"
    )
    wanted = (BATCH, network.n_classes)
    if tuple(out.logits.shape) != wanted:
        raise _refused(
            network,
            f"gives {list(out.logits.shape)} for {BATCH} samples",
            f"logits {list(wanted)}, one for each class",
        )
    before = torch.get_rng_state()
    _running(network, partial(_step, network, given), "a step of training")
    if not torch.equal(before, torch.get_rng_state()):
        reason = "its pass draws from torch's own generator"
        network = replace(network, seeded=True, sequential_only=reason)
    one, two = _step(network, given), _step(network, given)
    again = _evaluated(network, given)
    repeats = torch.equal(out.logits, again.logits) and _apart(one.gradient, two.gradient) == 0
    if not repeats:
        raise _refused(
            network,
            "two passes with the same parameters, samples and random numbers differ",
            "a forward that keeps nothing from pass to pass but buffers, and draws in training "
            "only, from torch's own generator",
        )
    if any(not torch.equal(kept.params[name], leaf) for name, leaf in given.params.items()):
        raise _refused(network, "its forward changes parameters", "a forward that leaves them")
    if not torch.equal(kept.x, given.x):
        raise _refused(network, "its forward changes the samples", "a forward that leaves them")
    unused = given.params.keys() - one.gradient.keys()
    if unused >= given.params.keys() - network.frozen:
        raise _refused(network, "no parameter has a gradient", "one that is trained")
    return replace(network, frozen=network.frozen | unused)


def _changing(network: OwnNetwork, given: Given) -> OwnNetwork:
    """With the buffers that training changes; the others are constants."""
    after = _step(network, given).buffers
    changed = {name for name, leaf in after.items() if not torch.equal(leaf, given.buffers[name])}
    counts = sorted(name for name in changed if not given.buffers[name].is_floating_point())
    if counts:
        raise _refused(
            network,
            f"training changes {counts[0]}, a buffer of whole numbers, of which there is no mean",
            "a buffer of floating-point numbers",
        )
    return replace(network, state=frozenset(changed))


def _featured(network: OwnNetwork, given: Given) -> OwnNetwork:
    """With a classifier, if a linear layer makes the logits: `head`, or the last one of a pass."""
    some = next(iter(given.params.values()))
    module, _, _ = network.template(False, some)
    linear = {
        part: name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and name  # the network itself has no name to go by
    }
    if network.head and network.head not in linear.values():
        raise UserError(
            where=("head",), value=network.head, allowed=", ".join(linear.values()) or "none"
        )
    passed: list[str] = []
    hooks = [
        part.register_forward_hook(lambda part, *_: passed.append(linear[part])) for part in linear
    ]
    _evaluated(network, given)
    for hook in hooks:
        hook.remove()
    head = network.head or next(reversed(passed), "")
    found = replace(network, head=head, _templates={})
    if head in passed:
        # Other buffers, as they may be added behind the classifier, and may be 0 at first.
        other = given._replace(buffers=tree_map(_moved, given.buffers))
        out = _evaluated(found, other)
        if out.features.ndim == 2 and _close(
            found.classify(given.params, out.features), out.logits
        ):
            return found
    if network.head:
        raise _refused(network, f"{head} does not make the logits", "a linear layer that does")
    return replace(network, head="", _templates={})


def _moved(leaf: Tensor) -> Tensor:
    return 1.1 * leaf + 0.1 if leaf.is_floating_point() else leaf


def _padding(network: OwnNetwork, given: Given) -> str:
    """Why padding can't be told from samples; "" if it can: other numbers there change nothing."""
    mask = torch.ones(BATCH)
    mask[-PADDED:] = 0
    other = given.x.clone()
    other[-PADDED:] = given.x[0] if network.tokens else 3 * other[-PADDED:] + 1
    side = replace(network, plain=False)
    one = _step(side, given._replace(mask=mask))
    two = _step(side, given._replace(mask=mask, x=other))
    apart = max(_apart(one.gradient, two.gradient), _apart(one.buffers, two.buffers))
    return "" if apart < CLOSE else "samples of a batch change each other's numbers"


def _side_by_side(network: OwnNetwork, given: Given) -> str:
    """Why vmap can't take the network; "" if two clients side by side are as each alone."""

    def stacked(tree: Tree) -> Tree:
        return tree_map(lambda leaf: torch.stack([leaf, leaf * 1.1]), tree)

    mask = torch.ones(2, BATCH)
    mask[0, -PADDED:] = 0
    both = Given(
        stacked(given.params),
        stacked(given.buffers),
        torch.stack([given.x, given.x.flip(0)]),
        torch.stack([given.y, given.y.flip(0)]),
        torch.tensor([7, 8]),
        mask,
    )
    ways = {"training": partial(_lifted, network), "a hook": partial(_inside, network)}
    for what, way in ways.items():
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # vmap then takes one client at a time, and more slowly than the sequential engine.
                warnings.filterwarnings("error", "There is a performance drop")
                found = way(both)
        except Exception as error:  # of any kind: the code is the user's
            return f"{what} under vmap: {type(error).__name__}: {' '.join(str(error).split())[:80]}"
        for k in range(2):
            client = row(dict(zip(Given._fields, both, strict=True)), k)
            left = int(client["mask"].sum())
            client |= {"x": client["x"][:left], "y": client["y"][:left], "mask": None}
            alone = _step(network, Given(**client))
            apart = max(
                _apart(alone.gradient, row(found.gradient, k)),
                _apart(alone.buffers, row(found.buffers, k)),
            )
            if apart > CLOSE:
                return f"{what} under vmap is another one"
    return ""


def _lifted(network: OwnNetwork, both: Given) -> Step:
    """As the engine trains: the pass under vmap, autograd outside."""
    side = replace(network, plain=False)

    def one(*given: Any) -> tuple[Tensor, Params]:
        client = Given(*given)
        out = side(client.params, client.buffers, client.x, True, client.mask, client.key)
        return _loss(out.logits, client), out.buffers

    params = {name: leaf.detach().requires_grad_() for name, leaf in both.params.items()}
    with torch.enable_grad():
        losses, buffers = torch.func.vmap(one)(*both._replace(params=params))
        grads = torch.autograd.grad(losses.sum(), list(params.values()), allow_unused=True)
    gradient = {name: leaf for name, leaf in zip(params, grads, strict=True) if leaf is not None}
    return Step(gradient, tree_map(Tensor.detach, buffers))


def _inside(network: OwnNetwork, both: Given) -> Step:
    """As hooks take gradients: inside vmap."""
    side = replace(network, plain=False)

    def one(*given: Any) -> tuple[Params, Params]:
        client = Given(*given)

        def loss(params: Params) -> tuple[Tensor, Params]:
            out = side(params, client.buffers, client.x, True, client.mask, client.key)
            return _loss(out.logits, client), out.buffers

        found: tuple[Params, Params] = torch.func.grad(loss, has_aux=True)(client.params)
        return found

    return Step(*torch.func.vmap(one)(*both))


def _close(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and _apart({"": one}, {"": two}) < CLOSE


def _apart(one: Params, two: Params) -> float:
    """The largest difference of two trees, by the largest number of the leaf."""
    worst = 0.0
    for name, leaf in one.items():
        scale = max(float(leaf.abs().max()), 1e-6) if leaf.numel() else 1.0
        worst = max(worst, float((leaf - two[name]).abs().max()) / scale if leaf.numel() else 0.0)
    return worst
