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

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import ModuleType
from typing import NamedTuple

from pipefit.capture.chain import Chain, ChainLayer, layout
from pipefit.capture.graph_layer import GraphLayer
from pipefit.capture.whole_modules import CustomFunction
from pipefit.torch_internals import OpOverload

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d*)?(?:e[+-]?\d+)?")


class Template(NamedTuple):
    """Code with gaps: the text around them, and each gap's number, as text or as a multiple of the
    samples.
    """

    around: tuple[str, ...]
    numbers: tuple[str | int, ...]

    @staticmethod
    def of(few: str, a: int, many: str, b: int) -> Template | None:
        """Return the template of two texts of code, for `a` and `b` samples; None if they differ
        otherwise.
        """
        around = NUMBER.split(few)
        if around != NUMBER.split(many):
            return None
        pairs = zip(NUMBER.findall(few), NUMBER.findall(many), strict=True)
        numbers = tuple(one if one == other else _each(one, a, other, b) for one, other in pairs)
        known = tuple(number for number in numbers if number is not None)
        return Template(tuple(around), known) if len(known) == len(numbers) else None

    def at(self, samples: int) -> str:
        """Return the code for this number of samples."""
        numbers = (str(samples * number) if isinstance(number, int) else number for number in self.numbers)
        return "".join(part for pair in zip_longest(self.around, numbers, fillvalue="") for part in pair)


def _each(one: str, a: int, other: str, b: int) -> int | None:
    """Return a number per sample, given it for `a` and for `b` samples; None if not in proportion."""
    if not (one.isdigit() and other.isdigit()) or int(one) % a or int(one) * b != int(other) * a:
        return None
    return int(one) // a


class Sketch(NamedTuple):
    """A traced chain without its tensors, for comparison: texts and numbers, and the code of each layer.

    `codes` has for every traced layer its code, and its operations.
    """

    described: tuple[object, ...]
    codes: tuple[tuple[str, str], ...]

    @staticmethod
    def of(chain: Chain) -> Sketch | None:
        """Return the sketch of a chain; None for a chain that is not traced."""
        if not chain.traced:
            return None
        codes = (module.pipefit_code for module in _modules(chain))
        return Sketch(tuple(_described(chain)), tuple((code.text, code.operations) for code in codes))


@dataclass(frozen=True, slots=True)
class Family:
    """The chains of a traced model for all numbers of samples from `few` to `many`.

    `chain` is the chain for `few` samples, `described` is common to all, and `codes` are templates of every
    layer's code and operations.
    """

    chain: Chain
    few: int
    many: int
    described: tuple[object, ...]
    codes: tuple[tuple[Template, Template], ...]

    @staticmethod
    def of(chain: Chain, few: int, other: Sketch | None, many: int) -> Family | None:
        """Return the family of two chains; None if they differ in more than proportional numbers."""
        own = Sketch.of(chain)
        if own is None or other is None or own.described != other.described:
            return None
        codes = list[tuple[Template, Template]]()
        for ours, theirs in zip(own.codes, other.codes, strict=True):
            code, operations = (
                Template.of(one, few, another, many) for one, another in zip(ours, theirs, strict=True)
            )
            if code is None or operations is None:
                return None
            codes.append((code, operations))
        return Family(chain, few, many, own.described, tuple(codes))

    def write(self, chain: Chain, samples: int) -> None:
        """Turn `chain`, a copy of the family's chain with its own layers, into one for `samples` samples."""
        for module, (code, operations) in zip(_modules(chain), self._at(samples), strict=True):
            module.pipefit_code = module.pipefit_code.rewritten(code, operations)

    def has(self, chain: Chain, samples: int) -> bool:
        """Return whether a chain traced with this number of samples equals the result of `write`."""
        return Sketch.of(chain) == Sketch(self.described, self._at(samples))

    def _at(self, samples: int) -> tuple[tuple[str, str], ...]:
        return tuple((code.at(samples), operations.at(samples)) for code, operations in self.codes)


def _modules(chain: Chain) -> Sequence[GraphLayer]:
    return [layer.module for layer in chain.layers if isinstance(layer.module, GraphLayer)]


def _described(chain: Chain) -> Iterator[object]:
    """Yield everything of a traced chain except its tensors and the code of its layers."""
    yield chain.name, chain.blocks, chain.inputs, chain.outputs, chain.targets, chain.autocast, chain.packing
    yield [shared.places for shared in chain.shared]
    for layer in chain.layers:
        yield list(_described_layer(layer))


def _described_layer(layer: ChainLayer) -> Iterator[object]:
    """Yield everything of a layer except its code: names, tensors' layouts, and the functions that it
    calls.
    """
    module = layer.module
    yield layer.name, dict(layer.originals), layer.autocast, layer.packing, layer.orders, layer.leaves
    yield [(name, layout(parameter)) for name, parameter in module.named_parameters(remove_duplicate=False)]
    yield [(name, layout(buffer)) for name, buffer in module.named_buffers(remove_duplicate=False)]
    yield module.training
    if isinstance(module, GraphLayer):
        functions = module.pipefit_code.functions
        yield type(module).__name__, {name: _called(function) for name, function in functions.items()}
    else:
        yield type(module)


def _called(function: object) -> object:
    """Return a comparable key of a function: its name if that is unique, otherwise the function."""
    match function:
        case CustomFunction():
            return function.function
        case ModuleType():
            return "module", function.__name__
        case OpOverload():
            return "operator", str(function)
        case float():
            return "number", repr(function)  # NaN does not equal itself
    return function
