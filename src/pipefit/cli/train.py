"""`pipefit train`: execution of a plan by one worker process per device."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from math import inf, isfinite
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pipefit.cli.model import build, check_order, precision_of, resolve
from pipefit.cli.options import AfterDeath, Engine, Json, Model, Output, PlanFile, Settings, count_option
from pipefit.cli.output import (
    check_output,
    leaving_post_mortem,
    load_runnable,
    on_stderr,
    plain_data,
    print_and_save,
)
from pipefit.cli.progress import cleared_away, progress
from pipefit.errors import FileError, NotSaved, UsageError
from pipefit.schema.file_access import content
from pipefit.tables import write
from pipefit.texts import counted, printable
from pipefit.units import format_bytes, format_number, format_seconds

if TYPE_CHECKING:
    from pipefit.runtime.checkpoint.background_saver import SaveReport
    from pipefit.runtime.options import Saving, StepReport
    from pipefit.schema.plan import Plan
    from pipefit.schema.trace import Trace

    Note = Callable[[StepReport, Mapping[str, float | None]], None]

EXAMPLE = "pipefit train plan.json hf:gpt2 --steps 100 --save runs --every 50"


def command(
    plan: PlanFile,
    model: Model,
    settings: Settings = [],  # noqa: B006 - typer reads it and makes a list of its own
    steps: Annotated[
        int,
        count_option("--steps", does="Training steps in total, including those before --resume."),
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
    engine: Engine = "pipefit",
    post_mortem: AfterDeath = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Train MODEL as PLAN says.

    Starts one worker process per device of the plan. The measurement is a trace, like a prediction. With
    --save and
    --resume, a training that ends early loses at most the steps since its last checkpoint, under this plan or
    another. With --restarts, it continues automatically. With --engine torch, torch.distributed.pipelining
    trains the plan; both engines have the same losses, and continue from each other's checkpoints.
    """
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
        train = _trains(engine)

    messages = _CheckpointMessages(saving, resume)
    log = StepLog(document, steps)
    with (
        progress("training", lines=False) as bar,
        lines_of_metrics(metrics, messages.steps_done) as note,
        cleared_away(),
        leaving_post_mortem(plan, post_mortem),
        messages.stopping(),
    ):

        def on_step(report: StepReport) -> None:
            note(report, log.figures(report))
            messages.steps_done = report.step + 1
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
                resume=messages.resumed,
                weights=weights,
                on_saved=messages.saved,
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
        partial(_print, losses, trace, messages, as_json=as_json),
        save_it,
        found=(lambda: data | plain_data(trace)) if as_json else None,
    )


def _trains(engine: Literal["pipefit", "torch"]) -> Callable[..., tuple[list[float], Trace]]:
    """Return the function that trains by an engine."""
    if engine == "torch":
        from pipefit.torch_engine import train_pipeline

        return train_pipeline
    from pipefit.runtime import train

    return train


def _saving(save: Path | None, given: dict[str, Any], restarts: int) -> Saving | None:
    """Return the settings of checkpoints; options about checkpoints are refused if none are saved."""
    if save is not None:
        from pipefit.runtime.options import Saving

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

        there = [step for step, _ in whole(Path(self._saving.directory)) if step in self._bytes]
        if not there:
            return [f"{printable(self._saving.directory)} does not contain a checkpoint of this training"]
        last = there[-1]
        what = f"{counted(len(there), 'checkpoint')} of {format_bytes(self._bytes[last])}"
        where = f"in {printable(self._saving.directory)}, the newest of step {last}"
        longest = format_seconds(max(self._still_seconds.values()))
        return [f"{what} {where}; training paused for at most {longest} for each"]


def _print(losses: list[float], trace: Trace, messages: _CheckpointMessages, *, as_json: bool) -> None:
    """Print the losses and the trace."""
    from pipefit.report.traces import describe_trace
    from pipefit.schema.json_io import dumps

    if as_json:
        print(json.dumps({"losses": [*map(in_json, losses)], "trace": json.loads(dumps(trace))}))
    else:
        write(
            [
                f"loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last",
                *messages.lines,
                *describe_trace(trace),
            ]
        )


# ---- The log of a training on stderr, and the file of metrics
#
#     step 12 of 100  loss 3.2145  10,240 tokens/s  41.3 TFLOP/s  MFU 34.4 %  device 0: 20.10 GiB of 23.65 GiB
#
# FLOPs are those of the model's own forwards and backwards, without recomputation; MFU relates them to the
# peak of all GPUs of the plan (Chowdhery et al., "PaLM", 2022, appendix B). Emulated devices are without MFU.


_LARGEST_BYTES = 1 << 30  # of a file whose lines are kept


@contextmanager
def lines_of_metrics(path: Path | None, first: int) -> Iterator[Note]:
    """Provide a function to call with the report of each step as it ends, and figures.

    It writes the step's line at once.

    Seconds are those since the end of the previous step; the first step's include the start of the workers. A
    training that resumes at step `first` keeps the lines of earlier steps, and rewrites later ones; so does a
    restarted training.

    Raises:
        FileError: the file cannot be written, as on a full disk.
    """
    if path is None:
        yield lambda report, figures: None
        return
    last, before = perf_counter(), _lines_before(path, first)
    begins = dict[int, int]()  # offset of each step's line
    with _opened(path) as file:

        def write(text: bytes, step: int) -> None:
            try:
                file.write(text)
            except OSError as error:
                raise FileError(
                    f"{path} cannot be written: {error.strerror}; step {step} is the last line"
                ) from error

        def note(report: StepReport, figures: Mapping[str, float | None]) -> None:
            nonlocal last
            now, step = perf_counter(), report.step
            again = [done for done in begins if done >= step]  # steps that have been trained before
            if again:
                file.seek(min(begins[done] for done in again))
                file.truncate()
            for done in again:
                del begins[done]
            begins[step] = file.tell()
            told = {"step": step, "loss": in_json(report.loss), "seconds": now - last}
            write(f"{json.dumps({**told, **figures, 'peak_bytes': report.peak_bytes})}\n".encode(), step)
            last = now

        for step, line in before:
            begins[step] = file.tell()
            write(line, first - 1)
        yield note


def _opened(path: Path) -> FileIO:
    """Open the file, emptied and unbuffered.

    Raises:
        FileError: the system refuses.
    """
    try:
        return path.open("wb", buffering=0)
    except OSError as error:
        raise FileError(
            f"{printable(path)} cannot be written: {error.strerror}; choose another file"
        ) from None


def in_json(loss: float) -> float | str:
    """Return a loss for JSON, as text if it is not finite."""
    return loss if isfinite(loss) else str(loss)


def _lines_before(path: Path, first: int) -> list[tuple[int, bytes]]:
    """Return the steps before `first` in a file of metrics, with their lines."""
    if not first or not path.is_file():
        return []
    result = list[tuple[int, bytes]]()
    for line in content(path, printable(path), _LARGEST_BYTES, "files of metrics have").splitlines(
        keepends=True
    ):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            step = json.loads(line)["step"]
            result += [(step, line)] if step < first else []
    return result


# ---- The log

_SECONDS = 2.0  # between lines, unless steps are counted


class StepLog:
    """Writer of log lines about a plan's training."""

    def __init__(self, plan: Plan, steps: int) -> None:
        self._plan, self._steps, self._last = plan, steps, -inf
        self._tokens = max(plan.profile.fingerprint.lengths, default=0)
        self._flops = plan.training.microbatches * _flops(plan)
        kinds = [plan.cluster.devices[device].kind for device in plan.workers]
        on_gpus = plan.cluster.backend == "cuda"
        self._peak = sum(kind.peak_flops(plan.training.dtype) for kind in kinds) if on_gpus else 0.0

    def figures(self, report: StepReport) -> dict[str, float | None]:
        """Return samples, tokens and FLOPs per second of a step, and the MFU."""
        rate = self._flops / report.seconds if report.seconds else 0.0
        return {
            "samples_per_second": report.samples_per_second,
            "tokens_per_second": report.samples_per_second * self._tokens if self._tokens else None,
            "flops_per_second": rate,
            "mfu": rate / self._peak if self._peak else None,
        }

    def tell(self, report: StepReport, *, every: int | None = None) -> None:
        """Log a step on stderr: every `every` steps, or else every two seconds; and the last step."""
        now, number = monotonic(), report.step + 1
        due = number % every == 0 if every else now - self._last >= _SECONDS
        if due or number == self._steps:
            self._last = now
            print(self.line(report), file=sys.stderr, flush=True)

    def line(self, report: StepReport) -> str:
        """Return the log line of a step."""
        figures = self.figures(report)
        tokens, used = figures["tokens_per_second"], figures["mfu"]
        rate = (
            f"{format_number(report.samples_per_second)} samples/s"
            if tokens is None
            else f"{format_number(tokens)} tokens/s"
        )
        return "  ".join(
            (
                f"step {report.step + 1} of {self._steps}",
                f"loss {report.loss:.4f}",
                rate,
                f"{format_number((figures['flops_per_second'] or 0.0) / 1e12)} TFLOP/s",
                *([] if used is None else [f"MFU {100 * used:.1f} %"]),
                *([self._fullest(report)] if any(report.peak_bytes.values()) else []),
            )
        )

    def _fullest(self, report: StepReport) -> str:
        """Describe the device whose tensors took the largest share of its memory in the step."""
        sizes = [device.memory_bytes for device in self._plan.cluster.devices]
        device = max(report.peak_bytes, key=lambda number: report.peak_bytes[number] / sizes[number])
        return f"device {device}: {format_bytes(report.peak_bytes[device])} of {format_bytes(sizes[device])}"


def _flops(plan: Plan) -> int:
    """Return the FLOPs of the forward and backward of one microbatch, including the loss."""
    measured = plan.measurement
    return sum(cost.forward.flops + cost.backward.flops for cost in (*measured.costs, measured.loss))
