"""`pipefit certify`: the dry run."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

from pipefit.cli.model import check_order, precision_of, resolve
from pipefit.cli.options import (
    AfterDeath,
    Engine,
    Json,
    Model,
    Output,
    PlanFile,
    PredictedSteps,
    Settings,
    Target,
    allocator,
)
from pipefit.cli.output import (
    check_output,
    deliver,
    leaving_post_mortem,
    load_runnable,
    plain_data,
    with_found,
)
from pipefit.cli.progress import progress
from pipefit.errors import OutOfMemory, UsageError
from pipefit.tables import write
from pipefit.texts import counted

if TYPE_CHECKING:
    from pipefit.schema.plan import Plan
    from pipefit.schema.trace import Trace

EXAMPLE = "pipefit certify plan.json hf:gpt2"


def command(
    plan: PlanFile,
    model: Model,
    settings: Settings = [],  # noqa: B006 - typer reads it and makes a list of its own
    steps: PredictedSteps = None,
    target: Annotated[
        Target | None, typer.Option(help="Model the kernels of this kind of device. Default: the profile's.")
    ] = None,
    engine: Engine = "pipefit",
    numbers: Annotated[
        bool,
        typer.Option(
            "--numbers", help="Also compare the chain, and two steps of the plan, with plain training."
        ),
    ] = False,
    alloc_conf: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Allocator settings for target cuda. Default: PYTORCH_CUDA_ALLOC_CONF."
        ),
    ] = None,
    post_mortem: AfterDeath = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Certify PLAN: exact peaks by a dry run.

    The real runtime executes the plan over fake tensors, without the hardware or the data. Exits with 4 if a
    device would run out of memory. For target cuda, also prints what torch's caching allocator would allocate
    and reserve, what planned addresses would need, and the other memory of the process. With --numbers, also
    compares the model with its chain, and two steps of the plan with plain training, on the CPU; exits with 2
    if losses, gradients, buffers, parameters or optimizer state differ. With --engine torch, the code of
    torch.distributed.pipelining runs over fake tensors instead, one device at a time, for two steps.
    """
    from pipefit.schema.json_io import save

    for name, value in (("--steps", steps), ("--alloc-conf", alloc_conf)):
        if engine == "torch" and value is not None:
            raise UsageError(
                f"{name} is for pipefit's own engine: --engine torch runs two steps without an allocator"
            )
    check_output(output, plan, post_mortem)
    check_output(post_mortem, plan)
    check_order(plan, model)
    document = load_runnable(plan)
    with progress("reading the model"):
        task = resolve(model, settings, precision_of(document))
        from pipefit.runtime import certify, certify_numbers

    if numbers:
        with progress("comparing numbers"):
            result = certify_numbers(task, document)
        result.check()
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            write([str(result)])
    if engine == "torch":
        from pipefit.torch_engine import certify_pipeline

        with progress("dry run of torch's engine"):
            trace = certify_pipeline(task, document, target=target)
    else:
        settings_of_allocator = allocator(alloc_conf, target or document.profile.assumptions.target)
        with progress("dry run"):
            trace = certify(task, document, steps=steps, target=target, allocator=settings_of_allocator)
    error = _over(document, trace)
    if error is None or not as_json:
        deliver(trace, output=output, as_json=as_json)
    if error is not None:
        with with_found(lambda: plain_data(trace)), leaving_post_mortem(plan, post_mortem):
            if as_json and output is not None:
                save(trace, output)
            raise error


def _over(plan: Plan, trace: Trace) -> OutOfMemory | None:
    """Return an error if a device's tensors or a GPU's process exceed its memory.

    A dry run itself does not enforce budgets.
    """
    from pipefit.schema.post_mortem import of_dry_run

    over = [device for device in trace.devices if device.lack_bytes]
    if not over:
        return None
    worst = max(over, key=lambda device: device.lack_bytes)
    how_many = f"{len(over)} of {counted(len(trace.devices), 'device')} over"
    error = OutOfMemory(f"{worst.shortage} ({how_many}): {worst.remedy}")
    error.post_mortem = of_dry_run(plan, trace)
    return error
