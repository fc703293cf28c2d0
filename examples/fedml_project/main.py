"""A FedML cross-silo project that runs a recipe of fedml_noniid by its pair.

Each process runs `python main.py --cf fedml_config.yaml --rank RANK --role ROLE`.
"""

from __future__ import annotations

from pathlib import Path

import fedml
import torch
from net import Net
from silo_data import loader

from fedml_noniid.data.shards import of_loaders
from fedml_noniid.deploy.pair import make_pair
from fedml_noniid.deploy.results import write_model

CLASSES = 10


def main() -> None:
    args = fedml.init()
    args.rank, silos = int(args.rank), int(args.client_num_in_total)
    torch.set_num_threads(args.threads)
    device = fedml.device.get_device(args)
    part, data = loader(args.rank, silos, args.batch_size)
    n, silo = len(data.dataset), args.rank - 1
    net = Net(CLASSES, seed=args.random_seed)

    # The ten lines: a pair of classes in place of a trainer and an aggregator of your own.
    trainer_class, aggregator_class = make_pair(args.recipe)
    shard = of_loaders(args.rank, silos, CLASSES, **{part: data})
    if args.rank:
        of_silo = (n, 0, None, None, {silo: n}, {silo: data}, None, CLASSES)
        fedml.FedMLRunner(args, device, of_silo, net, trainer_class(net, args, shard))
    else:
        aggregator = aggregator_class(net, args, shard)
        of_server = (0, n, None, data, {}, {}, None, CLASSES)
        fedml.FedMLRunner(args, device, of_server, net, None, aggregator)
        write_model(Path("model.safetensors"), aggregator.server_run.loop.outcome)


if __name__ == "__main__":
    main()
