"""The verbs of an experiment: run, check, partition, tune, choose, leave-one-out, table."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer

from fedml_noniid.cli.cluster import OnCluster, train_on
from fedml_noniid.cli.verb import Root, enter_workspace, one_of, verb
from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages.__main__ import STAGES

WIDTH = 100
Details = Annotated[bool, typer.Option("--details", help="Show all numbers, and what each means.")]


def add(app: typer.Typer) -> None:
    """Adds the verbs."""
    verb(app, "check", "noniid check", "noniid check --root ../other")(check)
    verb(app, "partition", "noniid partition", "noniid partition --root ../other")(partition)
    verb(
        app,
        "run",
        "noniid run",
        "noniid run partition    # the stages up to this one",
        "noniid run --cluster /shared/cluster",
    )(run)
    verb(app, "tune", "noniid tune", "noniid tune && noniid run")(tune)
    verb(app, "choose", "noniid choose", "noniid choose --root ../other")(choose)
    verb(app, "leave-one-out", "noniid leave-one-out", "noniid leave-one-out --root ../other")(
        leave_one_out
    )
    verb(app, "table", "noniid table --details", "noniid table --latex")(table)


def check(root: Root = Path()) -> None:
    """Check params.yaml as a whole, and with the data.

    Every key and value is checked, and every recipe is composed. The data are read, each partition
    is made, and the model and each recipe are set up for the data. All mistakes are named at once,
    one line each. Nothing is trained, written or downloaded.
    """
    workspace = enter_workspace(root)
    # Imported here, as everywhere in these files: it imports torch, which takes seconds.
    from fedml_noniid.pipelines.verbs import fits

    settings, notes = fits.checked(workspace)
    counts = {
        "recipe": len(settings.recipe_names),
        "scenario": len(settings.scenario_names),
        "seed": len(settings.seeds),
    }
    typer.echo(
        "params.yaml is right: "
        + " x ".join(f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items())
        + f" = {len(settings.units())} trainings of {settings.train.rounds} rounds"
    )
    for note in notes:
        typer.echo(f"note: {note}")


def partition(root: Root = Path()) -> None:
    """Divide the data among the clients, and show the skew.

    Nothing is trained. The table has the statistics of each scenario, and a sentence says what they
    mean. Each partition also has a heat map, clients by classes.
    """
    workspace = enter_workspace(root)
    _repro(workspace, "partition")
    from fedml_noniid.pipelines.experiment import config
    from fedml_noniid.pipelines.verbs import scenarios

    settings = config.load(workspace.root)
    rows, missing = scenarios.read(workspace.root, settings)
    cells, *notes = scenarios.markdown(rows, missing).strip().split("\n\n")
    typer.echo("\n\n".join(["", cells, *(textwrap.fill(note, WIDTH) for note in notes)]))
    pictures = sorted(
        path.relative_to(workspace.root) for path in (workspace.root / "partitions").glob("*/*.png")
    )
    if pictures:
        typer.echo("\n" + textwrap.fill(f"Heat maps: {', '.join(map(str, pictures))}", WIDTH))
    lines = (
        textwrap.fill(sentence, WIDTH, break_on_hyphens=False)
        for sentence in scenarios.in_words(rows, settings)
    )
    typer.echo("\n" + "\n".join(lines))


def run(
    stage: Annotated[
        str | None,
        typer.Argument(
            metavar="STAGE",
            help=f"Stop after this stage: {', '.join(STAGES)}.",
            **one_of("stage", lambda: STAGES),
        ),
    ] = None,
    root: Root = Path(),
    cluster: OnCluster = None,
    details: Details = False,
) -> None:
    """Run what is out of date, and show the answer.

    DVC runs the stages. What was trained once is not trained again. An interrupted run goes on
    where it was.
    """
    train_on(cluster)
    _repro(enter_workspace(root), stage, details)


def table(
    root: Root = Path(),
    details: Details = False,
    latex: Annotated[bool, typer.Option("--latex", help="The table of a paper, in LaTeX.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The same in Markdown.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="The same as CSV, unrounded.")] = False,
) -> None:
    """Show the answer of the last report. Nothing is run.

    With a format: methods by scenarios, the main metric after the last round, of all finished runs
    of params.yaml.
    """
    chosen = {"details": details, "latex": latex, "markdown": markdown, "csv": csv}
    names = [name for name, is_chosen in chosen.items() if is_chosen]
    if len(names) > 1:
        options = " and ".join(f"--{name}" for name in names)
        raise UserError(f"table: {options} are refused together", allowed="one of them")
    workspace = enter_workspace(root)
    if names and not details:
        from fedml_noniid.pipelines.reporting import method_table

        text = getattr(method_table.from_results(workspace.root), f"to_{names[0]}")()
        typer.echo(text.removesuffix("\n"))
        return
    from fedml_noniid.pipelines.verbs import repro

    typer.echo(repro.table(workspace.root, details))


def tune(root: Root = Path(), cluster: OnCluster = None) -> None:
    """Tune every method equally often, on the validation split.

    The section `tune` of params.yaml has the grid. The best values are written into the entries of
    `recipes`.
    """
    train_on(cluster)
    workspace = enter_workspace(root)
    from fedml_noniid.pipelines.experiment import config, search

    search.tuning(config.load(workspace.root))  # refuses before the data are prepared
    _repro(workspace, "prepare")
    from fedml_noniid.metrics import metric_of
    from fedml_noniid.pipelines.experiment.values import in_words
    from fedml_noniid.pipelines.stages.tune import tune as tuned
    from fedml_noniid.pipelines.verbs.repro import exclusively

    with exclusively(workspace.root):
        records, notes = tuned(workspace, config.load(workspace.root))
        for recipe, record in records.items():
            metric = metric_of(record.metric)
            typer.echo(
                f"{recipe}: {in_words(record.chosen)}: validation loss {record.loss}, "
                f"{metric.label} {metric.shown(record.validation)}, best of "
                f"{record.trials} trials"
            )
        typer.echo("\n".join(notes))


def choose(root: Root = Path(), cluster: OnCluster = None) -> None:
    """Find the method for your data: tune the recipes, and say what the best gain over FedAvg.

    Recipes x a few step sizes run in rungs of successive halving on the validation split. The best
    then meet FedAvg on fresh seeds, once, on the test split. The section `choose` of params.yaml
    says what runs, if the defaults don't fit. params.yaml is not changed. Tables lie in choose/.
    """
    train_on(cluster)
    workspace = enter_workspace(root)
    from fedml_noniid.core.errors import located
    from fedml_noniid.pipelines.experiment import config, search

    settings = config.load(workspace.root)
    with located(source=config.FILE):
        search.choosing(settings)  # refuses before the data are prepared
    _repro(workspace, "prepare")
    from fedml_noniid.pipelines.verbs.choose import choose as chosen
    from fedml_noniid.pipelines.verbs.repro import exclusively

    with exclusively(workspace.root):
        typer.echo("\n" + chosen(workspace, config.load(workspace.root)).text)


def leave_one_out(root: Root = Path()) -> None:
    """Leave out each site in turn: what a model without a site reaches on it.

    Each recipe of params.yaml trains once without each site and is tested there: as it is, after
    fine-tuning on 5, 20 and 100 of the site's samples, and beside the site alone, without a
    federation. The differences are paired over sites. Nothing is held out for validation. Tables
    and runs lie in leave-one-out/, so that a kill loses only the run that it stops.
    """
    workspace = enter_workspace(root)
    from fedml_noniid.api import leaving_out
    from fedml_noniid.pipelines.experiment import config
    from fedml_noniid.pipelines.verbs.repro import exclusively

    settings = config.load(workspace.root)
    with exclusively(workspace.root):
        typer.echo(leaving_out.of_experiment(workspace, settings, True))


def _repro(workspace: Workspace, stage: str | None, details: bool = False) -> None:
    from fedml_noniid.pipelines.verbs import repro

    repro.repro(workspace, stage, typer.echo, details)
