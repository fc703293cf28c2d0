"""The report in Markdown, one table per part."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tabulate import tabulate

from benchmarks import machine
from benchmarks.statistics import median, quartiles

ENGINES = ("ours, sequential", "ours, vectorized")
TWO_WORKERS, BF16 = "ours, two workers", "ours, sequential, bf16"
BLOCK = re.compile(
    r"(<!-- bench\.json -->\n).*(<!-- /bench\.json -->)", re.DOTALL
)  # of docs/scale.md
TITLES = {
    "cohort": "Seconds per round by clients per round, MLP, of 300 clients",
    "clients": "Seconds per round by clients in total, MLP, 100 of them a round, 20 samples each",
    "hidden": "Seconds per round by width of the MLP's hidden layer",
}
HOW = """The table shows client steps of SGD per second. Ratios are relative to the bare loop \
(above 1 is faster).
Rounds of up to five engines take turns, and the bare loop is always one of them. Each round is \
compared with the
neighbouring round of the bare loop, so a change of the machine's speed hits both alike. Numbers \
are medians over the
rounds of all runs ({repetitions}). The bare loop is the tightest that we can write for one \
process in PyTorch, one
client at a time. Every engine ran the same number of steps from the same weights on the same \
data, in a process of its
own with one thread. Memory is the peak, with child processes. The final weights were compared \
with those of the bare
loop. For an engine that shuffles by itself, the final loss was compared."""


def markdown(found: dict[str, Any]) -> str:
    """The whole report."""
    parts = ["# Benchmarks", "Made by `noniid bench`. " + machine.line(found["machine"])]
    if found["quick"]:
        parts.append(
            "Made with `--quick`: it only tests that the benchmark runs. The numbers mean nothing."
        )
    how = HOW.format(repetitions=found["repetitions"])
    parts += ["## Engines", how, _engines(found["workloads"])]
    parts += ["\n".join(f"- {line}" for line in found["skipped"])] if found["skipped"] else []
    if two := _two(found["workloads"]):
        parts += ["## Two processes", TWO, two]
    if found["overhead"]:
        parts += ["## Outside the steps", OUTSIDE, _overhead(found["overhead"])]
    if found["scaling"]:
        parts.append("## Scaling")
        parts += [
            f"{TITLES[name]} (seconds; MB at most):\n\n{_sweep(one)}"
            for name, one in found["scaling"].items()
        ]
    if found["methods"]:
        parts += ["## Methods", METHODS, _methods(found["methods"])]
    if found["repeatability"]:
        parts += ["## Repeatability", REPEATABILITY, _repeatability(found["repeatability"])]
    return "\n\n".join(parts) + "\n"


TWO = """Our sequential engine in two processes and in one: medians of the rounds, and of the \
ratios of neighbouring
rounds, with quartiles."""
OUTSIDE = """The part of a round outside local training: drawing cohort and batches, averaging, \
records. Measured in one
process; the median over rounds."""
METHODS = """Time per round relative to FedAvg's. Each method takes turns with FedAvg in one \
process: vectorized engine,
workload `mlp`, default hyper-parameters, 500 public samples for the methods that need them. \
Work after the last round,
done once, has a column of its own, in rounds of FedAvg."""

REPEATABILITY = """Whether the final weights have the same SHA-256. The job is FedAvg on the \
workload `mlp`, three
rounds, with all clients in each round. Every engine starts from the same weights, and batches \
are fixed or drawn from a
seed. `same job twice` runs engines with workers (processes, threads or actors) with two of \
them. `1, 2, 4 workers`
compares these three numbers. `killed, resumed` compares an undisturbed run with one that got \
SIGKILL in round 2 and was
started again. `deployed` compares a simulation of three silos with the same job in FedML's \
cross-silo runtime (four
processes, gRPC, mutual TLS, eight rounds of digits). Our sequential engine is the one with \
workers: with one worker it
is the sequential engine in one process. `one process`: the engine has no workers. `not tried`: \
this benchmark has no
such run; it does not say that the simulator can't do it."""


def on_scale(page: str, found: dict[str, Any]) -> str:
    """The page docs/scale.md with the numbers of a benchmark.

    A page without the marks stays as it is.
    """
    return BLOCK.sub(lambda marks: f"{marks[1]}{_scale(found)}{marks[2]}", page)


def _scale(found: dict[str, Any]) -> str:
    cohort, clients = found["scaling"]["cohort"], found["scaling"]["clients"]
    first, *_, last = clients["values"]
    engines = [clients["engines"][name] for name in ENGINES]
    times = [one["wall_s"][-1] / one["wall_s"][0] for one in engines]
    more = [one["peak_mb"][-1] - one["peak_mb"][0] for one in engines]
    most = max(
        mb
        for sweep in (cohort, clients)
        for one in sweep["engines"].values()
        for mb in one["peak_mb"]
    )
    two = [middle for *_, (_, middle, _) in _pairs(found["workloads"])]
    costs = {name: one["ratio"] for name, one in found["methods"].items() if not one["problem"]}
    dear = max(costs, key=costs.__getitem__)
    rates = [
        {row["engine"]: row.get("ratio_wall") for row in one["rows"]}
        for one in found["workloads"].values()
    ]
    bf16 = [one[BF16] / one[ENGINES[0]] for one in rates if one.get(BF16)]
    return f"""
{_short("clients per round, of 300", cohort)}

{_short("clients in total, 100 per round", clients)}

- {last:,} clients in total take {min(times):.2f} to {max(times):.2f} times as long as {first:,},
  and {max(more):.0f} MB more. The most memory of these runs is {most:.0f} MB.
- Two processes have {min(two):.2f} to {max(two):.2f} times the rounds of one, depending on the \
network.
- A method costs {min(costs.values()):.1f} to {costs[dear]:.0f} times a round of FedAvg: \
`{dear}` costs most.
- `precision: bf16` has {min(bf16):.1f} to {max(bf16):.1f} times the steps of float32, in the \
workloads
  with convolutions.

"""


def _short(head: str, sweep: dict[str, Any]) -> str:
    """Seconds per round of our engines, without the memory."""
    rows = [
        [name.split(", ")[1], *(f"{wall:.3g}" for wall in sweep["engines"][name]["wall_s"])]
        for name in ENGINES
    ]
    return _table(rows, [head, *(f"{value:,}" for value in sweep["values"])])


def _engines(workloads: dict[str, Any]) -> str:
    head = [
        "workload",
        "engine",
        "steps per CPU s",
        "ratio",
        "steps per s",
        "ratio",
        "s per round",
        "MB",
        "loss",
        "",
    ]
    rows = []
    for name, workload in workloads.items():
        for row in workload["rows"]:
            if "wall_s" not in row:
                rows.append([name, row["engine"], *[""] * 7, row["problem"]])
                continue
            rates = (
                f"{row['steps_per_cpu_s']:.0f}",
                f"{row['ratio_cpu']:.2f}",
                f"{row['steps_per_wall_s']:.0f}",
            )
            rest = (
                f"{row['ratio_wall']:.2f}",
                f"{row['wall_s']:.3g}",
                f"{row['peak_mb']:.0f}",
                f"{row['loss']:.4f}",
            )
            rows.append([name, row["engine"], *rates, *rest, row["problem"] or row["note"]])
    legend = "\n".join(
        f"- `{name}`: {one['what']}; {one['steps']} steps a round"
        for name, one in workloads.items()
    )
    return f"{legend}\n\n{_table(rows, head)}"


def _two(workloads: dict[str, Any]) -> str:
    """The table, or "" if no workload has both."""
    rows = [
        [name, f"{one:.3g}", f"{two:.3g}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        for name, one, two, (low, middle, high) in _pairs(workloads)
    ]
    return (
        _table(rows, ["workload", "s per round, one", "two", "times as fast", "quartiles"])
        if rows
        else ""
    )


def _pairs(
    workloads: dict[str, Any],
) -> Iterator[tuple[str, float, float, tuple[float, float, float]]]:
    """(workload, s per round of one process, of two, quartiles of their ratio) where both were
    measured."""
    for name, workload in workloads.items():
        by_engine = {row["engine"]: row for row in workload["rows"] if "repetitions" in row}
        if all(engine in by_engine for engine in (ENGINES[0], TWO_WORKERS)):
            one, two = by_engine[ENGINES[0]], by_engine[TWO_WORKERS]
            rounds = (
                [wall for run in row["repetitions"] for wall in run["wall"]] for row in (one, two)
            )
            yield (
                name,
                one["wall_s"],
                two["wall_s"],
                quartiles([a / b for a, b in zip(*rounds, strict=True)]),
            )


def _overhead(found: dict[str, Any]) -> str:
    rows = [
        [name, engine, f"{100 * median(shares):.0f} %"]
        for name, engines in found.items()
        for engine, shares in engines.items()
    ]
    return _table(rows, ["workload", "engine", "outside the steps"])


def _sweep(one: dict[str, Any]) -> str:
    rows = [
        [
            engine,
            *(
                f"{wall:.3g} ({mb:.0f})"
                for wall, mb in zip(of["wall_s"], of["peak_mb"], strict=True)
            ),
        ]
        for engine, of in one["engines"].items()
    ]
    return _table(rows, ["engine", *map(str, one["values"])])


def _methods(found: dict[str, Any]) -> str:
    rows = [
        [name, "", "", one["problem"]]
        if one["problem"]
        else [name, f"{one['ratio']:.2f}", f"{one['end']:.1f}", ""]
        for name, one in found.items()
    ]
    return _table(rows, ["method", "round, in FedAvg's", "at the end, in FedAvg's rounds", ""])


def _repeatability(found: list[dict[str, Any]]) -> str:
    questions = ("twice", "workers", "killed", "deployed")
    rows = [
        [row["engine"], *(row[question]["said"] for question in questions), row["note"]]
        for row in found
    ]
    return _table(
        rows, ["engine", "same job twice", "1, 2, 4 workers", "killed, resumed", "deployed", ""]
    )


def _table(rows: list[list[str]], head: list[str]) -> str:
    return str(tabulate(rows, head, tablefmt="github", disable_numparse=True))
