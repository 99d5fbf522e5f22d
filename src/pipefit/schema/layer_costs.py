"""What one layer costs: values and storages, what it saves, the memory of its passes, and their work.

Outputs and saved tensors of a layer are in *storages*, each of one origin: the layer's own allocation, the storage of
one of its inputs, a parameter or buffer, or a constant. So a storage that two layers hold is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple, NoReturn

from pipefit.errors import UsageError
from pipefit.schema.validation import check_dtype
from pipefit.texts import counted

# ----------------------------------------------------------------------------------------------------
# The work of one pass of a layer: its operations by size, their sums, and seconds where they were measured.
#
# Times of passes that were not measured are estimated operation by operation (`pipefit.timing`), because a
# small one reaches less of a device's peak figures than a large one.

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]


class Alike(NamedTuple):
    """Operations alike: how many, and the floating-point operations and moved bytes of each.

    `dtype` is that of the operands of a product; empty where nothing is multiplied, or where it is not known.
    """

    number: int
    flops: int
    moved_bytes: int
    dtype: str = ""


class Collective(NamedTuple):
    """What the ranks of a tensor-parallel group do together in a pass; `nbytes` are those of the whole tensor."""

    kind: CollectiveKind
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one pass of a layer.

    It is counted in floating-point operations and in bytes that kernels read and write; `operations` are those that
    either is the sum of, empty where the work is known as a whole only. `seconds` are measured, or None. They are
    without the `collectives`, in which the ranks of a tensor-parallel group wait for each other.

    Raises:
        UsageError: a negative number, 1e9 seconds or more, or operations of another sum.
    """

    __pydantic_config__ = {"extra": "forbid"}

    flops: int
    moved_bytes: int
    seconds: float | None = None
    operations: tuple[Alike, ...] = ()
    collectives: tuple[Collective, ...] = ()

    @staticmethod
    def of(operations: Iterable[Alike]) -> Work:
        """The work of these operations."""
        found = tuple(operations)
        flops = sum(alike.number * alike.flops for alike in found)
        return Work(flops=flops, moved_bytes=sum(a.number * a.moved_bytes for a in found), operations=found)

    def __post_init__(self) -> None:
        if self.operations:
            self._check_operations()
        if any(collective.nbytes < 0 for collective in self.collectives):
            raise UsageError("a collective is of zero or more bytes")
        if self.flops < 0 or self.moved_bytes < 0 or (self.seconds is not None and not 0 <= self.seconds < 1e9):
            raise UsageError(
                "work has zero or more FLOPs, bytes moved and seconds, and fewer than 1e9 seconds, not "
                f"{self.flops}, {self.moved_bytes} and {self.seconds}"
            )

    def _check_operations(self) -> None:
        """Check that the operations exist, and that the work is the sum of them."""
        if any(number < 1 or flops < 0 or moved < 0 for number, flops, moved, _ in self.operations):
            raise UsageError("operations alike are one or more, of zero or more FLOPs and bytes moved each")
        for dtype in {alike.dtype for alike in self.operations} - {""}:
            check_dtype(dtype)
        sums = (
            sum(a.number * a.flops for a in self.operations),
            sum(a.number * a.moved_bytes for a in self.operations),
        )
        if sums != (self.flops, self.moved_bytes):
            raise UsageError(
                f"work of {self.flops} FLOPs and {self.moved_bytes} bytes moved is not that of its operations, "
                f"{sums[0]} and {sums[1]}"
            )


# ----------------------------------------------------------------------------------------------------
# Tensors that several layers hold. On one device such a tensor exists once; across devices each has a copy.
#
# Every layer counts them in its own cost, so whoever adds up the costs of several layers subtracts what is
# repeated.


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """A tensor of `nbytes` that several layers hold.

    Raises:
        UsageError: fewer than two users, or users out of order.
    """

    __pydantic_config__ = {"extra": "forbid"}
    what: ClassVar[str] = "tensor"

    name: str
    users: tuple[int, ...]  # layers, rising
    nbytes: int

    def __post_init__(self) -> None:
        if len(self.users) < 2 or list(self.users) != sorted(set(self.users)):
            raise UsageError(
                f"shared {self.what} {self.name!r} needs two or more layers in rising order, not {list(self.users)}"
            )

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Every user with the next one: layers that hold n of these pairs count the tensor n times too often."""
        return tuple(pairwise(self.users))

    @property
    def sizes(self) -> tuple[int, ...]:
        """All of its numbers of bytes."""
        return (self.nbytes,)

    @property
    def parts(self) -> Iterator[tuple[int, str, int]]:
        """What it is in the costs of its users: the layer, the property of its cost, and the bytes in that."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParameter(SharedTensor):
    """One parameter that several layers use, such as a tied embedding.

    Across devices each has a copy, and gradients are summed before the update. Those of the users that are in
    `copying` compute with the half-precision copy that autocast makes of it, which takes `copy_bytes`; those of them in
    `cast_only` with nothing else of it.

    Raises:
        UsageError: fewer than two users, users out of order, or some in `cast_only` that are not in `copying`.
    """

    __pydantic_config__ = {"extra": "forbid"}
    what: ClassVar[str] = "parameter"

    gradient_bytes: int
    state_bytes: int
    early_state_bytes: int = 0  # the part of it that exists before the first step
    copying: tuple[int, ...] = ()  # layers, rising
    copy_bytes: int = 0
    cast_only: tuple[int, ...] = ()  # layers, rising
    form: str = ""  # how tensor-parallel ranks divide it; empty where each has all of it

    def __post_init__(self) -> None:
        SharedTensor.__post_init__(self)
        if not set(self.cast_only) <= set(self.copying):
            raise UsageError(
                f"layers {list(self.cast_only)} read shared parameter {self.name!r} through its half-precision copy "
                f"alone, which only layers {list(self.copying)} have"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """All of its numbers of bytes."""
        return self.nbytes, self.gradient_bytes, self.state_bytes, self.early_state_bytes, self.copy_bytes

    @property
    def parts(self) -> Iterator[tuple[int, str, int]]:
        """As in every shared tensor."""
        for user in self.users:
            yield user, "parameter_bytes", self.nbytes
            yield user, "gradient_bytes", self.gradient_bytes
            yield user, "state_bytes", self.state_bytes
            yield user, "early_state_bytes", self.early_state_bytes
        yield from ((user, "copy_bytes", self.copy_bytes) for user in self.copying)
        yield from ((user, "cast_only_bytes", self.nbytes) for user in self.cast_only)

    def copies_again(self, start: int, stop: int) -> tuple[int, ...]:
        """Of layers `start` to `stop - 1`, those that use a copy which an earlier one of them uses too."""
        return tuple(user for user in self.copying if start <= user < stop)[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuffer(SharedTensor):
    """One buffer, or tensor that is a plain attribute, that several layers hold, such as a mask or a rotary table.

    A recomputed run has one copy of a buffer, and none of a plain attribute, which is not `copied`. No forward changes
    it.

    Raises:
        UsageError: fewer than two users, or users out of order.
    """

    __pydantic_config__ = {"extra": "forbid"}
    what: ClassVar[str] = "buffer"

    copied: bool = True

    @property
    def parts(self) -> Iterator[tuple[int, str, int]]:
        """As in every shared tensor."""
        what = "buffer_bytes" if self.copied else "constant_bytes"
        return ((user, what, self.nbytes) for user in self.users)


# ----------------------------------------------------------------------------------------------------

OriginKind = Literal["own", "input", "parameter", "constant"]
Packing = Literal["bare", "tuple", "list"]
LARGEST_BYTES = 1 << 46  # of one kind in a layer: 64 TiB, of which thousands of layers can be added up in 64 bits
Order = tuple[int, ...]  # of a value's dimensions in memory; empty where it is their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose storage a tensor uses: the layer's `own` number `index`, its `input` number `index`, or neither."""

    __pydantic_config__ = {"extra": "forbid"}

    kind: OriginKind
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that crosses a layer boundary.

    `nbytes` is its size when contiguous, which a transfer moves and a receiver allocates. An `unused` value requires a
    gradient, because it was computed from parameters, and gets none, because the loss does not depend on it.
    """

    __pydantic_config__ = {"extra": "forbid"}

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    requires_grad: bool
    unused: bool = False

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient comes back for it."""
        return self.requires_grad and not self.unused


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One tensor that a layer's forward keeps for its backward."""

    __pydantic_config__ = {"extra": "forbid"}

    index: int  # order in which the forward saved it
    nbytes: int
    dtype: str
    origin: Origin
    shape: tuple[int, ...] = ()
    operation: str = ""  # autograd's, such as `NativeDropout`; empty where unknown
    lasting: bool = False  # kept until the backward of all layers that ran forward with this one has ended
    hidden: bool = False  # never moved: autograd's hooks do not see it, or values decide whether it is kept

    def __post_init__(self) -> None:
        check_dtype(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOrigin:
    """Whose storage an input's gradient uses.

    That is the layer's `own` number `index`, or the storage of the gradient of `output` number `index`, or `none` if
    there is no gradient. A gradient that is a slice of a larger one may not be `contiguous`.
    """

    __pydantic_config__ = {"extra": "forbid"}

    kind: Literal["own", "output", "none"]
    index: int = 0
    contiguous: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a layer, by its name in the layer.

    `copy_bytes` are those of the half-precision copy in which autocast multiplies; 0 for a parameter without one.
    The layer reads a `cast_only` parameter through this copy alone: no operation but the cast needs its float32 values.
    A `changed` one is changed by a forward too, as that of `nn.Embedding(max_norm=...)`.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    trainable: bool
    copy_bytes: int = 0
    cast_only: bool = False
    changed: bool = False

    def __post_init__(self) -> None:
        check_dtype(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of a backward pass, between two releases of inputs.

    `peak_bytes` is its peak above the start of the pass if all inputs were kept; `workspace_bytes` of it are a kernel's
    workspace. `released` are the inputs that the layer has released before, because nothing in it needs them any more.
    If nothing else holds such an input either, the device's peak in this span is lower by its bytes.
    """

    __pydantic_config__ = {"extra": "forbid"}

    peak_bytes: int
    released: tuple[int, ...] = ()
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Everything one kind of layer costs, for one microbatch (update: for one step).

    Peaks are bytes above what was allocated at entry. At the entry of a forward its inputs exist; at the entry of a
    backward what the forward left and the gradients of the outputs exist.

    Raises:
        UsageError: a negative size, an origin or a released input that the layer does not have, or a parameter that is
            read through a copy which it does not have.
    """

    __pydantic_config__ = {"extra": "forbid"}

    module: str  # the class, for people
    parameters: tuple[Parameter, ...]
    buffer_bytes: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    output_origins: tuple[Origin, ...]
    storages: tuple[int, ...]  # bytes of each own storage that outlives the forward
    saved: tuple[SavedTensor, ...]
    forward_peak_bytes: int
    checkpoint_peak_bytes: int  # of a forward that saves nothing
    mutates_inputs: bool  # works in place on what it is given
    fed_back: tuple[str, ...] = ()  # buffers with which it computes and that it changes; a checkpoint keeps copies
    fed_back_bytes: int = 0  # the part of `buffer_bytes` that these are
    unseen: tuple[str, ...] = ()  # tensors that its forward changes where autograd does not see it, as by `x.data`
    backward_first: tuple[Span, ...]  # the step's first microbatch: gradients are born
    backward_later: tuple[Span, ...]  # the others: gradients are added to
    gradient_bytes: int  # parameter gradients left by a backward
    input_gradients: tuple[GradientOrigin, ...]  # where the gradient of each input lives
    gradient_storages: tuple[int, ...]  # bytes of the own storages that these live in
    state_bytes: int  # optimizer state, from the first step on
    early_state_bytes: int  # the part of it that exists before the first step, as Adagrad's does
    update_first_peak_bytes: int
    update_peak_bytes: int
    forward: Work
    backward: Work
    update: Work
    packing: Packing = "bare"  # how it takes inputs (a loss: the outputs); bare is one as itself, several as a tuple
    orders: tuple[Order, ...] = ()  # in which the dimensions of inputs arrive; empty where each is as it was made
    unrepeatable: str = ""  # why no second forward is like the first, such as "counts its calls"; empty if it can be
    coupled: str = (
        ""  # why slices of a microbatch have other numbers in it, such as "normalizes over the batch"; or empty
    )
    draws: bool = False  # whether its forward draws random numbers
    update_left_bytes: int = 0  # of temporaries that are still there as the optimizer goes on to the next layer
    undivided: str = ""  # why its optimizer updates all layers at once, such as "has hooks on its steps"; or empty
    constant_bytes: int = 0  # tensors that are plain attributes, which no recomputation copies
    # How much of each peak one kernel took for itself and gave back before it returned
    forward_workspace_bytes: int = 0
    checkpoint_workspace_bytes: int = 0
    update_first_workspace_bytes: int = 0
    update_workspace_bytes: int = 0
    # Backwards where the next layer is on the same device and hands on gradients that are not dense; else empty
    inner_first: tuple[Span, ...] = ()
    inner_later: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        for what, sizes in self._sizes():
            if min(sizes, default=0) < 0:
                self._refuse(f"has a negative number of bytes as {what}: {min(sizes)}")
            self._check_size(what, sizes)
        self._check_size("backward_peak", [abs(span.peak_bytes) for span in self._spans])
        if len(self.output_origins) != len(self.outputs):
            self._refuse(f"has {counted(len(self.outputs), 'output')}, but origins for {len(self.output_origins)}")
        self._check_origins("storage", (*self.output_origins, *(tensor.origin for tensor in self.saved)), self.storages)
        if len(self.input_gradients) != len(self.inputs):
            self._refuse(f"has {counted(len(self.inputs), 'input')}, but gradients for {len(self.input_gradients)}")
        self._check_origins("gradient storage", self.input_gradients, self.gradient_storages)
        for parameter in self.parameters:
            if parameter.cast_only and not parameter.copy_bytes:
                self._refuse(f"reads {parameter.name!r} through its half-precision copy alone, which has 0 bytes")
        for number in (k for span in self._spans for k in span.released):
            if not 0 <= number < len(self.inputs):
                self._refuse(f"releases input {number} in a backward; it has {counted(len(self.inputs), 'input')}")

    def _sizes(self) -> Iterator[tuple[str, Sequence[int]]]:
        """All numbers of bytes that cannot be negative, by what they are."""
        for each in fields(self):
            if each.name.endswith("_bytes"):
                yield each.name, (getattr(self, each.name),)
        yield "buffers that do not feed back", (self.buffer_bytes - self.fed_back_bytes,)
        yield "storages", self.storages
        yield "gradient_storages", self.gradient_storages
        yield "values", [value.nbytes for value in (*self.inputs, *self.outputs)]
        yield "parameters", [nbytes for one in self.parameters for nbytes in (one.nbytes, one.copy_bytes)]
        yield "saved", [tensor.nbytes for tensor in self.saved]
        yield "workspace", [span.workspace_bytes for span in self._spans]

    def _check_size(self, what: str, sizes: Sequence[int]) -> None:
        """Check that a device may have as much, and planners can add it up over layers."""
        if sum(sizes) >= LARGEST_BYTES:
            self._refuse(f"has {sum(sizes)} bytes as {what}, which no device has: profile again")

    def _check_origins(self, what: str, origins: Sequence[Origin | GradientOrigin], own: Sequence[int]) -> None:
        """Check that every origin is one of the layer's own storages, or of its inputs or outputs."""
        known = {"own": len(own), "input": len(self.inputs), "output": len(self.outputs)}
        for origin in origins:
            if origin.kind in known and not 0 <= origin.index < known[origin.kind]:
                self._refuse(f"names {origin.kind} {what} {origin.index}; it has {known[origin.kind]}")

    def _refuse(self, reason: str) -> NoReturn:
        raise UsageError(f"a layer of class {self.module} {reason}")

    @property
    def _spans(self) -> tuple[Span, ...]:
        return (*self.backward_first, *self.backward_later, *self.inner_first, *self.inner_later)

    def spans(self, *, is_first: bool, inner: bool) -> tuple[Span, ...]:
        """Of a backward: the step's first one, or a later one; `inner` where the next layer is on the same device."""
        usual, arriving = (
            (self.backward_first, self.inner_first) if is_first else (self.backward_later, self.inner_later)
        )
        return arriving if inner and arriving else usual

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, trainable or not."""
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that an update changes."""
        return sum(parameter.nbytes for parameter in self.parameters if parameter.trainable)

    @property
    def changed_parameters(self) -> tuple[Parameter, ...]:
        """The parameters that a forward changes, trainable or not."""
        return tuple(parameter for parameter in self.parameters if parameter.changed)

    @property
    def alone(self) -> str:
        """Why no replicas can hold it: what a forward changes would become another in each; empty if they can."""
        if self.fed_back:
            return f"computes with {', '.join(self.fed_back)} and changes it in every forward"
        return self.unrepeatable

    @property
    def copy_bytes(self) -> int:
        """Bytes of the half-precision copies of its weights."""
        return sum(parameter.copy_bytes for parameter in self.parameters)

    @property
    def cast_only_bytes(self) -> int:
        """Bytes of the parameters that it reads through their half-precision copies alone."""
        return sum(parameter.nbytes for parameter in self.parameters if parameter.cast_only)

    @property
    def version_bytes(self) -> int:
        """Bytes of one version of its weights: the parameters that an update changes, and their copies."""
        return self.trained_bytes + self.copy_bytes

    @property
    def static_bytes(self) -> int:
        """Bytes of what exists as long as the layer does: parameters, their copies, buffers and constants."""
        return self.parameter_bytes + self.copy_bytes + self.buffer_bytes + self.constant_bytes

    @property
    def saved_storages(self) -> tuple[Origin, ...]:
        """The distinct storages, own or of inputs, that the saved tensors hold."""
        return tuple(dict.fromkeys(s.origin for s in self.saved if s.origin.kind in ("own", "input")))

    @property
    def saved_inputs(self) -> tuple[int, ...]:
        """The numbers of the inputs whose storages the saved tensors hold."""
        return tuple(o.index for o in self.saved_storages if o.kind == "input")

    @property
    def least_bytes(self) -> int:
        """Bytes that a device has at least while the layer runs, whatever else is moved away or computed again.

        Those are its weights, or their copies, and what a pass makes; in a backward also the own storages that its
        saved tensors hold. Inputs and gradients of outputs are left out, for they may be views of something smaller.
        """
        weights = sum(one.copy_bytes or one.nbytes for one in self.parameters)
        saved = sum(self.storages[origin.index] for origin in self.saved_storages if origin.kind == "own")
        backwards = (self.spans(is_first=True, inner=inner) for inner in (False, True))
        made = min(max((span.peak_bytes for span in spans), default=0) for spans in backwards)
        return weights + max(min(self.forward_peak_bytes, self.checkpoint_peak_bytes), saved + made)

    @property
    def lasting_storages(self) -> tuple[Origin, ...]:
        """Those of the saved storages that the layer's own backward does not free."""
        lasting = {tensor.origin for tensor in self.saved if tensor.lasting}
        return tuple(origin for origin in self.saved_storages if origin in lasting)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the distinct storages that the saved tensors hold, inputs included."""
        own, inputs = self.storages, self.inputs
        return sum(own[o.index] if o.kind == "own" else inputs[o.index].nbytes for o in self.saved_storages)
