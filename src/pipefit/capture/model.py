"""Capture of a task's module as a chain: layer by layer as written, or through `torch.export`.

An `nn.Sequential` is used as it is: its author decided what a layer is. Every other module, and a Sequential
with its own forward or hooks, is traced once, for the shapes of a sample, and cut between its modules.
Nothing is computed or allocated.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import nn

from pipefit.capture.chain import Chain, ChainLayer, own_module, packing_of, stored_entries
from pipefit.capture.copying import hooks_of
from pipefit.capture.parameter_groups import WHY, couples
from pipefit.capture.random_state import seed_torch
from pipefit.capture.refusals import refuse_module
from pipefit.capture.sample import in_mode, sample
from pipefit.capture.structure import Tree
from pipefit.capture.task import Task
from pipefit.capture.traced import WHOLE, traced_chain
from pipefit.errors import PipefitWarning, UsageError
from pipefit.schema.profile import Block, Target
from pipefit.schema.validation import instance
from pipefit.texts import kind_of, shortened

# ---- Supported torch releases: tracing, fake tensors and the simulated allocator depend on internals
#
# An older release fails before any other part of torch is used. A newer one gives a warning: code that moved
# fails by name, and kernels are measured in any release, but what CUDA chooses and reserves may have changed
# unseen. `pyproject.toml` requires only the oldest: with an upper limit, pip would silently replace an
# installed torch, a download of gigabytes.

FIRST, LAST = (2, 11), (2, 15)  # tested with each release, the last included


def check_release(version: str) -> None:
    """Check that this torch release is supported; emit a `PipefitWarning` if it is newer.

    Raises:
        UsageError: the release is too old. The message says which to install.
    """
    result = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    first, last = (".".join(map(str, release)) for release in (FIRST, LAST))
    if result < FIRST:
        raise UsageError(
            f"pipefit follows torch {first} to {last} to the byte, but this is torch {version}: install a "
            f"supported version, such as pip install 'torch=={last}.*'"
        )
    if result > LAST:
        warnings.warn(
            f"this is torch {version}, but pipefit is tested with torch {first} to {last}: peaks for the "
            "target cuda may be wrong, and models may be refused that could be planned. Install a tested "
            f"version with pip install 'torch=={last}.*'",
            PipefitWarning,
            stacklevel=2,
        )


# ---- Capture


def capture(task: Task, inputs: Any, targets: Any = None, *, target: Target = "cpu") -> Chain:
    """Return the chain of the task's module for microbatches like `inputs` and `targets`.

    `target` is where the chain will run: the casts of a traced module under autocast depend on it.

    Raises:
        UsageError: the inputs hold no tensor, the module has no layers or torch.export cannot trace it, or a
            parameter that several layers use has hooks.
    """
    module = task.build()
    refuse_module(module, task.name)
    if isinstance(inputs, tuple | list | dict) and not inputs:
        raise UsageError(
            f"the inputs of a batch of {task.name} contain no tensor to split into microbatches: pass at "
            "least one tensor"
        )
    whole = couples(task, module)
    if is_chain(module):
        blocks = (Block(name=WHOLE, layers=1, undivided=WHY),) if whole else ()
        layers, given = _by_hand(module, task.name, whole=whole), Tree.of("the inputs", inputs)
        made = Chain(task.name, layers, blocks=blocks, inputs=given, criterion=task.loss)
        result = with_batch(made, inputs, targets)
    else:
        result = traced_chain(task, module, inputs, _wanted(targets), target, whole=whole)
    result = replace(result, layers=tuple(_with_names(result.layers, module)))
    _refuse_shared_hooks(result)
    if task.autocast is None:
        return result
    layers = tuple(replace(layer, autocast=task.autocast) for layer in result.layers)
    return replace(result, layers=layers, autocast=task.autocast)


def built(task: Task, *, seed: int = 0, target: Target = "cpu") -> Task:
    """Return `task` with its module built, in its training mode; the caller's random state does not change.

    A factory runs after `torch.manual_seed(seed)`, so every worker builds the same module. For a target other
    than CUDA, the generators of GPUs are not seeded.
    """
    with torch.random.fork_rng(devices=[]):
        seed_torch(seed, target=target)
        return replace(task, module=in_mode(task.build(), True))


def build_chain(task: Task, microbatch_size: int, *, seed: int = 0, target: Target = "cpu") -> Chain:
    """Return the chain of the task's module for microbatches of this size; see `built` and `capture`.

    Raises:
        UsageError: the module cannot be captured, or a batch is invalid.
    """
    return capture(built(task, seed=seed, target=target), *sample(task, microbatch_size), target=target)


def chain(parts: Sequence[nn.Module | tuple[str, nn.Module]]) -> nn.Sequential:
    """Return modules, or (name, module) pairs, as a model for `Task` that runs them in order, each a layer.

    Each takes what the module before it returned: a tensor, or a tuple or list of tensors as one argument. A
    part without a name is named by its number.

    Raises:
        UsageError: a part is not a module, or its name is invalid or already taken.
    """
    result = nn.Sequential()
    for number, part in enumerate(instance("parts", parts, Sequence)):
        name, module = part if isinstance(part, tuple) and len(part) == 2 else (str(number), part)
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"part {number} of a chain must be a module or a pair (name, module), not {kind_of(part)}"
            )
        if not isinstance(name, str) or name in result._modules:
            taken = "the name of another part" if isinstance(name, str) else "not a text"
            raise UsageError(
                f"part {number} of a chain has the name {shortened(repr(name))}, which is {taken}: rename it"
            )
        try:
            result.add_module(name, module)
        except KeyError as error:
            raise UsageError(
                f"part {number} of a chain has a name that modules cannot have: {error.args[0]}"
            ) from None
    return result


def with_batch(chain: Chain, inputs: Any, targets: Any) -> Chain:
    """Return a chain of written layers for batches like these.

    Raises:
        UsageError: its first layer cannot take such inputs.
    """
    given = Tree.of("the inputs", inputs)
    _check_inputs(chain.name, inputs, given)
    first, *others = chain.layers
    layers = (replace(first, packing=packing_of(inputs)), *others)
    return replace(chain, layers=layers, inputs=given, targets=_wanted(targets))


def _wanted(targets: Any) -> Tree | None:
    return None if targets is None else Tree.of("the targets", targets)


def is_chain(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Return whether the module only runs its parts: an `nn.Sequential` without own forward and hooks."""
    if not isinstance(module, nn.Sequential) or "forward" in vars(module):
        return False
    return type(module).forward is nn.Sequential.forward and not (
        module._forward_hooks or module._forward_pre_hooks
    )


def _by_hand(module: nn.Sequential, name: str, *, whole: bool) -> tuple[ChainLayer, ...]:
    """Return the parts of the module as layers, or the module as one layer if it stays `whole`."""
    met: set[int] = set()
    parts = [(name, part) for name, part in module._modules.items() if part is not None]
    if not parts:
        raise UsageError(f"{name} does not have any layers: its nn.Sequential is empty")
    if whole:
        return (ChainLayer(WHOLE, module, {local: local for local in stored_entries(module)}),)
    return tuple(ChainLayer(name, own_module(part, met), _prefixed(name, part)) for name, part in parts)


def _check_inputs(name: str, inputs: Any, given: Tree) -> None:
    """Check that the first part of a Sequential, which takes one argument, can take the inputs.

    Raises:
        UsageError: the inputs are not a tensor, or a tuple or list of tensors.
    """
    if len(given.taken) < len(given.leaves):
        raise UsageError(f"the inputs of {name} must all be tensors: its first layer takes only tensors")
    if not given.plain:
        raise UsageError(
            f"the inputs of {name} must be a tensor, or a tuple or list of tensors, not a "
            f"{type(inputs).__name__} of other values: its first layer takes them as one argument"
        )


def _refuse_shared_hooks(chain: Chain) -> None:
    """Check that no parameter that several layers use has hooks on its gradient.

    A hook expects the whole gradient, but the backwards of several layers, on several stages, each give a
    part.

    Raises:
        UsageError: a shared parameter has hooks.
    """
    for shared in chain.shared:
        if hooks_of(shared.parameter):
            number, local = shared.places[0]
            users = ", ".join(chain.layers[user].name for user in shared.users)
            raise UsageError(
                f"{chain.layers[number].originals[local]} of {chain.name} has hooks on its gradient and is "
                f"shared by several layers ({users}), so each stage would see only part of the gradient: "
                "remove the hooks, and do their work in the optimizer, such as in a hook before its step "
                "(register_step_pre_hook)"
            )


def _with_names(layers: Sequence[ChainLayer], module: nn.Module) -> Iterator[ChainLayer]:
    """Yield the layers with the module's names of their parameters."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for layer in layers:
        own = {local: names[id(p)] for local, p in layer.module.named_parameters(remove_duplicate=False)}
        yield replace(layer, parameter_names=own)


def _prefixed(name: str, part: nn.Module) -> dict[str, str]:
    return {local: f"{name}.{local}" for local in stored_entries(part)}
