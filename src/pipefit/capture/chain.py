"""A chain of layers: what every other part of pipefit means by a model.

Layers are run one after the other; each takes what the one before returned, a tensor or a tuple of tensors. Between
layers every value is contiguous. One that is laid out otherwise, as after a transpose, crosses with its dimensions in
the order of memory, and the next layer sees it as it was; one that is not dense, as a slice, is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture.copying import constants, held_tensors, hooks_of, named_constants, standing_in
from pipefit.capture.storages import Orders, as_made, contiguous, storage_key
from pipefit.capture.structure import Tree, Values
from pipefit.errors import UsageError
from pipefit.schema.layer_costs import Packing
from pipefit.schema.profile import Block, Measurement
from pipefit.texts import kind_of

# ----------------------------------------------------------------------------------------------------
# Parameters that several layers of a chain use: tied embeddings, layers that share their weights.

Place = tuple[int, str]  # the number of a layer, and the parameter's name there


@dataclass(frozen=True, slots=True)
class Shared:
    """One parameter, and every place that uses it."""

    parameter: nn.Parameter
    places: tuple[Place, ...]

    @property
    def users(self) -> tuple[int, ...]:
        """The layers, rising, each once."""
        return tuple(sorted({layer for layer, _ in self.places}))


def shared_parameters(modules: Sequence[nn.Module]) -> tuple[Shared, ...]:
    """The parameters that more than one of `modules` uses, in the order in which they are first met."""
    places: dict[int, list[Place]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            parameters[id(parameter)] = parameter
            places.setdefault(id(parameter), []).append((number, name))
    found = (Shared(parameters[key], tuple(where)) for key, where in places.items())
    return tuple(shared for shared in found if len(shared.users) > 1)


def give_own_copies(modules: Sequence[nn.Module], shared: Shared, users: Sequence[int]) -> nn.Parameter:
    """A new parameter with the value of `shared`, put in its place in the layers `users`."""
    own = nn.Parameter(shared.parameter.detach().clone(), requires_grad=shared.parameter.requires_grad)
    for layer, name in shared.places:
        if layer in users:
            path, _, attribute = name.rpartition(".")
            setattr(modules[layer].get_submodule(path), attribute, own)
    return own


def own_module(part: nn.Module, met: set[int]) -> nn.Module:
    """`part`, or a copy of it that holds the same tensors, if the chain has it or one of its parameters already.

    So layers are distinct, and a stage may put its own copy of a shared parameter into one without changing `part`.
    `met` are the modules and parameters that the chain has, and becomes those that it has then.
    """
    own = {id(part), *map(id, part.parameters())}
    is_known = not met.isdisjoint(own)
    met |= own
    return copy_with_tensors(part) if is_known else part


def copy_with_tensors(part: nn.Module) -> nn.Module:
    """A copy of `part` that holds the same tensors."""
    tensors = (*part.parameters(), *part.buffers(), *constants(part))
    return copy.deepcopy(part, {id(tensor): tensor for tensor in tensors})


# ----------------------------------------------------------------------------------------------------
# What a layer holds beside its parameters: buffers, and tensors that are plain attributes, storage by
# storage.
#
# Two tensors may lie in one storage, in one layer or in several: a mask that all blocks have, a slice of a
# table.

Key = tuple[int, bool]  # a storage, and whether it is held as a buffer


@dataclass(frozen=True, slots=True)
class Held:
    """A storage that a layer holds, by the name of the first tensor in it; whether as a buffer."""

    name: str
    storage: int
    nbytes: int
    is_buffer: bool


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """A storage that several layers hold: what it is in the first of them, and the numbers of all."""

    held: Held
    users: tuple[int, ...]

    def is_among(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of `tensors` lies in it."""
        return self.held.storage in map(storage_key, tensors)


def held_storages(module: nn.Module) -> dict[Key, Held]:
    """The storages of buffers and of plain attributes; one that is both counts as a buffer."""
    found: dict[Key, Held] = {}
    for name, tensor in module.named_buffers():
        found.setdefault((storage_key(tensor), True), _held(name, tensor, is_buffer=True))
    for name, tensor in named_constants(module):
        if (storage_key(tensor), True) not in found:
            found.setdefault((storage_key(tensor), False), _held(name, tensor, is_buffer=False))
    return found


def shared_storages(modules: Sequence[nn.Module]) -> tuple[SharedStorage, ...]:
    """The storages that more than one of `modules` holds, in the order in which they are first met."""
    first: dict[Key, Held] = {}
    users: dict[Key, list[int]] = {}
    for number, module in enumerate(modules):
        for key, held in held_storages(module).items():
            first.setdefault(key, held)
            users.setdefault(key, []).append(number)
    return tuple(SharedStorage(held, tuple(users[key])) for key, held in first.items() if len(users[key]) > 1)


def _held(name: str, tensor: Tensor, *, is_buffer: bool) -> Held:
    return Held(name, storage_key(tensor), tensor.untyped_storage().nbytes(), is_buffer)


# ----------------------------------------------------------------------------------------------------
# The settings of a module as plain values: what tells one layer of a class from another, besides its weights.
#
# Kernel sizes, probabilities, flags, activation functions: the public attributes of a module and of its
# parts, with the shapes of its parameters and buffers. The profiler measures layers of equal settings once
# (`profiler.survey`), and settings are part of a task's fingerprint (`fake_cuda.fingerprint`).

_PLAIN = (int, float, str, bool, bytes, complex, type(None), type, torch.dtype, torch.device, torch.Size)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def module_settings(module: nn.Module, other: Callable[[Any], object]) -> object:
    """The class and the settings of `module` and its parts, as nested tuples.

    `other` says what stands for a value that is not plain, such as a function, for a hook, and for a module with hooks
    of its own or on one of its parameters.
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
            parts = ((key, None if part is None else module_settings(part, other)) for key, part in value.items())
            settings.append((name, tuple(parts)))
        elif not name.startswith("_"):
            settings.append((name, _setting(value, other)))
    return type(module), tuple(settings)


def layout(tensor: Tensor | None) -> object:
    """Shape, strides, dtype and need for a gradient."""
    return None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


def _setting(value: Any, other: Callable[[Any], object]) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_setting(item, other) for item in value)
    return other(value)


# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """One layer: its name in the model, the module, and what names in its state dict are called in the model's.

    `autocast` is the dtype of autocast while it runs; None without. `packing` is the form in which the module takes its
    inputs: bare, or in a tuple or list. Its inputs arrive with their dimensions in these `orders`, and what it returns
    `leaves` in others; None where that is as the module made it, as behind the last layer. Its forward changes the
    tensors `unseen` by autograd. It has the tensors `unread` for the state dict alone. `parameter_names` has, by its
    name in the layer, what the model's `named_parameters` calls each parameter.
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
        """Its distinct parameters, by their names in the model: of several names the first, as in plain training."""
        for local, parameter in self.module.named_parameters():
            yield self.parameter_names.get(local, local), parameter

    def outputs(self, values: Values) -> Any:
        """What the module returns for the values from the layer before, as it is.

        Changes that autograd does not see are told to it before they happen: a backward that needs what an earlier
        forward has saved is refused then, as after any other change in place.
        """
        if self.unseen:
            held = held_tensors(self.module)
            torch.autograd.graph.increment_version([held[name] for name in self.unseen])
        values = as_made(values, self.orders)
        with autocasting(self.autocast, values):
            return self.module(packed(values, self.packing))

    def __call__(self, values: Values) -> Values:
        """What the layer makes of the values from the layer before."""
        found = as_values(self.outputs(values), self.name)
        return found if self.leaves is None else contiguous(found, self.leaves)


@dataclass(frozen=True, slots=True)
class Chain:
    """A model as layers in order, and the shape of what goes in and comes out.

    `outputs` is None where the last layer's own values, a tensor or a tuple of them, are what the model returns.
    `blocks` are the runs of layers between which a stage may end; none where it may end after every layer.
    `criterion` is the task's loss, None where the last layer returns it; `packing` is how it takes the outputs.
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
        """The chain with what profiling found: how modules, and the loss, take inputs, and how those are laid out."""
        costs = measurement.costs
        left = (*(cost.orders for cost in costs[1:]), None)
        layers = tuple(
            replace(layer, packing=cost.packing, orders=cost.orders, leaves=leaves, unseen=cost.unseen)
            for layer, cost, leaves in zip(self.layers, costs, left, strict=True)
        )
        return replace(self, layers=layers, packing=measurement.loss.packing)

    @property
    def traced(self) -> bool:
        """Whether the layers were made by tracing, for one microbatch size and mode, and not written as modules."""
        return self.outputs is not None

    @property
    def shared(self) -> tuple[Shared, ...]:
        """The parameters that several layers use."""
        return shared_parameters([layer.module for layer in self.layers])

    def flatten(self, inputs: Any) -> Values:
        """The tensors of `inputs` that the first layer takes, in its order, laid out in memory as at capture.

        Raises:
            UsageError: `inputs` are not like those the model was captured with.
        """
        return self.inputs.laid_out(inputs)

    def flatten_targets(self, targets: Any) -> Values:
        """The tensors of `targets`, laid out in memory as at capture; none where there are no targets.

        Raises:
            UsageError: `targets` are not like those the model was captured with.
        """
        if self.targets is not None:
            return self.targets.laid_out(targets)
        if targets is None:
            return ()
        raise UsageError(
            "the targets are new: the model was captured without any; pass None, or let the task's batches have targets"
        )

    def rebuild(self, values: Values) -> Any:
        """What the model returns, from the values of the last layer."""
        return packed(values, self.packing) if self.outputs is None else self.outputs.rebuild(values)

    def loss(self, values: Values, targets: Values) -> Tensor:
        """The loss of one microbatch: of the last layer's values, or, where the model computes it, the value itself.

        Raises:
            UsageError: it is no scalar.
        """
        wanted = None if self.targets is None else self.targets.rebuild(targets)
        with autocasting(self.autocast, values), standing_in(values, self.criterion):
            result = values[0] if self.criterion is None else self.criterion(self.rebuild(values), wanted)
        if not isinstance(result, Tensor) or result.numel() != 1:
            what = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else kind_of(result)
            raise UsageError(f"the loss must be a scalar tensor, not {what}: return the mean over the samples")
        if not result.is_floating_point():
            raise UsageError(
                f"the loss must be of floating-point numbers, not {result.dtype}: a gradient is taken of it"
            )
        return result if result.ndim == 0 else result.reshape(())


def autocasting(dtype: torch.dtype | None, values: Values) -> AbstractContextManager[object]:
    """Autocast to `dtype` on the device of `values`; nothing for None. Casts of weights live as long as the context."""
    return nullcontext() if dtype is None else torch.autocast(values[0].device.type, dtype)


def packed(values: Values, packing: Packing) -> Tensor | Values | list[Tensor]:
    """`values` as a module of the chain, or a user's function, takes them."""
    if packing == "bare":
        return values[0] if len(values) == 1 else values
    return values if packing == "tuple" else list(values)


def packing_of(outputs: Any) -> Packing:
    """How `outputs`, a tensor or a tuple or list of tensors, are packed."""
    if isinstance(outputs, list):
        return "list"
    return "tuple" if isinstance(outputs, tuple) and len(outputs) == 1 else "bare"


def as_values(outputs: Any, where: str) -> Values:
    """`outputs` as a tuple of tensors.

    Raises:
        UsageError: something other than a tensor or a tuple of tensors, or none.
    """
    if isinstance(outputs, tuple | list) and not outputs:
        raise UsageError(f"{where} returns an empty {type(outputs).__name__}; layers pass at least one tensor")
    values = outputs if isinstance(outputs, tuple) else tuple(outputs) if isinstance(outputs, list) else (outputs,)
    strange = next((value for value in values if not isinstance(value, Tensor)), None)
    if strange is not None:
        raise UsageError(f"{where} returns a {type(strange).__name__}; layers pass a tensor or a tuple of tensors")
    return values
