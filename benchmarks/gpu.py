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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import numpy as np
import torch

from fedml_noniid.contract.checks import close_together
from fedml_noniid.contract.federation import takes_norms
from fedml_noniid.pipelines.experiment.progress import Display
from fedml_noniid.pipelines.experiment.workers import side_by_side
from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.errors import UserError, one_line
from fedml_noniid.plugins.core.trees import Params, tree_map
from fedml_noniid.plugins.data.files import write_whole
from fedml_noniid.plugins.engines.checkpoint import Checkpoints
from fedml_noniid.plugins.engines.device import be_deterministic, facts, resolve_device
from fedml_noniid.plugins.engines.federation import Federation
from fedml_noniid.plugins.engines.hashing import model_tensors, weights_sha256
from fedml_noniid.plugins.engines.plan import LocalTraining, Plan, initial_model
from fedml_noniid.plugins.engines.run import Checkpointing, Outcome
from fedml_noniid.plugins.engines.simulation import ENGINES, Simulation
from fedml_noniid.plugins.models import build
from fedml_noniid.plugins.models.model import Model
from fedml_noniid.plugins.simulate import simulate
from tests.recipe_table import ALONE, EVERY

RESULTS = Path(__file__).parents[1] / "docs" / "results"
BUDGET_S, CHECKS_S, SLICE_S, LEAST_S = 220.0, 100.0, 15.0, 2.0  # all; checks; of one measurement
PFL_ROUNDS = 1500
SIZES = (5, 12, 23)  # samples of the clients: with batches of 8, 1 to 3 steps, the last ones short
CLASSES = 3
Settings = Mapping[str, Mapping[str, object]]


def digest(outcome: Outcome) -> str:
    """Returns the SHA-256 of the weights."""
    return weights_sha256(model_tensors(outcome.params, outcome.evaluated, outcome.buffers))


# The checks
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One network and engine that a check trains."""

    network: Model
    engine: str = "sequential"
    recipe: str = "scaffold"  # whose clients keep a memory
    rounds: int = 3
    side: int = 12  # of images
    augment: bool = False
    lr: float = 0.02
    precision: str = "float32"
    # of the update, relative to its norm; a ReLU whose input is almost 0 may flip
    tolerance: float = 1e-3


def cases() -> dict[str, Case]:
    """Returns the networks of the checks, in both engines where both take them."""
    image = (3, 12, 12)
    cnn = build("cnn", image, CLASSES, {"channels": 4, "hidden": 16, "batch_norm": True})
    words = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    lstm = build("lstm", (7,), CLASSES, {"hidden": 8}, words)
    every = {"CNN": Case(cnn), "LSTM": Case(lstm, lr=0.5)}
    every |= {"CNN, augmented": Case(cnn, augment=True)}
    resnet = build("resnet18", (3, 8, 8), CLASSES)
    every["ResNet-18"] = Case(resnet, "sequential", "fedavg", 1, 8, lr=0.0005, tolerance=0.1)
    both = [(name, case) for name, case in every.items() if case.network.vmappable]
    return every | {f"{name}, side by side": replace(c, engine="vectorized") for name, c in both}


def case_run(
    case: Case,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    checkpoint: Path | None = None,
) -> Simulation:
    """Makes a simulation of a case, before its first round."""
    rng = np.random.default_rng(0)
    n, tokens = sum(SIZES), case.network.tokens
    y = torch.from_numpy(rng.integers(0, CLASSES, n + 8))
    if tokens:
        x = torch.from_numpy(rng.integers(2, 20, (n + 8, 7))).to(dtype)
    else:
        x = torch.from_numpy(
            rng.normal(size=(n + 8, 3, case.side, case.side)).astype(np.float32)
        ).to(dtype)
        x += 0.3 * y[:, None, None, None]
    samples = Samples(x.to(device), y.to(device))
    clients = np.split(np.arange(n), np.cumsum(SIZES)[:-1])
    test = Samples(samples.x[n:], samples.y[n:])
    local = LocalTraining(
        lr=case.lr, epochs=1, batch_size=8, augment=case.augment, precision=case.precision
    )
    plan = Plan(case.network, local, case.rounds, 2, 0, engine=case.engine)
    callbacks = [Checkpointing(Checkpoints(checkpoint, ""))] if checkpoint else []
    federation = Federation.of(Samples(samples.x[:n], samples.y[:n]), clients, test)
    return simulate(case.recipe, {}, federation, plan, callbacks)


def check_repeats(case: Case, device: torch.device) -> None:
    """Raises AssertionError if a second run has other bits."""
    first, second = (digest(case_run(case, device).run()) for _ in range(2))
    assert first == second, f"{first[:12]} and then {second[:12]}"


def check_agrees(case: Case, device: torch.device) -> None:
    """Raises AssertionError unless float32 is near float64, one by one, on the CPU."""
    exact = replace(case, engine="sequential", precision="float32")
    cpu = torch.device("cpu")
    wanted, outcome = case_run(exact, cpu, torch.float64).run(), case_run(case, device).run()
    trees = [(outcome.params, wanted.params), (outcome.buffers, wanted.buffers)]
    for tree, reference in trees:
        assert all(leaf.device.type == device.type for leaf in tree.values())
        close_together(_double(tree), reference, 1e-4)
    start, _ = initial_model(case.network, 0, torch.zeros((), dtype=torch.float64))
    ours, theirs = (_vector(tree) - _vector(start) for tree in (outcome.params, wanted.params))
    error = ((ours - theirs).norm() / theirs.norm()).item()
    assert error <= case.tolerance, f"the update's error is {error:.2g} of its norm"


def check_resumes(case: Case, device: torch.device) -> None:
    """Raises AssertionError if a run that ends after a round goes on to other bits."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        next(case_run(case, device, checkpoint=path).rounds())
        resumed = case_run(case, device, checkpoint=path)
        assert resumed.start_round == 1
        assert digest(resumed.run()) == digest(case_run(case, device).run()), "other bits"


def check_processes(case: str, device: torch.device) -> None:
    """Raises AssertionError if two processes at once have other bits than this one."""
    work = partial(_in_process, case, device)
    with Display("processes", 2, bars=False, lines=False) as display:
        found = dict(side_by_side(work, [0, 1], 2, display, device.type == "cuda"))
    assert {*found.values()} == {digest(case_run(cases()[case], device).run())}, "other bits"


def _in_process(case: str, device: torch.device, _: int) -> str:
    be_deterministic()
    torch.set_num_threads(1)
    return digest(case_run(cases()[case], device).run())


def check_recipe(recipe: str, settings: Settings, device: torch.device, engine: str) -> None:
    """Raises AssertionError unless one round in float64 has the numbers of the CPU."""
    wanted = recipe_run(recipe, settings, torch.device("cpu"), "sequential")
    outcome = recipe_run(recipe, settings, device, engine)
    close_together(tree_map(torch.Tensor.cpu, outcome.params), wanted.params, 1e-6)
    assert outcome.rows[0]["bytes_up"] == wanted.rows[0]["bytes_up"]


def recipe_run(recipe: str, settings: Settings, device: torch.device, engine: str) -> Outcome:
    """Runs one round of four ragged clients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 1, 2, 4, generator=generator, dtype=torch.float64).to(device)
    y = torch.randint(0, 3, (60,), generator=generator).to(device)
    options = {"hidden": 4, "batch_norm": takes_norms(recipe, settings)}
    network = build("mlp", (1, 2, 4), CLASSES, options)
    clients = np.split(np.arange(41), (5, 12, 30))
    test, public = Samples(x[41:50], y[41:50]), Samples(x[50:], y[50:])
    federation = Federation.of(Samples(x, y), clients, test, public=public)
    plan = Plan(network, LocalTraining(lr=0.1, epochs=1, batch_size=4), 1, 3, 0, engine=engine)
    return simulate(recipe, settings, federation, plan).run()


def check_silos(recipe: str, settings: Settings, device: torch.device) -> None:
    """Raises AssertionError unless three silos on the device have the simulation's numbers.

    UserError without the packages of a silo.
    """
    from fedml_noniid.contract import silos
    from fedml_noniid.plugins.silo.server_run import ServerRun
    from fedml_noniid.plugins.silo.settings import DeviceArgs

    terms = silos.terms(recipe, settings, batch_norm=True)
    terms = replace(terms, device=DeviceArgs(using_gpu=device.type == "cuda"))
    outcome = silos.talk(ServerRun(terms, silos.shards_of()[0]), silos.silos_of(terms))
    wanted = silos.simulated(recipe, settings, True)
    close_together(outcome.params, wanted.params, 1e-3)


def _double(tree: Params) -> Params:
    return {key: leaf.cpu().to(torch.float64) for key, leaf in tree.items()}


def _vector(tree: Params) -> torch.Tensor:
    return torch.cat([leaf.flatten() for _, leaf in sorted(_double(tree).items())])


def checks(device: torch.device, quick: bool) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Yields (what is checked, of what, the check)."""
    every = cases()
    for name, case in every.items():
        yield "two runs have one SHA-256", name, partial(check_repeats, case, device)
        yield "near float64 on the CPU (weights 1e-4)", name, partial(check_agrees, case, device)
    for name in ("CNN", "CNN, side by side", "LSTM"):
        yield (
            "a run that ends goes on to the same bits",
            name,
            partial(check_resumes, every[name], device),
        )
    yield "two processes at once have one SHA-256", "CNN", partial(check_processes, "CNN", device)
    recipe = "scaffold+ccn"
    yield (
        "three silos have the simulation's numbers",
        recipe,
        partial(check_silos, recipe, {}, device),
    )
    for label, (recipe, settings) in (ALONE if quick else EVERY).items():
        for engine in ENGINES[1:]:
            yield (
                "a round of every recipe has the CPU's numbers",
                f"{label}, {engine}",
                partial(check_recipe, recipe, settings, device, engine),
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
    engine: str
    precision: str = "float32"
    test: int = 100
    every: int = 1  # rounds from one evaluation to the next


def jobs(device: torch.device, quick: bool) -> list[Job]:
    """Returns what is measured; the first is pfl's CIFAR-10 benchmark (arXiv 2404.06430)."""
    pfl = Job("pfl's CIFAR-10 benchmark", "pfl_cnn", (3, 32, 32), 1000, 50, 50, 10, "auto")
    pfl = replace(pfl, test=10_000, every=10)
    resnet = Job("ResNet-18, 10 clients", "resnet18", (3, 32, 32), 10, 10, 64, 32, "sequential")
    mlp = Job("MLP, 100 clients", "mlp", (1, 28, 28), 100, 100, 100, 10, "sequential")
    if quick:
        pfl = replace(pfl, name=f"{pfl.name}, cut", clients=100, cohort=5, test=100, every=2)
        resnet = replace(resnet, name="ResNet-18, 2 clients", clients=2, cohort=2, samples=32)
    found = [pfl]
    for job in (pfl, resnet, mlp):
        found += [replace(job, engine=engine) for engine in ("sequential", "vectorized")]
        found.append(replace(job, engine="sequential", precision="bf16"))
    return found if device.type == "cuda" or quick else found[:1]


def measure(job: Job, device: torch.device, limit_s: float) -> dict[str, Any]:
    """Measures whole numbers of `job.every` rounds for about `limit_s`, after as many."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Samples:
        x = torch.randn(count, *job.shape, generator=generator)
        return Samples(x.to(device), torch.randint(0, 10, (count,), generator=generator).to(device))

    train, test = draw(job.clients * job.samples), draw(job.test)
    clients = np.split(np.arange(len(train.y)), job.clients)
    local = LocalTraining(lr=0.05, epochs=1, batch_size=job.batch, precision=job.precision)
    network = build(job.model, job.shape, 10)
    plan = Plan(network, local, PFL_ROUNDS, job.cohort, 0, job.every, engine=job.engine)
    simulation = simulate("fedavg", {}, Federation.of(train, clients, test), plan)
    rounds, count = simulation.rounds(), 0
    on_gpu = device.type == "cuda"

    def several() -> None:
        for _ in range(job.every):
            next(rounds)
        if on_gpu:
            torch.cuda.synchronize()

    several()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with utilisation(device) as percent:
        began = time.perf_counter()
        while (seconds := time.perf_counter() - began) < limit_s and count < PFL_ROUNDS / 2:
            several()
            count += job.every
    return {
        "job": job.name,
        "asked": job.engine,
        "engine": simulation.engine_name,
        "precision": job.precision,
        "rounds": count,
        "seconds": seconds,
        "rounds_per_s": count / seconds,
        "steps_per_s": count * job.cohort * -(-job.samples // job.batch) / seconds,
        "s_for_1500_rounds": PFL_ROUNDS * seconds / count,
        "peak_mb": torch.cuda.max_memory_allocated() / 1e6 if on_gpu else None,
        "utilisation_percent": float(np.mean(percent)) if percent else None,
    }


@contextmanager
def utilisation(device: torch.device) -> Iterator[list[float]]:
    """Fills the list, at the end, with nvidia-smi's percentages; none on a CPU or without it."""
    percent: list[float] = []
    smi = shutil.which("nvidia-smi") if device.type == "cuda" else None
    if smi is None:
        yield percent
        return
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    asked = [smi, gpu, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms=200"]
    with TemporaryFile("w+") as file:
        process = subprocess.Popen(asked, stdout=file)
        try:
            yield percent
        finally:
            process.terminate()
            process.wait()
        file.seek(0)
        percent += [float(line) for line in file.read().split() if line.isdecimal()]


# The report
# --------------------------------------------------------------------------------------------------


class Report:
    """Collects the results, and writes them after each: a killed command leaves what it has."""

    def __init__(self, device: torch.device, quick: bool, to: Path) -> None:
        self.began, self.to = time.perf_counter(), to
        self.facts = {"device": device.type, "torch": str(torch.__version__), **facts(device)}
        self.facts |= {"python": platform.python_version(), "numpy": np.__version__}
        self.facts |= {"quick": str(quick).lower()}
        self.checks: list[dict[str, Any]] = []
        self.measured: list[dict[str, Any]] = []
        self.left_out: list[str] = []

    @property
    def seconds(self) -> float:
        """Seconds since the command began."""
        return time.perf_counter() - self.began

    def check(self, what: str, of: str, check: Callable[[], None]) -> None:
        """Runs one check. A failure is a row, and the next check runs."""
        began, problem, skipped = time.perf_counter(), "", False
        try:
            check()
        except Exception as error:  # any defect of a kernel, a driver or of ours
            skipped = isinstance(error, UserError) and "is not installed" in str(error)
            problem = one_line(f"{type(error).__name__}: {' '.join(str(error).split())}", 300)
        seconds = time.perf_counter() - began
        row = {"what": what, "of": of, "problem": problem, "skipped": skipped, "seconds": seconds}
        self.checks.append(row)

    def write(self) -> None:
        """Writes gpu.json and gpu.md."""
        self.to.mkdir(parents=True, exist_ok=True)
        content = {key: value for key, value in vars(self).items() if key not in ("to", "began")}
        content |= {"seconds": self.seconds}
        write_whole(self.to / "gpu.json", json.dumps(content, indent=1) + "\n")
        write_whole(self.to / "gpu.md", self.page())

    def page(self) -> str:
        """Returns the page."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in self.checks:
            groups.setdefault(row["what"], []).append(row)
        rows = [
            [
                what,
                sum(not row["problem"] for row in rows),
                len(rows),
                _shown(float(sum(row["seconds"] for row in rows))),
            ]
            for what, rows in groups.items()
        ]
        problems = [
            f"- {'skipped' if row['skipped'] else 'FAILED'}: {row['what']}, {row['of']}: "
            f"{row['problem']}"
            for row in self.checks
            if row["problem"]
        ]
        measured = [[_shown(row[key]) for key in COLUMNS] for row in self.measured]
        described = "; ".join(f"{key} {value}" for key, value in self.facts.items())
        return "\n".join(
            [
                "# On a GPU\n",
                f"{described}. {self.seconds:.0f} s in all. Command: `python -m benchmarks gpu`.\n",
                *_table(("check", "passed", "of", "s"), rows),
                "",
                *problems,
                *["" for _ in problems[:1]],
                "FedAvg on random data. Steps are those of all clients.\n",
                *_table([*COLUMNS.values()], measured),
                "",
                *(f"- Left out, as the time was over: {what}" for what in self.left_out),
            ]
        )


COLUMNS = {
    "job": "job",
    "asked": "`engine`",
    "engine": "ran",
    "precision": "precision",
    "rounds": "rounds",
    "rounds_per_s": "rounds/s",
    "steps_per_s": "steps/s",
    "s_for_1500_rounds": "1,500 rounds, s",
    "peak_mb": "peak, MB",
    "utilisation_percent": "GPU busy, %",
}


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]


def run(device: torch.device, quick: bool, to: Path) -> Report:
    """Checks and measures within BUDGET_S, and writes the report to a folder."""
    torch.set_num_threads(1)
    report = Report(device, quick, to)
    for what, of, check in checks(device, quick):
        if report.seconds < CHECKS_S:
            report.check(what, of, check)
        else:
            report.left_out.append(f"{what}, {of}")
    report.write()
    todo = jobs(device, quick)
    for k, job in enumerate(todo):
        left = (BUDGET_S - report.seconds) / (len(todo) - k)
        name = f"{job.name}, {job.engine}, {job.precision}"
        if left < LEAST_S:
            report.left_out.append(name)
            continue
        try:
            report.measured.append(measure(job, device, 1.0 if quick else min(left / 2, SLICE_S)))
        except RuntimeError as error:  # such as no memory
            report.checks.append({"what": "measured", "of": name, "problem": one_line(str(error))})
        report.write()
    report.write()
    return report


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
    sys.stdout.write(report.page())
    return int(any(row["problem"] and not row["skipped"] for row in report.checks))


if __name__ == "__main__":
    sys.exit(main())
