"""The command `noniid`, which is also `python -m fedml_noniid`."""

from __future__ import annotations

import sys

from fedml_noniid import extras
from fedml_noniid.pipelines import edge


def main() -> int:
    """Runs the command line of this process; returns the exit code."""
    code = edge.guarded(extras.require_command) or _run()
    if "grpc" in sys.modules:
        from fedml_noniid.processes import launch

        launch.leave(code)  # gRPC's threads would keep the process alive
    return code


def _run() -> int:
    # Imported here: the base package installs this command without typer.
    from fedml_noniid.cli import app

    return app.main()


if __name__ == "__main__":
    sys.exit(main())
