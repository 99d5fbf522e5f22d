"""The costs of one layer: values, storages, saved tensors, the memory of its passes, and their work.

Outputs and saved tensors of a layer are in *storages*, each of one origin: the layer's own allocation, the
storage of one of its inputs, a parameter or buffer, or a constant. So a storage that two layers hold is
counted once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import prod
from typing import ClassVar, Literal, NamedTuple, NoReturn

from pipefit.errors import UsageError
from pipefit.schema.validation import check_dtype, itemsize
from pipefit.texts import counted

# ---- Measured memory inside CPU kernel calls.
#
# A running kernel may hold more than its results: packed operands, scratch, copies in another layout. Its
# results may also have another memory layout than torch's shape rules predict. Both depend on the processor
# and on the release of torch, so `measure.kernels` measures them once for each operation, on the target
# machine. The key is the text of the operation: its name, and the dtypes, shapes and strides of its
# arguments.


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The memory layout of a kernel's result. Offsets are in elements of `dtype`, `storage_bytes` in bytes.

    Results of one call with the same `storage` share it.

    Raises:
        UsageError: strides do not match the dimensions, a negative number, or an unknown dtype.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: int
    storage_bytes: int
    dtype: str  # such as float32

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if min(self.offset, self.storage, self.storage_bytes, 0) < 0 or len(self.shape) != len(self.strides):
            raise UsageError(
                "a result needs one stride for each dimension and a non-negative place and size, not "
                f"{counted(len(self.strides), 'stride')} for {counted(len(self.shape), 'dimension')}, "
                f"offset {self.offset}, storage {self.storage} and {self.storage_bytes} bytes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The peak memory of one operation, results included, above the memory held before it.

    If it could not be measured, `peak_bytes` is None and `reason` says why; then only its results are
    counted. Results whose shape depends on values are not part of the peak, and have no layouts.

    Raises:
        UsageError: a negative peak, or neither a peak nor a reason.
    """

    operation: str  # such as aten.mm.default(float32[4x8], float32[8x2 by 1,8])
    peak_bytes: int | None
    results: tuple[Layout | None, ...] = ()  # None if a result is not a tensor, or is one of the arguments
    reason: str = ""

    def __post_init__(self) -> None:
        if self.peak_bytes is not None and self.peak_bytes < 0:
            raise UsageError(f"{self.operation} cannot take {self.peak_bytes} bytes")
        if (self.peak_bytes is None) != bool(self.reason):
            raise UsageError(f"{self.operation} needs either bytes, or a reason why they are unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMemory:
    """The measured memory of a model's kernels, operation by operation."""

    kernels: tuple[Kernel, ...] = ()

    @property
    def unknown(self) -> tuple[Kernel, ...]:
        """Kernels that could not be measured; every peak lacks their memory except for their results."""
        return tuple(kernel for kernel in self.kernels if kernel.peak_bytes is None)

    @property
    def gap(self) -> str:
        """The kernel memory that every peak lacks, as a phrase; empty if all operations were measured."""
        if not self.unknown:
            return ""
        first, others = self.unknown[0], len(self.unknown) - 1
        more = f" and {counted(others, 'other')}" if others else ""
        return (
            f"peaks do not include the memory that kernels need inside {first.operation}{more}: "
            f"{first.reason}"
        )


# ---- Work of a pass: operations by size, their sums, and measured seconds
#
# Unmeasured times are estimated operation by operation (`timing`), because a small operation reaches less of
# a device's peak figures than a large one.

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]

# Kernels that reach another rate than matrix products: fused attention, convolutions, those for which
# Winograd's transform exists, depthwise ones, and conversions of activations to channels last, which only
# tensor cores need
Family = Literal["", "attention", "convolution", "winograd", "depthwise", "layout"]


class Alike(NamedTuple):
    """`number` identical operations, with the floating-point operations and moved bytes of each.

    `dtype` is that of the first floating-point operand; empty if there is none, or if unknown. `family` is
    that of its kernel. `product` is the size of a matrix product: matrices, rows and columns of each result,
    and terms of each sum; empty for other operations.
    """

    number: int
    flops: int
    moved_bytes: int
    dtype: str = ""
    family: Family = ""
    product: tuple[int, ...] = ()


class Collective(NamedTuple):
    """A collective of the tensor-parallel ranks in a pass; `nbytes` is the size of the whole tensor."""

    kind: CollectiveKind
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one pass of a layer.

    It is counted in floating-point operations and in bytes that kernels read and write, both summed over
    `operations`, which are empty if only the sums are known. `seconds` are measured, or None; they exclude
    the `collectives`, in which tensor-parallel ranks wait for each other.

    Raises:
        UsageError: a negative number, 1e9 seconds or more, or operations with another sum.
    """

    flops: int
    moved_bytes: int
    seconds: float | None = None
    operations: tuple[Alike, ...] = ()
    collectives: tuple[Collective, ...] = ()

    @staticmethod
    def of(operations: Iterable[Alike]) -> Work:
        """Return the work of these operations."""
        result = tuple(operations)
        flops = sum(alike.number * alike.flops for alike in result)
        return Work(flops=flops, moved_bytes=sum(a.number * a.moved_bytes for a in result), operations=result)

    def __post_init__(self) -> None:
        if self.operations:
            self._check_operations()
        if any(collective.nbytes < 0 for collective in self.collectives):
            raise UsageError("a collective must have zero or more bytes")
        if (
            self.flops < 0
            or self.moved_bytes < 0
            or (self.seconds is not None and not 0 <= self.seconds < 1e9)
        ):
            raise UsageError(
                "work must have non-negative FLOPs, bytes moved and seconds, and less than 1e9 seconds, "
                f"not {self.flops}, {self.moved_bytes} and {self.seconds}"
            )

    def _check_operations(self) -> None:
        """Check that the operations are valid, and that the work is their sum."""
        if any(number < 1 or flops < 0 or moved < 0 for number, flops, moved, *_ in self.operations):
            raise UsageError(
                "a group of equal operations must have one or more, each with non-negative "
                "FLOPs and bytes moved"
            )
        if any(
            each.product and (len(each.product) != 4 or min(each.product) < 1) for each in self.operations
        ):
            raise UsageError("a matrix product has matrices, rows, columns and terms, one or more of each")
        for dtype in {alike.dtype for alike in self.operations} - {""}:
            check_dtype(dtype)
        sums = (
            sum(a.number * a.flops for a in self.operations),
            sum(a.number * a.moved_bytes for a in self.operations),
        )
        if sums != (self.flops, self.moved_bytes):
            raise UsageError(
                f"work of {self.flops} FLOPs and {self.moved_bytes} bytes moved differs from the sums over "
                f"its operations, {sums[0]} and {sums[1]}"
            )


# ---- Tensors that several layers hold
#
# On one device such a tensor exists once; across devices each has a copy. Every layer counts it in its own
# cost, so sums over layers subtract the repeated bytes.


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """A tensor of `nbytes` that several layers hold.

    Raises:
        UsageError: fewer than two users, or users out of order.
    """

    what: ClassVar[str] = "tensor"

    name: str
    users: tuple[int, ...]  # layers, rising
    nbytes: int

    def __post_init__(self) -> None:
        if len(self.users) < 2 or list(self.users) != sorted(set(self.users)):
            raise UsageError(
                f"shared {self.what} {self.name!r} needs two or more layers in rising order, not "
                f"{list(self.users)}"
            )

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Consecutive users: layers that contain n of these pairs count the tensor n times too often."""
        return tuple(pairwise(self.users))

    @property
    def sizes(self) -> tuple[int, ...]:
        """All byte counts of the tensor."""
        return (self.nbytes,)

    @property
    def parts(self) -> Iterator[tuple[int, str, int]]:
        """The tensor's contributions to its users' costs: the layer, the property of its cost, and the
        bytes.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParameter(SharedTensor):
    """One parameter that several layers use, such as a tied embedding.

    Across devices each has a copy, and gradients are all-reduced before the update. Users in `copying`
    compute with its half-precision autocast copy, of `copy_bytes`; users in `cast_only` read only this copy.

    Raises:
        UsageError: fewer than two users, users out of order, or some in `cast_only` that are not in
            `copying`.
    """

    what: ClassVar[str] = "parameter"

    gradient_bytes: int
    state_bytes: int
    early_state_bytes: int = 0  # the part that exists before the first step
    copying: tuple[int, ...] = ()  # layers, rising
    copy_bytes: int = 0
    cast_only: tuple[int, ...] = ()  # layers, rising
    form: str = ""  # the division between tensor-parallel ranks; empty if each has all of it

    def __post_init__(self) -> None:
        SharedTensor.__post_init__(self)
        if not set(self.cast_only) <= set(self.copying):
            raise UsageError(
                f"layers {list(self.cast_only)} read shared parameter {self.name!r} only through its "
                f"half-precision copy, which only layers {list(self.copying)} have"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """All byte counts of the parameter."""
        return self.nbytes, self.gradient_bytes, self.state_bytes, self.early_state_bytes, self.copy_bytes

    @property
    def parts(self) -> Iterator[tuple[int, str, int]]:
        """The parameter's contributions to its users' costs."""
        for user in self.users:
            yield user, "parameter_bytes", self.nbytes
            yield user, "gradient_bytes", self.gradient_bytes
            yield user, "state_bytes", self.state_bytes
            yield user, "early_state_bytes", self.early_state_bytes
        yield from ((user, "copy_bytes", self.copy_bytes) for user in self.copying)
        yield from ((user, "cast_only_bytes", self.nbytes) for user in self.cast_only)

    def copies_again(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the users in layers `start` to `stop - 1` that share a copy with an earlier one."""
        return tuple(user for user in self.copying if start <= user < stop)[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuffer(SharedTensor):
    """One buffer, or tensor in a plain attribute, that several layers hold, such as a mask or a rotary table.

    A recomputed run has one copy of a buffer, and none of a plain attribute, which is not `copied`. No
    forward changes it.

    Raises:
        UsageError: fewer than two users, or users out of order.
    """

    what: ClassVar[str] = "buffer"

    copied: bool = True

    @property
    def parts(self) -> Iterator[tuple[int, str, int]]:
        """The buffer's contributions to its users' costs."""
        what = "buffer_bytes" if self.copied else "constant_bytes"
        return ((user, what, self.nbytes) for user in self.users)


def lenders(shared: Iterable[SharedParameter], start: int, stop: int) -> dict[int, frozenset[int]]:
    """Return, by layer of a stage, the earlier layers to which a parameter that it uses belongs, or its
    half-precision copy. The stage has layers `start` to `stop - 1`.
    """
    result = defaultdict[int, set[int]](set)
    for one in shared:
        for users in (one.users, one.copying):
            here = [user for user in users if start <= user < stop]
            for user in here[1:]:
                result[user].add(here[0])
    return {layer: frozenset(others) for layer, others in result.items()}


# ----------------------------------------------------------------------------------------------------

OriginKind = Literal["own", "input", "parameter", "constant"]
Packing = Literal["bare", "tuple", "list"]
LARGEST_BYTES = 1 << 46  # limit of one kind in a layer: 64 TiB; sums over thousands of layers fit in 64 bits
Order = tuple[int, ...]  # order of a value's dimensions in memory; empty for the usual order


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The storage of a tensor: the layer's `own` number `index`, its `input` number `index`, or neither."""

    kind: OriginKind
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that crosses a layer boundary.

    `nbytes` is its size when contiguous, which a transfer moves and a receiver allocates. An `unused` value
    requires a gradient, because it was computed from parameters, but gets none, because the loss does not
    depend on it.

    Raises:
        UsageError: the dtype is unknown, does not give the shape this size, or has no gradients.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    requires_grad: bool
    unused: bool = False

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if self.nbytes != prod(self.shape) * itemsize(self.dtype) or (
            self.requires_grad and not self.dtype.lstrip("b").startswith(("float", "complex"))
        ):
            gradient = "requires" if self.requires_grad else "does not require"
            raise UsageError(
                f"no tensor of shape {self.shape} and dtype {self.dtype} has {self.nbytes} bytes and "
                f"{gradient} a gradient"
            )

    @property
    def has_gradient(self) -> bool:
        """True if the value receives a gradient."""
        return self.requires_grad and not self.unused


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One tensor that a layer's forward keeps for its backward."""

    index: int  # order in which the forward saved it
    nbytes: int
    dtype: str
    origin: Origin
    shape: tuple[int, ...] = ()
    operation: str = ""  # autograd's name, such as `NativeDropout`; empty if unknown
    lasting: bool = False  # kept until the backward of all layers that ran forward with this one has ended
    hidden: bool = False  # never moved: autograd's hooks do not see it, or values decide whether it is kept

    def __post_init__(self) -> None:
        check_dtype(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOrigin:
    """The storage of an input's gradient.

    Kind `own`: the layer's gradient storage number `index`. Kind `output`: the storage of the gradient of
    output number `index`. Kind `none`: no gradient. A gradient that is a view of a part of a larger one may
    not be `contiguous`.
    """

    kind: Literal["own", "output", "none"]
    index: int = 0
    contiguous: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a layer, by its name in the layer.

    `copy_bytes` is the size of the half-precision copy in which autocast multiplies; 0 without a copy. The
    layer reads a `cast_only` parameter through this copy alone: no operation but the cast needs its float32
    values. A forward also modifies a `changed` parameter, such as that of `nn.Embedding(max_norm=...)`.
    """

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

    `peak_bytes` is the span's peak above the start of the pass if all inputs were kept; `workspace_bytes` of
    it are a kernel's workspace. `released` are the inputs that the layer has released before this span,
    because nothing in the layer needs them any more. If nothing outside the layer holds such an input either,
    the device's peak in this span is lower by its bytes.

    The pass has freed `used_bytes` of gradients of outputs and `returned_bytes` of outputs before this span,
    which torch's engine may keep.
    """

    peak_bytes: int
    released: tuple[int, ...] = ()
    workspace_bytes: int = 0
    used_bytes: int = 0
    returned_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        """The peak if outputs and their gradients were kept, too."""
        return self.peak_bytes + self.used_bytes + self.returned_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The costs of one kind of layer, for one microbatch (update: for one step).

    Peaks are bytes above the memory allocated at entry. At the entry of a forward, its inputs exist; at the
    entry of a backward, the results of the forward and the gradients of the outputs exist.

    Raises:
        UsageError: a negative size, an origin or a released input that the layer does not have, or a
            parameter that is read
        through a missing copy.
    """

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
    mutates_inputs: bool  # modifies its inputs in place
    fed_back: tuple[str, ...] = ()  # buffers that its forward reads and changes; a checkpoint keeps copies
    fed_back_bytes: int = 0  # their part of `buffer_bytes`
    unseen: tuple[str, ...] = ()  # tensors that its forward changes without autograd's notice, as by `x.data`
    backward_first: tuple[Span, ...]  # the step's first microbatch: allocates gradients
    backward_later: tuple[Span, ...]  # later microbatches: accumulate gradients
    gradient_bytes: int  # parameter gradients left by a backward
    input_gradients: tuple[GradientOrigin, ...]  # storage of each input's gradient
    gradient_storages: tuple[int, ...]  # bytes of the own storages of these gradients
    state_bytes: int  # optimizer state, from the first step on
    early_state_bytes: int  # the part that exists before the first step, as Adagrad's does
    update_first_peak_bytes: int
    update_peak_bytes: int
    forward: Work
    backward: Work
    update: Work
    packing: Packing = "bare"  # form of its inputs (loss: outputs); bare: one as a value, several as a tuple
    orders: tuple[Order, ...] = ()  # memory order of the inputs' dimensions; empty if as computed
    unrepeatable: str = ""  # why a second forward would differ, such as "counts its calls"; or empty
    coupled: str = (
        ""  # why local batches would compute other values, such as "normalizes over the batch"; or empty
    )
    draws: bool = False  # whether its forward draws random numbers
    update_left_bytes: int = 0  # temporaries that remain while the optimizer updates the next layer
    undivided: str = (
        ""  # why its optimizer updates all layers at once, such as "has hooks on its steps"; or empty
    )
    constant_bytes: int = 0  # tensors in plain attributes, which recomputation does not copy
    # Kernel workspace within each peak: memory that a kernel allocates for itself and frees before it returns
    forward_workspace_bytes: int = 0
    checkpoint_workspace_bytes: int = 0
    update_first_workspace_bytes: int = 0
    update_workspace_bytes: int = 0
    # Backwards if the next layer is on the same device and passes on gradients that are not dense; else empty
    inner_first: tuple[Span, ...] = ()
    inner_later: tuple[Span, ...] = ()
    # On torch's engine: backwards, whose outputs and gradients of these may be kept (empty if as usual), and
    # forwards that a recomputation ends when all tensors are saved; None if unknown, as in older profiles
    buffered_first: tuple[Span, ...] | None = None
    buffered_later: tuple[Span, ...] | None = None
    stopped_peak_bytes: int | None = None

    def __post_init__(self) -> None:
        for what, sizes in self._sizes():
            if min(sizes, default=0) < 0:
                self._refuse(f"has a negative number of bytes as {what}: {min(sizes)}")
            self._check_size(what, sizes)
        self._check_size("backward_peak", [abs(span.peak_bytes) for span in self._spans])
        if len(self.output_origins) != len(self.outputs):
            self._refuse(
                f"has {counted(len(self.outputs), 'output')}, but origins for {len(self.output_origins)}"
            )
        self._check_origins(
            "storage", (*self.output_origins, *(tensor.origin for tensor in self.saved)), self.storages
        )
        if len(self.input_gradients) != len(self.inputs):
            self._refuse(
                f"has {counted(len(self.inputs), 'input')}, but gradients for {len(self.input_gradients)}"
            )
        self._check_origins("gradient storage", self.input_gradients, self.gradient_storages)
        for parameter in self.parameters:
            if parameter.cast_only and not parameter.copy_bytes:
                self._refuse(
                    f"reads {parameter.name!r} only through its half-precision copy, which has 0 bytes"
                )
        for number in (k for span in self._spans for k in span.released):
            if not 0 <= number < len(self.inputs):
                self._refuse(
                    f"releases input {number} in a backward, but has only "
                    f"{counted(len(self.inputs), 'input')}"
                )

    def _sizes(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield all byte counts that cannot be negative, by name."""
        for each in fields(self):
            if each.name.endswith("_bytes"):
                yield each.name, (getattr(self, each.name) or 0,)
        yield "buffers that do not feed back", (self.buffer_bytes - self.fed_back_bytes,)
        yield "storages", self.storages
        yield "gradient_storages", self.gradient_storages
        yield "values", [value.nbytes for value in (*self.inputs, *self.outputs)]
        yield (
            "parameters",
            [nbytes for parameter in self.parameters for nbytes in (parameter.nbytes, parameter.copy_bytes)],
        )
        yield "saved", [tensor.nbytes for tensor in self.saved]
        yield "workspace", [span.workspace_bytes for span in self._spans]
        yield "freed outputs", [nbytes for s in self._spans for nbytes in (s.used_bytes, s.returned_bytes)]

    def _check_size(self, what: str, sizes: Sequence[int]) -> None:
        """Check that the sum is below `LARGEST_BYTES`, so that planners can add it up over layers."""
        if sum(sizes) >= LARGEST_BYTES:
            self._refuse(f"has {sum(sizes)} bytes as {what}, more than any device has: profile again")

    def _check_origins(
        self, what: str, origins: Sequence[Origin | GradientOrigin], own: Sequence[int]
    ) -> None:
        """Check that every origin is one of the layer's own storages, or of its inputs or outputs."""
        known = {"own": len(own), "input": len(self.inputs), "output": len(self.outputs)}
        for origin in origins:
            if origin.kind in known and not 0 <= origin.index < known[origin.kind]:
                self._refuse(f"names {origin.kind} {what} {origin.index}, but has {known[origin.kind]}")

    def _refuse(self, reason: str) -> NoReturn:
        raise UsageError(f"a layer of class {self.module} {reason}")

    @property
    def _spans(self) -> tuple[Span, ...]:
        buffered = (*(self.buffered_first or ()), *(self.buffered_later or ()))
        return (*self.backward_first, *self.backward_later, *self.inner_first, *self.inner_later, *buffered)

    def spans(
        self,
        *,
        is_first: bool,
        inner: bool,
        buffered: frozenset[int] = frozenset(),
        returned: bool = False,
    ) -> tuple[Span, ...]:
        """Return the spans of the step's first or a later backward.

        `inner` says whether the next layer is on the same device, `buffered` are the outputs whose gradients
        stay in buffers, and `returned` says whether the outputs themselves stay.
        """
        usual, arriving, kept = (
            (self.backward_first, self.inner_first, self.buffered_first)
            if is_first
            else (self.backward_later, self.inner_later, self.buffered_later)
        )
        spans = arriving if inner and arriving else usual
        if not buffered and not returned:
            return spans
        all_kept = buffered.issuperset(n for n, value in enumerate(self.outputs) if value.has_gradient)
        if (all_kept or not buffered) and spans is usual and kept is not None:
            return tuple(
                replace(
                    span,
                    peak_bytes=span.peak_bytes
                    + span.used_bytes * bool(buffered)
                    + span.returned_bytes * returned,
                )
                for span in kept or usual
            )
        freed = buffered.difference(o.index for o in self.input_gradients if o.kind == "output")
        more = sum(self.outputs[number].nbytes for number in freed)
        more += sum(value.nbytes for value in self.outputs) * returned
        return tuple(replace(span, peak_bytes=span.peak_bytes + more) for span in spans)  # at most

    @property
    def unused_outputs(self) -> tuple[bool, ...]:
        """Whether each output is unused; empty if none is."""
        unused = tuple(value.unused for value in self.outputs)
        return unused if any(unused) else ()

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
        """Why replicas cannot hold the layer: each would change its state differently; empty if they can."""
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
        """Bytes that exist as long as the layer: parameters, their copies, buffers and constants."""
        return self.parameter_bytes + self.copy_bytes + self.buffer_bytes + self.constant_bytes

    @property
    def saved_storages(self) -> tuple[Origin, ...]:
        """The distinct storages, own or of inputs, that the saved tensors hold."""
        return tuple(dict.fromkeys(s.origin for s in self.saved if s.origin.kind in ("own", "input")))

    @property
    def by_value(self) -> bool:
        """True if values decide which tensors are saved, or if an older profile does not say."""
        return self.stopped_peak_bytes is None

    def sees(self, saved: SavedTensor) -> bool:
        """Return whether autograd's hooks see a saved tensor."""
        return not saved.lasting and (not saved.hidden or self.by_value)

    @property
    def saved_inputs(self) -> tuple[int, ...]:
        """The numbers of the inputs whose storages the saved tensors hold."""
        return tuple(o.index for o in self.saved_storages if o.kind == "input")

    @property
    def least_bytes(self) -> int:
        """A lower bound of a device's bytes while the layer runs, whatever else is offloaded or recomputed.

        It includes the layer's weights, or their copies, and the memory that a pass allocates; for a backward
        also the own storages of its saved tensors. It excludes inputs and gradients of outputs, which may be
        views of something smaller.
        """
        return self._least_bytes(workspace=True)

    @property
    def least_tensor_bytes(self) -> int:
        """The same bound without kernel workspace, which holds for microbatches of more samples too.

        The workspace of a kernel may be smaller for more samples, such as that of a convolution.
        """
        return self._least_bytes(workspace=False)

    @property
    def least_divided_bytes(self) -> int:
        """A bound for tensor-parallel ranks together: weights, and outputs or saved tensors that it makes.

        Other tensors may be smaller if the layer is divided, such as those of a cross entropy.
        """
        made, saved = (
            sum(self.storages[index] for index in {one.index for one in origins if one.kind == "own"})
            for origins in (self.output_origins, self.saved_storages)
        )
        return self._weight_bytes + max(made, saved)

    @property
    def _weight_bytes(self) -> int:
        return sum(parameter.copy_bytes or parameter.nbytes for parameter in self.parameters)

    def _least_bytes(self, *, workspace: bool) -> int:
        saved = sum(self.storages[origin.index] for origin in self.saved_storages if origin.kind == "own")
        forwards = [self.forward_peak_bytes, self.checkpoint_peak_bytes]
        backwards = [
            [span.peak_bytes - (0 if workspace else span.workspace_bytes) for span in spans]
            for spans in (self.spans(is_first=True, inner=inner) for inner in (False, True))
        ]
        if not workspace:
            forwards[0] -= self.forward_workspace_bytes
            forwards[1] -= self.checkpoint_workspace_bytes
        made = min(max(peaks, default=0) for peaks in backwards)
        return self._weight_bytes + max(min(forwards), saved + made)

    @property
    def lasting_storages(self) -> tuple[Origin, ...]:
        """The saved storages that the layer's own backward does not free."""
        lasting = {tensor.origin for tensor in self.saved if tensor.lasting}
        return tuple(origin for origin in self.saved_storages if origin in lasting)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the distinct storages that the saved tensors hold, inputs included."""
        own, inputs = self.storages, self.inputs
        return sum(own[o.index] if o.kind == "own" else inputs[o.index].nbytes for o in self.saved_storages)
