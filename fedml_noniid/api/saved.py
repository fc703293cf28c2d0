"""The folder of `folder=` and `save`: the files of each run, and a record of what belongs together.

A run that is whole and has the same fingerprint is not trained again.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedml_noniid.api.data import Data, load
from fedml_noniid.core.errors import UserError, shown
from fedml_noniid.data.files import replace_folder, write_whole
from fedml_noniid.data.indices import Indices
from fedml_noniid.engines.callbacks import Callback
from fedml_noniid.own_code import OF_PROCESS, UNKNOWN_SOURCE, source_of_class
from fedml_noniid.pipelines.experiment import cache, measuring, provenance
from fedml_noniid.pipelines.experiment.config import Config, Unit

if TYPE_CHECKING:
    from fedml_noniid.api.result import Result

RECORD = "results.json"  # the settings of all runs of a call, and the fingerprint of each
SECONDS_OF_ROUNDS = "seconds.json"


class Files(NamedTuple):
    """The files of one seed, as the stages write them, by name."""

    run: Mapping[str, bytes]  # of a run that diverged, the reason only
    evaluation: Mapping[str, bytes]
    seconds: tuple[float, ...]  # of each round
    fingerprint: str = ""  # "" if it was trained without a folder

    @property
    def reason(self) -> str:
        """Why there is no model; "" if there is one."""
        return self.run.get(cache.DIVERGED, b"").decode()

    @property
    def final(self) -> dict[str, float]:
        """The numbers after the last round, of a run that has a model."""
        return dict(json.loads(self.run["run.json"])["final"])

    def write(self, folder: Path, key: str) -> None:
        """Into evaluation/<key>/ and then runs/<key>/ of the folder: one with a run has both.

        UserError if it can't be written.
        """
        run = {**self.run, SECONDS_OF_ROUNDS: json.dumps(self.seconds).encode()}
        for part, files in (("evaluation", self.evaluation), ("runs", run)):
            replace_folder(folder / part / key, cache.with_receipt(self.fingerprint, files))

    @staticmethod
    def read(folder: Path, key: str, fingerprint: str) -> Files | None:
        """What `write` wrote; None unless it is whole and has this fingerprint."""
        parts = [folder / part / key for part in ("runs", "evaluation")]
        if not all(cache.is_whole(part, fingerprint) for part in parts):
            return None
        run, evaluation = (
            {name: text for name, text in cache.content_of(part).items() if name != cache.RECEIPT}
            for part in parts
        )
        return Files(run, evaluation, tuple(json.loads(run.pop(SECONDS_OF_ROUNDS))), fingerprint)


def fingerprint(
    config: Config, unit: Unit, data: Data, indices: Indices, callbacks: Sequence[Callback]
) -> str:
    """The hash of all that a run depends on.

    Code of a script or notebook is not known well enough, nor is a callback that keeps more than
    JSON. Then it is a number that no other run has.
    """
    try:
        watching = [
            [source_of_class(type(callback)), type(callback).__qualname__, callback.state()]
            for callback in callbacks
        ]
    except UserError:
        watching = [[UNKNOWN_SOURCE]]
    if OF_PROCESS in json.dumps(config.params(unit)) or any(
        UNKNOWN_SOURCE in parts for parts in watching
    ):
        return uuid.uuid4().hex
    measured = indices.content.hex(), watching, provenance.code(measuring.__name__)
    return provenance.training_fingerprint(
        config, unit, data.dataset.checksum, provenance.digest(*measured)
    )


def write_record(folder: Path, results: Iterable[Result]) -> None:
    """Writes RECORD. UserError."""
    entries = [
        {
            "recipe": result.recipe,
            "point": dict(result.point),
            "settings": result.settings.model_dump(mode="json"),
            "data": dict(result.data.settings),
            "from_memory": result.data.from_memory,
            "checksum": result.data.dataset.checksum,
            "fingerprints": {seed: files.fingerprint for seed, files in result.files.items()},
        }
        for result in results
    ]
    write_whole(folder / RECORD, json.dumps(entries, indent=1) + "\n")


def read_record(folder: object) -> list[dict[str, Any]]:
    """The entries of RECORD. UserError if there are none."""
    try:
        return list(json.loads(Path(str(folder), RECORD).read_text()))
    except (OSError, ValueError) as error:
        raise UserError(
            f"results: folder = {shown(str(folder))} has no readable {RECORD} ({error})",
            allowed="the folder of a `run` or `sweep`, or of `save`",
        ) from None


def folder_of(caller: str, folder: object) -> Path:
    """The folder, made if it is missing. UserError if it can't be written."""
    if not isinstance(folder, str | os.PathLike):
        raise UserError(f"{caller}: folder = {shown(folder)} is refused; allowed: a path")
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{caller}: folder {str(path)!r} can't be written ({error.strerror or error})"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"{caller}: folder {str(path)!r} can't be written (Permission denied)")
    return path


def source(saved: Mapping[str, Any], data: Data | None) -> Data:
    """The data of an entry: `data`, or what its name loads. UserError if there is none, or it is
    another."""
    if data is None and saved["from_memory"]:
        raise UserError(
            f"results: {saved['data']['name']!r} was data in memory",
            allowed="results(folder, data)",
        )
    data = load(**saved["data"]) if data is None else data
    ((_, scenario),) = saved["settings"]["scenarios"].items()
    if data.dataset.checksum != saved["checksum"] and scenario.get("unseen") is not None:
        data = data.without(scenario["unseen"])
    if data.dataset.checksum != saved["checksum"]:
        raise UserError("results: data are others than those of the runs in the folder")
    return data
