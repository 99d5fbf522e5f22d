"""A ledger that walks a program and adds up what every action allocates: the slow, obvious account of a plan's
memory.
"""

from __future__ import annotations

from pipefit.cost.memory import StageMemory

from pipefit.plans import Plan
from pipefit.program import Action, Kind
from pipefit.schedule import lower


def walk(plan: Plan, *, steps: int = 2) -> tuple[int, ...]:
    """The highest bytes of every stage over `steps` training steps."""
    program = lower(plan)
    peaks = []
    for number, stage in enumerate(plan.stages):
        memory = StageMemory(plan.measurement, stage.start, stage.stop, microbatches=plan.training.microbatches)
        peaks.append(_Ledger(memory, first=number == 0).run(program.actions[stage.device], steps))
    return tuple(peaks)


class _Ledger:
    def __init__(self, memory: StageMemory, *, first: bool) -> None:
        self.memory, self.first = memory, first
        self.level = self.rest = memory.parameter_bytes + memory.loss_bytes
        self.peak = self.level
        self.gradients = self.state = False

    def run(self, actions: tuple[Action, ...], steps: int) -> int:
        for _ in range(steps):
            for action in actions:
                self.act(action)
                self.peak = max(self.peak, self.level)
            assert self.level == self.rest, "a step leaks"
        return self.peak

    def act(self, action: Action) -> None:
        memory = self.memory
        match action.kind, action.wait:
            case Kind.RECV_FORWARD, False:
                self.level += memory.input_bytes
            case Kind.RECV_BACKWARD, False:
                self.level += memory.output_gradient_bytes
            case Kind.LOAD, _:
                self.level += memory.input_bytes * self.first + memory.target_bytes
            case Kind.SEND_FORWARD, True:
                self.level -= memory.sent_bytes
            case Kind.SEND_BACKWARD, True:
                self.level -= memory.input_gradient_bytes
            case Kind.FORWARD, _:
                self.compute(*memory.forward())
            case Kind.BACKWARD, _:
                self.compute(*memory.backward(first_microbatch=not self.gradients))
                self.gradients = True
            case Kind.STEP, _:
                self.step()

    def compute(self, peak: int, after: int) -> None:
        self.peak = max(self.peak, self.level + peak)
        self.level += after

    def step(self) -> None:
        step = self.memory.step
        born = 0 if self.state else step.state_bytes
        self.compute(step.peak_bytes if self.state else step.first_peak_bytes, born - self.memory.gradient_bytes)
        self.rest += born
        self.state, self.gradients = True, False
