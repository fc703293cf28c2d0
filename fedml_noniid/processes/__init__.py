"""The processes of a deployment: `launch` starts one, under the policy of its site; `loopback`
starts all on one machine."""

from fedml_noniid import extras

extras.require(extras.SILO)
