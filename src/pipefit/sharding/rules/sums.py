"""Einstein sums, by their letters: any of them can be divided.

Operands that have the letter are divided along it, all others are needed whole; where the result has it, it is divided
too, and where it has not, the results are summed. (So are all products; those with rules of their own are the ones that
models are mostly made of.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from pipefit.sharding.collectives import Collectives
from pipefit.sharding.equations import Equation
from pipefit.sharding.forms import C, Form, R, Split
from pipefit.sharding.operations import GROUP, Call, Operation, Strategy, Wishes
from pipefit.sharding.seams import reduced


def einsum(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Of any number of tensors."""
    equation, tensors = Equation.of(op.given["equation"]), op.given["tensors"]
    if equation is None:
        return
    for s in wishes:
        if not s.padded:
            yield op.way(s, *_along(equation, tensors, equation.result[s.dim], s))
    for letter in dict.fromkeys("".join(equation.operands)):
        if letter in equation.result:
            dim = equation.result.index(letter)
            yield op.way(Split(dim), *_along(equation, tensors, letter, Split(dim)))
        else:
            call = Call(target=part_einsum, args=(op.given["equation"], tensors, GROUP))
            yield op.way(R, *_along(equation, tensors, letter, Split(0)), summed=True, call=call)


def _along(equation: Equation, tensors: Sequence[fx.Node], letter: str, s: Split) -> Iterator[tuple[fx.Node, Form]]:
    """The form of every operand where a letter is divided."""
    for tensor, letters in zip(tensors, equation.operands, strict=True):
        yield tensor, s.at(letters.index(letter)) if letter in letters else C


def part_einsum(equation: str, tensors: Sequence[Tensor], group: Collectives) -> Tensor:
    """A sum of which this rank has some of the terms."""
    return reduced(torch.einsum(equation, *tensors), group)
