"""What `noniid methods` shows: all methods, or what a method or recipe does."""

from __future__ import annotations

import inspect
import sys
import textwrap
from pathlib import Path

from fedml_noniid.core.component import Component, Public, Replies, Setting
from fedml_noniid.core.errors import UserError
from fedml_noniid.own_code import look_in
from fedml_noniid.plugins import registry

# Recipes are composed for this setting. The check of params.yaml takes the setting there.
SETTING = Setting(n_clients=20, cohort=10, n_public=100)
WIDTH, INDENT = 118, " " * 6
FEDAVG = (
    "FedAvg. McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning "
    "of Deep Networks from "
    "Decentralized Data, AISTATS 2017. https://arxiv.org/abs/1602.05629"
)

# What the server reads of the clients' answers.
READS = {
    Replies.SUMS: "sums over the clients",
    Replies.SCALARS: "sums, and each client's upload and length of update",
    Replies.MODELS: "each client's model",
}


def listing() -> str:
    """The table of all methods."""
    entries = {"fedavg": ["the empty recipe", _reads(Replies.SUMS), FEDAVG]}
    for method in sorted({*registry.METHODS, *registry.names()}):
        try:
            kind = registry.method(method)
            origin = "" if method in registry.METHODS else f"({kind.__module__}) "
            # The first paragraph of its file: authors, title, year and address.
            paper = _doc(kind).partition("\n\n")[0]
            values = ", ".join(f"{key} = {text}" for key, text in _values(method).items())
            entries[method] = [values, _reads(kind().needs.replies), f"{origin}{paper}"]
        except UserError as error:  # of another package; ours are listed all the same
            entries[method] = [str(error)]
    lines = []
    for name, paragraphs in entries.items():
        lines.append(name)
        for text in paragraphs:
            lines += textwrap.wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join(lines) + "\n"


def _doc(kind: type[Component]) -> str:
    """The docstring of the method's file."""
    return inspect.getdoc(sys.modules[kind.__module__]) or ""


def description(recipe: str, with_source: bool = False) -> str:
    """What `noniid methods show` says of a recipe, of one method in full.

    A dotted path is found in the present folder too. RecipeError with the reason if the recipe
    can't be composed.
    """
    look_in(Path.cwd())
    methods = registry.parse(recipe)
    lines = shown(methods[0]) if len(methods) == 1 else checked(recipe)
    if with_source:
        for method in methods:
            lines += ["", inspect.getsource(registry.method(method))]
    return "\n".join(lines) + "\n"


def shown(method: str) -> list[str]:
    """One method in full: its paper and its hyper-parameters."""
    kind = registry.method(method)
    lines = [f"{method}: {(kind.__doc__ or '').strip()}", "", _doc(kind), "", "Hyper-parameters:"]
    lines += [f"  {key} = {text}" for key, text in _values(method).items()]
    return [*lines, "", _reads(kind().needs.replies)]


def checked(recipe: str) -> list[str]:
    """What a recipe does. RecipeError with the reason if it can't be composed."""
    algorithm = registry.build(recipe, {}, SETTING)
    asks, needs = algorithm.exchanges, algorithm.needs
    lines = [f"{algorithm.name}: composes"]
    lines += [f"  {c.name}: {(type(c).__doc__ or '').strip()}" for c in algorithm.components]
    weights = "1 / M" if algorithm.uniform else "n_k / sum n"
    lines.append(f"  clients' weights to begin with: {weights}")
    extra = [
        f"{n} {when}"
        for n, when in ((asks.begin, "before the first"), (asks.finish, "after the last"))
        if n
    ]
    lines.append(f"  exchanges: {asks.round} per round" + "".join(f", {text}" for text in extra))
    lines.append(f"  {_reads(needs.replies)}")
    if needs.public in (Public.LABELLED, Public.UNLABELLED):
        lines.append(f"  needs the public split: {needs.public.name.lower()} samples")
    for mechanism in algorithm.mechanisms:
        noise = f"noise {mechanism.noise:g}, delta {mechanism.delta:g}"
        lines.append(f"  privacy: hides each {mechanism.unit}; {noise}")
    if algorithm.leak:
        lines.append(f"  LEAK: {algorithm.leak}")
    return lines


def _reads(what: Replies) -> str:
    return f"the server reads: {READS[what]}"


def _values(method: str) -> dict[str, str]:
    """Each hyper-parameter's default, followed by the other words that are allowed."""
    choices = registry.choices(method)
    return {
        key: " | ".join(
            [_plain(value), *(_plain(choice) for choice in choices.get(key, ()) if choice != value)]
        )
        for key, value in registry.hyper_parameters(method).items()
    }


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'
