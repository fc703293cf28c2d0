"""FedML cross-silo. Only this code imports fedml (11 s, 1 GB): `host`, `launch` and `transport`.

`server_run` has both halves of a run without FedML, `wire` the messages, `host` the FedML trainer
and aggregator. `pair` makes a pair for any recipe. `transport` keeps FedML's gRPC in bounds.
`launch` starts one process, `loopback` starts all on one machine. `shards` writes each silo's own
data file, `settings` reads the YAML file.
"""

from fedml_noniid.plugins import extras

extras.require(extras.DEPLOY)
