"""Writes the sbatch script that starts a cluster as an array of jobs.

The first job also runs the scheduler, so no process stays on the login node. Before its time is
over, a job stops its worker and puts itself back into the queue.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

WARN_S = 120  # seconds before the end of a job at which Slurm warns it
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=noniid
#SBATCH --array=0-{last}
#SBATCH --cpus-per-task={cpus}
#SBATCH --time={time}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@{warn}
{options}
# Start it with sbatch. Then: noniid run --cluster {kit}
again() {{
  kill $(jobs -p)
  wait
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
  exit 0
}}
trap again TERM
if [ "$SLURM_ARRAY_TASK_ID" = 0 ]; then
  rm -f {kit}/scheduler.json
  host=$(hostname -i | cut -d " " -f 1)
  {noniid} cluster scheduler --listen "$host:0" --kit {kit} &
fi
# A worker ends with its scheduler, which has another address when its job begins again.
while true; do
  {noniid} cluster worker {kit} --processes {processes} --threads {threads} &
  wait $!
  sleep 5
done
"""


def script(
    kit: Path, jobs: int, processes: int, threads: int, time: str, options: Sequence[str]
) -> str:
    """The script for the cluster of a kit, which all nodes see in the same folder.

    `processes`: workers of a job. `threads`: of a training. `time`: of a job, as sbatch has it.
    `options`: of sbatch, as --partition=cpu.
    """
    return SCRIPT.format(
        last=jobs - 1,
        cpus=processes * threads,
        time=time,
        warn=WARN_S,
        options="".join(f"#SBATCH {option}\n" for option in options),
        kit=shlex.quote(str(kit.resolve())),
        noniid=f"{shlex.quote(sys.executable)} -m fedml_noniid",
        processes=processes,
        threads=threads,
    )
