"""The YAML file of a deployment: FedML's keys in FedML's sections, and a few keys of ours."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from fedml_noniid.plugins import recipes
from fedml_noniid.plugins.core.algorithm import Algorithm
from fedml_noniid.plugins.core.component import Public
from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.errors import UserError, located
from fedml_noniid.plugins.core.options import (
    Count,
    CountOrNone,
    NonNegative,
    Positive,
    Range,
    Section,
    Seed,
    Share,
    validated,
)
from fedml_noniid.plugins.core.trees import Params, Tree
from fedml_noniid.plugins.data.yaml_files import read_yaml
from fedml_noniid.plugins.engines import streaming
from fedml_noniid.plugins.engines.callbacks import Callback
from fedml_noniid.plugins.engines.hashing import weights_sha256
from fedml_noniid.plugins.engines.local_training import LearningRate, Optimizer
from fedml_noniid.plugins.engines.personal import split_personal
from fedml_noniid.plugins.engines.plan import Plan, initial_model
from fedml_noniid.plugins.engines.run_settings import RunSettings
from fedml_noniid.plugins.models import described
from fedml_noniid.plugins.models.model import Model
from fedml_noniid.plugins.models.settings import ModelSettings, build_network
from fedml_noniid.plugins.own_code import UNKNOWN_SOURCE, look_in
from fedml_noniid.plugins.silo import wire


def _template(path: str) -> str:
    if "{rank}" not in path:
        raise UserError(value=path, allowed="a path with {rank}")
    return path


def _address(server: str) -> str:
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(value=server, allowed="host:port, such as 10.0.0.7:8890")
    return server


Template = Annotated[str, AfterValidator(_template)]  # a path of each process


class CommonArgs(Section):
    training_type: Literal["cross_silo"] = "cross_silo"
    scenario: Literal["horizontal"] = "horizontal"
    using_mlops: Literal[False] = False
    random_seed: Seed = 0


class DataArgs(Section):
    dataset: str = "digits"  # its name: some of FedML's defences read it
    shard: Template = "shards/{rank}.safetensors"  # ours: rank 0 is the server


class ModelArgs(ModelSettings):
    model: str = "mlp"  # all other keys are ours


class TrainArgs(RunSettings):
    federated_optimizer: Literal["FedAvg"] = "FedAvg"  # what FedML runs; what we run is `recipe`
    recipe: str = "fedavg"  # ours
    # Ours: method -> hyper-parameter -> value.
    settings: dict[str, dict[str, Any]] = Field(default={})
    rounds: Count = 2  # ours; FedML's comm_round is computed from it
    cohort: CountOrNone = 0  # ours: silos per round, 0 for all
    # Ours: the least silos of a sum that the server may see; 0: it sees each silo's upload.
    secure_sums: CountOrNone = 0
    client_id_list: Literal["[]"] = "[]"  # a list here would give every silo the first id
    client_num_in_total: Count = 3
    client_num_per_round: Count = 3
    epochs: Count = 1
    batch_size: Count = 32
    optimizer: Optimizer = Field(default="sgd", alias="client_optimizer")
    lr: LearningRate = Field(default=0.1, alias="learning_rate")
    # Beside momentum and weight_decay: ours are local_steps, drop_last, augment, precision.
    precision: Literal["float32", "bf16"] = "float32"

    @model_validator(mode="after")
    def _fits(self) -> TrainArgs:
        silos = self.client_num_in_total
        if self.client_num_per_round != silos:
            raise UserError(
                where=("client_num_per_round",),
                value=self.client_num_per_round,
                allowed=f"client_num_in_total = {silos}: every silo is connected; cohort says how "
                "many train in a round",
            )
        if self.cohort > silos:
            raise UserError(
                where=("cohort",), value=self.cohort, allowed=f"0 (all) to {silos} silos"
            )
        if self.secure_sums == 1 or self.secure_sums > (self.cohort or silos):
            raise UserError(
                where=("secure_sums",),
                value=self.secure_sums,
                allowed="0 (the server sees each silo's upload), or 2 to the "
                f"{self.cohort or silos} silos of a round",
            )
        with located("settings"):
            recipes.check_settings(self.recipe, self.settings)
        return self


class ValidationArgs(Section):
    frequency_of_the_test: Literal[1] = 1
    # FedML's assessment of contributions repeats FedAvg's average, whatever the recipe does.
    enable_contribution: Literal[False] = False


class DeviceArgs(Section):
    using_gpu: bool = False  # of every silo; the server computes on the CPU
    threads: Annotated[int, Range(1, 256)] = 1  # ours: of torch; sums depend on it

    @property
    def of_silo(self) -> torch.device:
        """Where a silo computes. UserError if this machine can't."""
        if self.using_gpu and not torch.cuda.is_available():
            raise UserError(
                "device_args.using_gpu = true: this machine has no usable CUDA device; allowed "
                "here: false, on server and all silos"
            )
        return torch.device("cuda" if self.using_gpu else "cpu")


class CommArgs(Section):
    backend: Literal["GRPC"] = "GRPC"
    # All ours.
    # Where the server listens, and where silos find it.
    server: Annotated[str, AfterValidator(_address)] = "127.0.0.1:8890"
    kit: Template = "kits/{rank}"  # certificates of this process
    study: str = "study.yaml"  # what its owner has signed
    policy: str = "policy.yaml"  # of a silo: which studies it takes part in
    replay_mb: CountOrNone = 1024  # the most that a silo keeps for `noniid audit replay`
    quorum: CountOrNone = 0  # answers without which an exchange can't end; 0: of all that are asked
    # Seconds that an exchange waits for more answers than the quorum.
    deadline_s: Positive = 600.0
    # Seconds that an exchange waits for its quorum; then the run ends.
    patience_s: Positive = 3600.0
    gone_s: NonNegative = 10.0  # seconds without contact after which a silo is not waited for
    lost_s: Positive = 3600.0  # seconds that a silo looks for the server
    max_samples: Count = 10_000_000  # the most that a silo may say it has

    @property
    def place(self) -> tuple[str, int]:
        """(host, port) of `server`."""
        host, _, port = self.server.rpartition(":")
        return host.strip("[]"), int(port)

    def check_free(self) -> None:
        """UserError unless a server can listen at `server`."""
        try:
            socket.create_server(
                self.place, family=socket.AF_INET6 if ":" in self.place[0] else socket.AF_INET
            ).close()
        except OSError as error:
            raise UserError(
                f"comm_args.server = {self.server!r}: can't listen there "
                f"({error.strerror or error}); choose an "
                "address of this machine and a port that is free"
            ) from None


class DpArgs(Section):
    """FedML's keys for privacy noise."""

    enable_dp: bool = False
    enable_fhe: Literal[False] = False  # FedML 0.8.30 never switches its encryption on
    # FedML's other kinds and mechanisms do nothing here, or give float64.
    dp_solution_type: Literal["ldp", "cdp"] | None = None
    mechanism_type: Literal["gaussian"] | None = None
    epsilon: Share | None = None
    delta: Annotated[float, Range(0, 1, "()")] | None = None
    sensitivity: Positive | None = None
    max_grad_norm: Positive | None = None  # of cdp
    # Ours, of each silo: the most that may leave it, over all runs; see `plugins.privacy.ledger`.
    budget_epsilon: Positive | None = None
    budget_delta: Annotated[float, Range(0, 1, "()")] | None = None

    @model_validator(mode="after")
    def _acts(self) -> DpArgs:
        budget = {"budget_epsilon", "budget_delta"}
        given = self.model_dump(exclude={"enable_dp", "max_grad_norm", *budget})
        missing = [key for key, value in given.items() if value is None]
        if (self.budget_epsilon is None) != (self.budget_delta is None):
            raise UserError("budget_epsilon and budget_delta stand together")
        if self.enable_dp and missing:
            raise UserError(f"enable_dp = true needs {', '.join(missing)}")
        if self.dp_solution_type == "ldp" and self.max_grad_norm is not None:
            raise UserError(
                "max_grad_norm is refused with ldp, which clips to sensitivity / 2; leave it out"
            )
        return self


class TrackingArgs(Section):
    enable_wandb: Literal[False] = False
    output_dir: str = "run"  # ours


class Deployment(Section):
    """The whole file. FedML's sections for attacks and defences are passed on unchanged."""

    common_args: CommonArgs = CommonArgs()
    data_args: DataArgs = DataArgs()
    model_args: ModelArgs = ModelArgs()
    train_args: TrainArgs = TrainArgs()
    validation_args: ValidationArgs = ValidationArgs()
    device_args: DeviceArgs = DeviceArgs()
    comm_args: CommArgs = CommArgs()
    tracking_args: TrackingArgs = TrackingArgs()
    attack_args: dict[str, Any] = Field(default={})
    defense_args: dict[str, Any] = Field(default={})
    dp_args: DpArgs = DpArgs()

    @model_validator(mode="after")
    def _consistent(self) -> Deployment:
        if self.comm_args.quorum > self.silos:
            raise UserError(
                where=("comm_args", "quorum"),
                value=self.comm_args.quorum,
                allowed=f"0 (all) to {self.silos} silos",
            )
        return self

    @property
    def silos(self) -> int:
        """N."""
        return self.train_args.client_num_in_total

    @property
    def cohort(self) -> int:
        """M, silos per round."""
        return self.train_args.cohort or self.silos

    def plan(self, network: Model) -> Plan:
        """How the run trains; `network`: for the samples of this process."""
        train = self.train_args
        return Plan(network, train, train.rounds, self.cohort, self.common_args.random_seed)

    def network(
        self, input_shape: tuple[int, ...], n_classes: int, embedding: Tensor | None
    ) -> Model:
        """The network that the file describes, for samples of this shape; `embedding` [V, width]
        for text only."""
        return build_network(self.model_args, input_shape, n_classes, embedding)

    def shard(self, rank: int) -> Path:
        """The data file of a process."""
        return Path(self.data_args.shard.replace("{rank}", str(rank)))

    def kit(self, rank: int) -> Path:
        """The folder with the certificates of a process."""
        return Path(self.comm_args.kit.replace("{rank}", str(rank)))

    def yaml(self) -> str:
        """The file's text."""
        return yaml.safe_dump(self.model_dump(by_alias=True), sort_keys=False)


ALLOWED = f"allowed keys: {', '.join(Deployment.model_fields)}"  # in the file


def read(path: Path) -> Deployment:
    """The deployment that a file describes.

    UserError, naming file, key, value and what is allowed.
    """
    look_in(path.parent)
    return check(read_yaml(path, ALLOWED, str(path)), str(path))


def check(content: object, where: str) -> Deployment:
    """The deployment of a nested mapping; `where` begins every message."""
    with located(source=where):
        return validated(Deployment, content)


def from_args(args: object, model: str = "") -> Deployment:
    """The deployment that FedML flattened into the attributes of `args`.

    `model`: the name of a module that the user gave in place of a network of `args`.
    """
    content = {
        section: {
            key: getattr(args, key)
            for name, field in type(default).model_fields.items()
            if hasattr(args, key := field.alias or name)
        }
        for section, default in Deployment()
        if isinstance(default, Section)
    }
    # FedML overwrites them by ids that it made up.
    content["train_args"]["client_id_list"] = "[]"
    if model:
        content["model_args"] = {"model": model}
    return check(content, "args")


@dataclass(frozen=True)
class Terms:
    """The facts that server and silos must agree on."""

    algorithm: Algorithm
    plan: Plan
    silos: int  # N
    fingerprint: str
    tests: int  # exchanges in which the silos test models of their own
    device: DeviceArgs = field(default_factory=DeviceArgs)
    # What is not ours -> SHA-256 of its source. The fingerprint has it too.
    code: Mapping[str, str] = field(default_factory=dict)
    secure_sums: int = 0  # the least silos of a sum; 0: the server sees each upload

    @property
    def ranges(self) -> wire.Ranges:
        """The numbers that an upload may have."""
        return wire.ranges(self.algorithm.components, self.plan.local.built_loss)

    @property
    def comm_round(self) -> int:
        """The exchanges of a whole run: what FedML calls rounds.

        A callback may end the run earlier.
        """
        asks = self.algorithm.exchanges
        return asks.begin + self.plan.rounds * asks.round + asks.finish + self.tests


def terms(
    deployment: Deployment, recipe: str, network: Model, public: Samples | None = None
) -> Terms:
    """The terms of a deployment; `recipe` is that of the pair, `public` the process's public
    split. Raises UserError."""
    train, plan = deployment.train_args, deployment.plan(network)
    n_public = 0 if public is None else len(public.y)
    algorithm = recipes.build(
        recipe, train.settings, plan.setting(deployment.silos, n_public, deployed=True)
    )
    # Frozen parameters are never sent, so every process must have the same ones.
    model, is_given = deployment.model_args, described(network.name) != network.name
    initial: Params = {}
    if network.frozen or network.start or is_given:
        params, buffers = initial_model(network, 0, torch.zeros(()))
        initial = params | buffers
    kept = initial if is_given else {*network.frozen, *network.start}
    # Callbacks and metrics run on the server alone.
    named, of_server = train.own_code(), {*train.callbacks, *train.metrics}
    own = {name: sha for name, sha in named.items() if name not in of_server}
    own |= recipes.own_code(recipe) | model.model_code()
    for name in own:
        if own[name] == UNKNOWN_SOURCE:
            raise UserError(f"{name}: its source is not in a file, so silos can't compare it")
    agreed: dict[str, object] = {
        "algorithm": repr(algorithm.components),
        "model": model.model_dump()
        | {
            "model": described(model.model),
            "frozen": weights_sha256({name: initial[name] for name in kept}),
        },
        "train": train.model_dump(
            exclude={"recipe", "settings", "client_id_list", "callbacks", "metrics"}
        ),
        "seed": plan.seed,
        "device": deployment.device_args.model_dump(),
        "own_code": own,
    }
    needs = algorithm.needs
    if public is not None and (needs.public > Public.RECORDED or needs.shared):
        agreed["public"] = weights_sha256({"x": public.x, "y": public.y})
    fingerprint = hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()
    personal: Tree = {}
    if parts := needs.personal:
        *_, personal = split_personal(network, parts, *initial_model(network, 0, torch.zeros(())))
    tests = plan.evaluations if personal or algorithm.own_model is not None else 0
    device = deployment.device_args
    if train.secure_sums:
        refuse_what_reads_more(algorithm, tests)
    silos, least = deployment.silos, train.secure_sums
    return Terms(algorithm, plan, silos, fingerprint, tests, device, own, least)


def refuse_what_reads_more(
    algorithm: Algorithm, tests: int, callbacks: Sequence[Callback] = ()
) -> None:
    """UserError if the server needs more than sums."""
    reader = streaming.reader(algorithm, callbacks)
    why = f"{reader} reads what single silos send" if reader else ""
    if tests:
        why = "silos test models of their own, and the server reads each silo's result"
    if why:
        raise UserError(
            f"recipe {algorithm.name!r} can't run with train_args.secure_sums: {why}; allowed: 0, "
            "and then the server sees each silo's upload; or a recipe that needs sums "
            "(`noniid methods`)"
        )
