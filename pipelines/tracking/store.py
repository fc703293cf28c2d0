"""MLflow's store: an embedded SQLite database under `mlruns/`, or the given tracking URI."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import logging
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.files import write_whole

log = logging.getLogger(__name__)
# MLflow's own defaults send telemetry, and they retry a missing server for many minutes.
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}  # fmt: skip
PATIENCE = 5  # seconds within which a server must answer


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
    def is_server(self) -> bool:
        return self.address.startswith(("http://", "https://"))

    def client(self) -> Any:
        """An MlflowClient. Creates the embedded database if it is missing. UserError if the store can't be used."""
        load()
        logging.getLogger("alembic").setLevel(logging.WARNING)
        if self.is_server:
            self._reach()
        elif not self.uri:
            self._prepare()
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            client: Any = MlflowClient(tracking_uri=self.address)
            client.search_experiments(max_results=1)
        except (MlflowException, SQLAlchemyError, OSError) as error:
            advice = "" if self.uri else "; delete it and run `noniid ui`, which makes it again from the results"
            raise UserError(f"{self.address}: can't be used as MLflow's store ({_line(error)}){advice}") from None
        return client

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Allows one process at a time. The lock ends with the process, also after a crash."""
        path = self.folder / f".{name}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        except OSError as error:
            raise UserError(f"{path}: can't be written ({error.strerror}); choose a folder that is writable") from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def is_synced(self, name: str, digest: str) -> bool:
        """Whether the last `note_synced` for `name` in this store had this digest."""
        return self._synced().get(f"{self.address} {name}") == digest and (bool(self.uri) or self.database.exists())

    def note_synced(self, name: str, digest: str) -> None:
        """Remembers what the store holds. So the next sync can answer without mlflow, whose import takes seconds."""
        write_whole(self.folder / ".synced", json.dumps(self._synced() | {f"{self.address} {name}": digest}, indent=2))

    def _synced(self) -> dict[str, str]:
        try:
            return dict(json.loads((self.folder / ".synced").read_text()))
        except (OSError, ValueError, TypeError):
            return {}  # then the next sync compares everything again

    def _reach(self) -> None:
        try:
            with urllib.request.urlopen(f"{self.address.rstrip('/')}/health", timeout=PATIENCE):
                return
        except urllib.error.HTTPError:
            return  # the server answers: it has no such page or wants a password
        except (OSError, ValueError) as error:
            advice = "start that server, or name none (MLFLOW_TRACKING_URI, --to) to use the database under mlruns/"
            raise UserError(f"{self.address}: no answer from MLflow's server ({_line(error)}); {advice}") from None

    def _prepare(self) -> None:
        """Creates the database once. A database from another place is set aside, since MLflow stores absolute paths."""
        if "?" in str(self.folder):
            raise UserError(f"{self.folder}: a path with '?' can't hold an SQLite database; move the repository")
        place = self.folder / ".place"
        with self.lock("create"):
            if not place.exists() or place.read_text() != str(self.folder):
                if self.database.exists():
                    self._set_aside()
                write_whole(place, str(self.folder))
            if not self.database.exists():
                self._create()

    def _set_aside(self) -> None:
        n = 1 + len(list(self.folder.glob("mlflow.db.moved-*")))
        for path in filter(Path.exists, (self.folder / "artifacts", self.database)):
            os.replace(path, path.with_name(f"{path.name}.moved-{n}"))
        log.info("MLflow: the repository was moved or copied, so its runs are made again from the results")
        log.info("MLflow: the old ones are kept in mlruns/*.moved-%d", n)

    def _create(self) -> None:
        """Builds the database beside its final place and moves it there. A kill leaves no database or a whole one."""
        from mlflow.exceptions import MlflowException
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
        from sqlalchemy.exc import SQLAlchemyError

        unfinished = self.folder / ".new"
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
        try:
            unfinished.mkdir()
            build: Any = SqlAlchemyStore  # mlflow's constructor has no types
            build(f"sqlite:///{unfinished / 'mlflow.db'}", (self.folder / "artifacts").as_uri()).engine.dispose()
            os.replace(unfinished / "mlflow.db", self.database)
        except (MlflowException, SQLAlchemyError, OSError) as error:
            raise UserError(f"{self.database}: can't be created ({_line(error)}); is the disk full?") from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def load() -> None:
    """Imports the modules that a run needs, so that processes forked later have them already."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    importlib.import_module("mlflow.store.tracking.sqlalchemy_store")


def _line(error: Exception) -> str:
    """The first line of an exception's message."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
