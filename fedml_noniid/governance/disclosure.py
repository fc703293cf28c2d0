"""Tells what a silo and the server send each other in a run, and what stays at the silo.

Names, dtypes and shapes are those of the study's messages, which both sides check. The keys of
heads are those of `wire`. What a tensor is stands in the docstring of the hook that makes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fedml_noniid.core.algorithm import TRAIN, Algorithm
from fedml_noniid.core.component import Ask, overrides
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.shards import Shard
from fedml_noniid.deploy import settings, wire
from fedml_noniid.deploy.settings import DeviceArgs, Terms
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.engines.client_tests import TEST, is_test
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.personal import PERSONAL
from fedml_noniid.governance import study
from fedml_noniid.governance.secure import liars
from fedml_noniid.governance.secure.silo import CHECK, SUM
from fedml_noniid.governance.study import Forms

# When an exchange takes place.
BEFORE, ROUND, AFTER, TESTED = (
    "before round 1",
    "in each round",
    "after the last round",
    "after each round that is tested",
)
HEADS = (wire.Hello, wire.Welcome, wire.Task, wire.Answer, wire.Refusal, wire.Entry)
# What tensors are that no method makes, by the first parts of their names.
DOWN = {
    "params": "the parameters of a model",
    "buffers": "the running statistics of a model",
    "shared/evaluated": "the model that is evaluated, if it is not the one that is sent",
    "shared/key": "the silos' keys of this exchange (X25519)",
    "shared/signature": "the silos' signatures of their keys, n and question",
    "shared/certificate": "the silos' certificates",
    "shared/nonce": "what the random signs are drawn with",
    "shared/levels": "which levels the tensors of any silo have",
    "shared/clients": "the silos of the sum",
    "shared/n": "their numbers of samples",
}
UP = {
    "n": "number of training samples; with local noise the study's max_samples",
    "steps": "local steps of this round",
    "loss": "training loss, the mean over the local steps; 0 without any, NaN with noise",
    "deltas": "update: the silo's parameters minus the received ones",
    "buffers": "running statistics after training",
    f"upload/{TEST}/sent": "test of the silo's own model: sums of statistics (hits) and of losses",
    f"upload/{TEST}/evaluated": "the same with the evaluated model",
    f"upload/{TEST}/n": "number of the silo's test samples",
    "secure/key": "a key for this exchange (X25519)",
    "secure/signature": "its signature of key, n and question, by the key of the certificate",
    "secure/certificate": "the silo's certificate",
    "secure/levels": "of each tensor: whether its numbers reach beyond 64",
    "secure/sets": "which silos are in the sets to which this silo has added this answer before",
    "secure/norms": "the norm of each part of the answer: update, buffers, tensors of methods",
    CHECK: "only if the sum is far longer than these norms allow: for each silo of the set, the "
    f"masks in common with it, added up with {liars.SUMS} times random signs for each of P parts",
    SUM: "all tensors that are added up, masked; L integers: one or two for each number, once for "
    "each of its tensor's levels at any silo. In a check, the same ones again",
}


def _turns(ask: Ask, messages: study.Messages, secure: bool) -> list[tuple[str, Forms, Forms]]:
    """(job, tensors of the task, tensors of the answer) of each turn of an exchange."""
    turns = [(wire.name(ask), messages.down, messages.up)]
    if secure:
        silos, summed = len(ask.to), {SUM: "int64 [L]"}
        turns.append((SUM, study.request(silos, len(messages.added)), summed))
        check = {CHECK: f"int64 [{silos}, P, {liars.SUMS}]"} | summed
        turns.append((CHECK, study.forms({"shared/nonce": liars.NONCE}), check))
    return turns


def describe(terms: Terms, shard: Shard) -> dict[str, Any]:
    """All of it, for JSON. Raises UserError."""
    algorithm, shown = terms.algorithm, []
    asks, done = algorithm.exchanges, 0
    for down, messages in study.exchanges(terms, shard):
        ask = down.question
        when = BEFORE if done < asks.begin else ROUND if done < asks.begin + asks.round else AFTER
        when = TESTED if is_test(ask) else when
        done += not is_test(ask)
        what = partial(_what, algorithm, when, wire.name(ask))
        turns = [
            {"job": job, "down": _entries(task, what, False), "up": _entries(answer, what, True)}
            for job, task, answer in _turns(ask, messages, terms.secure_sums > 0)
        ]
        added = _entries(messages.added, what, True)
        shown.append({"when": when, "asked": len(ask.to), "turns": turns, "added": added})
    kept = study.forms(flatten(_silo(terms, shard).engine.clients.memory.first))
    return {
        "recipe": algorithm.name,
        "silos": terms.silos,
        "secure_sums": terms.secure_sums,
        "secure_sums_refused": refused(terms),
        "heads": {
            head.__name__: {"keys": [*head.model_fields], "what": _words(head)} for head in HEADS
        },
        "exchanges": shown,
        "stays": _entries(kept, lambda key, _: _kept(algorithm, key), False),
    }


def _silo(terms: Terms, shard: Shard) -> Silo:
    """A silo that has the server's test samples."""
    parts = shard.parts | {"train": shard.parts["test"]}
    shard = replace(shard, parts=parts, noise=None, drift=None)
    return Silo(replace(terms, device=DeviceArgs()), 0, shard)


def _entries(forms: Forms, what: Callable[[str, bool], str], leaves: bool) -> dict[str, Any]:
    """What is told of tensors. `what`: called with the name, and whether it leaves the silo;
    `leaves`: whether these do."""
    return {
        key: {
            "form": form,
            "bytes": None if key in (SUM, CHECK) else study.size(form),
            "what": what(key, leaves),
        }
        for key, form in forms.items()
    }


def refused(terms: Terms) -> str:
    """Why a run can't have secure sums; "" if it can."""
    try:
        settings.refuse_what_reads_more(terms.algorithm, terms.tests)
    except UserError as error:
        return str(error)
    return ""


def _what(algorithm: Algorithm, when: str, job: str, key: str, up: bool) -> str:
    """What a tensor of an exchange with this job is, in words."""
    part, _, rest = key.partition("/")
    component = next((c for c in algorithm.components if c.name == rest.partition("/")[0]), None)
    is_training = job == TRAIN
    if component is None or part not in ("upload", "shared", "each"):
        known = UP if up else DOWN
        by = algorithm.components if up and is_training and part == "deltas" else ()
        changed = [_words(c, "leaving") for c in by if overrides(c, "leaving")]
        return "; ".join([next(known[k] for k in known if f"{key}/".startswith(f"{k}/")), *changed])
    if up:
        return _words(component, "report" if is_training else "answer")
    if is_training:
        return _words(component, "broadcast" if part == "shared" else "message")
    hooks = {
        BEFORE: ("survey",),
        ROUND: ("choose", "assign", "refine", "survey"),
        AFTER: ("finish",),
    }[when]
    return " ".join(_words(component, hook) for hook in hooks if overrides(component, hook))


def _kept(algorithm: Algorithm, key: str) -> str:
    """What a tensor of a silo's memory is, in words."""
    name = key.partition("/")[0]
    if name == PERSONAL:
        return "the silo's own part of the model"
    (component,) = (c for c in algorithm.components if c.name == name)
    return _words(component, "init_client")


def _words(documented: Any, hook: str = "") -> str:
    """The first paragraph of a docstring: of a class, or of a hook of a component."""
    docstring = inspect.getdoc(getattr(type(documented), hook) if hook else documented) or ""
    return " ".join(docstring.partition("\n\n")[0].split())
