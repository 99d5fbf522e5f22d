"""The log of a training on stderr: a line for a step, or every two seconds, with what people look at first.

    step 12 of 100  loss 3.2145  10,240 tokens/s  41.3 TFLOP/s  MFU 34.4 %  device 0: 20.10 GiB of 23.65 GiB

FLOPs are those of the model's own forwards and backwards, without what is recomputed; MFU holds them against the peak
of all GPUs of the plan (Chowdhery et al., "PaLM", 2022, appendix B). Emulated devices have no peak to speak of.
"""

from __future__ import annotations

import sys
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipefit.plans import Plan
    from pipefit.runtime.callbacks import StepReport

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
