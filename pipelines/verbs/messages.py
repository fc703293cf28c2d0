"""What `noniid methods show` says of a recipe's messages: what leaves a silo, what comes, what
stays."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedml_noniid import extras
from fedml_noniid.core.component import Setting
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import RecipeError
from fedml_noniid.data import shards
from fedml_noniid.data.shards import Shard
from fedml_noniid.own_code import look_in
from fedml_noniid.plugins import registry

NEEDED = ("cryptography", "yaml")  # of the extra `silo`
WIDTH = 118
# Without a configuration: a small network with batch norms where the recipe takes them, on images
# as large as those of digits.
SHAPE, CLASSES, SILOS, TESTS, PUBLIC = (1, 8, 8), 10, 3, 200, 100
BESIDE = (
    "Beside the messages the server sees the silo's certificate and address, when it answers, and "
    "the words of its errors. An exchange in which a silo is lost may be repeated."
)


def message_schema(recipe: str, config: Path | None, secure_sums: int | None) -> dict[str, Any]:
    """The messages of a recipe, see `governance.disclosure`; `config`: a deployment with whose
    model, silos and settings they are made. Raises UserError, also if it can't be deployed.

    `secure_sums`: as in train_args, for which None stands. If the recipe reads more than sums, the
    messages are those without them.
    """
    look_in(Path.cwd())
    extras.require(extras.SILO, *NEEDED)
    from fedml_noniid.deploy import settings
    from fedml_noniid.governance import disclosure

    if config is None:
        source = "noniid methods show"
        content, shard = _example(recipe, max(SILOS, secure_sums or 0))
    else:
        source, deployment = str(config), settings.read(config)
        shard = shards.read(deployment.shard(0), 0, deployment.silos)
        content = deployment.model_dump(by_alias=True)
    train, methods = content["train_args"], registry.parse(recipe)
    mine = {name: values for name, values in train.get("settings", {}).items() if name in methods}
    train |= {"recipe": recipe, "settings": mine}
    train |= {} if secure_sums is None else {"secure_sums": secure_sums}
    least = settings.check(content, source).train_args.secure_sums
    # A recipe that reads more than sums is shown without them.
    train["secure_sums"] = 0
    deployment, shape = settings.check(content, source), tuple(shard.parts["test"].x.shape[1:])
    network = deployment.network(shape, shard.n_classes, shard.embedding)
    torch.set_num_threads(deployment.device_args.threads)
    terms = settings.terms(deployment, recipe, network, shard.parts.get("public"))
    if not disclosure.refused(terms):
        terms = replace(terms, secure_sums=least)
    return {"model": network.name} | disclosure.describe(terms, shard)


def _example(recipe: str, silos: int) -> tuple[dict[str, Any], Shard]:
    """The configuration of a deployment that stands for others, and its server's data."""
    setting = Setting(silos, silos, n_public=PUBLIC)
    norms = not registry.build(recipe, {}, setting).mechanisms
    generator, parts = torch.Generator().manual_seed(0), {}
    for part, n in (("test", TESTS), ("public", PUBLIC)):
        x = torch.randn(n, *SHAPE, generator=generator)
        parts[part] = Samples(x, torch.randint(CLASSES, (n,), generator=generator))
    return {
        "model_args": {"model": "mlp", "model_options": {"batch_norm": norms}},
        "train_args": {"client_num_in_total": silos, "client_num_per_round": silos},
    }, Shard(0, silos, CLASSES, parts)


def shown(recipe: str, config: Path | None, secure_sums: int | None) -> str:
    """The messages of a recipe for people, or why there are none. Raises UserError."""
    try:
        extras.require(extras.SILO, *NEEDED)
    except UserError as error:  # the rest of what is shown needs no such package
        return f"Messages of a deployment: {error}\n"
    try:
        schema = message_schema(recipe, config, secure_sums)
    except RecipeError as error:
        return "\n".join([*_wrapped(f"No deployment: {error}", 0), ""])
    return "\n".join([*_lines(schema), ""])


def _lines(schema: Mapping[str, Any]) -> Iterator[str]:
    least, refused = schema["secure_sums"], schema["secure_sums_refused"]
    sums = f"with sums over {least} silos or more" if least else "without secure sums"
    yield f"Messages of one silo, {sums}. Shapes: of {schema['model']}, {schema['silos']} silos."
    if refused:
        yield from _wrapped(f"Secure sums are refused: {refused}", 2)
    when = ""
    for exchange in schema["exchanges"]:
        if when != exchange["when"]:
            when = exchange["when"]
            yield from ("", f"{when[0].upper()}{when[1:]}")
        for turn in exchange["turns"]:
            yield f"  {turn['job']}: {exchange['asked']} of {schema['silos']} silos"
            yield from _tensors("the server sends", turn["down"])
            yield from _tensors("the silo sends", turn["up"])
        if exchange["added"]:
            yield from _tensors("the server sees only the sum over silos of", exchange["added"])
    yield from ("", "At the silo stay its samples, its trained model, and from round to round:")
    yield from _listed(schema["stays"], 2) if schema["stays"] else ("  nothing",)
    yield from ("", "Heads, before the tensors, and entries of tensors in their table")
    for kind, head in schema["heads"].items():
        yield from _wrapped(f"{kind} ({', '.join(head['keys'])}): {head['what']}", 2)
    yield from ("", *_wrapped(BESIDE, 0))


def _tensors(heading: str, tensors: Mapping[str, Any]) -> Iterator[str]:
    """A heading with the size, and the tensors."""
    sizes = [tensor["bytes"] for tensor in tensors.values()]
    size = "8 L bytes" if None in sizes else f"{sum(sizes):,} bytes"
    yield f"    {heading} {size if tensors else 'nothing'}"
    yield from _listed(tensors, 6)


def _listed(tensors: Mapping[str, Any], indent: int) -> Iterator[str]:
    """Each tensor with its type, shape and meaning."""
    for key, tensor in tensors.items():
        yield from _wrapped(f"{key} {tensor['form']}: {tensor['what']}", indent)


def _wrapped(text: str, indent: int) -> list[str]:
    """Lines of a paragraph."""
    first, rest = " " * indent, " " * (indent + 2)
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest)
