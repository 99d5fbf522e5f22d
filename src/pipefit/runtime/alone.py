"""Trains one stage of a plan without its neighbors, for profiling.

It receives zeros, and its messages are dropped. The stage runs its own program with tensors of the true
shapes, so its memory is, to the byte, its memory in the whole pipeline, and no other part of the model needs
a device. The computed values mean nothing.
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

_SEED = 0  # any seed: the computed values mean nothing


class LoneStages:
    """A model whose single stages are trained alone, on devices with the kernels of `target`.

    The model is built once; an existing module is copied, not changed.

    Raises:
        UsageError: the module cannot be captured.
    """

    def __init__(self, task: Task, microbatch_size: int, *, target: Target = "cpu") -> None:
        self.task, self._target = task, target
        with recording("profiling"):
            self.chain = self._chain(microbatch_size)
        self.shared = self.chain.shared  # before a stage is given its own copies

    def _chain(self, samples: int) -> Chain:
        return build_chain(on_a_copy(self.task), samples, seed=_SEED, target=self._target)

    def train(
        self, plan: Plan, stage: int, *, device: torch.device, meter: MemoryMeter, steps: int | None = None
    ) -> int:
        """Return the peak bytes of a stage of `plan` over `steps` steps on `device`.

        Its layers then return to the host. Default of `steps`: the number of distinct steps of the plan.

        Raises:
            OutOfMemory: the stage passed the meter's cap.
            FileError: the plan was made for another task; says what differs.
            UsageError: torch cannot run a backward on this GPU in this process.
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
