"""The operations of a rank, in order: those of the stage, and the seams where a value is needed in another form.

A step belongs to the layer that needs it first. Seams stand outside of all contexts, because what is made under
`no_grad` may be used again where gradients are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import fx

from pipefit.capture.flat import Context, context
from pipefit.sharding.forms import C, Form, R, Split
from pipefit.sharding.operations import GROUP, Call, nbytes, shape
from pipefit.sharding.seams import copied, gathered, sliced, spread
from pipefit.sharding.search import Choice
from pipefit.sharding.tracing import TracedStage, is_stored
from pipefit.work import CollectiveKind

Phase = Literal["forward", "backward"]


class Key(NamedTuple):
    """A value in a form, and where it is had in it: what is stored in one layer, a whole value everywhere (-1), and a
    value in another form in one block.
    """

    node: fx.Node
    form: Form
    place: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call, in a layer: what it makes, and which form of each operand it needs."""

    layer: int
    made: Key
    call: Call
    operands: dict[fx.Node, Key]
    context: Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What the ranks do together in one pass of a layer; `nbytes` are those of the whole tensor."""

    kind: CollectiveKind
    phase: Phase
    layer: int
    nbytes: int


class Steps:
    """The steps of a stage in the forms chosen; `collectives` are those that they make.

    `crossing` has for each edge between blocks what crosses there.
    """

    def __init__(self, stage: TracedStage, choice: Choice) -> None:
        self.stage, self.choice = stage, choice
        self.all: list[Step] = []
        self.collectives: list[Collective] = []
        self.crossing: list[list[Key]] = []
        self._known = {Key(node, R) for node in stage.inputs}
        for node in stage.graph.nodes:
            if node.op == "call_function":
                self._end_blocks(stage.block(stage.layer_of[node]))
                self._operation(node)
        last = len(stage.layers) - (0 if stage.has_loss else 1)
        self._end_blocks(stage.block(last))
        self.outputs = [self._had(node, R, last) for node in stage.graph.output_node().args[0]]  # type: ignore[union-attr, arg-type]

    def _end_blocks(self, block: int) -> None:
        """End the blocks in front of one: what crosses is had whole."""
        for number in range(len(self.crossing), block):
            layer = self.stage.edges[number] - 1
            self.crossing.append([self._had(node, R, layer) for node in self.stage.cuts[number]])

    def _operation(self, node: fx.Node) -> None:
        way, layer = self.choice.ways[node], self.stage.layer_of[node]
        operands = {source: self._had(source, form, layer) for source, form in way.operands.items()}
        made = self._key(node, way.result, layer)
        self._known.add(made)
        self.all.append(Step(layer=layer, made=made, call=way.call, operands=operands, context=context(node)))
        if way.summed:
            self._note("reduce_scatter" if way.scattered else "all_reduce", "forward", layer, way.summed)
        if way.scattered and node in self.choice.trained:
            self._note("all_gather", "backward", layer, way.summed)

    def _had(self, node: fx.Node, form: Form, layer: int) -> Key:
        """The value in that form; a seam makes it where it is not had yet."""
        key = self._key(node, form, layer)
        if key in self._known:
            return key
        home = self._home(node, layer)
        if form != home:
            direct = form == R or (
                form == C and isinstance(home, Split) and self._key(node, R, layer) not in self._known
            )
            start = self._had(node, home if direct else R, layer)
            call = self._seam(node, start.form, form, layer)
            self.all.append(Step(layer=layer, made=key, call=call, operands={node: start}, context=()))
        self._known.add(key)
        return key

    def _key(self, node: fx.Node, form: Form, layer: int) -> Key:
        if is_stored(node):
            return Key(node, form, layer)
        return Key(node, form, -1 if form == R else self.stage.block(layer))

    def _home(self, node: fx.Node, layer: int) -> Form:
        """The form in which a value is stored, made, or comes into the block of the layer."""
        made = self.stage.layer_of.get(node, 0)
        is_here = is_stored(node) or self.stage.block(made) == self.stage.block(layer)
        return self.choice.home.get(node, R) if is_here else R

    def _seam(self, node: fx.Node, start: Form, form: Form, layer: int) -> Call:
        is_trained = node in self.choice.trained
        if isinstance(start, Split):
            assert not isinstance(form, Split)
            self._note("all_gather", "forward", layer, nbytes(node))
            if form == C and is_trained:
                self._note("reduce_scatter", "backward", layer, nbytes(node))
            return Call(target=spread if form == C else gathered, args=(node, start, shape(node)[start.dim], GROUP))
        if is_trained:
            self._note("all_reduce" if form == C else "all_gather", "backward", layer, nbytes(node))
        return Call(target=copied, args=(node, GROUP)) if form == C else Call(target=sliced, args=(node, form, GROUP))

    def _note(self, kind: CollectiveKind, phase: Phase, layer: int, nbytes: int) -> None:
        self.collectives.append(Collective(kind=kind, phase=phase, layer=layer, nbytes=nbytes))


def crossing(steps: Steps, inputs: Iterable[Key], layers: int) -> list[list[Key]]:
    """What each of so many layers hands to the next: in the order in which values are made, or at an edge as it is
    there.
    """
    made = dict.fromkeys(inputs, -1) | {step.made: step.layer for step in steps.all}
    last = dict.fromkeys(steps.outputs, layers)
    for step in reversed(steps.all):
        for key in step.operands.values():
            last.setdefault(key, step.layer)
    at_edges = dict(zip((edge - 1 for edge in steps.stage.edges), steps.crossing, strict=True))
    for layer, keys in at_edges.items():
        last |= {key: max(layer, last.get(key, -1)) for key in keys}
    return [
        at_edges[n] if n in at_edges else [key for key, first in made.items() if first <= n < last.get(key, -1)]
        for n in range(layers)
    ]


def of_layer(steps: Iterable[Step], layer: int) -> Iterator[Step]:
    """The steps of one layer."""
    return (step for step in steps if step.layer == layer)
