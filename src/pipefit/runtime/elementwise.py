"""Whether an optimizer updates every element of a parameter by itself, so that ranks may each have a part of it.

AdamW and SGD do. Others compute with rows, columns, norms or products of a whole parameter: on a part they would train
other numbers, and nothing would tell. So an optimizer is tried: on small parameters, and on parts of them. Costs
milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.capture.chain import ChainLayer
from pipefit.capture.parameter_groups import parameter_groups
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.runtime.rank_shards import RankShards

_SIDE, _STEPS, _TOLERANCE = 4, 3, 1e-5


class _Kind(NamedTuple):
    """What distinguishes parameters of a group here: how many dimensions, and which of them ranks divide."""

    dimensions: int
    divided: int | None


class _Tried(NamedTuple):
    """The same parameters twice: whole, and as a rank would have them."""

    kind: _Kind
    whole: nn.Parameter
    part: nn.Parameter


def check_elementwise(task: Task, layers: Sequence[ChainLayer], shards: RankShards, device: torch.device) -> None:
    """Check that ranks can update parts of the parameters of `layers` with the task's optimizer.

    Raises:
        UsageError: it computes with more of a parameter than the element that it updates.
    """
    draws = torch.Generator().manual_seed(0)
    groups = [group for of_layer in parameter_groups(layers, task.groups) for group in of_layer]
    names = {
        id(parameter): layer.originals[local]
        for layer in layers
        for local, parameter in layer.module.named_parameters(remove_duplicate=False)
    }
    if not groups:  # nothing is trained here
        return
    tried = [[_tried(kind, draws, device) for kind in _kinds(group, names, shards)] for group in groups]
    with torch.random.fork_rng(devices=[]):
        whole, part = (
            task.optimizer([{**group, "params": own} for group, own in zip(groups, of_groups, strict=True)])
            for of_groups in ([[t.whole for t in of] for of in tried], [[t.part for t in of] for of in tried])
        )
        for _ in range(_STEPS):
            _step(whole, part, [one for of_group in tried for one in of_group], draws)
    for one in (one for of_group in tried for one in of_group if one.kind.divided is not None):
        if not _alike(one, part):
            raise UsageError(
                f"optimizer {type(part).__name__} of {task.name} updates a parameter by more than its elements one by "
                "one, as by norms, rows or random numbers of all of it, and tensor shards have parts: use an optimizer "
                "such as AdamW or SGD, or a plan without tensor shards"
            )


def _kinds(group: Mapping[str, Any], names: Mapping[int, str], shards: RankShards) -> list[_Kind]:
    parameters: list[nn.Parameter] = group["params"]
    found = (_Kind(p.ndim, shards.shards[names[id(p)]][0].dim) for p in parameters)
    return list(dict.fromkeys(found))


def _tried(kind: _Kind, draws: torch.Generator, device: torch.device) -> _Tried:
    whole = torch.randn([_SIDE] * kind.dimensions, generator=draws).to(device)
    return _Tried(kind, nn.Parameter(whole), nn.Parameter(_part(whole, kind)))


def _part(whole: Tensor, kind: _Kind) -> Tensor:
    """What one of two ranks has."""
    return (whole if kind.divided is None else whole.narrow(kind.divided, 0, _SIDE // 2)).clone()


def _step(whole: Optimizer, part: Optimizer, tried: Sequence[_Tried], draws: torch.Generator) -> None:
    """One step of both optimizers, with the same gradients."""
    for one in tried:
        one.whole.grad = torch.randn(one.whole.shape, generator=draws).to(one.whole.device)
        one.part.grad = _part(one.whole.grad, one.kind)
    whole.step()
    part.step()


def _alike(one: _Tried, part: Optimizer) -> bool:
    """Whether a part has been updated as it was within the whole, and all that is kept for it is divided like it."""
    kept = [item for item in part.state.get(one.part, {}).values() if isinstance(item, Tensor) and item.numel() > 1]
    expected = _part(one.whole.detach(), one.kind)
    return all(item.shape == one.part.shape for item in kept) and torch.allclose(
        one.part, expected, rtol=_TOLERANCE, atol=_TOLERANCE
    )
