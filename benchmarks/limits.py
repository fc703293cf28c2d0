"""Measures cross-silo runs on this machine: equal weights, many silos, idle processes, connections
to the outside.

    python -m benchmarks.limits

- Every paper's recipe and a composition of four, with four silos: SHA-256 of the weights against
  the simulation.
- Twelve silos, ten rounds: seconds.
- A server and two silos that wait for a third: CPU time per second.
- All of this once more in a network namespace that has nothing but a loopback device: packets
  without a route.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.chaos import parts
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.silo import exit_codes, loopback, settings, silo_client

RECIPES = (
    "fnr",
    "fednnnn",
    "ccn",
    "fednlr",
    "rfedavg",
    "rfedavg_plus",
    "scaffold+fnr+rfedavg_plus+ccn",
)
SILOS, MANY, ROUNDS = 4, 12, 10
IDLE_S = 20.0


def deployment(recipe: str, silos: int, rounds: int) -> settings.Deployment:
    """The digits on an MLP."""
    train = {
        "recipe": recipe,
        "rounds": rounds,
        "client_num_in_total": silos,
        "client_num_per_round": silos,
    }
    return settings.check({"train_args": train}, "limits")


def equal(folder: Path) -> list[str]:
    """A line per recipe. Raises UserError if weights differ."""
    found = []
    for recipe in RECIPES:
        terms, data = deployment(recipe, SILOS, 3), parts(0)
        deployed, simulated = loopback.run(terms, data, folder), loopback.simulate(terms, data)
        if deployed != simulated:
            raise UserError(
                f"{recipe}: the silos' weights {deployed} are not the simulation's {simulated}"
            )
        found.append(
            f"{recipe}, {SILOS} silos: SHA-256 {deployed[:16]}... on the silos and in the "
            "simulation"
        )
    return found


def many(folder: Path) -> str:
    """Twelve silos."""
    terms, data = deployment("scaffold", MANY, ROUNDS), parts(0, MANY)
    began = time.monotonic()
    deployed = loopback.run(terms, data, folder)
    seconds = time.monotonic() - began
    same = "same" if deployed == loopback.simulate(terms, data) else "OTHER"
    return (
        f"{MANY} silos, {ROUNDS} rounds on {os.cpu_count()} cores: {seconds:.1f} s, {same} weights"
    )


def idle(folder: Path) -> str:
    """CPU time of processes that wait."""
    terms, data = deployment("scaffold", 3, 2), parts(0)
    with loopback.Processes(terms, data, folder) as processes:
        for rank in range(3):
            processes.start(rank)
        there: list[int] = []
        while there != [0, 1]:
            time.sleep(0.2)
            try:
                there = silo_client.status(
                    processes.deployment.comm_args, processes.deployment.kit(0)
                )["there"]
            except exit_codes.LostError:
                continue
        time.sleep(2.0)
        watched = [psutil.Process(process.pid) for process in processes.running.values()]
        before = [sum(one.cpu_times()[:2]) for one in watched]
        time.sleep(IDLE_S)
        used = [
            100 * (sum(one.cpu_times()[:2]) - was) / IDLE_S
            for one, was in zip(watched, before, strict=True)
        ]
        ports = [sum(at.status == "LISTEN" for at in one.net_connections()) for one in watched]
    return (
        f"idle: server {used[0]:.2f} %, silos {used[1]:.2f} % and {used[2]:.2f} % of a core; "
        "listening ports "
        f"{ports[0]}, {ports[1]}, {ports[2]}"
    )


def without_route() -> int:
    """Packets of this network namespace that had nowhere to go."""
    names, values = (
        line.split()
        for line in Path("/proc/net/snmp").read_text().splitlines()
        if line.startswith("Ip:")
    )
    return int(values[names.index("OutNoRoutes")])


def without_network() -> str:
    """The rest of this file in a separate network namespace."""
    command = f"ip link set lo up && {sys.executable} -m benchmarks.limits --inside"
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"network namespace: not measured ({' '.join(done.stderr.split())[-200:]})"
    return done.stdout.splitlines()[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.limits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            if options.inside:
                before = without_route()
                ran = equal(Path(folder))
                line = (
                    f"network namespace: {len(ran)} runs with same weights, "
                    f"{without_route() - before} packets outwards"
                )
                sys.stdout.write(line + "\n")
                return 0
            lines = [
                *equal(Path(folder)),
                many(Path(folder)),
                idle(Path(folder)),
                without_network(),
            ]
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
