"""A GPU's copy streams run by the simulator's clock: the work that the runtime queues on fake streams,
replayed with the links' seconds, begins and ends when the simulator says.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from pipefit.lowering import lower
from pipefit.memory.arenas import Arena, arenas_of
from pipefit.runtime import Trainer
from pipefit.runtime.hardware import Hardware
from pipefit.runtime.offload.copying import Slot
from pipefit.runtime.offload.cuda import OnStreams
from pipefit.runtime.offload.lending import HostMemory, Lending
from pipefit.runtime.options import Supervision
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Link
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.schema.trace import Stream
from pipefit.simulator import simulate
from support.random_offloads import make_chain, moving
from support.random_state_offloads import moving_states
from support.small_tasks import batch_of, plan_of

Span = tuple[float, float]  # begin and end


@dataclass(eq=False)
class Moment:
    """An event with the time at which its stream reaches it."""

    seconds: float

    def synchronize(self) -> None:
        """Wait for the event, without time passing."""


@dataclass(eq=False)
class Timeline:
    """A stream that knows when its queued work ends."""

    cuda_stream: int
    seconds: float = 0.0

    def record_event(self) -> Moment:
        return Moment(self.seconds)

    def wait_event(self, event: Moment) -> None:
        self.seconds = max(self.seconds, event.seconds)

    def synchronize(self) -> None:
        """Wait for the stream, without time passing."""


@dataclass
class PlayedGpu:
    """A GPU whose actions and copies take the seconds of `plan`, with a driver that copies at once."""

    plan: Plan
    computing: list[float]  # seconds of every action
    at: int
    streams: list[Timeline] = field(default_factory=lambda: [Timeline(0)])
    lenders: dict[tuple[int, int], float] = field(default_factory=dict)  # addresses, with bytes per second
    spans: dict[int, Span] = field(default_factory=dict)  # of copies, by the positions of their actions

    def begins(self, position: int) -> None:
        """Start an action: the computation before it takes its seconds."""
        self.streams[0].seconds += self.computing[position - 1] if position else 0.0
        self.at = position

    def stream(self) -> Timeline:
        self.streams.append(Timeline(len(self.streams)))
        return self.streams[-1]

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)
        if self.at == len(self.computing):  # state before the first step and after the last one
            return
        (rate,) = {
            rate
            for (start, stop), rate in self.lenders.items()
            if start <= target < stop or start <= source < stop
        }
        begin = self.streams[stream].seconds
        self.streams[stream].seconds += nbytes / rate
        first, last = self.spans.get(self.at, (begin, begin))
        self.spans[self.at] = min(first, begin), max(last, self.streams[stream].seconds)

    def lending(self, hardware: Hardware, program: Program) -> Lending:
        """Stand in for `Lending.within`."""
        arenas = arenas_of(hardware.plan, program)
        memory = RatedMemory(hardware.plan.cluster, arenas)
        memory.gpu = self
        copier = OnStreams(self.stream, lambda: self.streams[0], self, nullcontext)  # type: ignore[arg-type, return-value]
        return Lending(arenas, lambda _: copier, memory)


class RatedMemory(HostMemory):
    """Memory of lenders, each with the rate of its link."""

    gpu: PlayedGpu

    def own(self, arena: Arena) -> list[Slot]:
        slots = super().own(arena)
        rate = self.gpu.plan.cluster.tier(0, arena.lender).bytes_per_second
        self.gpu.lenders |= {(slot.address, slot.address + slot.nbytes): rate for slot in slots}
        return slots


def one_gpu(rng: Random) -> Plan:
    """Place all layers on device 0, which moves saved tensors and some state to a host and two peers."""
    task = make_chain()
    still = plan_of(task, [6], microbatches=rng.randint(1, 6), schedule="gpipe")
    links = (
        Link.between("device0", member, bytes_per_second=rng.choice([1e5, 3e5, 1e6, 1e7]))
        for member in ("host0", "device1", "device2")
    )
    cluster = replace(Cluster.emulated((3, 1 << 30)), links=tuple(links))
    still = replace(still, cluster=cluster, stages=(Stage(start=0, stop=6, grid=Grid.of(0)),))
    # A first step does not have optimizer state yet
    return moving_states(moving(still, rng), rng, ("parameters", "gradients"))


def simulated(plan: Plan) -> tuple[dict[str, list[Span]], dict[str, float], float]:
    """Return the spans of copies and seconds of computations by action text, and the end of the first step."""
    trace = simulate(plan, steps=1)
    copies, computed = defaultdict[str, list[Span]](list), dict[str, float]()
    for event in trace.devices[0].events:  # in order of time
        if event.stream is Stream.COPY:
            copies[event.action].append((event.start_seconds, event.end_seconds))
        elif event.stream is Stream.COMPUTE:
            computed[event.action] = event.end_seconds - event.start_seconds
    return copies, computed, trace.step_seconds[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(12))
def test_copies_on_streams_begin_and_end_as_simulated(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a random plan, each copy of the first step, striped or not, and the step itself begin and end as
    simulated.
    """
    plan = one_gpu(Random(seed))
    copies, computed, step = simulated(plan)
    names = list(map(str, lower(plan).actions[0]))
    gpu = PlayedGpu(plan, [computed.get(name, 0.0) for name in names], at=len(names))
    monkeypatch.setattr(Lending, "within", gpu.lending)
    trainer = Trainer(make_chain(), plan, supervision=Supervision(on_action=gpu.begins))
    trainer.step(batch_of(make_chain(), plan))
    played = defaultdict[str, list[Span]](list)
    for position, span in sorted(gpu.spans.items()):
        played[names[position]].append(span)
    assert gpu.streams[0].seconds == pytest.approx(step)
    assert played.keys() == copies.keys()
    for name, spans in copies.items():
        assert played[name] == [pytest.approx(span) for span in spans]


def test_both_directions_are_under_way_at_once() -> None:
    """In most of these plans outward and inward copies overlap, so that a single stream would be slower."""
    overlapping = 0
    for seed in range(12):
        copies = simulated(one_gpu(Random(seed)))[0]
        out, back = (
            [s for name in copies if kind in name for s in copies[name]] for kind in ("OFFLOAD", "RELOAD")
        )
        overlapping += any(one[0] < other[1] and other[0] < one[1] for one in out for other in back)
    assert overlapping > 6
