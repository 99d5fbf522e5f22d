"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from pipefit.errors import UsageError
from pipefit.schema.trace import MOST_STEPS

if TYPE_CHECKING:
    from pipefit.memory import AllocatorSettings


def count_option(*names: str, does: str) -> Any:
    """Return an option for a whole number of 1 or more, for an annotation."""
    return typer.Option(*names, metavar="N", min=1, help=does)


Target = Literal["cpu", "cuda"]
Precision = Literal[
    "float32", "bfloat16", "float16", "float64",
    "mixed-bfloat16", "mixed-float16", "master-bfloat16", "master-float16",
]  # fmt: skip
PRECISIONS = ", ".join(get_args(Precision))
Cast = Annotated[
    Precision | None,
    typer.Option(metavar="DTYPE", help=f"Cast the model and its data: {PRECISIONS}. Default: unchanged."),
]
Threads = Annotated[int, count_option(does="CPU threads of a worker.")]
Sharding = Literal["none", "optimizer", "gradients", "parameters"]
Recomputed = Literal["never", "always", "stages", "except_last", "except_one"]
Recompute = Annotated[
    Recomputed,
    typer.Option(
        help="Recompute activations in the backward. always: each block separately; stages: whole "
        "stages; except_last, except_one: whole stages, for all microbatches but one."
    ),
]

Versions = Annotated[
    Literal["weights", "everything"],
    typer.Option(help="What each version of the weights contains, under pipedream and pipedream-2bw."),
]
SCHEDULE_HELP = "1f1b, eager-1f1b, gpipe, torchgpipe, or the asynchronous pipedream and pipedream-2bw."

Reserve = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE|PERCENT",
        help="Memory of each device to keep free for non-tensor memory: CUDA context, NCCL, "
        "fragmentation. Default: by the kind of GPU.",
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print only the result on stdout, as JSON.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", metavar="FILE", help="Save the result. The file appears when the command succeeds."
    ),
]
Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="zoo:NAME, hf:NAME, or package.module:factory that returns a Task."),
]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        metavar="NAME|FILE",
        help="dgx1-v100, 4x-rtx-3090, 16xdgx-a100@25GB/s, emulated:4x256MiB, .toml or .json; "
        "see pipefit clusters.",
    ),
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Setting of the model, such as layers=12; repeatable. pipefit models MODEL lists them.",
    ),
]
Engine = Annotated[
    Literal["pipefit", "torch"],
    typer.Option(help="Runtime that trains the plan: pipefit's own, or torch.distributed.pipelining."),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan, as pipefit plan saves it.")]
AfterDeath = Annotated[
    Path | None,
    typer.Option(
        "--post-mortem",
        metavar="FILE",
        help="Save the post-mortem here if a device runs out of memory. Default: next to PLAN.",
    ),
]
PredictedSteps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        metavar="N",
        min=1,
        max=MOST_STEPS,
        help="Training steps. Default: until steps repeat, usually two.",
    ),
]


# ---- Settings of CUDA's caching allocator, from the command line or the environment


def allocator(written: str | None, target: Target) -> AllocatorSettings | None:
    """Return the settings of the caching allocator from `written`, or else from the environment.

    Returns None unless target is `cuda`.

    Raises:
        UsageError: the settings are not simulated, or given for a target without the allocator.
    """
    from pipefit.memory import ENVIRONMENT, AllocatorSettings

    if target != "cuda":
        if written is not None:
            raise UsageError(
                f"--alloc-conf is for target cuda: target {target} does not have a caching allocator"
            )
        return None
    set_by = next((name for name in ENVIRONMENT if name in os.environ), None)
    if written is not None or set_by is None:
        return AllocatorSettings.parse(written or "")
    try:
        return AllocatorSettings.parse(os.environ[set_by])
    except UsageError as error:
        raise UsageError(f"{set_by}: {error}; --alloc-conf gives other settings") from None
