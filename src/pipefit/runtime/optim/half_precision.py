"""Master weights, and half-precision copies of weights for autocast.

Bfloat16 rounds away updates smaller than a few thousandths of a parameter. So parameters and gradients are in
half precision, the optimizer updates a float32 copy of each trained parameter, and the copy is rounded into
the parameter afterwards, as in Megatron, DeepSpeed and DAPPLE. With AdamW this takes 16 bytes per parameter:
2 for the parameter, 2 for its gradient, 4 for the copy and 8 for AdamW's state. (Micikevicius et al., Mixed
Precision Training, ICLR 2018.)

An update goes layer by layer: gradients in float32 exist for one layer at a time. The loss scale and the
clipping factor are applied to them, because half-precision gradients would lose digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.capture import ChainLayer, Task, Values, autocasting, without_memory
from pipefit.errors import UsageError, in_one_line
from pipefit.runtime.comm.agreement import Agreement
from pipefit.schema.layer_costs import LayerCost
from pipefit.tensor_parallel import at_each_turn
from pipefit.texts import counted, kind_of
from pipefit.torch_internals import TorchDispatchMode

# ---- Half-precision copies of weights for autocast
# `torch.autocast` casts a weight in every forward, and the graph of every microbatch keeps the copy for its
# backward. Here a stage has one copy for all microbatches, like the weight, which takes the weight's values
# before its first use in a step. Before each forward of a layer autocast is made to cast the weights, and a
# dispatch mode returns aliases of the copies, which autocast keeps in its cache until the layer has run. So
# every forward has its own casts in its graph, as under plain autocast, and gradients are bitwise equal; only
# the memory is shared.
#
# Profiling finds the weights with copies: those in autocast's cache after a forward. Frozen weights, and
# weights that a model casts directly, are not among them. A copy costs about 30 microseconds of the host per
# forward, instead of a cast.

_CAST, _DEVICE = torch.ops.aten._to_copy.default, torch.ops.prim.device.default
_AT_ONCE = 3  # weights per call of the operator


@dataclass(eq=False, slots=True)
class WeightCopy:
    """The memory of a copy; `fresh` while it has the weight's values."""

    tensor: Tensor
    fresh: bool = False

    @staticmethod
    def of(weight: Tensor, dtype: torch.dtype) -> WeightCopy:
        """Return a copy with the memory layout of autocast's."""
        return WeightCopy(torch.empty_like(weight, dtype=dtype, requires_grad=False))

    def follow(self, weight: Tensor) -> None:
        """Take the weight's values, unless the copy is fresh."""
        if not self.fresh:
            with torch.no_grad():
                self.tensor.copy_(weight)
            self.fresh = True


Copied = Sequence[tuple[Tensor, WeightCopy]]  # a layer's weights with their copies


class WeightCopies:
    """Half-precision copies of weights of a stage's layers, from layer `start` on, as `costs` describe them.

    The copy of a weight that several layers share belongs to the first layer that computes with it. If
    parameters are `divided`, copies get memory only while they are gathered: together they may exceed the
    device's memory.
    """

    def __init__(
        self, layers: Sequence[ChainLayer], costs: Sequence[LayerCost], start: int, *, divided: bool = False
    ) -> None:
        self.start = start
        self.copies: dict[int, WeightCopy] = {}  # by the id of the parameter, which the layers keep
        self._weights: dict[int, list[nn.Parameter]] = {}  # with copies, by layer
        self._own: dict[int, list[nn.Parameter]] = {}  # the same, each under its first layer only
        self._cast_only = _cast_only(layers, costs)
        for number, (layer, cost) in enumerate(zip(layers, costs, strict=False), start=start):
            dtype, weights = layer.autocast, copied_weights(layer.module, cost)
            if weights and dtype is not None:
                self._weights[number] = weights
                self._own[number] = [weight for weight in weights if id(weight) not in self.copies]
                for weight in self._own[number]:
                    copy = self.copies[id(weight)] = WeightCopy.of(weight, dtype)
                    if divided:
                        without_memory(copy.tensor)

    @property
    def tensors(self) -> list[Tensor]:
        """Memory of all copies."""
        return [copy.tensor for copy in self.copies.values()]

    def weights(self, layer: int) -> Sequence[nn.Parameter]:
        """Return the weights of a layer that have copies."""
        return self._weights.get(layer, ())

    def own(self, layer: int) -> Sequence[nn.Parameter]:
        """Return the weights whose copies belong to the layer."""
        return self._own.get(layer, ())

    def is_cast_only(self, weight: nn.Parameter) -> bool:
        """Return whether all layers read a weight only through its copy."""
        return id(weight) in self._cast_only

    def of(self, layer: int) -> Copied:
        """Return the weights of a layer with their copies."""
        return [(weight, self.copies[id(weight)]) for weight in self.weights(layer)]

    def renew(self, weight: nn.Parameter) -> WeightCopy:
        """Give a weight a copy in new memory; return the old copy."""
        known = self.copies[id(weight)]
        self.copies[id(weight)] = WeightCopy(torch.empty_like(known.tensor))
        return known

    def outdate(self) -> None:
        """Mark all copies as outdated, because the weights may have changed."""
        for copy in self.copies.values():
            copy.fresh = False


def _cast_only(layers: Sequence[ChainLayer], costs: Sequence[LayerCost]) -> frozenset[int]:
    """Return the ids of the weights that all of their layers read only through copies."""
    result, others = set[int](), set[int]()
    for layer, cost in zip(layers, costs, strict=False):
        names = {parameter.name for parameter in cost.parameters if parameter.cast_only}
        for name, parameter in layer.module.named_parameters():
            (result if name in names else others).add(id(parameter))
    return frozenset(result - others)


def copied_weights(module: nn.Module, cost: LayerCost) -> list[nn.Parameter]:
    """Return the weights of a layer that have copies by its profile."""
    names = {parameter.name for parameter in cost.parameters if parameter.copy_bytes}
    return [parameter for name, parameter in module.named_parameters() if name in names] if names else []


def using(copied: Copied, dtype: torch.dtype | None, values: Values) -> AbstractContextManager[None]:
    """Return a context for a layer's forward on `values` under autocast with these copies as casts."""
    return nullcontext() if not copied or dtype is None else _using(copied, dtype, values)


@contextmanager
def _using(copied: Copied, dtype: torch.dtype, values: Values) -> Iterator[None]:
    for weight, copy in copied:
        copy.follow(weight)
    known = {id(weight): copy.tensor for weight, copy in copied}
    weights = [weight for weight, _ in copied]

    def fill() -> None:
        for first in range(0, len(weights), _AT_ONCE):
            _asked(weights[first : first + _AT_ONCE], _Answers(known))

    with autocasting(dtype, values), at_each_turn(fill):  # another thread's autocast may clear the cache
        fill()
        yield


def cast_by(call: Any, weights: Sequence[Tensor], dtype: torch.dtype, values: Values) -> list[Tensor]:
    """Return the weights whose copies autocast keeps after `call`, a layer's forward on `values`, has run."""
    with autocasting(dtype, values):
        call()
        trained = [weight for weight in weights if weight.requires_grad and weight.dtype == torch.float32]
        return [weight for weight in trained if not _asked([weight], _Answers({}))]


class _Answered(Exception):
    """Ends an operation whose casts have been answered, and whose result is not needed."""


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers casts of weights with aliases of their copies, and ends any other operation.

    `asked` counts the casts.
    """

    def __init__(self, copies: Mapping[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies, self.asked = copies, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # fake tensors call it
            return func(*args, **(kwargs or {}))
        self.asked += func is _CAST
        copy = self._copies.get(id(args[0])) if func is _CAST else None
        if copy is None:
            raise _Answered
        return copy.detach()


def _asked(weights: Sequence[Tensor], answers: _Answers) -> int:
    """Make autocast cast up to three weights, as for a product of them.

    Return the number that it had not cached. The product is never computed, so the shapes need not fit.
    """
    three = [*weights, weights[0], weights[0]][:_AT_ONCE]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_kept, _kept), answers:
            torch.addmm(*three)
    except _Answered:
        return answers.asked
    raise AssertionError("a product of weights was computed past the dispatch mode that ends it")


def _kept(tensor: Tensor) -> Tensor:
    return tensor


# ---- Master weights

Group = dict[str, Any]  # a parameter group of `torch.optim`


class MasterWeights:
    """The task's optimizer over float32 copies of half-precision parameters.

    Args:
        task: its optimizer is made over the copies. It is stepped once for every layer.
        layers: the parameter groups of every layer.
        agreement: has the factor on gradients before an update; None leaves them unchanged.

    Raises:
        UsageError: the optimizer does not have exactly the given parameters.
    """

    def __init__(self, task: Task, layers: Sequence[Sequence[Group]], agreement: Agreement | None) -> None:
        self.agreement = agreement
        self._layers = [[parameter for group in groups for parameter in group["params"]] for groups in layers]
        self.copies: dict[Tensor, nn.Parameter] = {
            p: _float32(p) for parameters in self._layers for p in parameters
        }
        own = [
            {**group, "params": [self.copies[p] for p in group["params"]]}
            for groups in layers
            for group in groups
        ]
        self.optimizer = _made(task, own)
        self._layer_of = {self.copies[p]: n for n, parameters in enumerate(self._layers) for p in parameters}

    @property
    def param_groups(self) -> list[Group]:
        """The optimizer's groups, whose parameters are the copies."""
        return self.optimizer.param_groups

    @property
    def state(self) -> MutableMapping[Tensor, Any]:
        """The optimizer's state for every copy."""
        return self.optimizer.state

    @torch.no_grad()
    def step(self, part: Optimizer | None = None) -> None:
        """Update the copies and round them into the parameters.

        A parameter without a gradient stays unchanged. With a `part` of the optimizer, which has some of its
        groups, only those layers are updated.
        """
        stepper = part or self.optimizer
        every = stepper.param_groups
        try:
            for parameters, groups in zip(self._layers, self._groups_of_layers(stepper), strict=True):
                stepper.param_groups = groups
                if groups:
                    self._update(
                        stepper, [parameter for parameter in parameters if parameter.grad is not None]
                    )
        finally:
            stepper.param_groups = every

    def zero_grad(self) -> None:
        """Free the gradients of the parameters."""
        for parameter in self.copies:
            parameter.grad = None

    def _groups_of_layers(self, stepper: Optimizer) -> list[list[Group]]:
        """Return for every layer the optimizer's groups with its parameters."""
        result: list[list[Group]] = [[] for _ in self._layers]
        for group in stepper.param_groups:
            for layer in dict.fromkeys(self._layer_of[copy] for copy in group["params"]):
                result[layer].append(group)
        return result

    def _update(self, stepper: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Update one layer: convert its gradients to float32, step, and round the copies into the
        parameters.
        """
        try:
            for parameter in parameters:
                self.copies[parameter].grad = self._gradient(parameter)
            stepper.step()
            for parameter in parameters:
                parameter.copy_(self.copies[parameter])
        finally:
            for parameter in parameters:
                self.copies[parameter].grad = None

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient of a parameter in float32, times the factor that the stages agreed on."""
        assert parameter.grad is not None
        gradient = parameter.grad.to(_master(parameter.dtype), copy=True)
        return gradient if self.agreement is None else gradient.mul_(self.agreement.gradient_factor)


def make_optimizer(
    task: Task, layers: Sequence[Sequence[Group]], agreement: Agreement | None = None
) -> Optimizer | MasterWeights:
    """Return the task's optimizer for layers with these groups.

    It updates the parameters, or master weights if the task has them.

    Raises:
        UsageError: the optimizer does not have exactly the given parameters.
    """
    if task.master_weights:
        return MasterWeights(task, layers, agreement)
    return _made(task, [group for groups in layers for group in groups])


def _made(task: Task, groups: list[Group]) -> Optimizer:
    """Return the task's optimizer for these groups.

    It may leave out parameters by their kind, as an optimizer for matrices does, but not by their position:
    that would differ between stages.

    Raises:
        UsageError: it has other parameters, or differs from optimizers for each group separately.
    """
    given = [{**group} for group in groups]  # before the optimizer changes a group
    optimizer = task.optimizer(groups)
    held, whole = _held(optimizer), {id(parameter) for group in given for parameter in group["params"]}
    if not held <= whole or (held < whole and held != _held_of_each(task, given)):
        raise UsageError(
            f"the optimizer of {task.name} works on other parameters than the groups of its stage: pass all "
            "groups to it, and set requires_grad=False for frozen parameters"
        )
    return optimizer


def _held_of_each(task: Task, groups: Sequence[Group]) -> set[int]:
    """Return ids of the parameters that the task's optimizer keeps of each of these groups alone."""
    result = set[int]()
    for group in groups:
        with suppress(ValueError):  # an optimizer without parameters
            result |= _held(task.optimizer([{**group}]))
    return result


def _held(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def make_scheduler(task: Task, optimizer: Optimizer | MasterWeights | None) -> Any:
    """Return the task's learning-rate scheduler; None if it has none, or without an optimizer.

    Raises:
        UsageError: it cannot be made for this stage's groups, or stepped after every update without
            arguments.
    """
    if task.scheduler is None or optimizer is None:
        return None
    try:
        made = task.scheduler(optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer)
    except Exception as error:
        raise UsageError(
            f"the scheduler of {task.name} cannot be created for "
            f"{counted(len(optimizer.param_groups), 'parameter group')} ({in_one_line(error)}): each stage "
            "creates a scheduler with one group for each layer, so give one number or function for all "
            "groups, not a list"
        ) from error
    try:
        signature(made.step).bind()
    except (AttributeError, TypeError) as error:
        raise UsageError(
            f"the scheduler of {task.name} ({kind_of(made)}) is stepped after every update, without "
            f"arguments, which fails ({in_one_line(error)}): use a scheduler that depends only on the "
            "number of steps, such as LambdaLR, not ReduceLROnPlateau"
        ) from error
    return made


def copies_of(optimizer: Optimizer | MasterWeights | None) -> Mapping[Tensor, nn.Parameter]:
    """Map parameters to the float32 copies that an optimizer updates.

    The map is empty if it updates parameters directly.
    """
    return optimizer.copies if isinstance(optimizer, MasterWeights) else {}


def _float32(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(_master(parameter.dtype), copy=True))


def _master(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter's copy: float32, or the own dtype if it is complex."""
    return dtype if dtype.is_complex else torch.float32
