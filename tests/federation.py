"""The small federation of the contract's checks, under the name that the tests know it by."""

from __future__ import annotations

from fedml_noniid.contract.federation import N_CLASSES as N_CLASSES
from fedml_noniid.contract.federation import ROUNDS as ROUNDS
from fedml_noniid.contract.federation import SIZES as SIZES
from fedml_noniid.contract.federation import Federation as Federation
from fedml_noniid.contract.federation import equal as equal
from fedml_noniid.contract.federation import equal_models as equal_models
from fedml_noniid.contract.federation import federation as federation
from fedml_noniid.contract.federation import images as images
from fedml_noniid.contract.federation import network as network
from fedml_noniid.contract.federation import run as run
from fedml_noniid.contract.federation import simulation as simulation
from fedml_noniid.contract.federation import takes_norms as takes_norms
