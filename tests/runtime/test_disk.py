"""Tensors offloaded to a disk: the bytes in its file, the host's buffers, and no leftovers."""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import tempfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipefit
from pipefit.errors import OutOfMemory, UsageError, WorkerFailed
from pipefit.memory.arenas import Arena
from pipefit.runtime import Trainer, certify
from pipefit.runtime.offload.copying import SlotPart
from pipefit.runtime.offload.disk import DiskSlot, nameless_file, plain_buffers
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, SavedTensors, What
from pipefit.schema.devices import Link, parse_place
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Stream
from support.memory_samples import samples
from support.process_tree import descendants, open_files
from support.random_offloads import make_chain, make_wide, with_disk
from support.small_tasks import batch_of, plan_of

SLOT = 512  # bytes moved per microbatch: the sigmoid's result, 2 samples of 64 numbers
DISK = parse_place("disk0").members[0]


def to_disk(cluster: Cluster, *, place: str = "disk", behind: int = 1) -> Plan:
    """Return two stages of `make_chain` under GPipe; the first offloads the sigmoid's saved tensor of four
    microbatches.
    """
    plan = plan_of(make_chain(), [3, 3], microbatches=4, schedule="gpipe")
    moved = SavedTensors(tensors=((1, 0),))
    decision = Decision(stage=0, subject=moved, what=What.OFFLOAD, place=parse_place(place), behind=behind)
    return replace(plan, cluster=cluster, decisions=(decision,))


def emulated(folder: Path | None = None, *, disk_bytes: int = 1 << 20, host_bytes: int = 1 << 30) -> Cluster:
    """Return two devices, and a host with a disk."""
    cluster = with_disk(Cluster.emulated((2, 1 << 20)), folder, disk_bytes)
    return replace(cluster, hosts=(replace(cluster.hosts[0], memory_bytes=host_bytes),))


def files_in(folder: Path) -> list[str]:
    """Return the files in a folder that this process or its descendants have open."""
    family = (os.getpid(), *descendants(os.getpid()))
    return [name for process in family for name in open_files(process) if str(folder) in name]


def slot_in(folder: Path, nbytes: int, buffer_bytes: int) -> DiskSlot:
    """Return the second of two slots of a file."""
    file = nameless_file(Arena(DISK, 0, 2, nbytes), str(folder))
    outward, inward = (plain_buffers(buffer_bytes) for _ in range(2))
    return DiskSlot(nbytes=nbytes, address=nbytes, owner=file, outward=outward, inward=inward)


# -------------------------------------------------------------------- slots


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_is_read_back(tmp_path: Path, seed: int) -> None:
    """Parts of several storages, of any sizes, are written one after the other to the file and read back to
    their places with any buffer size.
    """
    rng = Random(seed)
    sizes = [rng.choice([1, 7, 64, rng.randint(1, 3000)]) for _ in range(rng.randint(1, 9))]
    tensors = [torch.randint(0, 256, (size + 9,), dtype=torch.uint8) for size in sizes]
    wanted, before = [tensor.clone() for tensor in tensors], rng.randint(0, 50)
    slot = slot_in(tmp_path, before + sum(sizes), rng.choice([1, 16, 500, 4096, 1 << 20][seed % 2 :]))
    starts = [before + sum(sizes[:n]) for n in range(len(sizes))]
    parts = [
        SlotPart(tensor.untyped_storage(), 5, slot, start, size)
        for tensor, start, size in zip(tensors, starts, sizes, strict=True)
    ]
    slot.carry(parts, outward=True)
    row = b"".join(bytes(tensor[5 : 5 + size].tolist()) for tensor, size in zip(tensors, sizes, strict=True))
    assert os.pread(slot.owner.fileno(), len(row) + 1, slot.nbytes + before) == row
    for tensor, size in zip(tensors, sizes, strict=True):
        tensor[5 : 5 + size] = 0
    slot.carry(parts, outward=False)
    assert all(map(torch.equal, tensors, wanted))


def test_small_tensors_are_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty tensors of a bundle are gathered: they take one write and one read per filled buffer."""
    calls, pwrite, preadv = Counter[str](), os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda *args: calls.update(["write"]) or pwrite(*args))
    monkeypatch.setattr(os, "preadv", lambda *args: calls.update(["read"]) or preadv(*args))
    slot, tensors = slot_in(tmp_path, 4000, 2048), [torch.zeros(100, dtype=torch.uint8) for _ in range(40)]
    parts = [SlotPart(tensor.untyped_storage(), 0, slot, 100 * n, 100) for n, tensor in enumerate(tensors)]
    slot.carry(parts, outward=True)
    slot.carry(parts, outward=False)
    assert calls == {"write": 2, "read": 2}


def test_a_file_has_its_blocks_from_the_start_and_no_name(tmp_path: Path) -> None:
    """A file without a name has its blocks allocated from the start; the folder stays empty, and closing it
    frees the disk.
    """
    file = nameless_file(Arena(DISK, 0, 3, 1 << 20), str(tmp_path))
    assert os.fstat(file.fileno()).st_blocks * 512 >= 3 << 20
    assert os.listdir(tmp_path) == []
    assert len(files_in(tmp_path)) == 1
    file.close()
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(("outward", "words"), [(True, "written to"), (False, "read from")])
def test_a_disk_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outward: bool, words: str
) -> None:
    """A disk's error is raised in the thread that waits for the copy, with the system's message."""

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite" if outward else "preadv", fail)
    slot, tensor = slot_in(tmp_path, 8, 8), torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(
        WorkerFailed, match=rf"cannot be {words} the disk \(Input/output error\): offload to the host"
    ):
        slot.carry([SlotPart(tensor.untyped_storage(), 0, slot, 0, 8)], outward=outward)


# -------------------------------------------------------------------- training


def test_workers_move_to_the_disk_what_one_process_moves(tmp_path: Path) -> None:
    """Losses are those of a plan without moves, and all memory samples are those of one process and of the
    dry run. While they run, each of two workers has one open, unlinked file in the folder.
    """
    plan = to_disk(emulated(tmp_path), place="disk*2+device1*1+host*1")
    back = replace(
        plan.decisions[0], stage=1, subject=SavedTensors(tensors=((4, 0),)), place=parse_place("disk0")
    )
    plan = replace(plan, decisions=(*plan.decisions, back))
    seen: list[tuple[int, list[str]]] = []

    def look(*_: Any) -> None:
        seen.append((len(files_in(tmp_path)), os.listdir(tmp_path)))

    losses, trace = pipefit.train(make_chain, plan, steps=2, on_step=look)
    assert seen[0] == (2, [])
    assert files_in(tmp_path) == []
    assert samples(trace) == samples(certify(make_chain(), plan, steps=2))
    trainers = [Trainer(make_chain(), one) for one in (plan, replace(plan, decisions=()))]
    for step in range(2):
        torch.manual_seed(step)
        batch = make_chain().batch(plan.training.batch_size)
        assert [trainer.step(batch) for trainer in trainers] == [losses[step]] * 2
    assert samples(trainers[0].trace) == samples(trace)


def test_without_a_named_folder_files_are_where_temporary_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host without a named folder uses the system's folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plan = to_disk(emulated())
    trainer = Trainer(make_chain(), plan)
    assert len(files_in(tmp_path)) == 1
    trainer.step(batch_of(make_chain(), plan))


@pytest.mark.parametrize("accident", ["killed", "raises"])
def test_a_worker_that_dies_leaves_nothing_on_the_disk(tmp_path: Path, accident: str) -> None:
    """A worker killed or failing in the middle of a step leaves an empty folder and no open file."""
    with pytest.raises(WorkerFailed, match="worker 1"):
        pipefit.train(partial(make_chain, accident), to_disk(emulated(tmp_path)), steps=2)
    assert mp.active_children() == []
    assert os.listdir(tmp_path) == [] and files_in(tmp_path) == []


def test_copies_take_the_time_of_the_disk(tmp_path: Path) -> None:
    """A copy takes at least the time of the slowest link on the way to the disk, plus all latencies."""
    plan = plan_of(make_wide(), [4], microbatches=2, schedule="gpipe")
    size = next(t for t in plan.measurement.costs[1].saved if t.index == 0).nbytes
    links = (
        Link.between("device0", "host0", bytes_per_second=1e12, latency_seconds=0.01),
        Link.between("host0", "disk0", bytes_per_second=size / 0.03, latency_seconds=0.01),
    )
    cluster = replace(with_disk(plan.cluster, tmp_path), links=links)
    moved = SavedTensors(tensors=((1, 0),))
    decision = Decision(stage=0, subject=moved, what=What.OFFLOAD, place=parse_place("disk"))
    _, trace = pipefit.train(make_wide, replace(plan, cluster=cluster, decisions=(decision,)), steps=1)
    copies = [e for e in trace.devices[0].events if e.stream is Stream.COPY]
    ends = {e.action.replace("WAIT_", ""): e.end_seconds for e in copies if "WAIT" in e.action}
    assert min(ends[e.action] - e.start_seconds for e in copies if "WAIT" not in e.action) >= 0.05


# -------------------------------------------------------------------- room


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("room", "who"),
    [({"disk_bytes": 4 * SLOT}, "disk0"), ({"host_bytes": 4 * SLOT}, "host0")],
    ids=["disk", "host"],
)
def test_a_disk_counts_its_slots_and_its_host_four_buffers(room: dict[str, int], who: str) -> None:
    """Four microbatches need four slots on the disk, and on the host two buffers of a slot for each
    direction; with one byte less, training does not begin.
    """
    tight = {name: nbytes - 1 for name, nbytes in room.items()}
    certify(make_chain(), to_disk(emulated(**room)))
    for run in (Trainer, certify):
        with pytest.raises(
            OutOfMemory, match=rf"{who} has .* would need 2.00 KiB for offloaded tensors, 1 B too much"
        ):
            run(make_chain(), to_disk(emulated(**tight)))


def test_a_full_disk_is_refused_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is refused by the launching process before a worker starts, with the missing bytes."""

    def never(*_: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr("pipefit.runtime.launch.launch.start", never)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=4 * SLOT - 1, f_frsize=1))
    with pytest.raises(
        OutOfMemory,
        match=r"need 2.00 KiB in '.*', but its disk has only 2.00 KiB free, 1 B too little: offload less",
    ):
        pipefit.train(make_chain, to_disk(emulated(tmp_path)), steps=1)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A missing folder is named with the remedy; a dry run, which writes nothing, does not check it."""
    plan = to_disk(emulated(tmp_path / "missing"))
    certify(make_chain(), plan)
    with pytest.raises(
        UsageError, match=r"cannot be offloaded to '.*missing', because .* disk_folder for the host"
    ):
        Trainer(make_chain(), plan)


def test_a_disk_that_cannot_allocate_is_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up after the check raises an out-of-memory error when the file is made."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        OutOfMemory, match=r"disk0 cannot keep 2.00 KiB of device 0 in .* \(No space left on device\)"
    ):
        Trainer(make_chain(), to_disk(emulated(tmp_path)))
