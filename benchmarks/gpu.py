"""Checks and measures a GPU: `python -m benchmarks.gpu [--device cpu] [--quick] [--to FOLDER]`.

It needs the base package alone, no network, and at most 240 s. `--device cpu --quick` rehearses it.
The checks are functions that tests/engines/test_on_gpu.py calls too.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from fedml_noniid import extras
from fedml_noniid.contract import federation as small
from fedml_noniid.contract.checks import close_together
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError, one_line
from fedml_noniid.core.trees import Params
from fedml_noniid.data.files import write_whole
from fedml_noniid.engines.device import be_deterministic, facts, resolve_device
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.hashing import model_tensors, weights_sha256
from fedml_noniid.engines.plan import LocalTraining, Plan, initial_model
from fedml_noniid.engines.run import Outcome
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.models import build
from fedml_noniid.models.model import Model
from fedml_noniid.pipelines.experiment.progress import Display
from fedml_noniid.pipelines.experiment.workers import side_by_side
from fedml_noniid.simulate import simulate
from tests.recipe_table import ALONE, EVERY

RESULTS = Path(__file__).parents[1] / "docs" / "results"
CPU = torch.device("cpu")
CHECKS_S, BUDGET_S, JOB_S = 100.0, 215.0, 8.0  # when the last check, and job, may begin; of a job
PFL_ROUNDS = 1500
Call = Callable[[], dict[str, Any] | None]


# The checks
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One small run that is checked; the defaults have clients that keep a memory."""

    network: Model
    data: small.Federation = field(default_factory=small.federation)
    recipe: str = "scaffold"
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)  # of `small.simulation`
    # of an update, relative to its norm; a ReLU whose input is almost 0 may flip
    tolerance: float = 1e-3


def changed(data: small.Federation, change: Callable[[Samples], Samples]) -> small.Federation:
    """Returns the data with other samples."""
    parts: Any = {key: change(getattr(data, key)) for key in ("train", "test", "public")}
    return replace(data, **parts)


def cases() -> dict[str, Case]:
    """Returns the networks of the checks, side by side too if they can be."""
    large = changed(
        small.images(torch.float32), lambda part: part._replace(x=part.x.repeat(1, 1, 2, 2))
    )
    texts = changed(  # tokens from 1 to 19
        small.federation(),
        lambda part: part._replace(x=(4 * part.x.abs()).round().clamp(max=18) + 1),
    )
    vectors = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    shape, norms = (1, 12, 12), {"channels": 4, "hidden": 16, "batch_norm": True}
    cnn = Case(build("cnn", shape, small.N_CLASSES, norms), large)
    few = {"rounds": 1, "cohort": 2, "epochs": 1, "lr": 0.0005}
    one_by_one = {
        "CNN": cnn,
        "CNN, augmented": replace(cnn, options={"augment": True}),
        "ResNet-18": Case(
            build("resnet18", shape, small.N_CLASSES), large, "fedavg", {}, few, tolerance=0.1
        ),
    }
    return {
        **one_by_one,
        **{
            f"{name}, side by side": replace(case, options={**case.options, "engine": "vectorized"})
            for name, case in one_by_one.items()
        },
        "LSTM": Case(build("lstm", (6,), small.N_CLASSES, {"hidden": 8}, vectors), texts),
    }


def simulation(
    case: Case, device: torch.device, dtype: torch.dtype = torch.float32, **more: object
) -> Simulation:
    """Makes the simulation of a case, before its first round; `more`: other options."""
    data = changed(case.data, lambda part: part._replace(x=part.x.to(dtype)).to(device))
    options: dict[str, Any] = {**case.options, **more}
    return small.simulation(case.recipe, case.settings, data=data, model=case.network, **options)


def digest(outcome: Outcome) -> str:
    """Returns the SHA-256 of the weights."""
    return weights_sha256(model_tensors(outcome.params, outcome.evaluated, outcome.buffers))


def check_repeats(case: Case, device: torch.device) -> None:
    """Raises AssertionError if a second run has other bits."""
    assert len({digest(simulation(case, device).run()) for _ in range(2)}) == 1, "other bits"


def check_agrees(case: Case, device: torch.device) -> None:
    """Raises AssertionError unless float32 is near float64, one by one, on the CPU."""
    wanted = simulation(case, CPU, torch.float64, engine="sequential").run()
    outcome = simulation(case, device).run()
    assert {leaf.device.type for leaf in outcome.params.values()} == {device.type}
    for part in ("params", "buffers"):
        close_together(_double(getattr(outcome, part)), getattr(wanted, part), 1e-4)
    start = _vector(initial_model(case.network, small.PLAN["seed"], torch.zeros(()))[0])
    ours, theirs = (_vector(tree) - start for tree in (outcome.params, wanted.params))
    error = ((ours - theirs).norm() / theirs.norm()).item()
    assert error <= case.tolerance, f"the update's error is {error:.2g} of its norm"


def _double(tree: Params) -> Params:
    return {key: leaf.cpu().to(torch.float64) for key, leaf in tree.items()}


def _vector(tree: Params) -> torch.Tensor:
    return torch.cat([leaf.flatten() for _, leaf in sorted(_double(tree).items())])


def check_resumes(case: Case, device: torch.device) -> None:
    """Raises AssertionError if a run that ends after a round goes on to other bits."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        next(simulation(case, device, checkpoint=path).rounds())
        resumed = simulation(case, device, checkpoint=path)
        assert resumed.start_round == 1
        assert digest(resumed.run()) == digest(simulation(case, device).run()), "other bits"


def check_processes(name: str, device: torch.device) -> None:
    """Raises AssertionError if two processes at once have other bits than this one."""
    with Display("processes", 2, bars=False, lines=False) as display:
        digests = dict(
            side_by_side(
                partial(_in_process, name, device), [0, 1], 2, display, device.type == "cuda"
            )
        )
    assert {*digests.values()} == {digest(simulation(cases()[name], device).run())}, "other bits"


def _in_process(name: str, device: torch.device, _: int) -> str:
    be_deterministic()
    torch.set_num_threads(1)
    return digest(simulation(cases()[name], device).run())


@cache
def _by_recipe(entry: str, device: torch.device, engine: str) -> Outcome:
    recipe, settings = EVERY[entry]
    network, options = small.network(small.takes_norms(recipe, settings)), {"rounds": 1}
    case = Case(network, small.federation(), recipe, settings, options)
    return simulation(case, device, torch.float64, engine=engine).run()


def check_recipe(entry: str, device: torch.device, engine: str) -> None:
    """Raises AssertionError unless a round in float64 has the numbers of the CPU, one by one."""
    wanted, outcome = (_by_recipe(entry, *how) for how in ((CPU, "sequential"), (device, engine)))
    close_together(_double(outcome.params), wanted.params, 1e-6)
    assert outcome.rows[0]["bytes_up"] == wanted.rows[0]["bytes_up"]


def check_silos(entry: str, device: torch.device) -> None:
    """Raises AssertionError unless three silos on the device have the simulation's numbers.

    ModuleNotFoundError without a package of a silo.
    """
    with patch.object(extras, "require"):  # asks for fedml, which takes no part without a network
        from fedml_noniid.contract import silos
        from fedml_noniid.deploy.server_run import ServerRun
        from fedml_noniid.deploy.settings import DeviceArgs

    terms = replace(
        silos.terms(*EVERY[entry], batch_norm=True),
        device=DeviceArgs(using_gpu=device.type == "cuda"),
    )
    outcome = silos.talk(ServerRun(terms, silos.shards_of()[0]), silos.silos_of(terms))
    close_together(outcome.params, silos.simulated(*EVERY[entry], True).params, 1e-3)


def checks(device: torch.device, quick: bool) -> Iterator[tuple[str, str, Call]]:
    """Yields (what is checked, of what, the check)."""
    for name, case in cases().items():
        yield "two runs have one SHA-256", name, partial(check_repeats, case, device)
        yield "near float64 on the CPU", name, partial(check_agrees, case, device)
        if case.recipe == "scaffold":
            yield "goes on to the same bits", name, partial(check_resumes, case, device)
    yield "two processes have the bits of one", "CNN", partial(check_processes, "CNN", device)
    yield (
        "silos have the simulation's numbers",
        "scaffold+ccn",
        partial(check_silos, "scaffold+ccn", device),
    )
    for entry in ALONE if quick else EVERY:
        for engine in ("sequential", "vectorized"):
            yield (
                "every recipe has the CPU's numbers",
                f"{entry}, {engine}",
                partial(check_recipe, entry, device, engine),
            )


# The measurements
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """FedAvg on random data."""

    name: str
    model: str
    shape: tuple[int, ...]
    clients: int
    cohort: int
    samples: int  # per client
    batch: int
    engine: str = "sequential"
    precision: str = "float32"
    test: int = 100
    every: int = 1  # rounds from one evaluation to the next


def jobs(device: torch.device, quick: bool) -> list[Job]:
    """Returns what is measured; the first is pfl's CIFAR-10 benchmark (arXiv 2404.06430)."""
    image = (3, 32, 32)
    pfl = Job("pfl's CIFAR-10", "pfl_cnn", image, 1000, 50, 50, 10, test=10_000, every=10)
    resnet = Job("ResNet-18, 10 clients", "resnet18", image, 10, 10, 64, 32)
    mlp = Job("MLP, 100 clients", "mlp", (1, 28, 28), 100, 100, 100, 10)
    if quick:
        pfl = replace(pfl, name="pfl's, cut", clients=100, cohort=5, test=100, every=2)
        resnet = replace(resnet, name="ResNet-18, 2 clients", clients=2, cohort=2, samples=32)
    chosen = [replace(pfl, engine="auto")]
    for job in (pfl, resnet, mlp):
        chosen += [job, replace(job, engine="vectorized"), replace(job, precision="bf16")]
    return chosen if device.type == "cuda" or quick else chosen[:1]


def measure(job: Job, device: torch.device, limit_s: float) -> dict[str, Any]:
    """Measures whole numbers of `job.every` rounds for about `limit_s`, after as many."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Samples:
        x = torch.randn(count, *job.shape, generator=generator)
        return Samples(x, torch.randint(0, 10, (count,), generator=generator)).to(device)

    train, test = draw(job.clients * job.samples), draw(job.test)
    clients = np.split(np.arange(len(train.y)), job.clients)
    local = LocalTraining(lr=0.05, epochs=1, batch_size=job.batch, precision=job.precision)
    network, federation = (
        build(job.model, job.shape, 10),
        Federation.from_indices(train, clients, test),
    )
    plan = Plan(network, local, PFL_ROUNDS, job.cohort, 0, job.every, engine=job.engine)
    simulated, on_gpu = simulate("fedavg", {}, federation, plan), device.type == "cuda"
    rounds, count, seconds = simulated.rounds(), 0, 0.0

    def several() -> None:
        deque(islice(rounds, job.every), 0)
        if on_gpu:
            torch.cuda.synchronize()

    several()  # warms up
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with utilisation(device) as percent:
        began = time.perf_counter()
        while seconds < limit_s and count < PFL_ROUNDS / 2:
            several()
            count, seconds = count + job.every, time.perf_counter() - began
    steps = count * job.cohort * -(-job.samples // job.batch)
    return {
        "asked": job.engine,
        "engine": simulated.engine_name,
        "precision": job.precision,
        "rounds": count,
        "rounds_per_s": count / seconds,
        "steps_per_s": steps / seconds,
        "s_for_1500_rounds": PFL_ROUNDS * seconds / count,
        "peak_mb": torch.cuda.max_memory_allocated() / 1e6 if on_gpu else None,
        "busy_percent": float(np.mean(percent)) if percent else None,
    }


@contextmanager
def utilisation(device: torch.device) -> Iterator[list[float]]:
    """Fills the list, at the end, with nvidia-smi's percentages; none on a CPU or without it."""
    percent: list[float] = []
    smi = shutil.which("nvidia-smi") if device.type == "cuda" else None
    if smi is None:
        yield percent
        return
    asked = [
        smi,
        f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}",
        *("--query-gpu=utilization.gpu", "--format=csv,noheader", "--loop-ms=200"),
    ]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            yield percent
        finally:
            process.terminate()
        percent += [float(word) for word in process.communicate()[0].split() if word.isdigit()]


# The report
# --------------------------------------------------------------------------------------------------


def run(device: torch.device, quick: bool, to: Path) -> dict[str, Any]:
    """Checks and measures, and writes gpu.json and gpu.md again after each job and failure.

    A failure is a line of the report, and the next work begins.
    """
    torch.set_num_threads(1)
    began = time.perf_counter()
    report: dict[str, Any] = {
        "facts": {
            "device": device.type,
            "torch": str(torch.__version__),
            **facts(device),
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "quick": quick,
        "rows": [],
    }
    measures: list[tuple[str, str, Call]] = [
        ("measured", job.name, partial(measure, job, device, 1.0 if quick else JOB_S))
        for job in jobs(device, quick)
    ]
    to.mkdir(parents=True, exist_ok=True)
    for what, name, work in (*checks(device, quick), *measures):
        started = time.perf_counter() - began
        row: dict[str, Any] = {"what": what, "name": name, "outcome": "left out"}
        if started < (BUDGET_S if what == "measured" else CHECKS_S):
            row |= attempted(work)
        report["seconds"] = time.perf_counter() - began
        row["seconds"] = report["seconds"] - started
        report["rows"].append(row)
        if what == "measured" or row["outcome"] == "failed":
            write_whole(to / "gpu.json", json.dumps(report, indent=1) + "\n")
            write_whole(to / "gpu.md", page(report))
    return report


def attempted(work: Call) -> dict[str, Any]:
    """Returns the outcome of a check, or a measurement."""
    try:
        return {"outcome": "passed", **(work() or {})}
    except Exception as error:  # any defect of a kernel, a driver or of ours
        return {
            "outcome": "skipped" if isinstance(error, ModuleNotFoundError) else "failed",
            "problem": one_line(f"{type(error).__name__}: {' '.join(str(error).split())}", 300),
        }


def page(report: Mapping[str, Any]) -> str:
    """Returns the report in Markdown."""
    rows, groups = report["rows"], dict[str, Counter[str]]()
    for row in rows:
        groups.setdefault(row["what"], Counter())[row["outcome"]] += 1
        groups[row["what"]]["seconds"] += row["seconds"]
    outcomes = ("passed", "failed", "skipped", "left out", "seconds")
    lines = [
        "# On a GPU\n",
        f"{'; '.join(map(' '.join, report['facts'].items()))}. {report['seconds']:.0f} s in all. "
        f"Command: `python -m benchmarks gpu{' --quick' * report['quick']}`.\n",
        *_table(
            ("check", *outcomes), [(what, *map(n.get, outcomes)) for what, n in groups.items()]
        ),
        "",
        *(
            f"- {row['outcome']}: {row['what']}, {row['name']}: {row['problem']}\n"
            for row in rows
            if "problem" in row
        ),
        "FedAvg on random data. Steps are those of all clients.\n",
        *_table([*COLUMNS.values()], [[*map(row.get, COLUMNS)] for row in rows if "rounds" in row]),
    ]
    return "\n".join(lines) + "\n"


COLUMNS = {
    "name": "job",
    "asked": "`engine`",
    "engine": "ran",
    "precision": "precision",
    "rounds": "rounds",
    "rounds_per_s": "rounds/s",
    "steps_per_s": "steps/s",
    "s_for_1500_rounds": "1,500 rounds, s",
    "peak_mb": "peak, MB",
    "busy_percent": "GPU busy, %",
}


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [f"| {' | '.join(map(_cell, row))} |" for row in (head, ["---"] * len(head), *rows)]


def _cell(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the report; prints its page. Returns 1 if a check has failed, 2 without the device."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu to rehearse")
    parser.add_argument("--quick", action="store_true", help="small jobs of a second each")
    parser.add_argument("--to", type=Path, default=RESULTS, help="folder of gpu.json and gpu.md")
    asked = parser.parse_args(arguments)
    try:
        be_deterministic()
        device = resolve_device(asked.device, allowed="cpu")
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    report = run(device, asked.quick, asked.to)
    sys.stdout.write(page(report))
    return int(any(row["outcome"] == "failed" for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
