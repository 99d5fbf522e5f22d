"""An operation of a stage, as the rules for operators see it, and strategies to divide it.

A strategy gives the form in which each operand is needed, the form of the result, and the call on a rank.
Checks for all operators are made here: the ranks can share every operand and the result in the proposed
forms, and no value is needed in two forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

from torch import Tensor, fx

from pipefit.capture import operator_name, value
from pipefit.tensor_parallel.forms import C, DimSplit, Form, R, divides, local_shape
from pipefit.torch_internals import OpOverload

# ---- Equations of Einstein sums


class Equation(NamedTuple):
    """The letters of every operand's dimensions, and of the result's."""

    operands: tuple[str, ...]
    result: str

    @staticmethod
    def of(text: str) -> Equation | None:
        """Parse an equation; None for a diagonal, a sum without an arrow, or dimensions without letters."""
        given, arrow, result = text.replace(" ", "").partition("->")
        terms = (*given.split(","), result)
        if not arrow or "." in text or any(len(set(term)) < len(term) for term in terms):
            return None
        return Equation(terms[:-1], result)

    def terms(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return how many products are summed in each element of the result, for operands of these shapes."""
        sizes = {
            letter: size
            for shape, letters in zip(shapes, self.operands, strict=True)
            for letter, size in zip(letters, shape, strict=True)
        }
        return math.prod(size for letter, size in sizes.items() if letter not in self.result)


# ---- Operations and strategies

GROUP: Final = "<the rank's end of its group>"  # placeholder in a call for the collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A rank's call for an operation: a function of the operation's operands and of `GROUP`."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategy:
    """One way to do an operation.

    `summed` are the bytes that its forward sums over the ranks; every rank gets its part of them if they are
    `scattered`.
    """

    operands: Mapping[fx.Node, Form]
    result: Form
    call: Call
    summed: int = 0
    scattered: bool = False

    @property
    def divides(self) -> bool:
        """True if each rank does a part of the operation."""
        return any(isinstance(form, DimSplit) for form in (self.result, *self.operands.values()))


Wishes = Mapping[DimSplit, None]  # forms of a result that its users prefer; ordered, so every process agrees
Rule = Callable[["Operation", Wishes], Iterator[Strategy | None]]


class Operation:
    """An operation among `ranks`; `trained` are the values that need a gradient.

    With `sequences`, norms are divided along positions even if no user of the result prefers it.
    """

    def __init__(
        self, node: fx.Node, ranks: int, trained: frozenset[fx.Node], *, sequences: bool = False
    ) -> None:
        self.node, self.ranks, self.trained, self.sequences = node, ranks, trained, sequences
        self.name = operator_name(node)
        self.shape = shape(node)
        self.last = len(self.shape) - 1

    @cached_property
    def given(self) -> dict[str, Any]:
        """The arguments by the names of the operator's schema, with its defaults."""
        schema = self._schema
        result = {a.name: a.default_value for a in schema if a.has_default_value()}
        return result | dict(zip((a.name for a in schema), self.node.args, strict=False)) | self.node.kwargs

    @property
    def _schema(self) -> list[Any]:
        target = self.node.target
        return list(target._schema.arguments) if isinstance(target, OpOverload) else []

    def operand(self, name: str) -> fx.Node | None:
        """Return the value given as argument `name`; None if it is not a value."""
        result = self.given.get(name)
        return result if isinstance(result, fx.Node) else None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole result."""
        return nbytes(self.node)

    def replicated(self) -> Strategy:
        """Return the strategy in which every rank does the whole operation, correct for any operation."""
        call = Call(
            target=self.node.target,  # type: ignore[arg-type]
            args=self.node.args,
            kwargs=self.node.kwargs,
        )
        return Strategy(operands=dict.fromkeys(self.node.all_input_nodes, R), result=R, call=call)

    def changed(self, **given: Any) -> Call:
        """Return the operation's call with some arguments replaced."""
        every = self.given | given
        args = tuple(every[a.name] for a in self._schema if not a.kwarg_only)
        kwargs = {a.name: every[a.name] for a in self._schema if a.kwarg_only and a.name in every}
        return Call(target=self.node.target, args=args, kwargs=kwargs)  # type: ignore[arg-type]

    def way(
        self,
        result: Form,
        *operands: tuple[Any, Form | None],
        summed: bool = False,
        call: Call | None = None,
    ) -> Strategy | None:
        """Return a strategy with `operands` in these forms and all others replicated; None if impossible.

        It is impossible if a form is None, if the ranks cannot share a value in its form, or if one value
        would be needed in two forms. `summed` says that the whole result is summed over the ranks; each gets
        its part if the result is divided.
        """
        forms: dict[fx.Node, Form] = {}
        for node, wanted in operands:
            if not isinstance(node, fx.Node):
                continue
            form = R if wanted == C and node not in self.trained else wanted
            if form is None or not self._shares(node, form) or forms.setdefault(node, form) != form:
                return None
        if not self._shares(self.node, result):
            return None
        every: dict[fx.Node, Form] = {node: forms.get(node, R) for node in self.node.all_input_nodes}
        return Strategy(
            operands=every,
            result=result,
            call=call or self.replicated().call,
            summed=self.nbytes if summed else 0,
            scattered=summed and isinstance(result, DimSplit),
        )

    def _shares(self, node: fx.Node, form: Form) -> bool:
        if not isinstance(form, DimSplit) or not isinstance(value(node), Tensor):
            return True
        return divides(shape(node), form, self.ranks)

    def local(self, form: Form) -> list[int]:
        """Return the shape of a rank's part of the result in this form."""
        return local_shape(self.shape, form, self.ranks)

    def broadcast(self, wish: DimSplit, operand: fx.Node) -> Form:
        """Return the form in which an operand is needed for a result in the form `wish`."""
        dim = wish.dim - (self.last + 1 - len(shape(operand)))
        return C if dim < 0 or shape(operand)[dim] == 1 else wish.at(dim)


def shape(node: Any) -> list[int]:
    """Return the shape of a whole value; empty if it is not a tensor."""
    result = value(node) if isinstance(node, fx.Node) else None
    return list(result.shape) if isinstance(result, Tensor) else []


def nbytes(node: fx.Node) -> int:
    """Return the bytes of a whole value, over all its tensors."""
    result = value(node)
    tensors = result if isinstance(result, tuple | list) else (result,)
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def wished(wishes: Wishes, dim: int) -> Iterable[DimSplit]:
    """Return the splits of dimension `dim` to try: into one row, and those in `wishes`."""
    return dict.fromkeys([DimSplit(dim), *(wish for wish in wishes if wish.dim == dim)])


def flops(node: fx.Node) -> int:
    """Return the multiplications and additions of an operation's forward; 0 except for products."""
    name, result = operator_name(node), math.prod(shape(node))
    if node.op != "call_function" or not result or name not in _INNER:
        return 0
    return 2 * result * _INNER[name](node)


def _attended(node: fx.Node) -> int:
    """Return the terms for each element of an attention's result: queries by keys, and weights by values."""
    return 2 * shape(node.args[1])[-2]


def _summed(node: fx.Node) -> int:
    """Return the terms of an Einstein sum; 0 for an equation that cannot be parsed."""
    equation = Equation.of(str(node.args[0]))
    tensors: Sequence[Any] = node.args[1]  # type: ignore[assignment]
    return equation.terms([shape(tensor) for tensor in tensors]) if equation else 0


_INNER: dict[str, Callable[[fx.Node], int]] = {
    "linear": lambda node: shape(node.args[0])[-1],
    "matmul": lambda node: shape(node.args[0])[-1],
    "bmm": lambda node: shape(node.args[0])[-1],
    "mm": lambda node: shape(node.args[0])[-1],
    "addmm": lambda node: shape(node.args[1])[-1],
    "baddbmm": lambda node: shape(node.args[1])[-1],
    "conv1d": lambda node: math.prod(shape(node.args[1])[1:]),
    "conv2d": lambda node: math.prod(shape(node.args[1])[1:]),
    "conv3d": lambda node: math.prod(shape(node.args[1])[1:]),
    "scaled_dot_product_attention": _attended,
    "einsum": _summed,
    "_grouped_mm": lambda node: shape(node.args[0])[-1],
    "grouped_mm_fallback": lambda node: shape(node.args[0])[-1],
}
