"""All devices of a plan in one process: each runs until it would wait for another.

Devices of a tensor group also wait for each other within actions, and therefore run on separate threads.
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
from pipefit.tensor_parallel import Turn, pause

# ---- A device without peers


class NoPeers:
    """A transport without peers, for one device alone: it receives zeros, and sent tensors are dropped.

    All transfers are complete from the start. Fake tensors have no numbers, and are left unchanged.
    """

    def start(self, action: Action, tensors: list[Tensor], message: Message) -> None:
        if action.kind in RECEIVES:
            for tensor in tensors:
                if not is_fake(tensor):
                    tensor.zero_()

    def collect(
        self,
        action: Action,
        tensors: list[Tensor],
        members: tuple[int, ...],
        device: int,
        owners: Owners = (),
    ) -> None:
        """Add nothing."""

    def ready(self, handle: None) -> bool:
        return True

    def join(self, action: Action, handle: None) -> None:
        """Return at once: the transfer was complete from the start."""

    def abandon(self) -> None:
        """Do nothing: no transfer is in flight."""


# ---- All devices in turn


def run_in_turn(
    runners: Sequence[DeviceRunner],
    inputs: Sequence[Microbatch],
    targets: Sequence[Microbatch],
    *,
    groups: TensorGroups | None = None,
    around: Callable[[], AbstractContextManager[object]] | None = None,
    **options: Any,
) -> None:
    """Run one step of all devices in this process, each until it would wait for another.

    `groups` are tensor groups, whose ranks wait for each other if all are in this process. `around` makes a
    context for everything that runs, here and on each of their threads; `options` are passed on to `step`.
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
    """Run a device until it waits; return whether its step has ended."""
    return next(step, StopIteration) is StopIteration


def _run(step: Iterator[None], around: Callable[[], AbstractContextManager[object]]) -> None:
    """Run the whole step of a device on a thread with turns."""
    with around():
        for _ in step:
            pause()


def _progress(runners: Sequence[DeviceRunner], together: Together | None) -> tuple[int, ...]:
    """Return counters that grow as long as a device makes progress."""
    return *(len(runner.record.events) for runner in runners), 0 if together is None else together.arrivals
