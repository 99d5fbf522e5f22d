"""Shorter batches for layers that were traced for longer ones, so that numbers of large layers can be compared cheaply.

A traced layer holds the lengths of its sequences as numbers in its code. In a shortened copy these are those of the
short batch, in whole layers and in those of ranks alike: all else of the code is as it will run. A number that means
something else and is the same makes a shortened layer fail, or compute something else in both.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.capture.graph_layer import GraphLayer
from pipefit.capture.structure import Values
from pipefit.texts import counted

_SHORT, _FEW, _EXPERTS = 8, 2, 8  # positions, samples, and most experts of a token


@dataclass(frozen=True, kw_only=True)
class Shortening:
    """A way to cut a batch of so many `samples`: sequences of `length`, or without one to the first few samples; or
    neither. Up to `experts` times all tokens in code are the experts of all tokens: more than one is tried only where
    code with one fails, since a width may be some times the length too.
    """

    length: int = 0
    samples: int = 0
    experts: int = 1

    @staticmethod
    def of(values: Values) -> Iterator[Shortening]:
        """The ways that batches like these have, the most likely first."""
        size = len(values[0])
        lengths = {value.shape[1] for value in values if value.ndim == 2 and not value.is_floating_point()}
        if len(lengths) == 1 and (length := lengths.pop()) > _SHORT:
            yield Shortening(length=length, samples=size)
            yield Shortening(length=length, samples=size, experts=_EXPERTS)
        if size > _FEW:
            yield Shortening(samples=size)

    @property
    def said(self) -> str:
        """What was cut, for a sentence."""
        if self.length:
            return f", with sequences of {_SHORT} instead of {counted(self.length, 'position')} and without dropout"
        return f", with {_FEW} instead of {counted(self.samples, 'sample')}" if self.samples else ""

    def cut(self, values: Values, targets: Values) -> tuple[Values, Values]:
        """A batch, cut."""
        return tuple(map(self._cut, values)), tuple(map(self._cut, targets))

    def held(self, tensor: Tensor) -> Tensor:
        """A buffer or constant, cut where it is as long as sequences: code may use it without a slice."""
        for dim, size in enumerate(tensor.shape):
            if self.length and size == self.length:
                tensor = tensor.narrow(dim, 0, _SHORT)
        return tensor

    def shortened(self, module: nn.Module) -> nn.Module:
        """A layer for the short batch, with the same tensors: itself where it was not traced."""
        if not self.length or not isinstance(module, GraphLayer):
            return module
        made = copy.copy(module)
        code = module.pipefit_code
        made.pipefit_code = code._replace(run=_recompiled(code.text, code.run, self._number))
        return made

    def _number(self, number: int) -> int:
        """What a number of code becomes: one of positions, also one more or less, of a sequence or of all samples; of
        pairs of positions, for so many heads; or of the experts of all tokens.
        """
        for samples, more in product((1, self.samples), (0, 1, -1)):
            if number == samples * (self.length + more):
                return samples * (_SHORT + more)
        pairs, tokens = divmod(number, self.length**2), divmod(number, self.samples * self.length)
        if not pairs[1]:
            return pairs[0] * _SHORT**2
        return tokens[0] * self.samples * _SHORT if not tokens[1] and tokens[0] <= self.experts else number

    def without_draws(self) -> AbstractContextManager[object]:
        """Inside, nothing is dropped, if masks would have other sizes than their code says."""
        return _NothingDropped() if self.length else nullcontext()  # type: ignore[no-untyped-call]

    def _cut(self, tensor: Tensor) -> Tensor:
        if not self.length:
            return tensor[:_FEW] if self.samples else tensor
        return tensor if tensor.ndim < 2 else torch.stack([self.held(one) for one in tensor])


def _recompiled(code: str, run: Callable[..., Any], number: Callable[[int], int]) -> Callable[..., Any]:
    """The function of generated code with other numbers in it."""
    assert isinstance(run, FunctionType)
    tree = ast.fix_missing_locations(_Numbers(number).visit(ast.parse(code)))
    names = dict(run.__globals__)
    exec(compile(tree, "<pipefit short layer>", "exec"), names)  # noqa: S102 -- the text is torch.fx's own
    found: Callable[..., Any] = names["forward"]
    return found


class _Numbers(ast.NodeTransformer):
    """Replaces whole numbers."""

    def __init__(self, number: Callable[[int], int]) -> None:
        self._number = number

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        is_whole = isinstance(node.value, int) and not isinstance(node.value, bool)
        return ast.Constant(self._number(node.value)) if is_whole else node  # type: ignore[arg-type]


class _NothingDropped(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Masks of dropout have their mean everywhere, which is as good as a probability of zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:
            mask, kept = args[0], args[1] if len(args) > 1 else (kwargs or {}).get("p", 0.5)
            return mask.fill_(kept)
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        return func(*args, **(kwargs or {}))
