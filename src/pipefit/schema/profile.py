"""Profiles: the costs of all layers of a model, all that planners and the simulator know of it.

Equal layers share one `LayerCost`, so a file holds each kind of layer once. Costs are exact for one
microbatch size (a `Measurement`); a profile may hold several. Planners cut between `Block`s of layers. A
`Fingerprint` ties a profile to its task.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, pairwise, zip_longest
from typing import Literal

from pipefit.errors import UsageError
from pipefit.schema.layer_costs import (
    LARGEST_BYTES,
    KernelMemory,
    LayerCost,
    SharedBuffer,
    SharedParameter,
    SharedTensor,
)
from pipefit.schema.training import Precision, Training
from pipefit.texts import counted, first_to_last
from pipefit.units import format_bytes, format_flops

# ---- Fingerprint: everything that a task's costs depend on
#
# Its texts and digests are equal for the same task in every process and on every machine, whether its tensors
# are real, fake or on the `meta` device, and for every microbatch size. Weights, the learning rate and random
# states are excluded, because no cost depends on them. `fake_cuda.fingerprint` makes one from a task.

_NAMED = 3  # layers named in an error; more are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Everything that the costs of a task depend on.

    Tuples about layers have one digest for every layer, in order.
    """

    layers: tuple[str, ...]  # name, class, settings or traced operations
    parameters: tuple[
        str, ...
    ]  # names, shapes, dtypes of parameters and buffers, and which of them are trained
    shared: tuple[str, ...]  # the places of every parameter that several layers use, in words
    inputs: tuple[str, ...]  # every leaf of a batch's inputs, in words, with the shapes of one sample
    targets: tuple[str, ...]
    loss: str  # the operations of the loss
    precision: str
    optimizer: str  # its class
    options: tuple[str, ...]  # of the optimizer, in words; numbers only as zero or nonzero
    groups: str  # the parameters with separate options; empty if all have the same
    lengths: tuple[int, ...] = ()  # of the whole-number sequences among a sample's inputs, such as tokens

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of the whole fingerprint."""
        return digest(repr(astuple(self)))


def samples(count: int, lengths: Sequence[int]) -> str:
    """Format a number of samples, with the lengths of their sequences, if any."""
    return f"{counted(count, 'sample')} of {_length(lengths)}" if lengths else str(count)


def digest(text: str, digits: int = 16) -> str:
    """Return a short hexadecimal digest of `text`, equal on every machine."""
    return sha256(text.encode()).hexdigest()[:digits]


def differences(before: Fingerprint, now: Fingerprint, names: Sequence[str]) -> list[str]:
    """Describe how two tasks differ, as phrases that continue "it was made for ..."; empty if they do not.

    Losses are compared only if everything else is equal, because a loss runs on the shapes that the model
    returns.

    Args:
        before: fingerprint of the task that the profile, plan or run was made for.
        now: fingerprint of the task to use it for.
        names: of the layers of `before`.
    """
    result = [*_layers(before, now, names), *_data(before, now), *_optimizer(before, now)]
    return result or (["another loss"] if before.loss != now.loss else [])


def _layers(fingerprint: Fingerprint, now: Fingerprint, names: Sequence[str]) -> Iterator[str]:
    if len(fingerprint.layers) != len(now.layers):
        yield f"{counted(len(fingerprint.layers), 'layer')}, not {len(now.layers)}"
        return
    tensors = _unlike(names, fingerprint.parameters, now.parameters)
    settings = [name for name in _unlike(names, fingerprint.layers, now.layers) if name not in tensors]
    if tensors:
        yield f"other parameters or buffers in {_listed(tensors)}"
    if settings:
        yield f"another class, other settings or other operations in {_listed(settings)}"
    if fingerprint.shared != now.shared:
        yield f"{_texts('shared parameters', fingerprint.shared)}, not {_texts('', now.shared)}"


def _data(fingerprint: Fingerprint, now: Fingerprint) -> Iterator[str]:
    if fingerprint.lengths != now.lengths:  # the shapes of inputs and targets follow
        yield f"samples of {_length(fingerprint.lengths)}, not {_length(now.lengths)}"
    else:
        if fingerprint.inputs != now.inputs:
            yield f"{_texts('inputs of', fingerprint.inputs)}, not {_texts('', now.inputs)}"
        if fingerprint.targets != now.targets:
            yield f"{_texts('targets of', fingerprint.targets)}, not {_texts('', now.targets)}"
    if fingerprint.precision != now.precision:
        yield f"{fingerprint.precision}, not {now.precision}"


def _optimizer(fingerprint: Fingerprint, now: Fingerprint) -> Iterator[str]:
    if fingerprint.optimizer != now.optimizer:
        yield f"{fingerprint.optimizer}, not {now.optimizer}"
    elif fingerprint.options != now.options:
        had = [option for option in fingerprint.options if option not in now.options]
        has = [option for option in now.options if option not in fingerprint.options]
        yield f"{_texts(f'{fingerprint.optimizer} with', had)}, not {_texts('', has)}"
    if fingerprint.groups != now.groups:
        yield "other parameter groups"


def _unlike(names: Sequence[str], made: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return the names, or else numbers, of the layers whose digests differ."""
    unlike = [number for number, (one, other) in enumerate(zip_longest(made, now)) if one != other]
    return [names[number] if number < len(names) else str(number) for number in unlike]


def _listed(names: Sequence[str]) -> str:
    """Format the first few names, and the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"layer{'s' * (len(names) > 1)} {', '.join(names[:_NAMED])}{more}"


def _length(lengths: Sequence[int]) -> str:
    """Format the lengths of a sample's sequences."""
    return f"length{'s' * (len(lengths) > 1)} {' and '.join(map(str, lengths))}" if lengths else "no length"


def _texts(what: str, texts: Sequence[str]) -> str:
    return f"{what} {', '.join(texts) or 'none'}".strip()


# ---- Additive costs: mCAP's predictor, peaks as sums of two numbers for each block (mCAP, listing 1.1)
#
#     peak of blocks i to j - 1  =  mem_isolated[i] + mem_added[i + 1] + ... + mem_added[j - 1]
#
# mCAP's layers are blocks here. The prediction ignores a stage's place in the schedule, so it suits GPipe, in
# which all stages hold the same number of microbatches. It is best under recomputation, when a peak is that
# of the largest block plus all parameters. A number may be negative, because a block may lower the peak of
# the previous ones.


@dataclass(frozen=True, kw_only=True)
class AdditiveCosts:
    """Two byte counts for every block: its own peak, and the bytes that it adds to previous blocks.

    `profiler` measures them by training runs; the planners `additive`, `mcap_bf` and `mcap_bo` use them. They
    are valid only for the `training` and the `recompute` setting of the measurement.

    Raises:
        UsageError: the numbers of blocks differ, or are zero.
    """

    mem_isolated: tuple[int, ...]
    mem_added: tuple[int, ...]
    training: Training
    recompute: str = "never"

    def __post_init__(self) -> None:
        if len(self.mem_isolated) != len(self.mem_added) or not self.mem_isolated:
            raise UsageError(
                f"additive costs need two numbers for every block, not {len(self.mem_isolated)} alone and "
                f"{len(self.mem_added)} added"
            )

    def differences(self, training: Training, recompute: str) -> list[str]:
        """Describe how the settings of the measurement differ from `training` and `recompute`, as phrases."""
        result = self.training.differences(training)
        if self.recompute != recompute:
            result.append(f"recompute {self.recompute}, not recompute {recompute}")
        return result

    @cached_property
    def _sums(self) -> tuple[int, ...]:
        return (0, *accumulate(self.mem_added))

    def peak(self, start: int, stop: int) -> int:
        """Return the estimated peak of blocks `start` to `stop - 1` on one device, in bytes.

        Raises:
            UsageError: no such blocks.
        """
        if not 0 <= start < stop <= len(self.mem_isolated):
            raise UsageError(
                f"blocks {start} to {stop - 1} are not a valid stage of "
                f"{counted(len(self.mem_isolated), 'block')}"
            )
        return self.mem_isolated[start] + self._sums[stop] - self._sums[start + 1]

    def __call__(self, stage: int, start: int, stop: int) -> int:
        """Return the estimated peak, which does not depend on the stage's place."""
        return self.peak(start, stop)


# ---- Shares of tensor parallelism: the divided part of a model, and the operations that stay whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """An operation that every rank computes whole, with its figures and the reason."""

    layer: str
    operator: str
    parameter_bytes: int
    flops: int
    reason: str

    def told(self, layers: Sequence[str]) -> str:
        """Format this operation together with the equal ones of other `layers`."""
        figures = f"{format_bytes(self.parameter_bytes)} of parameters, {format_flops(self.flops)}"
        where, all_of_them = ", ".join(dict.fromkeys(layers)), f"{len(layers)} of these, each "
        return (
            f"  whole: {self.operator} of {where} ({all_of_them if len(layers) > 1 else ''}{figures}): "
            f"{self.reason}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Parameters and operations of a model or stage, and the part that `ranks` divide.

    `whole` lists the largest undivided operations, largest first.
    """

    ranks: int
    parameter_bytes: int
    divided_bytes: int
    rank_bytes: int  # of one rank
    flops: int
    divided_flops: int
    whole: tuple[Whole, ...]

    @property
    def divides_nothing(self) -> bool:
        """True if every rank has all parameters and does all operations."""
        return not self.divided_bytes and not self.divided_flops

    @property
    def sentence(self) -> str:
        """The divided shares, as a sentence without a full stop."""
        return (
            f"{self.ranks} tensor-parallel ranks shard {_percent(self.divided_bytes, self.parameter_bytes)} "
            f"of {format_bytes(self.parameter_bytes)} of parameters ({format_bytes(self.rank_bytes)} each) "
            f"and {_percent(self.divided_flops, self.flops)} of the operations"
        )

    def __str__(self) -> str:
        alike = dict[Whole, list[str]]()
        for one in self.whole:
            alike.setdefault(replace(one, layer=""), []).append(one.layer)
        return "\n".join([self.sentence, *(one.told(layers) for one, layers in alike.items())])


def _percent(part: int, whole: int) -> str:
    """Format a share in percent, rounded down, so that only the whole is `100.0 %`."""
    return f"{1000 * part // (whole or 1) / 10:.1f} %"


# ---- Measurements and profiles

Target = Literal["cpu", "cuda"]

MOST_THREADS = 1024  # of a worker; OpenMP ends a process that requests more than the system has


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The costs of all layers at one microbatch size. The cost of layer i is `kinds[layers[i]]`.

    `sizes` is a digest of the whole numbers in traced operations and in the loss, which depend on the
    microbatch size. Layers may be divided between `tensor` ranks, with `sequences` also along positions: then
    costs are those of one rank, `shares` says what the ranks divide, and `forms` is a digest of the division,
    equal if ranks agree.

    Raises:
        UsageError: a layer of an unknown kind, values that the next layer does not take, or an unknown user
            of a shared
        parameter or buffer.
    """

    microbatch_size: int
    kinds: tuple[LayerCost, ...]
    layers: tuple[int, ...]
    loss: LayerCost  # (output..., target...) -> scalar; lives on the last stage
    shared: tuple[SharedParameter, ...] = ()
    sizes: str = ""
    shared_buffers: tuple[SharedBuffer, ...] = ()
    tensor: int = 1
    shares: Shares | None = None
    forms: str = ""
    sequences: bool = False

    def __post_init__(self) -> None:
        if self.microbatch_size < 1:
            raise UsageError(f"a microbatch must have at least one sample, not {self.microbatch_size}")
        if self.tensor < 1 + self.sequences:
            least = "two ranks" if self.sequences else "one rank"
            raise UsageError(f"layers must be sharded over {least} or more, not {self.tensor}")
        if not self.layers:
            raise UsageError("a measurement must have at least one layer")
        for number, kind in enumerate(self.layers):
            if not 0 <= kind < len(self.kinds):
                raise UsageError(
                    f"layer {number} is of kind {kind}, but the measurement has layers of "
                    f"{counted(len(self.kinds), 'kind')}"
                )
        self._check_values()
        for tensor in (*self.shared, *self.shared_buffers):
            self._check_shared(tensor)
        self._check_parts()

    def __repr__(self) -> str:
        """Return one line, without the costs."""
        along = " with sequence parallelism" if self.sequences else ""
        divided = f", each sharded over {self.tensor} ranks{along}" if self.tensor > 1 else ""
        return (
            f"<Measurement: a microbatch of {counted(self.microbatch_size, 'sample')}, "
            f"{counted(len(self.layers), 'layer')} of {counted(len(self.kinds), 'kind')}{divided}>"
        )

    def _check_values(self) -> None:
        """Check that every layer and the loss take at least the number of values that the previous layer
        returns.
        """
        for number, (before, after) in enumerate(pairwise((*self.costs, self.loss))):
            if not before.inputs:
                raise UsageError(f"layer {number} must take at least one input")
            if len(before.outputs) > len(after.inputs):
                taker = "the loss" if number + 1 == len(self.layers) else f"layer {number + 1}"
                raise UsageError(
                    f"layer {number} returns {counted(len(before.outputs), 'value')}, but {taker} takes "
                    f"{len(after.inputs)}"
                )

    def _check_shared(self, tensor: SharedTensor) -> None:
        """Check that the users of a shared parameter or buffer exist, and that planners can add up its
        sizes.
        """
        what, users = f"shared {tensor.what} {tensor.name!r}", tensor.users
        if not 0 <= min(users) <= max(users) < len(self.layers):
            raise UsageError(f"{what} names layers {list(users)}, but there are {len(self.layers)}")
        if not {layer for layer, _, _ in tensor.parts} <= set(users):
            raise UsageError(f"{what} has copies in layers that do not use it: its users are {list(users)}")
        for nbytes in tensor.sizes:
            if not 0 <= nbytes < LARGEST_BYTES:
                raise UsageError(f"{what} has {nbytes} bytes, more than any device has: profile again")

    def _check_parts(self) -> None:
        """Check that every layer's cost includes its shared bytes, because sums over layers subtract them."""
        shared = Counter[tuple[int, str]]()
        for tensor in (*self.shared, *self.shared_buffers):
            for layer, what, nbytes in tensor.parts:
                shared[layer, what] += nbytes
        for (layer, what), nbytes in shared.items():
            if nbytes > (own := getattr(self.kinds[self.layers[layer]], what)):
                raise UsageError(
                    f"layer {layer} shares {nbytes} bytes of its {what} with other layers, but has {own}: "
                    "profile again"
                )

    @property
    def way(self) -> tuple[int, int, bool]:
        """The samples, the tensor-parallel ranks, and whether these also divide positions."""
        return self.microbatch_size, self.tensor, self.sequences

    @property
    def estimated(self) -> bool:
        """True if seconds are estimates, because a pass was not measured."""
        passes = (
            work for cost in (*self.kinds, self.loss) for work in (cost.forward, cost.backward, cost.update)
        )
        return any(work.seconds is None for work in passes)

    def copy_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of half-precision weight copies of layers `start` to `stop - 1` on one device."""
        again = sum(shared.copy_bytes * len(shared.copies_again(start, stop)) for shared in self.shared)
        return sum(cost.copy_bytes for cost in self.costs[start:stop]) - again

    @property
    def loss_dtype(self) -> str:
        """The dtype in which a step keeps its losses: float64 if an output of the loss is, else float32."""
        return "float64" if any(value.dtype == "float64" for value in self.loss.outputs) else "float32"

    @property
    def loss_bytes(self) -> int:
        """The bytes that a step keeps of each microbatch's loss."""
        return {"float32": 4, "float64": 8}[self.loss_dtype]

    @property
    def costs(self) -> tuple[LayerCost, ...]:
        """The cost of every layer, in order."""
        return tuple(self.kinds[kind] for kind in self.layers)

    @property
    def state_bytes(self) -> tuple[int, int, int]:
        """Bytes of the model's parameters, gradients and optimizer state; shared parameters count once."""
        costs, shared = self.costs, [(one, len(one.pairs)) for one in self.shared]
        return (
            sum(cost.parameter_bytes for cost in costs) - sum(one.nbytes * again for one, again in shared),
            sum(cost.gradient_bytes for cost in costs)
            - sum(one.gradient_bytes * again for one, again in shared),
            sum(cost.state_bytes for cost in costs) - sum(one.state_bytes * again for one, again in shared),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """The environment of a profile.

    With another device, processor, thread count or torch release, costs may differ.

    For target `cpu`, `cpu`, `capability` and `processor` identify the processor on which kernels were
    measured.

    Raises:
        UsageError: the number of threads is not from 1 to `MOST_THREADS`.
    """

    target: Target  # the kernels that run, and that autograd's choices follow
    device: str  # fake, or the device of the measured seconds
    precision: Precision  # of most parameters
    optimizer: str
    torch: str
    threads: int
    cpu: str = ""
    capability: str = ""  # the instruction set that torch used, and the environment's setting of it
    processor: str = ""  # a digest of the system's description of the processor

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= MOST_THREADS:
            raise UsageError(f"a worker must have 1 to {MOST_THREADS} threads, not {self.threads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive layers that planners keep on one stage, such as attention and MLP of a transformer block.

    Raises:
        UsageError: no layer.
    """

    name: str
    layers: int
    undivided: str = ""  # modules in it that could not become separate blocks, and why

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise UsageError(f"block {self.name!r} must have at least one layer, not {self.layers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The layers of a model and their costs.

    Planners cut between `blocks`; without blocks, every layer is one. `additive` is present if training runs
    measured it, by block, and `kernels` if the target is `cpu`.

    Raises:
        UsageError: no measurement, a layer named twice, or differing numbers of layers.
    """

    model: str
    fingerprint: Fingerprint  # the model, its data, its loss and its optimizer
    layers: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    assumptions: Assumptions
    additive: AdditiveCosts | None = None
    kernels: KernelMemory = field(default_factory=KernelMemory)
    blocks: tuple[Block, ...] = ()

    def __post_init__(self) -> None:
        if not self.measurements:
            raise UsageError(f"the profile of {self.model!r} lacks measurements")
        for what, names in (("layer", self.layers), ("block", tuple(block.name for block in self.blocks))):
            if len(set(names)) != len(names):
                twice = Counter(names).most_common(1)[0][0]
                raise UsageError(f"the profile of {self.model!r} names {what} {twice!r} more than once")
        way, times = Counter(measurement.way for measurement in self.measurements).most_common(1)[0]
        if times > 1:
            along = " along positions too" if way[2] else ""
            raise UsageError(
                f"the profile of {self.model!r} has {times} measurements of microbatches of "
                f"{counted(way[0], 'sample')} for {counted(way[1], 'rank')}{along}: keep one"
            )
        counts = {
            f"its measurement at size {m.microbatch_size} has": len(m.layers) for m in self.measurements
        }
        if self.blocks:
            counts["its blocks hold"] = self.edges[-1]
        for what, count in counts.items():
            if count != len(self.layers):
                raise UsageError(
                    f"the profile of {self.model!r} names {counted(len(self.layers), 'layer')}, but {what} "
                    f"{count}"
                )
        if self.additive is not None and (measured := len(self.additive.mem_isolated)) != len(
            self.block_names
        ):
            raise UsageError(
                f"the profile of {self.model!r} has {self.parts}, but the training runs measured {measured}"
            )

    def __repr__(self) -> str:
        """Return one line, without the costs."""
        sizes = ", ".join(str(measurement.microbatch_size) for measurement in self.measurements)
        assumptions = self.assumptions
        return (
            f"<ModelProfile: {self.model}, {self.parts}, at microbatches of {sizes}, "
            f"{assumptions.precision}, kernels of {assumptions.target}>"
        )

    @property
    def edges(self) -> tuple[int, ...]:
        """The layers at which a stage may begin, then the number of layers.

        Block b is layers edges[b] to edges[b + 1] - 1.
        """
        sizes = [block.layers for block in self.blocks] if self.blocks else [1] * len(self.layers)
        return (0, *accumulate(sizes))

    @property
    def indivisible(self) -> str:
        """Why the model is a single block, in words; empty if it has several, or if the reason is unknown."""
        return self.blocks[0].undivided if len(self.blocks) == 1 else ""

    @property
    def divides_samples(self) -> bool:
        """True if local batches of some microbatch size were profiled too, so that stages may have
        replicas.
        """
        sizes = {measurement.microbatch_size for measurement in self.measurements}
        return any(size % part == 0 for size in sizes for part in sizes - {size})

    @property
    def coupled(self) -> str:
        """Why replicas would compute other values than whole microbatches give.

        The text is empty if they would not, or if that is unknown. Random draws are not considered.
        """
        return self._first(lambda cost: cost.coupled)

    @property
    def draws(self) -> str:
        """The first layer, or the loss, that draws random numbers, which differ between replicas; or
        empty.
        """
        return self._first(lambda cost: "draws random numbers" if cost.draws else "")

    def _first(self, told: Callable[[LayerCost], str]) -> str:
        """Return the first layer, or the loss, with a nonempty phrase from `told`, and this phrase.

        Returns an empty text if every phrase is empty.
        """
        for measurement in self.measurements:
            reasons = list(map(told, measurement.kinds))
            for layer, kind in enumerate(measurement.layers if any(reasons) else ()):
                if reasons[kind]:
                    return f"layer {self.layers[layer]} {reasons[kind]}"
            if reason := told(measurement.loss):
                return f"the loss {reason}"
        return ""

    @property
    def part(self) -> str:
        """The unit that planners distribute: `block`, or `layer` if every layer is a block."""
        return "block" if self.blocks else "layer"

    @property
    def parts(self) -> str:
        """The number of parts that planners distribute, in words.

        Examples: `14 blocks (158 layers)`, or `14 layers` without blocks.
        """
        layers = counted(len(self.layers), "layer")
        return f"{counted(len(self.blocks), 'block')} ({layers})" if self.blocks else layers

    @property
    def block_names(self) -> tuple[str, ...]:
        """The name of every block."""
        return tuple(block.name for block in self.blocks) if self.blocks else self.layers

    def span(self, start: int, stop: int) -> tuple[str, ...]:
        """Return the names of the blocks of layers `start` to `stop - 1`.

        If the range cuts a block, returns the names of the layers.
        """
        edges = self.edges
        first, last = bisect_left(edges, start), bisect_left(edges, stop)
        return self.block_names[first:last] if {start, stop} <= set(edges) else self.layers[start:stop]

    def named(self, start: int, stop: int) -> str:
        """Format layers `start` to `stop - 1`: `blocks h.0 to h.3`, or `layer fc` if the range cuts a
        block.
        """
        names, part = self.span(start, stop), self.part if {start, stop} <= set(self.edges) else "layer"
        return f"{part}{'s' * (len(names) > 1)} {first_to_last(names)}"

    def at(self, microbatch_size: int, tensor: int = 1, *, sequences: bool = False) -> Measurement:
        """Return the measurement at `microbatch_size` samples for `tensor` ranks.

        With `sequences`, the ranks also divide positions.

        Raises:
            UsageError: this size or number of ranks was not profiled; names the profiled ones.
        """
        for measurement in self.measurements:
            if measurement.way == (microbatch_size, tensor, sequences):
                return measurement
        known = {m.tensor for m in self.measurements if m.microbatch_size == microbatch_size}
        if sequences and tensor in known:
            raise UsageError(
                f"{self.model} was profiled at microbatch size {microbatch_size} for "
                f"{counted(tensor, 'rank')} without sequence parallelism: profile it again with --tensor "
                f"{tensor} --sequences"
            )
        if known:
            raise UsageError(
                f"{self.model} was profiled at microbatch size {microbatch_size} for {_between(known)}, not "
                f"for layers sharded over {counted(tensor, 'rank')}: profile it again with --tensor "
                f"{tensor}"
            )
        sizes = ", ".join(str(size) for size in dict.fromkeys(m.microbatch_size for m in self.measurements))
        raise UsageError(
            f"{self.model} was profiled at microbatch size {sizes}, not {microbatch_size}: profile it again "
            f"with --microbatch-size {microbatch_size}, or choose another batch size or number of "
            "microbatches"
        )


def _between(tensor: Collection[int]) -> str:
    """Format degrees of tensor parallelism: `whole layers and layers divided between 2 and 4 ranks`."""
    ranks = " and ".join(str(degree) for degree in sorted(tensor) if degree > 1)
    return " and ".join(
        ["whole layers"] * (1 in tensor) + [f"layers sharded over {ranks} ranks"] * bool(ranks)
    )
