"""A tensor-parallel group inside one process, for tests and notebooks: its ranks run in turn, up to a collective each.

Every rank is a thread with a turn (`turns`), which it hands on where it waits for the others. The last one to come to a
collective does the work of all, in the order of the ranks, in memory that they brought: so a rank allocates what it
would allocate in a process of its own. Costs the time of all ranks in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pipefit.sharding.turns import Turn, pause

T = TypeVar("T")
Brought = TypeVar("Brought")


def in_lockstep(ranks: int, run: Callable[[LockstepCollectives], T]) -> list[T]:
    """What `run` returns on each of so many ranks, given its end of the group. All draw what the caller would draw.

    Raises:
        Exception: whatever `run` raises on the first rank that fails.
    """
    meeting, found = Meeting[Any](ranks), dict[int, T]()

    def of_rank(rank: int) -> None:
        found[rank] = run(LockstepCollectives(rank=rank, size=ranks, group=meeting))

    turns = [Turn(partial(of_rank, rank)) for rank in range(ranks)]
    running = list(turns)
    try:
        while running:
            before = meeting.arrivals, len(running)
            running = [turn for turn in running if not turn.advance()]
            assert (meeting.arrivals, len(running)) != before, "a rank has ended, and others wait for it"
    except BaseException:
        for turn in turns:
            turn.abandon()
        raise
    return [found[rank] for rank in range(ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepCollectives:
    """One rank's end of a group in this process."""

    rank: int
    size: int
    group: Meeting[Any]

    def __deepcopy__(self, memo: Any) -> LockstepCollectives:
        return self  # a copy of a layer belongs to the same rank

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.group.meet(self.rank, tensor, _add_up)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self.group.meet(self.rank, (own, parts), _hand_out)
        return parts

    def all_to_all(self, tensor: Tensor) -> Tensor:
        found = torch.empty_like(tensor)
        self.group.meet(self.rank, (tensor, found), _exchange)
        return found

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        self.group.meet(self.rank, tensor, partial(_copy_from, source))
        return tensor


class Meeting(Generic[Brought]):
    """Where the ranks of a group meet: each brings something, and the last one to come does something with it all."""

    def __init__(self, size: int) -> None:
        self.arrivals = 0  # so far, of all ranks
        self._size = size
        self._brought: dict[int, Brought] = {}
        self._meetings = 0

    def meet(self, rank: int, brought: Brought, act: Callable[[Sequence[Brought]], None]) -> None:
        """Return when all ranks have come, and `act` has been called with what they brought, in their order."""
        self._brought[rank] = brought
        self.arrivals += 1
        number = self._meetings
        if len(self._brought) == self._size:
            everything = [self._brought[member] for member in range(self._size)]
            self.forget()
            with torch.no_grad():
                act(everything)
        del brought
        while self._meetings == number:
            pause()

    def forget(self) -> None:
        """What has been brought is nobody's any more: after a meeting, or a failure."""
        self._brought = {}
        self._meetings += 1


def _add_up(tensors: Sequence[Tensor]) -> None:
    first, *others = tensors
    for other in others:
        first.add_(other)
    for other in others:
        other.copy_(first)


def _hand_out(brought: Sequence[tuple[Tensor, list[Tensor]]]) -> None:
    for _, parts in brought:
        for part, (own, _) in zip(parts, brought, strict=True):
            part.copy_(own)


def _exchange(brought: Sequence[tuple[Tensor, Tensor]]) -> None:
    for rank, (_, found) in enumerate(brought):
        for part, (own, _) in zip(found, brought, strict=True):
            part.copy_(own[rank])


def _copy_from(source: int, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor is not tensors[source]:
            tensor.copy_(tensors[source])
