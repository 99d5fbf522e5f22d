"""Chains of a traced model for other numbers of samples, derived from two traces.

A trace is valid for its number of samples. In two traces, with few samples and with many, each number in the
operations is either equal, or in proportion to the number of samples. If that holds for all numbers, and
nothing else differs, the chain for a number of samples in between has the proportional numbers. Everything
else is equal at both ends, so also in between: the ends of layers and blocks follow from comparisons of sums
of bytes, and two straight lines that compare equally at both ends do so in between.

A model that reads its number of samples may compute something else in between. So the user of a derived chain
compares it with a trace (`Family.has`). A trace of GPT-2 takes a second, a derived chain a tenth of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx
from torch.fx.node import map_aggregate

from pipefit.capture.chain import Chain, ChainLayer, layout
from pipefit.capture.graph_layer import Code, GraphLayer
from pipefit.capture.whole_modules import CustomFunction
from pipefit.torch_internals import OpOverload


class Size(NamedTuple):
    """A number in an operation: `fixed`, or `each` for every sample."""

    fixed: int
    each: int

    @staticmethod
    def of(one: int, few: int, other: int, many: int) -> Size | None:
        """Return the size that is `one` for `few` samples and `other` for `many`; None if there is none."""
        if one == other:
            return Size(one, 0)
        if one % few or one * many != other * few:
            return None
        return Size(0, one // few)

    def at(self, samples: int) -> int:
        """Return the number for this many samples."""
        return self.fixed + self.each * samples


Numbers = tuple[tuple[int, ...], ...]  # for each traced layer, in the order of its operations' arguments


class Sketch(NamedTuple):
    """A traced chain without its tensors, for comparison: the numbers, and everything else."""

    described: tuple[object, ...]
    numbers: Numbers

    @staticmethod
    def of(chain: Chain) -> Sketch | None:
        """Return the sketch of a chain; None for a chain that is not traced."""
        if not chain.traced:
            return None
        numbers: list[tuple[int, ...]] = []
        described: list[object] = [
            chain.name,
            chain.blocks,
            (chain.inputs, chain.outputs, chain.targets),
            (chain.autocast, chain.packing),
            [shared.places for shared in chain.shared],
        ]
        for layer in chain.layers:
            described += _described(layer)
            if isinstance(layer.module, GraphLayer):
                operations, own = _operations(layer.module.pipefit_code.graph)
                described.append(operations)
                numbers.append(own)
        return Sketch(tuple(described), tuple(numbers))


@dataclass(frozen=True, slots=True)
class Family:
    """The chains of a traced model for all numbers of samples from `few` to `many`.

    `chain` is the chain for `few` samples, `described` is common to all, and `sizes` are those of each traced
    layer.
    """

    chain: Chain
    few: int
    many: int
    described: tuple[object, ...]
    sizes: tuple[tuple[Size, ...], ...]

    @staticmethod
    def of(chain: Chain, few: int, other: Sketch | None, many: int) -> Family | None:
        """Return the family of two chains; None if they differ in more than proportional numbers."""
        own = Sketch.of(chain)
        if own is None or other is None or own.described != other.described:
            return None
        sizes: list[tuple[Size, ...]] = []
        for ours, theirs in zip(own.numbers, other.numbers, strict=True):
            pairs = zip(ours, theirs, strict=True)
            of_layer = [Size.of(one, few, another, many) for one, another in pairs]
            known = tuple(size for size in of_layer if size is not None)
            if len(known) < len(of_layer):
                return None
            sizes.append(known)
        return Family(chain, few, many, own.described, tuple(sizes))

    def write(self, chain: Chain, samples: int) -> None:
        """Turn `chain`, a copy of the family's chain with its own layers, into one for `samples` samples."""
        known: dict[object, Code] = {}  # equal layers have equal code
        for module, numbers in zip(_modules(chain), self._at(samples), strict=True):
            key = module.pipefit_code.text, numbers
            if key not in known:
                following = iter(numbers)
                known[key] = module.pipefit_code.with_numbers(
                    lambda _, rest=following: next(rest)  # type: ignore[misc]
                )
            module.pipefit_code = known[key]

    def has(self, chain: Chain, samples: int) -> bool:
        """Return whether a chain traced with this number of samples equals the result of `write`."""
        return Sketch.of(chain) == Sketch(self.described, self._at(samples))

    def _at(self, samples: int) -> Numbers:
        return tuple(tuple(size.at(samples) for size in of_layer) for of_layer in self.sizes)


def _modules(chain: Chain) -> Sequence[GraphLayer]:
    return [layer.module for layer in chain.layers if isinstance(layer.module, GraphLayer)]


def _described(layer: ChainLayer) -> Iterator[object]:
    """Yield everything of a layer except its operations: names, and layouts of tensors."""
    module = layer.module
    yield layer.name, dict(layer.originals), layer.autocast, layer.packing, layer.orders, layer.leaves
    yield [(name, layout(parameter)) for name, parameter in module.named_parameters(remove_duplicate=False)]
    yield [(name, layout(buffer)) for name, buffer in module.named_buffers(remove_duplicate=False)]
    yield module.training, type(module).__name__


def _operations(graph: fx.Graph) -> tuple[list[object], tuple[int, ...]]:
    """Return the operations of a graph without their integers, in comparable form, and the integers."""
    numbers: list[int] = []

    def without_number(item: Any) -> Any:
        if type(item) is int:
            numbers.append(item)
            return int
        return item.name if isinstance(item, fx.Node) else _comparable(item)

    operations: list[object] = []
    for node in graph.nodes:
        given = map_aggregate(node.args, without_number), map_aggregate(node.kwargs, without_number)
        operations.append((node.op, node.name, _comparable(node.target), given))
    return operations, tuple(numbers)


def _comparable(item: object) -> object:
    """Return a key of a function or a plain argument that is equal in another trace, and can be pickled."""
    match item:
        case CustomFunction():
            return item.function
        case OpOverload():
            return "operator", str(item)
        case float():
            return "number", repr(item)  # NaN does not equal itself
    return item
