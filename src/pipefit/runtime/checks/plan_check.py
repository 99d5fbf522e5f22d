"""Checks before training and dry runs that a plan belongs to a task, and to the devices it trains on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from pipefit.capture import Chain, ChainLayer, Task
from pipefit.errors import FileError, PipefitWarning, UsageError
from pipefit.fake_cuda.fingerprint import fingerprint, with_loss
from pipefit.measure import this_machine
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Assumptions, differences
from pipefit.simulator import Simulation
from pipefit.texts import counted
from pipefit.units import format_bytes

# ---- A profile from another processor, torch release or number of threads
# Kernels then take other temporary memory, and another torch may save other tensors. The figures of a plan
# stay those of the profiled machine; certifying or training elsewhere raises one warning.

CERTIFIED = "certified peaks are those of the profile"
TRAINED = "this run may need more or less memory than planned"


def warn_elsewhere(
    assumptions: Assumptions, meaning: str, *, threads: int | None = None, callers: int = 1
) -> None:
    """Warn once if the profile was made for another torch, processor or number of `threads`.

    Processor and threads matter only for kernels of the CPU; None means the profile's number of threads. The
    warning points to the caller of the last of `callers` internal frames.
    """
    if differences := list(_differences(assumptions, threads)):
        warnings.warn(
            f"the profile was made {', '.join(differences)}: {meaning}. Profile the model again on this "
            "machine for exact figures",
            PipefitWarning,
            stacklevel=2 + callers,
        )


def _differences(assumptions: Assumptions, threads: int | None) -> Iterator[str]:
    here = this_machine(threads or assumptions.threads)
    if assumptions.torch != torch.__version__:
        yield f"with torch {assumptions.torch}, not {torch.__version__}"
    if assumptions.target != "cpu":
        return
    if assumptions.cpu and (assumptions.cpu, assumptions.capability) != (here.cpu, here.capability):
        yield f"on {assumptions.cpu} with {assumptions.capability}, not {here.cpu} with {here.capability}"
    elif assumptions.processor not in ("", here.details):
        yield f"on another {assumptions.cpu} with different features"
    if assumptions.threads != here.threads:
        yield (
            f"for {counted(assumptions.threads, 'thread')}, not {here.threads} (call "
            f"torch.set_num_threads({assumptions.threads}))"
        )


# ---- Gradients of several batches


def warn_of_accumulation(plan: Plan, batches: int) -> None:
    """Warn if a device lacks room for gradients that exist from the start of a batch.

    Raises:
        UsageError: the schedule updates in every step.
    """
    for device, nbytes in enumerate(Simulation(plan).accumulated_peaks()):
        if (lack := nbytes - plan.cluster.devices[device].memory_bytes) > 0:
            warnings.warn(
                f"with accumulate={batches}, device {device} needs {format_bytes(nbytes)}, "
                f"{format_bytes(lack)} more than it has, because gradients exist from the start of every "
                "batch but the first: keep that much free with --reserve, or plan more microbatches per step",
                PipefitWarning,
                stacklevel=3,
            )


# ---- Plan and task


def check_model(plan: Plan, task: Task, chain: Chain, samples: int | None = None) -> None:
    """Check that `plan` was made for `task`, whose chain is `chain` for `samples`.

    Default of `samples`: the size of the plan's microbatches.

    Raises:
        FileError: the plan was made for another task; says what differs.
        UsageError: everything but the loss is as in the plan, and the loss fails.
    """
    profile = plan.profile
    measurement = plan.measurement if samples is None else profile.at(samples)
    now = fingerprint(task, chain)
    all_but_loss = replace(now.fingerprint, loss=profile.fingerprint.loss)
    result = differences(profile.fingerprint, all_but_loss, profile.layers)
    if not result:
        now = with_loss(now, chain, measurement)
        result = differences(profile.fingerprint, now.fingerprint, profile.layers)
    if not result and measurement.sizes != now.sizes:
        result = [
            "operations of other sizes, such as another number of attention heads, or with other numbers"
        ]
    if result:
        raise FileError(
            f"the plan of {profile.model} does not belong to this task: it was made for "
            f"{'; '.join(result)}. Profile and plan this task again"
        )


def check_casts(plan: Plan, task: Task) -> None:
    """Check that autocast casts the same operators on the plan's devices as in its profile.

    Otherwise values would have other dtypes.

    Raises:
        UsageError: it casts others.
    """
    made, trained = plan.profile.assumptions.target, plan.cluster.target
    if task.autocast is not None and made != trained:
        raise UsageError(
            f"the plan of {plan.profile.model} has the dtypes of autocast for the target {made}, but "
            f"{plan.cluster.name} would train with the kernels of {trained}, for which autocast casts other "
            f"operators: profile with --target {trained} and plan again"
        )


def frozen_in(layers: Sequence[ChainLayer]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that do not require gradients, with their names in the model."""
    return [(name, own) for layer in layers for name, own in layer.named_parameters if not own.requires_grad]


def check_frozen(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Check that parameters are still frozen, as they were when the plan was made.

    Raises:
        UsageError: one is not; names it.
    """
    for name, parameter in parameters:
        if parameter.requires_grad:
            raise UsageError(
                f"parameter {name} was frozen when the plan was made, so the plan has neither memory for "
                "its gradient nor an optimizer for it: plan again and create a new Trainer to train it, or "
                "freeze it before the step"
            )
