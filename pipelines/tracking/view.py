"""The prepared comparison of an experiment's runs: accuracy, fairness and cost of each method."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from fedml_noniid.metrics import METRICS, metric_of
from fedml_noniid.pipelines.tracking import runs
from fedml_noniid.pipelines.tracking.finished import TRAFFIC, shown_name

KEY = "overview"
# tag of the experiment, as MLflow's own "share" button writes it
TAG = f"mlflow.sharedViewState.{KEY}"
SECTION = "which-method-is-best"
BASELINE_COLOUR = "#7f7f7f"  # of the first recipe: the report's black can't be seen in a dark page


def link(address: str, experiment_id: str) -> str:
    """The link to the view. A search or an order in the link would switch the view off."""
    query = f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={KEY}"
    return f"{address.rstrip('/')}/#/experiments/{experiment_id}/runs?{query}"


def colour(index: int) -> str:
    """The colour of the recipe at this place of params.yaml, as the report has it."""
    # Imported here: it takes a second.
    from fedml_noniid.pipelines.reporting.figures import look

    return str(look(index)["color"]) if index else BASELINE_COLOUR


def prepare(client: Any, experiment_id: str) -> None:
    """Writes the view: a line and bars for each method, the best first, and a line for each seed.

    Runs of seeds have no bars, as only methods have these means.
    """
    known = runs.search(client, experiment_id)
    metrics = sorted({name for run in known for name in run.data.metrics})
    main = next((name for name in METRICS if f"test_{name}" in metrics), "accuracy")
    metric = metric_of(main)
    by_round, worst = shown_name(main, metric), shown_name("worst_client", metric)
    lines = [by_round, f"test_{main}"]
    bars = [f"final/{name}" for name in (by_round, worst, TRAFFIC)]
    section = {
        "uuid": SECTION,
        "name": "Which method is best?",
        "columns": 1,
        "cardHeight": 400,
    }  # the legend needs the width
    section |= {"display": True, "isReordered": True, "deleted": False, "isGenerated": False}
    # MLflow adds a chart for every metric without one, so each gets a hidden chart.
    others = [_chart("BAR", name, shown=False) for name in metrics if name not in (*lines, *bars)]
    state = {
        "orderByKey": f"metrics.`{bars[0]}`",
        "orderByAsc": False,
        "compareRunCharts": [
            _by_round(lines[0]),
            *(_chart("BAR", name) for name in bars),
            _by_round(lines[1]),
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
            "tags.`leak`",
            *(f"metrics.`{name}`" for name in bars),
        ],
        "chartsSearchFilter": "",
    }
    packed = base64.b64encode(
        zlib.compress(json.dumps(state, separators=(",", ":")).encode(), 9)
    ).decode()
    client.set_experiment_tag(experiment_id, TAG, f"deflate;{packed}")


def _by_round(metric: str) -> dict[str, Any]:
    """A line for each run that has the metric, not smoothed."""
    return _chart("LINE", metric) | {
        "selectedMetricKeys": [metric],
        "lineSmoothness": 0,
        "scaleType": "linear",
        "xAxisScaleType": "linear",
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "selectedYAxisMetricKey": "Metric",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "range": {},
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
