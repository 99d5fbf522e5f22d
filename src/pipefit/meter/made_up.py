"""Made-up arguments for a call: like its own arguments in shapes, strides and dtypes, with other data. Those that are
only marked as conjugated or negated, which some kernels copy, are so too.

The data are valid for nearly every operation. Floating-point numbers are one half, which is a probability, positive and
far from overflow. Integers are zero, which is a valid index. Masks are true everywhere or nowhere, as asked. The
call's own data are not read, so its tensors may be fake.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_MASKS = (torch.bool, torch.uint8)


class Recipe:
    """How to make up arguments like those of a call, later and elsewhere."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], grad: bool) -> None:
        self._described = tree_map(
            lambda arg: _Description(arg, grad) if isinstance(arg, Tensor) else arg, (args, dict(kwargs))
        )
        self.has_masks = any(tensor.dtype in _MASKS for tensor in tensors((args, kwargs)))

    def make(self, mask: bool) -> Arguments:
        """The arguments; masks are true everywhere, or nowhere."""
        return tree_map(partial(_made, mask), self._described)  # type: ignore[no-any-return]


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in `tree`."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Description:
    """Everything about a tensor except its data."""

    def __init__(self, tensor: Tensor, grad: bool) -> None:
        self.shape, self.strides, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        self.differentiable = grad and tensor.requires_grad
        self.conjugated, self.negated = tensor.is_conj(), tensor.is_neg()

    def make(self, mask: bool) -> Tensor:
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        everything = made.as_strided((made.untyped_storage().nbytes() // made.element_size(),), (1,))
        floating = self.dtype.is_floating_point or self.dtype.is_complex
        everything.fill_(0.5 if floating else mask if self.dtype in _MASKS else 0)
        made = torch._neg_view(made) if self.negated else made
        return (made.conj() if self.conjugated else made).requires_grad_(self.differentiable)


def _made(mask: bool, arg: Any) -> Any:
    if isinstance(arg, _Description):
        return arg.make(mask)
    return torch.Generator() if isinstance(arg, torch.Generator) else arg
