"""A tensor-parallel group inside one process, for tests and notebooks: its ranks take turns.

Every rank is a thread with a turn (`Turn`), which it passes on when it waits for others. The last rank to
arrive at a collective does the work of all, in rank order, in memory that the ranks brought: so a rank
allocates what it would allocate in its own process. The ranks' times add up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

# ---- Threads that run one at a time: each has its turn until it waits for another
#
# For code that must stop in the middle of a call, such as a rank inside a layer whose collective waits for
# another rank: the running thread calls `pause`, and continues there at its next turn. Computations follow
# the order of the calls of `advance`. Every thread draws from torch's default generator as if it were the
# only one.


class Abandoned(RuntimeError):
    """This thread waits for a thread that has failed."""


class Turn:
    """A thread that runs `run`, but only while `advance` waits for it."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._thread = threading.Thread(target=self._body, name="pipefit-turn", daemon=True)
        self._go, self._back = (
            threading.Lock(),
            threading.Lock(),
        )  # released to give the turn, and to return it
        self._go.acquire()
        self._back.acquire()
        self._draws = torch.get_rng_state()
        self._failure: BaseException | None = None
        self._runs = self._ended = self._abandoned = False

    def advance(self) -> bool:
        """Give the thread the turn; return whether it has ended when the turn comes back.

        Raises:
            BaseException: whatever `run` raises.
        """
        self._give()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self._ended

    def abandon(self) -> None:
        """End the thread: the `pause` in which it waits raises `Abandoned`."""
        self._abandoned = True
        if self._runs:  # the caller was interrupted while the thread had the turn
            self._back.acquire()
            self._runs = False
        if self._thread.ident is not None and not self._ended:
            self._give()
        self._failure = None

    def _give(self) -> None:
        """Give the thread the turn, and wait until it comes back.

        The random state is kept here, because it is a large tensor.
        """
        torch.set_rng_state(self._draws)
        self._runs = True
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        self._runs = False
        self._draws = torch.get_rng_state()
        if self._ended:
            self._thread.join()

    def _body(self) -> None:
        _here.turn = self
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 -- raised again by `advance`
            self._failure = error
        finally:
            self._ended = True
            self._back.release()

    def _pause(self) -> None:
        self._back.release()
        self._go.acquire()
        if self._abandoned:
            raise Abandoned("another thread has failed")


def pause() -> None:
    """Return the turn, and continue at the next one. Call it on the thread of a `Turn`.

    Raises:
        Abandoned: there will be no next turn.
    """
    _here.turn._pause()
    for act in getattr(_here, "acts", ()):
        act()


@contextmanager
def at_each_turn(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on this thread whenever it continues after a pause in the body.

    Other threads may have changed torch's process-wide state in the meantime.
    """
    before = getattr(_here, "acts", ())
    _here.acts = (*before, act)
    try:
        yield
    finally:
        _here.acts = before


_here = threading.local()


# ---- The group

T = TypeVar("T")
Brought = TypeVar("Brought")


def in_lockstep(ranks: int, run: Callable[[LockstepCollectives], T]) -> list[T]:
    """Return the results of `run` on each rank, all with the caller's random state.

    Raises:
        Exception: whatever `run` raises on the first rank that fails.
    """
    meeting, result = Meeting[Any](ranks), dict[int, T]()

    def of_rank(rank: int) -> None:
        result[rank] = run(LockstepCollectives(rank=rank, size=ranks, group=meeting))

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
    return [result[rank] for rank in range(ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepCollectives:
    """A rank's interface to a group in this process."""

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
        result = torch.empty_like(tensor)
        self.group.meet(self.rank, (tensor, result), _exchange)
        return result

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        self.group.meet(self.rank, tensor, partial(_copy_from, source))
        return tensor


class Meeting(Generic[Brought]):
    """A meeting of a group's ranks: each brings an object, and the last to arrive acts on all objects."""

    def __init__(self, size: int) -> None:
        self.arrivals = 0  # arrivals of all ranks so far
        self._size = size
        self._brought: dict[int, Brought] = {}
        self._meetings = 0

    def meet(self, rank: int, brought: Brought, act: Callable[[Sequence[Brought]], None]) -> None:
        """Wait until all ranks have arrived, and `act` has been called on their objects, in rank order."""
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
        """Drop the objects, after a meeting or a failure."""
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
    for rank, (_, result) in enumerate(brought):
        for part, (own, _) in zip(result, brought, strict=True):
            part.copy_(own[rank])


def _copy_from(source: int, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor is not tensors[source]:
            tensor.copy_(tensors[source])
