"""What commands print with `--json` where it is no document: the names of fields, and what each holds.

`docs/schemas` has the JSON Schema of each, beside those of documents. Sizes end in `bytes`, times in `seconds`; None is
what is not known or not there.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12 on


class Tried(TypedDict):
    """One value that was tried. Bytes are those of a dry run where it is `certified`; `over_bytes` are below zero where
    it fits.
    """

    value: int
    fits: bool
    certified: bool
    parameters: int
    peak_bytes: list[int]
    device: int
    stage: int
    blocks: list[str]
    budget_bytes: int
    over_bytes: int


class Rate(TypedDict):
    """The fastest plan that was looked at."""

    microbatch_size: int
    samples_per_second: float


class OnDevices(TypedDict):
    """What so many devices hold: the largest microbatch by `kept`, `recomputed` and `moved`, 0 where none fits."""

    devices: int
    one_sample: Tried
    largest_microbatch: dict[str, int]
    fastest: Rate | None


class OfPrecision(TypedDict):
    """What one sample takes on one device, in one precision."""

    precision: str
    state_bytes: int
    need_bytes: int
    fewest_devices: int | None


class OfReplicas(TypedDict):
    """What the fullest device takes of those that each have the whole model and compute one sample; a lower bound where
    `is_bound`. Without samples per second it does not fit.
    """

    way: str
    recompute: bool
    need_bytes: int
    is_bound: bool
    samples_per_second: float | None


class FitAnswer(TypedDict):
    """`pipefit fit`."""

    model: str
    parameters: int
    cluster: str
    fits: bool
    schedule: str
    microbatches_for_each_device: float
    microbatch_sizes: list[int]
    devices: list[OnDevices]
    precisions: list[OfPrecision]
    replicated: list[OfReplicas]
    impossible: str
    filled: dict[str, int]


class GrowthAnswer(TypedDict):
    """`pipefit fit --grow`; `refused` has the reason of each value that the model cannot have."""

    model: str
    cluster: str
    grow: str
    sense: Literal["largest", "smallest"]
    value: int
    parameters: int
    microbatches: int
    microbatch_size: int
    best: Tried
    beyond: Tried | None
    tried: list[Tried]
    refused: dict[str, str]


class Seconds(TypedDict):
    """Whose seconds of a step they are; none of a dry run."""

    source: str
    step_seconds: float | None
    estimated: bool


class ComparedDevice(TypedDict):
    """The peaks of a device; `difference` is the part of what was measured."""

    device: int
    predicted_bytes: int
    measured_bytes: int
    difference_bytes: int
    difference: float | None


class CompareAnswer(TypedDict):
    """`pipefit compare`."""

    predicted: Seconds
    measured: Seconds
    devices: list[ComparedDevice]


class DifferentDevice(TypedDict):
    """The peaks of a device, and by how many bytes each category differs there; None where only one has the device."""

    device: int
    before_bytes: int | None
    after_bytes: int | None
    by_category: dict[str, int]


class ChangedLayers(TypedDict):
    """The first and the last of a run of layers, what was done with them, and what is; `tensors` where some move."""

    layers: list[str]
    before: str
    after: str
    why: str
    tensors: NotRequired[list[str]]


class DiffAnswer(TypedDict):
    """`pipefit diff`: pairs are of the first and the second document."""

    asked: list[str]
    changes: list[ChangedLayers]
    devices: list[DifferentDevice]
    step_seconds: list[float | None]
    samples_per_second: list[float | None]
    busiest_device_computes: list[float | None]


class ErrorAnswer(TypedDict):
    """Any command that fails: its sentence and its exit code; with `result` what is known all the same."""

    error: str
    exit_code: int
    result: NotRequired[dict[str, object]]
    post_mortem: NotRequired[str]


ANSWERS = {
    "fit": FitAnswer,
    "fit-grow": GrowthAnswer,
    "compare": CompareAnswer,
    "diff": DiffAnswer,
    "error": ErrorAnswer,
}
