"""Results: data frames, weights, pictures, comparisons. Accuracies in data frames are fractions,
and in percent where a table is printed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from safetensors.torch import load
from torch import Tensor

from fedml_noniid.api import plots, saved, settings
from fedml_noniid.api.data import Data
from fedml_noniid.api.predictor import Predictor, Tuning
from fedml_noniid.api.process import in_turn
from fedml_noniid.api.saved import Files, folder_of
from fedml_noniid.core.errors import NonFiniteError, UserError, among, closest, shown
from fedml_noniid.core.trees import Params
from fedml_noniid.data.files import write_whole
from fedml_noniid.data.readers.frames import exactly, table_of, texts_of
from fedml_noniid.data.readers.user_data import positions
from fedml_noniid.engines.evaluation import BATCH
from fedml_noniid.engines.personal import client_model
from fedml_noniid.metrics import metric_of
from fedml_noniid.models.model import Model
from fedml_noniid.models.settings import build_network
from fedml_noniid.pipelines.experiment.config import Config, Unit
from fedml_noniid.pipelines.experiment.measuring import (
    UNSEEN,
    final_model,
    personal_parts,
    with_frozen,
)
from fedml_noniid.pipelines.experiment.results import ItemResult, Site, of_clients, unseen_sites
from fedml_noniid.pipelines.experiment.training import SECONDS
from fedml_noniid.pipelines.reporting import comparison, figures, method_table, summary
from fedml_noniid.pipelines.reporting.heatmap import verbatim
from fedml_noniid.pipelines.reporting.summary import MethodSummary, ScenarioSummary
from fedml_noniid.pipelines.reporting.text import MIB, NONE, in_unit, seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Columns of the summary that are means over seeds.
MEANS = ("majority_accuracy", "balanced_accuracy", "macro_f1", "worst_client")
BESIDE = ("worst_client",)  # of those, where the main metric is not the accuracy
COMPARED = ("difference", "low", "high", "p", "p_holm", "higher", "seeds", "verdict")


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """One recipe at one setting, with one or more seeds.

    `point`: the values of a sweep. `seeds`: those that have a result. `failed`: seed -> why it has
    none. A recipe that sees the test set has `-leak` in its name.

    >>> import fedml_noniid as nd
    >>> split = nd.partition(nd.load("digits"), "dirichlet", clients=5, alpha=0.5)
    >>> result = nd.run("fednova", split, rounds=2, seeds=[0, 1])
    >>> result.rounds.groupby("seed").size().to_dict()
    {0: 2, 1: 2}
    >>> result.clients.columns.tolist()
    ['seed', 'client', 'samples', 'accuracy', 'test_samples', 'test_accuracy']
    >>> sorted(result.weights[0])
    ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
    """

    recipe: str
    point: Mapping[str, Any]  # the values of a sweep
    settings: Config  # as params.yaml
    source: Data | Callable[[], Data]  # loads saved results' data when they are used
    files: Mapping[int, Files]  # by seed
    failed: Mapping[int, str] = field(default_factory=dict)  # seed -> why it has no result

    @cached_property
    def data(self) -> Data:
        """The data of the runs."""
        return self.source if isinstance(self.source, Data) else self.source()

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that have a result."""
        return tuple(self.files)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A row per seed and round: the columns of rounds.csv, and the seconds of the round.

        `client_accuracy/<client>`: of each of at most 50 clients, on its own test samples. NaN: not
        measured.
        """
        frame = self._frame("run", "rounds.csv")
        frame[SECONDS] = [second for files in self.files.values() for second in files.seconds]
        return frame

    @cached_property
    def clients(self) -> pd.DataFrame:
        """A row per seed and client: the columns of per_client.csv.

        `accuracy`: the accuracies per class on the whole test set, weighted by the client's mixture
        of classes. `test_accuracy`, or another main metric: on the client's own part of the test
        set.
        """
        return self._frame("evaluation", "per_client.csv")

    @cached_property
    def classes(self) -> pd.DataFrame:
        """A row per seed and class: the columns of per_class.csv; per target, those of
        per_target.csv, where targets are no classes."""
        has_classes = self.settings.train.built_loss.classes
        return self._frame("evaluation", f"per_{'class' if has_classes else 'target'}.csv")

    @cached_property
    def unseen(self) -> pd.DataFrame:
        """A row per seed and owner that took no part: its samples, the share of its largest class,
        and the accuracy of the model that it would get."""
        has_some = any(UNSEEN in files.evaluation for files in self.files.values())
        columns = ["seed", "owner", "samples", "majority_accuracy", "accuracy"]
        return self._frame("evaluation", UNSEEN) if has_some else pd.DataFrame(columns=columns)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row per seed: the numbers of metrics.json."""
        rows = [
            {"seed": seed, **json.loads(files.evaluation["metrics.json"])}
            for seed, files in self.files.items()
        ]
        frame = pd.DataFrame(rows, columns=None if rows else ["seed"])
        return frame.drop(columns=[name for name in frame if name.endswith("_sha256")])

    @cached_property
    def weights(self) -> dict[int, dict[str, Tensor]]:
        """Seed -> name -> tensor: parameters and buffers of the final model, on the CPU, in the
        order of the network."""
        loaded = {seed: final_model(self._tensors(seed)) for seed in self.files}
        names = [*chain(*self.network.init(torch.Generator().manual_seed(0)))]
        return {
            seed: dict(sorted({**params, **buffers}.items(), key=lambda leaf: names.index(leaf[0])))
            for seed, (params, buffers) in loaded.items()
        }

    def _tensors(self, seed: int) -> Params:
        """The content of model.safetensors, with what was not saved. UserError."""
        tensors: Params = load(self.files[seed].run["model.safetensors"])
        if self.settings.train.save == "all":
            return tensors
        return with_frozen(tensors, self.network, seed, self._records[seed])

    @cached_property
    def network(self) -> Model:
        """The network of the runs."""
        data = self.data.dataset
        shape = tuple(data.train_x.shape[1:])
        return build_network(self.settings.train, shape, len(data.classes), data.embedding)

    @in_turn()
    def model(self, seed: int | None = None, client: int | None = None) -> Predictor:
        """The final model as a `torch.nn.Module` in eval mode, on the CPU: raw samples [n, ...] ->
        logits [n, C].

        `seed`: by default the first. `client`: whose model, if the clients keep a part to
        themselves (`fedbn`). UserError for a seed without a result, and for a client that has no
        model of its own.

        >>> import fedml_noniid as nd
        >>> data = nd.load("digits")
        >>> model = nd.run("fedavg", data, partition="iid", clients=4, rounds=2).model()
        >>> model(data.dataset.test_x[:3]).shape
        torch.Size([3, 10])
        """
        seed = next(iter(self.files), None) if seed is None else seed
        if seed is None or seed not in self.files:
            allowed = ", ".join(map(str, self.files)) or "none"
            raise UserError(f"model: seed = {shown(seed)} has no result; allowed: {allowed}")
        tensors = self._tensors(seed)
        (params, buffers), parts = final_model(tensors), personal_parts(tensors)
        n = self.settings.scenarios[self.settings.scenario_names[0]].clients
        if (client is None) == bool(parts) or (parts and client not in range(n)):
            allowed = (
                f"0 to {n - 1}, as each client has its own model"
                if parts
                else "none, as all have one model"
            )
            raise UserError(f"model: client = {shown(client)} is refused; allowed: {allowed}")
        if client is not None:
            params, buffers = client_model(params, buffers, parts, client)
        return Predictor(self.network, params, buffers, self.data.dataset)

    @in_turn()
    def fine_tune(
        self,
        x: Any,
        y: Any,
        *,
        steps: int = 30,
        lr: float = 0.1,
        seed: int | None = None,
        client: int | None = None,
    ) -> Predictor:
        """A copy of the final model, trained further on the samples of one site.

        It takes `steps` full-batch steps of SGD with step size `lr`, in eval mode: without dropout,
        and the statistics of batch norms stay. Frozen parameters stay too. `x`: as in `predict`.
        `y`: the class of each sample by its name in `Data.classes`, [n]. `seed` and `client`: as in
        `model`. UserError as there, for samples and classes that don't fit the data, where targets
        are no classes, and if the weights stop being finite.

        >>> import fedml_noniid as nd
        >>> data = nd.load("digits")
        >>> result = nd.run("fedavg", data, partition="iid", clients=4, rounds=2)
        >>> x, y = data.dataset.test_x, data.dataset.test_y
        >>> model = result.fine_tune(x[:100], y[:100].numpy(), steps=10)
        >>> bool((model(x[100:]).argmax(1) == y[100:]).double().mean() > 0.5)
        True
        """
        model, loss = self.model(seed, client), self.settings.train.built_loss
        with settings.arguments("fine_tune"):
            tuning = Tuning(steps=settings.plain(steps), lr=settings.plain(lr))
            if not loss.classes:
                raise UserError("the targets are no classes", allowed="data with classes")
            samples = self.data.samples(x)
            labels = y.tolist() if hasattr(y, "tolist") else settings.plain(y)
            if not isinstance(labels, list) or len(labels) != len(samples):
                allowed = f"a class for each of the {len(samples)} samples"
                raise UserError(f"y = {shown(labels)} is refused", allowed=allowed)
            cells = texts_of(table_of("y", pd.DataFrame({"y": labels})), "y")
            numbers = positions(cells, self.data.classes)
            if (numbers < 0).any():
                name = cells[(numbers < 0).argmax()]
                allowed = ", ".join(self.data.classes)
                raise UserError(f"y: class {shown(name)} is unknown", allowed=allowed)
        model = model.fine_tuned(samples, torch.from_numpy(numbers), loss, **vars(tuning))
        if not all(bool(leaf.isfinite().all()) for leaf in model.parameters()):
            raise NonFiniteError("fine_tune: the weights stop being finite; take a smaller lr")
        return model

    @in_turn()
    @torch.no_grad()
    def predict(self, x: Any, seed: int | None = None, client: int | None = None) -> NDArray[Any]:
        """The class of each sample by its name in `Data.classes`, [n].

        Where targets are no classes: the numbers [n, t], or the probabilities of the labels.

        `x`: samples that are not normalised, as `Data.samples` takes them: rows of a table, texts,
        arrays. `seed` and `client`: as in `model`. UserError as there, and for samples that don't
        fit the data.

        >>> import fedml_noniid as nd
        >>> import pandas as pd
        >>> ages = range(20, 80)
        >>> rows = pd.DataFrame([{"age": age, "ill": "yes" if age > 50 else "no"} for age in ages])
        >>> data = nd.from_frame(rows, label="ill")
        >>> result = nd.run("fedavg", data, partition="iid", clients=2, rounds=10)
        >>> result.predict(pd.DataFrame({"age": [20, 79]})).tolist()
        ['no', 'yes']
        """
        model = self.model(seed, client)
        with settings.arguments("predict"):
            samples = self.data.samples(x)
        loss = self.settings.train.built_loss
        outputs = torch.cat([model(part) for part in torch.split(samples, BATCH)])
        if not loss.classes:
            answers: NDArray[Any] = loss.answers(outputs).numpy()
            return answers
        names: NDArray[np.str_] = np.array(self.data.classes)[outputs.argmax(1).numpy()]
        return names

    @cached_property
    def sha256(self) -> dict[int, str]:
        """Seed -> SHA-256 of all weights, as in run.json."""
        return {seed: str(run["weights_sha256"]) for seed, run in self._records.items()}

    @property
    def summary(self) -> pd.DataFrame:
        """One row, as `Results.summary`."""
        return Results([self]).summary

    def plot(self) -> Figure:
        """Draws the test accuracy per round into a new figure of pyplot.

        A line is the mean over seeds, the band is ± one standard deviation.

        >>> import fedml_noniid as nd
        >>> split = nd.partition(nd.load("digits"), "iid", clients=4)
        >>> nd.run("fedavg", split, rounds=2).plot().axes[0].get_xlabel()
        'round'
        """
        return Results([self]).plot()

    def plot_clients(self) -> Figure:
        """Draws the accuracy of each client into a new figure of pyplot; all seeds together.

        >>> import fedml_noniid as nd
        >>> split = nd.partition(nd.load("digits"), "dirichlet", clients=4, alpha=0.1)
        >>> nd.run("fedavg", split, rounds=2).plot_clients().axes[0].get_xlabel()
        'accuracy of a client, %'
        """
        return Results([self]).plot_clients()

    def save(self, folder: str | Path) -> None:
        """Saves the files of each seed as the stages name them, and summary.csv.

        runs/<setting>-<recipe>-<seed>/ has rounds.csv, model.safetensors, recorded.safetensors and
        run.json. evaluation/<setting>-<recipe>-<seed>/ has per_class.csv, per_client.csv,
        confusion.csv and metrics.json. `nd.results` loads them. UserError if the folder can't be
        written.

        >>> import tempfile, pathlib
        >>> import fedml_noniid as nd
        >>> result = nd.run("fedavg", nd.partition(nd.load("digits"), "iid", clients=4), rounds=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result.save(folder)
        ...     sorted(path.name for path in pathlib.Path(folder).iterdir())
        ['evaluation', 'results.json', 'runs', 'summary.csv']
        """
        Results([self]).save(folder)

    def __repr__(self) -> str:
        point = "".join(f", {key} {value}" for key, value in self.point.items())
        notes = [f"{seeds(self.files)}: {self._scored}"] if self.files else []
        notes += [f"no result of {seeds(self.failed)}"] if self.failed else []
        lines = [f"{self.recipe}{point}, {', '.join(notes)}"]
        reasons = {record["tags"].get("no_effect", "") for record in self._records.values()}
        return "\n".join(lines + [f"NO EFFECT: {reason}" for reason in sorted(reasons) if reason])

    @property
    def main(self) -> str:
        """The name of the main metric, such as accuracy."""
        return self.settings.train.built_loss.metric

    @property
    def _scored(self) -> str:
        scores = summary.spread(run.tested[-1] for run in self._runs if run.tested)
        metric = metric_of(self.main)
        number = "unknown" if scores is None else f"{in_unit(scores, metric)}{metric.sign}"
        return f"{metric.label} {number}"

    @cached_property
    def _records(self) -> dict[int, dict[str, Any]]:
        return {seed: json.loads(files.run["run.json"]) for seed, files in self.files.items()}

    @cached_property
    def _runs(self) -> list[ItemResult]:
        """As the report reads them from files."""
        rounds, clients = self.rounds.drop(columns=SECONDS), self.clients
        column = of_clients(clients.columns) if self.files else ""
        return [
            ItemResult(
                key=Unit(record["scenario"], record["recipe"], seed).key,
                scenario=record["scenario"],
                recipe=record["recipe"],
                composition=record["composition"],
                seed=seed,
                params=record["params"],
                tags={**record["tags"], "weights_sha256": record["weights_sha256"]},
                final=record["final"],
                made={SECONDS: self.files[seed].seconds},
                rows=tuple(rounds[rounds["seed"] == seed].drop(columns="seed").to_dict("records")),
                evaluation=json.loads(self.files[seed].evaluation["metrics.json"]),
                client_accuracy=tuple(clients.loc[clients["seed"] == seed, column].dropna()),
                files=(),
                notes=tuple(record["notes"]),
                sites=self._sites(clients[clients["seed"] == seed]),
                unseen=unseen_sites(self.unseen[self.unseen["seed"] == seed].to_dict("records")),
            )
            for seed, record in self._records.items()
        ]

    def _sites(self, clients: pd.DataFrame) -> dict[str, Site]:
        """The clients of named owners that have test samples."""
        if "owner" not in clients:
            return {}
        score = f"test_{self.main}"
        columns = clients.dropna(subset=[score])[["owner", "samples", "test_samples", score]]
        return {
            name: Site(samples, tests, value)
            for name, samples, tests, value in columns.itertuples(index=False)
        }

    def _frame(self, part: str, name: str) -> pd.DataFrame:
        """A CSV file of all seeds, with the seed in the first column."""
        frames = []
        for seed, files in self.files.items():
            text = io.BytesIO(getattr(files, part)[name])
            # A class or an owner may be called NA.
            frame = pd.read_csv(
                text,
                keep_default_na=False,
                na_values=[""],
                dtype={"class": str, "owner": str},
                **exactly(),
            )
            frame.insert(0, "seed", seed)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["seed"])


class Table(pd.DataFrame):  # type: ignore[misc]  # pandas has no types
    """A data frame that is printed with all its columns, and with fractions in percent.

    pandas would hide the interval on a narrow terminal. `attrs["units"]`: fraction -> the unit in
    which it is printed, `%` or `points`.
    """

    def __repr__(self) -> str:
        return self._printed("to_string")

    def _repr_html_(self) -> str:
        return self._printed("to_html")

    def _printed(self, form: str) -> str:
        """Its text. `form`: the method of pandas that writes it."""
        titles = {name: f"{name}, {unit}" for name, unit in self.attrs["units"].items()}
        return str(
            getattr(pd.DataFrame(self).rename(columns=titles), form)(
                index=False,
                na_rep=NONE,
                float_format="{:.4g}".format,
                formatters=dict.fromkeys(titles.values(), _percent),
            )
        )


class Results(Sequence[Result]):
    """The results of a sweep: one `Result` for each setting and recipe, by number.

    >>> import fedml_noniid as nd
    >>> split = nd.partition(nd.load("digits"), "dirichlet", clients=5, alpha=0.5)
    >>> results = nd.sweep(["fedavg", "fedbabu"], split, rounds=2, seeds=[0, 1])
    >>> [result.recipe for result in results]
    ['fedavg', 'fedbabu']
    """

    def __init__(self, members: Sequence[Result]) -> None:
        self._found = list(members)

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, key: Any) -> Any:
        """One result by its number, or by the name of a recipe that has one; a part by a slice.

        UserError for another key.
        """
        if isinstance(key, slice):
            return Results(self._found[key])
        if isinstance(key, SupportsIndex):
            return self._found[key]
        recipes = [result.recipe for result in self._found]
        names = [name for name in self._recipes if recipes.count(name) == 1]
        if key in names:
            return self._found[recipes.index(key)]
        raise UserError(
            f"results[{shown(key)}] is refused",
            allowed="a number, a slice, or the name of a recipe with one result; names: "
            f"{', '.join(names) or 'none'}",
            meant=closest(key, names),
        )

    def __repr__(self) -> str:
        return "\n".join(map(repr, self._found))

    @property
    def failed(self) -> dict[str, str]:
        """Item -> why it has no result."""
        return {
            Unit(result.settings.scenario_names[0], result.recipe, seed).key: reason
            for result in self._found
            for seed, reason in result.failed.items()
        }

    @property
    def rounds(self) -> pd.DataFrame:
        """As `Result.rounds`, with the values of the sweep and the recipe in the first columns."""
        return self._joined("rounds")

    @property
    def clients(self) -> pd.DataFrame:
        """As `Result.clients`, with the values of the sweep and the recipe in the first columns."""
        return self._joined("clients")

    @property
    def classes(self) -> pd.DataFrame:
        """As `Result.classes`, with the values of the sweep and the recipe in the first columns."""
        return self._joined("classes")

    @property
    def summary(self) -> pd.DataFrame:
        """A row per setting and recipe, the best of a setting first. It is printed with all
        columns, in percent; its values are fractions.

        `accuracy`, or another main metric: after the last round, mean over seeds, with the standard
        deviation `std` and the ends `low` and `high` of the 95 % interval of the mean by the t
        distribution, as far as the metric can have such values.
        `majority_accuracy`: of always naming the most frequent class of the training data.
        `balanced_accuracy`: mean of the accuracies on each class. `macro_f1`: mean of the F1 of
        each class. `worst_client`: the lowest accuracy of a client. All four are means over seeds.
        `mib_per_round` and `mib`: all clients, up and down. `seconds`: of all rounds, mean over
        seeds. `rank`: within the setting; missing if the recipe is not federated, has seen the test
        set, or is no better than a constant answer. `note` says so, and names the public data that
        the recipe sees.
        """
        rows = []
        for point, group in self._scenarios():
            metric = group.metric
            for method in group.methods:
                ends = comparison.interval(method.final) or (None, None)
                low, high = (x and min(max(x, metric.least), metric.most) for x in ends)
                seconds = [
                    sum(run.seconds or ()) for run in group.results if run.recipe == method.recipe
                ]
                rows.append(
                    {
                        **point,
                        "recipe": method.recipe,
                        "seeds": method.final.n,
                        group.main: method.final.mean,
                        "std": method.final.std,
                        "low": low,
                        "high": high,
                        **{
                            name: method.spreads[name].mean if name in method.spreads else None
                            for name in (MEANS if group.main == "accuracy" else BESIDE)
                        },
                        **{name: method.spreads[name].mean for name in group.others},
                        "mib_per_round": method.spreads["traffic_round_bytes"].mean / MIB,
                        "mib": method.spreads["traffic_total_bytes"].mean / MIB,
                        "seconds": sum(seconds) / len(seconds),
                        "rank": method.rank or None,
                        "note": _note(method, group),
                    }
                )
        frame = pd.DataFrame(rows)
        floats = {name: float for name in ("std", "low", "high", *MEANS) if name in frame}
        table = Table(frame.astype(floats | {"rank": "Int64"} if rows else {}))
        fractions = [name for name in frame if metric_of(name).percent]
        fractions += self._in_percent("std", "low", "high", *MEANS)
        table.attrs["units"] = dict.fromkeys(fractions, "%")
        return table

    def compare(self, other: str = "fedavg") -> pd.DataFrame:
        """Each recipe against `other`, seed by seed, within each setting. It is printed with all
        columns, in points; its values are fractions.

        `difference`: of the accuracy, or another main metric, after the last round. `p`: of the
        paired t test. `p_holm`: after Holm's adjustment for all comparisons of the setting. `low`
        and `high`: the ends of that test's interval, 95 % after the adjustment. The `verdict` goes
        by both alike.
        `higher`: on how many of the `seeds` the recipe ends above `other`. Recipes that are not
        federated or have seen the test set are left out. UserError
        if `other` has no result.

        >>> import fedml_noniid as nd
        >>> split = nd.partition(nd.load("digits"), "dirichlet", clients=5, alpha=0.5)
        >>> results = nd.sweep(["fedavg", "fedbabu"], split, rounds=2, seeds=[0, 1])
        >>> results.compare("fedavg")[["recipe", "seeds"]].values.tolist()
        [['fedbabu', 2]]
        """
        names = dict.fromkeys(result.recipe for result in self._found if result.files)
        if other not in names:
            raise UserError(f"compare: {shown(other)} has no result", **among(other, names))
        rows = []
        for point, group in self._scenarios():
            method = next((method for method in group.methods if method.recipe == other), None)
            for test in comparison.against(group, method).values():
                n = len(test.differences)
                values = (
                    test.mean if n else None,
                    *(test.interval or (None, None)),
                    test.p,
                    test.holm_p,
                    test.higher,
                    n,
                    test.verdict,
                )
                rows.append(
                    {**point, "recipe": test.recipe, **dict(zip(COMPARED, values, strict=True))}
                )
        frame = pd.DataFrame(rows, columns=[*self._keys, "recipe", *COMPARED])
        table = Table(frame.astype(dict.fromkeys(COMPARED[:5], float)))
        table.attrs["units"] = dict.fromkeys(self._in_percent(*COMPARED[:3]), "points")
        return table

    def table(self, by: str | None = None) -> method_table.MethodTable:
        """The main metric after the last round, `82.4 ± 1.8`: methods by settings, or by the values
        of one argument of the sweep; a method then has a row for each setting of the others.

        The best mean of a setting has a `*`, and is bold in `to_markdown()` and `to_latex()`.
        `to_csv()` has unrounded numbers. `noniid table --latex` writes the same table. ≈ marks what
        the paired test, after Holm's adjustment, can't tell apart from the best; `n` is said where
        seeds have no result. UserError for a `by` that the sweep is not over.

        >>> import fedml_noniid as nd
        >>> how = {"partition": "dirichlet", "clients": 5, "rounds": 2}
        >>> over = {"alpha": [0.1, 1.0], "lr": [0.05, 0.1]}
        >>> table = nd.sweep(["fedavg"], nd.load("digits"), over=over, **how).table(by="lr")
        >>> table.rows[0], [row[0] for row in table.rows[1:]]
        (['method', 'lr 0.05', 'lr 0.1'], ['fedavg, alpha 0.1', 'fedavg, alpha 1.0'])
        """
        if by not in (None, *self._keys):
            raise UserError(
                f"table: by = {shown(by)} is refused",
                allowed=", ".join(self._keys) or "none, as there is one setting",
                meant=closest(by, self._keys),
            )
        scenarios = []
        for point, group in self._scenarios():
            inside = {key: value for key, value in point.items() if by in (None, key)}
            outside = {key: value for key, value in point.items() if key not in inside}
            scenarios.append((_point_text(inside), _point_text(outside), group))
        n_seeds = max((len(result.settings.seeds) for result in self._found), default=0)
        return method_table.from_scenarios(scenarios, self._recipes, n_seeds)

    def plot(self) -> Figure:
        """Draws the test accuracy per round, a panel for each setting, into a new figure of pyplot.

        A line is the mean over seeds, the band is ± one standard deviation.

        >>> import fedml_noniid as nd
        >>> split = nd.partition(nd.load("digits"), "iid", clients=4)
        >>> results = nd.sweep(["fedavg", "fednova"], split, over={"lr": [0.05, 0.1]}, rounds=2)
        >>> [axes.get_title(loc="left") for axes in results.plot().axes]
        ['lr 0.05', 'lr 0.1']
        """
        return self._drawn(figures.draw_curves, 3.8)

    def plot_clients(self) -> Figure:
        """Draws the accuracy of each client, a panel for each setting, into a new figure of pyplot;
        all seeds together. With `natural` and named owners: on the owner's test samples.

        >>> import fedml_noniid as nd
        >>> split = nd.partition(nd.load("digits"), "dirichlet", clients=4, alpha=0.1)
        >>> figure = nd.sweep(["fedavg", "fednova"], split, rounds=2).plot_clients()
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['fedavg', 'fednova']
        """
        height = 0.34 * len(self._recipes) + 1.0
        return self._drawn(figures.draw_all_clients, height, share_x=True)

    def _drawn(self, draw: Callable[..., None], height: float, share_x: bool = False) -> Figure:
        """A panel for each setting, `height` inches high."""
        points = self._points()
        scenarios = {_point_text(point): scenario for point, scenario in self._scenarios()}
        panels = plots.panels(len(points), (6.0, height), share_x)
        for axes, (title, _) in zip(panels, points, strict=True):
            axes.set_title(verbatim(title), loc="left", fontsize=11)
            if title in scenarios:
                draw(axes, scenarios[title], self._recipes)
            else:
                at = axes.transAxes
                axes.text(0.5, 0.5, figures.NO_RESULT, transform=at, ha="center", color="0.4")
            if axes.get_legend_handles_labels()[0]:
                axes.legend(**figures.NAMES)
        return cast("Figure", panels[0].figure)

    def save(self, folder: str | Path) -> None:
        """As `Result.save`, for all results.

        >>> import tempfile, pathlib
        >>> import fedml_noniid as nd
        >>> split = nd.partition(nd.load("digits"), "iid", clients=4)
        >>> results = nd.sweep(["fedavg"], split, rounds=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     results.save(folder)
        ...     [path.name for path in pathlib.Path(folder, "runs").iterdir()]
        ['iid-fedavg-0']
        """
        target = folder_of("save", folder)
        for result in self._found:
            for seed, files in result.files.items():
                files.write(
                    target, Unit(result.settings.scenario_names[0], result.recipe, seed).key
                )
        saved.write_record(target, self._found)
        write_whole(target / "summary.csv", self.summary.to_csv(index=False))

    def _in_percent(self, *names: str) -> tuple[str, ...]:
        """The columns, if the main metric is a fraction that is shown in percent; else none."""
        return names if all(metric_of(result.main).percent for result in self._found) else ()

    @property
    def _recipes(self) -> list[str]:
        return [*dict.fromkeys(result.recipe for result in self._found)]

    @property
    def _keys(self) -> list[str]:
        """The arguments that the sweep is over."""
        return [*dict.fromkeys(key for result in self._found for key in result.point)]

    def _points(self) -> list[tuple[str, list[Result]]]:
        """The settings: their words and their results."""
        points: dict[str, list[Result]] = {}
        for result in self._found:
            points.setdefault(_point_text(result.point), []).append(result)
        return list(points.items())

    def _scenarios(self) -> Iterator[tuple[Mapping[str, Any], ScenarioSummary]]:
        """The settings that have a result: their values, and the numbers of the report."""
        for _, group in self._points():
            runs = [run for result in group for run in result._runs]
            seeds = [*dict.fromkeys(seed for result in group for seed in result.settings.seeds)]
            name = group[0].settings.scenario_names[0]
            first = next((result for result in group if result.files), None)
            if first is None:
                continue
            samples = first.classes.loc[first.classes["seed"] == first.seeds[0], "samples"]
            tested = int(samples.sum() if "class" in first.classes else samples.iloc[0])
            scenario = summary.scenario(
                name, runs, [result.recipe for result in group], seeds, tested
            )
            if scenario is not None:
                yield group[0].point, scenario

    def _joined(self, name: str) -> pd.DataFrame:
        """One table of all results."""
        frames = []
        for result in self._found:
            first = {**result.point, "recipe": result.recipe}
            frame: pd.DataFrame = getattr(result, name)
            columns = {key: [value] * len(frame) for key, value in first.items()}
            frames.append(pd.concat([pd.DataFrame(columns, index=frame.index), frame], axis=1))
        filled = [frame for frame in frames if len(frame)]
        return (
            pd.concat(filled, ignore_index=True)
            if filled
            else pd.DataFrame(columns=[*self._keys, "recipe"])
        )


def result_of(
    recipe: str,
    point: Mapping[str, Any],
    config: Config,
    source: Data | Callable[[], Data],
    ended: Mapping[int, Files | None],
) -> Result:
    """The result of these seeds; None: not trained yet."""
    files = {seed: run for seed, run in ended.items() if run and not run.reason}
    failed = {
        seed: run.reason if run else "it is not trained yet"
        for seed, run in ended.items()
        if seed not in files
    }
    return Result(recipe, point, config, source, files, failed)


def results(folder: str | Path, data: Data | None = None) -> Results:
    """What the last `run` or `sweep` with this `folder`, or `save`, has returned, as far as it is
    trained.

    `data`: those of the runs. Pictures and tables do without; models and predictions need them
    where the data have no name of params.yaml. UserError for a folder without results.

    >>> import tempfile
    >>> import fedml_noniid as nd
    >>> split = nd.partition(nd.load("digits"), "iid", clients=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     swept = nd.sweep(["fedavg", "fedprox"], split, rounds=2, folder=folder)
    ...     nd.results(folder).summary.equals(swept.summary)
    True
    """
    path, members = Path(folder), []
    for entry in saved.read_record(folder):
        with settings.arguments("results"):
            config = settings.checked(entry["settings"], entry["from_memory"])
        recipe, (scenario,) = entry["recipe"], config.scenario_names
        files = {
            int(seed): saved.Files.read(path, Unit(scenario, recipe, int(seed)).key, fingerprint)
            for seed, fingerprint in entry["fingerprints"].items()
        }
        about = recipe, entry["point"], config, cache(partial(saved.source, entry, data))
        members.append(result_of(*about, files))
    return Results(members)


def _point_text(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in point.items())


def _note(method: MethodSummary, group: ScenarioSummary) -> str:
    """What sets a recipe apart from the others."""
    items = (item.rpartition("-") for item in group.missing)
    lost = [int(seed) for name, _, seed in items if name == f"{group.name}-{method.recipe}"]
    public = method.public if not method.leak else ""
    notes = {
        f"LEAK: {method.leak}": method.leak,
        f"NO EFFECT: {method.no_effect}": method.no_effect,
        f"sees {public} public data": public,
        "chooses its clients: pairs have not the same ones": method.cohorts,
        f"ONE CLASS on {seeds(method.one_class)}": method.one_class,
        "no better than the majority class": not method.is_above_majority,
        f"no result of {seeds(lost)}, so its means are those of the others": lost,
        "not federated": not method.federated,
    }
    return "; ".join(note for note, is_so in notes.items() if is_so)


def _percent(fraction: float) -> str:
    return NONE if pd.isna(fraction) else f"{100 * fraction:z.2f}"
