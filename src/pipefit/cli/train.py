"""`pipefit train`: execution of a plan by one worker process per device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pipefit.cli.options import AfterDeath, Json, Model, Output, PlanFile, Settings
from pipefit.cli.output import on_stderr
from pipefit.errors import NotSaved, UsageError

if TYPE_CHECKING:
    from pipefit.runtime.callbacks import StepReport
    from pipefit.runtime.checkpoint.saver import SaveReport
    from pipefit.runtime.checkpoint.saving import Saving
    from pipefit.schema.plan import Plan
    from pipefit.schema.trace import Trace

EXAMPLE = "pipefit train plan.json hf:gpt2 --steps 100 --save runs --every 50"


def command(
    plan: PlanFile,
    model: Model,
    settings: Settings = [],  # noqa: B006 - typer reads it and makes a list of its own
    steps: Annotated[
        int,
        typer.Option(
            "--steps", metavar="N", min=1, help="Training steps in total, including those before --resume."
        ),
    ] = 10,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Seed of weights, data and dropout. Default: the checkpoint's, or 0."
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=1e6,
            metavar="SECONDS",
            help="Time limit of an action, and of a worker's start. Default: 60 s and 120 s.",
        ),
    ] = None,
    numbers: Annotated[
        bool,
        typer.Option(
            "--numbers/--no-numbers",
            help="First compare two steps of the plan with plain training, if cheap.",
        ),
    ] = True,
    share_device: Annotated[
        bool,
        typer.Option("--share-device", help="Run all GPUs of the plan on the first GPU of this machine."),
    ] = False,
    cap: Annotated[
        bool,
        typer.Option(
            "--cap/--no-cap", help="Limit GPUs to the memory of the plan's devices, like smaller GPUs."
        ),
    ] = True,
    metrics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a line of JSON after each step: loss, seconds, rates and peaks."
        ),
    ] = None,
    log_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Log every N steps. Default: every two seconds."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Save checkpoints in this folder, including one after the last step."
        ),
    ] = None,
    every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Save a checkpoint every N steps. Default: 100.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Keep the newest K checkpoints. Default: all.")
    ] = None,
    on_failed_save: Annotated[
        Literal["warn", "stop"] | None,
        typer.Option(help="What to do if a checkpoint cannot be written: stop or warn. Default: warn."),
    ] = None,
    save_in_foreground: Annotated[
        bool,
        typer.Option(
            "--save-in-foreground",
            help="Pause training while a checkpoint is written, which needs no host memory.",
        ),
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Resume from this checkpoint, or the newest complete one in this folder."
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Start from the weights in a safetensors file or a Hugging Face folder."
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Restart from the last checkpoint if a worker fails, at most N times."
        ),
    ] = 0,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            "-c",
            metavar="NAME|FILE",
            help="Cluster file, read before every start: plan again if its devices differ from PLAN's.",
        ),
    ] = None,
    on_nan: Annotated[
        Literal["warn", "stop"],
        typer.Option(help="What to do if the loss is infinite or nan: stop, or warn and continue."),
    ] = "warn",
    post_mortem: AfterDeath = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Train MODEL as PLAN says.

    Starts one worker process per device of the plan. The measurement is a trace, like a prediction. With
    --save and
    --resume, a training that ends early loses at most the steps since its last checkpoint, under this plan or
    another. With --restarts, it continues automatically.
    """
    from pipefit.cli.model import build, check_order, precision_of, resolve
    from pipefit.cli.output import (
        check_output,
        leaving_post_mortem,
        load_runnable,
        plain_data,
        print_and_save,
    )
    from pipefit.cli.progress import cleared_away, progress
    from pipefit.cli.train_log import StepLog, in_json, lines_of_metrics
    from pipefit.schema.json_io import save as save_document

    check_output(output, plan, cluster, weights)
    check_output(metrics, plan, cluster, weights, output)
    check_output(post_mortem, plan, cluster, weights, output, metrics)
    options = {
        "every": every,
        "keep": keep,
        "on_failure": on_failed_save,
        "in_foreground": save_in_foreground or None,
    }
    saving = _saving(save, {name: value for name, value in options.items() if value is not None}, restarts)
    check_order(plan, model)
    document = load_runnable(plan)
    precision = precision_of(document)
    with progress("reading the model"):
        resolve(model, settings, precision)  # reports mistakes in MODEL before any worker starts
        from pipefit.runtime import train

    told = _CheckpointMessages(saving, resume)
    log = StepLog(document, steps)
    with (
        progress("training", lines=False) as bar,
        lines_of_metrics(metrics, told.steps_done) as note,
        cleared_away(),
        leaving_post_mortem(plan, post_mortem),
        told.stopping(),
    ):

        def on_step(report: StepReport) -> None:
            note(report, log.figures(report))
            told.steps_done = report.step + 1
            bar(report.step + 1, steps, f"loss {report.loss:.4f}")
            if not as_json:
                log.tell(report, every=log_every)

        unsaved: NotSaved | None = None
        try:
            losses, trace = train(
                partial(build, model, settings, precision),
                document,
                steps=steps,
                seed=seed,
                numbers=numbers,
                share_device=share_device,
                cap=cap,
                on_step=on_step,
                on_nan=on_nan,
                saving=saving,
                resume=told.resumed,
                weights=weights,
                on_saved=told.saved,
                restarts=restarts,
                replan=None if cluster is None else partial(_planned_for, cluster),
                **({} if timeout is None else {"timeout_seconds": timeout, "start_seconds": timeout}),
            )
        except NotSaved as error:
            losses, trace, unsaved = error.losses, error.trace, error
    data = {"losses": [*map(in_json, losses)]}

    def save_it() -> None:
        if output is not None:
            save_document(trace, output)
            if not as_json:
                on_stderr(f"saved to {output}")
        if unsaved is not None:
            raise unsaved

    print_and_save(
        partial(_print, losses, trace, told, as_json=as_json),
        save_it,
        found=(lambda: data | plain_data(trace)) if as_json else None,
    )


def _saving(save: Path | None, given: dict[str, Any], restarts: int) -> Saving | None:
    """Return the settings of checkpoints; options about checkpoints are refused if none are saved."""
    if save is not None:
        from pipefit.runtime.checkpoint.saving import Saving

        return Saving(directory=str(save), **given)
    if given or restarts:
        name = next(iter(given), "restarts")
        name = {"on_failure": "on-failed-save", "in_foreground": "save-in-foreground"}.get(name, name)
        raise UsageError(f"--{name} needs a folder for checkpoints (--save DIR)")
    return None


def _planned_for(cluster: str, plan: Plan) -> Plan:
    """Return the plan for the current devices."""
    from pipefit.planner import plan_again
    from pipefit.schema.json_io import load_cluster

    result = plan_again(plan, load_cluster(cluster))
    if result is not plan:
        on_stderr(f"pipefit: planned again for {result.cluster}")
    return result


class _CheckpointMessages:
    """Messages about checkpoints: the resumed one, the costs of saves, and the state after an
    interruption.
    """

    def __init__(self, saving: Saving | None, resume: Path | None) -> None:
        from pipefit.checkpoints import Candidates

        self._saving, self.steps_done = saving, 0
        self.resumed = None if resume is None else Candidates(resume)
        self._bytes: dict[int, int] = {}  # of all workers, by step
        self._still_seconds: dict[int, float] = {}  # of the worker that paused longest
        if self.resumed is not None:
            checkpoint = self.resumed.take()
            self.steps_done = checkpoint.manifest.step
            on_stderr(f"resuming from {checkpoint.folder}, after step {self.steps_done}")

    def saved(self, saved: SaveReport) -> None:
        """Record the costs of a save on one worker."""
        self._bytes[saved.step] = self._bytes.get(saved.step, 0) + saved.nbytes
        self._still_seconds[saved.step] = max(self._still_seconds.get(saved.step, 0.0), saved.still_seconds)

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Report the progress of the training if a signal stops the block.

        Errors of the training report it themselves.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException:
            if self._saving is not None:
                reached = self._saving.reached(self.steps_done)
                on_stderr(f"pipefit: {reached}{self._saving.way_on}")
            raise

    @property
    def lines(self) -> list[str]:
        """The number and size of this training's checkpoints, and the longest pause for one."""
        if self._saving is None or not self._bytes:
            return []
        from pipefit.checkpoints.folders import whole
        from pipefit.texts import counted, printable
        from pipefit.units import format_bytes, format_seconds

        there = [step for step, _ in whole(Path(self._saving.directory)) if step in self._bytes]
        if not there:
            return [f"{printable(self._saving.directory)} does not contain a checkpoint of this training"]
        last = there[-1]
        what = f"{counted(len(there), 'checkpoint')} of {format_bytes(self._bytes[last])}"
        where = f"in {printable(self._saving.directory)}, the newest of step {last}"
        longest = format_seconds(max(self._still_seconds.values()))
        return [f"{what} {where}; training paused for at most {longest} for each"]


def _print(losses: list[float], trace: Trace, told: _CheckpointMessages, *, as_json: bool) -> None:
    """Print the losses and the trace."""
    from pipefit.cli.train_log import in_json
    from pipefit.report.traces import describe_trace
    from pipefit.schema.json_io import dumps
    from pipefit.tables import write

    if as_json:
        print(json.dumps({"losses": [*map(in_json, losses)], "trace": json.loads(dumps(trace))}))
    else:
        write(
            [
                f"loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last",
                *told.lines,
                *describe_trace(trace),
            ]
        )
