"""Predicted beside measured: accuracy is a subtraction of two traces."""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.answers import CompareAnswer
from pipefit.errors import UsageError
from pipefit.tables import Block, Shown, Table
from pipefit.texts import counted
from pipefit.trace import Trace
from pipefit.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceComparison:
    """One device's peaks, in bytes."""

    device: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def difference_bytes(self) -> int:
        """Measured above predicted: positive where the prediction was too low."""
        return self.measured_bytes - self.predicted_bytes

    @property
    def difference(self) -> float | None:
        """The same, as a share of what was measured; None where nothing was."""
        return self.difference_bytes / self.measured_bytes if self.measured_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Shown):
    """Two traces of the same devices. Seconds are the last step's, None for a dry run, which has no times.

    `predicted_estimated` and `measured_estimated` say which of the seconds come of estimated seconds of layers.
    """

    predicted_source: str
    measured_source: str
    devices: tuple[DeviceComparison, ...]
    predicted_seconds: float | None
    measured_seconds: float | None
    predicted_estimated: bool
    measured_estimated: bool

    def __repr__(self) -> str:
        """A line: what is compared, and by how much peaks are apart at most."""
        apart = max((abs(row.difference_bytes) for row in self.devices), default=0)
        sources, devices = (
            f"{self.predicted_source} beside {self.measured_source}",
            counted(len(self.devices), "device"),
        )
        return f"<Comparison: {sources}, {devices}, peaks at most {format_bytes(apart)} apart>"

    def as_json(self) -> CompareAnswer:
        """Plain data, the shape of `pipefit compare --json`."""
        return {
            "predicted": {
                "source": self.predicted_source,
                "step_seconds": self.predicted_seconds,
                "estimated": self.predicted_estimated,
            },
            "measured": {
                "source": self.measured_source,
                "step_seconds": self.measured_seconds,
                "estimated": self.measured_estimated,
            },
            "devices": [
                {
                    "device": row.device,
                    "predicted_bytes": row.predicted_bytes,
                    "measured_bytes": row.measured_bytes,
                    "difference_bytes": row.difference_bytes,
                    "difference": row.difference,
                }
                for row in self.devices
            ],
        }


def compare(predicted: Trace, measured: Trace) -> Comparison:
    """Peaks and step seconds of two traces, device by device.

    Raises:
        UsageError: they are traces of different devices.
    """
    ours, theirs = ({device.device: device.peak_bytes for device in trace.devices} for trace in (predicted, measured))
    if ours.keys() != theirs.keys():
        raise UsageError(
            f"the traces are of different devices, {_list(ours)} and {_list(theirs)}: compare two traces of one plan"
        )
    rows = (DeviceComparison(device=d, predicted_bytes=ours[d], measured_bytes=theirs[d]) for d in sorted(ours))
    return Comparison(
        predicted_source=predicted.source,
        measured_source=measured.source,
        devices=tuple(rows),
        predicted_seconds=predicted.last_seconds,
        measured_seconds=measured.last_seconds,
        predicted_estimated=predicted.estimated,
        measured_estimated=measured.estimated,
    )


def describe_comparison(comparison: Comparison) -> list[Block]:
    """A row for each device, and a sentence on time."""
    rows = tuple(
        (
            str(row.device),
            format_bytes(row.predicted_bytes),
            format_bytes(row.measured_bytes),
            f"{row.difference_bytes:+d}",
            "-" if row.difference is None else f"{100 * row.difference:+z.2f} %",
        )
        for row in comparison.devices
    )
    columns = (
        "device",
        f"peak, {comparison.predicted_source}",
        f"peak, {comparison.measured_source}",
        "bytes apart",
        "%",
    )
    return [Table(columns, rows), _time(comparison)]


def _time(comparison: Comparison) -> str:
    ours, theirs = comparison.predicted_seconds, comparison.measured_seconds
    if ours is None or theirs is None:
        return "step time: not compared, because a dry run has no times"
    apart = f" ({100 * (theirs / ours - 1):+z.1f} %)" if ours else ""
    return (
        f"step time: {format_seconds(ours)} {comparison.predicted_source}{_how(comparison.predicted_estimated)}, "
        f"{format_seconds(theirs)} {comparison.measured_source}{_how(comparison.measured_estimated)}{apart}"
    )


def _how(estimated: bool) -> str:
    return " by estimates" if estimated else ""


def _list(devices: dict[int, int]) -> str:
    """The numbers of the devices: all of them, or how many there are and the first."""
    numbers = sorted(devices)
    some = ", ".join(map(str, numbers[:8])) or "none"
    return some if len(numbers) <= 8 else f"{len(numbers)} of them ({some}, ...)"
