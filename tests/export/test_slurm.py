"""A SLURM of two machines, both simulated by this one, starts the script of `pipefit export --to slurm`."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pipefit import save
from pipefit.checkpoints import load_state_dict
from pipefit.export import slurm_script
from support.local_batches import equal
from support.several_machines import MACHINES, SAVED, plain_training, plan_across

ROOT, DAEMONS = Path(__file__).parents[2], ("slurmctld", "slurmd", "sbatch", "srun")
SECONDS = 100
CONFIGURATION = """
ClusterName=two
SlurmctldHost={here}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
"""
MACHINE = "NodeName=127.0.0.{number} NodeHostname={here} NodeAddr=127.0.0.{number} Port={port} CPUs=2 State=UNKNOWN\n"


@contextmanager
def machines(folder: Path) -> Iterator[dict[str, str]]:
    """Start a controller and a daemon for each machine, all on this one; return their environment."""
    if os.getuid() or any(shutil.which(daemon) is None for daemon in DAEMONS):
        pytest.skip("needs SLURM, and root to start it")
    (folder / "state").mkdir()
    here, ports = socket.gethostname().partition(".")[0], free_ports(1 + MACHINES)
    numbers = range(1, 1 + MACHINES)
    written = CONFIGURATION.format(here=here, ports=ports, folder=folder)
    written += "".join(MACHINE.format(number=number, here=here, port=ports[number]) for number in numbers)
    (folder / "slurm.conf").write_text(written + "PartitionName=main Nodes=ALL Default=YES State=UP\n")
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"127.0.0.{number}"] for number in numbers)]
    with ExitStack() as stack:
        for words in daemons:
            silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            daemon = stack.enter_context(subprocess.Popen(words, env=environment, **silent))
            stack.callback(daemon.terminate)
        await_that(
            lambda: told(["sinfo", "-h", "-t", "idle", "-o", "%D"], environment).strip() == str(MACHINES)
        )
        yield environment


def free_ports(count: int) -> list[int]:
    """Return this number of unused ports."""
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def told(words: list[str], environment: dict[str, str], folder: Path | None = None) -> str:
    """Return the output of a command, which may fail until the daemons respond."""
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout


def await_that(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.gallery
@pytest.mark.timeout(300)
def test_sbatch_trains_a_plan_across_two_machines(tmp_path: Path) -> None:
    """The exported script, submitted unchanged, runs torchrun on each machine and gives the numbers of a
    plain loop.
    """
    plan = plan_across()
    save(plan, tmp_path / "a plan.json")
    (tmp_path / "train.sbatch").write_text(slurm_script(plan, "a plan.json"))
    with machines(tmp_path) as environment:
        environment |= {
            "SCRIPT": str(ROOT / "tests" / "support" / "several_machines.py"),
            "OMP_NUM_THREADS": "1",
        }
        environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
        environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
        number = told(["sbatch", "--parsable", "train.sbatch"], environment, tmp_path).strip()
        await_that(lambda: not told(["squeue", "-h", "-j", number], environment).strip())
        printed = (tmp_path / f"slurm-{number}.out").read_text()
    losses, parameters = plain_training()
    found = [float(loss) for loss in re.findall(r"^\d+ (\S+)$", printed, re.MULTILINE)]
    assert found == pytest.approx(losses, rel=1e-12), printed
    assert equal(load_state_dict(tmp_path / SAVED), parameters, relative=1e-12)
