"""A profile: what every layer of a model costs. Planners and simulator know nothing else of the model.

Equal layers share one `LayerCost`, so that a file holds each kind of layer once. Costs are exact for one microbatch
size (a `Measurement`); a profile may hold several.

Layers are fine; planners cut between the `Block`s that they form.
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
from pipefit.schema.kernels import KernelMemory
from pipefit.schema.layer_costs import LARGEST_BYTES, LayerCost, SharedBuffer, SharedParameter, SharedTensor
from pipefit.schema.training import Precision, Training
from pipefit.tables import Shown
from pipefit.texts import counted, first_to_last
from pipefit.units import format_bytes, format_flops

# ----------------------------------------------------------------------------------------------------
# A fingerprint: what the costs of a task depend on, so that a profile or a plan is used for its own task
# alone.
#
# Short texts and digests of the model, its data, its loss and its optimizer. They are equal for the same task
# in every process and on every machine, whether its tensors are real, fake or on the `meta` device, and for
# every microbatch size. Weights, the learning rate and random states are no part of it: no cost depends on
# them. `pipefit.fake_cuda.fingerprint` makes one from a task; `differences` compares two, and says in words what
# differs.

_NAMED = 3  # layers that are named in an error; more are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What the costs of a task depend on. Tuples about layers have one digest for every layer, in the model's order."""

    __pydantic_config__ = {"extra": "forbid"}

    layers: tuple[str, ...]  # name, class, settings or traced operations
    parameters: tuple[str, ...]  # names, shapes, dtypes of parameters and buffers, and which of them are trained
    shared: tuple[str, ...]  # places of every parameter that several layers use, in words
    inputs: tuple[str, ...]  # every leaf of a batch's inputs, in words; shapes are those of one sample
    targets: tuple[str, ...]
    loss: str  # the operations of the loss
    precision: str
    optimizer: str  # its class
    options: tuple[str, ...]  # of the optimizer, in words; numbers as zero or not
    groups: str  # which parameters have options of their own; empty where all are alike
    lengths: tuple[int, ...] = ()  # of the sequences of whole numbers among a sample's inputs, such as its tokens

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits for all of it."""
        return digest(repr(astuple(self)))


def samples(count: int, lengths: Sequence[int]) -> str:
    """So many samples in words, with the lengths of their sequences, if they have any."""
    return f"{counted(count, 'sample')} of {_length(lengths)}" if lengths else str(count)


def digest(text: str, digits: int = 16) -> str:
    """A short text that is the same for the same `text`, everywhere."""
    return sha256(text.encode()).hexdigest()[:digits]


def differences(made: Fingerprint, now: Fingerprint, names: Sequence[str]) -> list[str]:
    """What differs between two tasks, as phrases that continue "it was made for ..."; empty if nothing does.

    A loss is compared only where all else is equal, because it is run on the shapes of what the model returns.

    Args:
        made: of the task that the profile, plan or run was made for.
        now: of the task that it is to be used for.
        names: of the layers of `made`.
    """
    found = [*_layers(made, now, names), *_data(made, now), *_optimizer(made, now)]
    return found or (["another loss"] if made.loss != now.loss else [])


def _layers(made: Fingerprint, now: Fingerprint, names: Sequence[str]) -> Iterator[str]:
    if len(made.layers) != len(now.layers):
        yield f"{counted(len(made.layers), 'layer')}, not {len(now.layers)}"
        return
    tensors = _unlike(names, made.parameters, now.parameters)
    settings = [name for name in _unlike(names, made.layers, now.layers) if name not in tensors]
    if tensors:
        yield f"other parameters or buffers in {_listed(tensors)}"
    if settings:
        yield f"another class, other settings or other operations in {_listed(settings)}"
    if made.shared != now.shared:
        yield f"{_texts('shared parameters', made.shared)}, not {_texts('', now.shared)}"


def _data(made: Fingerprint, now: Fingerprint) -> Iterator[str]:
    if made.lengths != now.lengths:  # the shapes of inputs and targets follow
        yield f"samples of {_length(made.lengths)}, not {_length(now.lengths)}"
    else:
        if made.inputs != now.inputs:
            yield f"{_texts('inputs of', made.inputs)}, not {_texts('', now.inputs)}"
        if made.targets != now.targets:
            yield f"{_texts('targets of', made.targets)}, not {_texts('', now.targets)}"
    if made.precision != now.precision:
        yield f"{made.precision}, not {now.precision}"


def _optimizer(made: Fingerprint, now: Fingerprint) -> Iterator[str]:
    if made.optimizer != now.optimizer:
        yield f"{made.optimizer}, not {now.optimizer}"
    elif made.options != now.options:
        had = [option for option in made.options if option not in now.options]
        has = [option for option in now.options if option not in made.options]
        yield f"{_texts(f'{made.optimizer} with', had)}, not {_texts('', has)}"
    if made.groups != now.groups:
        yield "other parameter groups"


def _unlike(names: Sequence[str], made: Sequence[str], now: Sequence[str]) -> list[str]:
    """Names of the layers, or their numbers where they have none, for which the two differ."""
    unlike = [number for number, (one, other) in enumerate(zip_longest(made, now)) if one != other]
    return [names[number] if number < len(names) else str(number) for number in unlike]


def _listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"layer{'s' * (len(names) > 1)} {', '.join(names[:_NAMED])}{more}"


def _length(lengths: Sequence[int]) -> str:
    """The lengths of a sample's sequences in words."""
    return f"length{'s' * (len(lengths) > 1)} {' and '.join(map(str, lengths))}" if lengths else "no length"


def _texts(what: str, texts: Sequence[str]) -> str:
    return f"{what} {', '.join(texts) or 'none'}".strip()


# ----------------------------------------------------------------------------------------------------
# Peaks as sums of two numbers for each block, measured by training runs: mCAP's predictor. (mCAP, listing
# 1.1.)
#
#     peak of blocks i to j - 1  =  mem_isolated[i] + mem_added[i + 1] + ... + mem_added[j - 1]
#
# mCAP calls a layer what is a block here. Such a prediction ignores a stage's place in the schedule. So it
# suits GPipe, where all stages hold the same number of microbatches. It is best under recomputation, where a
# peak is that of the largest block plus all parameters. A number may be negative, because a block may lower
# the peak of those before it. `pipefit.profiler` measures the numbers; the planners `additive`, `mcap_bf` and
# `mcap_bo` use them.


@dataclass(frozen=True, kw_only=True)
class AdditiveCosts:
    """Two numbers of bytes for every block: its peak alone on a device, and what it adds to the blocks before it.

    They are valid only for the `training` and the `recompute` setting under which they were measured.

    Raises:
        UsageError: the two do not have the same number of blocks, or none.
    """

    __pydantic_config__ = {"extra": "forbid"}

    mem_isolated: tuple[int, ...]
    mem_added: tuple[int, ...]
    training: Training
    recompute: str = "never"

    def __post_init__(self) -> None:
        if len(self.mem_isolated) != len(self.mem_added) or not self.mem_isolated:
            raise UsageError(
                "additive costs are two numbers for every block, not "
                f"{len(self.mem_isolated)} alone and {len(self.mem_added)} added"
            )

    def differences(self, training: Training, recompute: str) -> list[str]:
        """How the settings of these runs differ from `training` and `recompute`, as phrases."""
        found = self.training.differences(training)
        if self.recompute != recompute:
            found.append(f"recompute {self.recompute}, not recompute {recompute}")
        return found

    @cached_property
    def _sums(self) -> tuple[int, ...]:
        return (0, *accumulate(self.mem_added))

    def peak(self, start: int, stop: int) -> int:
        """The estimated peak of blocks `start` to `stop - 1` on one device, in bytes.

        Raises:
            UsageError: no such blocks.
        """
        if not 0 <= start < stop <= len(self.mem_isolated):
            raise UsageError(f"blocks {start} to {stop - 1} are no stage of {counted(len(self.mem_isolated), 'block')}")
        return self.mem_isolated[start] + self._sums[stop] - self._sums[start + 1]

    def __call__(self, stage: int, start: int, stop: int) -> int:
        """The estimated peak, whatever the stage's place."""
        return self.peak(start, stop)


# ----------------------------------------------------------------------------------------------------
# What share of a model the ranks of a tensor-parallel group divide, and what keeps the rest whole: data and
# text.


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """An operation that every rank does whole: its layer, operator, parameters, operations, and why."""

    __pydantic_config__ = {"extra": "forbid"}

    layer: str
    operator: str
    parameter_bytes: int
    flops: int
    reason: str

    def told(self, layers: Sequence[str]) -> str:
        """In words: this operation of one of `layers`, and those like it of the others."""
        figures = f"{format_bytes(self.parameter_bytes)} of parameters, {format_flops(self.flops)}"
        where, all_of_them = ", ".join(dict.fromkeys(layers)), f"{len(layers)} of these, each "
        return f"  whole: {self.operator} of {where} ({all_of_them if len(layers) > 1 else ''}{figures}): {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Parameters and operations of a model or stage, and those of them that `ranks` divide.

    `whole` has what stays whole, the largest of it, largest first.
    """

    __pydantic_config__ = {"extra": "forbid"}

    ranks: int
    parameter_bytes: int
    divided_bytes: int
    rank_bytes: int  # what one rank has
    flops: int
    divided_flops: int
    whole: tuple[Whole, ...]

    @property
    def divides_nothing(self) -> bool:
        """Whether every rank has all parameters and does all operations."""
        return not self.divided_bytes and not self.divided_flops

    @property
    def of_bytes(self) -> float:
        """The share of the bytes of parameters that is divided."""
        return self.divided_bytes / self.parameter_bytes if self.parameter_bytes else 0.0

    @property
    def of_flops(self) -> float:
        """The share of the operations of products, convolutions and attention that is divided."""
        return self.divided_flops / self.flops if self.flops else 0.0

    @property
    def sentence(self) -> str:
        """What is divided, without a full stop."""
        return (
            f"{self.ranks} ranks divide {_percent(self.divided_bytes, self.parameter_bytes)} of "
            f"{format_bytes(self.parameter_bytes)} of parameters ({format_bytes(self.rank_bytes)} each) and "
            f"{_percent(self.divided_flops, self.flops)} of the operations"
        )

    def __str__(self) -> str:
        alike = dict[Whole, list[str]]()
        for one in self.whole:
            alike.setdefault(replace(one, layer=""), []).append(one.layer)
        return "\n".join([self.sentence, *(one.told(layers) for one, layers in alike.items())])


def _percent(part: int, whole: int) -> str:
    """The part in percent, rounded down, so that `100.0 %` is all of it."""
    return f"{1000 * part // (whole or 1) / 10:.1f} %"


# ----------------------------------------------------------------------------------------------------

Target = Literal["cpu", "cuda"]

MOST_THREADS = 1024  # of a worker; OpenMP ends a process that asks for more than the system has


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Shown):
    """The costs of all layers at one microbatch size. The cost of layer i is `kinds[layers[i]]`.

    `sizes` is a digest of the whole numbers in traced operations and in the loss, which depend on the microbatch size.
    Layers may be divided between `tensor` ranks, by `sequences` along positions too: then costs are those of one rank,
    `shares` says what the ranks divide, and `forms` is a digest of how, which is equal where ranks agree.

    Raises:
        UsageError: a layer of an unknown kind, values that the next layer does not take, or an unknown user of a shared
            parameter or buffer.
    """

    __pydantic_config__ = {"extra": "forbid"}

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
            raise UsageError(f"a microbatch has at least one sample, not {self.microbatch_size}")
        if self.tensor < 1 + self.sequences:
            least = "two ranks" if self.sequences else "one rank"
            raise UsageError(f"layers are divided between {least} or more, not {self.tensor}")
        if not self.layers:
            raise UsageError("a measurement needs at least one layer")
        for number, kind in enumerate(self.layers):
            if not 0 <= kind < len(self.kinds):
                raise UsageError(
                    f"layer {number} is of kind {kind}, and there are layers of {counted(len(self.kinds), 'kind')}"
                )
        self._check_values()
        for tensor in (*self.shared, *self.shared_buffers):
            self._check_shared(tensor)
        self._check_parts()

    def __repr__(self) -> str:
        """A line: what all layers cost would be thousands."""
        along = " with sequence parallelism" if self.sequences else ""
        divided = f", each divided between {self.tensor} ranks{along}" if self.tensor > 1 else ""
        return (
            f"<Measurement: a microbatch of {counted(self.microbatch_size, 'sample')}, "
            f"{counted(len(self.layers), 'layer')} of {counted(len(self.kinds), 'kind')}{divided}>"
        )

    def _check_values(self) -> None:
        """Check that every layer and the loss take at least what the layer before returns."""
        for number, (before, after) in enumerate(pairwise((*self.costs, self.loss))):
            if not before.inputs:
                raise UsageError(f"layer {number} takes no inputs: each takes at least one")
            if len(before.outputs) > len(after.inputs):
                taker = "the loss" if number + 1 == len(self.layers) else f"layer {number + 1}"
                raise UsageError(
                    f"layer {number} returns {counted(len(before.outputs), 'value')}, but {taker} takes "
                    f"{len(after.inputs)}"
                )

    def _check_shared(self, tensor: SharedTensor) -> None:
        """Check that a parameter or buffer is shared by layers that exist, and that planners can add up its sizes."""
        what, users = f"shared {tensor.what} {tensor.name!r}", tensor.users
        if not 0 <= min(users) <= max(users) < len(self.layers):
            raise UsageError(f"{what} names layers {list(users)}; there are {len(self.layers)}")
        if not {layer for layer, _, _ in tensor.parts} <= set(users):
            raise UsageError(f"{what} is copied in layers that do not use it: its users are {list(users)}")
        for nbytes in tensor.sizes:
            if not 0 <= nbytes < LARGEST_BYTES:
                raise UsageError(f"{what} has {nbytes} bytes, which no device has: profile again")

    def _check_parts(self) -> None:
        """Check that every layer has at least what it shares, for that is subtracted where it is there already."""
        shared = Counter[tuple[int, str]]()
        for tensor in (*self.shared, *self.shared_buffers):
            for layer, what, nbytes in tensor.parts:
                shared[layer, what] += nbytes
        for (layer, what), nbytes in shared.items():
            if nbytes > (own := getattr(self.kinds[self.layers[layer]], what)):
                raise UsageError(
                    f"layer {layer} shares {nbytes} bytes of its {what} with other layers, and has {own}: profile again"
                )

    @property
    def way(self) -> tuple[int, int, bool]:
        """What it is of: so many samples, ranks, and whether these divide positions too."""
        return self.microbatch_size, self.tensor, self.sequences

    @property
    def estimated(self) -> bool:
        """Whether seconds are estimates, because those of some pass were not measured."""
        passes = (work for cost in (*self.kinds, self.loss) for work in (cost.forward, cost.backward, cost.update))
        return any(work.seconds is None for work in passes)

    def copy_bytes(self, start: int, stop: int) -> int:
        """Half-precision copies of the weights of layers `start` to `stop - 1`, on one device."""
        again = sum(one.copy_bytes * len(one.copies_again(start, stop)) for one in self.shared)
        return sum(cost.copy_bytes for cost in self.costs[start:stop]) - again

    @property
    def loss_dtype(self) -> str:
        """In which a step keeps the losses of its microbatches: float64 where they are, and float32 otherwise."""
        return "float64" if any(value.dtype == "float64" for value in self.loss.outputs) else "float32"

    @property
    def loss_bytes(self) -> int:
        """What a step keeps of each microbatch's loss."""
        return {"float32": 4, "float64": 8}[self.loss_dtype]

    @property
    def costs(self) -> tuple[LayerCost, ...]:
        """The cost of every layer, in order."""
        return tuple(self.kinds[kind] for kind in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What a profile holds for: with another device, processor, thread count or torch release, costs may differ.

    For the target `cpu`, `cpu`, `capability` and `processor` say on which processor the kernels were measured.

    Raises:
        UsageError: no thread.
    """

    __pydantic_config__ = {"extra": "forbid"}

    target: Target  # whose kernels autograd's choices follow
    device: str  # fake, or the device the seconds were measured on
    precision: Precision  # of most parameters
    optimizer: str
    torch: str
    threads: int
    cpu: str = ""
    capability: str = ""  # the instructions that torch used, and what the environment said of them
    processor: str = ""  # a digest of all that the system says about the processor

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= MOST_THREADS:
            raise UsageError(f"a worker has from 1 to {MOST_THREADS} threads, not {self.threads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """So many consecutive layers that planners keep on one stage, such as attention and MLP of a transformer block.

    Raises:
        UsageError: no layer.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    layers: int
    undivided: str = ""  # which modules in it could not be made blocks of their own, and why

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise UsageError(f"block {self.name!r} needs at least one layer, not {self.layers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile(Shown):
    """A model's layers and what they cost.

    A planner cuts between `blocks`; where there are none given, every layer is a block of its own. `additive` is there
    if training runs measured it, by block, and `kernels` if the target is `cpu`.

    Raises:
        UsageError: no measurement, a layer named twice, or not as many layers everywhere.
    """

    __pydantic_config__ = {"extra": "forbid"}

    model: str
    fingerprint: Fingerprint  # what the costs depend on: the model, its data, its loss and its optimizer
    layers: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    assumptions: Assumptions
    additive: AdditiveCosts | None = None
    kernels: KernelMemory = field(default_factory=KernelMemory)
    blocks: tuple[Block, ...] = ()

    def __post_init__(self) -> None:
        if not self.measurements:
            raise UsageError(f"the profile of {self.model!r} holds no measurement")
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
        counts = {f"its measurement at size {m.microbatch_size} has": len(m.layers) for m in self.measurements}
        if self.blocks:
            counts["its blocks hold"] = self.edges[-1]
        for what, count in counts.items():
            if count != len(self.layers):
                raise UsageError(
                    f"the profile of {self.model!r} names {counted(len(self.layers), 'layer')}, but {what} {count}"
                )
        if self.additive is not None and (measured := len(self.additive.mem_isolated)) != len(self.block_names):
            raise UsageError(
                f"the profile of {self.model!r} has {self.parts}, but the training runs measured {measured}"
            )

    def __repr__(self) -> str:
        """A line: what all layers cost would be thousands."""
        sizes = ", ".join(str(measurement.microbatch_size) for measurement in self.measurements)
        made = self.assumptions
        return (
            f"<ModelProfile: {self.model}, {self.parts}, at microbatches of {sizes}, {made.precision}, kernels of "
            f"{made.target}>"
        )

    @property
    def edges(self) -> tuple[int, ...]:
        """The layers before which a stage may begin, and the number of layers: block b is edges[b] to edges[b + 1]."""
        sizes = [block.layers for block in self.blocks] if self.blocks else [1] * len(self.layers)
        return (0, *accumulate(sizes))

    @property
    def indivisible(self) -> str:
        """Why the model is one block, in words; empty where there are several, or no reason is known."""
        return self.blocks[0].undivided if len(self.blocks) == 1 else ""

    @property
    def divides_samples(self) -> bool:
        """Whether it has slices of some of its microbatches, so that stages may have replicas."""
        sizes = {one.microbatch_size for one in self.measurements}
        return any(size % part == 0 for size in sizes for part in sizes - {size})

    @property
    def coupled(self) -> str:
        """Why replicas, which compute slices, would have other numbers than whole microbatches; empty if they have not,
        or it is not known. Random draws are left out.
        """
        return self._first(lambda cost: cost.coupled)

    @property
    def draws(self) -> str:
        """What draws random numbers, and replicas each their own; or empty."""
        return self._first(lambda cost: "draws random numbers" if cost.draws else "")

    def _first(self, told: Callable[[LayerCost], str]) -> str:
        """What is told of the first layer of which anything is, or of the loss, with its name."""
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
        """What planners distribute, in a word: `block`, or `layer` where every layer is a block of its own."""
        return "block" if self.blocks else "layer"

    @property
    def parts(self) -> str:
        """How many parts planners distribute, in words: `14 blocks (158 layers)`, or `14 layers` without blocks."""
        layers = counted(len(self.layers), "layer")
        return f"{counted(len(self.blocks), 'block')} ({layers})" if self.blocks else layers

    @property
    def block_names(self) -> tuple[str, ...]:
        """The name of every block."""
        return tuple(block.name for block in self.blocks) if self.blocks else self.layers

    def span(self, start: int, stop: int) -> tuple[str, ...]:
        """The names of the blocks that layers `start` to `stop - 1` are; of the layers, where these end within one."""
        edges = self.edges
        first, last = bisect_left(edges, start), bisect_left(edges, stop)
        return self.block_names[first:last] if {start, stop} <= set(edges) else self.layers[start:stop]

    def named(self, start: int, stop: int) -> str:
        """Layers `start` to `stop - 1` in words: `blocks h.0 to h.3`, or `layer fc` where they are no whole blocks."""
        names, part = self.span(start, stop), self.part if {start, stop} <= set(self.edges) else "layer"
        return f"{part}{'s' * (len(names) > 1)} {first_to_last(names)}"

    def at(self, microbatch_size: int, tensor: int = 1, *, sequences: bool = False) -> Measurement:
        """The measurement at `microbatch_size` samples, of layers that are divided between `tensor` ranks; by
        `sequences` along positions too.

        Raises:
            UsageError: this size or number of ranks was not profiled; says which were.
        """
        for measurement in self.measurements:
            if measurement.way == (microbatch_size, tensor, sequences):
                return measurement
        known = {m.tensor for m in self.measurements if m.microbatch_size == microbatch_size}
        if sequences and tensor in known:
            raise UsageError(
                f"{self.model} was profiled at microbatch size {microbatch_size} for {counted(tensor, 'rank')} without "
                f"sequence parallelism: profile it again with --tensor {tensor} --sequences"
            )
        if known:
            raise UsageError(
                f"{self.model} was profiled at microbatch size {microbatch_size} for {_between(known)}, not for layers "
                f"divided between {counted(tensor, 'rank')}: profile it again with --tensor {tensor}"
            )
        sizes = ", ".join(str(size) for size in dict.fromkeys(m.microbatch_size for m in self.measurements))
        raise UsageError(
            f"{self.model} was profiled at microbatch size {sizes}, not {microbatch_size}: "
            f"profile it again with --microbatch-size {microbatch_size}, or choose another batch size or number of "
            "microbatches"
        )


def _between(tensor: Collection[int]) -> str:
    """In words, how layers are divided at these degrees: `whole layers and layers divided between 2 and 4 ranks`."""
    ranks = " and ".join(str(degree) for degree in sorted(tensor) if degree > 1)
    return " and ".join(["whole layers"] * (1 in tensor) + [f"layers divided between {ranks} ranks"] * bool(ranks))
