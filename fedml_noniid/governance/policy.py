"""The policy of one site: which studies it takes part in. The site decides, and names the rule that
refused."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import Field

from fedml_noniid import own_code
from fedml_noniid.core.errors import Mistake, UserError, located, shown, together
from fedml_noniid.core.options import MOST, Count, CountOrNone, Positive, Section, validated
from fedml_noniid.credentials import certificates
from fedml_noniid.data.files import write_whole
from fedml_noniid.data.shards import Shard
from fedml_noniid.data.yaml_files import loaded
from fedml_noniid.deploy import settings
from fedml_noniid.deploy.exit_codes import PolicyError
from fedml_noniid.deploy.settings import Deployment
from fedml_noniid.governance import study
from fedml_noniid.governance.study import SHARED, PublicKey, Signed
from fedml_noniid.plugins import registry

TEMPLATE = Path(__file__).with_name("policy.yaml")
ANY = "*"
OF_SERVER = ("expires", "methods", "max_rounds")  # rules of a study alone: a server has no samples
Patterns = Annotated[list[str], Field(min_length=1)]


class Policy(Section):
    """A policy.yaml. What it does not mention has the default of the template."""

    owners: Annotated[dict[str, PublicKey], Field(min_length=1)]  # name -> public key
    expires: datetime.date | None = None  # the last day of this policy
    methods: Patterns = Field(default=["*"])  # each method of the recipe
    max_rounds: Count = 1000
    max_epochs: Count = 20  # of one round
    max_steps: Count = 10_000  # of one round
    tensors: Patterns = Field(default=["*"])  # names of what may leave
    max_upload_mb: Positive = 1000.0  # one answer
    max_answers: Count = 20  # to one exchange, and as many sums: a restarted server asks again
    min_samples: CountOrNone = 0  # of this site
    min_group: Count = 1  # silos in the smallest sum that the server sees
    noise: bool = False  # whether clipped answers with noise are all that may leave
    max_epsilon: Positive | None = None  # of all answers together
    own_code: list[str] = Field(default=[])  # SHA-256 of what may run beside ours, or "*"

    @staticmethod
    def read(path: Path) -> tuple[Policy, str]:
        """The policy in a file, and the SHA-256 of its bytes. From now on, no other code of a user
        is imported. Raises UserError."""
        if not path.is_file():
            raise UserError(
                f"{path}: there is no such file; who has no policy takes part in nothing; "
                "`noniid deploy policy` writes one"
            )
        content = certificates.read(path, "the process's user has to read it")
        with located(source=str(path)):
            policy = validated(Policy, loaded(content, str(path)))
        if ANY not in policy.own_code:
            own_code.import_only(policy.own_code, f"own_code in {path}")
        return policy, hashlib.sha256(content).hexdigest()

    def refusals(
        self, wanted: study.Study, deployment: Deployment, samples: int, today: datetime.date
    ) -> Iterator[tuple[str, str]]:
        """(rule, what of the study it refuses)."""
        train, dp = deployment.train_args, deployment.dp_args
        asks, epochs = wanted.asks, 0 if train.local_steps else train.epochs
        steps = train.local_steps or epochs * math.ceil(samples / train.batch_size)
        methods = [name.strip() for name in train.recipe.split("+")]
        leaving = {
            key for message in wanted.messages.values() for key in (*message.up, *message.added)
        }
        largest = max(message.up_bytes for message in wanted.messages.values()) / 1e6
        answers = asks.begin + train.rounds * asks.round + asks.finish + asks.tests
        local = dp.enable_dp and dp.dp_solution_type == "ldp"
        most = answers * self.max_answers
        summed = most * (dp.epsilon or 0.0) if local else math.inf
        # A ledger refuses what a budget does not allow. Without one, the most answers are added up.
        epsilon = min(summed, dp.budget_epsilon or math.inf)
        if self.expires is not None and today > self.expires:
            yield "expires", f"today is {today}"
        if other := [name for name in methods if not _matches(name, self.methods)]:
            yield "methods", f"the recipe has {', '.join(other)}"
        for key, number in (("rounds", train.rounds), ("epochs", epochs), ("steps", steps)):
            if number > getattr(self, f"max_{key}"):
                yield f"max_{key}", f"the study has {number}"
        if other := sorted(key for key in leaving if not _matches(key, self.tensors)):
            yield "tensors", f"the study wants {shown(other[0])} and {len(other) - 1} others"
        if largest > self.max_upload_mb:
            yield "max_upload_mb", f"an answer has {largest:.1f} MB"
        if samples < self.min_samples:
            yield "min_samples", f"this site has {samples}"
        if self.min_group > max(train.secure_sums, 1):
            view = f"sums over {train.secure_sums} silos" if train.secure_sums else "every answer"
            yield "min_group", f"the server sees {view}"
        made = (
            registry.method(k)(**train.settings.get(k, {})) for k in registry.parse(train.recipe)
        )
        noises = [m.noise for c in made if (m := c.mechanism) and m.unit == "sample"]
        if self.noise and not local and not any(noises):
            yield "noise", "neither dp_args of this site nor the recipe has noise"
        if self.max_epsilon is not None and epsilon > self.max_epsilon:
            yield "max_epsilon", f"{most} answers without a budget_epsilon spend {epsilon:g}"


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Agreed(NamedTuple):
    """What one process runs, and why it may."""

    deployment: Deployment
    signed: Signed
    policy: Policy
    policy_sha256: str  # of the bytes that were parsed

    def check(self, rank: int, samples: int, today: datetime.date) -> None:
        """UserError with every rule of the policy that refuses the study.

        `samples`: n_k of a silo, test samples of the server.
        """
        self.signed.check_date(today)
        deployment, source = self.deployment, self.deployment.comm_args.policy
        most = self.signed.study.train_args.limits[rank - 1] if rank else samples
        if samples > most:
            raise UserError(
                f"{deployment.shard(rank)}: has {samples} samples",
                allowed=f"{most}, train_args.max_samples of the study; ask its owner for more",
            )
        if mistakes := [
            Mistake(
                f"{what}: refused by this rule", (key,), getattr(self.policy, key), source=source
            )
            for key, what in self.policy.refusals(self.signed.study, deployment, samples, today)
            if rank or key in OF_SERVER
        ]:
            raise PolicyError.from_mistakes(mistakes)


@dataclass(frozen=True)
class Participant:
    """One process of a deployment: what it has agreed to, and its data."""

    rank: int
    agreed: Agreed
    shard: Shard

    @property
    def deployment(self) -> Deployment:
        """Its settings."""
        return self.agreed.deployment

    @property
    def folder(self) -> Path:
        """The folder for its output."""
        return Path(self.deployment.tracking_args.output_dir)

    @property
    def noise_key(self) -> Path:
        """The secret of a silo's privacy noise."""
        kit = self.deployment.kit(self.rank)
        return kit.with_name(f"{kit.name}.noise.key")


def read_agreed(path: Path) -> Agreed:
    """The settings of one process: those of its own file, and of the study that this names.

    The process's policy comes first: it says which code may be imported, and whose study is parsed.
    UserError if the file contradicts the study.
    """
    comm = settings.read_comm(path)
    policy, sha256 = Policy.read(Path(comm.policy))
    own = settings.read(path)
    signed = Signed.read(Path(own.comm_args.study), [*policy.owners.values()])
    content = own.model_dump(by_alias=True)
    with together(str(path)) as checked:
        for section in SHARED:
            mine, theirs = getattr(own, section), getattr(signed.study, section)
            content[section] |= theirs.model_dump(by_alias=True)
            for key in sorted(mine.model_fields_set & theirs.model_fields_set):
                name = type(mine).model_fields[key].alias or key
                with checked(section, name):
                    _refuse_other(getattr(mine, key), getattr(theirs, key))
    return Agreed(settings.check(content, str(path)), signed, policy, sha256)


def _refuse_other(mine: object, theirs: object) -> None:
    """UserError unless a value is that of the study."""
    if mine != theirs:
        raise UserError(
            "is not what the study says", value=mine, allowed=f"{shown(theirs)}, or no such key"
        )


def template(owner: str, public_key: str) -> str:
    """A policy to start from, which allows one owner."""
    return TEMPLATE.read_text().replace("OWNER", json.dumps(owner)).replace("KEY", public_key)


def admit_own(deployment: Deployment, shard: Shard, folder: Path) -> None:
    """Writes the signed study of a run on this machine, and the policy of all its processes.

    `shard`: the server's data.
    """
    key, path = folder / "owner.key", folder / "study.yaml"
    key.unlink(missing_ok=True)
    public = study.make_key(key)
    tomorrow = datetime.date.today() + datetime.timedelta(days=1)
    made = study.make(deployment, shard, "on this machine", tomorrow)
    write_whole(path, study.text(made))
    study.sign(path, key)
    most: dict[str, Any] = dict.fromkeys(
        ("max_rounds", "max_epochs", "max_steps", "max_answers"), MOST
    )
    admitted = Policy(owners={"this machine": public}, own_code=[ANY], max_upload_mb=1e9, **most)
    write_whole(folder / "policy.yaml", yaml.safe_dump(admitted.model_dump()))
