"""Threads of which one runs at a time: each has its turn until it waits for another, and then hands the turn back.

Good for what has to stop in the middle of a call, such as a rank inside a layer whose collective lacks another rank:
whoever has the turn calls `pause`, and goes on from there at its next turn. The order of all that is computed is that
of the calls of `advance`. Every thread draws from torch's default generator as if it were alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Abandoned(RuntimeError):
    """What this thread waits for will not come: another has failed."""


class Turn:
    """A thread that runs `run`, but only while `advance` waits for it."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._thread = threading.Thread(target=self._body, name="pipefit-turn", daemon=True)
        self._go, self._back = threading.Lock(), threading.Lock()  # released to give the turn, and to give it back
        self._go.acquire()
        self._back.acquire()
        self._draws = torch.get_rng_state()
        self._failure: BaseException | None = None
        self._runs = self._ended = self._abandoned = False

    def advance(self) -> bool:
        """Give it the turn; whether it has ended when the turn comes back.

        Raises:
            BaseException: whatever `run` raises.
        """
        self._give()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self._ended

    def abandon(self) -> None:
        """End it: the `pause` in which it waits raises `Abandoned`."""
        self._abandoned = True
        if self._runs:  # the caller was interrupted while it had the turn
            self._back.acquire()
            self._runs = False
        if self._thread.ident is not None and not self._ended:
            self._give()
        self._failure = None

    def _give(self) -> None:
        """Give it the turn, and wait until it comes back. Torch's states are large tensors, so they are ours."""
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
        except BaseException as error:  # noqa: BLE001 -- raised again where the turn was given
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
    """Hand the turn back, and go on at the next one. To be called on the thread of a `Turn`.

    Raises:
        Abandoned: there will be no next one.
    """
    _here.turn._pause()
    for act in getattr(_here, "acts", ()):
        act()


@contextmanager
def at_each_turn(act: Callable[[], None]) -> Iterator[None]:
    """Inside, `act` is called on this thread whenever it goes on after a pause: others may have changed what torch has
    one of for all threads.
    """
    before = getattr(_here, "acts", ())
    _here.acts = (*before, act)
    try:
        yield
    finally:
        _here.acts = before


_here = threading.local()
