"""GPU copies without a GPU: streams run in any order that their events allow, and a driver copies plain
memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipefit.errors import OutOfMemory, UsageError, WorkerFailed
from pipefit.lowering import lower
from pipefit.memory.arenas import Arena, arenas_of, pinned_sizes, room_needed
from pipefit.runtime import Trainer
from pipefit.runtime.hardware import Hardware
from pipefit.runtime.offload.copying import Slot, SlotPart
from pipefit.runtime.offload.cuda import CudaDriver, OnStreams, StreamCopies
from pipefit.runtime.offload.disk import Buffers, DiskSlot, nameless_file
from pipefit.runtime.offload.lending import CudaMemory, HostMemory, Lending, check_lending, pinned_slots
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, SavedTensors, What
from pipefit.schema.devices import Host, Member, MemberKind, parse_place
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from support.pipelines import make_cluster
from support.random_offloads import make_chain, with_disk
from support.small_tasks import alone, batch_of, plan_of

BYTES = 64
HOST = Member.host(0)


@dataclass(eq=False)
class Event:
    """An event that is set when its stream reaches it."""

    is_set: bool = False

    def synchronize(self) -> None:
        for _ in range(6000):
            if self.is_set:
                return
            time.sleep(0.01)
        raise AssertionError("the event never came")


@dataclass(eq=False)
class Stream:
    """A queue of work, and of events to wait for."""

    cuda_stream: int
    work: deque[Event | Callable[[], object]] = field(default_factory=deque)

    def record_event(self) -> Event:
        event = Event()
        self.work.append(lambda: setattr(event, "is_set", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.work.append(event)

    def synchronize(self) -> None:
        raise AssertionError("the host was stopped")

    @property
    def may_run(self) -> bool:
        return bool(self.work) and (not isinstance(self.work[0], Event) or self.work[0].is_set)

    def run_one(self) -> None:
        work = self.work.popleft()
        if not isinstance(work, Event):
            work()


class Gpu:
    """A compute stream and copy streams, with a driver that queues copies of plain memory."""

    def __init__(self) -> None:
        self.computing, self.copies = Stream(1), list[Stream]()
        self.copier = OnStreams(self._stream, lambda: self.computing, self, nullcontext)

    def _stream(self) -> Stream:
        self.copies.append(Stream(len(self.copies) + 2))
        return self.copies[-1]

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.copies[stream - 2].work.append(lambda: ctypes.memmove(target, source, nbytes))

    def run(self, rng: Random) -> None:
        """Run all queued work in an allowed order."""
        streams = [self.computing, *self.copies]
        while able := [stream for stream in streams if stream.may_run]:
            rng.choice(able).run_one()
        assert not any(stream.work for stream in streams), "the streams wait for each other"


def memory(nbytes: int = BYTES) -> Slot:
    """Return plain memory."""
    held = ctypes.create_string_buffer(nbytes)
    return Slot(nbytes, ctypes.addressof(held), held)


class Working:
    """GPU tensors that are made, offloaded, reloaded and read at random. The device has fewer places and
    slots than tensors, so that each is reused as soon as the host knows that it is free.
    """

    def __init__(self, rng: Random) -> None:
        self.rng, self.gpu, self.wrong = rng, Gpu(), list[int]()
        self.places = [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(3)]
        self.slots = {lender: [memory(BYTES // 2) for _ in range(2)] for lender in (HOST, Member.device(1))}
        self.here, self.away = dict[int, Tensor](), dict[int, list[tuple[Member, Slot]]]()
        self.leaving, self.coming = dict[int, Any](), dict[int, Any]()

    def compute(self, do: Callable[[], object]) -> None:
        self.gpu.computing.work.append(do)

    def act(self, value: int) -> None:
        """Begin or end something that is possible now; tensor `value` may be made."""
        still = [one for one in self.here if one not in self.leaving and one not in self.coming]
        begun = [one for one in self.away if one not in self.leaving and one not in self.coming]
        able = [("make", value)] * bool(self.places) + [("join out", one) for one in self.leaving]
        able += [("read", one) for one in [*still, *self.leaving]] + [("join in", one) for one in self.coming]
        able += [("out", one) for one in still if all(self.slots.values())]
        able += [("in", one) for one in begun if self.places]
        what, number = self.rng.choice(able)
        match what:
            case "make":
                place = self.here[number] = self.places.pop()
                self.compute(lambda: place.fill_(number))
            case "read":
                self.read(number)
            case "out":
                self.away[number] = [(lender, slots.pop()) for lender, slots in self.slots.items()]
                self.leaving[number] = self.start(number, outward=True)
            case "join out":
                self.gpu.copier.join(self.leaving.pop(number))
                self.places.append(self.here.pop(number))
            case "in":
                self.here[number] = self.places.pop()
                self.coming[number] = self.start(number, outward=False)
            case "join in":
                self.gpu.copier.join(self.coming.pop(number))
                self.read(number)
                for lender, slot in self.away.pop(number):
                    self.slots[lender].append(slot)

    def read(self, number: int) -> None:
        place = self.here[number]
        self.compute(lambda: self.wrong.extend([number] * bool((place != number).any())))

    def start(self, number: int, *, outward: bool) -> Any:
        """Start a copy between a tensor and its slots, half of it at each lender."""
        half, storage = BYTES // 2, self.here[number].untyped_storage()
        parts = [
            SlotPart(storage, n * half, slot, 0, half, lender)
            for n, (lender, slot) in enumerate(self.away[number])
        ]
        return self.gpu.copier.start(parts, outward=outward, seconds=0.0)


@settings(max_examples=100)
@given(st.integers(0, 10**6))
def test_whatever_the_streams_run_first_the_bytes_come_back(seed: int) -> None:
    """Tensors are computed, copied out to two lenders, overwritten as freed memory, copied back and read;
    slots are reused. In every order that the events allow, each read finds its tensor.
    """
    working = Working(Random(seed))
    for value in range(1, 40):
        working.act(value)
    working.gpu.run(working.rng)
    assert not working.wrong


def test_starting_and_joining_stops_nobody() -> None:
    """Copies do not block the host: a copy waits for the launches before it, not for those after it."""
    gpu, tensor, slot = Gpu(), torch.ones(BYTES, dtype=torch.uint8), memory()
    gpu.computing.work.append(lambda: tensor.fill_(7))
    handle = gpu.copier.start(
        [SlotPart(tensor.untyped_storage(), 0, slot, 0, BYTES)], outward=True, seconds=60.0
    )
    gpu.computing.work.append(lambda: tensor.fill_(9))
    (copies,) = gpu.copies
    assert not copies.may_run
    for _ in range(2):  # the fill and the event after it
        gpu.computing.run_one()
    while copies.may_run:
        copies.run_one()
    assert ctypes.string_at(slot.address, BYTES) == b"\7" * BYTES
    gpu.copier.join(handle)
    gpu.run(Random(0))


def test_a_join_lets_go_of_the_storages() -> None:
    """A running copy holds its tensors; after the join their owner does."""
    gpu, tensor = Gpu(), torch.ones(BYTES, dtype=torch.uint8)
    handle = gpu.copier.start(
        [SlotPart(tensor.untyped_storage(), 0, memory(), 0, BYTES)], outward=True, seconds=0.0
    )
    assert handle.parts
    gpu.copier.join(handle)
    assert not handle.parts


def test_settling_a_copy_stops_the_host_until_it_is_complete() -> None:
    """Any thread may wait for a copy; when it continues, the bytes are there and the storages are released."""
    gpu, tensor, slot = Gpu(), torch.ones(BYTES, dtype=torch.uint8), memory()
    gpu.computing.work.append(lambda: tensor.fill_(7))
    handle = gpu.copier.start(
        [SlotPart(tensor.untyped_storage(), 0, slot, 0, BYTES)], outward=True, seconds=0.0
    )
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(gpu.copier.settle, handle)
        time.sleep(0.05)
        assert not waiting.done()
        gpu.run(Random(0))
        waiting.result()
    assert ctypes.string_at(slot.address, BYTES) == b"\7" * BYTES
    assert not handle.parts


def test_copies_of_1f1b_alternate() -> None:
    """In 1F1B, outward and inward copies alternate as forwards and backwards do."""
    plan = moved(plan_of(make_chain(), [3, 3], microbatches=8), "host")
    starts = [a for a in lower(plan).actions[0] if a.kind.value in ("OFFLOAD", "RELOAD") and not a.wait]
    directions = [action.kind.value for action in starts]
    steady = directions[directions.index("RELOAD") :]
    while steady[-2:] == ["RELOAD", "RELOAD"]:
        steady.pop()
    assert len(steady) > 6 and all(a != b for a, b in pairwise(steady))


# -------------------------------------------------------------------- pinned memory


def test_slots_lie_apart_in_their_pieces() -> None:
    """Five slots of three bytes lie in blocks that are allocated once, without overlap."""
    pieces: list[Tensor] = []

    def pinned(nbytes: int) -> Tensor:
        pieces.append(torch.empty(nbytes, dtype=torch.uint8))
        return pieces[-1]

    slots = pinned_slots(Arena(HOST, 0, 5, 3), pinned)
    assert tuple(map(len, pieces)) == pinned_sizes(3, 5)
    bytes_of = {byte for slot in slots for byte in range(slot.address, slot.address + 3)}
    assert len(slots) == 5 and len(bytes_of) == 15
    for slot in slots:
        assert isinstance(slot.owner, Tensor)
        start = slot.owner.data_ptr()
        assert start <= slot.address and slot.address + 3 <= start + slot.owner.nbytes


def test_memory_that_cannot_be_pinned_is_out_of_memory() -> None:
    """A failed pinned allocation is an out-of-memory error with torch's message, the lender, the size and the
    borrower.
    """

    def pinned(nbytes: int) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(
        OutOfMemory, match=r"host0 cannot lend 15 B to device 0 \(CUDA error: out of memory\): offload less"
    ):
        pinned_slots(Arena(HOST, 0, 5, 3), pinned)


# -------------------------------------------------------------------- memory of other processes


class FakeDriver:
    """The memory of one machine: exported memory has another address in the processes that open it."""

    def __init__(self) -> None:
        self.closed: list[int] = []

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        raise AssertionError("nothing is copied here")

    def export(self, address: int) -> tuple[bytes, int]:
        return b"handle", 512

    def open(self, handle: bytes) -> int:
        if handle != b"handle":
            raise RuntimeError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE")
        return 1 << 20

    def close(self, start: int) -> None:
        self.closed.append(start)


def memory_of(driver: FakeDriver, arenas: Sequence[Arena] = (), cluster: Cluster | None = None) -> CudaMemory:
    """Return memory of GPUs that stand on the CPU."""
    return CudaMemory(
        cluster or make_cluster(2), arenas, lambda _: torch.device("cpu"), driver, lambda _: Settled()
    )


def test_what_another_process_lends_begins_where_its_handle_says() -> None:
    """A handle names a whole allocation with the arena inside. It is closed with its last slot; the lender
    uses its memory directly.
    """
    driver, arena = FakeDriver(), Arena(Member.device(1), 0, 3, 100)
    lender, borrower = (memory_of(driver) for _ in range(2))
    told, mapped = lender.lend(arena)
    mapped()
    slots = borrower.borrow(arena, told)
    assert [slot.address for slot in slots] == [(1 << 20) + 512 + n * 100 for n in range(3)]
    (own,) = {slot.owner.data_ptr() for slot in lender.borrow(arena, told) if isinstance(slot.owner, Tensor)}
    assert lender.borrow(arena, told)[0].address == own
    assert driver.closed == []
    del slots
    gc.collect()
    assert driver.closed == [1 << 20]


def test_memory_that_cannot_be_shared_is_named_with_the_way_out() -> None:
    """The error for memory that cannot be shared has the driver's message and the usual reason."""
    with pytest.raises(
        UsageError, match=r"device 0 cannot use the memory of device1 \(cuIpc.*INVALID_VALUE\): .* expandable"
    ):
        memory_of(FakeDriver()).borrow(Arena(Member.device(1), 0, 3, 100), (b"other", 0))


class Library:
    """A stand-in for libcuda that records calls and fails on request."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.failing = failing

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_MADE_UP"
            elif name == "cuMemGetAddressRange_v2":
                arguments[0]._obj.value = 4096
            elif name == "cuIpcGetMemHandle":
                arguments[0]._obj.reserved = b"a handle"
            elif name == "cuIpcOpenMemHandle_v2":
                arguments[0]._obj.value = 8192 + (arguments[1].reserved == b"a handle")
            return int(name == self.failing)

        return call


def test_the_driver_is_called_by_its_own_names() -> None:
    """The driver is called by its documented names: handles of 64 bytes for whole allocations, addresses of
    64 bits, failures in the driver's words.
    """
    library = Library()
    driver = CudaDriver(library)
    handle, offset = driver.export(5000)
    assert (len(handle), offset) == (64, 904)
    assert driver.open(handle) == 8193
    driver.close(8193)
    driver.copy(1 << 40, 1 << 41, 10, 3)
    name, arguments = library.calls[-1]
    assert name == "cuMemcpyAsync"
    assert [argument.value for argument in arguments] == [1 << 40, 1 << 41, 10, 3]
    with pytest.raises(RuntimeError, match="cuMemcpyAsync: CUDA_ERROR_MADE_UP"):
        CudaDriver(Library("cuMemcpyAsync")).copy(1, 2, 3, 4)


# -------------------------------------------------------------------- plans


def moved(plan: Plan, place: str) -> Plan:
    """Return the plan with the sigmoid's result of stage 0 moved."""
    subject = SavedTensors(tensors=((1, 0),))
    decision = Decision(stage=0, subject=subject, what=What.OFFLOAD, place=parse_place(place), ahead=1)
    return replace(plan, decisions=(decision,))


def on_gpus(place: str, host_bytes: int = 1 << 30) -> Plan:
    """Return two stages on two GPUs; the first moves the sigmoid's saved tensor of four microbatches: 512
    bytes each.
    """
    plan = plan_of(make_chain(), [3, 3], microbatches=4, schedule="gpipe")
    cluster = with_disk(
        replace(Cluster.emulated((2, 1 << 30)), backend="cuda", hosts=(Host(memory_bytes=host_bytes),))
    )
    return moved(replace(plan, cluster=cluster), place)


def test_pinned_memory_counts_as_it_is_allocated() -> None:
    """Pinned slots of 341 bytes are rounded up to powers of two; a host with a byte less is refused."""
    plan = on_gpus("host*2+device1*1")
    (arena,) = (a for a in arenas_of(plan, lower(plan)) if a.lender.kind is MemberKind.HOST)
    needed = sum(pinned_sizes(arena.slot_bytes, arena.slots))
    assert needed > arena.nbytes
    assert room_needed(plan, [arena]) == {HOST: {0: needed}}
    check_lending(on_gpus("host*2+device1*1", needed), lower(plan))
    with pytest.raises(OutOfMemory, match=r"host0 has .* too much: .* of device 0"):
        check_lending(on_gpus("host*2+device1*1", needed - 1), lower(plan))


class AtOnce(FakeDriver):
    """A copier that copies immediately, as if every stream were idle."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)


class Settled(Stream):
    """A stream whose work is done before any query."""

    def __init__(self) -> None:
        super().__init__(0)
        self.events = 0

    def record_event(self) -> Event:
        self.events += 1
        return Event(is_set=True)

    def synchronize(self) -> None:
        """Return; the work is done."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", ["device1*2+host*1", "disk", "disk*1+device1*1"])
def test_training_with_the_memory_and_copies_of_gpus_is_plain_training(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """With a driver that copies plain memory, parameters are bitwise plain training's. Slots in pinned
    blocks, on a peer and in a file are sufficient, and all are free at the end.
    """
    monkeypatch.setattr(
        "pipefit.runtime.offload.lending._pinned", lambda n: torch.empty(n, dtype=torch.uint8)
    )
    driver, queue = AtOnce(), Settled()
    task, plan = make_chain(), replace(on_gpus(place), cluster=with_disk(Cluster.emulated((2, 1 << 30))))

    def within(hardware: Hardware, program: Program, **_: object) -> Lending:
        arenas = arenas_of(hardware.plan, program)
        memory = memory_of(driver, arenas, hardware.plan.cluster)
        return Lending(arenas, lambda _: OnStreams(lambda: queue, lambda: queue, driver, nullcontext), memory)

    monkeypatch.setattr(Lending, "within", within)
    trainer = Trainer(task, plan)
    for step in range(3):
        trainer.step(batch_of(task, plan, step))
    state = alone(task, plan, 3)[1]
    assert all(torch.equal(state[name], tensor) for name, tensor in trainer.state_dict().items())
    assert not any(runner.mover.borrowed.in_use for runner in trainer.runners)
    behind = place.count("device") + place.count("host")  # each lender's part, except for files
    assert (
        queue.events == (1 + behind) * 2 * 4 * 3
    )  # before and after copies, out and in, of each microbatch and step


def on_disk(folder: Path) -> DiskSlot:
    """Return a slot in a file."""
    buffers = [
        Buffers([memoryview(bytearray(24)) for _ in range(2)], StreamCopies(Settled(), AtOnce()))
        for _ in "oi"
    ]
    file = nameless_file(Arena(Member(MemberKind.DISK, 0), 0, 1, BYTES), str(folder))
    return DiskSlot(nbytes=BYTES, owner=file, outward=buffers[0], inward=buffers[1])


def test_a_thread_that_has_written_a_file_holds_no_memory(tmp_path: Path) -> None:
    """A thread that has written a file may go idle some time after the join, and holds no memory."""
    gpu, tensor, rests = Gpu(), torch.zeros(BYTES, dtype=torch.uint8), threading.Event()
    storage = weakref.ref(tensor.untyped_storage())
    copy = gpu.copier.start(
        [SlotPart(tensor.untyped_storage(), 0, on_disk(tmp_path), 0, BYTES)], outward=True, seconds=0.0
    )
    assert copy.files is not None
    copy.files.add_done_callback(lambda _: rests.wait(60))  # on the thread, which still has its work
    gpu.run(Random(0))
    gpu.copier.join(copy)
    del tensor
    assert storage() is None
    rests.set()


def test_a_copy_to_a_file_waits_for_what_it_copies(tmp_path: Path) -> None:
    """A thread waits for the event before it reads the tensor. The join returns when the file is written, and
    raises its errors.
    """
    gpu, tensor, slot = Gpu(), torch.zeros(BYTES, dtype=torch.uint8), on_disk(tmp_path)
    parts = [SlotPart(tensor.untyped_storage(), 0, slot, 0, BYTES)]
    gpu.computing.work.append(lambda: tensor.fill_(5))
    copy = gpu.copier.start(parts, outward=True, seconds=0.0)
    assert copy.files is not None and not copy.files.done()
    gpu.computing.run_one()
    gpu.computing.run_one()
    gpu.copier.join(copy)
    assert os.pread(slot.owner.fileno(), BYTES, 0) == b"\5" * BYTES
    os.ftruncate(slot.owner.fileno(), 10)
    copy = gpu.copier.start(parts, outward=False, seconds=0.0)
    gpu.run(Random(0))
    for wait in (gpu.copier.join, gpu.copier.settle):
        with pytest.raises(WorkerFailed, match="cannot be read from the disk"):
            wait(copy)
    gpu.copier.abandon()


def test_a_lender_on_a_gpu_waits_until_all_have_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lender waits for its GPU, then for the other workers; workers on the CPU, which join copies, do not
    wait.
    """
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("own GPU"))
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("all workers"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    plan = on_gpus("device1")
    Lending(memory=HostMemory(plan.cluster, ())).settle()
    assert not calls
    Lending(memory=memory_of(FakeDriver())).settle()
    assert calls == ["own GPU", "all workers"]


def test_without_a_plan_for_gpus_nothing_of_cuda_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training with offload on emulated devices neither loads the driver nor makes a stream."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("CUDA was touched")

    for kind in (CudaDriver, OnStreams, CudaMemory):
        monkeypatch.setattr(kind, "__init__", never)
    for name in ("Stream", "current_stream", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, never)
    plan = moved(plan_of(make_chain(), [3, 3], microbatches=4), "host")
    Trainer(make_chain(), plan).step(batch_of(make_chain(), plan))
