"""A survey of a model's layers: each kind of layer is measured once, however often the model repeats it.

Layers are met in order, each on fake tensors like those that the one before returned. Then gradients are followed from
the loss back to the first layer: where there is none for a value, the layer is measured again without, and where one
may not lie dense in memory, so is the layer's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, NoReturn

from torch import Tensor, nn

from pipefit.capture.as_found import left_as_found
from pipefit.capture.chain import Chain, ChainLayer, as_values, packing_of
from pipefit.capture.constants import unchanged_constants
from pipefit.capture.held import SharedStorage, shared_storages
from pipefit.capture.orders import Orders, contiguous, orders_of
from pipefit.capture.parameter_groups import parameter_groups
from pipefit.capture.refused_calls import refusing
from pipefit.capture.shared import Shared
from pipefit.capture.structure import Values
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.fake.fingerprint import options
from pipefit.layer_costs import LayerCost, Packing, Parameter
from pipefit.meter.kernels import Kernels
from pipefit.profiler.arriving import Layouts, dense, dense_alike
from pipefit.profiler.cost_key import cost_key
from pipefit.profiler.gradients import BackwardPass, Gradients
from pipefit.profiler.layer import LayerMeter
from pipefit.profiler.named import named
from pipefit.profiler.update import state_bytes
from pipefit.profiler.value_memory import ValueMemory
from pipefit.profiles import Measurement
from pipefit.runtime.master_weights import make_optimizer
from pipefit.sharing import SharedBuffer, SharedParameter

Progress = Callable[[int, int, str], None]


class _Form(NamedTuple):
    """How values cross to the next layer."""

    packing: Packing = "bare"
    orders: Orders = ()


class _Metered(NamedTuple):
    """The meter of a kind, with the layer that was measured, and how gradients lay that arrived and that were left."""

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
    """The costs of a chain's layers and loss for inputs like `values`, of as many samples as the first of them has.

    Of every kind a layer is run that is the chain's `own`, such as a copy.

    Raises:
        UsageError: a layer, the loss or the optimizer cannot be run, or changes what it may not.
    """
    found = Survey(task, kernels, chain.shared, own, packing=chain.layers[0].packing)
    count, samples = len(chain.layers), len(values[0])
    for number, layer in enumerate(chain.layers):
        if progress is not None:
            progress(number, count, layer.name)
        values = tuple(found.layer(layer, values, is_last=number + 1 == count))
    loss, layouts = found.loss(chain, values, targets)
    found.backward(layouts)
    return Measurement(
        microbatch_size=samples,
        kinds=tuple(found.in_turn()),
        layers=tuple(found.layers),
        loss=loss,
        shared=found.shared(chain),
        shared_buffers=found.shared_buffers(chain),
    )


class Survey:
    """The kinds of layers met so far: `kinds` has what each costs, `layers` the kind of every layer in order.

    `shared` are the parameters that several layers use, `own` is as `survey` has it, and `packing` that of the model's
    inputs.
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
        self._shared = {id(found.parameter) for found in shared if found.parameter.requires_grad}
        self._meters: list[_Metered] = []  # by kind, as kinds are numbered until all are measured
        self._met: list[int] = []  # the kind of every layer as it was first met
        self._fewer: dict[tuple[int, Layouts], int] = {}
        self._again: dict[tuple[int, tuple[Layouts, ...]], tuple[int, tuple[Layouts, ...]]] = {}
        self._known: dict[object, tuple[int, Sequence[Tensor], _Form]] = {}
        self._changed: list[frozenset[str]] = []  # by kind, the buffers that a forward changes
        self.form = _Form(packing)
        self._memory = ValueMemory()  # of the values before the next layer

    def layer(self, layer: ChainLayer, values: Sequence[Tensor], *, is_last: bool) -> Sequence[Tensor]:
        """What the layer returns for `values`, in the `form` of the survey; its kind is measured unless it is known."""
        layer = replace(layer, packing=self.form.packing, orders=self.form.orders)
        given = tuple((v.shape, v.stride(), v.dtype, v.requires_grad) for v in values)
        shared = tuple(name for name, p in layer.module.named_parameters() if id(p) in self._shared)
        key = cost_key(layer.module), self.form, is_last, given, self._options(layer), shared
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
    ) -> tuple[int, Sequence[Tensor], _Form]:
        """Measure a new kind, of which other layers have the parameters `shared`: its number, what it returns, and in
        which form.
        """
        form = _Form()

        def call(values: Values) -> Values:
            nonlocal form
            outputs = layer.outputs(values)
            found = as_values(outputs, layer.name)
            form = _Form(packing_of(outputs), () if is_last else orders_of(found))
            return found if is_last else contiguous(found, form.orders)

        others = [parameter for name, parameter in layer.module.named_parameters() if name in shared]
        meter = LayerMeter(call, layer.module, values, self.kernels, others, autocast=layer.autocast)
        return *self._add(_Metered(layer, meter), None), form

    def _add(self, metered: _Metered, arriving: Layouts | None) -> tuple[int, Sequence[Tensor]]:
        """Measure a new kind, with gradients of its outputs that lie so: its number, and what it returns."""
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
        """Measure again, from the last layer to the first, layers to which the next one hands on fewer gradients than
        they have outputs that require one, or such as are not dense. `arriving` are those that the loss hands on.

        How gradients lie inside a stage may depend on where it ends, as it receives dense ones there.
        """
        ways: tuple[Layouts, ...] = (arriving,)
        for number in reversed(range(len(self.layers))):
            kind = self._with_fewer(self.layers[number], ways[0])
            self.layers[number], left = self._inside(kind, ways)
            is_end = number + 1 < len(self.layers)
            ways = tuple(dict.fromkeys((*left, self._meters[kind].left) if is_end else left))
        self._number_again()

    def _with_fewer(self, kind: int, arriving: Layouts) -> int:
        """The kind with dense gradients for those outputs alone that have one among `arriving`."""
        metered = self._meters[kind]
        fewer = dense_alike(arriving, metered.arriving)
        if fewer == metered.arriving:
            return kind
        if (kind, fewer) not in self._fewer:
            self._fewer[kind, fewer], _ = self._add(metered, fewer)
        return self._fewer[kind, fewer]

    def _number_again(self) -> None:
        """Leave out the kinds that no layer is of any more, and those that cost what an earlier one does.

        The last layer is measured apart, since the loss gets its outputs as they lie.
        """
        numbers: dict[tuple[LayerCost, frozenset[str]], int] = {}
        told = {
            kind: numbers.setdefault((self.kinds[kind], self._changed[kind]), len(numbers))
            for kind in sorted(set(self.layers))
        }
        self.layers = [told[kind] for kind in self.layers]
        self.kinds, self._changed = [cost for cost, _ in numbers], [changed for _, changed in numbers]

    def in_turn(self) -> Iterator[LayerCost]:
        """The kinds as an optimizer updates them one after the other, which may hold temporaries of the one before.

        That may be any layer before it, where replicas divide the others, and until when they are held is not known:
        these peaks are upper bounds.
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
        """The kind for gradients that arrive in one of several layouts (`ways`), and what it hands on for each."""
        metered = self._meters[kind]
        if ways == (metered.arriving,):
            return kind, (metered.left,)
        if (kind, ways) not in self._again:
            self._again[kind, ways] = self._measure_inside(kind, ways)
        return self._again[kind, ways]

    def _measure_inside(self, kind: int, ways: tuple[Layouts, ...]) -> tuple[int, tuple[Layouts, ...]]:
        """A kind whose backward inside a stage has the highest of the peaks that it has in each way."""
        metered, cost = self._meters[kind], self.kinds[kind]
        dense_one = BackwardPass(
            cost.backward_first,
            cost.backward_later,
            Gradients(cost.input_gradients, cost.gradient_storages),
            metered.left,
        )
        found = [
            dense_one if way == metered.arriving else metered.meter.measure_again(way, cost.input_gradients)
            for way in ways
        ]
        gradients = found[0].gradients.also_as([one.gradients for one in (dense_one, *found)])
        self.kinds.append(
            replace(
                cost,
                inner_first=tuple(span for one in found for span in one.first),
                inner_later=tuple(span for one in found for span in one.later),
                input_gradients=gradients.origins,
                gradient_storages=gradients.storages,
            )
        )
        self._changed.append(self._changed[kind])
        self._meters.append(metered)
        return len(self.kinds) - 1, tuple(one.left for one in found)

    def _options(self, layer: ChainLayer) -> object:
        """The options of a layer's parameter groups, and which of its parameters each is for."""
        numbers = {id(parameter): number for number, parameter in enumerate(layer.module.parameters())}
        groups = [group for groups in parameter_groups([layer], self.task.groups) for group in groups]
        members = [tuple(numbers[id(parameter)] for parameter in group["params"]) for group in groups]
        given = [options({name: value for name, value in group.items() if name != "params"}) for group in groups]
        return tuple(zip(members, given, strict=True))

    def shared(self, chain: Chain) -> tuple[SharedParameter, ...]:
        """The parameters that several layers use."""
        return tuple(self._shared_parameter(chain, shared) for shared in self._all_shared)

    def _shared_parameter(self, chain: Chain, shared: Shared) -> SharedParameter:
        parameter, (layer, name) = shared.parameter, shared.places[0]
        nbytes, trainable = parameter.untyped_storage().nbytes(), parameter.requires_grad
        state, early = 0, 0
        if trainable:
            original = chain.layers[layer].parameter_names[name]
            wanted = self.task.groups(original, parameter) if self.task.groups is not None else {}
            run = self._meters[self._met[layer]].layer.module.get_parameter(name)  # the chain's own may not be run
            state, early = state_bytes(run, wanted, self.optimizer, self.kernels)
        copies = {user: self._copy_bytes(user, shared) for user in shared.users}
        copying = tuple(user for user in shared.users if copies[user])
        cast_only = tuple(user for user in copying if all(one.cast_only for one in self._parameters(user, shared)))
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
        """Bytes of the half-precision copy of a shared parameter in a layer; 0 where it does not compute with one."""
        return sum(one.copy_bytes for one in self._parameters(layer, shared))

    def _parameters(self, layer: int, shared: Shared) -> list[Parameter]:
        """A shared parameter as a layer has it: once, whatever its names there are."""
        names = {name for user, name in shared.places if user == layer}
        return [one for one in self.kinds[self.layers[layer]].parameters if one.name in names]

    def shared_buffers(self, chain: Chain) -> tuple[SharedBuffer, ...]:
        """The buffers, and tensors that are plain attributes, that several layers hold.

        Raises:
            UsageError: a forward changes one of them.
        """
        found = shared_storages([layer.module for layer in chain.layers])
        for shared in found:
            for user in shared.users:
                buffers = dict(chain.layers[user].module.named_buffers(remove_duplicate=False))
                if shared.is_among(buffers[name] for name in self._changed[self.layers[user]]):
                    _refuse_changes(chain, shared, user)
        return tuple(
            SharedBuffer(
                name=_name(chain, shared), users=shared.users, nbytes=shared.held.nbytes, copied=shared.held.is_buffer
            )
            for shared in found
        )

    def loss(self, chain: Chain, values: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[LayerCost, Layouts]:
        """The cost of the loss on the last layer's outputs, and how the gradients lie that it hands on."""
        count, chain = len(values), replace(chain, packing=self.form.packing)

        def call(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (chain.loss(inputs[:count], inputs[count:]),)

        meter = LayerMeter(call, nn.Module(), [*values, *targets], self.kernels, owner=chain.criterion)
        with (
            named(f"the loss of {self.task.name}", [*values, *targets]),
            refusing(traced=False),
            left_as_found(chain.criterion),
        ):
            cost, (found,) = meter.measure(self.optimizer)
            changed = meter.changed_by_loss(chain.criterion)
        self._memory.check(meter.changed_inputs, f"the loss of {self.task.name}")
        if not found.requires_grad and _is_trained(chain):
            raise UsageError(
                f"the loss of {self.task.name} requires no gradient, so that nothing can be trained: it was detached "
                "(.item(), .detach(), torch.tensor(...)), or depends on no parameter that is trained"
            )
        cost = replace(cost, packing=self.form.packing, unrepeatable=cost.unrepeatable or changed)
        return cost, meter.layouts[:count]


def shared_name(chain: Chain, shared: Shared) -> str:
    """The name of a parameter that several layers share: that of the first."""
    layer, name = shared.places[0]
    return f"{chain.layers[layer].name}.{name}"


def _name(chain: Chain, shared: SharedStorage) -> str:
    return f"{chain.layers[shared.users[0]].name}.{shared.held.name}"


def _refuse_changes(chain: Chain, shared: SharedStorage, user: int) -> NoReturn:
    """A copy of the buffer on another device would miss what this layer does to it, and see other microbatches first.

    Raises:
        UsageError: always.
    """
    layers = ", ".join(chain.layers[number].name for number in shared.users)
    raise UsageError(
        f"layers {layers} share buffer {_name(chain, shared)!r}, and the forward of layer {chain.layers[user].name} "
        "changes it, which a copy on another device would miss: make one layer of those that share it, or give each a "
        "module of its own"
    )


def _is_trained(chain: Chain) -> bool:
    """Whether a layer has a parameter that is trained."""
    return any(parameter.requires_grad for layer in chain.layers for parameter in layer.module.parameters())
