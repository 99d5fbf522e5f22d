"""`pipefit plan`: which layers go where, and what is recomputed or moved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipefit.cli.options import (
    PRECISIONS,
    SCHEDULE_HELP,
    ClusterName,
    Json,
    Output,
    Precision,
    Recomputed,
    Reserve,
    Settings,
    Sharding,
    Target,
    Versions,
    allocator,
)
from pipefit.cli.output import on_stderr
from pipefit.errors import FileError, UsageError
from pipefit.texts import shortened

if TYPE_CHECKING:
    from pipefit.capture import Task
    from pipefit.schema.cluster import Cluster
    from pipefit.schema.profile import ModelProfile

EXAMPLE = "pipefit plan hf:gpt2 --cluster 4x-titan-rtx --batch-size 64 -o plan.json"


def command(
    profile: Annotated[
        str,
        typer.Argument(
            metavar="PROFILE|MODEL",
            help="What pipefit profile saved; or zoo:NAME, hf:NAME or package.module:factory, to be profiled first.",
        ),
    ],
    cluster: ClusterName,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            metavar="N",
            min=1,
            help="Samples in one optimizer step; unless given, as many as the microbatches hold.",
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            "--microbatches",
            metavar="N",
            min=1,
            help="Equal parts of the batch; chosen, or without a batch size four for each device.",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"1f1b or eager-1f1b are chosen from unless given. {SCHEDULE_HELP}"),
    ] = None,
    objective: Annotated[
        Literal["throughput", "peak"],
        typer.Option(help="The fastest step that fits, or the lowest peak of all splits."),
    ] = "throughput",
    planner: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="joint or exact, which belong to the objectives, unless given: lean, mpress, capture, alpa, "
            "exhaustive, bisection, bayesian, additive, mcap_bf, mcap_bo, uniform, parameters, time or first_last.",
        ),
    ] = None,
    recompute: Annotated[
        Recomputed,
        typer.Option(
            help="Recompute in the backward: always = every block by itself; stages = every stage as a whole; "
            "except_last, except_one = the same for all but one microbatch. With never, joint and mpress choose what "
            "is recomputed."
        ),
    ] = "never",
    clip_norm: Annotated[
        float | None, typer.Option("--clip-norm", metavar="NORM", help="Largest norm of all gradients together.")
    ] = None,
    versions: Versions = "weights",
    stages: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Pipeline stages, on as many devices; chosen by joint, one for each device under other planners.",
        ),
    ] = None,
    data: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Replicas of every stage, which divide each microbatch; chosen by joint and exact."
        ),
    ] = None,
    tensor: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Devices that divide the layers of every replica of a stage; chosen likewise."
        ),
    ] = None,
    sequences: Annotated[
        bool | None,
        typer.Option(
            "--sequences/--no-sequences",
            help="Whether these also divide what is between attention and MLP, along positions; chosen where a PROFILE "
            "has both, not unless given for a MODEL.",
        ),
    ] = None,
    shard: Annotated[
        Sharding | None,
        typer.Option(help="What replicas of a stage divide between them, as ZeRO does; chosen by joint and exact."),
    ] = None,
    settings: Settings = [],  # noqa: B006 - typer reads it and makes a list of its own
    microbatch_size: Annotated[
        int | None,
        typer.Option(
            "--microbatch-size",
            "-b",
            metavar="N",
            min=1,
            help="Samples in one microbatch; chosen by joint, 1 for a MODEL under other planners.",
        ),
    ] = None,
    target: Annotated[
        Target | None, typer.Option(help="Of a MODEL: whose kernels will run; the cluster's unless given.")
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(metavar="DTYPE", help=f"Of a MODEL: cast it and its data to one of these: {PRECISIONS}."),
    ] = None,
    reserve: Reserve = None,
    certify: Annotated[
        bool,
        typer.Option(
            "--certify/--no-certify",
            help="Hold the plan of a MODEL against a dry run, for GPUs against what processes reserve, and plan again "
            "where it is refused.",
        ),
    ] = True,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Plan which layers go where, and what is recomputed.

    By default, the fastest plan that fits: it splits the model over the devices of a cluster, and says what is
    recomputed or moved so that it fits, and which device limits it. For GPUs a plan of a MODEL fits if the processes
    do; where a first plan's do not, it is planned again. A plan of a PROFILE only leaves the --reserve.
    """
    from pipefit.cli.model import built_with
    from pipefit.cli.output import check_output, deliver, told
    from pipefit.cli.progress import progress
    from pipefit.report.plan import describe_plan

    check_output(output, profile, cluster)
    if not _is_model(profile) and (settings or target or precision):
        raise UsageError(f"{profile} is a file: --set, --target and --precision are for a MODEL to profile")
    devices = _cluster(cluster, reserve)
    with progress("planning") as report:
        from pipefit.largest.task_plans import plan

        made = plan(
            _modelled(profile, settings, precision) if _is_model(profile) else _loaded(profile),
            devices,
            target=target,
            certify=certify,
            allocator=allocator(None, devices.target) if certify and _is_model(profile) else None,
            progress=report,
            batch_size=batch_size,
            microbatches=microbatches,
            microbatch_size=microbatch_size,
            schedule=schedule,
            recompute=recompute,
            clip_norm=clip_norm,
            versions=versions,
            objective=objective,
            planner=planner,
            stages=stages,
            data=data,
            tensor=tensor,
            sequences=sequences,
            shard=shard,
        )
    built = built_with(profile, settings) if _is_model(profile) else ""
    deliver(made, output=output, as_json=as_json, describe=lambda: told(describe_plan(made), built))
    if devices.backend == "cuda" and made.profile.assumptions.target != "cuda":
        on_stderr(
            "pipefit: this profile follows the kernels of the CPU, which keep more for the backward pass than those of "
            f"{devices.name}: profile again with --target cuda"
        )


def _is_model(text: str) -> bool:
    """Whether the argument names a model, such as hf:gpt2, and not a file."""
    return ":" in text and not os.path.exists(text)


def _cluster(name: str, reserve: str | None) -> Cluster:
    """The cluster, with the reserve that is written on all of its devices."""
    from pipefit.schema.json_io import load_cluster
    from pipefit.units import parse_part

    found = load_cluster(name)
    if reserve is None:
        return found
    return found.reserving([parse_part(reserve, device.memory_bytes) for device in found.devices])


def _loaded(path: str) -> ModelProfile:
    """The profile in a file.

    Raises:
        FileError: there is none; says how a model is named, unless the file has the name of a document.
    """
    from pipefit.schema.json_io import load
    from pipefit.schema.profile import ModelProfile

    try:
        return load(Path(path), ModelProfile)
    except FileError as error:
        if Path(path).suffix == ".json":
            raise
        if Path(path).suffix == ".py":
            raise FileError(
                f"{shortened(path)} is a script: name the function in it that returns a pipefit.Task, as in "
                f"{shortened(Path(path).stem)}:make_task"
            ) from None
        name = shortened(path.rpartition("/")[2])
        raise FileError(
            f"{error}; or name a model: zoo:NAME, package.module:factory, or an architecture of Hugging Face's, such "
            f"as hf:{name}"
        ) from None


def _modelled(model: str, settings: list[str], precision: Precision | None) -> Task:
    from pipefit.cli.model import resolve

    return resolve(model, settings, precision)
