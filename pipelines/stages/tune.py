"""Tuning, which is no stage of DVC: trains the trials of `tune` in tune/, and writes the best
values into params.yaml.

Every trial is an item like those of stage `train`. It is stored under its fingerprint, so it is
trained once, and a kill loses at most the rounds since its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fedml_noniid.pipelines.experiment import check, results, tuning
from fedml_noniid.pipelines.experiment.config import FILE, Config, Tuned, Unit
from fedml_noniid.pipelines.experiment.tuning import Trial
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.reporting.text import as_csv
from fedml_noniid.pipelines.stages.partition import partitions
from fedml_noniid.pipelines.stages.train import train
from fedml_noniid.plugins.core.errors import UserError, together
from fedml_noniid.plugins.data.files import write_whole
from fedml_noniid.plugins.data.indices import INDICES, read_indices

FOLDER, TRIALS = "tune", "trials.csv"


class Choice(NamedTuple):
    """A recipe's trials, the best first, and the record of its choice."""

    trials: list[Trial]
    tuned: Tuned


def tune(place: Workspace, settings: Config) -> dict[str, Choice]:
    """Tunes the recipes of an experiment whose data are prepared.

    Returns recipe -> choice, as written to params.yaml. tune/trials.csv gets all trials.

    Raises UserError if `tune` makes no sense, or if all trials of a recipe diverge; params.yaml
    stays as it was then.
    """
    tuning.points(settings)
    if not place.dataset(settings.data.name).is_file():
        raise UserError(f"{place.dataset(settings.data.name)}: is missing; stage prepare makes it")
    trials_place, scenario = replace(place, root=place.root / FOLDER), tuning.scenario_of(settings)
    found = tried(trials_place, settings, f"{settings.experiment}, tuning")
    seeds = tuning.wanted(settings).seeds
    write_whole(trials_place.root / TRIALS, _csv(found, seeds))
    indices = read_indices(trials_place.partition(scenario, seeds[0]) / INDICES)
    samples = len(indices.validation)
    choices = {}
    with together() as checked:
        for recipe, trials in found.items():
            with checked():
                record = tuning.record(settings, trials, samples)
                choices[recipe] = Choice(tuning.ranked(trials), record)
    tuning.write(place.root, {recipe: choice.tuned for recipe, choice in choices.items()})
    return choices


def _csv(found: Mapping[str, Sequence[Trial]], seeds: Sequence[int]) -> bytes:
    """A line per trial and seed, the best trial of a recipe first."""
    lines = [
        [recipe, rank, trial.point.words, seed, score]
        for recipe, trials in found.items()
        for rank, trial in enumerate(tuning.ranked(trials), 1)
        for seed, score in zip(seeds, trial.accuracies or [None] * len(seeds), strict=True)
    ]
    return as_csv(("recipe", "rank", "values", "seed", "validation"), lines, digits=6)


def tried(place: Workspace, settings: Config, title: str) -> dict[str, list[Trial]]:
    """Recipe -> trials, in the order of the grid, with accuracies on the validation split.

    Trains those that are missing, in the folders of `place`.
    """
    found, scenario = tuning.points(settings), tuning.scenario_of(settings)
    points = [point for own in found.values() for point in own]
    seeds = tuning.wanted(settings).seeds
    laid = tuning.laid_out(settings, points, "tune", scenario, seeds)
    for recipe in found:
        algorithm = check.compose(settings, recipe, scenario)
        if algorithm.needs.personal or algorithm.own_model is not None:
            raise UserError(
                f"{FILE}: tune: recipe {recipe!r} has no validation accuracy, as each client has "
                "a model of its own and the validation samples are no client's; allowed: recipes "
                "without such methods (fedbn, fedper, ditto)"
            )
    column = f"validation_{settings.train.built_loss.metric}"
    accuracies = measured(place, laid, title, column)
    return {
        recipe: [Trial(point, accuracies[point.entry]) for point in points]
        for recipe, points in found.items()
    }


def measured(
    place: Workspace, laid: Config, title: str, column: str
) -> dict[str, tuple[float, ...]]:
    """Entry -> accuracy after the last round by seed, empty if a seed diverged.

    Trains what is missing of an experiment with one scenario, in the folders of `place`.
    """
    check.check(laid)
    partitions(place, laid)
    diverged = train(place, laid, title)
    found = {run.key: run.column(column) for run in results.read(place.root, place.repository)}
    (scenario,) = laid.scenario_names

    def accuracies(entry: str) -> tuple[float, ...]:
        keys = [Unit(scenario, entry, seed).key for seed in laid.seeds]
        if any(key in diverged for key in keys):
            return ()
        if not all(found[key] for key in keys):
            raise tuning.not_defined(f"{FILE}: {title}", entry, column)
        return tuple(found[key][-1] for key in keys)

    return {entry: accuracies(entry) for entry in laid.recipe_names}
