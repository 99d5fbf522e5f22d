"""All devices of a plan in one process: each runs until it would wait for another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipefit.runtime.runner import DeviceRunner, Microbatch


def run_in_turn(
    runners: Sequence[DeviceRunner], inputs: Sequence[Microbatch], targets: Sequence[Microbatch], **options: Any
) -> None:
    """One step of all devices in this process: each runs until it would wait for another.

    `options` are passed on to `step`.
    """
    running = {runner.number: runner.step(inputs, targets, **options) for runner in runners}
    try:
        while running:
            before = [len(runner.record.events) for runner in runners]
            for number, step in list(running.items()):
                if next(step, StopIteration) is StopIteration:
                    del running[number]
            moved = before != [len(runner.record.events) for runner in runners]
            assert moved or not running, "message_order refuses programs that would hang"
    except BaseException:
        for runner in runners:
            runner.abandon()
        raise
