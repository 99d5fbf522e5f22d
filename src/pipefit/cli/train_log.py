"""The log of a training on stderr: a line every N steps or every two seconds; and the file of metrics.

    step 12 of 100  loss 3.2145  10,240 tokens/s  41.3 TFLOP/s  MFU 34.4 %  device 0: 20.10 GiB of 23.65 GiB

FLOPs are those of the model's own forwards and backwards, without recomputation; MFU relates them to the peak
of all GPUs of the plan (Chowdhery et al., "PaLM", 2022, appendix B). Emulated devices are without MFU.
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

# ---- The file of `pipefit train --metrics`: a line of JSON for each step, written as soon as the step ends

if TYPE_CHECKING:
    from pipefit.runtime.callbacks import StepReport

    Note = Callable[[StepReport, Mapping[str, float | None]], None]

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
            f"{printable(str(path))} cannot be written: {error.strerror}; choose another file"
        ) from None


def in_json(loss: float) -> float | str:
    """Return a loss for JSON, as text if it is not finite."""
    return loss if isfinite(loss) else str(loss)


def _lines_before(path: Path, first: int) -> list[tuple[int, bytes]]:
    """Return the steps before `first` in a file of metrics, with their lines."""
    if not first or not path.is_file():
        return []
    result = list[tuple[int, bytes]]()
    for line in content(path, printable(str(path)), _LARGEST_BYTES, "files of metrics have").splitlines(
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
        """Describe the device whose tensors took the largest share of its memory in the step."""
        from pipefit.units import format_bytes

        sizes = [device.memory_bytes for device in self._plan.cluster.devices]
        device = max(report.peak_bytes, key=lambda number: report.peak_bytes[number] / sizes[number])
        return f"device {device}: {format_bytes(report.peak_bytes[device])} of {format_bytes(sizes[device])}"


def _flops(plan: Plan) -> int:
    """Return the FLOPs of the forward and backward of one microbatch, including the loss."""
    measured = plan.measurement
    return sum(cost.forward.flops + cost.backward.flops for cost in (*measured.costs, measured.loss))
