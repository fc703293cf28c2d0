"""Stage train: one recipe on one partition with one seed -> runs/<scenario>-<recipe>-<seed>/.

A kill at any moment loses at most the rounds since the last checkpoint, which lies in .resume/ under the item's
fingerprint until the item is done; the MLflow run goes on as well.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil

from safetensors.torch import save

from pipelines import cli, config, progress, tracking
from pipelines.items import Item
from pipelines.provenance import fingerprint_of, git_commit, machine
from plugins.core.component import Public
from plugins.core.errors import UserError
from plugins.data.files import replace_folder, write_whole
from plugins.engines.hashing import model_tensors, weights_sha256
from plugins.engines.record import rounds_csv

log = logging.getLogger(__name__)
ARTIFACTS = ("rounds.csv", "model.safetensors", "recorded.safetensors")
# What reports say of the public split that training sees.
SEEN = {Public.UNLABELLED: "unlabelled", Public.LABELLED: "labelled", Public.TEST_SET: "labelled"}


def train(options: argparse.Namespace) -> None:
    """Runs the item, or what is left of it, and writes its folder."""
    item = Item.load(options.scenario, options.recipe, options.seed)
    fingerprint = fingerprint_of(item)
    resume = config.store() / ".resume" / fingerprint[:16]
    simulation = item.simulation(checkpoint=resume / "checkpoint.safetensors", fingerprint=fingerprint)
    log.info("%s: %s engine (%s)", item.key, simulation.engine_name, simulation.engine_reason)

    leaks = [leak for leak in (item.data.leak, simulation.algorithm.leak) if leak]
    tags = {
        "recipe": item.recipe, "scenario": item.scenario, "seed": str(item.seed), "stage": f"train@{item.key}",
        "data_hash": item.data.checksum, "git_commit": git_commit(), "fingerprint": fingerprint,
        "engine": simulation.engine_name, "device": str(item.device),
        "public": SEEN.get(simulation.algorithm.needs.public, "none"), "leak": "; ".join(leaks) or "none",
        "federated": "no" if simulation.algorithm.needs.pooled else "yes", **machine(item.device),
    }  # fmt: skip
    note = resume / "run_id"
    earlier = note.read_text() if note.exists() else None
    run = tracking.start(config.store(), item.settings.experiment, item.key, item.params(), tags, earlier)
    write_whole(note, run.run_id)
    run.log_rounds(simulation.rows)

    try:
        with progress.rounds(item.key, simulation.start_round, item.settings.train.rounds) as report:
            for row in simulation.rounds():
                report(row)
                # In batches: a call costs as much as a thousand numbers.
                if row["round"] % item.settings.train.checkpoint_every == 0:
                    run.log_rounds(simulation.rows)
    except UserError:
        run.fail()
        raise
    outcome = simulation.outcome
    run.log_rounds(outcome.rows)

    tensors = model_tensors(outcome.params, outcome.evaluated, outcome.buffers)
    last = outcome.rows[-1]
    final = {key: last[key] for key in ("test_accuracy", "test_loss", "validation_accuracy", "validation_loss")}
    record = {
        "scenario": item.scenario, "recipe": item.recipe, "seed": item.seed,
        "composition": item.settings.composition(item.recipe),
        "params": item.params(), "tags": tags, "final": {k: v for k, v in final.items() if v == v},
        "weights_sha256": weights_sha256(tensors), "notes": list(item.data.notes),
    }  # fmt: skip
    run_id = {"run_id": run.run_id, "experiment_id": run.experiment_id, "experiment": item.settings.experiment}
    folder = config.root() / "runs" / item.key
    replace_folder(
        folder,
        {
            "rounds.csv": rounds_csv(outcome.rows).encode(),
            "model.safetensors": save(tensors),
            "run.json": (json.dumps(record, indent=2) + "\n").encode(),
            "run_id.json": (json.dumps(run_id, indent=2) + "\n").encode(),
            "recorded.safetensors": save(outcome.tensors),
        },
    )
    run.finish(final=final, artifacts=[folder / name for name in ARTIFACTS])
    shutil.rmtree(resume)


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    return cli.run(train, __doc__, arguments, "scenario", "recipe", "seed")
