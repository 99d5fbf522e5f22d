"""Degrees: how many devices share a stage, and in which way; and those that stages of a question may have.

A stage of degree (data d, tensor t) is on d t devices: d replicas, each of which computes a slice of every microbatch,
of t shards, each of which holds a part of the layers, and by `sequences` computes some positions of what is between.
What a device of such a stage holds and computes is what the profile says of a microbatch as large as the slice. So a
degree is only possible where the profile has that size.
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
    """A degree as options of a planner, and as fields of a grid, are named."""

    data: int
    tensor: int
    sequences: bool


class Degree(NamedTuple):
    """So many replicas of so many shards each, which by `sequences` divide positions too."""

    data: int
    tensor: int
    sequences: bool = False

    @staticmethod
    def of(grid: Grid) -> Degree:
        """That of a grid."""
        return Degree(grid.data, grid.tensor, grid.sequences)

    def __str__(self) -> str:
        along = " with sequence parallelism" if self.sequences else ""
        return f"{counted(self.data, 'replica')} of {counted(self.tensor, 'shard')} each{along}"

    @property
    def pins(self) -> Pins:
        """Its fields by name."""
        return {"data": self.data, "tensor": self.tensor, "sequences": self.sequences}

    @property
    def devices(self) -> int:
        """Devices of a stage of this degree."""
        return self.data * self.tensor

    def groups(self, devices: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Of the first devices, the shards of a replica, and the replicas of a shard."""
        return devices[: self.tensor], devices[: self.devices : self.tensor]


SINGLE = Degree(1, 1)
_DIVIDED = {"optimizer": "optimizer state", "gradients": "gradients", "parameters": "parameters"}


def divisors(size: int, most: int) -> tuple[int, ...]:
    """Numbers of replicas, up to `most`, that divide so many samples, each at least twice the one before."""
    found = [1]
    for number in range(2, min(size, most) + 1):
        if size % number == 0 and number >= 2 * found[-1]:
            found.append(number)
    return tuple(found)


def divisible(training: Training) -> tuple[Sharding, ...]:
    """What replicas of a stage may divide, the least first; under a schedule without end no parameters, and nothing of
    which every version of the weights has room for all.
    """
    if not training.endless:
        return SHARDINGS
    return SHARDINGS[:1] if training.versions == "everything" else SHARDINGS[:-1]


def check_divided(training: Training, shard: Sharding | None) -> None:
    """Check that replicas may divide what they are asked to, under this schedule.

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
    """The degrees that stages may have on so many devices, rising; all of `data` replicas and `tensor` shards if given,
    all shards with `sequences` or without.

    Some have several replicas if these are to divide anything (`shard`). None has where stages are `unreplicated`.

    Raises:
        UsageError: those that are asked for are not possible; says what would be.
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
    """Check that stages can have the degrees that were asked for with microbatches of so many samples, replicas if
    these are to divide anything, and shards that divide positions if some are to (`sequences`).

    `batch` is the number of samples in a step, if it was asked for.

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
    """Check what `check_pins` checks, as far as no profile is needed to know it.

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
    """How many replicas of so many shards a stage can have at most, if their number is not said."""
    return min(size, devices // (tensor or 1)) if data is None else data


def _two_replicas(data: int | None, tensor: int | None, devices: int) -> str:
    """What would let a stage have two replicas."""
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
