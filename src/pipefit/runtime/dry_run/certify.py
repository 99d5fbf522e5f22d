"""The dry run: the runtime over fake tensors, all devices in one process, without hardware and data.

It executes every action of the program as workers would, on tensors that have shapes and storages but no
bytes. Its peaks are, to the byte, those of real training, for any model that fake tensors support.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from pipefit.capture import READINGS, Task, left_as_found, recording
from pipefit.capture.sample import sample
from pipefit.errors import PipefitWarning, UsageError
from pipefit.fake_cuda.apart import apart
from pipefit.fake_cuda.chain import Chains
from pipefit.fake_cuda.target import FakeTarget
from pipefit.lowering import distinct_steps, step_programs, whole_run
from pipefit.measure import Kernels
from pipefit.memory import AllocatorSettings
from pipefit.runtime.checks.plan_check import CERTIFIED, warn_elsewhere
from pipefit.runtime.dry_run.rehearsal import Rehearsal, Rehearsed
from pipefit.runtime.offload.lending import Lending
from pipefit.schema.layer_costs import KernelMemory
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
    """Return the peaks of `plan` on every device, over `steps` training steps, exact to the byte.

    Default of `steps`: the number of distinct steps (`lowering.distinct_steps`), two under a synchronous
    schedule, because optimizer state is created in the first. Times in the trace are positions in the
    program, not seconds. Budgets are not enforced: compare `trace.peak_bytes` with the cluster's. Unless
    `fold` is False, representatives stand for the rest: one of equal microbatches
    (`runtime.dry_run.microbatches`), four of equal layers in a row (`runtime.dry_run.layers`), the first of
    equal devices, and two of the replicas that shard state (`runtime.dry_run.devices`). The bytes are equal,
    and the complete run takes many times longer. Under an asynchronous schedule microbatches are folded
    (`runtime.dry_run.asynchronous`), and layers are not.

    With settings of CUDA's caching `allocator`, for the target `cuda` only, the trace also has the allocated
    and reserved bytes of a GPU (`DeviceTrace.allocator`). They depend on the position of each block, so the
    allocations of executed layers are repeated for all others (`runtime.dry_run.expansion`).

    With `chains` of the task, the model is not traced for numbers of samples that they have.

    For the target `cpu` the profile gives the memory of kernels, also on another machine; an operation that
    is not in it is measured here. Warns (`PipefitWarning`) about another machine, and about operations that
    could not be measured.

    Raises:
        FileError: the plan was made for another task; says what differs.
        OutOfMemory: offloaded tensors exceed a host, or a device that only lends memory.
        UsageError: offloading is impossible for a tensor, or `allocator` is given for a target without one.
    """
    return _traces(task, plan, () if allocator is None else (allocator,), steps, target, fold, chains)[0]


def certify_each(
    task: Task, plan: Plan, allocators: Sequence[AllocatorSettings], *, steps: int | None = None
) -> list[Trace]:
    """Return the traces of `certify` for the target `cuda` with each of these `allocators`, from one dry run.

    The order of births and deaths of tensors does not depend on the positions of their blocks.
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
    """Return the traces of a dry run, one for each allocator, or one without allocator."""
    instance("task", task, Task, "a plan is the second argument")
    instance("plan", plan, Plan, "pipefit.load reads one")
    steps = distinct_steps(plan) if steps is None else steps
    whole("steps", steps, 1, MOST_STEPS)
    instance("fold", fold, bool)
    instance("chains", chains := chains or Chains(task), Chains)
    target = target or plan.profile.assumptions.target
    if allocators and target != "cuda":
        raise UsageError(
            f"target {target} does not have a caching allocator: certify for the target cuda, or without an "
            "allocator"
        )
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
