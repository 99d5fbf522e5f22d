"""The dry run: the runtime itself over fake tensors, all devices in one process, no hardware and no data.

It executes every action of the program as workers would, on tensors that have shapes and storages but no bytes. The
peaks that it counts are, to the byte, those of real training, for any model that fake tensors support. So a plan can be
certified before anyone pays for a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from pipefit.capture.by_value import READINGS
from pipefit.capture.caller import left_as_found, recording
from pipefit.capture.sample import sample
from pipefit.capture.task import Task
from pipefit.errors import PipefitWarning, UsageError
from pipefit.fake_cuda.apart import apart
from pipefit.fake_cuda.chain import Chains
from pipefit.fake_cuda.target import FakeTarget
from pipefit.lowering import distinct_steps, step_programs, whole_run
from pipefit.measure.kernels import Kernels
from pipefit.memory.cuda_allocator import AllocatorSettings
from pipefit.runtime.checks.plan_check import CERTIFIED, warn_elsewhere
from pipefit.runtime.dry_run.rehearsal import Rehearsal, Rehearsed
from pipefit.runtime.offload.lending import Lending
from pipefit.schema.kernels import KernelMemory
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Target
from pipefit.schema.trace import MOST_STEPS, Trace
from pipefit.schema.validation import instance, whole


def certify(
    task: Task,
    plan: Plan,
    *,
    steps: int | None = None,
    target: Target | None = None,
    fold: bool = True,
    allocator: AllocatorSettings | None = None,
    chains: Chains | None = None,
) -> Trace:
    """The peaks of `plan` on every device, over `steps` training steps, to the byte.

    Without `steps`, as many are run as differ (`pipefit.lowering.distinct_steps`): two, because optimizer state is born
    in the first. Times in the trace are positions in the program, not seconds. Budgets are not enforced: compare
    `trace.peak_bytes` with the cluster's. Of microbatches that do the same, one is run
    (`pipefit.runtime.dry_run.microbatches`), of equal layers in a row, four (`pipefit.runtime.dry_run.layers`), of
    devices that do the same, the first (`pipefit.runtime.dry_run.devices`), and of replicas that divide state, two
    (`pipefit.runtime.dry_run.devices`), unless `fold` is False: the bytes are the same, and it takes many times longer.
    Under an endless schedule microbatches are folded (`pipefit.runtime.dry_run.asynchronous`), and layers are not.

    With settings of CUDA's caching `allocator`, which only the target `cuda` has, the trace also says what a GPU
    allocates and reserves (`DeviceTrace.allocator`). All layers are run then, since what is reserved depends on where
    each block lies.

    With `chains` of the task, the model is not traced for numbers of samples that they have.

    For the target `cpu` the profile tells what kernels take, also on another machine; an operation that it did not meet
    is measured here. Warns (`PipefitWarning`) of another machine, and of operations that could not be measured.

    Raises:
        FileError: the plan was made for another task; says what differs.
        OutOfMemory: a host, or a device that only lends memory, has no room for what is moved there.
        UsageError: something is moved that cannot be, or an allocator is asked for that the target does not have.
    """
    return _traces(task, plan, () if allocator is None else (allocator,), steps, target, fold, chains)[0]


def certify_each(
    task: Task, plan: Plan, allocators: Sequence[AllocatorSettings], *, steps: int | None = None
) -> list[Trace]:
    """What `certify` answers for the target `cuda` with each of these `allocators`. One dry run tells it for all: in
    which order tensors are born and die does not depend on where their blocks lie.
    """
    return _traces(task, plan, tuple(allocators), steps, "cuda", True, None)


def _traces(
    task: Task,
    plan: Plan,
    allocators: tuple[AllocatorSettings, ...],
    steps: int | None,
    target: Target | None,
    fold: bool,
    chains: Chains | None,
) -> list[Trace]:
    """The answers of a dry run, one for each allocator; one without what an allocator holds, if there are none."""
    instance("task", task, Task, "a plan is the second argument")
    instance("plan", plan, Plan, "pipefit.load reads one")
    steps = distinct_steps(plan) if steps is None else steps
    whole("steps", steps, 1, MOST_STEPS)
    instance("fold", fold, bool)
    instance("chains", chains := chains or Chains(task), Chains)
    target = target or plan.profile.assumptions.target
    if allocators and target != "cuda":
        raise UsageError(f"target {target} has no caching allocator: certify for the target cuda, or without allocator")
    warn_elsewhere(plan.profile.assumptions, CERTIFIED, callers=2)
    kernels = Kernels(plan.profile.assumptions.threads, plan.profile.kernels) if target == "cpu" else None
    programs = step_programs(plan)
    lending = Lending.dry(plan, whole_run(plan))
    with recording("certifying"):
        like = sample(task, plan.training.microbatch_size)
    dry = Rehearsal(task, plan, programs, lending, like, steps, kernels, allocators, chains)

    def run() -> Rehearsed:
        with (
            recording("certifying"),
            torch.random.fork_rng(devices=[]),
            left_as_found(task.loss),
            FakeTarget(target) as fake,
        ):
            return dry.run(fake, fold=fold)

    ran = apart(target, run)
    if kernels is not None:
        kernels.keep()
        kernels.tell_unknown()
    assumed = (*ran.assumed, *(kernel for kernel in plan.profile.kernels.unknown if kernel in READINGS))
    if gap := KernelMemory(kernels=tuple(dict.fromkeys(assumed))).gap:
        warnings.warn(gap, PipefitWarning, stacklevel=3)
    return [dry.trace(ran, number) for number in range(max(len(allocators), 1))]
