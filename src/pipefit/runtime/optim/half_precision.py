"""Master weights: half-precision parameters and gradients, and an optimizer that works on float32 copies.

A step in bfloat16 rounds away every update that is smaller than a few thousandths of its parameter. So the optimizer
gets a float32 copy of each trained parameter, and the copy is rounded into the parameter afterwards. That is how
Megatron, DeepSpeed and DAPPLE train. With AdamW it takes 16 bytes a parameter: 2 for the parameter, 2 for its gradient,
4 for the copy and 8 for AdamW's state. (Micikevicius et al., Mixed Precision Training, ICLR 2018.)

An update goes layer by layer: gradients in float32 exist for one layer at a time. The loss scale and the clipping
factor are applied to them, because half-precision gradients would lose digits to both.
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
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.capture.chain import ChainLayer, autocasting
from pipefit.capture.storages import without_memory
from pipefit.capture.structure import Values
from pipefit.capture.task import Task
from pipefit.errors import UsageError, in_one_line
from pipefit.runtime.comm.agreement import Agreement
from pipefit.schema.layer_costs import LayerCost
from pipefit.tensor_parallel.lockstep import at_each_turn
from pipefit.texts import counted, kind_of

# ----------------------------------------------------------------------------------------------------
# Half-precision copies of weights that autocast computes with: a stage has one of each, for all microbatches.
#
# `torch.autocast` casts a weight in every forward, and the graph of every microbatch keeps the copy for its
# backward. Here a copy is memory of the stage's, like the weight, and takes the weight's values before its
# first use in a step. Before each forward of a layer autocast is asked for its casts, and a dispatch mode
# answers with aliases of the copies, which autocast keeps in its cache until the layer has run. So every
# forward has casts of its own in its graph, as under plain autocast, and gradients are bitwise the same; only
# their memory is one.
#
# Which weights have copies is seen when a layer is profiled: those that autocast's cache has after a forward.
# It has no frozen ones, and none that a model casts itself. Costs about 30 microseconds of the host for each
# copy and forward, instead of a cast.

_CAST, _DEVICE = torch.ops.aten._to_copy.default, torch.ops.prim.device.default
_AT_ONCE = 3  # weights that one call of the operator that is asked takes


@dataclass(eq=False, slots=True)
class WeightCopy:
    """The memory of a copy; `fresh` while it has the weight's values."""

    tensor: Tensor
    fresh: bool = False

    @staticmethod
    def of(weight: Tensor, dtype: torch.dtype) -> WeightCopy:
        """One that lies in memory as autocast's own would."""
        return WeightCopy(torch.empty_like(weight, dtype=dtype, requires_grad=False))

    def follow(self, weight: Tensor) -> None:
        """Take the weight's values, unless it has them."""
        if not self.fresh:
            with torch.no_grad():
                self.tensor.copy_(weight)
            self.fresh = True


Copied = Sequence[tuple[Tensor, WeightCopy]]  # weights, as a layer has them, with their copies


class WeightCopies:
    """The copies of the weights of a stage's layers, the first of which has the number `start`; `costs` say of which.

    That of a weight which several layers share belongs to the first of them that computes with it. Where parameters are
    `divided`, copies have no memory until they are gathered: all of them need not fit.
    """

    def __init__(
        self, layers: Sequence[ChainLayer], costs: Sequence[LayerCost], start: int, *, divided: bool = False
    ) -> None:
        self.start = start
        self.copies: dict[int, WeightCopy] = {}  # by the id of the parameter, which the layers keep
        self._weights: dict[int, list[nn.Parameter]] = {}  # that have copies, by layer
        self._own: dict[int, list[nn.Parameter]] = {}  # the same, each with the first layer alone
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
        """The memory of all copies."""
        return [copy.tensor for copy in self.copies.values()]

    def weights(self, layer: int) -> Sequence[nn.Parameter]:
        """The weights of a layer that have copies."""
        return self._weights.get(layer, ())

    def own(self, layer: int) -> Sequence[nn.Parameter]:
        """Those of them whose copies belong to the layer."""
        return self._own.get(layer, ())

    def is_cast_only(self, weight: nn.Parameter) -> bool:
        """Whether all layers read a weight through its copy alone."""
        return id(weight) in self._cast_only

    def of(self, layer: int) -> Copied:
        """The weights of a layer with their copies."""
        return [(weight, self.copies[id(weight)]) for weight in self.weights(layer)]

    def renew(self, weight: nn.Parameter) -> WeightCopy:
        """Give a weight a copy in new memory; the one that it had."""
        known = self.copies[id(weight)]
        self.copies[id(weight)] = WeightCopy(torch.empty_like(known.tensor))
        return known

    def outdate(self) -> None:
        """The weights may have changed."""
        for copy in self.copies.values():
            copy.fresh = False


def _cast_only(layers: Sequence[ChainLayer], costs: Sequence[LayerCost]) -> frozenset[int]:
    """The ids of the weights that every layer which has them reads through their copies alone."""
    found, others = set[int](), set[int]()
    for layer, cost in zip(layers, costs, strict=False):
        names = {parameter.name for parameter in cost.parameters if parameter.cast_only}
        for name, parameter in layer.module.named_parameters():
            (found if name in names else others).add(id(parameter))
    return frozenset(found - others)


def copied_weights(module: nn.Module, cost: LayerCost) -> list[nn.Parameter]:
    """The weights of a layer that have copies by its profile."""
    names = {parameter.name for parameter in cost.parameters if parameter.copy_bytes}
    return [parameter for name, parameter in module.named_parameters() if name in names] if names else []


def using(copied: Copied, dtype: torch.dtype | None, values: Values) -> AbstractContextManager[None]:
    """Inside, a layer runs on `values` under autocast to `dtype`, whose casts of these weights are their copies."""
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

    with autocasting(dtype, values), at_each_turn(fill):  # on another thread's turn its autocast may clear the cache
        fill()
        yield


def cast_by(call: Any, weights: Sequence[Tensor], dtype: torch.dtype, values: Values) -> list[Tensor]:
    """The weights of which autocast keeps copies when `call`, a layer's forward on `values`, has run."""
    with autocasting(dtype, values):
        call()
        trained = [weight for weight in weights if weight.requires_grad and weight.dtype == torch.float32]
        return [weight for weight in trained if not _asked([weight], _Answers({}))]


class _Answered(Exception):
    """The casts have been answered; what they are for need not be computed."""


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers casts of weights with aliases of their copies, and ends any other operation. `asked` counts the casts."""

    def __init__(self, copies: Mapping[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies, self.asked = copies, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # a fake tensor is asked for it
            return func(*args, **(kwargs or {}))
        self.asked += func is _CAST
        copy = self._copies.get(id(args[0])) if func is _CAST else None
        if copy is None:
            raise _Answered
        return copy.detach()


def _asked(weights: Sequence[Tensor], answers: _Answers) -> int:
    """Let autocast cast up to three weights, as for a product of them, whose shapes nobody gets to check; how many it
    had not in its cache.
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


# ----------------------------------------------------------------------------------------------------

Group = dict[str, Any]  # a parameter group, as `torch.optim` takes it


class MasterWeights:
    """The task's optimizer over float32 copies of half-precision parameters.

    Args:
        task: its optimizer is made over the copies. It is stepped once for every layer.
        layers: the parameter groups of every layer.
        agreement: tells what gradients are multiplied by before an update; None leaves them as they are.

    Raises:
        UsageError: the optimizer has not the parameters that it is given.
    """

    def __init__(self, task: Task, layers: Sequence[Sequence[Group]], agreement: Agreement | None) -> None:
        self.agreement = agreement
        self._layers = [[parameter for group in groups for parameter in group["params"]] for groups in layers]
        self.copies: dict[Tensor, nn.Parameter] = {p: _float32(p) for parameters in self._layers for p in parameters}
        own = [{**group, "params": [self.copies[p] for p in group["params"]]} for groups in layers for group in groups]
        self.optimizer = _made(task, own)
        self._layer_of = {self.copies[p]: n for n, parameters in enumerate(self._layers) for p in parameters}

    @property
    def param_groups(self) -> list[Group]:
        """The optimizer's groups; their parameters are the copies."""
        return self.optimizer.param_groups

    @property
    def state(self) -> MutableMapping[Tensor, Any]:
        """What the optimizer keeps for every copy."""
        return self.optimizer.state

    @torch.no_grad()
    def step(self, part: Optimizer | None = None) -> None:
        """Update the copies and round them into the parameters. A parameter without a gradient is left alone.

        With a `part` of the optimizer, which has some of its groups, only those layers are updated.
        """
        stepper = part or self.optimizer
        every = stepper.param_groups
        try:
            for parameters, groups in zip(self._layers, self._groups_of_layers(stepper), strict=True):
                stepper.param_groups = groups
                if groups:
                    self._update(stepper, [parameter for parameter in parameters if parameter.grad is not None])
        finally:
            stepper.param_groups = every

    def zero_grad(self) -> None:
        """Free the gradients of the parameters."""
        for parameter in self.copies:
            parameter.grad = None

    def _groups_of_layers(self, stepper: Optimizer) -> list[list[Group]]:
        """For every layer the optimizer's groups that have parameters of it."""
        found: list[list[Group]] = [[] for _ in self._layers]
        for group in stepper.param_groups:
            for layer in dict.fromkeys(self._layer_of[copy] for copy in group["params"]):
                found[layer].append(group)
        return found

    def _update(self, stepper: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """One layer: gradients in float32, the optimizer's step, and the copies rounded into the parameters."""
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
        """The gradient of a parameter in float32, times what the stages agreed on."""
        assert parameter.grad is not None
        gradient = parameter.grad.to(_master(parameter.dtype), copy=True)
        return gradient if self.agreement is None else gradient.mul_(self.agreement.gradient_factor)


def make_optimizer(
    task: Task, layers: Sequence[Sequence[Group]], agreement: Agreement | None = None
) -> Optimizer | MasterWeights:
    """The task's optimizer of layers with these parameter groups: over the parameters themselves or, where the task's
    precision says so, over master weights.

    Raises:
        UsageError: the optimizer has not the parameters that it is given.
    """
    if task.master_weights:
        return MasterWeights(task, layers, agreement)
    return _made(task, [group for groups in layers for group in groups])


def _made(task: Task, groups: list[Group]) -> Optimizer:
    """The task's optimizer of these groups.

    It may leave out parameters by what they are, as one for matrices does, but not by where they stand: that would be
    others in every stage.

    Raises:
        UsageError: it has others besides, or not those that it has of each group alone.
    """
    given = [{**group} for group in groups]  # before the optimizer changes a group
    made = task.optimizer(groups)
    held, whole = _held(made), {id(parameter) for group in given for parameter in group["params"]}
    if not held <= whole or (held < whole and held != _held_of_each(task, given)):
        raise UsageError(
            f"the optimizer of {task.name} works on other parameters than the groups that it is given, which are those "
            "of a stage: give it all groups, and set requires_grad=False for what is not to be trained"
        )
    return made


def _held_of_each(task: Task, groups: Sequence[Group]) -> set[int]:
    """What the task's optimizer works on of each of these groups alone, of which it may take none."""
    found = set[int]()
    for group in groups:
        with suppress(ValueError):  # an optimizer without parameters
            found |= _held(task.optimizer([{**group}]))
    return found


def _held(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def make_scheduler(task: Task, optimizer: Optimizer | MasterWeights | None) -> Any:
    """The task's learning-rate scheduler; None where there is none, or nothing to schedule.

    Raises:
        UsageError: it cannot be made of this stage's groups, or be stepped after every update without arguments.
    """
    if task.scheduler is None or optimizer is None:
        return None
    try:
        made = task.scheduler(optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer)
    except Exception as error:
        raise UsageError(
            f"the scheduler of {task.name} cannot be made of {counted(len(optimizer.param_groups), 'parameter group')} "
            f"({in_one_line(error)}): every stage makes one, and has a group for each layer, so give one number or "
            "function for all groups, not a list"
        ) from error
    try:
        signature(made.step).bind()
    except (AttributeError, TypeError) as error:
        raise UsageError(
            f"the scheduler of {task.name} ({kind_of(made)}) is stepped after every update, without arguments, and "
            f"cannot be ({in_one_line(error)}): use one that follows the number of steps alone, such as LambdaLR, not "
            "ReduceLROnPlateau"
        ) from error
    return made


def copies_of(optimizer: Optimizer | MasterWeights | None) -> Mapping[Tensor, nn.Parameter]:
    """The float32 copy that an optimizer works on instead of each parameter; empty where it works on parameters."""
    return optimizer.copies if isinstance(optimizer, MasterWeights) else {}


def _float32(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(_master(parameter.dtype), copy=True))


def _master(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the copy of a parameter: complex ones keep theirs."""
    return dtype if dtype.is_complex else torch.float32
