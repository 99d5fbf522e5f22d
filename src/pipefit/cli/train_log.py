"""The log of a training on stderr: a line for a step, or every two seconds, with what people look at first.

    step 12 of 100  loss 3.2145  10,240 tokens/s  41.3 TFLOP/s  MFU 34.4 %  device 0: 20.10 GiB of 23.65 GiB

FLOPs are those of the model's own forwards and backwards, without what is recomputed; MFU holds them against the peak
of all GPUs of the plan (Chowdhery et al., "PaLM", 2022, appendix B). Emulated devices have no peak to speak of.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from math import inf, isfinite
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from pipefit.errors import FileError
from pipefit.schema.file_access import content
from pipefit.texts import printable

if TYPE_CHECKING:
    from pipefit.runtime.callbacks import StepReport
    from pipefit.schema.plan import Plan

# ----------------------------------------------------------------------------------------------------
# The file of `pipefit train --metrics`: a line of JSON for each step, there as soon as the step ends.

if TYPE_CHECKING:
    from pipefit.runtime.callbacks import StepReport

    Note = Callable[[StepReport, Mapping[str, float | None]], None]

_LARGEST_BYTES = 1 << 30  # of a file whose lines are kept


@contextmanager
def lines_of_metrics(path: Path | None, first: int) -> Iterator[Note]:
    """A function to call with the report of each step as it ends, and figures made of it.

    Its line is in the file at once, whatever happens later.

    Seconds are those since the step before ended; the first step's include the start of the workers. Training that goes
    on at step `first` keeps the lines of the steps before it, and makes those of later ones anew. So does a training
    that is started again.

    Raises:
        FileError: the file cannot be written, as on a full disk.
    """
    if path is None:
        yield lambda report, figures: None
        return
    last, before = perf_counter(), _lines_before(path, first)
    begins = dict[int, int]()  # where the line of each step begins
    with _opened(path) as file:

        def write(text: bytes, step: int) -> None:
            try:
                file.write(text)
            except OSError as error:
                raise FileError(f"{path} cannot be written: {error.strerror}; step {step} was the last") from error

        def note(report: StepReport, figures: Mapping[str, float | None]) -> None:
            nonlocal last
            now, step = perf_counter(), report.step
            again = [done for done in begins if done >= step]  # which have been trained before
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
    """The file, empty, and written without a buffer.

    Raises:
        FileError: the system does not let us.
    """
    try:
        return path.open("wb", buffering=0)
    except OSError as error:
        raise FileError(f"{printable(str(path))} cannot be written: {error.strerror}; choose another file") from None


def in_json(loss: float) -> float | str:
    """A loss as JSON has it: one that is not finite has no number there."""
    return loss if isfinite(loss) else str(loss)


def _lines_before(path: Path, first: int) -> list[tuple[int, bytes]]:
    """The steps before `first` of which a file of metrics has lines, and these."""
    if not first or not path.is_file():
        return []
    found = list[tuple[int, bytes]]()
    for line in content(path, printable(str(path)), _LARGEST_BYTES, "files of metrics have").splitlines(keepends=True):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            step = json.loads(line)["step"]
            found += [(step, line)] if step < first else []
    return found


# ----------------------------------------------------------------------------------------------------

_SECONDS = 2.0  # from line to line, unless steps are counted


class StepLog:
    """Writes lines of the steps of a plan's training."""

    def __init__(self, plan: Plan, steps: int) -> None:
        self._plan, self._steps, self._last = plan, steps, -inf
        self._tokens = max(plan.profile.fingerprint.lengths, default=0)
        self._flops = plan.training.microbatches * _flops(plan)
        kinds = [plan.cluster.devices[device].kind for device in plan.workers]
        on_gpus = plan.cluster.backend == "cuda"
        self._peak = sum(kind.peak_flops(plan.training.dtype) for kind in kinds) if on_gpus else 0.0

    def figures(self, report: StepReport) -> dict[str, float | None]:
        """Samples, tokens and FLOPs per second of a step, and the part of the GPUs' peak that these are."""
        rate = self._flops / report.seconds if report.seconds else 0.0
        return {
            "samples_per_second": report.samples_per_second,
            "tokens_per_second": report.samples_per_second * self._tokens if self._tokens else None,
            "flops_per_second": rate,
            "mfu": rate / self._peak if self._peak else None,
        }

    def tell(self, report: StepReport, *, every: int | None = None) -> None:
        """Write a line of a step on stderr: every `every` steps, or else every two seconds; and of the last step."""
        now, number = monotonic(), report.step + 1
        due = number % every == 0 if every else now - self._last >= _SECONDS
        if due or number == self._steps:
            self._last = now
            print(self.line(report), file=sys.stderr, flush=True)

    def line(self, report: StepReport) -> str:
        """What is told of a step."""
        from pipefit.units import format_number

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
        """The device whose tensors took most of its memory in the step."""
        from pipefit.units import format_bytes

        sizes = [device.memory_bytes for device in self._plan.cluster.devices]
        device = max(report.peak_bytes, key=lambda number: report.peak_bytes[number] / sizes[number])
        return f"device {device}: {format_bytes(report.peak_bytes[device])} of {format_bytes(sizes[device])}"


def _flops(plan: Plan) -> int:
    """FLOPs of the forward and backward of one microbatch, the loss included."""
    measured = plan.measurement
    return sum(cost.forward.flops + cost.backward.flops for cost in (*measured.costs, measured.loss))
