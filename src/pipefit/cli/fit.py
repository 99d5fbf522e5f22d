"""`pipefit fit`: whether a model fits, and the largest that does."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipefit.cli.model import built_with, parse_settings, resolve
from pipefit.cli.options import (
    SCHEDULE_HELP,
    Cast,
    ClusterName,
    Json,
    Model,
    Output,
    Precision,
    Recompute,
    Settings,
    Target,
    Threads,
    count_option,
)
from pipefit.cli.output import check_output, on_stderr, print_and_save, told, with_found
from pipefit.cli.progress import progress
from pipefit.errors import InfeasibleError, UsageError
from pipefit.tables import write
from pipefit.texts import printable, shortened
from pipefit.units import parse_bytes

if TYPE_CHECKING:
    from pipefit.largest.growth import Demand, Growth
    from pipefit.schema.cluster import Cluster
    from pipefit.schema.fit import Fit

_NO_SETTINGS = ("batch", "devices", "memory")  # what can grow in addition to settings
_LARGEST, _MOST_MEMORY = 1 << 20, 1 << 50  # defaults of --to
EXAMPLE = "pipefit fit hf:gpt2 --cluster 4x-titan-rtx"


def command(
    model: Model,
    cluster: ClusterName,
    grow: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Find the largest that fits: a setting of the model, such as layers, or batch; or the "
            "least devices or memory.",
        ),
    ] = None,
    settings: Settings = [],  # noqa: B006 - typer reads it and makes a list of its own
    start: Annotated[
        str | None, typer.Option("--from", metavar="N", help="Smallest value to try. Default: --step.")
    ] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="N", help="Largest value to try.")] = None,
    step: Annotated[
        str | None,
        typer.Option(metavar="N", help="Try every Nth value after --from. Default: 1; 1MiB for memory."),
    ] = None,
    batch_size: Annotated[
        int | None,
        count_option(does="With --grow: samples in a step. Default: 4 per device."),
    ] = None,
    microbatch_size: Annotated[
        int | None,
        count_option(
            "--microbatch-size",
            "-b",
            does="With --grow: samples in a microbatch. Default: chosen by joint and exact.",
        ),
    ] = None,
    microbatches: Annotated[
        int | None, count_option(does="Microbatches in a step. Default: 4 per device.")
    ] = None,
    schedule: Annotated[str, typer.Option(metavar="NAME", help=SCHEDULE_HELP)] = "1f1b",
    recompute: Recompute = "never",
    data: Annotated[
        int | None,
        count_option(does="With --grow: replicas of every stage. Default: chosen by joint and exact."),
    ] = None,
    tensor: Annotated[
        int | None,
        count_option(does="With --grow: tensor-parallel ranks. Default: chosen by joint and exact."),
    ] = None,
    planner: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Planner for --grow; pipefit plan --help lists them. Default: joint."
        ),
    ] = None,
    target: Annotated[
        Target | None,
        typer.Option(help="Model the kernels of cpu or cuda. Default: the cluster's devices."),
    ] = None,
    precision: Cast = None,
    threads: Threads = 1,
    certify: Annotated[
        bool,
        typer.Option(
            "--certify/--no-certify",
            help="Verify the answer by a dry run, and the next value too unless it is far over a budget.",
        ),
    ] = True,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save a page with peaks by size, and the plan, as HTML."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With another trainer's file as MODEL: the checkpoint to train, by name or folder. Default: "
            "the file's own.",
        ),
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Does MODEL fit, and the largest that does.

    Prints one screen: on 1, 2, 4 and 8 devices, kept, recomputed and offloaded, in every precision, with the
    limit and the way out. MODEL may be the configuration file of another trainer (axolotl, LLaMA-Factory,
    TRL, TrainingArguments, torchtitan, NeMo Automodel, Megatron-LM): then it says whether that training fits,
    and which lines to change if it does not. With --grow, finds the largest value of one size that fits, or
    the fewest devices or least memory; -o saves the plan of the answer. Exits with 3 if no plan is found.
    """
    from pipefit.schema.json_io import load_cluster, save, save_text

    check_output(output, cluster)
    check_output(plot, cluster, output)
    if grow is not None or not Path(model).is_file():
        _only_with({"--base": base}, "needs another trainer's file as MODEL, without --grow")
    if grow is None:
        given = {
            "--from": start, "--to": end, "--step": step, "--batch-size": batch_size,
            "--microbatch-size": microbatch_size, "--data": data, "--tensor": tensor, "--planner": planner,
            "--plot": plot, "--output": output, "--recompute": None if recompute == "never" else recompute,
        }  # fmt: skip
        _only_with(given, "needs --grow and the setting to grow, such as --grow layers")
        if ":" not in model and Path(model).is_file():
            said = {"--set": settings or None, "--precision": precision, "--microbatches": microbatches}
            _only_with(
                {**said, "--target": target}, "has no effect on another trainer's file: change the file"
            )
            _recipe(model, base, load_cluster(cluster), as_json=as_json, threads=threads)
            return
        _overview(
            model, settings, precision, load_cluster(cluster), named=cluster, as_json=as_json,
            microbatches=microbatches, schedule=schedule, target=target, threads=threads,
        )  # fmt: skip
        return
    if grow == "batch" and (microbatch_size or batch_size):
        option = "--microbatch-size" if microbatch_size else "--batch-size"
        raise UsageError(
            f"{option} is the value that --grow batch searches for: use --from for the smallest to try"
        )
    values, devices = _values(grow, start, end, step), load_cluster(cluster)
    with progress("searching") as report:
        from pipefit.largest.growth import Demand
        from pipefit.largest.search import find
        from pipefit.planner import PlanOptions

        demand = Demand(
            cluster=devices,
            options=PlanOptions(
                batch_size=batch_size,
                microbatch_size=microbatch_size,
                microbatches=microbatches,
                schedule=schedule,
                recompute=recompute,
                data=data,
                tensor=tensor,
                planner=planner,
            ),
            target=target or devices.target,
            threads=threads,
        )
        report(0, 0, "tracing the model")
        result = find(
            _growth(model, settings, precision, grow, demand, values), certify=certify, progress=report
        )
    grown = [] if grow in _NO_SETTINGS else [f"{grow}={result.best.value}"]

    def save_both() -> None:
        if output is not None:
            save(result.best.plan, output)
        if plot is not None:
            from pipefit.report.page import fit_page

            save_text(fit_page(result), plot)

    print_and_save(
        lambda: _print(result, built_with(model, [*settings, *grown]), as_json=as_json),
        save_both,
        found=(lambda: {"result": result.as_json()}) if as_json else None,
    )
    for path in (output, plot):
        if path is not None and not as_json:
            on_stderr(f"saved to {path}")


def _only_with(given: Mapping[str, object], need: str) -> None:
    """Refuse given options; `need` says why."""
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option} {need}")


def _overview(
    model: str,
    settings: list[str],
    precision: Precision | None,
    cluster: Cluster,
    *,
    named: str,
    as_json: bool,
    **asked: Any,
) -> None:
    """Print the overview on one screen, with any result.

    Raises:
        InfeasibleError: no plan was found that fits one sample on the cluster.
    """
    from pipefit.report.fit import describe_overview
    from pipefit.schema.fit import refusal

    with progress("looking") as report:
        task = resolve(model, settings, precision)
        from pipefit.largest.overview import fit as look

        result = look(task, cluster, progress=report, **asked)
    words = [model, *(word for setting in settings for word in ("--set", setting)), "--cluster", named]
    words += ["--precision", precision] if precision else []
    if not as_json:
        write(told(describe_overview(result, shlex.join(words)), built_with(model, settings)), width=80)
    if not result.fits:
        nearest = f"with all activations kept, {result.here.one.miss}"
        with with_found(lambda: {"result": result.as_json()}):
            raise InfeasibleError(refusal(f"one sample on {cluster.name}", result.impossible, nearest))
    if as_json:
        print(json.dumps(result.as_json()))


def _recipe(file: str, base: str | None, cluster: Cluster, *, as_json: bool, threads: int) -> None:
    """Print what another trainer's configuration file needs.

    Raises:
        InfeasibleError: it does not fit, and no change of the file that was tried does.
    """
    with progress("reading") as report:
        from pipefit.recipes import answer, describe, read

        result = answer(read(file, base), cluster, threads=threads, progress=report)
    if not as_json:
        write(describe(result, printable(file)), width=80)
    if not (result.written.fits or result.fitting):
        with with_found(lambda: {"result": result.as_json()}):
            raise InfeasibleError(
                f"{printable(file)} does not fit on {cluster.name} as written, nor with any change tried"
            )
    if as_json:
        print(json.dumps(result.as_json()))


def _growth(
    model: str, settings: list[str], precision: Precision | None, grow: str, demand: Demand, values: range
) -> Growth:
    """Return the growth that `--grow` names."""
    from pipefit.largest import growth

    match grow:
        case "batch":
            return growth.batch(resolve(model, settings, precision), demand, values)
        case "devices":
            return growth.devices(resolve(model, settings, precision), demand, values)
        case "memory":
            return growth.memory(resolve(model, settings, precision), demand, values)
    if not grow.isidentifier():
        raise UsageError(
            f"--grow {grow} is not the name of a setting: write a setting that --set accepts, such as layers"
        )
    if grow in parse_settings(settings):
        raise UsageError(
            f"--set {grow} and --grow {grow} exclude each other: use --from for the smallest to try"
        )
    return growth.setting(
        grow, lambda value: resolve(model, [*settings, f"{grow}={value}"], precision), demand, values
    )


def _values(grow: str, start: str | None, end: str | None, step: str | None) -> range:
    """Return the values to try: `--from`, and every `--step` up to `--to`."""
    every = _size(grow, "--step", step, (1 << 20) if grow == "memory" else 1)
    first = _size(grow, "--from", start, every)
    last = _size(grow, "--to", end, max(first, _MOST_MEMORY if grow == "memory" else _LARGEST))
    if last < first:
        raise UsageError(f"--from {first} to --to {last} is empty: --to must be {first} or more")
    return range(first, last + 1, every)


def _size(grow: str, option: str, text: str | None, default: int) -> int:

    if text is None:
        return default
    if grow == "memory":
        return parse_bytes(text)
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) < 1 << 50):
        raise UsageError(f"{option} {shortened(text)} is not a size: write a whole number, 1 or more")
    return int(text)


def _print(fit: Fit, built: str, *, as_json: bool) -> None:
    from pipefit.report.fit import describe_fit

    if as_json:
        print(json.dumps(fit.as_json()))
    else:
        write(told(describe_fit(fit), built))
