"""All devices of a plan in one process: each runs until it would wait for another.

Devices of a tensor group wait for each other in the middle of their actions too, and so run on threads of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from pipefit.fake_cuda.target import is_fake
from pipefit.runtime.comm.transport import Owners
from pipefit.runtime.engine.runner import DeviceRunner, Microbatch
from pipefit.runtime.engine.tensor_groups import TensorGroups, Together
from pipefit.schema.actions import RECEIVES, Action, Message
from pipefit.tensor_parallel.lockstep import Turn, pause

# ----------------------------------------------------------------------------------------------------
# A device without the others: all transfers are complete from the start.


class NoPeers:
    """A transport that stands for all other devices: what is received is zeros, and what is sent is dropped.

    Fake tensors have no numbers, and are left as they are.
    """

    def start(self, action: Action, tensors: list[Tensor], message: Message) -> None:
        if action.kind in RECEIVES:
            for tensor in tensors:
                if not is_fake(tensor):
                    tensor.zero_()

    def collect(
        self, action: Action, tensors: list[Tensor], members: tuple[int, ...], device: int, owners: Owners = ()
    ) -> None:
        """There is nothing to add."""

    def ready(self, handle: None) -> bool:
        return True

    def join(self, action: Action, handle: None) -> None:
        """The transfer was complete from the start."""

    def abandon(self) -> None:
        """Nothing is under way."""


# ----------------------------------------------------------------------------------------------------


def run_in_turn(
    runners: Sequence[DeviceRunner],
    inputs: Sequence[Microbatch],
    targets: Sequence[Microbatch],
    *,
    groups: TensorGroups | None = None,
    around: Callable[[], AbstractContextManager[object]] | None = None,
    **options: Any,
) -> None:
    """One step of all devices in this process: each runs until it would wait for another.

    `groups` are tensor groups, whose ranks wait for each other if all are here. `around` makes a context for all that
    runs, here and on each of their threads; `options` are passed on to `step`.
    """
    together = groups if isinstance(groups, Together) else None
    threads: list[Turn] = []
    running: dict[int, Callable[[], bool]] = {}
    for runner in runners:
        step = runner.step(inputs, targets, **options)
        if together is not None and runner.number in together.devices:
            threads.append(Turn(partial(_run, step, around or nullcontext)))
            running[runner.number] = threads[-1].advance
        else:
            running[runner.number] = partial(_has_ended, step)
    try:
        while running:
            before = _progress(runners, together)
            with (around or nullcontext)():
                running = {number: advance for number, advance in running.items() if not advance()}
            assert before != _progress(runners, together) or not running, (
                "message_order refuses programs that would hang"
            )
    except BaseException:
        for thread in threads:
            thread.abandon()
        if together is not None:
            together.abandon()
        for runner in runners:
            runner.abandon()
        raise


def _has_ended(step: Iterator[None]) -> bool:
    """Let a device run until it waits; whether it has ended."""
    return next(step, StopIteration) is StopIteration


def _run(step: Iterator[None], around: Callable[[], AbstractContextManager[object]]) -> None:
    """All that a device does in a step, on a thread with turns."""
    with around():
        for _ in step:
            pause()


def _progress(runners: Sequence[DeviceRunner], together: Together | None) -> tuple[int, ...]:
    """What grows as long as a device gets on."""
    return *(len(runner.record.events) for runner in runners), 0 if together is None else together.arrivals
