"""Transports: how boundary tensors travel, between processes over `torch.distributed` or inside one process.

A transport starts a transfer and returns a handle; `ready` says whether joining it would block, and `join` waits for
its end. A receiver allocates its buffers before it starts; a sender keeps its tensors until it has joined.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.actions import SENDS, Action, Kind, Message, Placement, collective
from pipefit.cost.communicators import sums, tensor_groups
from pipefit.errors import UsageError
from pipefit.message_order import Channel, channel, channels
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.runtime.coalescing import begin_together
from pipefit.runtime.lost import lost
from pipefit.runtime.tensor_groups import BetweenWorkers
from pipefit.runtime.token import check_members
from pipefit.sharding import Collectives, Loan, ProcessGroupCollectives

_UnderWay = Sequence[dist.Work | Loan]  # what is joined, in order
Owners = Sequence[int]  # of the tensors of a collective, the device that each belongs to; empty where none does


class Transport(Protocol):
    """What a `DeviceRunner` needs in order to exchange tensors with others."""

    def start(self, action: Action, tensors: list[Tensor], message: Message) -> Any:
        """Begin to send `tensors` as `message`, or to receive them; a handle to join."""

    def collect(
        self, action: Action, tensors: list[Tensor], members: tuple[int, ...], device: int, owners: Owners = ()
    ) -> Any:
        """Begin to add up `tensors` over the devices `members`, in place, on each or on the `owners` of the tensors
        alone; or, for an UNSHARD, to bring them from their owners to all. `device` is this one.
        """

    def ready(self, handle: Any) -> bool:
        """Whether `join` would return at once."""

    def join(self, action: Action, handle: Any) -> None:
        """Return when the transfer is complete."""

    def abandon(self) -> None:
        """Drop all transfers after a step has failed: its messages must not reach the next one."""


@dataclass(slots=True)
class _Message:
    """A message inside one process: when both ends have started, it is copied."""

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
class _Sum:
    """A collective inside one process, for which the tensors of all members are there when the last has started it."""

    tensors: dict[int, list[Tensor]] = field(default_factory=dict)
    done: bool = False

    def add_up(self, members: Sequence[int], owners: Owners) -> None:
        """Add the tensors up in the order of the members, for all of them or for the owners."""
        for number, (first, *others) in enumerate(zip(*(self.tensors[member] for member in members), strict=True)):
            for other in others:
                first.add_(other.to(first.device))
            for member, other in zip(members[1:], others, strict=True):
                if not owners or owners[number] == member:
                    other.copy_(first)
        self._end()

    def hand_out(self, owners: Owners) -> None:
        """Bring the tensors from their owners to all."""
        for number, owner in enumerate(owners):
            for tensors in self.tensors.values():
                if tensors is not self.tensors[owner]:
                    tensors[number].copy_(self.tensors[owner][number])
        self._end()

    def _end(self) -> None:
        self.tensors.clear()
        self.done = True


@dataclass(slots=True)
class InProcess:
    """The transport inside one process: a message is delivered when both ends have started.

    A failed step leaves messages behind of which one end has started; `abandon` drops them.
    """

    messages: dict[Message, _Message] = field(default_factory=dict)
    sums: dict[Hashable, _Sum] = field(default_factory=dict)

    def start(self, action: Action, tensors: list[Tensor], message: Message) -> _Message:
        found = self.messages.pop(message, None)
        if found is None:
            found = self.messages[message] = _Message()
        if action.kind in SENDS:
            found.sent = tensors
        else:
            found.buffers = tensors
        found.deliver()
        return found

    def collect(
        self, action: Action, tensors: list[Tensor], members: tuple[int, ...], device: int, owners: Owners = ()
    ) -> _Sum:
        key = collective(action), action.microbatch
        total = self.sums.setdefault(key, _Sum())
        total.tensors[device] = tensors
        if len(total.tensors) == len(members):
            del self.sums[key]
            if action.kind is Kind.UNSHARD:
                total.hand_out(owners)
            else:
                total.add_up(members, owners)
        return total

    def ready(self, handle: _Message | _Sum) -> bool:
        return handle.done

    def join(self, action: Action, handle: _Message | _Sum) -> None:
        assert handle.done

    def abandon(self) -> None:
        self.messages.clear()
        self.sums.clear()


@dataclass(slots=True, kw_only=True)
class Network:
    """The transport between processes: `torch.distributed` point to point, first in first out in every channel.

    Messages between two stages of this process's device never leave it. `timeout` is how long a join waits. None on
    GPUs, where a join makes the device wait, not the process: with a timeout the process would poll instead, and could
    not run ahead.
    """

    timeout: timedelta | None
    device: int  # the cluster's device that this process runs
    placement: Placement
    workers: dict[int, int]  # device -> the worker that runs it
    channels: dict[Channel, dist.ProcessGroup]
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)  # of the devices that add up
    tensor_groups: dict[tuple[int, ...], dist.ProcessGroup] = field(
        default_factory=dict
    )  # that compute layers together
    inside: InProcess = field(default_factory=InProcess)

    def start(self, action: Action, tensors: list[Tensor], message: Message) -> _UnderWay | _Message:
        name = channel(self.device, action, self.placement)
        if name is None:
            return self.inside.start(action, tensors, message)
        begin, peer = (dist.isend, message.target) if action.kind in SENDS else (dist.irecv, message.source)
        try:
            group, rank = self.channels[name], self.workers[peer]
            return begin_together(group, tensors, [partial(begin, tensor, rank, group=group) for tensor in tensors])
        except RuntimeError as error:
            raise lost(f"{action} failed: device {peer} is gone", error, self.device) from error

    def collect(
        self, action: Action, tensors: list[Tensor], members: tuple[int, ...], device: int, owners: Owners = ()
    ) -> _UnderWay:
        group, ranks, loan = self.groups[members], [self.workers[owner] for owner in owners], Loan(tensors)
        try:
            if not ranks:
                begins = [partial(dist.all_reduce, tensor, group=group, async_op=True) for tensor in loan.tensors]
            else:
                begin = dist.broadcast if action.kind is Kind.UNSHARD else dist.reduce
                pairs = zip(loan.tensors, ranks, strict=True)
                begins = [partial(begin, tensor, rank, group=group, async_op=True) for tensor, rank in pairs]
            return [*begin_together(group, loan.tensors, begins), loan]
        except RuntimeError as error:
            others = " or ".join(str(member) for member in members if member != device)
            raise lost(f"{action} failed: device {others} is gone", error, self.device) from error

    def ready(self, handle: _UnderWay | _Message) -> bool:
        return True  # joining may block: nothing else runs in this process

    def join(self, action: Action, handle: _UnderWay | _Message) -> None:
        if isinstance(handle, _Message):
            return self.inside.join(action, handle)
        for work in handle:
            try:
                self._wait(work)
            except RuntimeError as error:
                what = f"{action} failed: the device at its other end is gone or hangs"
                raise lost(what, error, self.device) from error
        return None

    def end(self, group: tuple[int, ...], rank: int) -> Collectives:
        """This worker's end of a group of devices that compute layers together, of which it is number `rank`."""
        inner = ProcessGroupCollectives(group=self.tensor_groups[group])
        assert inner.rank == rank, "workers are in the order of devices"
        return BetweenWorkers(inner=inner, devices=group, device=self.device)

    def abandon(self) -> None:
        """Drop the messages inside the device; a worker whose step failed ends, and its connections with it."""
        self.inside.abandon()

    def warm_up(self, device: torch.device) -> None:
        """Send one number through every channel and group, in one order on all workers.

        NCCL makes a communicator at its first operation, and then the process waits for the other end. In the middle of
        a step, the other end may be waiting for this process.
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
    """The network of a plan's workers, one a device, of which this one sends tensors on `device`. All must call it.

    Every worker makes all communicators in one order: one for each channel of `program`, and one for each set of
    devices that add something up or hold the shards of one replica.

    Raises:
        UsageError: the GPU is set up in a way that would make messages block computations.
        PeerLost: another worker did not come.
        OutOfMemory: the device has no memory for communicators.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        _check_queues()
    workers = {device: number for number, device in enumerate(plan.workers)}
    # NCCL's timeout runs from the start of a message, not from its join, and ends the process that waits, not the one
    # that hangs. So on GPUs its default of ten minutes stays; the launcher finds the process that hangs earlier.
    patience = None if on_gpu else timeout

    numbers = count()

    def group(devices: Iterable[int]) -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group([workers[device] for device in devices], timeout=patience)
        check_members(made, f"group {next(numbers)}")
        return made

    try:
        network = Network(
            timeout=patience,
            device=plan.workers[dist.get_rank()],
            placement=program.placement,
            workers=workers,
            channels={name: group((name.source, name.target)) for name in channels(program.actions, program.placement)},
            groups={devices: group(devices) for devices in _members(plan)},
            tensor_groups={devices: group(devices) for devices in groups_in_order(plan)},
        )
        network.warm_up(device)
    except RuntimeError as error:
        raise lost("the workers did not find each other", error, plan.workers[dist.get_rank()]) from error
    return network


def _members(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The sets of devices that add tensors up.

    Raises:
        UsageError: one of them takes part with two stages.
    """
    members = sums(plan)
    for devices in members:
        if len(set(devices)) < len(devices):
            raise UsageError(
                f"devices {', '.join(map(str, devices))} have stages that share a parameter, and one has two of them: "
                "workers cannot add up such gradients; put the layers that share it in one stage or on other devices"
            )
    return members


def groups_in_order(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The sets of devices that compute layers together, each in the order of their workers, as process groups are.

    Raises:
        UsageError: one of them names its hosts in another order.
    """
    groups = tensor_groups(plan)
    for devices in groups:
        if devices != (right := tuple(sorted(devices, key=plan.workers.index))):
            raise UsageError(
                f"devices {', '.join(map(str, devices))} hold tensor shards in this order, but workers are started "
                f"host by host: name them as {', '.join(map(str, right))} in their grid"
            )
    return groups


def _check_queues() -> None:
    """Check that a GPU's messages and computations do not share one queue, in which a receive could block its sender.

    Raises:
        UsageError: the environment says that they do.
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise UsageError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 gives a GPU one queue for everything, in which a receive would block the "
            "computation whose result it waits for: unset it, or set it to 8 or more"
        )


def _under_way(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this worker is in the group"
    return work
