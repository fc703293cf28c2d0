"""The MLflow run of a training. A training never ends because its tracking fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fedml_noniid.pipelines.tracking import runs, view
from fedml_noniid.pipelines.tracking.store import Store, spared


class Live:
    """Records a training while it runs. The first error of MLflow ends the recording with a warning.

    `sync` completes the run from the files of the finished item.
    """

    def __init__(
        self,
        store: Store,
        experiment: str,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        system_metrics: bool = False,
    ) -> None:
        """The arguments are those of `runs.start`."""
        self._store, self._name = store, name
        self._run: runs.Run | None = None
        self.run_id = ""  # stays when the recording has ended

        def begin() -> None:
            self._run = runs.start(store, experiment, name, params, tags, system_metrics)
            self.run_id = self._run.run_id
            client = store.client()
            with store.lock("view"):  # a page that is open shows the run in its group
                view.prepare(client, runs.of_name(store, client, experiment))

        self._record(begin)

    def log_rounds(self, rows: Iterable[Mapping[str, float]]) -> None:
        """As `Run.log_rounds`."""
        if (run := self._run) is not None:
            self._record(lambda: run.log_rounds(rows))

    def finish(self, final: Mapping[str, float]) -> None:
        """As `Run.finish`."""
        if (run := self._run) is not None:
            self._record(lambda: run.finish(final))

    def fail(self, reason: str) -> None:
        """As `Run.fail`."""
        if (run := self._run) is not None:
            self._record(lambda: run.fail(reason))

    def _record(self, call: Callable[[], None]) -> None:
        """Calls. After an error, nothing is recorded any more."""
        done = False
        with spared(f"a part of the run {self._name}"), self._store.guarded():
            call()
            done = True
        if not done and self._run is not None:
            self._run.abandon()
            self._run = None
