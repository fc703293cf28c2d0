"""The prepared comparison of an experiment's runs: accuracy, fairness and cost of each method."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from fedml_noniid.pipelines.tracking import runs

KEY = "overview"
TAG = f"mlflow.sharedViewState.{KEY}"  # tag of the experiment, as MLflow's own "share" button writes it
SECTION = "which-method-is-best"
BY_ROUND = "test_accuracy"
BARS = ("final/test_accuracy", "final/client_worst", "final/traffic_mib")


def link(address: str, experiment_id: str) -> str:
    """The link to the view. A search or an order in the link would switch the view off."""
    query = f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={KEY}"
    return f"{address.rstrip('/')}/#/experiments/{experiment_id}/runs?{query}"


def prepare(client: Any, experiment_id: str) -> None:
    """Writes the view for the experiment's present runs."""
    found = runs.search(client, experiment_id, runs.ACTIVE)
    metrics = sorted({name for run in found for name in run.data.metrics})
    groups = [{"mode": "param", "groupByData": "recipe"}]
    collapsed = {f"param.recipe.{run.data.params.get('recipe')}": False for run in found}
    if len({run.data.params.get("scenario") for run in found}) > 1:
        groups.append({"mode": "param", "groupByData": "scenario"})
    for tag in ("dvc_experiment", "kind"):  # runs of a DVC experiment, deployments: no mean with the other runs
        if any(tag in run.data.tags for run in found):
            groups.append({"mode": "tag", "groupByData": tag})
    section = {"uuid": SECTION, "name": "Which method is best?", "columns": 2, "cardHeight": 440}
    section |= {"display": True, "isReordered": True, "deleted": False, "isGenerated": False}
    # MLflow adds a chart for every metric without one, so each gets a hidden chart.
    others = [_chart("BAR", name, shown=False) for name in metrics if name not in (BY_ROUND, *BARS)]
    state = {
        "groupBy": {"aggregateFunction": "average", "groupByKeys": groups}, "useGroupedValuesInCharts": True,
        "groupsExpanded": collapsed,
        "compareRunCharts": [_by_round(), *(_chart("BAR", name) for name in BARS if name in metrics), *others],
        "compareRunSections": [section], "isAccordionReordered": True,
        "runsHiddenMode": "SHOW_ALL", "hideEmptyCharts": True, "viewMaximized": False, "runListHidden": False,
        "selectedColumns": ["params.`recipe`", "params.`seed`", *(f"metrics.`{name}`" for name in BARS)],
        "chartsSearchFilter": "",
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }  # fmt: skip
    packed = base64.b64encode(zlib.compress(json.dumps(state, separators=(",", ":")).encode(), 9)).decode()
    client.set_experiment_tag(experiment_id, TAG, f"deflate;{packed}")


def _by_round() -> dict[str, Any]:
    """One line per group: the mean over its runs, with a band from the smallest to the largest."""
    return _chart("LINE", BY_ROUND) | {
        "selectedMetricKeys": [BY_ROUND], "scaleType": "linear", "xAxisScaleType": "linear", "xAxisKey": "step",
        "useGlobalXaxisKey": True, "selectedXAxisMetricKey": "", "selectedYAxisMetricKey": "Metric",
        "yAxisKey": "metric", "yAxisExpressions": [], "range": dict.fromkeys(("xMin", "xMax", "yMin", "yMax")),
    }  # fmt: skip


def _chart(kind: str, metric: str, shown: bool = True) -> dict[str, Any]:
    return {
        "uuid": f"{kind}-{metric}", "type": kind, "metricKey": metric, "metricSectionId": SECTION,
        "runsCountToCompare": 100, "deleted": not shown, "isGenerated": not shown,
    }  # fmt: skip
