"""The YAML file of a deployment: FedML's keys in FedML's sections, and a few keys of ours."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    PlainSerializer,
    WrapValidator,
    model_validator,
)
from torch import Tensor

from fedml_noniid.core.algorithm import TRAIN, Algorithm
from fedml_noniid.core.component import Public
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import (
    MISSING,
    REFUSED,
    UNKNOWN,
    Mistake,
    UserError,
    closest,
    located,
    shown,
)
from fedml_noniid.core.options import (
    MOST,
    Count,
    CountOrNone,
    NonNegative,
    Positive,
    Range,
    RecipeError,
    Section,
    Seed,
    Share,
    keys_of,
    validated,
)
from fedml_noniid.core.trees import Params, Tree
from fedml_noniid.data.batches import MOST_READ
from fedml_noniid.data.yaml_files import read_yaml
from fedml_noniid.deploy import wire
from fedml_noniid.engines import streaming
from fedml_noniid.engines.callbacks import Callback
from fedml_noniid.engines.device import resolve_device
from fedml_noniid.engines.hashing import weights_sha256
from fedml_noniid.engines.local_training import LearningRate, Optimizer
from fedml_noniid.engines.personal import split_personal
from fedml_noniid.engines.plan import Plan, initial_model
from fedml_noniid.engines.run_settings import RunSettings
from fedml_noniid.models import described
from fedml_noniid.models.model import Model
from fedml_noniid.models.settings import ModelSettings, build_network
from fedml_noniid.own_code import UNKNOWN_SOURCE, look_in
from fedml_noniid.plugins import registry


def _template(path: str) -> str:
    if "{rank}" not in path:
        raise UserError(value=path, allowed="a path with {rank}")
    return path


def path_of(template: str, rank: int) -> Path:
    """The path of a process."""
    return Path(template.replace("{rank}", str(rank)))


def _address(server: str) -> str:
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(value=server, allowed="host:port, such as 10.0.0.7:8890")
    return server


def _numbers(value: object, number: Callable[[object], int]) -> Any:
    return [number(part) for part in value] if isinstance(value, list) else number(value)


# A number, or a list with one for each rank.
Limit = Annotated[Count, WrapValidator(_numbers), PlainSerializer(lambda value: value)]
Template = Annotated[str, AfterValidator(_template)]  # a path of each process


def _only(allowed: str, instead: str) -> BeforeValidator:
    """Allows one text; `instead`: what to use in place of the others."""

    def check(value: object) -> object:
        if value == allowed:
            return value
        what = UNKNOWN if isinstance(value, str) else REFUSED
        raise UserError(what, value=value, allowed=f"{allowed}; {instead}")

    return BeforeValidator(check)


# The one table of FedML's keys that have a key of ours: each line is a setting's keys. A file may
# write any of them, and several only with the same value.
ROUNDS = AliasChoices("rounds", "comm_round")
RATE = AliasChoices("learning_rate", "lr")
OPTIMIZER = AliasChoices("client_optimizer", "optimizer")
DECAY = AliasChoices("weight_decay", "wd")
STEPS = AliasChoices("local_steps", "local_iterations")
SEED = AliasChoices("random_seed", "seed")
# FedML's keys that change its training and have no key of ours -> what to write.
ELSEWHERE = {
    **dict.fromkeys(("nesterov", "dampening"), "momentum, without it"),
    **dict.fromkeys(
        ("server_optimizer", "server_lr", "server_momentum", "gmf"),
        "a recipe with a server optimiser, such as fedavgm or fedadam, and its `settings`",
    ),
    **dict.fromkeys(("fedprox", "fedprox_mu", "mu"), "recipe: fedprox, settings: {fedprox: {mu}}"),
    "feddyn_alpha": "recipe: feddyn, settings: {feddyn: {alpha}}",
    "mimelite": "another recipe, see `noniid methods`",
    **dict.fromkeys(
        ("lr_schedule", "lr_scheduler", "lr_decay_rate", "lr_step_size", "lr_milestones"),
        "learning_rate: {start: 0.1, decay: cosine}, a schedule",
    ),
    **dict.fromkeys(("grad_clip", "group_comm_round", "epochs_client"), "without it"),
    "test_on_clients": "no; the server tests in each round",
    "use_customized_hierarchical": "false",
    "ml_engine": "torch",
}
NEUTRAL = (None, False, 0, "", "no", "None", "torch")  # values with which they change nothing
# Of our own transport, without effect under FedML's.
WAITING = ("quorum", "deadline_s", "patience_s", "gone_s", "lost_s")
FEDMLS = ("mode", "server_id", "test_batch_size")  # FedML's keys that look like ours
LIKE = 0.8  # of a key that is a misspelt one, not one of the user's own


class FedMLSection(Section):
    """A section in which a setting may have FedML's key, ours, or both with the same value."""

    @model_validator(mode="before")
    @classmethod
    def _once(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        first: dict[str, str] = {}  # field -> its first key
        for key, name in keys_of(cls).items():
            if key in values and values[key] != values[first.setdefault(name, key)]:
                raise UserError(
                    f"contradicts {first[name]} = {shown(values[first[name]])}, which is the same "
                    "setting",
                    path=(key,),
                    value=values[key],
                    allowed="one of the two keys, or one value",
                )
        repeated = keys_of(cls).keys() - first.values()
        return {key: value for key, value in values.items() if key not in repeated}


class CommonArgs(FedMLSection):
    training_type: Annotated[
        str,
        _only(
            "cross_silo",
            "to simulate in one process: `fedml_noniid.run(...)` in Python, or `noniid run`, as "
            "FedML's simulators ignore a pair",
        ),
    ] = "cross_silo"
    scenario: Literal["horizontal"] = "horizontal"
    using_mlops: Literal[False] = False
    random_seed: Seed = Field(default=0, validation_alias=SEED)


class DataArgs(Section):
    dataset: str = "digits"  # its name: some of FedML's defences read it
    shard: Template = "shards/{rank}.safetensors"  # ours: rank 0 is the server


class ModelArgs(ModelSettings):
    model: str = "mlp"  # all other keys are ours


class TrainArgs(RunSettings, FedMLSection):
    federated_optimizer: Annotated[str, _only("FedAvg", "the method that runs is `recipe`")] = (
        "FedAvg"
    )
    recipe: str = "fedavg"  # ours
    # Ours: method -> hyper-parameter -> value.
    settings: dict[str, dict[str, Any]] = Field(default={})
    rounds: Count = Field(default=2, validation_alias=ROUNDS)
    cohort: CountOrNone = 0  # ours: silos per round, 0 for all
    # Ours: the least silos of a sum that the server may see; 0: it sees each silo's upload.
    secure_sums: CountOrNone = 0
    # Ours: the most samples that a silo may count; a list has a number for each rank.
    max_samples: Limit | None = None
    # Ours: the most that a part of an answer may be longer than the median silo's.
    max_norm_ratio: Annotated[float, Range(1, open=")")] = 50.0
    # A list here would give every silo the first id.
    client_id_list: Annotated[str, _only("[]", "the id of a silo is its rank")] = "[]"
    client_num_in_total: Count = 3
    # All silos are connected; fewer are FedML's way to write `cohort`.
    client_num_per_round: CountOrNone = 0
    epochs: Count = 1
    batch_size: Count = 32
    optimizer: Optimizer = Field(
        default="sgd", alias="client_optimizer", validation_alias=OPTIMIZER
    )
    lr: LearningRate = Field(default=0.1, alias="learning_rate", validation_alias=RATE)
    weight_decay: NonNegative = Field(default=0.0, validation_alias=DECAY)
    local_steps: Annotated[int, Range(0, MOST_READ)] = Field(default=0, validation_alias=STEPS)
    # Beside momentum: ours are drop_last, augment, precision.
    precision: Literal["float32", "bf16"] = "float32"

    @model_validator(mode="after")
    def _fits(self) -> TrainArgs:
        silos, per_round = self.client_num_in_total, self.client_num_per_round
        if per_round > silos or (self.cohort and per_round not in (0, silos, self.cohort)):
            raise UserError(
                path=("client_num_per_round",),
                value=per_round,
                allowed=f"client_num_in_total = {silos}, as every silo is connected; or the silos "
                "that train in a round, as cohort",
            )
        if self.cohort > silos:
            raise UserError(
                path=("cohort",), value=self.cohort, allowed=f"0 (all) to {silos} silos"
            )
        if self.secure_sums == 1 or self.secure_sums > self.per_round:
            raise UserError(
                path=("secure_sums",),
                value=self.secure_sums,
                allowed="0 (the server sees each silo's upload), or 2 to the "
                f"{self.per_round} silos of a round",
            )
        if len(self.limits) != silos:
            raise UserError(
                path=("max_samples",),
                value=self.max_samples,
                allowed=f"a number, or a list of {silos}, one for each rank",
            )
        with located("settings"):
            registry.check_settings(self.recipe, self.settings)
        return self

    @property
    def limits(self) -> list[int]:
        """The most samples of each silo, without public ones."""
        most: Any = self.max_samples
        return most if isinstance(most, list) else [most or MOST] * self.client_num_in_total

    @property
    def per_round(self) -> int:
        """M, silos per round."""
        return self.cohort or self.client_num_per_round or self.client_num_in_total


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
        return resolve_device(
            "cuda" if self.using_gpu else "cpu",
            "device_args.using_gpu = true",
            "false, on server and all silos",
        )


class CommArgs(Section):
    backend: Literal["GRPC"] = "GRPC"
    # All ours.
    # Where the server listens, and where silos find it.
    server: Annotated[str, AfterValidator(_address)] = "127.0.0.1:8890"
    kit: Template = "kits/{rank}"  # certificates of this process
    study: str = "study.yaml"  # what its owner has signed
    policy: str = "policy.yaml"  # which studies this process takes part in
    replay_mb: CountOrNone = 1024  # the most that a silo keeps for `noniid audit replay`
    quorum: CountOrNone = 0  # answers without which an exchange can't end; 0: of all that are asked
    # Seconds that an exchange waits for more answers than the quorum.
    deadline_s: Positive = 600.0
    # Seconds that an exchange waits for its quorum; then the run ends.
    patience_s: Positive = 3600.0
    gone_s: NonNegative = 10.0  # seconds without contact after which a silo is not waited for
    lost_s: Positive = 3600.0  # seconds that a silo looks for the server

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of `server`."""
        host, _, port = self.server.rpartition(":")
        return host.strip("[]"), int(port)

    def check_free(self) -> None:
        """UserError unless a server can listen at `server`."""
        try:
            socket.create_server(
                self.address, family=socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
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
    # Ours, of each silo: the most that may leave it, over all runs; see `privacy.ledger`.
    budget_epsilon: Positive | None = None
    budget_delta: Annotated[float, Range(0, 1, "()")] | None = None

    @model_validator(mode="after")
    def _acts(self) -> DpArgs:
        budget = {"budget_epsilon", "budget_delta"}
        others = self.model_dump(exclude={"enable_dp", "max_grad_norm", *budget})
        missing = [key for key, value in others.items() if value is None]
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
                path=("comm_args", "quorum"),
                value=self.comm_args.quorum,
                allowed=f"0 (all) to {self.silos} silos",
            )
        return self

    @property
    def silos(self) -> int:
        """N."""
        return self.train_args.client_num_in_total

    def plan(self, network: Model) -> Plan:
        """How the run trains; `network`: for the samples of this process."""
        train = self.train_args
        return Plan(network, train, train.rounds, train.per_round, self.common_args.random_seed)

    def network(
        self, input_shape: tuple[int, ...], n_classes: int, embedding: Tensor | None
    ) -> Model:
        """The network that the file describes, for samples of this shape; `embedding` [V, width]
        for text only."""
        return build_network(self.model_args, input_shape, n_classes, embedding)

    def shard(self, rank: int) -> Path:
        """The data file of a process."""
        return path_of(self.data_args.shard, rank)

    def kit(self, rank: int) -> Path:
        """The folder with the certificates of a process."""
        return path_of(self.comm_args.kit, rank)

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


def read_comm(path: Path) -> CommArgs:
    """Returns address and files of the process that a file describes; the rest is not parsed, so no
    code of a user is imported. Raises UserError."""
    content = read_yaml(path, ALLOWED, str(path))
    with located("comm_args", source=str(path)):
        return validated(CommArgs, content.get("comm_args") or {})


def check(content: object, source: str) -> Deployment:
    """The deployment of a nested mapping; `source` begins every message."""
    with located(source=source):
        return validated(Deployment, content)


def from_args(args: object, model: str = "") -> Deployment:
    """The deployment that FedML flattened into the attributes of `args`.

    `model`: the name of a module that the user gave in place of a network of `args`.
    """
    written = vars(args)
    sections = {name: keys_of(type(own)) for name, own in Deployment() if isinstance(own, Section)}
    content = {
        section: {key: written[key] for key in keys if key in written}
        for section, keys in sections.items()
    }
    ids = content["train_args"].pop("client_id_list", None)
    if model:
        content["model_args"]["model"] = model
    with located(source="args"):
        _refuse_elsewhere(written, {key for keys in sections.values() for key in keys})
    try:
        deployment = check(content, "args")
    except UserError as error:
        raise error.changed(_of_text) from None
    silos, some = deployment.silos, deployment.train_args.client_num_per_round
    # FedML writes the ranks of all into the server's list, and into a silo's its own.
    lists = [None, [], [written.get("rank")], [*range(1, silos + 1)], [*range(1, some + 1)]]
    with located("train_args", source="args"):
        if str(ids).replace(" ", "") not in {str(known).replace(" ", "") for known in lists}:
            raise UserError(
                path=("client_id_list",),
                value=ids,
                allowed=f"[] or {lists[3]}; the id of a silo is its rank",
            )
        if (workers := written.get("worker_num", silos)) not in (silos, some):
            allowed = f"client_num_in_total = {silos}; a process for each silo"
            raise UserError(path=("worker_num",), value=workers, allowed=allowed)
    return deployment


def _refuse_elsewhere(written: Mapping[str, object], own: set[str]) -> None:
    """UserError for keys of `args` that look misspelt, or that would have no effect."""
    refused, mistakes = ELSEWHERE, []
    if "grpc_ipconfig_path" in written:
        why = "FedML's transport waits for all silos, without end; `noniid deploy` has it"
        refused = ELSEWHERE | dict.fromkeys(WAITING, f"without it; {why}")
    if not written.keys() & set(ROUNDS.choices):
        mistakes.append(Mistake(MISSING, ("train_args", "comm_round")))
    for key, value in written.items():
        if key in refused:
            if value not in NEUTRAL:
                mistakes.append(Mistake(REFUSED, (key,), value, refused[key]))
        elif key not in own and key not in FEDMLS and (meant := closest(key, own, LIKE)):
            allowed = "that key, or a less similar name for a key of your own"
            mistakes.append(Mistake(UNKNOWN, (key,), allowed=allowed, meant=meant))
    if mistakes:
        raise UserError.from_mistakes(mistakes)


def _of_text(mistake: Mistake) -> Mistake:
    """The mistake, with a hint if a number was written as text, such as 1e-3 for PyYAML."""
    try:
        float(mistake.value if isinstance(mistake.value, str) else "")
    except ValueError:
        return mistake
    hint = f"{mistake.allowed}; this is text for YAML: no quotes, and 1.0e-3 for 1e-3"
    return replace(mistake, allowed=hint)


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
    limits: Sequence[int] = ()  # the largest n of each silo
    max_norm_ratio: float = 50.0  # see `silo.outliers`

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
    setting = plan.setting(deployment.silos, n_public, deployed=True)
    algorithm = registry.build(recipe, train.settings, setting)
    if least := deployment.comm_args.quorum:  # silos may leave until so many are there
        with located("comm_args", "quorum"):
            fewest = setting._replace(cohort=min(least, setting.cohort))
            registry.build(recipe, train.settings, fewest)
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
    own |= registry.own_code(recipe) | model.model_code()
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
            exclude={
                *("recipe", "settings", "callbacks", "metrics"),
                *("client_id_list", "client_num_per_round"),
            }
        )
        | {"cohort": plan.cohort},
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
    tests = plan.evaluations if personal or algorithm.own_models else 0
    device = deployment.device_args
    if tests and any(noise.unit == "sample" and noise.noise for noise in algorithm.mechanisms):
        raise RecipeError(
            f"recipe {algorithm.name!r} can't be deployed: silos test models of their own on their "
            "samples, and the results would leave without noise",
            allowed="without dpsgd; local noise (dp_args) covers them",
        )
    if train.secure_sums:
        refuse_what_reads_more(algorithm, tests)
    limits = [most + round(needs.shared * n_public) for most in train.limits]
    return Terms(
        algorithm,
        plan,
        deployment.silos,
        fingerprint,
        tests,
        device,
        own,
        train.secure_sums,
        limits,
        train.max_norm_ratio,
    )


def refuse_what_reads_more(
    algorithm: Algorithm, tests: int, callbacks: Sequence[Callback] = ()
) -> None:
    """UserError if the server needs more than sums."""
    reader = streaming.reader(algorithm, callbacks)
    why = f"{reader} reads what single silos send" if reader else ""
    if algorithm.packing(TRAIN) is not None:
        why = "it compresses updates, and all numbers are sent, masked, in 8 bytes or more"
    if tests:
        why = "silos test models of their own, and the server reads each silo's result"
    if algorithm.received is not None:
        why = "silos receive different models, and a sum needs one question to all"
    if why:
        raise UserError(
            f"recipe {algorithm.name!r} can't run with train_args.secure_sums: {why}; allowed: 0, "
            "and then the server sees each silo's upload; or a recipe that needs sums "
            "(`noniid methods`)"
        )
