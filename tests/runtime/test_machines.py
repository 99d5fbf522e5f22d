"""Training on several machines: replicas, shards and stages across them train as on one device."""

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

from pipefit import save
from pipefit.checkpoints import load_state_dict
from pipefit.errors import UsageError
from pipefit.memory.arenas import Arena
from pipefit.runtime.comm.transport import groups_in_order
from pipefit.runtime.offload import lending
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Member
from pipefit.schema.grids import Grid
from support.local_batches import equal
from support.several_machines import EACH, MACHINES, SAVED, plain_training, plan_across

ROOT, SAME, PLAN = Path(__file__).parents[2], 1e-12, "plan.json"

pytestmark = pytest.mark.usefixtures("one_thread")


def meeting(kind: str) -> Callable[[int], list[str]]:
    """Return torchrun's rendezvous arguments for the machine of each number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if kind == "numbered":
        return lambda number: [f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return lambda number: ["--rdzv-backend=c10d", "--rdzv-id=7", f"--rdzv-endpoint=127.0.0.1:{port}"]


def started(folder: Path, kind: str, *, restarts: int = 0) -> list[tuple[int, str, str]]:
    """Run torchrun on each of two machines; return exit codes, stdout and stderr."""
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
                *(str(ROOT / "tests" / "support" / "several_machines.py"), str(folder / PLAN)),
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
    """Return the first worker's printed losses by step; a step trained twice is printed once."""
    found = dict[int, float]()
    for step, loss in re.findall(r"^(\d+) (\S+)$", printed, re.MULTILINE):
        assert found.setdefault(int(step), float(loss)) == float(loss)
    return found


@pytest.mark.gallery
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "restarts"), [("numbered", 0), ("meeting", 1)])
def test_two_machines_train_as_one_device(kind: str, restarts: int, tmp_path: Path) -> None:
    """Two machines have one device's losses and checkpoint parameters, also after a killed worker and a
    restart from a checkpoint.
    """
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
    """A killed worker is reported on every machine: the signal by its torchrun, the missing device by the
    other's workers; all end.
    """
    save(plan_across(), tmp_path / PLAN)
    (tmp_path / "3").write_text("2")
    first, second = started(tmp_path, "numbered")
    assert first[0] and second[0]
    assert "Signal 9 (SIGKILL)" in second[2]
    assert "PeerLost" in first[2]


def test_tensor_groups_name_hosts_in_their_order() -> None:
    """Tensor-parallel groups name hosts in the order of workers, as process groups do; another order is
    refused with the right one.
    """
    plan = plan_across()
    first, second = plan.stages
    assert groups_in_order(plan) == ((0, 2),)
    turned = replace(plan, stages=(replace(first, grid=Grid(devices=(2, 0), tensor=2)), second))
    with pytest.raises(UsageError, match=r"devices 2, 0 hold tensor shards .* write 0, 2 in their grid"):
        groups_in_order(turned)


def test_memory_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of another machine is refused, since its process and file numbers may also exist here."""
    lender = lending.HostMemory(Cluster.emulated((2, 1 << 20)), ())
    arena = Arena(Member.device(1), 0, 3, 4096)
    told, mapped = lender.lend(arena)
    assert len(lender.borrow(arena, told)) == 3
    monkeypatch.setattr(lending, "_machine", lambda: "another")
    with pytest.raises(
        UsageError, match=r"device 0 cannot use the memory of device1 \(it is on another machine\)"
    ):
        lender.borrow(arena, told)
    mapped()
