"""The dry run: the runtime itself over fake tensors, all devices in one process, no hardware and no data.

It executes every action of the program as workers would, on tensors that have shapes and storages but no bytes. The
peaks that it counts are, to the byte, those of real training, for any model that fake tensors support. So a plan can be
certified before anyone pays for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipefit.capture.caller import recording
from pipefit.capture.chain import Chain
from pipefit.capture.sample import Sample, sample
from pipefit.capture.task import Task
from pipefit.fake.chain import fake_chain
from pipefit.fake.target import FakeTarget
from pipefit.meter.kernels import Kernels
from pipefit.plans import Plan
from pipefit.profiles import Target
from pipefit.program import Program
from pipefit.runtime.assembly import Site, assemble
from pipefit.runtime.elsewhere import CERTIFIED, warn_elsewhere
from pipefit.runtime.folding import Folding, Unfolding, shortened
from pipefit.runtime.plan_check import check_model
from pipefit.runtime.repeated import Shortened
from pipefit.runtime.repeated_meter import RepeatedMeter
from pipefit.runtime.runner import run_in_turn
from pipefit.runtime.transport import InProcess
from pipefit.schedule import lower
from pipefit.trace import PREDICTED_STEPS, DeviceTrace, MemorySample, Trace
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
    dry = _DryRun(task, plan, lower(plan), steps, kernels)
    with recording("certifying"), torch.random.fork_rng(devices=[]), FakeTarget(target) as fake:
        samples = dry.run(fake, fold=fold)
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


@dataclass(frozen=True, slots=True)
class _DryRun:
    """A dry run of some steps of a plan."""

    task: Task
    plan: Plan
    program: Program
    steps: int
    kernels: Kernels | None

    def run(self, fake: FakeTarget, *, fold: bool) -> list[list[MemorySample]]:
        """The memory samples of every device."""
        like = sample(self.task, self.plan.training.microbatch_size)
        chain = fake_chain(self.task, fake, like)
        check_model(self.plan, self.task, chain)
        found = self._samples(fake, chain, like, fold_layers=fold, fold=fold)
        if found is None:  # layers that seemed to be equal are not, so all of them are run
            found = self._samples(fake, fake_chain(self.task, fake, like), like, fold_layers=False, fold=fold)
        assert found is not None
        return found

    def _samples(
        self, fake: FakeTarget, chain: Chain, like: Sample, *, fold_layers: bool, fold: bool
    ) -> list[list[MemorySample]] | None:
        """The memory samples of every device; None if layers were folded that are not alike."""
        microbatches = self.plan.training.microbatches
        folding = Folding.of(self.program) if fold else Folding.none(self.program)
        short = Shortened.of(self.task, self.plan, self.program, chain, fold=fold_layers)
        site = self._site(short)
        ranks = short.plan.ranks
        meters = [
            RepeatedMeter(short.plan.stages[stages[0]].device, kernels=self.kernels, swept=short.swept)
            for stages in ranks
        ]
        runners = [
            assemble(site, stages, device=fake.device, meter=meter) for stages, meter in zip(ranks, meters, strict=True)
        ]
        for runner, meter in zip(runners, meters, strict=True):
            for stage in runner.stages.values():
                meter.own_layers(stage, short.copies[stage.start : stage.stop])
        data = [[fake.fake(t) for t in chain.flatten(like[0])]] * microbatches
        wanted = [[fake.fake(t) for t in chain.flatten_targets(like[1])]] * microbatches
        unfoldings = [Unfolding(folding, meter.level) for meter in meters]
        samples: list[list[MemorySample]] = [[] for _ in self.plan.cluster.devices]
        for step in range(self.steps):
            ran = folding.later if step else folding.first
            run_in_turn(runners, data, wanted, program=shortened(short.program, ran))
            for runner, meter, unfolding in zip(runners, meters, unfoldings, strict=True):
                actions = self.program.actions[runner.number]
                samples[runner.number] += unfolding.step(step, actions, meter.changes())
        return samples if all(meter.alike for meter in meters) else None

    def _site(self, short: Shortened) -> Site:
        return Site(
            task=self.task,
            chain=short.chain,
            plan=short.plan,
            program=short.program,
            shared=short.chain.shared,
            transport=InProcess(),
            clock=lambda: 0.0,
            seed=0,
            absent=short.absent,
        )
