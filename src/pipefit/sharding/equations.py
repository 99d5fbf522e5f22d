"""Equations of Einstein sums: the letters of every operand's dimensions, and of the result's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Equation(NamedTuple):
    """The letters of every operand, and of the result."""

    operands: tuple[str, ...]
    result: str

    @staticmethod
    def of(text: str) -> Equation | None:
        """Read from its text; None for a diagonal, a sum without an arrow, or dimensions without letters."""
        given, arrow, result = text.replace(" ", "").partition("->")
        terms = (*given.split(","), result)
        if not arrow or "." in text or any(len(set(term)) < len(term) for term in terms):
            return None
        return Equation(terms[:-1], result)

    def terms(self, shapes: Sequence[Sequence[int]]) -> int:
        """How many products are summed in each element of the result, for operands of these shapes."""
        sizes = {
            letter: size
            for shape, letters in zip(shapes, self.operands, strict=True)
            for letter, size in zip(letters, shape, strict=True)
        }
        return math.prod(size for letter, size in sizes.items() if letter not in self.result)
