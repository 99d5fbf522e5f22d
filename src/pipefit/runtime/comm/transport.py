"""Transports: how boundary tensors travel, between processes over `torch.distributed` or inside one process.

A transport starts a transfer and returns a handle; `ready` says whether joining it would block, and `join` waits for
its end. A receiver allocates its buffers before it starts; a sender keeps its tensors until it has joined.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from pipefit.errors import PeerLost, UsageError, all_lines
from pipefit.memory.arenas import sums, tensor_groups
from pipefit.runtime.engine.tensor_groups import BetweenWorkers, lost
from pipefit.schema.actions import SENDS, Action, Kind, Message, Placement, collective
from pipefit.schema.plan import Plan
from pipefit.schema.program import Channel, Program, channel, channels
from pipefit.tensor_parallel import Collectives, Loan, ProcessGroupCollectives

# ----------------------------------------------------------------------------------------------------
# Messages and collectives of several tensors: NCCL carries them out as one, in one kernel, with the delays of
# one.
#
# A message of one tensor goes the same way. torch gives messages that are not coalesced a communicator of
# their own, beside that of the group (`ProcessGroupNCCL::pointToPoint`): it would be made, and waited for, in
# the middle of a step.
#
# Gloo would copy the tensors into one and back, which takes memory that nobody counts. So it gets each for
# itself.


def begin_together(
    group: dist.ProcessGroup, tensors: Sequence[Tensor], begins: Sequence[Callable[[], dist.Work | None]]
) -> list[dist.Work]:
    """Begin transfers in a process group, one of each tensor; what has to be waited for.

    Raises:
        RuntimeError: one could not begin; nothing is held back then.
    """
    together = len(tensors) > 0 and tensors[0].is_cuda
    if together:
        torch.distributed.ProcessGroup._start_coalescing(group, tensors[0].device)
    try:
        begun = [begin() for begin in begins]
    except BaseException:
        if together:
            with suppress(RuntimeError):  # what could not begin is what is told
                torch.distributed.ProcessGroup._end_coalescing(group, tensors[0].device)
        raise
    if together:
        begun = [torch.distributed.ProcessGroup._end_coalescing(group, tensors[0].device)]
    assert None not in begun, "this worker is in the group"
    return [work for work in begun if work is not None]


# ----------------------------------------------------------------------------------------------------
# Proof that whoever has connected to a worker is a worker of the same training: it knows the training's
# token.
#
# gloo takes for another worker whoever connects first and says its number. So before anything is exchanged,
# the members of a process group tell each other a digest of the token, of the group, and of who tells it to
# whom. A stranger cannot make it, and what it hears is of no use elsewhere. `pipefit train` makes a token for
# every start, and where a stranger has taken a place it starts the workers anew (`pipefit.runtime.launch.restarts`).
# Under `torchrun` it is the environment's `PIPEFIT_TOKEN`, the same text for all workers; without one the
# digests keep nobody out. It costs one message of 32 bytes to each other member as a group is made. NCCL's
# groups are not checked.

TOKEN = "PIPEFIT_TOKEN"  # noqa: S105 - the name of a variable
_PATIENCE = timedelta(seconds=20)  # members of a group tell it right after they have made it
_FAREWELL = timedelta(seconds=5)  # for what is on its way to one that is refused


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_hex(16)


def check_members(group: dist.ProcessGroup | None, name: str) -> None:
    """Check that all members of a group know the token; every member has to call it, with one `name` for the group.

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
            _let_go(begun)  # a worker with another token hears ours before we are gone, and tells the same
            raise PeerLost(
                f"what has connected as worker {rank} does not know the token of this training: a stranger has taken "
                f"its place, or workers were started with different {TOKEN}s"
            )
    for rank, work in zip(others, begun, strict=True):
        with _with(rank):
            work.wait()


@contextmanager
def _with(rank: int) -> Iterator[None]:
    """Inside, whatever fails in talking with a worker is its loss."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(
            f"worker {rank} has connected and does not show the token of this training: it is gone, or a stranger has "
            f"taken its place ({all_lines(error)})"
        ) from error


def _under_way(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this worker is in the group"
    return work


def _let_go(begun: Sequence[dist.Work]) -> None:
    """Wait shortly for messages of which some may never arrive."""
    for work in begun:
        with suppress(RuntimeError):
            work.wait(_FAREWELL)


def _digest(name: str, teller: int, hearer: int) -> bytes:
    token = os.environ.get(TOKEN, "").encode()
    return hmac.digest(token, f"{name} {teller} {hearer}".encode(), "sha256")


# ----------------------------------------------------------------------------------------------------

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
                self._wait(_transport_under_way(dist.all_reduce(number, group=group, async_op=True)))

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


def _transport_under_way(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this worker is in the group"
    return work
