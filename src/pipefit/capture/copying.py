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
from torch.utils._python_dispatch import _disable_current_modes


def copied(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """A deep copy of `module` in which each tensor is what `convert` makes of it.

    Parameters stay parameters. Other tensors require no gradient in the copy.
    """

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            made = convert(tensor)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = made
        found: Tensor = memo[id(tensor)]
        return found

    with (
        mock.patch.object(Tensor, "__deepcopy__", deepcopy),
        mock.patch.object(nn.Parameter, "__deepcopy__", deepcopy),
        mock.patch.dict(copy._deepcopy_dispatch, {torch.Generator: _generator}),  # type: ignore[attr-defined]
    ):
        return copy.deepcopy(module)


def _generator(generator: torch.Generator, memo: dict[int, Any]) -> torch.Generator:
    with _disable_current_modes():
        return generator.clone_state()
