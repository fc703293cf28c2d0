"""Runs items on several machines: dask.distributed is the executor. The only room that imports it.

dask runs what it is sent, so a cluster has a CA of its own and is for machines of one owner. It
never links silos.
"""

from fedml_noniid import extras

extras.require(extras.CLUSTER)
