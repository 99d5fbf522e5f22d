"""`pipefit plan`: which layers go where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from pipefit.cli.options import SCHEDULE_HELP, Json, Output, Recompute, Versions


def command(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="What pipefit profile saved.")],
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", metavar="NAME|FILE", help="A preset, emulated:4x256MiB, .toml or .json.")
    ],
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Samples in one optimizer step.")
    ] = None,
    microbatches: Annotated[int | None, typer.Option("--microbatches", min=1, help="Equal parts of the batch.")] = None,
    schedule: Annotated[str, typer.Option(help=SCHEDULE_HELP)] = "1f1b",
    objective: Annotated[
        Literal["throughput", "peak"],
        typer.Option(help="The fastest step that fits, or the lowest peak of all splits."),
    ] = "throughput",
    planner: Annotated[
        str | None,
        typer.Option(
            help="joint or exact, which belong to the objectives, unless given: mpress, exhaustive, bisection, "
            "bayesian, additive, mcap_bf, mcap_bo, uniform, parameters, time or first_last."
        ),
    ] = None,
    recompute: Recompute = "never",
    clip_norm: Annotated[
        float | None, typer.Option("--clip-norm", metavar="NORM", help="Largest norm of all gradients together.")
    ] = None,
    versions: Versions = "weights",
    stages: Annotated[
        int | None, typer.Option(min=1, help="Pipeline stages; one for each device unless given.")
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Plan how a model is split over a cluster, and what is recomputed or moved so that it fits.

    By default, the fastest plan that fits. The plan says which device limits it.
    """
    from pipefit.cli.output import check_output, deliver
    from pipefit.cli.progress import progress
    from pipefit.files import load, load_cluster
    from pipefit.profiles import ModelProfile

    check_output(output)
    model, devices = load(profile, ModelProfile), load_cluster(cluster)
    from pipefit.planner import plan

    with progress("planning"):
        made = plan(
            model,
            devices,
            batch_size=batch_size,
            microbatches=microbatches,
            schedule=schedule,
            recompute=recompute,
            clip_norm=clip_norm,
            versions=versions,
            objective=objective,
            planner=planner,
            stages=stages,
        )
    deliver(made, output=output, as_json=as_json)
    if devices.backend == "cuda" and model.assumptions.target != "cuda":
        print(
            "pipefit: this profile follows the kernels of the CPU, which keep more for the backward pass than those of "
            f"{devices.name}: profile again with --target cuda",
            file=sys.stderr,
        )
