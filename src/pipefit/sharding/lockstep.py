"""A tensor-parallel group inside one process, for tests and notebooks: its ranks run in turn, up to a collective each.

Every rank is a thread, but only one of them runs at a time, and the next one goes on where this one waits for the
others. So the order of all that is computed is fixed, and so are the draws: each rank has a state of torch's default
generator of its own, which starts as that of the caller. Costs the time of all ranks in a row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class RankFailed(RuntimeError):
    """Another rank of the group has raised: what this one waits for does not come."""


def in_lockstep(ranks: int, run: Callable[[LockstepCollectives], T]) -> list[T]:
    """What `run` returns on each of so many ranks, given its end of the group.

    Raises:
        Exception: whatever `run` raises on the first rank that fails.
    """
    group = _Group[T](ranks, run)
    return group.results()


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepCollectives:
    """One rank's end of a group in this process."""

    rank: int
    size: int
    group: Any

    def __deepcopy__(self, memo: Any) -> LockstepCollectives:
        return self  # a copy of a layer belongs to the same rank

    def all_reduce(self, tensor: Tensor) -> Tensor:
        parts = self.all_gather(tensor)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return tensor.copy_(total)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.detach().clone(memory_format=torch.contiguous_format)
        return [part.clone() for part in self.group.exchange(self.rank, own)]

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return tensor.copy_(self.all_gather(tensor)[source])


class _Group(Generic[T]):
    """The threads, whose turn it is, and what they have brought to the collective under way."""

    def __init__(self, size: int, run: Callable[[LockstepCollectives], T]) -> None:
        self.size, self.run, self.turn = size, run, 0
        self.found: dict[int, T] = {}
        self.failure: BaseException | None = None
        self.brought: list[list[Tensor]] = []  # for each collective so far, the ranks' tensors
        self.counts = [0] * size  # the collectives that each rank has begun
        self.states = [torch.get_rng_state()] * size
        self.changed = threading.Condition()

    def results(self) -> list[T]:
        threads = [threading.Thread(target=self._body, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        return [self.found[rank] for rank in range(self.size)]

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks; hands the turn on until all have brought theirs."""
        number = self.counts[rank]
        self.counts[rank] += 1
        if len(self.brought) == number:
            self.brought.append([])
        self.brought[number].append(tensor)
        self._hand_on(rank)
        self._wait(rank)
        return self.brought[number]

    def _body(self, rank: int) -> None:
        try:
            self._wait(rank)
            self.found[rank] = self.run(LockstepCollectives(rank=rank, size=self.size, group=self))
        except BaseException as error:  # noqa: BLE001 -- raised again in the caller's thread
            self.failure = self.failure or error
        finally:
            self._hand_on(rank)

    def _wait(self, rank: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == rank or self.failure is not None)
        if self.failure is not None:
            raise RankFailed("another rank of the group has failed")
        torch.set_rng_state(self.states[rank])

    def _hand_on(self, rank: int) -> None:
        with self.changed:
            if self.turn == rank:
                self.states[rank] = torch.get_rng_state()
                self.turn = (rank + 1) % self.size
            self.changed.notify_all()
