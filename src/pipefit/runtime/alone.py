"""One stage of a plan trained without its neighbours, for profiling: it receives zeros, and what it sends is dropped.

The stage runs its own program with tensors of the true shapes, so that its memory is, to the byte, that in the whole
pipeline, and no other part of the model needs a device. The values that it computes mean nothing.
"""

from __future__ import annotations

import torch

from pipefit.capture.caller import on_a_copy, recording
from pipefit.capture.chain import Chain
from pipefit.capture.model import build_chain
from pipefit.capture.random_state import seed_torch
from pipefit.capture.sample import pair
from pipefit.capture.task import Task
from pipefit.lowering import distinct_steps, step_programs
from pipefit.measure import MemoryMeter
from pipefit.runtime.checks.plan_check import check_casts, check_model
from pipefit.runtime.engine.assembly import assemble
from pipefit.runtime.engine.batches import cut_batch
from pipefit.runtime.engine.in_turn import NoPeers, run_in_turn
from pipefit.runtime.engine.replicas import Source, Sources
from pipefit.runtime.engine.site import Site
from pipefit.runtime.hardware import check_backwards
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Target

_SEED = 0  # of values that mean nothing


class LoneStages:
    """A model of which single stages are trained alone, on devices with the kernels of `target`.

    It is built once; an existing module is copied, not changed.

    Raises:
        UsageError: the module cannot be captured.
    """

    def __init__(self, task: Task, microbatch_size: int, *, target: Target = "cpu") -> None:
        self.task, self._target = task, target
        with recording("profiling"):
            self.chain = self._chain(microbatch_size)
        self.shared = self.chain.shared  # before a stage is given copies of its own

    def _chain(self, samples: int) -> Chain:
        return build_chain(on_a_copy(self.task), samples, seed=_SEED, target=self._target)

    def train(
        self, plan: Plan, stage: int, *, device: torch.device, meter: MemoryMeter, steps: int | None = None
    ) -> int:
        """The peak in bytes of a stage of `plan` in so many steps on `device`; then its layers go back to the host.

        Without `steps`, in as many as differ.

        Raises:
            OutOfMemory: the stage passed the meter's cap.
            FileError: the plan was made for another task; says what differs.
            UsageError: torch runs no backward on that GPU in this process.
        """
        check_backwards([device])
        check_casts(plan, self.task)
        check_model(plan, self.task, self.chain)
        programs = step_programs(plan)
        site = Site(
            task=self.task,
            sources=Sources(
                plan,
                Source(self.chain, self.shared),
                plan.training.microbatch_size,
                lambda wanted: Source.of(self._chain(wanted.samples)),
            ),
            plan=plan,
            program=programs[-1],
            transport=NoPeers(),
            clock=lambda: 0.0,
            seed=_SEED,
        )
        runner = assemble(site, plan.stages[stage].device, device=device, meter=meter)
        try:
            devices = [device] if device.type == "cuda" else []
            with recording("profiling"), torch.random.fork_rng(devices, device_type="cuda"):
                seed_torch(_SEED, target=plan.cluster.target)
                for step in range(distinct_steps(plan) if steps is None else steps):
                    inputs, targets = pair(self.task.batch(plan.training.batch_size), "a step takes")
                    flat = self.chain.flatten(inputs), self.chain.flatten_targets(targets)
                    cut = cut_batch(plan, *flat)
                    program = programs[min(step, len(programs) - 1)]
                    run_in_turn([runner], cut.inputs, cut.targets, program=program)
        finally:
            for layer in (layer for each in runner.stages.values() for layer in each.layers):
                layer.module.to("cpu")
        return max(sample.total_bytes for sample in runner.record.samples)
