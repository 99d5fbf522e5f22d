"""What share of a stage its ranks divide, and what keeps the rest whole, found from the forms chosen."""

from __future__ import annotations

import math

from torch import fx, nn

from pipefit.capture.flat import operator_name, value
from pipefit.sharding.forms import Split, local_shape
from pipefit.sharding.operations import flops, nbytes, shape
from pipefit.sharding.rules import rule_of
from pipefit.sharding.search import Choice
from pipefit.sharding.tracing import TracedStage, is_stored
from pipefit.tensor_shares import Shares, Whole

_MOST = 8  # what is said of what stays whole


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
        whole=tuple(sorted((each for each in every if each.parameter_bytes or each.flops), key=_size)[:_MOST]),
    )


def _size(each: Whole) -> tuple[int, int]:
    return -each.parameter_bytes, -each.flops


def _of_rank(node: fx.Node, choice: Choice, ranks: int) -> int:
    return math.prod(local_shape(shape(node), choice.home[node], ranks)) * int(value(node).element_size())


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
