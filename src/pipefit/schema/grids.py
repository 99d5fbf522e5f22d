"""Stages, the grids of devices that hold them, and the rows of a microbatch that each replica computes.

A stage is a run of layers. Its grid says which devices hold it, and how they share its work: as replicas,
each with a local batch of every microbatch, or as shards, each with a part of the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Literal, NamedTuple, get_args

from pipefit.errors import UsageError
from pipefit.schema.layer_costs import Value
from pipefit.schema.validation import check_types
from pipefit.texts import counted, layers_text

# ---- Rows: the samples of a microbatch that a replica computes and exchanges with neighbouring stages
#
# The replicas of a stage divide the samples of every microbatch, in order and equally. If neighbouring stages
# have different numbers of replicas, a message carries only the rows that both ends have. A value that does
# not depend on the samples, such as a table of positions, is sent whole to every receiver, once: by the
# replica that has the receiver's first row.

Rows = tuple[int, int]  # a half-open range in a microbatch


class Division(NamedTuple):
    """The division of the values between two stages: `front` replicas send them to `behind` replicas.

    `dimensions` has the samples' dimension of every value, along which it is divided. It is None for a value
    without samples, and for all values if both sides have equal numbers of replicas: each then sends all its
    values to its partner.
    """

    dimensions: tuple[int | None, ...]
    front: int
    behind: int

    def carries_all(self, sender: int, receiver: int) -> bool:
        """Return whether the message between these replicas includes the values that are sent whole.

        This holds for both directions.
        """
        return receiver * self.front // self.behind == sender

    def carried(self, sender: int, receiver: int) -> list[tuple[int, int | None]]:
        """Return the numbers of the values in this message, each with its divided dimension."""
        whole = self.carries_all(sender, receiver)
        return [(n, k) for n, k in enumerate(self.dimensions) if k is not None or whole]


def rows_of(replica: int, samples: int) -> Rows:
    """Return the rows of a replica if each replica has `samples` rows."""
    return replica * samples, (replica + 1) * samples


def common_rows(own: Rows, samples: int) -> Iterator[tuple[int, Rows]]:
    """Yield the replicas of another stage that have some of the `own` rows, with these rows.

    Each replica has `samples` rows.
    """
    first, end = own
    for replica in range(first // samples, -(-end // samples)):
        start, stop = rows_of(replica, samples)
        yield replica, (max(first, start), min(end, stop))


def dimensions(
    one: Sequence[Value], other: Sequence[Value], samples: tuple[int, int], *, gathers: bool = False
) -> tuple[int | None, ...]:
    """Return the samples' dimension of every value, from its shapes at two numbers of `samples`.

    Raises:
        UsageError: a value depends on the number of samples, but not by one dimension equal to this number;
            its rows are
        not contiguous in memory; or a sender `gathers` a gradient without samples from several receivers.
    """
    result = tuple(
        _dimension(a, b, samples, number) for number, (a, b) in enumerate(zip(one, other, strict=True))
    )
    for number, (dimension, value) in enumerate(zip(result, one, strict=True)):
        if gathers and dimension is None and value.has_gradient:
            raise UsageError(
                f"value {number} has a gradient but no sample dimension, so several replicas would each "
                "send one gradient back"
            )
    return result


def _dimension(one: Value, other: Value, samples: tuple[int, int], number: int) -> int | None:
    differing = [k for k, sizes in enumerate(zip_longest(one.shape, other.shape)) if sizes[0] != sizes[1]]
    if not differing:
        return None
    known = zip((one, other), samples, strict=True)
    shapes = " and ".join(
        f"{'x'.join(map(str, value.shape))} for {counted(count, 'sample')}" for value, count in known
    )
    alike = len(one.shape) == len(other.shape) and len(differing) == 1
    if not alike or (one.shape[differing[0]], other.shape[differing[0]]) != samples:
        raise UsageError(
            f"value {number} cannot be split between replicas, because it does not have a sample dimension: "
            f"it is {shapes}"
        )
    if prod(one.shape[: differing[0]]) > 1:
        raise UsageError(
            f"value {number} has its samples along dimension {differing[0]} instead of dimension 0 ({shapes})"
        )
    return differing[0]


# ----------------------------------------------------------------------------------------------------

Sharding = Literal["none", "optimizer", "gradients", "parameters"]
SHARDINGS: tuple[Sharding, ...] = get_args(
    Sharding
)  # each divides everything that the previous one does, and more


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The devices of a stage and their shares of its work: `data` replicas of `tensor` shards each.

    Device `devices[d * tensor + t]` holds shard t of replica d, which computes local batch d of every
    microbatch. `shard` says what replicas divide instead of each holding it: nothing, the optimizer state
    (ZeRO 1), also the gradients (2), or also the parameters (3). With `sequences`, shards also divide the
    values between attention and MLP along the positions of sequences. Gradients are reduced over the replicas
    in `buckets`, runs of layers of about equal bytes, each as soon as it has been computed.

    Raises:
        UsageError: the degrees do not multiply to the number of devices, a device is named twice, there is no
            bucket, or a
        single replica or shard would share something.
    """

    devices: tuple[int, ...]
    data: int = 1
    tensor: int = 1
    shard: Sharding = "none"
    buckets: int = 1
    sequences: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if self.data < 1 or self.tensor < 1:
            raise UsageError(
                f"a grid must have at least 1 replica of at least 1 shard, not {self.data} of {self.tensor}"
            )
        if self.data * self.tensor != len(self.devices):
            raise UsageError(
                f"a grid of {counted(self.data, 'replica')} of {counted(self.tensor, 'shard')} each needs "
                f"{counted(self.data * self.tensor, 'device')}, not {len(self.devices)}"
            )
        if self.sequences and self.tensor == 1:
            raise UsageError(
                "a stage of 1 shard holds all positions of its sequences, so sequences=True has no effect: "
                "omit it, or give the stage several shards (tensor)"
            )
        if self.buckets < 1:
            raise UsageError(f"gradients are all-reduced in 1 bucket or more, not {self.buckets}")
        if self.data == 1 and (self.shard != "none" or self.buckets > 1):
            asked = f"shard={self.shard!r}" if self.shard != "none" else f"buckets={self.buckets}"
            raise UsageError(
                f"a stage of 1 replica neither all-reduces nor shards anything, so {asked} has no effect: "
                "omit it, or give the stage several replicas (data)"
            )
        if len(set(self.devices)) != len(self.devices) or min(self.devices) < 0:
            raise UsageError(
                "a grid must name each of its devices once, by a non-negative number, not "
                f"{list(self.devices)}"
            )

    @property
    def sharing(self) -> str:
        """The division of work between the devices, in words; empty for a single device."""
        degrees = ((self.data, "replica"), (self.tensor, "shard"))
        told = " of ".join(counted(degree, what) for degree, what in degrees if degree > 1)
        told += " with sequence parallelism" if self.sequences else ""
        told += {"none": "", "optimizer": " that shard optimizer state"}.get(
            self.shard, f" that shard {self.shard}"
        )
        return told + (f", all-reducing in {self.buckets} buckets" if self.buckets > 1 else "")

    @property
    def divides_gradients(self) -> bool:
        """True if each replica keeps only the gradients of a part of the stage."""
        return self.shard in ("gradients", "parameters")

    def replica_of(self, device: int) -> int:
        """Return the number of the replica that a device belongs to."""
        return self.devices.index(device) // self.tensor

    def shard_of(self, device: int) -> int:
        """Return the number of the shard that a device holds."""
        return self.devices.index(device) % self.tensor

    def group_of(self, device: int) -> tuple[int, ...]:
        """Return the devices of a device's replica, in the order of their shards."""
        first = self.replica_of(device) * self.tensor
        return self.devices[first : first + self.tensor]

    def holding(self, shard: int) -> tuple[int, ...]:
        """Return the devices that hold a shard, one in each replica."""
        return self.devices[shard :: self.tensor]

    @staticmethod
    def of(device: int) -> Grid:
        """Return the grid of a single device."""
        return Grid(devices=(device,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A contiguous run of layers, `start` to `stop - 1`, and the grid of devices that holds it.

    Raises:
        UsageError: no layers.
    """

    start: int
    stop: int
    grid: Grid

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.start < self.stop:
            raise UsageError(
                f"a stage must hold at least one layer, not layers {self.start} to {self.stop - 1}"
            )

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of the grid."""
        return self.grid.devices

    @property
    def device(self) -> int:
        """The device of a stage that is on a single device.

        Raises:
            UsageError: the stage is on several devices.
        """
        if len(self.devices) != 1:
            raise UsageError(
                f"the stage of {layers_text(self.start, self.stop)} is on devices {list(self.devices)}, but "
                "one device for each stage is required: plan with --data 1 --tensor 1"
            )
        return self.devices[0]


def dividing(size: int, data: int, batch: int | None, microbatches: int = 1) -> str:
    """Suggest, in words, microbatches or batches that `data` replicas can divide.

    They are nearest to the given `size` of microbatches, or to `batch`, the samples of a step. Suggested
    microbatches divide `batch` if it is given; suggested batches have at least `microbatches` microbatches.
    """
    if batch is None:
        sizes = [size - size % data, size + -size % data]
    else:
        every = [number for number in range(data, batch + 1, data) if batch % number == 0]
        sizes = [*[number for number in every if number < size][-1:], *[n for n in every if n > size][:1]]
    if sizes := [number for number in sizes if number]:
        return f"microbatches of {' or '.join(map(str, sizes))} samples"
    whole = data * microbatches
    batches = [
        number for number in ((batch or 0) // whole * whole, -(-(batch or 0) // whole) * whole) if number
    ]
    return f"a batch of {' or '.join(map(str, batches))} samples"
