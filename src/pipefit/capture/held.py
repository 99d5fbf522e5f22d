"""What a layer holds beside its parameters: buffers, and tensors that are plain attributes, storage by storage.

Two tensors may lie in one storage, in one layer or in several: a mask that all blocks have, a slice of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from pipefit.capture.constants import named_constants
from pipefit.capture.storages import storage_key

Key = tuple[int, bool]  # a storage, and whether it is held as a buffer


@dataclass(frozen=True, slots=True)
class Held:
    """A storage that a layer holds, by the name of the first tensor in it; whether as a buffer."""

    name: str
    storage: int
    nbytes: int
    is_buffer: bool


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """A storage that several layers hold: what it is in the first of them, and the numbers of all."""

    held: Held
    users: tuple[int, ...]

    def is_among(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of `tensors` lies in it."""
        return self.held.storage in map(storage_key, tensors)


def held_storages(module: nn.Module) -> dict[Key, Held]:
    """The storages of buffers and of plain attributes; one that is both counts as a buffer."""
    found: dict[Key, Held] = {}
    for name, tensor in module.named_buffers():
        found.setdefault((storage_key(tensor), True), _held(name, tensor, is_buffer=True))
    for name, tensor in named_constants(module):
        if (storage_key(tensor), True) not in found:
            found.setdefault((storage_key(tensor), False), _held(name, tensor, is_buffer=False))
    return found


def shared_storages(modules: Sequence[nn.Module]) -> tuple[SharedStorage, ...]:
    """The storages that more than one of `modules` holds, in the order in which they are first met."""
    first: dict[Key, Held] = {}
    users: dict[Key, list[int]] = {}
    for number, module in enumerate(modules):
        for key, held in held_storages(module).items():
            first.setdefault(key, held)
            users.setdefault(key, []).append(number)
    return tuple(SharedStorage(held, tuple(users[key])) for key, held in first.items() if len(users[key]) > 1)


def _held(name: str, tensor: Tensor, *, is_buffer: bool) -> Held:
    return Held(name, storage_key(tensor), tensor.untyped_storage().nbytes(), is_buffer)
