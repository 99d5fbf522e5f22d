"""The dry run: the runtime itself over fake tensors, all devices in one process, no hardware and no data.

It executes every action of the program as workers would, on tensors that have shapes and storages but no bytes. The
peaks that it counts are, to the byte, those of real training, for any model that fake tensors support. So a plan can be
certified before anyone pays for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipefit.capture.caller import recording
from pipefit.capture.sample import sample
from pipefit.capture.shared import shared_parameters
from pipefit.capture.task import Task
from pipefit.fake.chain import fake_chain
from pipefit.fake.target import FakeTarget
from pipefit.meter.cpu import Meter
from pipefit.meter.kernels import Kernels
from pipefit.plans import Plan
from pipefit.profiles import Target
from pipefit.runtime.assembly import Site, assemble
from pipefit.runtime.elsewhere import CERTIFIED, warn_elsewhere
from pipefit.runtime.folding import Bytes, Change, Folding, Unfolding, shortened
from pipefit.runtime.plan_check import check_model
from pipefit.runtime.runner import run_in_turn
from pipefit.runtime.transport import InProcess
from pipefit.schedule import lower
from pipefit.trace import PREDICTED_STEPS, Category, DeviceTrace, MemorySample, Trace
from pipefit.validation import whole


def certify(
    task: Task, plan: Plan, *, steps: int = PREDICTED_STEPS, target: Target | None = None, fold: bool = True
) -> Trace:
    """The peaks of `plan` on every device, over `steps` training steps, to the byte.

    The first step differs from all others (optimizer state is born in it), so two steps tell everything. Times in the
    trace are positions in the program, not seconds. Budgets are not enforced: compare `trace.peak_bytes` with the
    cluster's. Of microbatches that do the same, one is run (`pipefit.runtime.folding`), unless `fold` is False: the
    bytes are the same, and it takes as many times longer.

    For the target `cpu` the profile tells what kernels take, also on another machine; an operation that it did not meet
    is measured here. Warns (`PipefitWarning`) of another machine, and of operations that could not be measured.

    Raises:
        FileError: the plan was made for another task; says what differs.
    """
    whole("steps", steps, 1)
    target = target or plan.profile.assumptions.target
    warn_elsewhere(plan.profile.assumptions, CERTIFIED)
    kernels = Kernels(plan.profile.assumptions.threads, plan.profile.kernels) if target == "cpu" else None
    training, program = plan.training, lower(plan)
    folding = Folding.of(program) if fold else Folding.none(program)
    like = sample(task, training.microbatch_size)
    with recording("certifying"), torch.random.fork_rng(devices=[]), FakeTarget(target) as fake:
        chain = fake_chain(task, fake, like)
        check_model(plan, task, chain)
        site = Site(
            task=task,
            chain=chain,
            plan=plan,
            program=program,
            shared=shared_parameters([layer.module for layer in chain.layers]),
            transport=InProcess(),
            clock=lambda: 0.0,
            seed=0,
        )
        meters = [_LevelMeter(Meter(plan.stages[stages[0]].device, kernels=kernels)) for stages in plan.ranks]
        runners = [
            assemble(site, stages, device=fake.device, meter=meter)
            for stages, meter in zip(plan.ranks, meters, strict=True)
        ]
        data = [[fake.fake(t) for t in chain.flatten(like[0])]] * training.microbatches
        wanted = [[fake.fake(t) for t in chain.flatten_targets(like[1])]] * training.microbatches
        unfoldings = [Unfolding(folding, meter.level) for meter in meters]
        samples: list[list[MemorySample]] = [[] for _ in plan.cluster.devices]
        for step in range(steps):
            run_in_turn(runners, data, wanted, program=shortened(program, folding.later if step else folding.first))
            for runner, meter, unfolding in zip(runners, meters, unfoldings, strict=True):
                samples[runner.number] += unfolding.step(step, program.actions[runner.number], meter.changes())
    if kernels is not None:
        kernels.keep()
        kernels.tell_unknown()
    return Trace(
        source="dry run",
        steps=steps,
        devices=tuple(
            DeviceTrace(device=n, budget_bytes=device.memory_bytes, events=(), memory=tuple(samples[n]))
            for n, device in enumerate(plan.cluster.devices)
        ),
        step_seconds=(0.0,) * steps,
    )


class _LevelMeter:
    """A meter that also remembers the level at which every action began."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._began: list[Bytes] = []
        self._peaks: list[Bytes] = []

    @property
    def level(self) -> Bytes:
        """The bytes of every category now."""
        return tuple(self._meter.bytes)

    def changes(self) -> list[Change]:
        """What every action since the last call did."""
        self._meter.begin("the next step")
        began = [*self._began, self.level]
        changes = [
            Change(_minus(peak, before), _minus(after, before))
            for before, peak, after in zip(began, self._peaks, began[1:], strict=False)
        ]
        self._began, self._peaks = [], []
        return changes

    def __enter__(self) -> None:
        self._meter.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._meter.__exit__(*error)  # type: ignore[no-untyped-call]

    def begin(self, action: str) -> None:
        self._meter.begin(action)
        self._began.append(self.level)

    def end(self, step: int, seconds: float, category: Category = Category.TEMPORARY) -> MemorySample:
        found = self._meter.end(step, seconds, category)
        self._peaks.append(found.bytes)
        return found

    def tag(self, tensors: Iterable[Tensor | None], category: Category) -> None:
        self._meter.tag(tensors, category)

    def drop_graph(self) -> None:
        self._meter.drop_graph()

    def forget_graphs(self) -> None:
        self._meter.forget_graphs()


def _minus(one: Bytes, other: Bytes) -> Bytes:
    return tuple(a - b for a, b in zip(one, other, strict=True))
