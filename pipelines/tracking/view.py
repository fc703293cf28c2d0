"""The prepared comparison of an experiment's runs: accuracy, fairness and cost of each method."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable
from typing import Any

from fedml_noniid.metrics import METRICS
from fedml_noniid.pipelines.tracking import runs

KEY = "overview"
# tag of the experiment, as MLflow's own "share" button writes it
TAG = f"mlflow.sharedViewState.{KEY}"
SECTION = "which-method-is-best"
METHOD = "method"  # tag: the name of a run's group in the view
# MLflow's pages have this number of colours for groups. A hash of a group's name selects one: two
# groups often get the same.
N_COLOURS = 29
SPACES = 30  # tried at the end of a name


def link(address: str, experiment_id: str) -> str:
    """The link to the view. A search or an order in the link would switch the view off."""
    query = f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={KEY}"
    return f"{address.rstrip('/')}/#/experiments/{experiment_id}/runs?{query}"


def prepare(client: Any, experiment_id: str) -> None:
    """Writes the view for the experiment's present runs, and the name of its group into each
    run."""
    runs_ = sorted(runs.search(client, experiment_id), key=lambda run: int(run.info.start_time))
    metrics = sorted({name for run in runs_ for name in run.data.metrics})
    known = [name for name in METRICS if f"test_{name}" in metrics]
    by_round = f"test_{known[0] if known else 'accuracy'}"
    # Accuracy has the worst client by its mixture of classes, others that on its own test samples.
    worst = "client_worst" if by_round == "test_accuracy" else "client_test_worst"
    bars = [f"final/{name}" for name in (by_round, worst, "traffic_mib")]
    several = len({run.data.params.get("scenario") for run in runs_}) > 1
    names = {run.info.run_id: _name(run, several) for run in runs_}
    coloured = with_own_colours(dict.fromkeys(names.values()))
    for run in runs_:
        if run.data.tags.get(METHOD) != (name := coloured[names[run.info.run_id]]):
            client.set_tag(run.info.run_id, METHOD, name)
    section = {
        "uuid": SECTION,
        "name": "Which method is best?",
        "columns": 1,
        "cardHeight": 400,
    }  # the legend needs the width
    section |= {"display": True, "isReordered": True, "deleted": False, "isGenerated": False}
    # MLflow adds a chart for every metric without one, so each gets a hidden chart.
    others = [_chart("BAR", name, shown=False) for name in metrics if name not in (by_round, *bars)]
    state = {
        "groupBy": {
            "aggregateFunction": "average",
            "groupByKeys": [{"mode": "tag", "groupByData": METHOD}],
        },
        "useGroupedValuesInCharts": True,
        "groupsExpanded": {f"tag.{METHOD}.{name}": False for name in coloured.values()},
        "compareRunCharts": [
            _by_round(by_round),
            *(_chart("BAR", name) for name in bars if name in metrics),
            *others,
        ],
        "compareRunSections": [section],
        "isAccordionReordered": True,
        "runsHiddenMode": "SHOW_ALL",
        "hideEmptyCharts": True,
        "viewMaximized": False,
        "runListHidden": False,
        "selectedColumns": [
            "params.`recipe`",
            "params.`seed`",
            *(f"metrics.`{name}`" for name in bars),
        ],
        "chartsSearchFilter": "",
        "globalLineChartConfig": {
            "xAxisKey": "step",
            "lineSmoothness": 0,
            "selectedXAxisMetricKey": "",
        },
    }
    packed = base64.b64encode(
        zlib.compress(json.dumps(state, separators=(",", ":")).encode(), 9)
    ).decode()
    client.set_experiment_tag(experiment_id, TAG, f"deflate;{packed}")


def with_own_colours(names: Iterable[str]) -> dict[str, str]:
    """Name -> the name with spaces at its end that no page shows, for which MLflow selects a colour
    of its own.

    MLflow keeps the colours of groups in the browser, so a view can't name them. A new name at the
    end does not change the others.
    """
    used: set[int] = set()
    padded_names = {}
    for name in names:
        padded = [name + k * " " for k in range(SPACES)]
        padded_names[name] = next((text for text in padded if colour(text) not in used), name)
        used.add(colour(padded_names[name]))
    return padded_names


def _name(run: Any, several: bool) -> str:
    """The name of a run's group: its recipe, its scenario if there are several, and what keeps it
    apart from others."""
    params, tags = run.data.params, run.data.tags
    # Runs of a DVC experiment, deployments: no mean with the other runs.
    parts = (
        params.get("recipe"),
        several and params.get("scenario"),
        tags.get("dvc_experiment"),
        tags.get("kind"),
    )
    return ", ".join(str(part) for part in parts if part) or run.info.run_name


def colour(name: str) -> int:
    """The number of the colour that MLflow's pages select for a group."""
    low = high = 0
    for letter in f"tag.{METHOD}.{name}":
        low = (low + ord(letter)) % 255
        high = (high + low) % 255
    return (low | high << 8) % N_COLOURS


def _by_round(metric: str) -> dict[str, Any]:
    """One line per group: the mean over its runs, with a band from the smallest to the largest."""
    return _chart("LINE", metric) | {
        "selectedMetricKeys": [metric],
        "scaleType": "linear",
        "xAxisScaleType": "linear",
        "xAxisKey": "step",
        "useGlobalXaxisKey": True,
        "selectedXAxisMetricKey": "",
        "selectedYAxisMetricKey": "Metric",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "range": dict.fromkeys(("xMin", "xMax", "yMin", "yMax")),
    }


def _chart(kind: str, metric: str, shown: bool = True) -> dict[str, Any]:
    return {
        "uuid": f"{kind}-{metric}",
        "type": kind,
        "metricKey": metric,
        "metricSectionId": SECTION,
        "runsCountToCompare": 100,
        "deleted": not shown,
        "isGenerated": not shown,
    }
