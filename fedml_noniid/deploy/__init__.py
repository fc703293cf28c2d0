"""FedML cross-silo. Only this code imports fedml (11 s, 1 GB), in `host`.

`server_run` and `silo` have both halves of a run without FedML, `host` the FedML trainer and
aggregator, `wire` the messages. `silo_server`, `silo_client` and `stream` are the transport. `pair`
makes a pair for any recipe. `settings` reads the YAML file.
"""

from fedml_noniid import extras

extras.require(extras.SILO)
