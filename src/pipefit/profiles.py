"""A profile: what every layer of a model costs. Planners and simulator know nothing else of the model.

Equal layers share one `LayerCost`, so that a file holds each kind of layer once. Costs are exact for one microbatch
size (a `Measurement`); a profile may hold several.

Outputs and saved tensors of a layer are in *storages*, each of one origin: the layer's own allocation, the storage of
one of its inputs, a parameter or buffer, or a constant. So a storage that two layers hold is counted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Literal, NoReturn

from pipefit.additive_costs import AdditiveCosts
from pipefit.errors import UsageError
from pipefit.fingerprints import Fingerprint
from pipefit.kernels import KernelMemory
from pipefit.sharing import SharedBuffer, SharedParameter
from pipefit.training import Precision

Target = Literal["cpu", "cuda"]
OriginKind = Literal["own", "input", "parameter", "constant"]
Packing = Literal["bare", "tuple", "list"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose storage a tensor uses: the layer's `own` number `index`, its `input` number `index`, or neither."""

    __pydantic_config__ = {"extra": "forbid"}

    kind: OriginKind
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that crosses a layer boundary.

    `nbytes` is its size when contiguous, which a transfer moves and a receiver allocates.
    """

    __pydantic_config__ = {"extra": "forbid"}

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    requires_grad: bool


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
    """One parameter of a layer, by its name in the layer."""

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    trainable: bool


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
class Work:
    """The work of one pass of a layer.

    It is counted in floating-point operations and in bytes that kernels read and write; `seconds` are measured, or
    None.

    Raises:
        UsageError: a negative number, or 1e9 seconds or more.
    """

    __pydantic_config__ = {"extra": "forbid"}

    flops: int
    moved_bytes: int
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.flops < 0 or self.moved_bytes < 0 or (self.seconds is not None and not 0 <= self.seconds < 1e9):
            raise UsageError(
                "work has zero or more FLOPs, bytes moved and seconds, and fewer than 1e9 seconds, not "
                f"{self.flops}, {self.moved_bytes} and {self.seconds}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Everything one kind of layer costs, for one microbatch (update: for one step).

    Peaks are bytes above what was allocated at entry. At the entry of a forward its inputs exist; at the entry of a
    backward what the forward left and the gradients of the outputs exist.

    Raises:
        UsageError: a negative size, or an origin or a released input that the layer does not have.
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
    unrepeatable: str = ""  # why no second forward is like the first, such as "counts its calls"; empty if it can be
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
        if len(self.output_origins) != len(self.outputs):
            self._refuse(f"has {len(self.outputs)} outputs, but origins for {len(self.output_origins)}")
        self._check_origins("storage", (*self.output_origins, *(tensor.origin for tensor in self.saved)), self.storages)
        if len(self.input_gradients) != len(self.inputs):
            self._refuse(f"has {len(self.inputs)} inputs, but gradients for {len(self.input_gradients)}")
        self._check_origins("gradient storage", self.input_gradients, self.gradient_storages)
        for number in (k for span in self._spans for k in span.released):
            if not 0 <= number < len(self.inputs):
                self._refuse(f"releases input {number} in a backward; it has {len(self.inputs)} inputs")

    def _sizes(self) -> Iterator[tuple[str, Sequence[int]]]:
        """All numbers of bytes that cannot be negative, by what they are."""
        for each in fields(self):
            if each.name.endswith("_bytes"):
                yield each.name, (getattr(self, each.name),)
        yield "buffers that do not feed back", (self.buffer_bytes - self.fed_back_bytes,)
        yield "storages", self.storages
        yield "gradient_storages", self.gradient_storages
        yield "values", [value.nbytes for value in (*self.inputs, *self.outputs)]
        yield "parameters", [parameter.nbytes for parameter in self.parameters]
        yield "saved", [tensor.nbytes for tensor in self.saved]
        yield "workspace", [span.workspace_bytes for span in self._spans]

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
    def static_bytes(self) -> int:
        """Bytes of what exists as long as the layer does: parameters, buffers and constants."""
        return self.parameter_bytes + self.buffer_bytes + self.constant_bytes

    @property
    def saved_storages(self) -> tuple[Origin, ...]:
        """The distinct storages, own or of inputs, that the saved tensors hold."""
        return tuple(dict.fromkeys(s.origin for s in self.saved if s.origin.kind in ("own", "input")))

    @property
    def saved_inputs(self) -> tuple[int, ...]:
        """The numbers of the inputs whose storages the saved tensors hold."""
        return tuple(o.index for o in self.saved_storages if o.kind == "input")

    @property
    def saved_bytes(self) -> int:
        """Bytes of the distinct storages that the saved tensors hold, inputs included."""
        own, inputs = self.storages, self.inputs
        return sum(own[o.index] if o.kind == "own" else inputs[o.index].nbytes for o in self.saved_storages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The costs of all layers at one microbatch size. The cost of layer i is `kinds[layers[i]]`.

    `sizes` is a digest of the whole numbers in traced operations and in the loss, which depend on the microbatch size.

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

    def __post_init__(self) -> None:
        if self.microbatch_size < 1:
            raise UsageError(f"a microbatch has at least one sample, not {self.microbatch_size}")
        if not self.layers:
            raise UsageError("a measurement needs at least one layer")
        for number, kind in enumerate(self.layers):
            if not 0 <= kind < len(self.kinds):
                raise UsageError(f"layer {number} is of kind {kind}, but there are {len(self.kinds)} kinds of layers")
        self._check_values()
        for parameter in self.shared:
            self._check_users("parameter", parameter.name, parameter.users)
        for buffer in self.shared_buffers:
            self._check_users("buffer", buffer.name, buffer.users)

    def _check_values(self) -> None:
        """Check that every layer and the loss take at least what the layer before returns."""
        for number, (before, after) in enumerate(pairwise((*self.costs, self.loss))):
            if not before.inputs:
                raise UsageError(f"layer {number} takes no inputs: each takes at least one")
            if len(before.outputs) > len(after.inputs):
                taker = "the loss" if number + 1 == len(self.layers) else f"layer {number + 1}"
                raise UsageError(
                    f"layer {number} returns {len(before.outputs)} values, but {taker} takes {len(after.inputs)}"
                )

    def _check_users(self, what: str, name: str, users: tuple[int, ...]) -> None:
        """Check that a parameter or buffer is shared by layers that exist."""
        if not 0 <= min(users) <= max(users) < len(self.layers):
            raise UsageError(f"shared {what} {name!r} names layers {list(users)}; there are {len(self.layers)}")

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
        if self.threads < 1:
            raise UsageError(f"a worker has at least one thread, not {self.threads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model's layers and what they cost.

    `additive` is there if training runs measured it, and `kernels` if the target is `cpu`.

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

    def __post_init__(self) -> None:
        if not self.measurements:
            raise UsageError(f"the profile of {self.model!r} holds no measurement")
        if len(set(self.layers)) != len(self.layers):
            twice = Counter(self.layers).most_common(1)[0][0]
            raise UsageError(f"the profile of {self.model!r} names layer {twice!r} more than once")
        counts = {f"its measurement at size {m.microbatch_size} has": len(m.layers) for m in self.measurements}
        if self.additive is not None:
            counts["the training runs measured"] = len(self.additive.mem_isolated)
        for what, count in counts.items():
            if count != len(self.layers):
                raise UsageError(f"the profile of {self.model!r} names {len(self.layers)} layers, but {what} {count}")

    def at(self, microbatch_size: int) -> Measurement:
        """The measurement at `microbatch_size` samples.

        Raises:
            UsageError: this size was not profiled; says which were.
        """
        for measurement in self.measurements:
            if measurement.microbatch_size == microbatch_size:
                return measurement
        sizes = ", ".join(str(m.microbatch_size) for m in self.measurements)
        raise UsageError(
            f"{self.model} was profiled at microbatch size {sizes}, not {microbatch_size}: "
            f"profile it again with --microbatch-size {microbatch_size}, or choose another batch size or number of "
            "microbatches"
        )
