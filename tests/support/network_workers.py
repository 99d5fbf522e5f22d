"""Workers that only communicate, over gloo, started by `tests/runtime/test_transport.py`."""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from pipefit.capture import Task
from pipefit.errors import PeerLost
from pipefit.lowering import lower
from pipefit.measure.cpu import Meter
from pipefit.runtime.comm.transport import TOKEN, HostBuffers, Network, check_members, connect
from pipefit.schema.actions import message_of, parse_action
from pipefit.schema.plan import Plan
from support.resumed_tasks import named

PATIENCE = timedelta(seconds=60)


def talk(rank: int, plan: Plan, store: str, pipe: Connection, by_way_of_the_host: bool) -> None:
    """Join the others, cross messages in all channels before the first join, all-reduce; send the results to
    the parent, and the bytes left in 100 more rounds after all joins.

    If messages go through the host, tensors are overwritten once they are in flight, and are empty until they
    are joined.
    """
    torch.set_num_threads(1)
    world = len(plan.stages)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=PATIENCE
    )
    direct = connect(plan, lower(plan), torch.device("cpu"), PATIENCE)
    network = HostBuffers(direct) if by_way_of_the_host else direct
    total = torch.tensor([float(rank)])
    agree, here = parse_action(f"{rank}AGREE"), plan.stages[rank].device
    sums = [(agree, network.collect(agree, [total], plan.workers, here))]
    sent, received, handles = [], {}, []
    for microbatch in range(20):
        for word, other in (
            ("RECV_F", rank - 1),
            ("RECV_B", rank + 1),
            ("SEND_B", rank - 1),
            ("SEND_F", rank + 1),
        ):
            if not 0 <= other < world:
                continue
            action = parse_action(f"{rank}{word}{microbatch}")
            size = 100_000 if microbatch % 3 == 0 else 5
            if word.startswith("SEND"):
                tensors = [
                    torch.full((size,), what_is_sent(rank, word, microbatch)),
                    torch.tensor([microbatch]),
                ]
                sent.append(tensors)
            else:
                tensors = [torch.zeros(size), torch.zeros(1, dtype=torch.int64)]
                received[str(action)] = tensors
            handles.append((action, network.start(action, tensors, message_of(here, action, plan.placement))))
            if by_way_of_the_host and word.startswith("SEND"):
                tensors[0].fill_(-1)
    if by_way_of_the_host:
        time.sleep(0.2)
        assert not any(big.any() for big, _ in received.values())
    for action, handle in [*handles, *sums]:
        network.join(action, handle)
    kept = sum(_kept_bytes(direct, plan, rank) for _ in range(100))
    told = {text: (big.unique().tolist(), small.item()) for text, (big, small) in received.items()}
    pipe.send((total.item(), told, kept))
    dist.destroy_process_group()


def _kept_bytes(network: Network, plan: Plan, rank: int) -> int:
    """Return the bytes that a meter counts for joined sums and messages to and from the next stages."""
    here = plan.stages[rank].device
    with Meter(here) as meter:
        for text in (
            f"{rank}AGREE",
            *([f"{rank}SEND_F0"] if rank < 2 else []),
            *([f"{rank}RECV_F0"] if rank else []),
        ):
            tensors, action = [torch.ones(36)], parse_action(text)
            if text.endswith("AGREE"):
                handle = network.collect(action, tensors, plan.workers, here)
            else:
                handle = network.start(action, tensors, message_of(here, action, plan.placement))
            network.join(action, handle)
            del handle, tensors
    return meter.total


def what_is_sent(rank: int, word: str, microbatch: int) -> float:
    """Return the tensor that stage `rank` sends; it encodes stage, direction and microbatch."""
    return 1000.0 * rank + 100.0 * (word[-1] == "B") + microbatch


def show(rank: int, token: str, store: str, pipe: Connection) -> None:
    """Join another worker, show it this token, and send the result to the parent."""
    os.environ[TOKEN] = token
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=PATIENCE)
    try:
        check_members(None, "both")
    except PeerLost as error:
        pipe.send(str(error))
    else:
        pipe.send("welcome")
    os._exit(0)


class _Late(dist.Store):
    """A store that hides the others' addresses until a stranger has connected: a file has the number of this
    worker.
    """

    def __init__(self, store: dist.Store, folder: Path) -> None:
        super().__init__()
        self._store, self._met = store, folder / met(os.getpid())

    def set(self, key: str, value: Any) -> None:
        """Set a value for all others."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Get a value once it has been set."""
        while not self._met.exists():
            time.sleep(0.01)
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta = PATIENCE) -> None:
        """Wait until all of these have been set."""
        self._store.wait(keys, timeout)


def met(process: int) -> str:
    """Return the name of the file that marks a stranger's connection to a process."""
    return f"met-{process}"


def show_memory(pipe: Connection) -> None:
    """Send the flags of the memory of a 16 MiB tensor, as Linux shows them."""
    tensor, flags, inside = torch.ones(4 << 20), list[str](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *words = line.split()
        if "-" in head:
            first, end = (int(part, 16) for part in head.split("-"))
            inside = first <= tensor.data_ptr() < end
        elif head == "VmFlags:" and inside:
            flags = words
    pipe.send(flags)


def late(flags: str) -> Task:
    """Return a task with dropout, whose workers listen until a stranger has connected before they connect, in
    as many starts as each of them has files in a folder: a stranger may take their places meanwhile.
    """
    join_late(Path(flags), mp.current_process().name)
    return named("dropout")


def join_late(flags: Path, worker: str) -> None:
    """Make this worker listen until a stranger has connected, if a folder has a file of its name."""
    join, mine = dist.init_process_group, sorted(flags.glob(f"*-{worker}"))

    def joins(backend: str, *, store: dist.Store | None = None, **options: Any) -> None:
        if store is None:  # torchrun's
            store, options["rank"], options["world_size"] = next(dist.rendezvous("env://"))
        join(backend, store=_Late(store, flags), **options)

    if mine:
        mine[0].unlink()
        mock.patch.object(dist, "init_process_group", joins).start()


if __name__ == "__main__":
    # FLAGS SCRIPT ARGUMENTS...: a script that torchrun starts, with workers that are late
    join_late(Path(sys.argv[1]), f"torchrun-worker-{os.environ['RANK']}")
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
