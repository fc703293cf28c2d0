"""The MLflow run of a training. A training never ends because its tracking fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from fedml_noniid.pipelines.tracking import runs
from fedml_noniid.pipelines.tracking.store import Store, spared

SOON_S = 5  # a training that ends sooner has its run from `sync` alone
Rows = Sequence[Mapping[str, float]]


class Live:
    """Records a training while it runs.

    The first error of MLflow ends the recording with a warning.

    `sync` completes the run from the files of the finished item. It makes a new one if the training
    was short or killed, or if MLflow failed.
    """

    def __init__(
        self,
        store: Store,
        experiment: str,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
    ) -> None:
        """The arguments are those of `runs.start`.

        MLflow is first called, and imported, by `log_rounds` or `fail`.
        """
        self._store, self._experiment, self._name = store, experiment, name
        self._params, self._tags = params, tags
        self._began = time.time()
        self._run: runs.Run | None = None
        self._is_over = False  # since an error
        self.run_id = ""  # stays when the recording has ended

    def log_rounds(self, rows: Rows) -> None:
        """As `Run.log_rounds`, once the training has taken SOON_S seconds."""
        if self._run is not None or time.time() - self._began >= SOON_S:
            self._record(lambda run: run.log_rounds(rows))

    def finish(self, rows: Rows, final: Mapping[str, float]) -> None:
        """As `Run.log_rounds` and `Run.finish`, unless the training was short."""
        if self._run is not None:
            self._record(lambda run: run.log_rounds(rows))
            self._record(lambda run: run.finish(final))

    def fail(self, reason: str) -> None:
        """As `Run.fail`, also for a short training: `sync` knows nothing of it."""
        self._record(lambda run: run.fail(reason))

    def _record(self, call: Callable[[runs.Run], None]) -> None:
        """Calls with the run, which begins if it has not.

        After an error, nothing is recorded any more.
        """
        if self._is_over:
            return
        self._is_over = True
        with spared(f"a part of the run {self._name}"), self._store.guarded():
            if self._run is None:
                self._run = runs.start(
                    self._store,
                    self._experiment,
                    self._name,
                    self._params,
                    self._tags,
                    self._began,
                )
                self.run_id = self._run.run_id
            call(self._run)
            self._is_over = False
