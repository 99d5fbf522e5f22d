"""`pipefit certify`: the dry run."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

from pipefit.cli.options import Json, Model, Output, PlanFile, PredictedSteps, Settings, Target
from pipefit.errors import UsageError

if TYPE_CHECKING:
    from pipefit.allocator import AllocatorSettings
    from pipefit.trace import Trace


def command(
    plan: PlanFile,
    model: Model,
    settings: Settings = [],  # noqa: B006 - typer reads it and makes a list of its own
    steps: PredictedSteps = None,
    target: Annotated[
        Target | None, typer.Option(help="Kind of device whose kernels run; the profile's unless given.")
    ] = None,
    numbers: Annotated[
        bool, typer.Option("--numbers", help="Also compare the chain's losses and gradients with the model's own.")
    ] = False,
    alloc_conf: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="As PYTORCH_CUDA_ALLOC_CONF, which counts unless given; for target cuda."),
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Certify PLAN: exact peaks by a dry run.

    The real runtime runs over fake tensors, so this needs neither the hardware nor the data. Exits with 4 if the
    tensors of a device would pass its memory. For target cuda it also tells what torch's caching allocator would
    allocate and reserve, and what the process would take besides. With --numbers two real microbatches go through the
    model itself and through its chain, on the CPU; exits with 2 if their losses, gradients or buffers differ.
    """
    from pipefit.cli.model import resolve
    from pipefit.cli.output import check_output, deliver
    from pipefit.cli.progress import progress
    from pipefit.files import load
    from pipefit.plans import Plan

    check_output(output)
    document = load(plan, Plan)
    with progress("reading the model"):
        task = resolve(model, settings, document.training.precision)
        from pipefit.runtime import certify, certify_numbers
    from pipefit.tables import write

    if numbers:
        with progress("comparing numbers"):
            found = certify_numbers(task, document)
        found.check()
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            write([str(found)])
    settings_of_allocator = _allocator(alloc_conf, target or document.profile.assumptions.target)
    with progress("dry run"):
        trace = certify(task, document, steps=steps, target=target, allocator=settings_of_allocator)
    deliver(trace, output=output, as_json=as_json)
    _check_budgets(trace)


def _allocator(written: str | None, target: Target) -> AllocatorSettings | None:
    """The settings of the caching allocator, which only the target `cuda` has: those written, or the environment's.

    Raises:
        UsageError: they are not simulated; or settings are written for a target without the allocator.
    """
    from pipefit.allocator import ENVIRONMENT, AllocatorSettings

    if target != "cuda":
        if written is not None:
            raise UsageError(f"--alloc-conf is for target cuda: target {target} has no caching allocator")
        return None
    set_by = next((name for name in ENVIRONMENT if name in os.environ), None)
    if written is not None or set_by is None:
        return AllocatorSettings.parse(written or "")
    try:
        return AllocatorSettings.parse(os.environ[set_by])
    except UsageError as error:
        raise UsageError(f"{set_by}: {error}; --alloc-conf gives other settings") from None


def _check_budgets(trace: Trace) -> None:
    """A dry run enforces no budget; a certificate has to.

    Raises:
        OutOfMemory: the fullest device would pass its memory; says where and by how much.
    """
    from pipefit.errors import OutOfMemory
    from pipefit.units import format_bytes

    over = [device for device in trace.devices if device.peak_bytes > device.budget_bytes]
    if not over:
        return
    worst = max(over, key=lambda device: device.peak_bytes - device.budget_bytes)
    raise OutOfMemory(
        f"device {worst.device} needs {format_bytes(worst.peak_bytes)} at {worst.peak.action if worst.peak else '-'}, "
        f"{format_bytes(worst.peak_bytes - worst.budget_bytes)} over its {format_bytes(worst.budget_bytes)} "
        f"({len(over)} of {len(trace.devices)} devices are over): plan again for this cluster, in smaller microbatches "
        f"or over more devices"
    )
