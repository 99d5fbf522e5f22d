"""Deep copies of modules, with every tensor in them replaced: parameters, buffers, and whatever else holds one.

A plain `copy.deepcopy` fails on tensors that were computed, such as the weight that old weight norm keeps in a module,
and on real tensors and random generators under a fake mode.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture.storages import flat, placed, storage_key


def copied(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """A deep copy of `module` in which each tensor is what `convert` makes of it.

    Parameters stay parameters. Other tensors require no gradient in the copy, and lie in one storage where they did.
    """
    storages: dict[int, Tensor] = {}

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(convert(tensor), requires_grad=tensor.requires_grad)
            else:
                memo[id(tensor)] = _converted(tensor, convert, storages)
        found: Tensor = memo[id(tensor)]
        return found

    with (
        mock.patch.object(Tensor, "__deepcopy__", deepcopy),
        mock.patch.object(nn.Parameter, "__deepcopy__", deepcopy),
        mock.patch.dict(copy._deepcopy_dispatch, {torch.Generator: _generator}),  # type: ignore[attr-defined]
    ):
        return copy.deepcopy(module)


def _converted(tensor: Tensor, convert: Callable[[Tensor], Tensor], storages: dict[int, Tensor]) -> Tensor:
    """What `convert` makes of `tensor`, in the storage that it made of the tensor's; `storages` has those so far."""
    if tensor.layout != torch.strided or type(tensor) not in (Tensor, FakeTensor):
        return convert(tensor)
    key = storage_key(tensor)
    if key not in storages and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        made = convert(tensor)
        storages[key] = flat(made)
        return made
    if key not in storages:
        with _disable_current_modes():
            whole = flat(tensor.detach())
        storages[key] = convert(whole)
    return placed(tensor, storages[key])


def _generator(generator: torch.Generator, memo: dict[int, Any]) -> torch.Generator:
    with _disable_current_modes():
        return generator.clone_state()
