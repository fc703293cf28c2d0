"""MLflow's files under `mlruns/`, seen without mlflow (its import takes seconds): places, lock, paths, queries."""

from __future__ import annotations

import contextlib
import fcntl
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from plugins.core.errors import UserError

# Tables and columns that hold absolute paths.
PATHS = (("experiments", "artifact_location"), ("runs", "artifact_uri"), ("logged_models", "artifact_location"))


def database(root: Path) -> Path:
    """The SQLite file."""
    return root / "mlruns" / "mlflow.db"


def artifacts(root: Path) -> Path:
    """The folder of the runs' files."""
    return root / "mlruns" / "artifacts"


@contextlib.contextmanager
def lock(root: Path) -> Iterator[None]:
    """One process at a time. The lock goes away with the process, however that ends."""
    path = root.resolve() / "mlruns" / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise UserError(f"{path}: can't be written ({error.strerror}); choose a folder that is writable") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def moved(root: Path) -> bool:
    """Whether the database still has paths of the place where the repository was before."""
    return bool(_locations(root))


def relocate(root: Path) -> None:
    """Rewrites the absolute paths of a repository that has been moved or copied."""
    moves = [(new, old) for old, new in _locations(root).items()]
    with contextlib.closing(_open(root)) as connection, connection:
        for table, column in PATHS:
            connection.executemany(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", moves)


def experiments(root: Path) -> dict[str, int]:
    """Id of each experiment by its name, newest first."""
    query = "SELECT name, experiment_id FROM experiments ORDER BY experiment_id DESC"
    with contextlib.closing(_open(root)) as connection:
        return dict(connection.execute(query).fetchall())


def tag_values(root: Path, key: str) -> set[str]:
    """The values of one tag over all runs that are not in MLflow's trash."""
    query = (
        "SELECT tags.value FROM tags JOIN runs USING (run_uuid) JOIN experiments USING (experiment_id) "
        "WHERE tags.key = ? AND runs.lifecycle_stage = 'active' AND experiments.lifecycle_stage = 'active'"
    )
    with contextlib.closing(_open(root)) as connection:
        return {value for (value,) in connection.execute(query, (key,))}


def _open(root: Path) -> sqlite3.Connection:
    # Writers of other processes hold the database for moments only.
    return sqlite3.connect(database(root), timeout=60)


def _locations(root: Path) -> dict[str, str]:
    """Stored artifact location -> where it is now, for each location that is not in this repository."""
    here, mark = artifacts(root).as_uri(), "/mlruns/artifacts"
    try:
        with contextlib.closing(_open(root)) as connection:
            stored = [row[0] for table, column in PATHS for row in connection.execute(f"SELECT {column} FROM {table}")]
    except sqlite3.Error as error:
        path = database(root)
        raise UserError(f"{path}: is not a whole MLflow database ({error}); delete it and run `make ui`") from None
    elsewhere = {location for location in stored if mark in location and not location.startswith(f"{here}/")}
    return {location: here + location.rpartition(mark)[2] for location in elsewhere - {here}}
