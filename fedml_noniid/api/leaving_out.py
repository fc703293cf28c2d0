"""Leaves out each site in turn: measures a model on a site that took no part, and what a few of
the site's own samples change."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from safetensors.torch import load as load_tensors
from torch import Tensor

from fedml_noniid.api import running, settings
from fedml_noniid.api.data import Data, from_frame, load
from fedml_noniid.api.predictor import Predictor
from fedml_noniid.api.process import in_turn
from fedml_noniid.api.result import Result, Results, Table
from fedml_noniid.api.saved import folder_of
from fedml_noniid.core.errors import NonFiniteError, UserError, shown
from fedml_noniid.core.options import Count, Section
from fedml_noniid.data.files import write_whole
from fedml_noniid.data.readers import table as table_reader
from fedml_noniid.data.streams import stream, torch_stream
from fedml_noniid.data.types import Ints
from fedml_noniid.pipelines.experiment.config import Config
from fedml_noniid.pipelines.experiment.measuring import (
    model_of_new_site,
    share_of_largest,
    share_of_right,
)
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.reporting.comparison import Comparison, adjusted, paired

WHERE, FOLDER = "leave_one_out", "leave-one-out"
ALONE = "the site alone"  # in the place of a recipe; no recipe's name has a blank
RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # step sizes of fine-tuning
MIN_SITES = 3  # one is left out, two train together

REFUSED = {  # options of `from_frame` and of `run` that have no meaning here
    "partition": "none, as each other site is a client",
    "clients": "none, as each other site is a client",
    "target": "classes alone, in `label`",
    "unseen": "none, as each site is left out in turn",
}


class FewShot(Section):
    """Says how a model is fine-tuned on a site's own samples."""

    shots: list[Count] = Field(default=[5, 20, 100], min_length=1)
    draws: Count = 10
    steps: Count = 30


class Site(NamedTuple):
    """A site that takes no part, and the data of all others."""

    name: str
    number: int  # in the sorted order of the names
    data: Data  # of the other sites alone, with the site's rows nowhere in it
    x: Tensor  # the site's rows as `data` has samples, [n, d]
    y: Tensor  # [n]; below 0 for a class that no other site has
    pool: Ints  # rows from which own samples are drawn, [n // 2]
    tested: Ints  # the other rows


@dataclass(frozen=True, eq=False, repr=False)
class LeaveOneOut:
    """Holds what models without a site reach on it. Accuracies in data frames are fractions.

    >>> import fedml_noniid as nd
    >>> import pandas as pd
    >>> rows = [{"age": a, "ill": int(a > 50), "ward": f"w{a % 3}"} for a in range(20, 80)]
    >>> frame, how = pd.DataFrame(rows), {"rounds": 2, "shots": [5], "draws": 2}
    >>> left_out = nd.leave_one_out(frame, label="ill", owner="ward", **how)
    >>> left_out.table.columns.tolist()  # doctest: +NORMALIZE_WHITESPACE
    ['recipe', 'site', 'rows', 'majority', 'others', 'zero_shot', '5 own', '5 alone']
    """

    # A row per recipe and site. `majority`: the largest class of the rows that test. `others`: the
    # accuracy on the other sites' test rows. `zero_shot`: on the site. `k own`: after fine-tuning
    # on k of its samples. `k alone`: with these samples and without the others' model. Means over
    # seeds and draws; NaN where half of the site has fewer than k rows.
    table: pd.DataFrame
    # A row per recipe, k and what it is compared with: the paired difference over sites.
    summary: pd.DataFrame
    few_shot: pd.DataFrame  # a row per recipe, site and k: the step size, the accuracy
    sentence: str  # from how many own samples on fine-tuning pays, a line per recipe
    results: Mapping[str, Results]  # site -> the runs without it

    def __repr__(self) -> str:
        return f"{self.table!r}\n\n{self.summary!r}\n\n{self.sentence}"


@in_turn()
def leave_one_out(
    frame: pd.DataFrame,
    recipes: Sequence[str] | Mapping[str, Mapping[str, Any]] = ("fedavg",),
    *,
    label: str,
    owner: str,
    shots: Sequence[int] = (5, 20, 100),
    draws: int = 10,
    steps: int = 30,
    seeds: Sequence[int] = (0,),
    processes: int = 1,
    progress: bool = True,
    folder: str | Path | None = None,
    **options: Any,
) -> LeaveOneOut:
    """Trains on all sites but one, for each site, and tests the model on that site.

    `frame`: a table in memory, as there categories, filled values and the normalisation can be
    fitted anew without the site's rows. `owner`: the column of the sites, `label` that of the
    class. Each other site is a client. `options` are those of `from_frame` and of `run`;
    `test_share` of the others' rows does not train (0.2). `folder`: as in `run`, with a folder in
    it for each site.

    One half of the site's rows tests, the same for all. `shots`: numbers of own samples, drawn
    `draws` times from the other half. Fine-tuning takes `steps` full-batch steps. Its step size is
    the best of 0.01 to 3.0 on the other sites, each with the model that it was left out of; those
    models have trained on the site's rows, and so may move this one choice a little. A class
    that no other site has counts as wrong and is no part of fine-tuning. "Alone" starts from random
    weights, with the others' normalisation.

    The intervals are those of a paired t test over sites, with Holm's adjustment for all rows of
    the summary. Models of different sites share most training rows, so they are approximate.

    Of a recipe with a model per client, a new site gets the common model, or the mean of the parts
    that clients keep (a mean head for fedper).

    UserError for mistakes in the arguments, before anything is trained; and if a run diverges.

    >>> import fedml_noniid as nd
    >>> import pandas as pd
    >>> rows = [{"age": a, "ill": int(a > 50), "ward": f"w{a % 3}"} for a in range(20, 80)]
    >>> frame, how = pd.DataFrame(rows), {"rounds": 2, "shots": [5], "draws": 2}
    >>> nd.leave_one_out(frame, label="ill", owner="ward", **how).table["site"].tolist()
    ['w0', 'w1', 'w2']
    """
    with settings.arguments(WHERE):
        few = FewShot(shots=settings.plain(shots), draws=draws, steps=steps)
    few = few.model_copy(update={"shots": sorted({*few.shots})})
    for key, allowed in REFUSED.items():
        if key in options:
            raise UserError(
                f"{WHERE}: {key} = {shown(options[key])} is refused; allowed: {allowed}"
            )
    of_table = {*inspect.signature(table_reader.table).parameters, "normalise"}
    columns = {key: value for key, value in options.items() if key in of_table}
    others = {key: value for key, value in options.items() if key not in of_table}
    if not isinstance(frame, pd.DataFrame):
        raise UserError(
            f"{WHERE}: frame is of type {type(frame).__name__}; allowed: a pandas.DataFrame"
        )
    data = from_frame(frame, label=label, owner=owner, **columns)
    run_options = {"seeds": seeds, "processes": processes, **others}
    return of_data(data, recipes, few, run_options, progress, folder)


def of_data(
    data: Data,
    recipes: Sequence[str] | Mapping[str, Mapping[str, Any]],
    few: FewShot,
    run_options: Mapping[str, Any],
    progress: bool,
    folder: str | Path | None,
) -> LeaveOneOut:
    """As `leave_one_out`, of data with named owners. `run_options`: arguments of `run`."""
    sites, run_options = _sites(data), {"partition": "natural", **run_options}
    first = running.callbacks_of(WHERE, {**run_options, "clients": _n_clients(sites[0])})[1]
    running.settings_of(WHERE, sites[0].data, running.entries_of(WHERE, recipes), first, "")
    path = None if folder is None else folder_of(WHERE, folder)
    results = {}
    for site in sites:
        own_folder = path and path / f"without-{site.number}"
        runs = {**run_options, "clients": _n_clients(site)}
        results[site.name] = Results(
            running.trained_results(WHERE, recipes, site.data, runs, {}, progress, own_folder)
        )
        for run, reason in results[site.name].failed.items():
            raise NonFiniteError(f"{WHERE}: without site {shown(site.name)}, {run}: {reason}")
    torch.set_num_threads(1)  # the number of threads may change bits; `in_turn` sets it back
    trials = pd.DataFrame(row for site in sites for row in _trials(site, results[site.name], few))
    few_shot = _with_rates(trials[trials["shots"] > 0])
    table = _table(sites, results, trials, few_shot, few)
    summary, sentence = _summary(table, few)
    return LeaveOneOut(table, summary, few_shot, sentence, results)


def of_experiment(workspace: Workspace, config: Config, progress: bool) -> LeaveOneOut:
    """Leaves out each site of the experiment in turn, with its recipes, seeds and training, as
    `leave_one_out` does; leave-one-out/ keeps the runs and gets the tables."""
    folder = workspace.root / FOLDER
    source, scenario = config.data, config.scenarios[config.scenario_names[0]]
    if source.embed is not None:
        raise UserError(f"{WHERE}: data.embed is refused; allowed: null, as the data are read anew")
    data = load(source.name, root=workspace.user_folder(source.root), **source.options)
    recipes = {
        name: {"recipe": config.composition(name), **config.recipes[name].values}
        for name in config.recipe_names
    }
    run_options = {
        **config.train.model_dump(),
        "seeds": config.seeds,
        "public": source.public,
        "participation": scenario.participation,
        "processes": config.machine.processes or 1,
    }
    left_out = of_data(data, recipes, FewShot(), run_options, progress, folder)
    for name in ("table", "summary"):
        frame: pd.DataFrame = getattr(left_out, name)
        write_whole(folder / f"{name}.csv", str(frame.to_csv(index=False, lineterminator="\n")))
    return left_out


def _sites(data: Data) -> list[Site]:
    """Every site with the data of the others. UserError for columns and values that don't fit."""
    names = data.dataset.owner_names
    if len(names) < MIN_SITES:
        raise UserError(
            f"{WHERE}: the data have {len(names)} sites; allowed: at least {MIN_SITES}, as the "
            "others train together"
        )
    sites = []
    for number, name in enumerate(names):
        with settings.arguments(f"{WHERE}: without site {shown(name)}"):
            others = data.without([name])
        x, y = others.dataset.unseen_x, others.dataset.unseen_y
        assert x is not None and y is not None, "the site's"
        order = stream(0, "leave one out/half", number).permutation(len(y))
        half = len(y) // 2
        sites.append(Site(name, number, others, x, y, order[:half], order[half:]))
    return sites


def _n_clients(site: Site) -> int:
    """The number of the other sites that have training rows."""
    owners = site.data.dataset.train_owner
    return 0 if owners is None else len(np.unique(owners.numpy()))


def _trials(site: Site, results: Results, few: FewShot) -> Iterator[dict[str, Any]]:
    """A row per model, number of own samples and step size; 0 own samples are the zero-shot."""
    starts = {
        (result.recipe, seed): (result, _model(result, seed))
        for result in results
        for seed in result.seeds
    }
    first = results[0]
    for seed in first.seeds:
        params, buffers = first.network.init(torch_stream(seed, "leave one out/alone"))
        alone = Predictor(first.network, params, buffers, site.data.dataset)
        starts[ALONE, seed] = first, alone
    for (recipe, seed), (result, model) in starts.items():
        row = {"recipe": recipe, "site": site.name, "seed": seed}
        yield {**row, "shots": 0, "rate": 0.0, "accuracy": _accuracy(model, site)}
        for shots in few.shots:
            for rate in RATES if shots <= len(site.pool) else ():
                accuracies = []
                for draw in range(few.draws):
                    order = stream(0, "leave one out/draw", site.number, draw)
                    rows = order.permutation(site.pool)[:shots]
                    rows = rows[site.y.numpy()[rows] >= 0]  # the model has no output for others
                    tuned = model
                    if len(rows):
                        loss = result.settings.train.built_loss
                        tuned = model.fine_tuned(site.x[rows], site.y[rows], loss, few.steps, rate)
                    accuracies.append(_accuracy(tuned, site))
                yield {**row, "shots": shots, "rate": rate, "accuracy": np.mean(accuracies)}


@torch.no_grad()
def _accuracy(model: Predictor, site: Site) -> float:
    """The accuracy on the site's rows that test."""
    return share_of_right(model(site.x[site.tested]), site.y[site.tested])


def _model(result: Result, seed: int) -> Predictor:
    """What a new site gets."""
    clients = result.clients[result.clients["seed"] == seed].sort_values("client")
    tensors = load_tensors(result.files[seed].run["model.safetensors"])
    model = model_of_new_site(tensors, clients["samples"].tolist())
    return Predictor(result.network, *model, result.data.dataset)


def _with_rates(trials: pd.DataFrame) -> pd.DataFrame:
    """A row per recipe, site and number of own samples: the step size that is best on the other
    sites (the smallest of equals), and the site's accuracy with it, the mean over seeds.

    A site has no row if no other site has so many samples.
    """
    rows = []
    for (recipe, shots), group in trials.groupby(["recipe", "shots"], sort=False):
        accuracy = group.pivot_table(values="accuracy", index="site", columns="rate")
        for site in accuracy.index if len(accuracy) > 1 else ():
            rate = accuracy.drop(site).mean().idxmax()
            rows.append((recipe, site, shots, rate, accuracy.loc[site, rate]))
    return pd.DataFrame(rows, columns=["recipe", "site", "shots", "rate", "accuracy"])


def _table(
    sites: Sequence[Site],
    results: Mapping[str, Results],
    trials: pd.DataFrame,
    few_shot: pd.DataFrame,
    few: FewShot,
) -> Table:
    """The table of `LeaveOneOut`."""
    zero_shot = trials[trials["shots"] == 0].groupby(["recipe", "site"])["accuracy"].mean()
    tuned = few_shot.set_index(["recipe", "site", "shots"])["accuracy"]
    rows = []
    for number, recipe in enumerate(result.recipe for result in results[sites[0].name]):
        for site in sites:
            row = {
                "recipe": recipe,
                "site": site.name,
                "rows": len(site.y),
                "majority": share_of_largest(site.y[site.tested]),
                "others": results[site.name][number].metrics["accuracy"].mean(),
                "zero_shot": zero_shot[recipe, site.name],
            }
            for shots in few.shots:
                row[f"{shots} own"] = tuned.get((recipe, site.name, shots), np.nan)
                row[f"{shots} alone"] = tuned.get((ALONE, site.name, shots), np.nan)
            rows.append(row)
    table = Table(rows)
    table.attrs["units"] = dict.fromkeys(table.columns[3:], "%")
    return table


def _summary(table: pd.DataFrame, few: FewShot) -> tuple[Table, str]:
    """(the summary, the sentence) of `LeaveOneOut`."""
    keys, comparisons = [], []
    for recipe, part in table.groupby("recipe", sort=False):
        for shots in few.shots:
            ours = part[f"{shots} own"].dropna()
            for other in ("zero_shot", f"{shots} alone"):
                theirs = part.loc[ours.index, other]
                keys.append((recipe, shots, other, len(ours), ours.mean(), theirs.mean()))
                comparisons.append(paired(str(recipe), ours.to_dict(), theirs.to_dict(), 0.0))
    rows, on_zero_shot = [], dict[str, dict[int, Comparison]]()
    for key, comparison in zip(keys, adjusted(comparisons), strict=True):
        low, high = comparison.interval or (np.nan, np.nan)
        verdict = comparison.verdict.replace("seed", "site")
        difference = comparison.mean if comparison.differences else np.nan
        rows.append((*key, difference, low, high, comparison.holm_p, comparison.higher, verdict))
        if key[2] == "zero_shot":
            on_zero_shot.setdefault(comparison.recipe, {})[key[1]] = comparison
    first = ["recipe", "shots", "against", "sites", "fine_tuned", "other"]
    summary = Table(
        rows, columns=[*first, "difference", "low", "high", "p_holm", "higher", "verdict"]
    )
    summary.attrs["units"] = {
        **dict.fromkeys(("fine_tuned", "other"), "%"),
        **dict.fromkeys(("difference", "low", "high"), "points"),
    }
    return summary, "\n".join(_sentence(recipe, ones) for recipe, ones in on_zero_shot.items())


def _sentence(recipe: str, comparisons: Mapping[int, Comparison]) -> str:
    """From how many own samples on fine-tuning beats the zero-shot, and where it does harm.

    `comparisons`: number of own samples -> the test against the zero-shot.
    """
    pays = "no tried number of own samples shows that fine-tuning pays"
    for shots, comparison in sorted(comparisons.items(), reverse=True):
        if comparison.p is None:
            continue  # too few sites have so many
        if comparison.verdict != "better":
            break
        pays = f"fine-tuning pays from {shots} own samples on, {_in_points(comparison)}"
    harms = [
        f"with {shots} it does harm, {_in_points(comparison)}"
        for shots, comparison in sorted(comparisons.items())
        if comparison.verdict == "worse"
    ]
    return f"{recipe}: {'; '.join([pays, *harms])}"


def _in_points(comparison: Comparison) -> str:
    low, high = comparison.interval or (np.nan, np.nan)
    ends = f"{100 * low:+.1f} to {100 * high:+.1f}"
    return f"{100 * comparison.mean:+.1f} points ({ends}, {len(comparison.differences)} sites)"
