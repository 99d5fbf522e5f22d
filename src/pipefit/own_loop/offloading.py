"""Saved tensors on the host until their backward.

Inside `HostTensors.saving`, autograd hands each tensor that it saves to a hook. The numbered ones are copied
to the host, once for each storage, and the graph keeps a `_Packed` in their place. The copies of a call run
while it computes, and `saving` ends with their end: from there on the device memory is free as soon as nobody
else uses it. The first tensor that a backward asks for starts the return of all storages of the call.

Allocations and frees happen at fixed points of the program, so peaks do not depend on the speed of copies.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import addressof, c_char
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.runtime import Copier, OnStreams, Slot, SlotPart, UnpacedCopies
from pipefit.torch_internals import without_dispatch_modes

CHANGED = "a tensor that autograd has saved was modified by an inplace operation before its backward"


class HostPool:
    """Memory of the host in slots that are used again, pinned if `pinned`."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[Slot]] = {}
        self.nbytes = 0

    def take(self, nbytes: int) -> Slot:
        """Return a slot of `nbytes`."""
        free = self._free.get(nbytes)
        return free.pop() if free else self._made(nbytes)

    def give_back(self, slot: Slot) -> None:
        """Take a slot back."""
        self._free.setdefault(slot.nbytes, []).append(slot)

    def _made(self, nbytes: int) -> Slot:
        self.nbytes += nbytes
        if self._pinned:
            owner = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            return Slot(nbytes, owner.data_ptr(), owner)
        memory = mmap.mmap(-1, nbytes)
        return Slot(nbytes, addressof(c_char.from_buffer(memory)), memory)


class NoPool:
    """Slots of a dry run, which have no memory."""

    def take(self, nbytes: int) -> Slot:
        return Slot(nbytes)

    def give_back(self, slot: Slot) -> None:
        """Do nothing."""


class HostTensors:
    """Offloads saved tensors of one module's calls.

    Args:
        pool: the slots.
        copier: copies between the device and the slots.
    """

    def __init__(self, pool: HostPool | NoPool, copier: Copier) -> None:
        self.pool, self.copier = pool, copier

    @classmethod
    def of(cls, device: torch.device) -> HostTensors:
        """Return the offloading of real tensors on `device`."""
        if device.type == "cuda":
            return cls(HostPool(pinned=True), OnStreams.of(device))
        return cls(HostPool(pinned=False), UnpacedCopies())

    @classmethod
    def dry(cls) -> HostTensors:
        """Return the offloading of fake tensors."""
        return cls(NoPool(), Copier())

    @contextmanager
    def saving(self, numbers: Collection[int], stays: Callable[[Tensor], bool]) -> Iterator[None]:
        """Offload the saved tensors with these `numbers` in the body, except those that `stays` names."""
        luggage = _Luggage(self, frozenset(numbers), stays)
        with torch.autograd.graph.saved_tensors_hooks(luggage.pack, _unpack):
            yield
        luggage.leave()


class _Away:
    """A storage on the host."""

    def __init__(self, host: HostTensors, storage: torch.UntypedStorage, device: torch.device) -> None:
        self.host, self.device, self.nbytes = host, device, storage.nbytes()
        self.slot = host.pool.take(self.nbytes)
        self.copy: Any = None
        self._waiting: torch.UntypedStorage | None = None  # returned ahead of its use
        self._returned: Callable[[], torch.UntypedStorage | None] = lambda: None
        self.region: object = None  # of the tensor that was saved last
        self.is_sent = False
        self.is_stale = False  # whether other parts were saved since the copy
        self.users = 0  # packed tensors that have not been unpacked

    def _parts(self, storage: torch.UntypedStorage) -> list[SlotPart]:
        return [SlotPart(storage, 0, self.slot, 0, self.nbytes)]

    def send(self, storage: torch.UntypedStorage) -> None:
        """Begin to copy the storage to the host, after an earlier copy if there is one."""
        if self.copy is not None:
            self.host.copier.join(self.copy)
        self.copy = self.host.copier.start(self._parts(storage), outward=True, seconds=0.0)
        self.is_sent, self.is_stale = True, False

    def begin_return(self) -> None:
        """Allocate memory on the device and begin to copy, unless the storage is there."""
        if self._returned() is None:
            storage = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
            self.copy = self.host.copier.start(self._parts(storage), outward=False, seconds=0.0)
            self._waiting, self._returned = storage, ref(storage)

    def storage(self) -> torch.UntypedStorage:
        """Return the storage on the device; the last user takes it over."""
        self.begin_return()
        storage = self._returned()
        assert storage is not None
        if self.copy is not None:
            self.host.copier.join(self.copy)
            self.copy = None
        self.users -= 1
        if self.users <= 0:
            self._waiting = None
        return storage

    def __del__(self) -> None:
        """Give the slot back when the graph is gone."""
        if self.copy is not None:
            self.host.copier.settle(self.copy)
        self.host.pool.give_back(self.slot)


class _Packed:
    """A saved tensor whose storage is away."""

    __slots__ = ("away", "form", "luggage")

    def __init__(self, luggage: _Luggage, away: _Away, tensor: Tensor) -> None:
        self.luggage, self.away = luggage, away
        self.form = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self) -> Tensor:
        self.luggage.begin_return()
        dtype, shape, stride, offset = self.form
        storage = self.away.storage()
        with torch.no_grad():
            return torch.empty(0, dtype=dtype, device=self.away.device).set_(storage, offset, shape, stride)


class _Luggage:
    """What one call has saved."""

    def __init__(self, host: HostTensors, numbers: frozenset[int], stays: Callable[[Tensor], bool]) -> None:
        self._host, self._numbers, self._stays = host, numbers, stays
        self._count = 0
        self._by_storage: dict[int, _Away] = {}
        self._leaving: list[tuple[Tensor, int, _Away]] = []
        self._away: list[Any] = []  # weak references
        self._returning = False

    def pack(self, tensor: Tensor) -> _Packed | tuple[Tensor, int]:
        number, self._count = self._count, self._count + 1
        if number not in self._numbers or self._stays(tensor):
            return tensor.detach() if not _is_leaf(tensor) else tensor, tensor._version
        storage = tensor.untyped_storage()
        away = self._by_storage.get(storage._cdata)
        if away is None:
            away = self._by_storage[storage._cdata] = _Away(self._host, storage, tensor.device)
            self._away.append(ref(away))
            if self._host.copier.beside:
                away.send(storage)
        elif _region(tensor) != away.region:
            away.is_stale = True
        away.region = _region(tensor)
        self._leaving.append(
            (tensor.detach(), tensor._version, away)
        )  # keeps the storage until the copy's end
        away.users += 1
        return _Packed(self, away, tensor)

    def leave(self) -> None:
        """Wait for the copies of the call, and let go of its storages.

        A storage of which several parts were saved is copied when all are: the operations between may have
        written the later parts, as in a cell of a GRU, whose gates are parts of one storage with a version
        each.

        Raises:
            RuntimeError: a tensor was changed after autograd had saved it.
        """
        for tensor, _, away in self._leaving:
            if away.is_stale or not away.is_sent:
                away.send(tensor.untyped_storage())
        for away in self._by_storage.values():
            self._host.copier.join(away.copy)
            away.copy = None
        for tensor, version, _ in self._leaving:
            if tensor._version != version:
                raise RuntimeError(CHANGED)
        self._by_storage.clear()
        self._leaving.clear()

    def begin_return(self) -> None:
        """Begin to return every storage of the call, once."""
        if not self._returning:
            self._returning = True
            for away in self._away:
                if (one := away()) is not None and one.users > 0:
                    one.begin_return()


def _region(tensor: Tensor) -> object:
    """Return the part of its storage that a tensor is."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor._version


def _is_leaf(tensor: Tensor) -> bool:
    return tensor.is_leaf and tensor.requires_grad


def _unpack(packed: _Packed | tuple[Tensor, int]) -> Tensor:
    if isinstance(packed, _Packed):
        return packed.unpack()
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(CHANGED)
    return tensor


def is_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


# ---- Optimizer state on the host between the steps of an optimizer
#
# Before a step every state tensor gets device memory and its values; after the step it is a tensor of the
# host again, which anybody may read or save in between. So a forward and a backward have the memory for
# themselves, and the step has it all.


SMALLEST_BYTES = 1024  # a smaller tensor, such as a step count, stays

OnHost = Callable[[Tensor], Tensor]  # a host tensor of the form of a device tensor


class StateOnHost:
    """Keeps the state of an optimizer on the host between its steps, until `remove`.

    Args:
        make: makes a host tensor; copies go there and back if `copies`.
        apart: a context in which host tensors are made, out of sight of meters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make: OnHost,
        *,
        copies: bool,
        apart: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._optimizer, self._make, self._copies, self._apart = optimizer, make, copies, apart
        self._known: dict[tuple[int, str], Tensor] = {}  # host tensors, by parameter and name
        self._away: dict[tuple[int, str], tuple[Tensor, torch.device]] = {}
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.bring()),
            optimizer.register_step_post_hook(lambda *_: self.leave()),
        ]
        self.leave()

    def bring(self) -> None:
        """Give every tensor that is still on the host device memory and its values."""
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                host, device = self._away.get((id(parameter), name), (None, None))
                if host is not None and value is host:
                    here = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
                    state[name] = here.copy_(host, non_blocking=True) if self._copies else here
        self._away.clear()

    def leave(self) -> None:
        """Move the state to the host."""
        on_gpu = False
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                key = id(parameter), name
                if not isinstance(value, Tensor) or value.device != parameter.device or key in self._away:
                    continue
                if value.untyped_storage().nbytes() < SMALLEST_BYTES:
                    continue
                host = self._known.get(key)
                if host is None or host.shape != value.shape or host.dtype != value.dtype:
                    with self._apart():
                        host = self._known[key] = self._make(value)
                if self._copies:
                    host.copy_(value, non_blocking=True)
                    on_gpu = on_gpu or value.is_cuda
                self._away[key] = host, value.device
                state[name] = host
        if on_gpu:
            torch.cuda.current_stream().synchronize()  # the caller may read host tensors from here on

    def remove(self) -> None:
        """Bring the state back, and let the optimizer be."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.bring()
        self._known.clear()


def on_host(optimizer: Optimizer, pool: Any) -> StateOnHost:
    """Keep real state in slots of a pool of host memory."""

    def make(value: Tensor) -> Tensor:
        slot = pool.take(value.untyped_storage().nbytes())
        owner = slot.owner
        flat = owner if isinstance(owner, Tensor) else torch.frombuffer(owner, dtype=torch.uint8)
        return flat.view(value.dtype).as_strided(value.shape, value.stride())

    return StateOnHost(optimizer, make, copies=True, apart=torch.no_grad)


def on_no_host(optimizer: Optimizer) -> StateOnHost:
    """Keep fake state nowhere: its form is known."""

    def make(value: Tensor) -> Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return StateOnHost(optimizer, make, copies=False, apart=without_dispatch_modes)
