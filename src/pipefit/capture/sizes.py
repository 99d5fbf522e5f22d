"""Chains of a traced model for other numbers of samples, written from the chains of two.

A trace holds for the number of samples that it was made with. Of two traces, with few samples and with many, each
number in the operations is either the same in both, or as many times as large as there are more samples. Where that
holds for all numbers, and where nothing else differs, the chain for a number of samples between has the numbers that
are in proportion. Everything else of it is the same as in both: where layers and blocks end follows from sums of bytes,
which are compared, and a comparison of two straight lines that comes out alike at both ends does so between.

A model that asks how many samples there are may compute otherwise between the two. So whoever uses such a chain holds
it against a trace (`Family.has`). A trace of GPT-2 takes a second, and its chain for another size a tenth of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import ModuleType
from typing import NamedTuple

from torch._ops import OpOverload

from pipefit.capture.chain import Chain, ChainLayer, layout
from pipefit.capture.graph_layer import GraphLayer
from pipefit.capture.whole_modules import CustomFunction

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d*)?(?:e[+-]?\d+)?")


class Template(NamedTuple):
    """Code with gaps: the text around them, and the number in each, as a text or for every sample."""

    around: tuple[str, ...]
    numbers: tuple[str | int, ...]

    @staticmethod
    def of(few: str, a: int, many: str, b: int) -> Template | None:
        """The template of two texts of code, for `a` and for `b` samples; None where they differ in another way."""
        around = NUMBER.split(few)
        if around != NUMBER.split(many):
            return None
        pairs = zip(NUMBER.findall(few), NUMBER.findall(many), strict=True)
        numbers = tuple(one if one == other else _each(one, a, other, b) for one, other in pairs)
        known = tuple(number for number in numbers if number is not None)
        return Template(tuple(around), known) if len(known) == len(numbers) else None

    def at(self, samples: int) -> str:
        """The code for so many samples."""
        numbers = (str(samples * number) if isinstance(number, int) else number for number in self.numbers)
        return "".join(part for pair in zip_longest(self.around, numbers, fillvalue="") for part in pair)


def _each(one: str, a: int, other: str, b: int) -> int | None:
    """What a number of `a` samples and one of `b` samples are for each; None where they are not in proportion."""
    if not (one.isdigit() and other.isdigit()) or int(one) % a or int(one) * b != int(other) * a:
        return None
    return int(one) // a


class Sketch(NamedTuple):
    """All of a traced chain but its tensors, to be compared with another: in texts and numbers, as far as that can be.

    `codes` are the code of every traced layer, and its operations.
    """

    described: tuple[object, ...]
    codes: tuple[tuple[str, str], ...]

    @staticmethod
    def of(chain: Chain) -> Sketch | None:
        """The sketch of a chain; None of one by hand."""
        if not chain.traced:
            return None
        codes = (module.pipefit_code for module in _modules(chain))
        return Sketch(tuple(_described(chain)), tuple((code.text, code.operations) for code in codes))


@dataclass(frozen=True, slots=True)
class Family:
    """The chains of a traced model for all numbers of samples from `few` to `many`.

    `chain` is that of `few`, all that they have in common is `described`, and `codes` are the code of every layer, and
    its operations.
    """

    chain: Chain
    few: int
    many: int
    described: tuple[object, ...]
    codes: tuple[tuple[Template, Template], ...]

    @staticmethod
    def of(chain: Chain, few: int, other: Sketch | None, many: int) -> Family | None:
        """The family of two chains; None where they differ in more than numbers that are in proportion."""
        own = Sketch.of(chain)
        if own is None or other is None or own.described != other.described:
            return None
        codes = list[tuple[Template, Template]]()
        for ours, theirs in zip(own.codes, other.codes, strict=True):
            code, operations = (Template.of(one, few, another, many) for one, another in zip(ours, theirs, strict=True))
            if code is None or operations is None:
                return None
            codes.append((code, operations))
        return Family(chain, few, many, own.described, tuple(codes))

    def write(self, chain: Chain, samples: int) -> None:
        """Make a copy of the family's chain, which has layers of its own, one for so many samples."""
        for module, (code, operations) in zip(_modules(chain), self._at(samples), strict=True):
            module.pipefit_code = module.pipefit_code.rewritten(code, operations)

    def has(self, chain: Chain, samples: int) -> bool:
        """Whether a chain that was traced with so many samples is what `write` makes."""
        return Sketch.of(chain) == Sketch(self.described, self._at(samples))

    def _at(self, samples: int) -> tuple[tuple[str, str], ...]:
        return tuple((code.at(samples), operations.at(samples)) for code, operations in self.codes)


def _modules(chain: Chain) -> Sequence[GraphLayer]:
    return [layer.module for layer in chain.layers if isinstance(layer.module, GraphLayer)]


def _described(chain: Chain) -> Iterator[object]:
    """All of a traced chain but its tensors and the code of its layers."""
    yield chain.name, chain.blocks, chain.inputs, chain.outputs, chain.targets, chain.autocast, chain.packing
    yield [shared.places for shared in chain.shared]
    for layer in chain.layers:
        yield list(_described_layer(layer))


def _described_layer(layer: ChainLayer) -> Iterator[object]:
    """All of a layer but its code: what it holds, and which functions it calls."""
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
    """A function as itself, or as its name if no other has it."""
    match function:
        case CustomFunction():
            return function.function
        case ModuleType():
            return "module", function.__name__
        case OpOverload():
            return "operator", str(function)
        case float():
            return "number", repr(function)  # one that is no number equals none
    return function
