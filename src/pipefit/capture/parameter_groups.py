"""Parameter groups of a stage's optimizer: at least one for every layer that is trained.

So an update needs temporary memory for one layer at a time, and the cost of a layer's update does not depend
on its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
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


class ParameterKind(NamedTuple):
    """Group options and number of dimensions of a kind of parameters, and the dimension that ranks divide."""

    options: dict[str, Any]
    dimensions: int
    divided: int | None = None

    def part(self, whole: Tensor) -> Tensor:
        """Return the part of a small parameter, or of its gradient, that the first of two ranks has."""
        return (whole if self.divided is None else whole.narrow(self.divided, 0, _SIDE // 2)).clone()


WHY = (
    "the optimizer computes one number from several parameters, such as a norm of all gradients or a "
    "common step size"
)


def couples(task: Task, module: nn.Module) -> bool:
    """Return whether the task's optimizer computes one number of several parameters like those of `module`.

    Returns False for optimizers that cannot be tested: those that draw random numbers, fail without a model,
    or hold other parameters than they were given.
    """
    groups = parameter_groups([ChainLayer("", module)], task.groups)
    kinds = [kind for kind in kinds_of(groups)[:_MOST] for _ in range(_EACH)]
    key = _key(task.optimizer, kinds)
    if key is None:
        return _couples(task, kinds)
    if key not in _KNOWN:
        _KNOWN[key] = _couples(task, kinds)
    return _KNOWN[key]


def _key(optimizer: object, kinds: Sequence[ParameterKind]) -> Hashable:
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


def _couples(task: Task, kinds: Sequence[ParameterKind]) -> bool:
    """Try the optimizer on small parameters of these kinds."""
    with without_dispatch_modes(), torch.random.fork_rng(devices=[]):
        try:
            alone, again = (trained(task, kinds, at_once=False, seed=seed) for seed in (0, 1))
            together = trained(task, kinds)
        except Exception:  # noqa: BLE001 -- optimizers differ; training explains it better
            return False
        if not all(one.is_given for one in (*alone, *together)):
            return False
        results = [[one.parameter for one in tried] for tried in (alone, again, together)]
        return alike(*results[:2]) and not alike(results[0], results[2])


def kinds_of(
    groups: Sequence[Sequence[dict[str, Any]]], divided: Callable[[nn.Parameter], int | None] = lambda _: None
) -> list[ParameterKind]:
    """Return all kinds of parameters in layers' groups, once each; `divided` returns divided dimensions."""
    result: list[ParameterKind] = []
    for group in (group for of_layer in groups for group in of_layer):
        wanted = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            kind = ParameterKind(wanted, parameter.ndim, divided(parameter))
            if kind not in result:
                result.append(kind)
    return result


class Trained(NamedTuple):
    """A small parameter, and the optimizer that has trained it."""

    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer

    @property
    def is_given(self) -> bool:
        """True if the optimizer holds the parameter, and not those of a model instead."""
        return any(self.parameter is one for group in self.optimizer.param_groups for one in group["params"])


def trained(
    task: Task,
    kinds: Sequence[ParameterKind],
    *,
    at_once: bool = True,
    parts: bool = False,
    seed: int = 0,
    device: torch.device | None = None,
) -> list[Trained]:
    """Train small parameters of these kinds a few steps by one optimizer with shared groups, or by one each.

    With `parts`, only those parts are trained that the first of two ranks has. `seed` is that of torch's
    draws.
    """
    draws, groups = torch.Generator().manual_seed(0), list[dict[str, Any]]()

    def drawn(kind: ParameterKind) -> Tensor:
        whole = torch.randn([_SIDE] * kind.dimensions, generator=draws).to(device)
        return kind.part(whole) if parts else whole

    tried = [nn.Parameter(drawn(kind)) for kind in kinds]
    for kind, parameter in zip(kinds, tried, strict=True):
        known = [one for one in groups if at_once and one["options"] == kind.options]
        if known:
            known[0]["params"].append(parameter)
        else:
            groups.append({"options": kind.options, "params": [parameter]})
    torch.default_generator.manual_seed(seed)
    given = [{**one["options"], "params": one["params"]} for one in groups]
    optimizers = [task.optimizer(given)] if at_once else [task.optimizer([one]) for one in given]
    result = list(map(Trained, tried, optimizers * len(tried) if at_once else optimizers))
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for _ in range(_STEPS if held <= set(map(id, tried)) else 0):  # parameters of a model stay as they are
        for number, (kind, parameter) in enumerate(zip(kinds, tried, strict=True), start=1):
            parameter.grad = number * drawn(kind)
        for optimizer in optimizers:
            optimizer.step()
    return result


def alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether two results of training are equal up to rounding."""
    return all(
        torch.allclose(tensor, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
        for tensor, other in zip(some, others, strict=True)
    )
