"""The command `noniid`, which is also `python -m fedml_noniid`."""

from __future__ import annotations

import sys

from fedml_noniid.cli.app import main as run


def main() -> int:
    """Runs the command line of this process; returns the exit code."""
    code = run()
    if "grpc" in sys.modules:
        from fedml_noniid.plugins.silo import launch

        launch.leave(code)  # gRPC's threads would keep the process alive
    return code


if __name__ == "__main__":
    sys.exit(main())
