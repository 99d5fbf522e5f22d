"""Master weights: half-precision parameters and gradients, and an optimizer that works on float32 copies.

A step in bfloat16 rounds away every update that is smaller than a few thousandths of its parameter. So the optimizer
gets a float32 copy of each trained parameter, and the copy is rounded into the parameter afterwards. That is how
Megatron, DeepSpeed and DAPPLE train. With AdamW it takes 16 bytes a parameter: 2 for the parameter, 2 for its gradient,
4 for the copy and 8 for AdamW's state. (Micikevicius et al., Mixed Precision Training, ICLR 2018.)

An update goes layer by layer: gradients in float32 exist for one layer at a time. The loss scale and the clipping
factor are applied to them, because half-precision gradients would lose digits to both.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.capture.task import Task
from pipefit.errors import UsageError, in_one_line
from pipefit.runtime.agreement import Agreement
from pipefit.texts import counted, kind_of

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
