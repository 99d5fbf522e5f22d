"""Launch files for a plan: a batch script for SLURM, and an indexed Job for Kubernetes.

Both start torchrun once on every host of the plan, with a process for each of its devices, which runs the
user's script, such as examples/pipefit_loop.py, with the plan as its argument. Images, volumes and partitions
are placeholders to fill in. (SLURM's sbatch; Kubernetes, batch/v1 Job with completionMode Indexed.)
"""

from __future__ import annotations

import shlex
from collections import Counter

from pipefit.errors import UsageError
from pipefit.schema.plan import Plan
from pipefit.texts import counted, printable

_PORT = 29500


def slurm_script(plan: Plan, file: str) -> str:
    """Return a script for sbatch that trains the plan in `file`.

    Raises:
        UsageError: hosts have different numbers of the plan's devices, or the file's name is not printable.
    """
    _check_name(file)
    hosts, each = hosts_of(plan)
    gpus = f"#SBATCH --gpus-per-node={each}\n" if plan.cluster.backend == "cuda" else ""
    return (
        "#!/bin/bash\n"
        f"#SBATCH --job-name={_name(plan)}\n"
        f"#SBATCH --nodes={hosts}\n"
        "#SBATCH --ntasks-per-node=1\n"
        f"{gpus}"
        "#SBATCH --exclusive\n"
        "set -euo pipefail\n"
        f'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        f"srun torchrun --nnodes={hosts} --nproc-per-node={each} --rdzv-backend=c10d "
        f'--rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:{_PORT}" '
        f'"${{SCRIPT:-train.py}}" {shlex.quote(file)}\n'
    )


def kubernetes_job(plan: Plan, file: str) -> str:
    """Return a Service and an indexed Job, in YAML, that train the plan in `file` on a mounted volume.

    Raises:
        UsageError: hosts have different numbers of the plan's devices, or the file's name is not printable.
    """
    _check_name(file)
    hosts, each = hosts_of(plan)
    name, named = _name(plan), shlex.quote(file).replace("$", "$$")  # Kubernetes unescapes doubled dollars
    command = (
        f"torchrun --nnodes={hosts} --nproc-per-node={each} --node-rank=$JOB_COMPLETION_INDEX "
        f"--master-addr={name}-0.{name} --master-port={_PORT} train.py {named}"
    )
    limits = (
        f"\n            limits: {{nvidia.com/gpu: '{each}'}}" if plan.cluster.backend == "cuda" else " {}"
    )
    return f"""\
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  clusterIP: None
  selector: {{job-name: {name}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: {name}}}
spec:
  completions: {hosts}
  parallelism: {hosts}
  completionMode: Indexed
  backoffLimit: 0
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      containers:
        - name: worker
          image: YOUR-IMAGE
          command: [bash, -c, {_quoted(command)}]
          resources:{limits}
          volumeMounts:
            - {{name: plans, mountPath: /plans}}
            - {{name: shared-memory, mountPath: /dev/shm}}
          workingDir: /plans
      volumes:
        - {{name: plans, persistentVolumeClaim: {{claimName: YOUR-CLAIM}}}}
        - {{name: shared-memory, emptyDir: {{medium: Memory}}}}
"""


def _check_name(file: str) -> None:
    """Check that a name can stand in a line of a file.

    Raises:
        UsageError: it has a new line, another control character, or bytes that are not UTF-8.
    """
    if not file.isprintable():
        raise UsageError(f"{printable(file)} has a name that cannot be written in a launch file: rename it")


def hosts_of(plan: Plan) -> tuple[int, int]:
    """Return the number of hosts of the plan, and the number of its devices on each.

    Raises:
        UsageError: the numbers of devices differ.
    """
    counts = Counter(plan.cluster.devices[device].host for device in plan.workers)
    if len(set(counts.values())) > 1:
        raise UsageError(
            "the plan has "
            + ", ".join(
                f"{counted(count, 'device')} on host {host}" for host, count in sorted(counts.items())
            )
            + ", but a launch file starts the same number of processes on every host; plan with another "
            "number of --stages"
        )
    return len(counts), next(iter(counts.values()))


def _name(plan: Plan) -> str:
    """Return a name that SLURM and Kubernetes accept: lower-case letters, digits and dashes."""
    letters = (
        letter if letter.isascii() and letter.isalnum() else "-" for letter in plan.profile.model.lower()
    )
    return f"pipefit-{''.join(letters)}"[:50].rstrip("-")


def _quoted(text: str) -> str:
    """Return a YAML string in single quotes."""
    doubled = text.replace("'", "''")
    return f"'{doubled}'"
