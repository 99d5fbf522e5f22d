"""Transports of boundary tensors: between processes over `torch.distributed`, or inside one process.

A transport starts a transfer and returns a handle; `ready` says whether joining it would block, and `join`
waits for its end. A receiver allocates its buffers before it starts; a sender keeps its tensors until it has
joined.
"""

from __future__ import annotations

import atexit
import hmac
import os
import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from hashlib import sha256
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from pipefit.errors import PeerLost, UsageError, all_lines
from pipefit.fake_cuda.target import is_fake
from pipefit.lowering import whole_run
from pipefit.memory import sums, tensor_groups
from pipefit.runtime.engine.tensor_groups import TensorGroups, Together, lost, naming_the_lost
from pipefit.runtime.hardware import Hardware, check_hosts
from pipefit.runtime.offload.lending import Lending
from pipefit.schema.actions import RECEIVES, SENDS, Action, Kind, Message, Placement, collective
from pipefit.schema.plan import Plan
from pipefit.schema.program import Channel, Program, channel, channels
from pipefit.tensor_parallel import Collectives, Loan, ProcessGroupCollectives
from pipefit.texts import counted
from pipefit.torch_internals import end_coalescing, start_coalescing

# ---- Transfers of several tensors
# NCCL executes a message or collective of several tensors as one, in one kernel with one latency. A message
# of one tensor is sent in the same way: torch gives messages that are not coalesced a separate communicator
# (`ProcessGroupNCCL::pointToPoint`), which would be made, and waited for, in the middle of a step. Gloo would
# copy the tensors into one and back, which takes uncounted memory, so it gets each tensor separately.


def begin_together(
    group: dist.ProcessGroup, tensors: Sequence[Tensor], begins: Sequence[Callable[[], dist.Work | None]]
) -> list[dist.Work]:
    """Begin transfers in a process group, one of each tensor; return the work to wait for.

    Raises:
        RuntimeError: one could not begin; then no transfer is held back.
    """
    together = len(tensors) > 0 and tensors[0].is_cuda
    if together:
        start_coalescing(group, tensors[0].device)
    try:
        begun = [begin() for begin in begins]
    except BaseException:
        if together:
            with suppress(RuntimeError):  # the first error is the one to report
                end_coalescing(group, tensors[0].device)
        raise
    if together:
        begun = [end_coalescing(group, tensors[0].device)]
    assert None not in begun, "this worker is in the group"
    return [work for work in begun if work is not None]


# ---- Authentication of workers
# gloo accepts whatever process connects first under a worker's number. So before tensors are exchanged, the
# members of a process group send each other a digest of the training's token, of the group, and of sender and
# receiver. A stranger cannot make it, and a received digest is useless elsewhere. `pipefit train` makes a
# token for every start, and restarts the workers if a stranger has taken a place (`runtime.launch.restarts`).
# Under `torchrun` it is the environment's `PIPEFIT_TOKEN`, the same text for all workers; without one the
# digests keep no stranger out. It costs one message of 32 bytes to each other member when a group is made.
# NCCL's groups are not checked.

TOKEN = "PIPEFIT_TOKEN"  # noqa: S105 - the name of a variable
_PATIENCE = timedelta(seconds=20)  # members of a group send it right after making the group
_FAREWELL = timedelta(seconds=5)  # for messages on their way to a refused process


def new_token() -> str:
    """Return a random token."""
    return secrets.token_hex(16)


def check_members(group: dist.ProcessGroup | None, name: str) -> None:
    """Check that all members of a group know the token.

    Every member must call it, with the same `name` for the group.

    Raises:
        PeerLost: one does not, or is silent.
    """
    mine, members = dist.get_rank(), dist.get_process_group_ranks(group)
    if mine not in members or dist.get_backend(group) != "gloo":
        return
    others = [rank for rank in members if rank != mine]
    told = {rank: torch.zeros(32, dtype=torch.uint8) for rank in others}
    sent = [torch.frombuffer(bytearray(_digest(name, mine, rank)), dtype=torch.uint8) for rank in others]
    begun = list[dist.Work]()
    for rank, tensor in zip(others, sent, strict=True):
        with _with(rank):
            begun.append(_under_way(dist.isend(tensor, rank, group=group)))
    for rank, tensor in told.items():
        with _with(rank):
            _under_way(dist.irecv(tensor, rank, group=group)).wait(_PATIENCE)
        if not hmac.compare_digest(bytes(tensor.tolist()), _digest(name, rank, mine)):
            _let_go(begun)  # a worker with another token receives ours before we exit, and reports the same
            raise PeerLost(
                f"a process that connected as worker {rank} does not know the token of this training: "
                f"another program took its place, or workers were started with different values of {TOKEN}"
            )
    for rank, work in zip(others, begun, strict=True):
        with _with(rank):
            work.wait()


@contextmanager
def _with(rank: int) -> Iterator[None]:
    """Report errors of messages to or from a worker in the context as the loss of the worker."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(
            f"worker {rank} connected but did not send the token of this training: it ended, or another "
            f"program took its place ({all_lines(error)})"
        ) from error


def _under_way(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this worker is in the group"
    return work


def _let_go(begun: Sequence[dist.Work]) -> None:
    """Wait shortly for messages that may never arrive."""
    for work in begun:
        with suppress(RuntimeError):
            work.wait(_FAREWELL)


def _digest(name: str, teller: int, hearer: int) -> bytes:
    token = os.environ.get(TOKEN, "").encode()
    return hmac.digest(token, f"{name} {teller} {hearer}".encode(), "sha256")


# ---- Transports

_UnderWay = Sequence[dist.Work | Loan]  # joined in order
Owners = Sequence[int]  # the device that owns each tensor of a collective; empty without owners


class Transport:
    """Exchange of tensors between a `DeviceRunner` and others; this one is for a device without others.

    It receives zeros, and sent tensors are dropped; all transfers are complete from the start.
    """

    def start(self, action: Action, tensors: list[Tensor], message: Message) -> Any:
        """Begin to send `tensors` as `message`, or to receive them; return a handle to join."""
        for tensor in tensors if action.kind in RECEIVES else ():
            if not is_fake(tensor):  # fake tensors have no numbers
                tensor.zero_()

    def collect(
        self,
        action: Action,
        tensors: list[Tensor],
        members: tuple[int, ...],
        device: int,
        owners: Owners = (),
    ) -> Any:
        """Begin to sum `tensors` over the devices `members` in place, or to broadcast them for an UNSHARD.

        The sum goes to all members, or only to the `owners` of the tensors. `device` is this one.
        """

    def ready(self, handle: Any) -> bool:
        """Return whether `join` would return at once."""
        return True

    def join(self, action: Action, handle: Any) -> None:
        """Wait until the transfer is complete."""

    def abandon(self) -> None:
        """Drop all transfers after a failed step: its messages must not reach the next one."""


@dataclass(slots=True)
class _Message:
    """A message inside one process, copied when both ends have started."""

    sent: list[Tensor] | None = None
    buffers: list[Tensor] | None = None
    done: bool = False

    def deliver(self) -> None:
        if self.sent is not None and self.buffers is not None:
            for buffer, tensor in zip(self.buffers, self.sent, strict=True):
                buffer.copy_(tensor)
            self.sent = self.buffers = None
            self.done = True


@dataclass(slots=True)
class _ProcessCollective:
    """A collective inside one process, computed when its last member has started it."""

    tensors: dict[int, list[Tensor]] = field(default_factory=dict)
    done: bool = False

    def add_up(self, members: Sequence[int], owners: Owners) -> None:
        """Sum the tensors in the order of the members, for all of them or for the owners."""
        for number, (first, *others) in enumerate(
            zip(*(self.tensors[member] for member in members), strict=True)
        ):
            for other in others:
                first.add_(other.to(first.device))
            for member, other in zip(members[1:], others, strict=True):
                if not owners or owners[number] == member:
                    other.copy_(first)
        self._end()

    def hand_out(self, owners: Owners) -> None:
        """Copy the tensors from their owners to all members."""
        for number, owner in enumerate(owners):
            for tensors in self.tensors.values():
                if tensors is not self.tensors[owner]:
                    tensors[number].copy_(self.tensors[owner][number])
        self._end()

    def _end(self) -> None:
        self.tensors.clear()
        self.done = True


@dataclass(slots=True)
class InProcess(Transport):
    """The transport inside one process: a message is delivered when both ends have started.

    A failed step leaves messages with one started end; `abandon` drops them.
    """

    messages: dict[Message, _Message] = field(default_factory=dict)
    sums: dict[Hashable, _ProcessCollective] = field(default_factory=dict)

    def start(self, action: Action, tensors: list[Tensor], message: Message) -> _Message:
        result = self.messages.pop(message, None)
        if result is None:
            result = self.messages[message] = _Message()
        if action.kind in SENDS:
            result.sent = tensors
        else:
            result.buffers = tensors
        result.deliver()
        return result

    def collect(
        self,
        action: Action,
        tensors: list[Tensor],
        members: tuple[int, ...],
        device: int,
        owners: Owners = (),
    ) -> _ProcessCollective:
        key = collective(action), action.microbatch
        total = self.sums.setdefault(key, _ProcessCollective())
        total.tensors[device] = tensors
        if len(total.tensors) == len(members):
            del self.sums[key]
            if action.kind is Kind.UNSHARD:
                total.hand_out(owners)
            else:
                total.add_up(members, owners)
        return total

    def ready(self, handle: _Message | _ProcessCollective) -> bool:
        return handle.done

    def join(self, action: Action, handle: _Message | _ProcessCollective) -> None:
        assert handle.done

    def abandon(self) -> None:
        self.messages.clear()
        self.sums.clear()


@dataclass(slots=True, kw_only=True)
class Network(Transport):
    """The transport between processes.

    It uses `torch.distributed` point to point, first in first out in every channel. Messages between two
    stages of this process's device never leave it. `timeout` limits a join. It is None on GPUs, where a join
    makes the device wait, not the process: with a timeout the process would poll instead, and could not run
    ahead.
    """

    timeout: timedelta | None
    device: int  # the cluster's device that this process runs
    placement: Placement
    workers: dict[int, int]  # the worker that runs each device
    channels: dict[Channel, dist.ProcessGroup]
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)  # by the devices that sum
    tensor_groups: dict[tuple[int, ...], dist.ProcessGroup] = field(
        default_factory=dict
    )  # by the devices that compute layers together
    inside: InProcess = field(default_factory=InProcess)

    def start(self, action: Action, tensors: list[Tensor], message: Message) -> _UnderWay | _Message:
        name = channel(self.device, action, self.placement)
        if name is None:
            return self.inside.start(action, tensors, message)
        begin, peer = (dist.isend, message.target) if action.kind in SENDS else (dist.irecv, message.source)
        try:
            group, rank = self.channels[name], self.workers[peer]
            return begin_together(
                group, tensors, [partial(begin, tensor, rank, group=group) for tensor in tensors]
            )
        except RuntimeError as error:
            raise lost(f"{action} failed: device {peer} has ended", error, self.device) from error

    def collect(
        self,
        action: Action,
        tensors: list[Tensor],
        members: tuple[int, ...],
        device: int,
        owners: Owners = (),
    ) -> _UnderWay:
        group, ranks, loan = self.groups[members], [self.workers[owner] for owner in owners], Loan(tensors)
        try:
            if not ranks:
                begins = [
                    partial(dist.all_reduce, tensor, group=group, async_op=True) for tensor in loan.tensors
                ]
            else:
                begin = dist.broadcast if action.kind is Kind.UNSHARD else dist.reduce
                pairs = zip(loan.tensors, ranks, strict=True)
                begins = [partial(begin, tensor, rank, group=group, async_op=True) for tensor, rank in pairs]
            return [*begin_together(group, loan.tensors, begins), loan]
        except RuntimeError as error:
            others = " or ".join(str(member) for member in members if member != device)
            raise lost(f"{action} failed: device {others} has ended", error, self.device) from error

    def ready(self, handle: _UnderWay | _Message) -> bool:
        return True  # joining may block: this process runs only this device

    def join(self, action: Action, handle: _UnderWay | _Message) -> None:
        if isinstance(handle, _Message):
            return self.inside.join(action, handle)
        for work in handle:
            try:
                self._wait(work)
            except RuntimeError as error:
                what = f"{action} failed: the peer device has ended or hangs"
                raise lost(what, error, self.device) from error
        return None

    def end(self, group: tuple[int, ...], rank: int) -> Collectives:
        """Return this worker's collectives in a tensor group, in which it has this `rank`."""
        result = ProcessGroupCollectives(
            group=self.tensor_groups[group], around=partial(naming_the_lost, group, self.device)
        )
        assert result.rank == rank, "workers are in the order of devices"
        return result

    def abandon(self) -> None:
        """Drop the messages inside the device; a worker whose step failed ends, and its connections with
        it.
        """
        self.inside.abandon()

    def warm_up(self, device: torch.device) -> None:
        """Send one number through every channel and group, in the same order on all workers.

        NCCL makes a communicator at its first operation, and then the process waits for the other end. In the
        middle of a step, the other end may be waiting for this process.
        """
        mine, number = dist.get_rank(), torch.zeros(1, device=device)
        for name, group in self.channels.items():
            source, target = self.workers[name.source], self.workers[name.target]
            if mine in (source, target):
                begin, peer = (dist.isend, target) if mine == source else (dist.irecv, source)
                for work in begin_together(group, [number], [partial(begin, number, peer, group=group)]):
                    self._wait(work)
        for group in (*self.groups.values(), *self.tensor_groups.values()):
            if mine in dist.get_process_group_ranks(group):
                self._wait(_under_way(dist.all_reduce(number, group=group, async_op=True)))

    def _wait(self, work: dist.Work | Loan) -> None:
        if self.timeout is None:
            work.wait()
        else:
            work.wait(self.timeout)


def connect(plan: Plan, program: Program, device: torch.device, timeout: timedelta) -> Network:
    """Return the network of a plan's workers, one per device; this one sends tensors on `device`.

    All must call it. Every worker makes all communicators in the same order: one for each channel of
    `program`, and one for each set of devices that sum tensors or hold the shards of one replica.

    Raises:
        UsageError: the GPU is set up in a way that would make messages block computations.
        PeerLost: another worker did not come.
        OutOfMemory: the device lacks memory for communicators.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        _check_queues()
    workers = {device: number for number, device in enumerate(plan.workers)}
    # NCCL's timeout runs from the start of a message, not from its join, and ends the process that waits, not
    # the one that hangs. So on GPUs its default of ten minutes stays; the launcher finds the process that
    # hangs earlier.
    patience = None if on_gpu else timeout

    numbers = count()

    def group(devices: Iterable[int]) -> dist.ProcessGroup:
        process_group: dist.ProcessGroup = dist.new_group(
            [workers[device] for device in devices], timeout=patience
        )
        check_members(process_group, f"group {next(numbers)}")
        return process_group

    try:
        network = Network(
            timeout=patience,
            device=plan.workers[dist.get_rank()],
            placement=program.placement,
            workers=workers,
            channels={
                name: group((name.source, name.target))
                for name in channels(program.actions, program.placement)
            },
            groups={devices: group(devices) for devices in _members(plan)},
            tensor_groups={devices: group(devices) for devices in groups_in_order(plan)},
        )
        network.warm_up(device)
    except RuntimeError as error:
        raise lost(
            "the workers could not connect to each other", error, plan.workers[dist.get_rank()]
        ) from error
    return network


def _members(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the sets of devices that sum tensors.

    Raises:
        UsageError: a device takes part with two stages.
    """
    members = sums(plan)
    for devices in members:
        if len(set(devices)) < len(devices):
            raise UsageError(
                f"devices {', '.join(map(str, devices))} have stages that share a parameter, and one device "
                "has two of these stages, whose gradients workers cannot sum: put the layers that share "
                "the parameter into one stage or on different devices"
            )
    return members


def groups_in_order(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the tensor groups, each in the order of its workers, as in process groups.

    Raises:
        UsageError: one of them names its hosts in another order.
    """
    groups = tensor_groups(plan)
    for devices in groups:
        if devices != (right := tuple(sorted(devices, key=plan.workers.index))):
            raise UsageError(
                f"devices {', '.join(map(str, devices))} hold tensor shards in this order, but workers are "
                f"started host by host: write {', '.join(map(str, right))} in their grid"
            )
    return groups


def _check_queues() -> None:
    """Check that a GPU's messages and computations do not share one queue.

    In a shared queue, a receive could block its sender.

    Raises:
        UsageError: the environment says that they do.
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise UsageError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 gives a GPU a single queue, in which a receive would block the "
            "computation that it waits for: unset it, or set it to 8 or more"
        )


# ---- Joining of a trainer with the workers that a launcher has started


# ---- Messages through the host, for workers that share a GPU
# NCCL refuses to connect them, and gloo takes host memory. Sent tensors are copied to the host first, and
# received ones lie there until the join. So a message takes equal bytes of the host and of the device at
# either end, and devices wait for their copies: this is for tests and single GPUs, not for speed.


@dataclass(frozen=True, slots=True)
class _OnHost:
    """A transfer between hosts, its host buffers, and the device tensors that wait for their contents."""

    handle: Any
    buffers: list[Tensor]
    waiting: list[Tensor]


@dataclass(frozen=True, slots=True)
class HostBuffers(Transport):
    """A transport over `hosts`, another transport, which takes tensors on the host."""

    hosts: Transport

    def start(self, action: Action, tensors: list[Tensor], message: Message) -> _OnHost:
        sends = action.kind in SENDS
        buffers = [_copied(tensor) if sends else _buffer(tensor) for tensor in tensors]
        return _OnHost(self.hosts.start(action, buffers, message), buffers, [] if sends else tensors)

    def collect(
        self,
        action: Action,
        tensors: list[Tensor],
        members: tuple[int, ...],
        device: int,
        owners: Owners = (),
    ) -> _OnHost:
        buffers = list(map(_copied, tensors))
        return _OnHost(self.hosts.collect(action, buffers, members, device, owners), buffers, tensors)

    def ready(self, handle: _OnHost) -> bool:
        return self.hosts.ready(handle.handle)

    def join(self, action: Action, handle: _OnHost) -> None:
        self.hosts.join(action, handle.handle)
        for tensor, buffer in zip(handle.waiting, handle.buffers, strict=False):  # for receivers only
            tensor.copy_(buffer)

    def abandon(self) -> None:
        self.hosts.abandon()


def _buffer(tensor: Tensor) -> Tensor:
    """Return host memory for a tensor: pinned, if the tensor is on a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy on the host, complete on return, so that gloo may read it."""
    return _buffer(tensor).copy_(tensor)


# ---- Workers

# Workers that torchrun restarts get the addresses of their predecessors (pytorch issue 135712); under
# --node-rank those of another machine do, even with this set.
_ADVICE = (
    "; if torchrun should restart workers, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for it, and use "
    "--rdzv-backend=c10d with several machines"
)


def _check_same(plan: Plan) -> None:
    """Check that all workers have the same stages, decisions and training.

    Raises:
        UsageError: they do not.
    """
    if dist.get_backend() != "gloo":
        return
    mine = sha256(repr((plan.stages, plan.decisions, plan.training)).encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, mine)
    others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise UsageError(
            f"worker {' and '.join(others)} would train by another plan than worker 0: plan once, save the "
            "plan, and let all workers load it"
        )


def joins_workers(hardware: Hardware, timeout_seconds: float) -> bool:
    """Return whether this process is one of a plan's workers.

    Join the process group that a launcher has set up.

    Raises:
        PeerLost: the workers do not find each other.
        UsageError: workers have different plans, their number is not the plan's number of devices in use, or
            they are not on the plan's hosts.
    """
    if not dist.is_initialized() and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = hardware.backend
        # NCCL's timeout would end the process that waits, not the one that hangs (see `transport.connect`).
        try:
            dist.init_process_group(
                backend, timeout=None if backend == "nccl" else timedelta(seconds=timeout_seconds)
            )
        except RuntimeError as error:
            raise PeerLost(
                f"the workers could not connect to each other ({all_lines(error)}){_ADVICE}"
            ) from error
        atexit.register(_part)
        check_members(None, "all")
        _check_same(hardware.plan)
    if not dist.is_initialized():
        return False
    count = len(hardware.plan.workers)
    if dist.get_world_size() != count:
        raise UsageError(
            f"the plan uses {counted(count, 'device')}, but the launcher started "
            f"{counted(dist.get_world_size(), 'worker')}: start one worker for each device, such as with "
            f"torchrun --nproc-per-node {count}"
        )
    if not hardware.shared:
        check_hosts(hardware.plan, dist.get_rank())
    return True


def transport_of(
    hardware: Hardware, program: Program, here: torch.device, timeout_seconds: float
) -> Transport:
    """Return the transport between this worker, which computes on `here`, and the others. All must call it.

    Raises:
        UsageError: workers that share a GPU hold tensor shards.
    """
    plan, timeout = hardware.plan, timedelta(seconds=timeout_seconds)
    if hardware.shared and here.type == "cuda":
        if tensor_groups(plan):
            raise UsageError(
                "workers that share a GPU cannot compute tensor-parallel layers together, because their "
                "messages go through the host: use one GPU for each device, or a plan without tensor "
                "parallelism"
            )
        return HostBuffers(connect(plan, program, torch.device("cpu"), timeout))
    return connect(plan, program, here, timeout)


def connected(
    hardware: Hardware, program: Program, worker: int | None, timeout_seconds: float
) -> tuple[Transport, Lending]:
    """Return transport and lending of a worker, or of a single process if `worker` is None.

    All workers must call it before they build their layers, because building may take longer on one than on
    another.

    Raises:
        OutOfMemory: offloaded tensors do not fit a host, a disk or a lender.
        UsageError: this machine cannot run the plan.
    """
    plan = hardware.plan
    run = whole_run(plan)
    if worker is None:
        return InProcess(), Lending.within(hardware, run)
    number = plan.workers[worker]
    here = hardware.device(number)
    return transport_of(hardware, program, here, timeout_seconds), Lending.between(
        hardware, run, number, here
    )


def groups_of(plan: Plan, transport: Transport) -> TensorGroups:
    """Return the collectives of tensor groups: between workers, or in this process."""
    return transport.end if isinstance(transport, Network) else Together(plan)


def _part() -> None:
    """Leave the process group that the trainer joined.

    Its threads may otherwise abort the process at its exit.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
