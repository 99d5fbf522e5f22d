"""Degrees: how many devices share a stage, and in which way; and those that stages of a question may have.

A stage of degree (data d, tensor t) is on d t devices: d replicas, each of which computes a slice of every microbatch,
of t shards, each of which holds a part of the layers. What a device of such a stage holds and computes is what the
profile says of a microbatch as large as the slice. So a degree is only possible where the profile has that size, and
where replicas can train: not under an endless schedule.
"""

from __future__ import annotations

from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.profiles import ModelProfile
from pipefit.texts import counted
from pipefit.training import Training


class Degree(NamedTuple):
    """So many replicas of so many shards each."""

    data: int
    tensor: int

    @property
    def devices(self) -> int:
        """Devices of a stage of this degree."""
        return self.data * self.tensor


SINGLE = Degree(1, 1)


def divisors(size: int, most: int) -> tuple[int, ...]:
    """Numbers of replicas, up to `most`, that divide so many samples, each at least twice the one before."""
    found = [1]
    for number in range(2, min(size, most) + 1):
        if size % number == 0 and number >= 2 * found[-1]:
            found.append(number)
    return tuple(found)


def degrees_of(
    profile: ModelProfile, training: Training, devices: int, *, data: int | None = None, tensor: int | None = None
) -> tuple[Degree, ...]:
    """The degrees that stages may have on so many devices, rising; all of `data` replicas and `tensor` shards if given.

    Raises:
        UsageError: those that are asked for are not possible; says what would be.
    """
    _check_pins(profile, training, devices, data=data, tensor=tensor)
    measured = {one.microbatch_size for one in profile.measurements if one.tensor == 1}
    size = training.microbatch_size
    most = 1 if training.endless else min(size, devices)
    found = (
        Degree(replicas, 1)
        for replicas in range(1, most + 1)
        if size % replicas == 0 and size // replicas in measured and data in (None, replicas)
    )
    return tuple(found)


def _check_pins(
    profile: ModelProfile, training: Training, devices: int, *, data: int | None, tensor: int | None
) -> None:
    """Check that stages can have the degrees that were asked for.

    Raises:
        UsageError: they cannot.
    """
    for what, number in (("data", data), ("tensor", tensor)):
        if number is not None and number < 1:
            raise UsageError(f"a stage has at least one device: {what} is 1 or more, not {number}")
    if tensor is not None and tensor > 1:
        raise UsageError(
            f"{profile.model} was not profiled for {tensor} shards of a layer, which plans do not choose yet: use data "
            "replicas, or tensor 1"
        )
    if data is None or data == 1:
        return
    if training.endless:
        raise UsageError(
            f"schedule {training.schedule} updates with microbatches in flight, which {data} replicas of a stage "
            "cannot do together yet: use schedule 1f1b, or data 1"
        )
    if data > devices:
        raise UsageError(f"{data} replicas of a stage need as many devices, and there are {devices}: use fewer")
    _check_slices(profile, training.microbatch_size, data)


def _check_slices(profile: ModelProfile, size: int, data: int) -> None:
    if size % data:
        sizes = dict.fromkeys((size - size % data or data, size + -size % data))
        raise UsageError(
            f"{data} replicas cannot divide microbatches of {counted(size, 'sample')} equally: use microbatches of "
            f"{' or '.join(map(str, sizes))} samples, or another number of replicas"
        )
    measured = sorted({one.microbatch_size for one in profile.measurements})
    if size // data not in measured:
        raise UsageError(
            f"{data} replicas compute slices of {counted(size // data, 'sample')}, and {profile.model} was profiled at "
            f"{', '.join(map(str, measured))}: profile it at {size} and {size // data}, as "
            f"-b {size} -b {size // data} does"
        )
