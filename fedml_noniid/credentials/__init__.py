"""Certificates for mutual TLS: of the processes of a deployment, and of a cluster."""

from fedml_noniid import extras

extras.require(extras.SILO, "cryptography")
