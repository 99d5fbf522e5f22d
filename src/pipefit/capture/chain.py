"""A chain of layers: the form of a model in every other part of pipefit.

Layers run one after the other. Each takes what the layer before it returned, a tensor or a tuple of tensors.
Between layers every value is contiguous: a value with other strides, as after a transpose, crosses with its
dimensions in memory order, and the next layer sees it with its original strides; a non-dense value, such as a
slice, is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipefit.capture.copying import constants, held_tensors, hooks_of, named_constants, standing_in
from pipefit.capture.storages import Orders, as_made, as_new, contiguous, orders_of, storage_key
from pipefit.capture.structure import Tree, Values
from pipefit.errors import UsageError
from pipefit.schema.layer_costs import Packing
from pipefit.schema.profile import Block, Measurement
from pipefit.texts import kind_of

# ---- Parameters that several layers use: tied embeddings, shared weights

Place = tuple[int, str]  # a layer's number, and the parameter's name in the layer


@dataclass(frozen=True, slots=True)
class Shared:
    """One parameter, and every place that uses it."""

    parameter: nn.Parameter
    places: tuple[Place, ...]

    @property
    def users(self) -> tuple[int, ...]:
        """Numbers of the layers that use the parameter, in rising order, each once."""
        return tuple(sorted({layer for layer, _ in self.places}))


def shared_parameters(modules: Sequence[nn.Module]) -> tuple[Shared, ...]:
    """Return the parameters that more than one of `modules` uses, in the order of their first use."""
    places: dict[int, list[Place]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            parameters[id(parameter)] = parameter
            places.setdefault(id(parameter), []).append((number, name))
    result = (Shared(parameters[key], tuple(where)) for key, where in places.items())
    return tuple(shared for shared in result if len(shared.users) > 1)


def give_own_copies(modules: Sequence[nn.Module], shared: Shared, users: Sequence[int]) -> nn.Parameter:
    """Put a new parameter with the value of `shared` into the layers `users`, and return it."""
    own = nn.Parameter(shared.parameter.detach().clone(), requires_grad=shared.parameter.requires_grad)
    for layer, name in shared.places:
        if layer in users:
            path, _, attribute = name.rpartition(".")
            setattr(modules[layer].get_submodule(path), attribute, own)
    return own


def own_module(part: nn.Module, met: set[int]) -> nn.Module:
    """Return `part`, or a copy with the same tensors if the chain already has it or one of its parameters.

    So layers are distinct, and a stage can put its copy of a shared parameter into one layer without changing
    another. `met` holds the ids of the chain's modules and parameters; those of `part` are added.
    """
    own = {id(part), *map(id, part.parameters())}
    is_known = not met.isdisjoint(own)
    met |= own
    return copy_with_tensors(part) if is_known else part


def copy_with_tensors(part: nn.Module) -> nn.Module:
    """Return a copy of `part` that holds the same tensors."""
    tensors = (*part.parameters(), *part.buffers(), *constants(part))
    return copy.deepcopy(part, {id(tensor): tensor for tensor in tensors})


# ---- Storages of buffers and of tensors in plain attributes
#
# Two tensors may lie in one storage, in one layer or in several: a mask that all blocks use, a slice of a
# table.

Key = tuple[int, bool]  # a storage, and whether a buffer lies in it


@dataclass(frozen=True, slots=True)
class HeldStorage:
    """A storage that a layer holds as a buffer or as a plain attribute, named after the first tensor in
    it.
    """

    name: str
    storage: int
    nbytes: int
    is_buffer: bool


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """A storage that several layers hold: the first layer's entry, and the numbers of all the layers."""

    held: HeldStorage
    users: tuple[int, ...]

    def is_among(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether one of `tensors` lies in this storage."""
        return self.held.storage in map(storage_key, tensors)


def held_storages(module: nn.Module) -> dict[Key, HeldStorage]:
    """Return the storages of buffers and of plain attributes; a storage that is both counts as a buffer."""
    result: dict[Key, HeldStorage] = {}
    for name, tensor in module.named_buffers():
        result.setdefault((storage_key(tensor), True), _held(name, tensor, is_buffer=True))
    for name, tensor in named_constants(module):
        if (storage_key(tensor), True) not in result:
            result.setdefault((storage_key(tensor), False), _held(name, tensor, is_buffer=False))
    return result


def shared_storages(modules: Sequence[nn.Module]) -> tuple[SharedStorage, ...]:
    """Return the storages that more than one of `modules` holds, in the order of their first use."""
    first: dict[Key, HeldStorage] = {}
    users: dict[Key, list[int]] = {}
    for number, module in enumerate(modules):
        for key, held in held_storages(module).items():
            first.setdefault(key, held)
            users.setdefault(key, []).append(number)
    return tuple(SharedStorage(held, tuple(users[key])) for key, held in first.items() if len(users[key]) > 1)


def _held(name: str, tensor: Tensor, *, is_buffer: bool) -> HeldStorage:
    return HeldStorage(name, storage_key(tensor), tensor.untyped_storage().nbytes(), is_buffer)


# ---- Settings of a module as plain values, which distinguish layers of one class
#
# Settings are the attributes of a module and of its parts (kernel sizes, probabilities, flags, activation
# functions), with the shapes of its parameters and buffers. The profiler measures layers of equal settings
# once (`profiler.survey`); public settings are part of a task's fingerprint (`fake_cuda.fingerprint`).

_PLAIN = (int, float, str, bool, bytes, complex, type(None), type, torch.dtype, torch.device, torch.Size)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_EVERY_MODULE = frozenset(name for name in vars(nn.Module()) if name.startswith("_"))


def module_key(module: nn.Module) -> object:
    """Return a key that is equal for modules that do and cost the same, up to the values of their tensors.

    They have the same class, settings, names of one tensor, and parts for which this holds too. A module with
    hooks, or with a setting that cannot be compared, differs from all others. Keys are comparable within this
    process, as long as their modules exist.
    """
    settings = module_settings(module, id, _typed, private=True)
    return settings, tuple(first for _, _, first in registered_tensors(module))


def _typed(value: Any) -> object:
    """Return a plain value with its type, since 1 == True == 1.0."""
    return type(value), value


def registered_tensors(module: nn.Module) -> list[tuple[str, Tensor, str]]:
    """Return every parameter and buffer under every name, with its first name."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    first = dict[int, str]()
    return [(name, tensor, first.setdefault(id(tensor), name)) for name, tensor in named]


def module_settings(
    module: nn.Module,
    other: Callable[[Any], object],
    plain: Callable[[Any], object] = lambda value: value,
    *,
    private: bool = False,
) -> object:
    """Return the class and the settings of `module` and its parts, as nested tuples.

    With `private`, attributes that begin with an underscore count too. They may change between processes and
    calls, as counters and open files do, so they do not tell tasks apart.

    `other` maps a value that is not plain, such as a function, to its representation; also hooks, and a
    module that has hooks on itself or on one of its own parameters. `plain` maps a plain value.
    """
    settings: list[tuple[str, object]] = []
    hooked = [hook for hooks in _HOOKS for hook in getattr(module, hooks).values()]
    hooked += [hook for parameter in module.parameters(recurse=False) for hook in hooks_of(parameter)]
    if hooked:
        settings.append(("hooks", (other(module), *map(other, hooked))))
    for name, value in sorted(vars(module).items()):
        if name in ("_parameters", "_buffers"):
            settings.append((name, tuple((key, layout(tensor)) for key, tensor in value.items())))
        elif name == "_modules":
            parts = (
                (key, None if part is None else module_settings(part, other, plain, private=private))
                for key, part in value.items()
            )
            settings.append((name, tuple(parts)))
        elif not name.startswith("_") or (private and _is_private_setting(module, name)):
            settings.append((name, _setting(value, other, plain)))
    return type(module), tuple(settings)


def _is_private_setting(module: nn.Module, name: str) -> bool:
    """Return whether a private attribute is a setting; those of torch's modules follow from public ones."""
    is_own = name in _OF_EVERY_MODULE or name.startswith("_pipefit_")
    return not is_own and not type(module).__module__.startswith("torch.")


def layout(tensor: Tensor | None) -> object:
    """Return shape, strides, dtype and `requires_grad` of a tensor; None for None."""
    return (
        None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)
    )


def _setting(value: Any, other: Callable[[Any], object], plain: Callable[[Any], object]) -> object:
    if isinstance(value, _PLAIN):
        return plain(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_setting(item, other, plain) for item in value)
    return other(value)


# ---- Layers and chains


def stored_entries(module: nn.Module) -> dict[str, Any]:
    """Return the parameters, persistent buffers and extra state of a module by name.

    This is its state dict before hooks: a model may store its parameters under other names and in other
    shapes, such as one projection as three, but an optimizer and a checkpoint need the parameters themselves.
    """
    result: dict[str, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and name not in part._non_persistent_buffers_set:
                result[prefix + name] = tensor
    extra = module.state_dict(keep_vars=True).items()
    return result | {name: value for name, value in extra if name.rpartition(".")[2] == "_extra_state"}


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """One layer: its name in the model, its module, and metadata for running it in the chain.

    - `originals` maps names of stored entries of the layer to names in the model.
    - `autocast` is the dtype of autocast while the layer runs; None without autocast.
    - `packing` is the form in which the module takes its inputs: bare, or in a tuple or list.
    - `orders` are the orders of dimensions in which its inputs arrive, `leaves` those in which its outputs
      leave; None if the outputs leave as the module made them, as after the last layer.
    - `unseen` names the tensors that the forward changes without autograd's knowledge.
    - `unread` names the tensors that the layer holds only for the state dict.
    - `parameter_names` maps a parameter's name in the layer to its name in the model's `named_parameters`.
    """

    name: str
    module: nn.Module
    originals: Mapping[str, str] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    packing: Packing = "bare"
    orders: Orders = ()
    leaves: Orders | None = None
    unseen: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()
    parameter_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The distinct parameters with their names in the model; of several names the first."""
        for local, parameter in self.module.named_parameters():
            yield self.parameter_names.get(local, local), parameter

    def outputs(self, values: Values) -> Any:
        """Return the module's outputs for the values from the layer before, unchanged.

        The version counters of `unseen` tensors are increased before the forward. A backward that needs what
        an earlier forward saved then fails, as after any other change in place.
        """
        if self.unseen:
            held = held_tensors(self.module)
            torch.autograd.graph.increment_version([held[name] for name in self.unseen])
        given = packed(as_made(values, self.orders) if self.orders else values, self.packing)
        if self.autocast is None:
            return self.module(given)
        with autocasting(self.autocast, values):
            return self.module(given)

    def __call__(self, values: Values) -> Values:
        """Return the values that the layer passes on, given the values from the layer before."""
        return self._passed_on(self.outputs(values))

    def _passed_on(self, outputs: Any) -> Values:
        result = as_values(outputs, self.name)
        return result if self.leaves is None else contiguous(result, self.leaves)

    def caller(self) -> Callable[[Values], Values]:
        """Return a function that does what a call of the layer does, in fewer steps if its form allows."""
        if self.unseen or self.orders or self.autocast is not None or self.packing != "bare" or self.leaves:
            return self
        module, passed_on, is_last = self.module, self._passed_on, self.leaves is None

        def call(values: Values) -> Values:
            outputs = module(values[0] if len(values) == 1 else values)
            if not isinstance(outputs, Tensor):
                return passed_on(outputs)
            return (outputs if is_last else as_new(outputs),)

        return call


@dataclass(frozen=True, slots=True)
class Chain:
    """A model as layers in order, with the structure of its inputs and outputs.

    - `outputs` is None if the model returns the last layer's own values, a tensor or a tuple of tensors.
    - `blocks` are the runs of layers between which a stage may end; empty if a stage may end after every
      layer.
    - `criterion` is the task's loss; None if the last layer returns the loss.
    - `packing` is the form in which `criterion` takes the outputs.
    """

    name: str
    layers: tuple[ChainLayer, ...]
    blocks: tuple[Block, ...] = field(kw_only=True, default=())
    inputs: Tree = field(kw_only=True)
    outputs: Tree | None = field(kw_only=True, default=None)
    targets: Tree | None = field(kw_only=True, default=None)
    criterion: Callable[[Any, Any], Tensor] | None = field(kw_only=True, default=None)
    autocast: torch.dtype | None = field(kw_only=True, default=None)
    packing: Packing = field(kw_only=True, default="bare")

    def measured(self, measurement: Measurement) -> Chain:
        """Return the chain with the measured packing and orders of its layers, and the packing of its
        loss.
        """
        costs = measurement.costs
        left = (*(cost.orders for cost in costs[1:]), None)
        layers = tuple(
            replace(layer, packing=cost.packing, orders=cost.orders, leaves=leaves, unseen=cost.unseen)
            for layer, cost, leaves in zip(self.layers, costs, left, strict=True)
        )
        return replace(self, layers=layers, packing=measurement.loss.packing)

    @property
    def traced(self) -> bool:
        """True if the layers were traced, for one microbatch size and mode, rather than written as
        modules.
        """
        return self.outputs is not None

    @property
    def shared(self) -> tuple[Shared, ...]:
        """The parameters that several layers use."""
        return shared_parameters([layer.module for layer in self.layers])

    def flatten(self, inputs: Any) -> Values:
        """Return the tensors of `inputs` that the first layer takes, laid out in memory as at capture.

        Raises:
            UsageError: `inputs` differ from those the model was captured with.
        """
        return self.inputs.laid_out(inputs)

    def flatten_targets(self, targets: Any) -> Values:
        """Return the tensors of `targets`, laid out in memory as at capture; empty without targets.

        Raises:
            UsageError: `targets` differ from those the model was captured with.
        """
        if self.targets is not None:
            return self.targets.laid_out(targets)
        if targets is None:
            return ()
        raise UsageError(
            "this batch has targets, but the model was captured without targets: pass None, or return "
            "targets from the task's batch function"
        )

    def rebuild(self, values: Values) -> Any:
        """Return the model's outputs from the values of the last layer."""
        return packed(values, self.packing) if self.outputs is None else self.outputs.rebuild(values)

    def loss(self, values: Values, targets: Values) -> Tensor:
        """Return the loss of one microbatch: the criterion of the last layer's values, or the value itself.

        Raises:
            UsageError: the loss is not a floating-point scalar.
        """
        wanted = None if self.targets is None else self.targets.rebuild(targets)
        with autocasting(self.autocast, values), standing_in(values, self.criterion):
            result = values[0] if self.criterion is None else self.criterion(self.rebuild(values), wanted)
        if not isinstance(result, Tensor) or result.numel() != 1:
            what = (
                f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else kind_of(result)
            )
            raise UsageError(
                f"the loss must be a scalar tensor, not {what}: return the mean over the samples"
            )
        if not result.is_floating_point():
            raise UsageError(
                f"the loss must have a floating-point dtype to have a gradient, not {result.dtype}"
            )
        return result if result.ndim == 0 else result.reshape(())


def autocasting(dtype: torch.dtype | None, values: Values) -> AbstractContextManager[object]:
    """Return an autocast to `dtype` on the device of `values`; a null context for None.

    Casts of weights live as long as the context.
    """
    return nullcontext() if dtype is None else torch.autocast(values[0].device.type, dtype)


def packed(values: Values, packing: Packing) -> Tensor | Values | list[Tensor]:
    """Return `values` in the form that a module of the chain, or a user's function, takes."""
    if packing == "bare":
        return values[0] if len(values) == 1 else values
    return values if packing == "tuple" else list(values)


class Form(NamedTuple):
    """Form in which values pass to the next layer."""

    packing: Packing = "bare"
    orders: Orders = ()


def passed_on(outputs: Any, where: str, *, is_last: bool) -> tuple[Values, Form]:
    """Return the outputs of layer `where` as the next layer gets them, contiguous, and their form.

    Those of the last layer stay as they are.
    """
    values, packing = as_values(outputs, where), packing_of(outputs)
    if is_last:
        return values, Form(packing)
    orders = orders_of(values)
    return contiguous(values, orders), Form(packing, orders)


def packing_of(outputs: Any) -> Packing:
    """Return how `outputs`, a tensor or a tuple or list of tensors, are packed."""
    if isinstance(outputs, list):
        return "list"
    return "tuple" if isinstance(outputs, tuple) and len(outputs) == 1 else "bare"


def as_values(outputs: Any, where: str) -> Values:
    """Return `outputs` as a tuple of tensors.

    Raises:
        UsageError: `outputs` are empty, or something other than a tensor or a tuple or list of tensors.
    """
    if isinstance(outputs, Tensor):
        return (outputs,)
    if isinstance(outputs, tuple | list) and not outputs:
        raise UsageError(
            f"{where} returns an empty {type(outputs).__name__}; layers pass at least one tensor"
        )
    values = (
        outputs if isinstance(outputs, tuple) else tuple(outputs) if isinstance(outputs, list) else (outputs,)
    )
    strange = next((value for value in values if not isinstance(value, Tensor)), None)
    if strange is not None:
        raise UsageError(
            f"{where} returns a {type(strange).__name__}; layers pass a tensor or a tuple of tensors"
        )
    return values
