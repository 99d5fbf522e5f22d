"""The peaks of a loop under decisions, by a dry run of exactly this loop."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.fake_cuda.target import FakeTarget
from pipefit.measure import Kernels, Meter
from pipefit.own_loop.installing import install
from pipefit.own_loop.loop import Loop
from pipefit.own_loop.offloading import HostTensors
from pipefit.own_loop.recording import STEPS
from pipefit.schema.loop_plan import LoopDecision
from pipefit.schema.profile import Target


def peaks_of(
    loop: Loop, decisions: Sequence[LoopDecision], target: Target, kernels: Kernels | None
) -> tuple[int, int]:
    """Return the certified peaks of the first step and of later ones, in bytes."""
    fake = FakeTarget(target)
    meter = Meter(0, kernels=kernels, place=fake.device)
    peaks: list[int] = []
    with loop.over_fakes(fake, meter) as run:
        planned = install(loop.module, decisions, HostTensors.dry())
        try:
            meter.begin("the first step")
            for number in run(STEPS):
                peaks.append(meter.end(number, 0.0).total_bytes)
                meter.begin("a later step")
        finally:
            for forward in planned:
                forward.remove()
    first, steady = peaks
    return first, steady
