"""Callbacks of a trainer: each is called with a report after every step.

Trainer(task, plan, callbacks=[JsonLines("metrics.jsonl"), print])
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pipefit.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One training step, as one worker saw it. The loss is the same on all workers.

    `peak_bytes` maps every device to its peak in the step, 0 if no meter counts. `gradient_norm` is None
    unless gradients are clipped or the loss is scaled.
    """

    step: int
    loss: float
    seconds: float
    samples_per_second: float
    learning_rate: float | None
    peak_bytes: dict[int, int]
    gradient_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False


Callback = Callable[[StepReport], None]


class JsonLines:
    """Appends every report to a file as one line of JSON."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __call__(self, report: StepReport) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(report)) + "\n")


class TensorBoard:
    """Writes every report to TensorBoard; needs the `tensorboard` extra.

    Raises:
        UsageError: tensorboard is not installed.
    """

    def __init__(self, directory: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError("TensorBoard is not installed: pip install 'pipefit[tensorboard]'") from error
        self._writer = SummaryWriter(str(directory))

    def __call__(self, report: StepReport) -> None:
        for name in ("loss", "samples_per_second", "learning_rate", "gradient_norm", "loss_scale"):
            value = getattr(report, name)
            if value is not None:
                self._writer.add_scalar(f"train/{name}", value, report.step)
        for device, nbytes in report.peak_bytes.items():
            self._writer.add_scalar(f"memory/device{device}", nbytes, report.step)
        self._writer.flush()
