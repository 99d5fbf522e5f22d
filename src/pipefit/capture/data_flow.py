"""Data flow of a traced model: the values that would cross a cut after each operation, and illegal cuts.

Causal masks, positions and rotary tables are computed from integers, buffers and shapes. Such operations are
repeated in every layer that uses their result if fewer bytes then cross a cut, and are not among the
operations that are cut. The same holds for views of a part of a tensor, which cannot cross themselves. A
value crosses all cuts between its operation and its last use, so one pass over the operations finds the
values at every cut.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, fx

from pipefit.capture.flat_graph import draws, groups, mutated_arguments, nbytes, role, sources, value
from pipefit.capture.refusals import line_of, refuse_node
from pipefit.capture.storages import is_dense
from pipefit.capture.whole_modules import call_whole
from pipefit.torch_internals import OpOverload

_EXPANDING = (
    torch.ops.aten.expand.default,
    torch.ops.aten.expand_as.default,
    torch.ops.aten.broadcast_to.default,
)
_CONTIGUOUS = torch.ops.aten.contiguous.default


@dataclass(frozen=True)
class Flow:
    """The data flow of a flat graph. Cut `k` follows operation `k` of `order`; cut -1 precedes the first."""

    graph: fx.Graph
    model: str

    @cached_property
    def repeated(self) -> frozenset[fx.Node]:
        """Operations that each layer repeats if it needs their results, instead of receiving the results."""
        needed: dict[
            fx.Node, frozenset[fx.Node]
        ] = {}  # repeated operation -> the values that must cross for it
        sent: set[fx.Node] = set()  # not repeated: their results are smaller than these values
        for node in self.graph.nodes:
            values = self._to_repeat(node, needed, sent)
            if values is None:
                continue
            if _can_cross(node) and sum(map(nbytes, values)) > nbytes(node):
                sent.add(node)
            else:
                needed[node] = values
        return frozenset(needed)

    @cached_property
    def order(self) -> tuple[fx.Node, ...]:
        """The operations that exactly one layer runs, in order."""
        return tuple(
            node for node in self.graph.nodes if node.op == "call_function" and node not in self.repeated
        )

    @cached_property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The outputs of the model."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def needs(self, node: fx.Node) -> frozenset[fx.Node]:
        """Return the values, inputs and parameters that `node` reads; for repeated operations, their
        sources.
        """
        return self._expanded(node.all_input_nodes)

    def needed_by(self, order: Iterable[fx.Node], outputs: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the nodes that operations and outputs need, in the order of the graph."""
        result = self._expanded(outputs).union(*(self.needs(node) for node in order))
        return [node for node in self.graph.nodes if node in result]

    @cached_property
    def crossing(self) -> list[tuple[fx.Node, int, int]]:
        """Triples (value, first cut, last cut), in the order of the values; inputs first, from cut -1."""
        made = {node: number for number, node in enumerate(self.order)}
        last: dict[fx.Node, int] = {}
        for number, node in enumerate(self.order):
            last.update(dict.fromkeys(self.needs(node), number))
        last.update(dict.fromkeys(self._expanded(self.outputs), len(self.order)))
        inputs = [node for node in self.graph.nodes if _kind(node) == "input" and node in last]
        operations = [node for node in self.order if last.get(node, -1) > made[node]]
        return [(node, made.get(node, -1), last[node] - 1) for node in (*inputs, *operations)]

    def values(self, cut: int) -> tuple[fx.Node, ...]:
        """Return the values that cross a cut."""
        return tuple(node for node, first, last in self.crossing if first <= cut <= last)

    @cached_property
    def cost(self) -> list[int]:
        """Bytes that cross each cut."""
        return sums(len(self.order), ((first, last, nbytes(node)) for node, first, last in self.crossing))

    @cached_property
    def count(self) -> list[int]:
        """Number of values that cross each cut."""
        return sums(len(self.order), ((first, last, 1) for _, first, last in self.crossing))

    @cached_property
    def legal(self) -> list[bool]:
        """For each cut, whether only tensors cross it, and no change in place is visible on its other
        side.
        """
        closed = ((first, last, 1) for first, last, _, _ in self._closed)
        return [count == 0 for count in sums(len(self.order), closed)]

    def computes(self, node: fx.Node) -> bool:
        """Return whether an operation computes, rather than make a view."""
        return self._group[node] is node or node.target is call_whole or bool(mutated_arguments(node))

    def obstacle(self, cut: int) -> str:
        """Return why a cut is illegal."""
        node, reason = next(
            (node, reason) for first, last, node, reason in self._closed if first <= cut <= last
        )
        line = line_of(node)
        return f"{node.name}{f' ({line})' if line else ''} {reason}"

    @cached_property
    def _closed(self) -> list[tuple[int, int, fx.Node, str]]:
        """Ranges of illegal cuts, each with the value and the reason."""
        closed = [
            (first, last, node, "crosses, and does not own all of its memory")
            for node, first, last in self.crossing
            if not _can_cross(node)
        ]
        numbers = {node: number for number, node in enumerate(self.order)}
        for root, changes in self._changed.items():
            ranges = self._closed_by(root, [numbers[change] for change in changes])
            closed += (
                (first, last, root, "is changed in place, and used on both sides") for first, last in ranges
            )
        return closed

    # ---------------------------------------------------------------- inside

    @cached_property
    def _group(self) -> dict[fx.Node, fx.Node]:
        return groups(self.graph)

    @cached_property
    def _changed(self) -> dict[fx.Node, list[fx.Node]]:
        """Groups of values that share memory and are changed in place, with the operations that change
        them.
        """
        result: dict[fx.Node, list[fx.Node]] = {}
        for node in self.graph.nodes:
            for target in mutated_arguments(node):
                root = self._group[target]
                if _kind(root) == "input":
                    refuse_node(self.model, node, f"it changes its input {root.name} in place")
                result.setdefault(root, []).append(node)
        return result

    def _to_repeat(
        self, node: fx.Node, needed: Mapping[fx.Node, frozenset[fx.Node]], sent: Set[fx.Node]
    ) -> frozenset[fx.Node] | None:
        """Return the values that must cross a cut to repeat `node` after it; None if it cannot be repeated.

        `needed` has these values for earlier operations that can be repeated; `sent` are those that are sent
        instead.
        """
        if node.op != "call_function" or self._group[node] in self._changed or not _repeatable(node):
            return None
        result: set[fx.Node] = set()
        is_part = self._is_part(node, needed.keys() | sent)
        for source in node.all_input_nodes:
            if source in needed and (is_part or not self._is_part(source, needed.keys() | sent)):
                result |= needed[source]
            elif source in sent:
                result.add(source)
            elif self._given(source):
                result |= {source} if _kind(source) == "input" else set()
            elif is_part:
                result.add(source)
            else:
                return None
        return frozenset(result)

    def _is_part(self, node: fx.Node, known: Set[fx.Node]) -> bool:
        """Return whether `node` is a view of a part of a value: it cannot cross a cut, but can be made
        again.
        """
        whole = self._group[node]
        return whole is not node and _kind(whole) is None and whole not in known and not _can_cross(node)

    def _given(self, node: fx.Node) -> bool:
        """Return whether any layer can have `node`: an integer input, or an unchanged buffer or constant."""
        kind = _kind(node)
        if kind == "input":
            return isinstance(tensor := value(node), Tensor) and not tensor.is_floating_point()
        return kind in ("buffer", "constant") and self._group[node] not in self._changed

    def _expanded(self, nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
        result: set[fx.Node] = set()
        for node in nodes:
            result |= self._sources_of_repeated[node] if node in self.repeated else {node}
        return frozenset(result)

    @cached_property
    def _sources_of_repeated(self) -> dict[fx.Node, frozenset[fx.Node]]:
        result: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self.graph.nodes:
            if node in self.repeated:
                sources = (result.get(source, frozenset((source,))) for source in node.all_input_nodes)
                result[node] = frozenset().union(*sources)
        return result

    def _closed_by(self, root: fx.Node, changes: list[int]) -> Iterable[tuple[int, int]]:
        """Return ranges of cuts that are illegal because the memory of `root` is changed in place."""
        if root.op == "placeholder":  # a buffer: all its operations stay in one layer
            touching = [
                n
                for n, node in enumerate(self.order)
                if any(self._group[s] is root for s in self.needs(node))
            ]
            return [(min(touching), max(touching) - 1)]
        crossing = [(first, last) for node, first, last in self.crossing if self._group[node] is root]
        return [
            (cut, cut)
            for cut in range(min((first for first, _ in crossing), default=0), max(changes))
            if sum(first <= cut <= last for first, last in crossing) > 1
        ]


def _kind(node: fx.Node) -> str | None:
    result = role(node)
    return result.kind if result else None


def _repeatable(node: fx.Node) -> bool:
    """Return whether the operation is deterministic: no random draws, which custom functions may make."""
    if isinstance(node.target, OpOverload):
        return not draws(node)
    return node.target is operator.getitem


def _can_cross(node: fx.Node) -> bool:
    """Return whether `node` is a tensor with all of its memory, for any number of samples."""
    result = value(node)
    if not isinstance(result, Tensor) or role(node) is not None:
        return isinstance(result, Tensor)
    return node.target not in _EXPANDING and is_dense(result, of=_memory(node))


def _memory(node: fx.Node) -> int:
    """Return the bytes of memory that `node` views; `contiguous` counts as a copy, as for several samples."""
    at = node
    while at.target is not _CONTIGUOUS and (viewed := next(iter(sources(at)), None)) is not None:
        at = viewed
    result = value(node)
    return nbytes(at) if at.target is _CONTIGUOUS else result.untyped_storage().nbytes()


def sums(count: int, ranges: Iterable[tuple[int, int, int]]) -> list[int]:
    """Return for each of `count` cuts the summed weights of the ranges (first, last, weight) that contain
    it.
    """
    changes = [0] * (count + 1)
    for first, last, weight in ranges:
        if last >= first and last >= 0:
            changes[max(first, 0)] += weight
            changes[min(last, count - 1) + 1] -= weight
    return list(accumulate(changes))[:count]
