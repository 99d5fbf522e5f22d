"""What share of a stage its ranks divide, and what keeps the rest whole: as data, and as text."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx, nn

from pipefit.capture.flat import operator_name, value
from pipefit.sharding.forms import Split, local_shape
from pipefit.sharding.operations import flops, nbytes, shape
from pipefit.sharding.rules import rule_of
from pipefit.sharding.search import Choice
from pipefit.sharding.tracing import TracedStage, is_stored
from pipefit.units import format_bytes, format_flops

_MOST = 8  # what is said of what stays whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """An operation that every rank does whole: its layer, operator, parameters, operations, and why."""

    layer: str
    operator: str
    parameter_bytes: int
    flops: int
    reason: str

    def __str__(self) -> str:
        return (
            f"  whole: {self.operator} of {self.layer} ({format_bytes(self.parameter_bytes)} of parameters, "
            f"{format_flops(self.flops)}): {self.reason}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Parameters and operations of a stage, and those of them that `ranks` divide; what stays whole, largest first."""

    ranks: int
    parameter_bytes: int
    divided_bytes: int
    rank_bytes: int  # what one rank has
    flops: int
    divided_flops: int
    whole: tuple[Whole, ...]

    @property
    def of_bytes(self) -> float:
        """The share of the bytes of parameters that is divided."""
        return self.divided_bytes / self.parameter_bytes if self.parameter_bytes else 0.0

    @property
    def of_flops(self) -> float:
        """The share of the operations of products, convolutions and attention that is divided."""
        return self.divided_flops / self.flops if self.flops else 0.0

    def __str__(self) -> str:
        lines = [
            (
                f"{self.ranks} ranks divide {self.of_bytes:.0%} of {format_bytes(self.parameter_bytes)} of parameters "
                f"({format_bytes(self.rank_bytes)} each) and {self.of_flops:.0%} of the operations"
            ),
            *map(str, self.whole[:_MOST]),
        ]
        return "\n".join(lines)


def shares(stage: TracedStage, choice: Choice, ranks: int) -> Shares:
    """The shares of a stage in the forms chosen."""
    sizes = {n: nbytes(n) for n in choice.home if is_stored(n) and isinstance(stage.tensor(n), nn.Parameter)}
    divided = {node for node in sizes if isinstance(choice.home[node], Split)}
    counts = {node: flops(node) for node in choice.ways}
    every = [_whole(stage, choice, node, ranks) for node, way in choice.ways.items() if not way.divides]
    return Shares(
        ranks=ranks,
        parameter_bytes=sum(sizes.values()),
        divided_bytes=sum(sizes[node] for node in divided),
        rank_bytes=sum(_of_rank(node, choice, ranks) for node in sizes),
        flops=sum(counts.values()),
        divided_flops=sum(counts[node] for node, way in choice.ways.items() if way.divides),
        whole=tuple(sorted((each for each in every if each.parameter_bytes or each.flops), key=_size)),
    )


def _size(each: Whole) -> tuple[int, int]:
    return -each.parameter_bytes, -each.flops


def _of_rank(node: fx.Node, choice: Choice, ranks: int) -> int:
    found = value(node)
    made = found.new_empty(local_shape(shape(node), choice.home[node], ranks))
    return int(made.numel()) * int(made.element_size())


def _whole(stage: TracedStage, choice: Choice, node: fx.Node, ranks: int) -> Whole:
    parameters = [n for n in node.all_input_nodes if is_stored(n) and isinstance(stage.tensor(n), nn.Parameter)]
    number = stage.layer_of[node]
    return Whole(
        layer=stage.layers[number].name if number < len(stage.layers) else "the loss",
        operator=operator_name(node),
        parameter_bytes=sum(map(nbytes, parameters)),
        flops=flops(node),
        reason=_reason(choice, node, ranks),
    )


def _reason(choice: Choice, node: fx.Node, ranks: int) -> str:
    if rule_of(node) is None:
        return "there is no rule for this operator"
    if not choice.changed.isdisjoint((node, *node.all_input_nodes)):
        return "it shares memory with what is changed in place"
    if choice.options[node] == 1:
        return f"its result {shape(node)} has no part for each of {ranks} ranks that what follows can use"
    return "whole it is cheaper than what dividing it would send"
