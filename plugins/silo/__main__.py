"""FedML cross-silo. `python -m fedml_noniid.plugins.silo COMMAND --help` explains a command:

kits      certificates: for the operator of a federation
shards    data files for the silos of a simulated partition
server    the server
silo      one silo
status    the state of the server
loopback  all of them on this machine, compared with the simulation
"""

from __future__ import annotations

import sys

from fedml_noniid.plugins.silo import authority, launch, loopback, shards

COMMANDS = {"kits": authority.main, "shards": shards.main, "loopback": loopback.main}

if __name__ == "__main__":
    name, *rest = sys.argv[1:] or [""]
    if name in ("", "-h", "--help"):
        sys.stdout.write(__doc__ or "")
        sys.exit(0 if name else 2)
    launch.leave(COMMANDS[name](rest) if name in COMMANDS else launch.main(sys.argv[1:]))
