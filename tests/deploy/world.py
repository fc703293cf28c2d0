"""The silos of the contract's checks, under the name that the tests know them by."""

from __future__ import annotations

from fedml_noniid.contract import silos
from fedml_noniid.contract.silos import BATCH as BATCH
from fedml_noniid.contract.silos import CLASSES as CLASSES
from fedml_noniid.contract.silos import EPOCHS as EPOCHS
from fedml_noniid.contract.silos import HIDDEN as HIDDEN
from fedml_noniid.contract.silos import LR as LR
from fedml_noniid.contract.silos import ROUNDS as ROUNDS
from fedml_noniid.contract.silos import SEED as SEED
from fedml_noniid.contract.silos import SIZES as SIZES
from fedml_noniid.contract.silos import SKEWED as SKEWED
from fedml_noniid.contract.silos import TESTS as TESTS
from fedml_noniid.contract.silos import args as args
from fedml_noniid.contract.silos import compare as compare
from fedml_noniid.contract.silos import digest as digest
from fedml_noniid.contract.silos import hosts as hosts
from fedml_noniid.contract.silos import network as network
from fedml_noniid.contract.silos import pair as pair
from fedml_noniid.contract.silos import parts as parts
from fedml_noniid.contract.silos import run as run
from fedml_noniid.contract.silos import shards_of as shards_of
from fedml_noniid.contract.silos import silos_of as silos_of
from fedml_noniid.contract.silos import simulated as simulated
from fedml_noniid.contract.silos import talk as talk
from fedml_noniid.contract.silos import terms as terms
from fedml_noniid.contract.silos import uploads as uploads
from fedml_noniid.deploy.server_run import ServerRun as ServerRun
from fedml_noniid.deploy.settings import Deployment
from tests.recipe_table import PARAMETERS


def deployment(
    recipe: str, rounds: int = ROUNDS, comm: dict | None = None, **train: object
) -> Deployment:
    """A server and three silos with the table's hyper-parameters."""
    methods = {method: PARAMETERS[method] for method in recipe.split("+") if method in PARAMETERS}
    return silos.deployment(recipe, methods, rounds=rounds, comm=comm, **train)
