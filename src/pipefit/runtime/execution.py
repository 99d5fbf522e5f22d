"""Runs programs on batches with the devices of one process: for a trainer, and where a plan is held to plain training.

A batch is cut into microbatches, each of which counts by its part of the batch, and every device executes its part of
the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from pipefit.capture.chain import Chain
from pipefit.capture.task import Task
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.runtime.batches import Cut, cut_batch
from pipefit.runtime.in_turn import run_in_turn
from pipefit.runtime.results import Result, tell
from pipefit.runtime.runner import DeviceRunner
from pipefit.runtime.specializations import Specializations
from pipefit.runtime.tensor_groups import TensorGroups
from pipefit.schedule import updates_alone

Around = Callable[[], AbstractContextManager[object]]


class Execution:
    """The devices of one process, `distributed` if others have more of them.

    `chain` says how batches look; it keeps no layers alive that stages free.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        chain: Chain,
        runners: Sequence[DeviceRunner],
        *,
        groups: TensorGroups,
        distributed: bool,
    ) -> None:
        self.plan, self.runners, self.distributed = plan, runners, distributed
        self.chain, self._groups = replace(chain, layers=()), groups
        self._specializations: Mapping[int, Specializations] = {
            runner.number: Specializations(task, plan, runner.usual, traced=chain.traced) for runner in runners
        }

    def cut(self, batch: tuple[Any, Any]) -> Cut:
        """`batch`, of inputs and targets, in microbatches."""
        given, wanted = batch
        return cut_batch(self.plan, self.chain.flatten(given), self.chain.flatten_targets(wanted))

    def drop_gradients(self) -> None:
        """Drop gradients from before the step, such as the caller's own, which must not enter its update."""
        for runner in self.runners:
            for stage in runner.stages.values():
                for layer in stage.layers:
                    layer.module.zero_grad(set_to_none=True)

    def run(self, cut: Cut, program: Program, batches: int, *, training: bool, around: Around | None = None) -> Result:
        """Run `program` on a batch that is one of `batches` in an update; its mean loss, on its way to all workers.

        `around` makes contexts for all that runs, on threads of their own too.
        """
        samples = sum(cut.sizes)
        shares = [size / samples for size in cut.sizes]
        alone = updates_alone(self.plan)
        self.run_program(
            program,
            inputs=cut.inputs,
            targets=cut.targets,
            weights=[1.0 if alone else share / batches for share in shares],
            specializations={n: known.of_all(cut.sizes, training) for n, known in self._specializations.items()},
            training=training,
            around=around,
        )
        return tell(self.plan, self.runners, shares, distributed=self.distributed)

    def run_program(self, program: Program, *, training: bool = True, **options: Any) -> None:
        """Run all devices of this process; torch's random generators stay as they were."""
        stages = [stage for runner in self.runners for stage in runner.stages.values()]
        devices = [stage.device for stage in stages if stage.device.type == "cuda"]
        with torch.random.fork_rng(devices, device_type="cuda"):
            run_in_turn(self.runners, program=program, groups=self._groups, training=training, **options)
