"""`pipefit profile`: the costs of a model's layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipefit.cli.model import resolve
from pipefit.cli.options import Cast, Json, Model, Output, Recompute, Settings, Target, Threads, count_option
from pipefit.cli.output import check_output, deliver
from pipefit.cli.progress import progress
from pipefit.errors import UsageError

if TYPE_CHECKING:
    from pipefit.capture import Task
    from pipefit.schema.cluster import Cluster
    from pipefit.schema.profile import ModelProfile
    from pipefit.schema.training import Training

Runs = Literal["incremental", "trimmed"]
EXAMPLE = "pipefit profile hf:gpt2 --microbatch-size 4 --target cuda -o profile.json"


def command(
    model: Model,
    microbatch_size: Annotated[
        list[int],
        count_option(
            "--microbatch-size",
            "-b",
            does="Samples in one microbatch; repeatable, for the local batches of replicas.",
        ),
    ],
    settings: Settings = [],  # noqa: B006 - typer reads it and makes a list of its own
    device: Annotated[
        Literal["fake", "cpu", "cuda"],
        typer.Option(
            help="Profile on fake tensors, which need no memory, or on a device, which also measures time."
        ),
    ] = "fake",
    target: Annotated[Target, typer.Option(help="Model the kernels of this kind of device.")] = "cpu",
    precision: Cast = None,
    threads: Threads = 1,
    tensor: Annotated[
        list[int],
        typer.Option(
            min=1, metavar="RANKS", help="Also profile layers for N tensor-parallel ranks; repeatable."
        ),
    ] = [],  # noqa: B006 - typer reads it and makes a list of its own
    sequences: Annotated[
        bool, typer.Option("--sequences", help="Also profile these ranks with sequence parallelism.")
    ] = False,
    runs: Annotated[
        Runs | None,
        typer.Option(
            help="Also train, for the additive planner: the whole model, or a few blocks at a time."
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", metavar="NAME|FILE", help="Devices of the runs.")
    ] = None,
    microbatches: Annotated[
        int | None,
        count_option("--microbatches", does="Microbatches in a step of the runs. Default: 4 per device."),
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="Schedule of the runs: gpipe or torchgpipe; 1f1b with one microbatch only.")
    ] = "gpipe",
    recompute: Recompute = "never",
    clip_norm: Annotated[
        float | None,
        typer.Option("--clip-norm", metavar="NORM", help="Clip gradients of the runs to this global norm."),
    ] = None,
    store: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Keep finished runs in this file, so that the same command can resume.",
        ),
    ] = Path("runs.json"),
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Profile MODEL: what every layer costs.

    Measures bytes, FLOPs and the tensors saved for backward, in seconds and without a GPU. With --runs, also
    trains on the devices of --cluster and measures every block there; such a profile is for this training
    alone.
    """
    from pipefit.schema.json_io import load_cluster

    check_output(output, cluster, store)
    if (runs is None) != (cluster is None):
        raise UsageError("--runs and --cluster go together: the runs train on the cluster's devices")
    devices = None if cluster is None else load_cluster(cluster)
    training = (
        None if devices is None else _training(devices, microbatch_size[0], microbatches, schedule, clip_norm)
    )
    if devices is not None and training is not None:
        from pipefit.profiler.training_runs.runs import check_devices, check_places

        if runs == "incremental":
            check_devices(len(devices.devices))
        check_places(devices, training, recompute)
    with progress("profiling") as report:
        task = resolve(model, settings, precision)
        from pipefit.profiler import profile

        result = profile(
            task,
            microbatch_size=microbatch_size,
            device=device,
            target=target,
            threads=threads,
            tensor=tensor,
            sequences=sequences,
            progress=report,
        )
    if runs is not None and devices is not None and training is not None:
        training = replace(training, precision=result.assumptions.precision)
        result = _with_runs(result, task, runs, devices, training, recompute=recompute, store=store)
    deliver(result, output=output, as_json=as_json)


def _training(
    cluster: Cluster, microbatch_size: int, microbatches: int | None, schedule: str, clip_norm: float | None
) -> Training:
    """Return the training of the runs, except for the model's precision."""
    from pipefit.schema.training import Training

    count = microbatches or 4 * len(cluster.devices)
    return Training(
        batch_size=count * microbatch_size, microbatches=count, schedule=schedule, clip_norm=clip_norm
    )


def _with_runs(
    found: ModelProfile,
    task: Task,
    runs: Runs,
    cluster: Cluster,
    training: Training,
    *,
    recompute: Recompute,
    store: Path,
) -> ModelProfile:
    """Return the profile with the measurements of training runs."""
    from pipefit.profiler.training_runs.profilers import profile_incrementally, profile_trimmed

    train = profile_incrementally if runs == "incremental" else profile_trimmed
    with progress("training") as report:
        costs = train(
            task,
            found,
            cluster,
            training,
            recompute=recompute,
            store=store,
            progress=lambda done, planned, stages: report(done, planned, " | ".join(map(_blocks, stages))),
        )
    return replace(found, additive=costs)


def _blocks(stage: tuple[int, int]) -> str:
    """Format the numbers of a stage's blocks, such as `3-5`."""
    start, stop = stage
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"
