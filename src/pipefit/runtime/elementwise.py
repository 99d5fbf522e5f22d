"""Whether an optimizer updates every element of a parameter by itself, so that ranks may each have a part of it.

AdamW and SGD do. Others compute with rows, columns, norms or products of a whole parameter: on a part they would train
other numbers, and nothing would tell. So an optimizer is tried: on small parameters, and on parts of them, where layers
are profiled for ranks, and where these begin to train. Costs milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture.chain import ChainLayer
from pipefit.capture.parameter_groups import parameter_groups
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.fake.fingerprint import options
from pipefit.runtime.master_weights import Group
from pipefit.sharding import Shard

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


def check_elementwise(
    task: Task, layers: Sequence[ChainLayer], shards: Mapping[str, Shard], device: torch.device
) -> None:
    """Check that ranks can update parts of the parameters of `layers` with the task's optimizer.

    `shards` has what a rank has of them, by their names in the model; it is tried on `device`, and on no fake tensors.

    Raises:
        UsageError: it computes with more of a parameter than the element that it updates.
    """
    names = {
        id(parameter): layer.originals[local]
        for layer in layers
        for local, parameter in layer.module.named_parameters(remove_duplicate=False)
    }
    draws, tried = torch.Generator().manual_seed(0), list[tuple[Group, list[_Tried]]]()
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        for given, kinds in _different(parameter_groups(layers, task.groups), names, shards):
            tried.append((given, [_tried(kind, draws, device) for kind in kinds]))
        found = _coupled(task, tried, draws) if tried else ""
    if found:
        raise UsageError(
            f"optimizer {found} of {task.name} updates a parameter by more than its elements one by one, as by norms, "
            "rows or random numbers of all of it, and tensor shards have parts: use an optimizer such as AdamW or SGD, "
            "or no tensor shards"
        )


def _different(
    layers: Sequence[Sequence[Group]], names: Mapping[int, str], shards: Mapping[str, Shard]
) -> Iterator[tuple[Group, tuple[_Kind, ...]]]:
    """The options of every group, and the kinds of its parameters; groups that are alike once."""
    seen = set[object]()
    for group in (group for of_layer in layers for group in of_layer):
        given = {name: value for name, value in group.items() if name != "params"}
        kinds = _kinds(group, names, shards)
        if (key := (options(given), kinds)) not in seen:
            seen.add(key)
            yield given, kinds


def _coupled(task: Task, groups: Sequence[tuple[Group, list[_Tried]]], draws: torch.Generator) -> str:
    """The class of the task's optimizer if it computes with more than one element; empty if it does not."""
    every = [one for _, of_group in groups for one in of_group]
    whole = task.optimizer([{**given, "params": [one.whole for one in own]} for given, own in groups])
    part = task.optimizer([{**given, "params": [one.part for one in own]} for given, own in groups])
    for _ in range(_STEPS):
        _step(whole, part, every, draws)
    alike = all(_alike(one, part) for one in every if one.kind.divided is not None)
    return "" if alike else type(part).__name__


def _kinds(group: Group, names: Mapping[int, str], shards: Mapping[str, Shard]) -> tuple[_Kind, ...]:
    parameters: list[nn.Parameter] = group["params"]
    return tuple(dict.fromkeys(_Kind(p.ndim, shards[names[id(p)]].dim) for p in parameters))


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
