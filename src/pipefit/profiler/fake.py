"""The fake profiler: costs of every layer from fake tensors, without hardware, data or memory.

Each kind of layer is built and run under a meter once, however often the model repeats it. For the target
`cpu`, each operation that has not been measured on this machine yet runs once with real tensors, for the
workspace of its kernel. Bytes are exact for the target's kernels; seconds come from `pipefit.timing` or from
the measured profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from pipefit.capture import (
    Chain,
    ChainLayer,
    Form,
    Shared,
    SharedStorage,
    Task,
    Values,
    check_samples,
    left_as_found,
    module_key,
    passed_on,
    refusing,
    shared_storages,
    unchanged_constants,
)
from pipefit.capture.parameter_groups import parameter_groups
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.fake_cuda.chain import Chains, layers_again
from pipefit.fake_cuda.fingerprint import Fingerprinted, fingerprint, options, precision_of, with_loss
from pipefit.fake_cuda.target import FakeTarget
from pipefit.measure import Kernels, this_machine
from pipefit.profiler.layer import BackwardPass, GradientOrigins, LayerMeter
from pipefit.profiler.pass_meter import Layouts, dense, dense_alike
from pipefit.profiler.update import named, state_bytes
from pipefit.runtime import check_elementwise, make_optimizer
from pipefit.schema.layer_costs import (
    Collective,
    KernelMemory,
    LayerCost,
    Origin,
    Packing,
    Parameter,
    SharedBuffer,
    SharedParameter,
)
from pipefit.schema.profile import Assumptions, Measurement, ModelProfile, Target, differences
from pipefit.tensor_parallel import (
    Alone,
    DimSplit,
    ShardedChain,
    TracedStage,
    blocks_begin,
    shard_traced,
    trace_chain,
)
from pipefit.texts import counted

# ---- Values between two layers that share memory, so that an in-place layer would change both
#
# If a stage ends between the two layers, each value is sent separately, and the other would not change. So
# such a layer is refused wherever stages end: a plan never changes the numbers. Traced models are not cut
# between such layers.

_FIXED = -1  # the memory of parameters, buffers and constants


class ValueMemory:
    """Memory of the values before a layer, as numbers that are equal for values that share memory.

    The inputs of a model do not share memory.
    """

    def __init__(self) -> None:
        self._new = count()
        self._before: list[int] | None = None  # None before the first layer

    def check(self, changed: Iterable[int], what: str) -> None:
        """Check that a layer that changes the inputs `changed` in place changes only these.

        Raises:
            UsageError: such an input shares its memory with another input, or with a parameter or buffer.
        """
        before = self._before or []
        for number in changed:
            mine = before[number] if number < len(before) else None
            if mine == _FIXED:
                _refuse(
                    what, number, "with a parameter or buffer of an earlier layer, which would change too"
                )
            others = [other for other, memory in enumerate(before) if memory == mine and other != number]
            if others:
                _refuse(what, number, f"with input {others[0]}, which would not change on another device")

    def go_on(self, origins: Sequence[Origin]) -> None:
        """Proceed to the values that a layer returns, with storages of these origins."""
        inputs = [o.index for o in origins if o.kind == "input"]
        before = self._before or [next(self._new) for _ in range(max(inputs, default=-1) + 1)]
        own = {o.index: next(self._new) for o in origins if o.kind == "own"}
        self._before = [
            own[o.index] if o.kind == "own" else before[o.index] if o.kind == "input" else _FIXED
            for o in origins
        ]


def _refuse(what: str, number: int, reason: str) -> NoReturn:
    raise UsageError(
        f"{what} changes its input {number} in place, but that input shares memory {reason}: return a "
        "clone() of it from the layer before, or avoid the in-place change"
    )


# ---- The survey

Progress = Callable[[int, int, str], None]


class _Metered(NamedTuple):
    """The meter of a kind, the measured layer, and the layouts of arriving and returned gradients."""

    layer: ChainLayer
    meter: LayerMeter
    arriving: Layouts = ()
    left: Layouts = ()


def survey(
    task: Task,
    kernels: Kernels | None,
    chain: Chain,
    values: Values,
    targets: Values,
    progress: Progress | None,
    own: Callable[[ChainLayer], ChainLayer],
) -> Measurement:
    """Return the costs of a chain's layers and loss for inputs like `values`, of as many samples.

    For every kind, the layer that runs is `own(layer)`, such as a copy.

    Raises:
        UsageError: a layer, the loss or the optimizer cannot run, or makes a forbidden change.
    """
    result = Survey(task, kernels, chain.shared, own, packing=chain.layers[0].packing)
    count, samples = len(chain.layers), len(values[0])
    for number, layer in enumerate(chain.layers):
        if progress is not None:
            progress(number, count, layer.name)
        values = tuple(result.layer(layer, values, is_last=number + 1 == count))
    loss, layouts = result.loss(chain, values, targets)
    result.backward(layouts)
    return Measurement(
        microbatch_size=samples,
        kinds=tuple(result.in_turn()),
        layers=tuple(result.layers),
        loss=loss,
        shared=result.shared(chain),
        shared_buffers=result.shared_buffers(chain),
    )


class Survey:
    """The kinds of layers so far: `kinds` has the cost of each, `layers` the kind of every layer in order.

    `shared` are the parameters that several layers use, `own` is that of `survey`, and `packing` is that of
    the model's inputs.
    """

    def __init__(
        self,
        task: Task,
        kernels: Kernels | None,
        shared: Sequence[Shared],
        own: Callable[[ChainLayer], ChainLayer],
        *,
        packing: Packing,
    ) -> None:
        self.task, self.optimizer, self.kernels = task, partial(make_optimizer, task), kernels
        self._all_shared, self._own = shared, own
        self.kinds: list[LayerCost] = []
        self.layers: list[int] = []
        self._shared = {id(result.parameter) for result in shared if result.parameter.requires_grad}
        self._meters: list[_Metered] = []  # by kind, in the numbering before `_number_again`
        self._met: list[int] = []  # the first kind of every layer
        self._fewer: dict[tuple[int, Layouts], int] = {}
        self._again: dict[tuple[int, tuple[Layouts, ...]], tuple[int, tuple[Layouts, ...]]] = {}
        self._known: dict[object, tuple[int, Sequence[Tensor], Form]] = {}
        self._changed: list[frozenset[str]] = []  # by kind: names of buffers that a forward changes
        self.form = Form(packing)
        self._memory = ValueMemory()  # memory of the values before the next layer

    def layer(self, layer: ChainLayer, values: Sequence[Tensor], *, is_last: bool) -> Sequence[Tensor]:
        """Return the layer's outputs for `values`, in the survey's `form`; measure its kind unless known."""
        layer = replace(layer, packing=self.form.packing, orders=self.form.orders)
        given = tuple((v.shape, v.stride(), v.dtype, v.requires_grad) for v in values)
        shared = tuple(name for name, p in layer.module.named_parameters() if id(p) in self._shared)
        key = module_key(layer.module), self.form, is_last, given, self._options(layer), shared
        if key not in self._known:
            self._known[key] = self._measure(self._own(layer), values, shared, is_last=is_last)
        kind, outputs, self.form = self._known[key]
        self._memory.check(self._meters[kind].meter.changed_inputs, f"layer {layer.name}")
        self._memory.go_on(self.kinds[kind].output_origins)
        self.layers.append(kind)
        self._met.append(kind)
        return outputs

    def _measure(
        self, layer: ChainLayer, values: Sequence[Tensor], shared: Sequence[str], *, is_last: bool
    ) -> tuple[int, Sequence[Tensor], Form]:
        """Measure a new kind, whose parameters `shared` other layers use too.

        Returns its number, its outputs, and their form.
        """
        form = Form()

        def call(values: Values) -> Values:
            nonlocal form
            result, form = passed_on(layer.outputs(values), layer.name, is_last=is_last)
            return result

        others = [parameter for name, parameter in layer.module.named_parameters() if name in shared]
        meter = LayerMeter(call, layer.module, values, self.kernels, others, autocast=layer.autocast)
        return *self._add(_Metered(layer, meter), None), form

    def _add(self, metered: _Metered, arriving: Layouts | None) -> tuple[int, Sequence[Tensor]]:
        """Measure a new kind for output gradients with these layouts; return its number and its outputs."""
        layer, meter = metered.layer, metered.meter
        what = f"layer {layer.name} ({type(layer.module).__name__})"
        with named(what, meter.like), refusing(traced=False), unchanged_constants(layer.module):
            groups = parameter_groups([layer], self.task.groups)
            cost, outputs = meter.measure(self.optimizer, groups, arriving=arriving)
        self._meters.append(metered._replace(arriving=arriving or dense(outputs), left=meter.layouts))
        self.kinds.append(replace(cost, packing=layer.packing, orders=layer.orders))
        self._changed.append(meter.changed_buffers)
        return len(self.kinds) - 1, outputs

    def backward(self, arriving: Layouts) -> None:
        """Measure layers again, from the last to the first, with the gradients that they really receive.

        `arriving` are the layouts of the gradients that the loss passes on. A layer is measured again if an
        output that requires a gradient receives none, or one that is not dense. Layouts inside a stage may
        depend on the end of the stage, which receives dense gradients.
        """
        ways: tuple[Layouts, ...] = (arriving,)
        for number in reversed(range(len(self.layers))):
            kind = self._with_fewer(self.layers[number], ways[0])
            self.layers[number], left = self._inside(kind, ways)
            is_end = number + 1 < len(self.layers)
            ways = tuple(dict.fromkeys((*left, self._meters[kind].left) if is_end else left))
        self._number_again()

    def _with_fewer(self, kind: int, arriving: Layouts) -> int:
        """Return the kind with dense gradients for only those outputs that have one in `arriving`."""
        metered = self._meters[kind]
        fewer = dense_alike(arriving, metered.arriving)
        if fewer == metered.arriving:
            return kind
        if (kind, fewer) not in self._fewer:
            self._fewer[kind, fewer], _ = self._add(metered, fewer)
        return self._fewer[kind, fewer]

    def _number_again(self) -> None:
        """Drop the kinds that no layer has any more, and merge kinds of equal cost.

        The last layer is measured separately, because the loss gets its outputs with their own strides.
        """
        numbers: dict[tuple[LayerCost, frozenset[str]], int] = {}
        told = {
            kind: numbers.setdefault((self.kinds[kind], self._changed[kind]), len(numbers))
            for kind in sorted(set(self.layers))
        }
        self.layers = [told[kind] for kind in self.layers]
        self.kinds, self._changed = [cost for cost, _ in numbers], [changed for _, changed in numbers]

    def in_turn(self) -> Iterator[LayerCost]:
        """Yield the kinds, with update peaks that include temporaries of an earlier layer's update.

        The earlier layer may be any layer before, if replicas divide the others, and the end of the
        temporaries' life is unknown: these peaks are upper bounds.
        """
        before, last = [0] * len(self.kinds), 0
        for kind in self.layers:
            before[kind] = max(before[kind], last)
            last = max(last, self.kinds[kind].update_left_bytes)
        for cost, more in zip(self.kinds, before, strict=True):
            first, later = cost.update_first_peak_bytes, cost.update_peak_bytes
            trained = more if cost.trained_bytes else 0
            yield replace(cost, update_first_peak_bytes=first + trained, update_peak_bytes=later + trained)

    def _inside(self, kind: int, ways: tuple[Layouts, ...]) -> tuple[int, tuple[Layouts, ...]]:
        """Return the kind for gradients with one of several layouts (`ways`), and the layouts it returns."""
        metered = self._meters[kind]
        if ways == (metered.arriving,):
            return kind, (metered.left,)
        if (kind, ways) not in self._again:
            self._again[kind, ways] = self._measure_inside(kind, ways)
        return self._again[kind, ways]

    def _measure_inside(self, kind: int, ways: tuple[Layouts, ...]) -> tuple[int, tuple[Layouts, ...]]:
        """Measure a kind whose backward inside a stage has the highest of its peaks over all ways."""
        metered, cost = self._meters[kind], self.kinds[kind]
        dense_one = BackwardPass(
            cost.backward_first,
            cost.backward_later,
            GradientOrigins(cost.input_gradients, cost.gradient_storages),
            metered.left,
        )
        result = [
            dense_one if way == metered.arriving else metered.meter.measure_again(way, cost.input_gradients)
            for way in ways
        ]
        gradients = result[0].gradients.also_as([backward.gradients for backward in (dense_one, *result)])
        self.kinds.append(
            replace(
                cost,
                inner_first=tuple(span for one in result for span in one.first),
                inner_later=tuple(span for one in result for span in one.later),
                input_gradients=gradients.origins,
                gradient_storages=gradients.storages,
            )
        )
        self._changed.append(self._changed[kind])
        self._meters.append(metered)
        return len(self.kinds) - 1, tuple(one.left for one in result)

    def _options(self, layer: ChainLayer) -> object:
        """Return the options of a layer's parameter groups, and the parameters of each."""
        numbers = {id(parameter): number for number, parameter in enumerate(layer.module.parameters())}
        groups = [group for groups in parameter_groups([layer], self.task.groups) for group in groups]
        members = [tuple(numbers[id(parameter)] for parameter in group["params"]) for group in groups]
        given = [
            options({name: value for name, value in group.items() if name != "params"}) for group in groups
        ]
        return tuple(zip(members, given, strict=True))

    def shared(self, chain: Chain) -> tuple[SharedParameter, ...]:
        """Return the parameters that several layers use."""
        return tuple(self._shared_parameter(chain, shared) for shared in self._all_shared)

    def _shared_parameter(self, chain: Chain, shared: Shared) -> SharedParameter:
        parameter, (layer, name) = shared.parameter, shared.places[0]
        nbytes, trainable = parameter.untyped_storage().nbytes(), parameter.requires_grad
        state, early = 0, 0
        if trainable:
            original = chain.layers[layer].parameter_names[name]
            wanted = self.task.groups(original, parameter) if self.task.groups is not None else {}
            run = self._meters[self._met[layer]].layer.module.get_parameter(
                name
            )  # the chain's own layer may not run
            state, early = state_bytes(run, wanted, self.optimizer, self.kernels)
        copies = {user: self._copy_bytes(user, shared) for user in shared.users}
        copying = tuple(user for user in shared.users if copies[user])
        cast_only = tuple(
            user for user in copying if all(one.cast_only for one in self._parameters(user, shared))
        )
        return SharedParameter(
            name=shared_name(chain, shared),
            users=shared.users,
            nbytes=nbytes,
            gradient_bytes=nbytes if trainable else 0,
            state_bytes=state,
            early_state_bytes=early,
            copying=copying,
            cast_only=cast_only,
            copy_bytes=max(copies.values()),
        )

    def _copy_bytes(self, layer: int, shared: Shared) -> int:
        """Return the bytes of a layer's half-precision copy of a shared parameter; 0 without a copy."""
        return sum(parameter.copy_bytes for parameter in self._parameters(layer, shared))

    def _parameters(self, layer: int, shared: Shared) -> list[Parameter]:
        """Return a shared parameter's entries in a layer: one, under any of its names there."""
        names = {name for user, name in shared.places if user == layer}
        return [
            parameter for parameter in self.kinds[self.layers[layer]].parameters if parameter.name in names
        ]

    def shared_buffers(self, chain: Chain) -> tuple[SharedBuffer, ...]:
        """Return the buffers, and tensors that are plain attributes, that several layers hold.

        Raises:
            UsageError: a forward changes one of them.
        """
        result = shared_storages([layer.module for layer in chain.layers])
        for shared in result:
            for user in shared.users:
                buffers = dict(chain.layers[user].module.named_buffers(remove_duplicate=False))
                if shared.is_among(buffers[name] for name in self._changed[self.layers[user]]):
                    _refuse_changes(chain, shared, user)
        return tuple(
            SharedBuffer(
                name=_name(chain, shared),
                users=shared.users,
                nbytes=shared.held.nbytes,
                copied=shared.held.is_buffer,
            )
            for shared in result
        )

    def loss(
        self, chain: Chain, values: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[LayerCost, Layouts]:
        """Return the cost of the loss on the last layer's outputs, and the layouts of its gradients.

        Raises:
            UsageError: the loss requires no gradient although a parameter is trained.
        """
        count, chain = len(values), replace(chain, packing=self.form.packing)

        def call(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (chain.loss(inputs[:count], inputs[count:]),)

        meter = LayerMeter(call, nn.Module(), [*values, *targets], self.kernels, owner=chain.criterion)
        with (
            named(f"the loss of {self.task.name}", [*values, *targets]),
            refusing(traced=False),
            left_as_found(chain.criterion),
        ):
            cost, (result,) = meter.measure(self.optimizer)
            changed = meter.changed_by_loss(chain.criterion)
        self._memory.check(meter.changed_inputs, f"the loss of {self.task.name}")
        if not result.requires_grad and _is_trained(chain):
            raise UsageError(
                f"the loss of {self.task.name} does not require a gradient, so it cannot be trained: it was "
                "detached (.item(), .detach(), torch.tensor(...)), or does not depend on a trained "
                "parameter"
            )
        cost = replace(cost, packing=self.form.packing, unrepeatable=cost.unrepeatable or changed)
        return cost, meter.layouts[:count]


def shared_name(chain: Chain, shared: Shared) -> str:
    """Return the name of a parameter that several layers share, from the first of them."""
    layer, name = shared.places[0]
    return f"{chain.layers[layer].name}.{name}"


def _name(chain: Chain, shared: SharedStorage) -> str:
    return f"{chain.layers[shared.users[0]].name}.{shared.held.name}"


def _refuse_changes(chain: Chain, shared: SharedStorage, user: int) -> NoReturn:
    """Raise an error for a shared buffer that a layer changes.

    A copy of the buffer on another device would miss the change, and see other microbatches first.

    Raises:
        UsageError: always.
    """
    layers = ", ".join(chain.layers[number].name for number in shared.users)
    raise UsageError(
        f"layers {layers} share buffer {_name(chain, shared)!r}, and the forward of layer "
        f"{chain.layers[user].name} changes it, but a copy on another device would not change: merge these "
        "layers into one, or give each a separate module"
    )


def _is_trained(chain: Chain) -> bool:
    """Return whether a layer has a parameter that is trained."""
    return any(parameter.requires_grad for layer in chain.layers for parameter in layer.module.parameters())


# ---- Measurements of layers divided between tensor-parallel ranks: one rank stands for all
#
# The rank runs without peers: tensors that it would exchange have the right memory, and the exchanges are
# recorded as collectives, whose time the simulator computes. Every rank has the same sizes: parts are equal,
# or padded to be.

_Collectives = tuple[tuple[Collective, ...], tuple[Collective, ...]]  # (forward, backward) of a layer


def sharded_chains(
    chain: Chain, degrees: Sequence[int], values: Values, targets: Values, *, sequences: bool = False
) -> list[ShardedChain]:
    """Return `chain` divided between each number of ranks, and with `sequences` along positions too.

    The chain is traced once.

    Raises:
        UsageError: a number of ranks divides nothing, or nothing along positions, with the reason; or a layer
            cannot be traced.
    """
    wanted = [degree for degree in dict.fromkeys(degrees) if degree > 1]
    traced = trace_chain(chain, values, targets) if wanted else None
    result = [] if traced is None else [shard_traced(chain, traced, degree) for degree in wanted]
    for sharded in result:
        if sharded.shares.divides_nothing:
            raise UsageError(
                f"{sharded.ranks} tensor-parallel ranks cannot shard {chain.name}: 0 % of its parameters "
                f"and operations, because {_why(sharded)}; choose another number, or replicas"
            )
    return [
        *result,
        *(
            _along_positions(traced, sharded_chain)
            for sharded_chain in result
            if sequences and traced is not None
        ),
    ]


def _along_positions(traced: TracedStage, plain: ShardedChain) -> ShardedChain:
    """Return the chain divided along positions too.

    Raises:
        UsageError: no all-reduce sums sequences whose positions the ranks divide.
    """
    result = shard_traced(plain.chain, traced, plain.ranks, sequences=True, like=plain)
    if ("reduce_scatter", "forward") not in {
        (collective.kind, collective.phase) for collective in result.collectives
    }:
        raise UsageError(
            f"{plain.ranks} tensor-parallel ranks cannot shard {plain.chain.name} along positions, because "
            "it does not all-reduce sequences that they could split: omit sequence parallelism, or choose "
            "another number"
        )
    return result


def _why(sharded: ShardedChain) -> str:
    """Return why the largest operation stays whole."""
    whole = sharded.shares.whole
    return (
        f"{whole[0].operator} of {whole[0].layer} stays whole, because {whole[0].reason}"
        if whole
        else "it does not have any"
    )


def of_rank(measured: Measurement, whole: Measurement, sharded: ShardedChain) -> Measurement:
    """Return the measurement of a rank's chain with its collectives; `whole` is that of the whole layers.

    Raises:
        UsageError: values between blocks, or shared parameters, differ from those of the whole layers.
    """
    _check_alike(measured, whole, sharded)
    forms = {
        (shared_name(sharded.chain, shared), shared.users): _form(sharded, shared)
        for shared in sharded.chain.shared
    }
    numbers: dict[tuple[int, _Collectives], int] = {}
    together = list(_by_layer(sharded, len(measured.layers)))
    layers = tuple(
        numbers.setdefault((kind, exchanged), len(numbers))
        for kind, exchanged in zip(measured.layers, together[:-1], strict=True)
    )
    return replace(
        measured,
        kinds=tuple(_with(measured.kinds[kind], exchanged) for kind, exchanged in numbers),
        layers=layers,
        loss=_with(measured.loss, together[-1]),
        shared=tuple(replace(one, form=forms.get((one.name, one.users), "")) for one in measured.shared),
        tensor=sharded.ranks,
        shares=sharded.shares,
        forms=sharded.digest,
        sequences=sharded.sequences,
    )


def _form(sharded: ShardedChain, shared: Shared) -> str:
    """Return how the ranks divide a shared parameter, as a string; empty if each rank has all of it."""
    form = sharded.stage.form(shared.parameter)
    return repr(form) if isinstance(form, DimSplit) else ""


def _by_layer(sharded: ShardedChain, layers: int) -> Iterator[_Collectives]:
    """Yield the collectives of every layer, and of the loss after the last."""
    for number in range(layers + 1):
        mine = [each for each in sharded.collectives if each.layer == number]
        forward, backward = (
            tuple(Collective(each.kind, each.nbytes) for each in mine if each.phase == phase)
            for phase in ("forward", "backward")
        )
        yield forward, backward


def _with(cost: LayerCost, exchanged: _Collectives) -> LayerCost:
    forward, backward = exchanged
    return replace(
        cost,
        forward=replace(cost.forward, collectives=forward),
        backward=replace(cost.backward, collectives=backward),
    )


def _check_alike(measured: Measurement, whole: Measurement, sharded: ShardedChain) -> None:
    """Check that stages of tensor-parallel ranks exchange the same values as stages of whole layers.

    Raises:
        UsageError: they exchange other values, or share other parameters.
    """
    chain, between = sharded.chain, f"sharded over {sharded.ranks} ranks"
    for edge in blocks_begin(chain):
        one, other = whole.costs[edge].inputs, measured.costs[edge].inputs
        if one != other:
            raise UsageError(
                f"{chain.name} {between} passes other values to layer {chain.layers[edge].name} than "
                f"unsharded ({other}, not {one}), so stages could not end there: do not use tensor "
                "parallelism"
            )
    uses = [{(each.name, each.users) for each in measurement.shared} for measurement in (whole, measured)]
    if uses[0] != uses[1]:
        names = ", ".join(sorted({name for name, _ in uses[0] ^ uses[1]}))
        raise UsageError(
            f"{chain.name} {between} shares {names} between other layers than unsharded: do not pass "
            "parameters between layers, or do not use tensor parallelism"
        )


__all__ = ["Progress", "profile_fake", "profile_sizes"]


def profile_sizes(
    task: Task,
    sizes: Sequence[int],
    *,
    target: Target,
    threads: int,
    tensor: Sequence[int] = (),
    sequences: bool = False,
    progress: Progress | None = None,
    chains: Chains | None = None,
) -> ModelProfile:
    """Return the profile of `task` at each of these numbers of samples; see `profile_fake` for a single one.

    `chains` supplies the chains; by default each is traced.

    Raises:
        UsageError: the model has other layers at one size than at another, as if a trace takes other
            branches.
    """
    chains = chains or Chains(task)
    first, *others = (
        profile_fake(
            chains,
            microbatch_size=size,
            target=target,
            threads=threads,
            tensor=tensor,
            sequences=sequences,
            progress=progress,
        )
        for size in sizes
    )
    for other in others:
        result = differences(first.fingerprint, other.fingerprint, first.layers)
        if result:
            size = other.measurements[0].microbatch_size
            raise UsageError(
                f"{task.name} differs between {counted(size, 'sample')} and {sizes[0]} "
                f"({'; '.join(result)}), so no plan could use both sizes: profile it at one size, or make "
                "its operations independent of the number of samples"
            )
    every = (first, *others)
    kernels = tuple(dict.fromkeys(kernel for result in every for kernel in result.kernels.kernels))
    measurements = tuple(measurement for result in every for measurement in result.measurements)
    return replace(first, measurements=measurements, kernels=KernelMemory(kernels=kernels))


def profile_fake(
    chains: Chains,
    *,
    microbatch_size: int,
    target: Target,
    threads: int,
    tensor: Sequence[int] = (),
    sequences: bool = False,
    progress: Progress | None = None,
) -> ModelProfile:
    """Return the profile of a task at one microbatch size, for `target`'s kernels on `threads` CPU threads.

    Layers are measured whole, and divided between each number of ranks in `tensor`; with `sequences` also
    along positions.

    Raises:
        UsageError: a number of ranks divides nothing of the model, a layer cannot be traced, or the optimizer
            needs whole parameters.
    """
    task = chains.task
    like = sample(task, microbatch_size)
    check_samples(like, microbatch_size, task.name)
    kernels = Kernels(threads) if target == "cpu" else None
    with FakeTarget(target) as fake:
        divides = any(degree > 1 for degree in tensor)  # runs layers, to trace them
        chain = (chains.of if divides else chains.unrun)(microbatch_size, fake, like)
        fingerprinted = fingerprint(task, chain)
        values = tuple(map(fake.fake, chain.flatten(like[0])))
        targets = tuple(map(fake.fake, chain.flatten_targets(like[1])))
        divided = sharded_chains(chain, tensor, values, targets, sequences=sequences)  # before any layer runs
        chains.divided.update({(microbatch_size, one.ranks, one.sequences): one for one in divided})
        known = chains.surveyed.get(microbatch_size) if kernels is None else None
        whole, unknown = known or (
            survey(
                task, kernels, chain, values, targets, progress, lambda layer: layers_again((layer,), fake)[0]
            ),
            fake.unknown.kernels,
        )
        if kernels is None:
            chains.surveyed[microbatch_size] = whole, unknown
        measurements = [whole]
        for sharded in divided:
            rank = sharded.rank(Alone(rank=0, size=sharded.ranks))
            check_elementwise(task, rank.layers, sharded.shards(0), torch.device("cpu"))
            result = survey(task, kernels, rank, values, targets, progress, lambda layer: layer)
            measurements.append(of_rank(result, whole, sharded))
    fingerprinted = with_loss(fingerprinted, chain, whole)
    profile = _profile(task, chain, fingerprinted, measurements, target=target, threads=threads)
    profile = profile if kernels is None else _with_kernels(profile, kernels)
    every = dict.fromkeys((*unknown, *fake.unknown.kernels, *profile.kernels.kernels))
    return replace(profile, kernels=KernelMemory(kernels=tuple(every)))


def _with_kernels(profile: ModelProfile, kernels: Kernels) -> ModelProfile:
    """Return the profile with the workspaces of CPU kernels, and the processor on which they were
    measured.
    """
    kernels.keep()
    machine = this_machine(kernels.threads)
    assumptions = replace(
        profile.assumptions, cpu=machine.cpu, capability=machine.capability, processor=machine.details
    )
    return replace(profile, assumptions=assumptions, kernels=kernels.memory)


def _profile(
    task: Task,
    chain: Chain,
    fingerprinted: Fingerprinted,
    measurements: Sequence[Measurement],
    *,
    target: Target,
    threads: int,
) -> ModelProfile:
    """Return the profile of the measurements, with names, fingerprint and assumptions."""
    return ModelProfile(
        model=chain.name,
        fingerprint=fingerprinted.fingerprint,
        layers=tuple(layer.name for layer in chain.layers),
        blocks=chain.blocks,
        measurements=tuple(replace(measurement, sizes=fingerprinted.sizes) for measurement in measurements),
        assumptions=Assumptions(
            target=target,
            device="fake",
            precision=precision_of(task, chain),
            optimizer=fingerprinted.fingerprint.optimizer,
            torch=torch.__version__,
            threads=threads,
        ),
    )
