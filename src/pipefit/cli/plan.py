"""`pipefit plan`: the layers of each device, recomputation and offloading."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipefit.cli.model import built_with, resolve
from pipefit.cli.options import (
    PRECISIONS,
    SCHEDULE_HELP,
    ClusterName,
    Engine,
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
    count_option,
)
from pipefit.cli.output import check_output, deliver, on_stderr, told
from pipefit.cli.progress import progress
from pipefit.errors import FileError, UsageError
from pipefit.tables import Block
from pipefit.texts import shortened
from pipefit.units import parse_part

if TYPE_CHECKING:
    from pipefit.schema.cluster import Cluster
    from pipefit.schema.profile import ModelProfile

EXAMPLE = "pipefit plan hf:gpt2 --cluster 4x-titan-rtx --batch-size 64 -o plan.json"


def command(
    profile: Annotated[
        str,
        typer.Argument(
            metavar="PROFILE|MODEL",
            help="A saved profile; or a model to profile first: zoo:NAME, hf:NAME or package.module:factory.",
        ),
    ],
    cluster: ClusterName,
    batch_size: Annotated[
        int | None,
        count_option(
            "--batch-size", does="Samples in one optimizer step. Default: microbatches x microbatch size."
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        count_option(
            "--microbatches",
            does="Equal parts of the batch. Default: chosen; without a batch size, 4 per device.",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"Pipeline schedule: {SCHEDULE_HELP} Default: 1f1b or eager-1f1b, chosen."
        ),
    ] = None,
    objective: Annotated[
        Literal["throughput", "peak"],
        typer.Option(help="Find the fastest step that fits, or the lowest peak."),
    ] = "throughput",
    planner: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Planner: joint, exact, lean, mpress, capture, alpa, exhaustive, bisection, bayesian, "
            "additive, mcap_bf, mcap_bo, uniform, parameters, time or first_last. Default: joint for "
            "throughput, exact for peak.",
        ),
    ] = None,
    recompute: Annotated[
        Recomputed,
        typer.Option(
            help="Recompute activations in the backward. always: each block separately; stages: whole "
            "stages; except_last, except_one: whole stages, for all microbatches but one; never: "
            "joint and mpress still recompute if the fastest plan that fits does."
        ),
    ] = "never",
    clip_norm: Annotated[
        float | None, typer.Option("--clip-norm", metavar="NORM", help="Clip gradients to this global norm.")
    ] = None,
    versions: Versions = "weights",
    stages: Annotated[
        int | None,
        count_option(
            does="Number of pipeline stages. Default: chosen by joint; one per device under other planners."
        ),
    ] = None,
    data: Annotated[
        int | None,
        count_option(does="Data-parallel replicas of every stage. Default: chosen by joint and exact."),
    ] = None,
    tensor: Annotated[
        int | None,
        count_option(
            does="Tensor-parallel ranks of every replica. Default: 1 for a MODEL, or more if nothing else "
            "fits; for a PROFILE, joint and exact choose among its numbers of ranks."
        ),
    ] = None,
    sequences: Annotated[
        bool | None,
        typer.Option(
            "--sequences/--no-sequences",
            help="Sequence parallelism: tensor-parallel ranks also shard activations between blocks' "
            "layers along positions. Default: chosen if a PROFILE has both; off for a MODEL.",
        ),
    ] = None,
    shard: Annotated[
        Sharding | None,
        typer.Option(
            help="State to shard over replicas: ZeRO 1, 2 or 3. Default: chosen by joint and exact."
        ),
    ] = None,
    settings: Settings = [],  # noqa: B006 - typer reads it and makes a list of its own
    microbatch_size: Annotated[
        int | None,
        count_option(
            "--microbatch-size",
            "-b",
            does="Samples in one microbatch. Default: chosen by joint; 1 for a MODEL under other planners.",
        ),
    ] = None,
    target: Annotated[
        Target | None,
        typer.Option(help="For a MODEL: model the kernels of cpu or cuda. Default: the cluster's devices."),
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(metavar="DTYPE", help=f"For a MODEL: cast it and its data: {PRECISIONS}."),
    ] = None,
    reserve: Reserve = None,
    certify: Annotated[
        bool,
        typer.Option(
            "--certify/--no-certify",
            help="Verify the plan of a MODEL by a dry run, for GPUs with the memory that processes "
            "reserve, and plan again if it fails.",
        ),
    ] = True,
    engine: Engine = "pipefit",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Plan which layers go where, and what is recomputed.

    Finds the fastest plan that fits: splits the model over the devices of a cluster, recomputes and offloads
    what is necessary, and names the limiting device. For GPUs, the plan of a MODEL is verified against the
    memory of its processes, and planned again if it does not fit. The plan of a PROFILE only keeps the
    --reserve free. With --engine torch, the plan also fits on torch.distributed.pipelining, which holds more.
    """
    from pipefit.report.plan import describe_plan
    from pipefit.report.traces import describe_engine
    from pipefit.simulator import simulate

    check_output(output, profile, cluster)
    if not _is_model(profile) and (settings or target or precision):
        raise UsageError(f"{profile} is a file: --set, --target and --precision are for a MODEL to profile")
    devices = _cluster(cluster, reserve)
    with progress("planning") as report:
        from pipefit.largest.task_plans import plan

        made = plan(
            resolve(profile, settings, precision) if _is_model(profile) else _loaded(profile),
            devices,
            target=target,
            certify=certify,
            allocator=allocator(None, devices.target) if certify and _is_model(profile) else None,
            progress=report,
            engine=engine,
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

    def describe() -> list[Block]:
        more = describe_engine(made, simulate(made, engine="torch")) if engine == "torch" else ()
        return [*told(describe_plan(made), built), *more]

    deliver(made, output=output, as_json=as_json, describe=describe)
    if devices.backend == "cuda" and made.profile.assumptions.target != "cuda":
        on_stderr(
            "pipefit: this profile models the kernels of the CPU, which save more for the backward than "
            f"those of {devices.name}: profile again with --target cuda"
        )


def _is_model(text: str) -> bool:
    """Return whether the argument names a model, such as hf:gpt2, and not a file."""
    return ":" in text and not os.path.exists(text)


def _cluster(name: str, reserve: str | None) -> Cluster:
    """Return the cluster, with the given reserve on all of its devices."""
    from pipefit.schema.json_io import load_cluster

    result = load_cluster(name)
    if reserve is None:
        return result
    return result.reserving([parse_part(reserve, device.memory_bytes) for device in result.devices])


def _loaded(path: str) -> ModelProfile:
    """Load the profile in a file.

    Raises:
        FileError: there is none; explains how to name a model, unless the file has the name of a document.
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
                f"{shortened(path)} is a script: name the function in it that returns a pipefit.Task, such "
                f"as {shortened(Path(path).stem)}:make_task"
            ) from None
        name = shortened(path.rpartition("/")[2])
        raise FileError(
            f"{error}; or name a model: zoo:NAME, package.module:factory, or an architecture of Hugging "
            f"Face, such as hf:{name}"
        ) from None
