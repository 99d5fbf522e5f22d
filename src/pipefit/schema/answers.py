"""JSON answers: the fields that commands print with `--json` if the answer is not a document.

`docs/schemas` has the JSON Schemas of answers and of documents. Sizes end in `bytes`, times in `seconds`;
None means unknown or absent.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12 on


class Tried(TypedDict):
    """One value that was tried.

    If `certified`, the bytes are those of a dry run. `over_bytes` is negative if the value fits.
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
    """The fastest plan that was found."""

    microbatch_size: int
    samples_per_second: float


class OnDevices(TypedDict):
    """The capacity of a number of devices: the largest microbatch for `kept`, `recomputed` and `moved`.

    Sizes are 0 if no microbatch fits.
    """

    devices: int
    one_sample: Tried
    largest_microbatch: dict[str, int]
    fastest: Rate | None


class OfPrecision(TypedDict):
    """The memory of one sample on one device, in one precision."""

    precision: str
    state_bytes: int
    need_bytes: int
    fewest_devices: int | None


class OfReplicas(TypedDict):
    """The memory of the fullest device if each device has the whole model and computes one sample.

    If `is_bound`, `need_bytes` is a lower bound. Samples per second are None if the plan does not fit.
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
    """`pipefit fit --grow`; `refused` has the reason for each value that the model refuses."""

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
    """The step time of one document; `step_seconds` is None for a dry run."""

    source: str
    step_seconds: float | None
    estimated: bool


class ComparedDevice(TypedDict):
    """The peaks of a device; `difference` is relative to the measured peak."""

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
    """The peaks of a device in both documents, and the difference in bytes by category.

    None if one document lacks the device.
    """

    device: int
    before_bytes: int | None
    after_bytes: int | None
    by_category: dict[str, int]


class ChangedLayers(TypedDict):
    """A changed run of layers: its first and last layer, the technique before and after.

    `tensors` lists saved tensors that move.
    """

    layers: list[str]
    before: str
    after: str
    why: str
    tensors: NotRequired[list[str]]


class DiffAnswer(TypedDict):
    """`pipefit diff`: pairs belong to the first and the second document."""

    asked: list[str]
    changes: list[ChangedLayers]
    devices: list[DifferentDevice]
    step_seconds: list[float | None]
    samples_per_second: list[float | None]
    busiest_device_computes: list[float | None]


class ErrorAnswer(TypedDict):
    """A failed command: its message and exit code; `result` has the partial result, if any."""

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
