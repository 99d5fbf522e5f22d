"""Workers on several machines: a plan whose replicas, shards and stages are across them trains as one device does."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from on_machines import EACH, MACHINES, SAVED, plain_training, plan_across
from pipefit import save
from pipefit.checkpoints import load_state_dict
from pipefit.errors import UsageError
from pipefit.memory.arenas import Arena
from pipefit.runtime.comm.transport import groups_in_order
from pipefit.runtime.offload import lending
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Member
from pipefit.schema.grids import Grid
from slices import equal

ROOT, SAME, PLAN = Path(__file__).parents[2], 1e-12, "plan.json"

pytestmark = pytest.mark.usefixtures("one_thread")


def meeting(kind: str) -> Callable[[int], list[str]]:
    """The words by which the agents of two machines find each other: those for the machine of a number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if kind == "numbered":
        return lambda number: [f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return lambda number: ["--rdzv-backend=c10d", "--rdzv-id=7", f"--rdzv-endpoint=127.0.0.1:{port}"]


def started(folder: Path, kind: str, *, restarts: int = 0) -> list[tuple[int, str, str]]:
    """What torchrun of each of two machines gives, and prints to stdout and stderr."""
    words = meeting(kind)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PIPEFIT_TOKEN": "of both"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    agents = [
        subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    f"--nnodes={MACHINES}",
                    f"--nproc-per-node={EACH}",
                ),
                *(f"--max-restarts={restarts}", *words(number)),
                *(str(ROOT / "tests" / "on_machines.py"), str(folder / PLAN)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(MACHINES)
    ]
    try:
        told = [agent.communicate(timeout=200) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [(agent.returncode, out, err) for agent, (out, err) in zip(agents, told, strict=True)]


def losses_of(printed: str) -> dict[int, float]:
    """The losses that the first worker has printed, by step; of a step that was trained twice it printed one."""
    found = dict[int, float]()
    for step, loss in re.findall(r"^(\d+) (\S+)$", printed, re.MULTILINE):
        assert found.setdefault(int(step), float(loss)) == float(loss)
    return found


@pytest.mark.gallery
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "restarts"), [("numbered", 0), ("meeting", 1)])
def test_two_machines_train_as_one_device(kind: str, restarts: int, tmp_path: Path) -> None:
    """Losses, and the parameters in the checkpoint; also where a worker is killed, and all go on from a checkpoint."""
    save(plan_across(), tmp_path / PLAN)
    if restarts:
        (tmp_path / "3").write_text("3")
    agents = started(tmp_path, kind, restarts=restarts)
    assert [code for code, _, _ in agents] == [0] * MACHINES, agents
    losses, parameters = plain_training()
    found = losses_of("".join(out for _, out, _ in agents))
    assert list(found.values()) == pytest.approx(losses, rel=SAME)
    assert equal(load_state_dict(tmp_path / SAVED), parameters, relative=SAME)


@pytest.mark.gallery
@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_is_told_on_every_machine(tmp_path: Path) -> None:
    """Its own machine's torchrun tells the signal, the other's workers which device is gone; nobody hangs."""
    save(plan_across(), tmp_path / PLAN)
    (tmp_path / "3").write_text("2")
    first, second = started(tmp_path, "numbered")
    assert first[0] and second[0]
    assert "Signal 9 (SIGKILL)" in second[2]
    assert "PeerLost" in first[2]


def test_tensor_groups_name_hosts_in_their_order() -> None:
    """As process groups do, in the order of workers: another one is refused with the order that works."""
    plan = plan_across()
    first, second = plan.stages
    assert groups_in_order(plan) == ((0, 2),)
    turned = replace(plan, stages=(replace(first, grid=Grid(devices=(2, 0), tensor=2)), second))
    with pytest.raises(
        UsageError, match=r"devices 2, 0 hold tensor shards .* name them as 0, 2 in their grid"
    ):
        groups_in_order(turned)


def test_memory_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process there may have the number of one here, and a file of the same number that is something else."""
    lender = lending.HostMemory(Cluster.emulated((2, 1 << 20)), ())
    arena = Arena(Member.device(1), 0, 3, 4096)
    told, mapped = lender.lend(arena)
    assert len(lender.borrow(arena, told)) == 3
    monkeypatch.setattr(lending, "_machine", lambda: "another")
    with pytest.raises(
        UsageError, match=r"device 0 cannot use what device1 lends \(it is on another machine\)"
    ):
        lender.borrow(arena, told)
    mapped()
