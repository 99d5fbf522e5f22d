"""A step of an optimizer for some of its parameters: the groups that hold them are put in for the call.

An optimizer of torch goes through its `param_groups` and keeps state by parameter, so a step of some groups is the part
of a whole step that concerns them. A part is an object of the optimizer's class with the same attributes but other
groups; the state is common, so that parts may run beside each other. What an optimizer does past its groups would be
done again by every part, and is refused by name: attributes that its step changes, and hooks on its steps.

Costs microseconds a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from pipefit.errors import UsageError
from pipefit.runtime.master_weights import MasterWeights

_PUT_IN = frozenset({"param_groups", "_opt_called"})  # what may differ between a part and its whole


class Undivided(UsageError):
    """An optimizer does more in a step than its groups say; `reason` goes on behind the `name` of its class."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)  # with which it is made again from a pickle
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return (
            f"optimizer {self.name} {self.reason}, so that it cannot update a stage in parts: leave its state where it "
            "is, as planners do, or use an optimizer such as AdamW or SGD"
        )


def step_part(optimizer: Optimizer | MasterWeights, parameters: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Step those groups of an optimizer that hold these parameters, and none of the `others`.

    Raises:
        Undivided: the optimizer does more in a step than its groups say.
    """
    before = [other._version for other in others]
    if isinstance(optimizer, MasterWeights):
        whole = optimizer.optimizer
        part = part_of(whole, [optimizer.copies[parameter] for parameter in parameters])
        optimizer.step(part)
    else:
        whole, part = optimizer, part_of(optimizer, parameters)
        part.step()
    whole.__dict__["_opt_called"] = True  # a scheduler of torch asks whether the optimizer has been stepped before it
    if before != [other._version for other in others]:
        raise Undivided(type(whole).__name__, "changes parameters that are not in the groups it is given")
    changed = sorted(
        name for name in part.__dict__.keys() - _PUT_IN if part.__dict__[name] is not whole.__dict__.get(name)
    )
    if changed:
        raise Undivided(type(whole).__name__, f"changes its attribute {changed[0]!r} in its step")


def check_state_apart(optimizer: Optimizer | MasterWeights, own: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Check that an optimizer's tensors for its parameters `own` can be moved without those for `others`.

    Raises:
        Undivided: it keeps one tensor for both, such as a table of what 8 bits stand for.
    """
    kept = [
        {
            item.untyped_storage()._cdata
            for parameter in parameters
            if parameter in optimizer.state
            for item in optimizer.state[parameter].values()
            if isinstance(item, Tensor)
        }
        for parameters in (own, others)
    ]
    if not kept[0].isdisjoint(kept[1]):
        whole = optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer
        raise Undivided(type(whole).__name__, "keeps one tensor for several parameters")


def part_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Optimizer:
    """The optimizer with those of its groups alone that hold these parameters.

    Raises:
        Undivided: a group holds others too, or steps have hooks.
    """
    wanted = set(map(id, parameters))
    groups = [group for group in optimizer.param_groups if not wanted.isdisjoint(map(id, group["params"]))]
    if not wanted.issuperset(id(parameter) for group in groups for parameter in group["params"]):
        raise Undivided(type(optimizer).__name__, "has put parameters of several layers into one group")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise Undivided(type(optimizer).__name__, "has hooks on its steps")
    part: Optimizer = object.__new__(type(optimizer))
    part.__dict__ = {name: value for name, value in optimizer.__dict__.items() if name != "step"}
    part.param_groups = groups
    return part
