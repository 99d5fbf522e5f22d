"""What is told of a step: a report for callbacks, whose loss may still be on its way between the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pipefit.runtime.callbacks import Callback, StepReport
from pipefit.runtime.results import Result
from pipefit.runtime.stage import StageRunner


class Untold(NamedTuple):
    """A step whose loss has not been returned yet, with a report that lacks loss and peaks."""

    result: Result
    report: StepReport

    def tell(self, callbacks: Sequence[Callback]) -> float:
        """The loss, when all workers have told theirs; callbacks learn of it too."""
        loss, peaks = self.result.joined()
        for callback in callbacks:
            callback(replace(self.report, loss=loss, peak_bytes=peaks))
        return loss


def report_of(stage: StageRunner, step: int, seconds: float, samples: int) -> StepReport:
    """The report of a step that `stage` has just ended, without loss and peaks."""
    agreement = stage.agreement
    scale = None if agreement is None else agreement.scale
    rate = stage.optimizer.param_groups[0]["lr"] if stage.optimizer is not None else None
    return StepReport(
        step=step,
        loss=float("nan"),
        seconds=seconds,
        samples_per_second=samples / seconds,
        learning_rate=None if rate is None else float(rate),
        peak_bytes={},
        gradient_norm=None if agreement is None else agreement.norm,
        loss_scale=None if scale is None else scale.value,
        skipped=agreement is not None and agreement.overflow,
    )
