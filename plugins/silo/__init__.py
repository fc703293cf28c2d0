"""FedML cross-silo. The only code that imports fedml, and only `host` and `launch` do (11 s, 1 GB).

`conversation` is both halves of a run without FedML, `wire` what travels, `host` the FedML trainer and aggregator,
`pair` makes a pair for any recipe, `transport` keeps FedML's gRPC in bounds, `launch` starts one process, `loopback`
all of them on one machine, `shards` writes each silo's own data file, `settings` reads the YAML file.
"""
