"""Parameter groups of a stage's optimizer: at least one for every layer that is trained.

So an update needs temporary memory for one layer at a time, and the cost of a layer's update does not depend
on its stage.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipefit.capture.chain import ChainLayer
from pipefit.capture.task import ParameterOptions, Task
from pipefit.errors import UsageError, in_one_line
from pipefit.texts import shortened
from pipefit.torch_internals import without_dispatch_modes


def parameter_groups(
    layers: Sequence[ChainLayer], options: ParameterOptions | None
) -> list[list[dict[str, Any]]]:
    """Return the groups of every layer that is trained: one for each set of options.

    A shared parameter is in a group of the first layer that has it.

    Raises:
        UsageError: `options` fails, or does not return a dictionary of options.
    """
    met: set[int] = set()
    groups: list[list[dict[str, Any]]] = []
    for layer in layers:
        of_layer: list[dict[str, Any]] = []
        for name, parameter in layer.named_parameters:
            if not parameter.requires_grad or id(parameter) in met:
                continue
            met.add(id(parameter))
            wanted = {} if options is None else _wanted(options, name, parameter)
            group = next(
                (g for g in of_layer if {k: v for k, v in g.items() if k != "params"} == wanted), None
            )
            if group is None:
                of_layer.append({"params": [parameter], **wanted})
            else:
                group["params"].append(parameter)
        groups += [of_layer] if of_layer else []
    return groups


def _wanted(options: ParameterOptions, name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Return the options of one parameter.

    Raises:
        UsageError: `options` fails, or does not return a dictionary of options.
    """
    try:
        result: object = options(name, parameter)
    except Exception as error:
        raise UsageError(f"the function groups of the Task fails for {name}: {in_one_line(error)}") from error
    if not isinstance(result, dict) or not all(isinstance(key, str) and key != "params" for key in result):
        raise UsageError(
            "the function groups of a Task must return the options of a parameter's group, such as "
            f"{{'weight_decay': 0.0}}, not {shortened(repr(result))} as for {name}"
        )
    return result


# ---- Optimizers that couple parameters, so that layers cannot have separate groups
#
# AdamW, Muon and LAMB update each parameter independently. Others compute one number from all parameters,
# such as the step size of Prodigy (Mishchenko and Defazio, 2023) or the norm of all gradients: over a part of
# the model the number would silently differ. So an optimizer is tried on small parameters, together and each
# alone, in milliseconds. If the results differ, the model is one layer, which no plan divides.

_SIDE, _STEPS, _TOLERANCE = 4, 3, 1e-5
_EACH = 2  # parameters of a kind, which may be coupled too
_MOST = 16  # kinds of parameters that are tried, at most
_KNOWN: dict[Hashable, bool] = {}  # answers of this process


class _ParameterKind(NamedTuple):
    """Number of dimensions and group options of a kind of parameters."""

    options: dict[str, Any]
    dimensions: int


WHY = (
    "the optimizer computes one number from several parameters, such as a norm of all gradients or a "
    "common step size"
)


def couples(task: Task, module: nn.Module) -> bool:
    """Return whether the task's optimizer computes one number of several parameters like those of `module`.

    Returns False for optimizers that cannot be tested: those that draw random numbers, fail without a model,
    or hold other parameters than they were given.
    """
    kinds = [kind for kind in _kinds(task, module) for _ in range(_EACH)]
    key = _key(task.optimizer, kinds)
    if key is None:
        return _couples(task, kinds)
    if key not in _KNOWN:
        _KNOWN[key] = _couples(task, kinds)
    return _KNOWN[key]


def _key(optimizer: object, kinds: Sequence[_ParameterKind]) -> Hashable:
    """Return what determines the answer of a class with fixed options; None for other functions, which may
    depend on anything.
    """
    function, given, options = optimizer, (), {}
    if isinstance(optimizer, partial):
        function, given, options = optimizer.func, optimizer.args, optimizer.keywords
    tried = tuple((tuple(kind.options.items()), kind.dimensions) for kind in kinds)
    key = function, given, tuple(options.items()), tried
    try:
        hash(key)
    except TypeError:
        return None
    return key if isinstance(function, type) else None


def _couples(task: Task, kinds: Sequence[_ParameterKind]) -> bool:
    """Try the optimizer on small parameters of these kinds."""
    with without_dispatch_modes(), torch.random.fork_rng(devices=[]):
        try:
            alone, again = (_updated(task, kinds, at_once=False, seed=seed) for seed in (0, 1))
            together = _updated(task, kinds, at_once=True, seed=0)
        except Exception:  # noqa: BLE001 -- what an optimizer asks of parameters is its own; training says it better
            return False
        return _alike(alone, again) and not _alike(alone, together)


def _kinds(task: Task, module: nn.Module) -> list[_ParameterKind]:
    """Return the kinds of parameters that are trained, each once."""
    result: list[_ParameterKind] = []
    for group in (
        group for of_layer in parameter_groups([ChainLayer("", module)], task.groups) for group in of_layer
    ):
        wanted = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            kind = _ParameterKind(wanted, parameter.ndim)
            if len(result) < _MOST and kind not in result:
                result.append(kind)
    return result


def _updated(task: Task, kinds: Sequence[_ParameterKind], *, at_once: bool, seed: int) -> list[Tensor]:
    """Return small parameters after some steps of one optimizer with shared groups, or of one each."""
    draws = torch.Generator().manual_seed(0)
    tried = [nn.Parameter(torch.randn([_SIDE] * kind.dimensions, generator=draws)) for kind in kinds]
    groups: list[dict[str, Any]] = []
    for kind, parameter in zip(kinds, tried, strict=True):
        known = [one for one in groups if at_once and one["options"] == kind.options]
        if known:
            known[0]["params"].append(parameter)
        else:
            groups.append({"options": kind.options, "params": [parameter]})
    torch.manual_seed(seed)
    given = [{**one["options"], "params": one["params"]} for one in groups]
    optimizers = [task.optimizer(given)] if at_once else [task.optimizer([one]) for one in given]
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if held != set(map(id, tried)):
        raise ValueError("it has other parameters, which must not change")
    for _ in range(_STEPS):
        for number, parameter in enumerate(tried, start=1):
            parameter.grad = number * torch.randn(parameter.shape, generator=draws)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in tried]


def _alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(tensor, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
        for tensor, other in zip(some, others, strict=True)
    )
