"""srun of SLURM for two nodes of a test: starts the tasks of a job step with the variables that SLURM sets.

$TEST_NODES is a JSON list of the words that precede a command on each node. SLURM_* come from the batch job, whose
options are those of the script: see `TwoNodes.batch`.
"""

import json
import os
import subprocess
import sys


def main(words: list[str]) -> int:
    """Start the command `words` on all nodes; return the largest exit code."""
    nodes, each = json.loads(os.environ["TEST_NODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
    tasks = []
    for number, before in enumerate(nodes):
        for local in range(each):
            own = {"PROCID": number * each + local, "LOCALID": local, "NODEID": number, "GTIDS": local}
            step = {"STEP_ID": 0, "STEP_NUM_TASKS": each * len(nodes), "STEP_NUM_NODES": len(nodes)}
            step |= {"STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"], "STEP_TASKS_PER_NODE": f"{each}(x{len(nodes)})"}
            variables = {f"SLURM_{name}": str(value) for name, value in {**own, **step}.items()}
            tasks.append(subprocess.Popen([*before, *words], env={**os.environ, **variables}))
    return max(abs(task.wait()) for task in tasks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
