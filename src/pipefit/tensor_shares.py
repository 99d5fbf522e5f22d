"""What share of a model the ranks of a tensor-parallel group divide, and what keeps the rest whole: data and text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipefit.units import format_bytes, format_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """An operation that every rank does whole: its layer, operator, parameters, operations, and why."""

    __pydantic_config__ = {"extra": "forbid"}

    layer: str
    operator: str
    parameter_bytes: int
    flops: int
    reason: str

    def told(self, layers: Sequence[str]) -> str:
        """In words: this operation of one of `layers`, and those like it of the others."""
        figures = f"{format_bytes(self.parameter_bytes)} of parameters, {format_flops(self.flops)}"
        where, all_of_them = ", ".join(dict.fromkeys(layers)), f"{len(layers)} of these, each "
        return f"  whole: {self.operator} of {where} ({all_of_them if len(layers) > 1 else ''}{figures}): {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Parameters and operations of a model or stage, and those of them that `ranks` divide.

    `whole` has what stays whole, the largest of it, largest first.
    """

    __pydantic_config__ = {"extra": "forbid"}

    ranks: int
    parameter_bytes: int
    divided_bytes: int
    rank_bytes: int  # what one rank has
    flops: int
    divided_flops: int
    whole: tuple[Whole, ...]

    @property
    def divides_nothing(self) -> bool:
        """Whether every rank has all parameters and does all operations."""
        return not self.divided_bytes and not self.divided_flops

    @property
    def of_bytes(self) -> float:
        """The share of the bytes of parameters that is divided."""
        return self.divided_bytes / self.parameter_bytes if self.parameter_bytes else 0.0

    @property
    def of_flops(self) -> float:
        """The share of the operations of products, convolutions and attention that is divided."""
        return self.divided_flops / self.flops if self.flops else 0.0

    @property
    def sentence(self) -> str:
        """What is divided, without a full stop."""
        return (
            f"{self.ranks} ranks divide {_percent(self.divided_bytes, self.parameter_bytes)} of "
            f"{format_bytes(self.parameter_bytes)} of parameters ({format_bytes(self.rank_bytes)} each) and "
            f"{_percent(self.divided_flops, self.flops)} of the operations"
        )

    def __str__(self) -> str:
        alike = dict[Whole, list[str]]()
        for one in self.whole:
            alike.setdefault(replace(one, layer=""), []).append(one.layer)
        return "\n".join([self.sentence, *(one.told(layers) for one, layers in alike.items())])


def _percent(part: int, whole: int) -> str:
    """The part in percent, rounded down, so that `100.0 %` is all of it."""
    return f"{1000 * part // (whole or 1) / 10:.1f} %"
