"""The same run in one process: prints the SHA-256 of the weights of both."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from net import Net
from safetensors import safe_open
from silo_data import TEST, arrays, silos_of

import fedml_noniid as nd


def main() -> None:
    config = yaml.safe_load(Path("fedml_config.yaml").read_text())
    train, seed = config["train_args"], config["common_args"]["random_seed"]
    x, y = arrays()
    n = len(y) - TEST
    data = nd.from_arrays(x[:n], y[:n], x[n:], y[n:], normalise="none")
    split = nd.partition(data, indices=silos_of(y[:n], train["client_num_in_total"]))
    result = nd.run(
        train["recipe"],
        split,
        model=Net(10, seed=seed),
        engine="sequential",
        seeds=[seed],
        rounds=train.get("rounds") or train["comm_round"],
        lr=train["learning_rate"],
        **{key: train[key] for key in ("epochs", "batch_size")},
        **train["settings"],
    )
    sys.stdout.write(f"simulation {result.sha256[seed]}\n")
    if Path("model.safetensors").exists():
        with safe_open("model.safetensors", framework="pt") as file:
            sys.stdout.write(f"FedML      {file.metadata()['weights_sha256']}\n")


if __name__ == "__main__":
    main()
