"""Half-precision copies of weights that autocast computes with: a stage has one of each, for all microbatches.

`torch.autocast` casts a weight in every forward, and the graph of every microbatch keeps the copy for its backward.
Here a copy is memory of the stage's, like the weight, and takes the weight's values before its first use in a step.
Before each forward of a layer autocast is asked for its casts, and a dispatch mode answers with aliases of the copies,
which autocast keeps in its cache until the layer has run. So every forward has casts of its own in its graph, as under
plain autocast, and gradients are bitwise the same; only their memory is one.

Which weights have copies is seen when a layer is profiled: those that autocast's cache has after a forward. It has no
frozen ones, and none that a model casts itself. Costs about 30 microseconds of the host for each copy and forward,
instead of a cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.capture.chain import ChainLayer, autocasting
from pipefit.capture.storages import without_memory
from pipefit.capture.structure import Values
from pipefit.layer_costs import LayerCost
from pipefit.sharding.turns import at_each_turn

_CAST, _DEVICE = torch.ops.aten._to_copy.default, torch.ops.prim.device.default
_AT_ONCE = 3  # weights that one call of the operator that is asked takes


@dataclass(eq=False, slots=True)
class WeightCopy:
    """The memory of a copy; `fresh` while it has the weight's values."""

    tensor: Tensor
    fresh: bool = False

    @staticmethod
    def of(weight: Tensor, dtype: torch.dtype) -> WeightCopy:
        """One that lies in memory as autocast's own would."""
        return WeightCopy(torch.empty_like(weight, dtype=dtype, requires_grad=False))

    def follow(self, weight: Tensor) -> None:
        """Take the weight's values, unless it has them."""
        if not self.fresh:
            with torch.no_grad():
                self.tensor.copy_(weight)
            self.fresh = True


Copied = Sequence[tuple[Tensor, WeightCopy]]  # weights, as a layer has them, with their copies


class WeightCopies:
    """The copies of the weights of a stage's layers, the first of which has the number `start`; `costs` say of which.

    That of a weight which several layers share belongs to the first of them that computes with it. Where parameters are
    `divided`, copies have no memory until they are gathered: all of them need not fit.
    """

    def __init__(
        self, layers: Sequence[ChainLayer], costs: Sequence[LayerCost], start: int, *, divided: bool = False
    ) -> None:
        self.start = start
        self.copies: dict[int, WeightCopy] = {}  # by the id of the parameter, which the layers keep
        self._weights: dict[int, list[nn.Parameter]] = {}  # that have copies, by layer
        self._own: dict[int, list[nn.Parameter]] = {}  # the same, each with the first layer alone
        self._cast_only = _cast_only(layers, costs)
        for number, (layer, cost) in enumerate(zip(layers, costs, strict=False), start=start):
            dtype, weights = layer.autocast, copied_weights(layer.module, cost)
            if weights and dtype is not None:
                self._weights[number] = weights
                self._own[number] = [weight for weight in weights if id(weight) not in self.copies]
                for weight in self._own[number]:
                    copy = self.copies[id(weight)] = WeightCopy.of(weight, dtype)
                    if divided:
                        without_memory(copy.tensor)

    @property
    def tensors(self) -> list[Tensor]:
        """The memory of all copies."""
        return [copy.tensor for copy in self.copies.values()]

    def weights(self, layer: int) -> Sequence[nn.Parameter]:
        """The weights of a layer that have copies."""
        return self._weights.get(layer, ())

    def own(self, layer: int) -> Sequence[nn.Parameter]:
        """Those of them whose copies belong to the layer."""
        return self._own.get(layer, ())

    def is_cast_only(self, weight: nn.Parameter) -> bool:
        """Whether all layers read a weight through its copy alone."""
        return id(weight) in self._cast_only

    def of(self, layer: int) -> Copied:
        """The weights of a layer with their copies."""
        return [(weight, self.copies[id(weight)]) for weight in self.weights(layer)]

    def renew(self, weight: nn.Parameter) -> WeightCopy:
        """Give a weight a copy in new memory; the one that it had."""
        known = self.copies[id(weight)]
        self.copies[id(weight)] = WeightCopy(torch.empty_like(known.tensor))
        return known

    def outdate(self) -> None:
        """The weights may have changed."""
        for copy in self.copies.values():
            copy.fresh = False


def _cast_only(layers: Sequence[ChainLayer], costs: Sequence[LayerCost]) -> frozenset[int]:
    """The ids of the weights that every layer which has them reads through their copies alone."""
    found, others = set[int](), set[int]()
    for layer, cost in zip(layers, costs, strict=False):
        names = {parameter.name for parameter in cost.parameters if parameter.cast_only}
        for name, parameter in layer.module.named_parameters():
            (found if name in names else others).add(id(parameter))
    return frozenset(found - others)


def copied_weights(module: nn.Module, cost: LayerCost) -> list[nn.Parameter]:
    """The weights of a layer that have copies by its profile."""
    names = {parameter.name for parameter in cost.parameters if parameter.copy_bytes}
    return [parameter for name, parameter in module.named_parameters() if name in names] if names else []


def using(copied: Copied, dtype: torch.dtype | None, values: Values) -> AbstractContextManager[None]:
    """Inside, a layer runs on `values` under autocast to `dtype`, whose casts of these weights are their copies."""
    return nullcontext() if not copied or dtype is None else _using(copied, dtype, values)


@contextmanager
def _using(copied: Copied, dtype: torch.dtype, values: Values) -> Iterator[None]:
    for weight, copy in copied:
        copy.follow(weight)
    known = {id(weight): copy.tensor for weight, copy in copied}
    weights = [weight for weight, _ in copied]

    def fill() -> None:
        for first in range(0, len(weights), _AT_ONCE):
            _asked(weights[first : first + _AT_ONCE], _Answers(known))

    with autocasting(dtype, values), at_each_turn(fill):  # on another thread's turn its autocast may clear the cache
        fill()
        yield


def cast_by(call: Any, weights: Sequence[Tensor], dtype: torch.dtype, values: Values) -> list[Tensor]:
    """The weights of which autocast keeps copies when `call`, a layer's forward on `values`, has run."""
    with autocasting(dtype, values):
        call()
        trained = [weight for weight in weights if weight.requires_grad and weight.dtype == torch.float32]
        return [weight for weight in trained if not _asked([weight], _Answers({}))]


class _Answered(Exception):
    """The casts have been answered; what they are for need not be computed."""


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers casts of weights with aliases of their copies, and ends any other operation. `asked` counts the casts."""

    def __init__(self, copies: Mapping[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies, self.asked = copies, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # a fake tensor is asked for it
            return func(*args, **(kwargs or {}))
        self.asked += func is _CAST
        copy = self._copies.get(id(args[0])) if func is _CAST else None
        if copy is None:
            raise _Answered
        return copy.detach()


def _asked(weights: Sequence[Tensor], answers: _Answers) -> int:
    """Let autocast cast up to three weights, as for a product of them, whose shapes nobody gets to check; how many it
    had not in its cache.
    """
    three = [*weights, weights[0], weights[0]][:_AT_ONCE]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_kept, _kept), answers:
            torch.addmm(*three)
    except _Answered:
        return answers.asked
    raise AssertionError("a product of weights was computed past the dispatch mode that ends it")


def _kept(tensor: Tensor) -> Tensor:
    return tensor
