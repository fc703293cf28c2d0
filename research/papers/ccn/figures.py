"""CCN's figures: similarity of local and global weights (figure 1 b), convergence with and without
it (figure 2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedml_noniid.pipelines.reporting.comparison import evidence, paired
from fedml_noniid.pipelines.reporting.figures import Values, look
from fedml_noniid.pipelines.reporting.text import as_csv
from research.papers import curves
from research.papers.curves import Panels
from research.papers.pictures import line, panels, png
from research.runs import Measured
from research.targets import Built, Target, nothing

SIMILARITY, WEIGHTS = "round/similarity_to_global", "ccn/weights"  # recorded [T, clients]
HOW = ("original", "normalised")
GREY = "#888888"


def similarity(target: Target, measured: Measured) -> Built:
    """Kind `similarity`: cosines of local and global weights by round and client, original and
    normalised.

    Keys: `study`, `scenario`; `original`, `normalised`: recipes; `apart`: the client, from 1, that
    the paper speaks of.
    """
    spec, study = target.spec, str(target.spec["study"])
    places = {
        how: {"study": study, "scenario": spec["scenario"], "recipe": spec[how]} for how in HOW
    }
    missing: list[str] = []
    original, normalised = (
        {r.seed: r for r in measured.finished(at, how, missing)} for how, at in places.items()
    )
    seeds = sorted(original.keys() & normalised.keys())  # differences are seed by seed
    if not seeds:
        return nothing(missing or ["a seed that both have"])
    # [seeds, T, clients]
    before, after, weights = (
        np.stack([measured.recorded(runs[seed], study)[key].double().numpy() for seed in seeds])
        for runs, key in ((original, SIMILARITY), (normalised, SIMILARITY), (normalised, WEIGHTS))
    )
    header = [
        "seed",
        "round",
        "client",
        "similarity_original",
        "similarity_normalised",
        "weight_normalised",
    ]
    lines = [
        [seeds[s], t + 1, k + 1, float(before[s, t, k]), float(after[s, t, k]), float(weight)]
        for (s, t, k), weight in np.ndenumerate(weights)
    ]
    files = {"png": _picture(before, after, weights), "csv": as_csv(header, lines)}
    return Built((), files, tuple(_words(before, after, weights, int(spec["apart"]))))


def _picture(before: Values, after: Values, weights: Values) -> bytes:
    titles = [
        "local and global weights",
        "what the normalisation changes",
        "weights of the normalisation (FedAvg: grey)",
    ]
    figure, (both, change, weight) = panels(titles, x="round")
    rounds, clients = np.arange(1, weights.shape[1] + 1).tolist(), weights.shape[2]
    for k in range(clients):
        style, name = look(k) | {"linestyle": "solid"}, f"client {k + 1}"
        line(both, rounds, before[:, :, k], f"{name}, FedAvg", style | {"linestyle": (0, (4, 2))})
        line(both, rounds, after[:, :, k], f"{name}, normalised", style)
        line(change, rounds, (after - before)[:, :, k], name, style)
        line(weight, rounds, weights[:, :, k], name, style)
    change.axhline(0, color=GREY, linewidth=0.8)
    weight.axhline(1 / clients, color=GREY, linewidth=0.8)
    for axes, label in ((both, "cosine"), (change, "difference of cosines"), (weight, "weight")):
        axes.set_ylabel(label)
        axes.ticklabel_format(
            axis="y", useOffset=False
        )  # whole numbers, not an offset to be added in mind
    return png(figure, together=2)


def _words(before: Values, after: Values, weights: Values, apart: int) -> Iterator[str]:
    """The change of the cosine with the global model, of the client that is apart and of the
    others."""
    k, n = apart - 1, weights.shape[2]
    for who, places in (
        (f"Client {apart}", [k]),
        ("The other clients", np.delete(np.arange(n), k)),
    ):
        with_it, without = (
            dict(enumerate(cosines[:, :, places].mean((1, 2)).tolist()))
            for cosines in (after, before)
        )
        change = paired("", with_it, without, 0.0)
        yield (
            f"{who}: over all rounds the cosine with the global model is "
            f"{before[:, :, places].mean():.4f} with FedAvg "
            f"and {after[:, :, places].mean():.4f} normalised: {evidence(change, 5)}."
        )
    yield (
        f"The normalisation gives client {apart} a weight of {weights[:, :, k].mean():.3f} on "
        "average, where an equal "
        f"weight is {1 / n:.3f}; client {int(weights.mean((0, 1)).argmax()) + 1} has most."
    )


def convergence(target: Target, measured: Measured) -> Built:
    """Kind `convergence`: `curves`, with a sentence that compares each dashed line with its
    other."""
    return curves.curves(target, measured, (_pairs,))


def _pairs(spec: Mapping[str, Any], lines: Panels) -> Iterator[str]:
    """How often and by how much the normalised lines lie above the original ones; early and
    late."""
    for title, by_name in lines.items():
        pairs = {
            name: (by_name[name], by_name[other])
            for name, other in spec["dashed"].items()
            if name in by_name and other in by_name
        }
        gaps = {name: gap for name, pair in pairs.items() if len(gap := _gap(*pair))}
        if not gaps:
            continue
        n, above = (
            sum(map(len, gaps.values())),
            sum(int((gap > 0).sum()) for gap in gaps.values()),
        )
        quarter = -(-min(map(len, gaps.values())) // 4)
        early, late = (
            round(float(np.mean([gap[part].mean() for gap in gaps.values()])), 2) + 0.0  # no -0.00
            for part in (slice(0, quarter), slice(-quarter, None))
        )
        ahead = ", ".join(name for name, gap in gaps.items() if gap[-1] > 0) or "none"
        yield (
            f"{title}: the normalised line is above the original in {above} of {n} rounds of "
            f"{len(gaps)} schemes; on "
            f"average by {early:+.2f} points in the first quarter of the rounds and by "
            f"{late:+.2f} in the last; after "
            f"the last round it is ahead for {ahead}."
        )


def _gap(original: curves.Line, normalised: curves.Line) -> Values:
    """Normalised less original by round, mean over the seeds that both have, [T]."""
    seeds = sorted(set(original.seeds) & set(normalised.seeds))
    rounds = sorted(set(original.rounds) & set(normalised.rounds))
    if not seeds:
        return np.empty(0)
    before, after = (
        method.values[
            np.ix_([method.seeds.index(s) for s in seeds], [method.rounds.index(t) for t in rounds])
        ]
        for method in (original, normalised)
    )
    gap: Values = (after - before).mean(0)
    return gap
