"""CCN's figures: similarity of local and global weights (figure 1 b), convergence with and without it (figure 2)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from pipelines.figures import Values
from pipelines.results import Result
from pipelines.summary import Spread, spread
from pipelines.targets import curves
from pipelines.targets.measured import Measured, series
from pipelines.targets.pictures import legend, line, look, panels, png
from pipelines.targets.spec import Built, Target

SIMILARITY, WEIGHTS = "round/similarity_to_global", "ccn/weights"  # recorded [T, clients]
HOW = ("original", "normalised")
Recorded = dict[str, Values]  # "original", "normalised" -> [seeds, T, clients]


def similarity(target: Target, measured: Measured) -> Built:
    """Kind `similarity`: cosines of local and global weights by round and client, original and normalised.

    Keys: `study`, `scenario`; `original`, `normalised`: recipes; `apart`: the client, from 1, that the paper speaks of.
    """
    spec, study = target.spec, str(target.spec["study"])
    found = {how: measured.runs({"study": study, "scenario": spec["scenario"], "recipe": spec[how]}) for how in HOW}
    missing = tuple(how for how in HOW if not found[how])
    if missing:
        return Built((), {}, (), missing)
    # Differences are seed by seed.
    seeds = set.intersection(*({run.seed for run in runs} for runs in found.values()))
    pairs = {how: [run for run in runs if run.seed in seeds] for how, runs in found.items()}
    if not seeds:
        return Built((), {}, (), ("a seed that both have",))
    cosines = {how: _stacked(measured, study, runs, SIMILARITY) for how, runs in pairs.items()}
    weights = _stacked(measured, study, pairs["normalised"], WEIGHTS)
    files = {"png": _picture(cosines, weights), "csv": _csv(cosines, weights, sorted(seeds)).encode()}
    return Built((), files, tuple(_words(cosines, weights, int(spec["apart"]))))


def _stacked(measured: Measured, study: str, runs: Sequence[Result], key: str) -> Values:
    """[seeds, T, clients], by seed."""
    return np.stack([measured.recorded(run, study)[key].double().numpy() for run in runs])


def _picture(cosines: Recorded, weights: Values) -> bytes:
    figure, (both, change, shares) = panels(3)
    rounds = np.arange(1, weights.shape[1] + 1).tolist()
    for k in range(weights.shape[2]):
        style, name = look(k) | {"linestyle": "solid"}, f"client {k + 1}"
        line(both, rounds, cosines["original"][:, :, k], f"{name}, FedAvg", style | {"linestyle": (0, (4, 2))})
        line(both, rounds, cosines["normalised"][:, :, k], f"{name}, normalised", style)
        line(change, rounds, (cosines["normalised"] - cosines["original"])[:, :, k], name, style)
        line(shares, rounds, weights[:, :, k], name, style)
    change.axhline(0, color="#888888", linewidth=0.8)
    shares.axhline(1 / weights.shape[2], color="#888888", linewidth=0.8)
    for axes, title, label in (
        (both, "local and global weights", "cosine"),
        (change, "what the normalisation changes", "difference of cosines"),
        (shares, "weights of the normalisation (FedAvg: grey)", "weight"),
    ):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("round")
        axes.set_ylabel(label)
        _plain(axes)
    legend(figure, both, together=2)
    return png(figure)


def _plain(axes: Axes) -> None:
    """Whole numbers on the axis, not an offset to be added in mind."""
    axes.ticklabel_format(axis="y", useOffset=False)


def _csv(cosines: Recorded, weights: Values, seeds: Sequence[int]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["seed", "round", "client", "similarity_original", "similarity_normalised", "weight_normalised"])
    for place, seed in enumerate(seeds):
        for t, k in np.ndindex(*weights.shape[1:]):
            values = (cosines["original"], cosines["normalised"], weights)
            table.writerow([seed, t + 1, k + 1, *(value[place, t, k] for value in values)])
    return text.getvalue()


def _words(cosines: Recorded, weights: Values, apart: int) -> list[str]:
    """Whether the client that is apart comes closer to the global model, and what becomes of the others."""
    k = apart - 1
    means = {how: values.mean(1) for how, values in cosines.items()}  # over rounds, [seeds, clients]
    others = np.delete(np.arange(weights.shape[2]), k)
    found = []
    for who, places in ((f"Client {apart}", [k]), ("The other clients", others)):
        values = {how: mean[:, places].mean(1) for how, mean in means.items()}
        change = spread((values["normalised"] - values["original"]).tolist())
        assert change is not None
        found.append(
            f"{who}: over all rounds the cosine with the global model is {values['original'].mean():.4f} with FedAvg "
            f"and {values['normalised'].mean():.4f} normalised, {_change(change)}."
        )
    most = int(weights.mean((0, 1)).argmax()) + 1
    found.append(
        f"The normalisation gives client {apart} a weight of {weights[:, :, k].mean():.3f} on average, where an equal "
        f"share is {1 / weights.shape[2]:.3f}; client {most} has most."
    )
    return found


def _change(change: Spread) -> str:
    direction = "closer" if change.mean > 0 else "farther away"
    if change.std is None:
        return f"{direction} by {abs(change.mean):.5f} on one seed: no evidence either way"
    within = "within" if abs(change.mean) <= change.std else "more than"
    return (
        f"{direction} by {abs(change.mean):.5f}, {within} the spread of that difference over seeds ({change.std:.5f})"
    )


def convergence(target: Target, measured: Measured) -> Built:
    """Kind `convergence`: as `curves`, whose keys it has; what it says compares each dashed line with its other."""
    built = curves.build(target, measured)
    return built._replace(words=tuple(_pairs_in_words(target, measured)))


def _pairs_in_words(target: Target, measured: Measured) -> list[str]:
    spec = target.spec
    scale, found = float(spec.get("scale", 1)), []
    for panel in spec["panels"]:
        gaps = {}
        for original, normalised in spec["dashed"].items():
            gap = _gap(measured, {**panel, **spec["lines"][original]}, {**panel, **spec["lines"][normalised]})
            if gap is not None:
                gaps[original] = scale * gap
        if gaps:
            found.append(f"{panel['title']}: {_compared(gaps)}")
    return found


def _gap(measured: Measured, original: Mapping[str, Any], normalised: Mapping[str, Any]) -> Values | None:
    """Normalised less original by round, mean over the seeds that both have, [T]; None without any.

    None too if a seed of either diverged or has seen the test set.
    """
    if not all(measured.is_wanted(address) and measured.compared(address) for address in (original, normalised)):
        return None
    runs = [{run.seed: run for run in measured.runs(address)} for address in (original, normalised)]
    both = sorted(set(runs[0]) & set(runs[1]))
    if not both:
        return None
    (rounds, before), (others, after) = (series([own[seed] for seed in both], "test_accuracy") for own in runs)
    shared = sorted(set(rounds) & set(others))
    keep = [[where.index(t) for t in shared] for where in (rounds, others)]
    gap: Values = (after[:, keep[1]] - before[:, keep[0]]).mean(0)
    return gap if len(shared) else None


def _compared(gaps: Mapping[str, Values]) -> str:
    """How often and by how much the normalised lines lie above the original ones; early and late."""
    rounds = sum(len(gap) for gap in gaps.values())
    above = sum(int((gap > 0).sum()) for gap in gaps.values())
    quarter = -(-min(map(len, gaps.values())) // 4)
    early, late = (
        round(float(np.mean([gap[part].mean() for gap in gaps.values()])), 2) + 0.0  # no -0.00
        for part in (slice(0, quarter), slice(-quarter, None))
    )
    ahead = [name for name, gap in gaps.items() if gap[-1] > 0]
    return (
        f"the normalised line is above the original in {above} of {rounds} rounds of {len(gaps)} schemes; on average "
        f"by {early:+.2f} points in the first quarter of the rounds and by {late:+.2f} in the last; after the last "
        f"round it is ahead for {', '.join(ahead) or 'none'}."
    )
