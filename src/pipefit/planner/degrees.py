"""Degrees of stages: the devices that share a stage and the way they share it.

A stage of degree (data d, tensor t) is on d t devices: d replicas, each of which computes a local batch of
every microbatch, of t tensor-parallel ranks, each of which holds a part of the layers and, with `sequences`,
computes some positions between them. The memory and work of a device are those of the profile at the local
batch's size, so a degree is possible only if the profile has that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

from pipefit.errors import UsageError
from pipefit.schema.grids import SHARDINGS, Grid, Sharding, dividing
from pipefit.schema.profile import Measurement, ModelProfile
from pipefit.schema.training import Training
from pipefit.texts import counted


class Pins(TypedDict):
    """A degree under the names of planner options and grid fields."""

    data: int
    tensor: int
    sequences: bool


class Degree(NamedTuple):
    """Number of replicas, and of tensor-parallel ranks of each, which may divide positions (`sequences`)."""

    data: int
    tensor: int
    sequences: bool = False

    @staticmethod
    def of(grid: Grid) -> Degree:
        """Return the degree of a grid."""
        return Degree(grid.data, grid.tensor, grid.sequences)

    def __str__(self) -> str:
        along = " with sequence parallelism" if self.sequences else ""
        return f"{counted(self.data, 'replica')} of {counted(self.tensor, 'shard')} each{along}"

    @property
    def pins(self) -> Pins:
        """The fields by name."""
        return {"data": self.data, "tensor": self.tensor, "sequences": self.sequences}

    @property
    def devices(self) -> int:
        """Number of devices of a stage of this degree."""
        return self.data * self.tensor

    def groups(self, devices: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tensor-parallel ranks of the first replica, and the replicas of the first rank."""
        return devices[: self.tensor], devices[: self.devices : self.tensor]


SINGLE = Degree(1, 1)
_DIVIDED = {"optimizer": "optimizer state", "gradients": "gradients", "parameters": "parameters"}


def divisors(size: int, most: int) -> tuple[int, ...]:
    """Return numbers of replicas up to `most` that divide `size`, each at least twice the one before."""
    found = [1]
    for number in range(2, min(size, most) + 1):
        if size % number == 0 and number >= 2 * found[-1]:
            found.append(number)
    return tuple(found)


def divisible(training: Training) -> tuple[Sharding, ...]:
    """Return the kinds of state that replicas of a stage may divide, the smallest first.

    Under an asynchronous schedule, parameters cannot be divided, and nothing can if every version of the
    weights keeps everything.
    """
    if not training.endless:
        return SHARDINGS
    return SHARDINGS[:1] if training.versions == "everything" else SHARDINGS[:-1]


def check_divided(training: Training, shard: Sharding | None) -> None:
    """Check that replicas may divide the requested state under this schedule.

    Raises:
        UsageError: they may not.
    """
    if shard is not None and shard not in divisible(training):
        raise UsageError(
            f"schedule {training.schedule} updates with microbatches in flight, each of which goes through weights of "
            f"its own version, and replicas cannot divide {_DIVIDED[shard]} then: divide gradients (with versions of "
            "weights alone), or use schedule 1f1b"
        )


def degrees_of(
    profile: ModelProfile,
    training: Training,
    devices: int,
    *,
    data: int | None = None,
    tensor: int | None = None,
    sequences: bool | None = None,
    shard: Sharding | None = None,
    unreplicated: bool = False,
) -> tuple[Degree, ...]:
    """Return the degrees that stages may have on this number of devices, rising.

    `data`, `tensor` and `sequences` restrict them. Requested sharding (`shard`) needs several replicas in
    some degree. With `unreplicated` no degree has replicas.

    Raises:
        UsageError: the requested degrees are impossible; the message says which are possible.
    """
    size = training.microbatch_size
    check_pins(profile, size, devices, data=data, tensor=tensor, sequences=sequences, shard=shard)
    check_divided(training, shard)
    known = [one for one in profile.measurements if _divides(one, size)]
    found = {Degree(size // one.microbatch_size, one.tensor, one.sequences) for one in known}
    return tuple(
        sorted(
            degree
            for degree in found
            if degree.devices <= devices
            and data in (None, degree.data)
            and (degree.data == 1 or not unreplicated)
            and tensor in (None, degree.tensor)
            and (sequences in (None, degree.sequences) or degree.tensor == 1)
        )
    )


def _divides(one: Measurement, size: int) -> bool:
    return size % one.microbatch_size == 0


def check_pins(
    profile: ModelProfile,
    size: int,
    devices: int,
    *,
    data: int | None,
    tensor: int | None,
    sequences: bool | None = None,
    shard: Sharding | None = None,
    batch: int | None = None,
) -> None:
    """Check that stages can have the requested degrees with microbatches of `size` samples.

    Sharding (`shard`) needs replicas, and `sequences` needs tensor-parallel ranks. `batch` is the number of
    samples of a step, if it was requested.

    Raises:
        UsageError: they cannot.
    """
    check_degrees(size, devices, data=data, tensor=tensor, sequences=sequences, shard=shard, batch=batch)
    if shard not in (None, "none"):
        _check_replicas(profile, size, shard, most=_most_replicas(size, devices, data, tensor))
    if sequences and tensor is None and not any(one.sequences for one in profile.measurements):
        raise UsageError(
            f"{profile.model} was profiled without sequence parallelism: profile it, or plan the model, with "
            "--tensor 2 --sequences"
        )
    asked = Degree(data or 1, tensor or 1, bool(sequences and tensor))
    if asked == SINGLE:
        return
    _check_slices(profile, size, asked.data)
    profile.at(size // asked.data, asked.tensor, sequences=asked.sequences)


def check_degrees(
    size: int,
    devices: int,
    *,
    data: int | None,
    tensor: int | None,
    sequences: bool | None = None,
    shard: Sharding | None = None,
    batch: int | None = None,
) -> None:
    """Check the parts of `check_pins` that need no profile.

    Raises:
        UsageError: stages cannot have these degrees, whatever the model.
    """
    for what, number in (("data", data), ("tensor", tensor)):
        if number is not None and number < 1:
            raise UsageError(f"a stage has at least one device: {what} is 1 or more, not {number}")
    if sequences and tensor == 1:
        raise UsageError("sequence parallelism is of several shards: ask for 2 or more (tensor), or leave it out")
    asked = Degree(data or 1, tensor or 1, bool(sequences and tensor))
    if asked.devices > devices:
        raise UsageError(
            f"a stage of {asked} needs {counted(asked.devices, 'device')}, and there are {devices}: use fewer"
        )
    if size % asked.data:
        raise UsageError(
            f"{asked.data} replicas cannot divide microbatches of {counted(size, 'sample')} equally: use "
            f"{dividing(size, asked.data, batch)}, or another number of replicas"
        )
    if shard not in (None, "none"):
        most = _most_replicas(size, devices, data, tensor)
        if all(size % count for count in range(2, most + 1)):
            raise UsageError(
                f"replicas of a stage divide {_DIVIDED[shard]}, and with microbatches of {counted(size, 'sample')} no "
                f"stage can have two here: {_two_replicas(data, tensor, devices)}, or leave out what they divide"
            )


def _most_replicas(size: int, devices: int, data: int | None, tensor: int | None) -> int:
    """Return the requested number of replicas, or the most that a stage can have."""
    return min(size, devices // (tensor or 1)) if data is None else data


def _two_replicas(data: int | None, tensor: int | None, devices: int) -> str:
    """Return the advice that would let a stage have two replicas."""
    if data is not None:
        return "ask for 2 replicas or more"
    if devices < 2 * (tensor or 1):
        return "ask for fewer shards" if tensor and devices > 1 else "name a cluster of more devices"
    return "use microbatches of an even number of samples"


def _check_replicas(profile: ModelProfile, size: int, shard: str, *, most: int) -> None:
    """Check that a stage can have two replicas or more, up to `most`."""
    counts = {size // one.microbatch_size for one in profile.measurements if _divides(one, size)}
    if not any(1 < count <= most for count in counts):
        raise UsageError(
            f"replicas of a stage divide {_DIVIDED[shard]}, and with microbatches of {counted(size, 'sample')} no "
            f"stage can have two here: profile {profile.model} at a size and its half, such as 2 and 1 (-b 2 -b 1), "
            "ask for 2 replicas or more, or leave out what they divide"
        )


def _check_slices(profile: ModelProfile, size: int, data: int) -> None:
    measured = sorted({one.microbatch_size for one in profile.measurements})
    if size // data not in measured:
        raise UsageError(
            f"{data} replicas compute slices of {counted(size // data, 'sample')}, and {profile.model} was profiled at "
            f"{', '.join(map(str, measured))}: profile it at {size} and {size // data} "
            f"(-b {size} -b {size // data}, microbatch_size=({size}, {size // data}))"
        )
