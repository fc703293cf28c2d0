"""MLflow's store: an embedded SQLite database under `mlruns/`, or the given tracking URI."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import logging
import os
import platform
import re
import shutil
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import write_whole

log = logging.getLogger(__name__)
# MLflow's own defaults send telemetry, and they retry a missing server for many minutes.
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    # Background jobs of features that are not used here.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}
PLACE = ".place"  # file with the folder in which the database was made
PATIENCE_S = 5  # seconds within which a server must answer
REMEDY = "; if it is damaged, delete it: `noniid sync` makes it again from the results"
REMEDY_OF_SERVER = "; start that server, or unset MLFLOW_TRACKING_URI: then mlruns/ has the runs"
# Values of a tag of an experiment's runs, without those in MLflow's trash.
TAGGED = (
    "SELECT tags.value FROM tags JOIN runs USING (run_uuid) JOIN experiments USING (experiment_id)"
    " WHERE experiments.name = ? AND tags.key = ? AND runs.lifecycle_stage = 'active'"
)


class StoreError(UserError):
    """MLflow's store fails or can't be reached. Results on disk do not depend on it."""


@contextlib.contextmanager
def spared(lost: str) -> Iterator[None]:
    """Turns a StoreError into a warning: work goes on without its tracking.

    `lost`: what MLflow lacks then.
    """
    try:
        yield
    except StoreError as error:
        log.warning("WARNING: %s", error)
        log.warning(
            (
                "  MLflow lacks %s. Files on disk are complete; `noniid sync` brings MLflow up to "
                "date."
            ),
            lost,
        )


@dataclass(frozen=True)
class Store:
    """The store of one repository. `uri`: a tracking URI, or None for the embedded database."""

    repository: Path
    uri: str | None

    @property
    def folder(self) -> Path:
        """`mlruns/`, absolute."""
        return self.repository.resolve() / "mlruns"

    @property
    def database(self) -> Path:
        """The embedded database."""
        return self.folder / "mlflow.db"

    @property
    def address(self) -> str:
        """The tracking URI."""
        return self.uri or f"sqlite:///{self.database}"

    @property
    def shown(self) -> str:
        """The tracking URI without user and password, for people and logs."""
        return re.sub("//[^/]*@", "//", self.address)

    @property
    def owner(self) -> str:
        """Whose runs are made here, in a store that others may have too: machine and folder."""
        location = f"{platform.node()} {self.repository.resolve()}"
        return hashlib.sha256(location.encode()).hexdigest()[:16]

    @property
    def is_server(self) -> bool:
        return self.address.startswith(("http://", "https://"))

    def client(self) -> Any:
        """An MlflowClient.

        Creates the embedded database if it is missing. StoreError if the store can't be used.
        """
        with self.guarded(REMEDY_OF_SERVER if self.uri else REMEDY):
            if self.is_server:
                # A server that has no such page, or wants a password, answers too.
                with contextlib.suppress(urllib.error.HTTPError):
                    urllib.request.urlopen(f"{self.address.rstrip('/')}/health", None, PATIENCE_S)
            load()
            logging.getLogger("alembic").setLevel(logging.WARNING)
            if not self.uri:
                self._prepare()
            from mlflow import MlflowClient

            client: Any = MlflowClient(tracking_uri=self.address)
            client.search_experiments(max_results=1)
            return client

    @contextlib.contextmanager
    def guarded(self, advice: str = "") -> Iterator[None]:
        """Turns every error of MLflow, SQLAlchemy and the disk into a StoreError of one line."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # MLflow promises no common class
            raise StoreError(
                f"{self.shown}: MLflow's store fails ({_line(error)}){advice}"
            ) from None

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Allows one process at a time. The lock ends with the process, also after a crash."""
        path = self.folder / f".{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def tagged(self, experiment: str, key: str) -> set[str]:
        """The values of a tag of an experiment's active runs, read from the embedded database.

        It avoids mlflow, whose import takes seconds. Empty if the database is missing, moved or
        can't be read.
        """
        try:
            uri = f"{self.database.as_uri()}?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
                values = {str(value) for (value,) in database.execute(TAGGED, (experiment, key))}
            return values if self._is_here() else set()
        except (OSError, sqlite3.Error):
            return set()

    def _prepare(self) -> None:
        """Creates the database once.

        A database from another place is set aside, since MLflow stores absolute paths.
        """
        if "?" in str(self.folder):
            raise StoreError(
                f"{self.folder}: a path with '?' can't hold an SQLite database; move the repository"
            )
        with self.lock("create"):
            if not self._is_here():
                if self.database.exists():
                    self._set_aside()
                write_whole(self.folder / PLACE, str(self.folder))
            if not self.database.exists():
                self._create()

    def _is_here(self) -> bool:
        """Whether the database was made in this folder."""
        record = self.folder / PLACE
        return record.exists() and record.read_text() == str(self.folder)

    def _set_aside(self) -> None:
        n = 1 + len(list(self.folder.glob("mlflow.db.moved-*")))
        for path in filter(Path.exists, (self.folder / "artifacts", self.database)):
            os.replace(path, path.with_name(f"{path.name}.moved-{n}"))
        log.info(
            "MLflow: the repository was moved or copied, so its runs are made again from the "
            "results"
        )
        log.info("MLflow: the old ones are in mlruns/*.moved-%d", n)

    def _create(self) -> None:
        """Makes the database beside its final place and moves it there.

        A kill leaves no database or a whole one.
        """
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        build: Any = SqlAlchemyStore  # mlflow's constructor has no types
        unfinished = self.folder / ".new"
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
        try:
            unfinished.mkdir()
            address, artifacts = f"sqlite:///{unfinished / 'mlflow.db'}", self.folder / "artifacts"
            build(address, artifacts.as_uri()).engine.dispose()
            os.replace(unfinished / "mlflow.db", self.database)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def load() -> None:
    """Imports the modules that a run needs, so that processes forked later have them already."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    importlib.import_module("mlflow.store.tracking.sqlalchemy_store")


def _line(error: BaseException) -> str:
    """The first line of the message of an exception's cause, with the file of an OSError."""
    while error.__cause__ is not None:  # SQLAlchemy's and MLflow's own words for it are long
        error = error.__cause__
    parts = (getattr(error, "filename", None), getattr(error, "strerror", None))
    text = ": ".join(str(part) for part in parts if part) if parts[1] else str(error)
    return (text.strip() or type(error).__name__).splitlines()[0][:300]
