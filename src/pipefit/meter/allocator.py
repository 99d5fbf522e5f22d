"""The peak of one call by the CPU allocator's own events, which say how many bytes it gives and takes back.

`torch.profiler` shows the same events with `profile_memory`. They are read through torch's older profiler, because it
starts in a tenth of a millisecond where the newer one takes a second the first time, prints nothing, touches no GPU and
works while another profiler is running. Only the events of the calling thread are seen: what the other threads of a
parallel region allocate for themselves is not counted, here or by `torch.profiler`.

The call runs on a thread of its own (`apart`), because dispatch modes, fake tensors, autocast and profilers are active
for one thread. It runs below autograd, as calls inside a dispatch mode do, and torch's random state is restored
afterwards. Torch's private interfaces for this are used only here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate
from typing import TypeVar

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import (  # type: ignore[attr-defined]
    ProfilerConfig,
    ProfilerState,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
)

T = TypeVar("T")


def apart(call: Callable[[], T]) -> T:
    """What `call` returns, or raises, on a thread of its own."""
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
            raised.append(error)

    thread = threading.Thread(target=run, name="pipefit-measuring")
    thread.start()
    thread.join()
    if raised:
        raise raised.pop()  # not to be kept by a frame that it keeps
    return found.pop()


def peak_of(call: Callable[[], T]) -> tuple[int, T]:
    """The most bytes that `call` held at once, and what it returned. To be called inside `apart`."""
    state = torch.get_rng_state()
    _enable_profiler_legacy(_memory_only())
    try:
        with torch._C._AutoDispatchBelowAutograd():
            out = call()
    finally:
        threads = _disable_profiler_legacy()
        torch.set_rng_state(state)
    changes = [
        event.cpu_memory_usage() for events in threads for event in events if str(event.kind()) == "memory_alloc"
    ]
    return max(accumulate(changes), default=0), out


def _memory_only() -> ProfilerConfig:
    """No shapes, but memory; no stacks, FLOPs or modules."""
    return ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
