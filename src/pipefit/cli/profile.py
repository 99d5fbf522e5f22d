"""`pipefit profile`: what every layer of a model costs."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from pipefit.cli.options import Json, Model, Output, Precision, Settings, Target


def command(
    model: Model,
    microbatch_size: Annotated[int, typer.Option("--microbatch-size", "-b", min=1, help="Samples in one microbatch.")],
    settings: Settings = [],  # noqa: B006 - typer reads it and makes a list of its own
    device: Annotated[
        Literal["fake", "cpu", "cuda"],
        typer.Option(help="Where to profile; fake needs no memory, the others measure time too."),
    ] = "fake",
    target: Annotated[Target, typer.Option(help="Whose kernels to follow in what autograd saves.")] = "cpu",
    precision: Annotated[
        Precision | None, typer.Option(help="Cast the model and its data to this; as they are unless given.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of a worker.")] = 1,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Profile MODEL: what every layer costs.

    Bytes, FLOPs and the tensors saved for backward, in seconds and without a GPU.
    """
    from pipefit.cli.model import resolve
    from pipefit.cli.output import check_output, deliver
    from pipefit.cli.progress import progress

    check_output(output)
    task = resolve(model, settings, precision)
    from pipefit.profiler import profile

    with progress("profiling") as report:
        found = profile(
            task,
            microbatch_size=microbatch_size,
            device=device,
            target=target,
            threads=threads,
            progress=report,
        )
    deliver(found, output=output, as_json=as_json)
