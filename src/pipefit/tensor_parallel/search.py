"""The forms of all values of a stage: dynamic programming along its graph.

Backwards, every operation reports the forms in which it can use its operands; these wishes are what earlier
operations try to fulfill. Forwards, a state is the forms in which each value that is still needed is
available, the form in which it was made first; of equal states the cheapest is kept. A parameter has the form
of its first use, and a tied one is part of the state until its last use. At most 200 states are kept at a
time, so the search is linear in the number of operations; with all states kept it is exact for its prices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, fx

from pipefit.capture import groups, mutated_arguments, operator_name, role, value
from pipefit.tensor_parallel.forms import C, DimSplit, Form, R
from pipefit.tensor_parallel.operations import Operation, Strategy, flops, nbytes, shape
from pipefit.tensor_parallel.rules import rule_of
from pipefit.tensor_parallel.rules.elementwise import COPIES
from pipefit.tensor_parallel.rules.reshaping import CUTS, VIEWS
from pipefit.tensor_parallel.tracing import TracedStage, is_stored, without_gradient

# ---- Costs of forms, in bytes: bytes that a rank sends, and at a price, bytes that it stores
#
# An all-reduce sends each byte twice, a reduce-scatter or an all-gather once; a rank sends (ranks - 1) /
# ranks of the whole. Computation counts too, so that of two otherwise equal choices the divided one is taken.
# These are estimates of memory; a dry run gives the exact bytes.

_STATES = 4  # a parameter, its gradient and two optimizer states are divided together


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The price of a stored byte, in sent bytes, and the number of operations that cost one sent byte."""

    stored: float = 0.3
    flops: float = 1000.0


SEQUENCES = Prices(stored=2.0)  # for sequence parallelism, whose purpose is to store less


@dataclass(frozen=True, slots=True, kw_only=True)
class FormCosts:
    """The costs of a stage among `ranks`, at these prices.

    `trained` are the values that need a gradient.
    """

    ranks: int
    prices: Prices
    trained: frozenset[fx.Node]

    @property
    def _sent(self) -> float:
        return (self.ranks - 1) / self.ranks

    def conversion(self, node: fx.Node, home: Form, form: Form) -> float:
        """Return the cost of converting a value from the form in which it is made, `home`, to `form`."""
        if not isinstance(value(node), Tensor):
            return math.inf  # lists are never converted
        back = node in self.trained
        if not isinstance(home, DimSplit):
            times = 2 * back if form == C else float(back) if isinstance(form, DimSplit) else 0.0
        else:
            times = 1 + (back if form != R else 0.0)
        return times * self._sent * nbytes(node)

    def stored(self, node: fx.Node, form: Form) -> float:
        """Return the cost of a parameter or buffer in a form, with its gradient and optimizer states."""
        return _STATES * self.kept(node, form)

    def done(self, node: fx.Node, way: Strategy) -> float:
        """Return the cost of an operation."""
        computed = flops(node) / (self.ranks if way.divides else 1) / self.prices.flops
        times = 1 + (node in self.trained) if way.scattered else 2
        return times * self._sent * way.summed + computed

    def kept(self, node: fx.Node, form: Form) -> float:
        """Return the cost of keeping a value in a form until the backward."""
        return self.prices.stored * nbytes(node) / (self.ranks if isinstance(form, DimSplit) else 1)


# ---- Values that a backward probably keeps, by operator
#
# Sums, copies and views keep none of their operands; products, norms and activation functions do. An estimate
# for the search; a dry run gives the exact bytes.

_CURVES = frozenset(
    {"softmax", "log_softmax", "relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt"}
)  # save their result
_LOOKS = VIEWS | CUTS | {"transpose", "permute", "t", "expand", "select", "slice", "alias", "detach"}
_SUMS = frozenset({"add", "sub", "neg", "rsub", "sum", "mean", "cumsum"})
_MOVES = frozenset(
    {"cat", "stack", "repeat", "repeat_interleave", "pad", "roll", "flip", "index", "embedding"}
)
_KEEPS_NO_OPERAND = COPIES | _CURVES | _LOOKS | _SUMS | _MOVES | {"dropout"}


def keeps_result(node: fx.Node) -> bool:
    """Return whether the backward of an operation needs its result, or a tensor of that size."""
    return operator_name(node) in _CURVES | {"scaled_dot_product_attention", "dropout"}


def keeps_operands(node: fx.Node) -> bool:
    """Return whether an operation's backward needs its operands; for a product with a number, it does not."""
    name = operator_name(node)
    if node.target is operator.getitem or name in _KEEPS_NO_OPERAND:
        return False
    return not (name in ("mul", "div") and len(node.all_input_nodes) == 1)


# ---- The search

_MOST = 200
_SEQUENCES = 3  # dimensions of values with positions: samples, positions, features


class KeptValue(NamedTuple):
    """A value kept for the backward in this form; C counts as R."""

    form: Form

    @staticmethod
    def of(form: Form) -> KeptValue:
        """Return the entry for a value that is used in a form."""
        return KeptValue(form if isinstance(form, DimSplit) else R)


State = dict[fx.Node, tuple[Form | KeptValue, ...]]


@dataclass(frozen=True, kw_only=True)
class ChosenForms:
    """The strategy of every operation, and the form in which each value is made or stored.

    `options` counts the strategies of every operation. `trained` are the values that need a gradient,
    `changed` those that share memory with a value that is changed in place.
    """

    ways: dict[fx.Node, Strategy]
    home: dict[fx.Node, Form]
    options: dict[fx.Node, int]
    trained: frozenset[fx.Node]
    changed: frozenset[fx.Node]
    cost: float


class _Record(NamedTuple):
    """The cheapest path to a state: its cost, the previous record, and the operation's strategy."""

    cost: float
    before: _Record | None
    way: Strategy | None


def choose(
    stage: TracedStage,
    ranks: int,
    prices: Prices,
    *,
    sequences: bool = False,
    given: Mapping[fx.Node, Form] | None = None,
) -> ChosenForms:
    """Return the cheapest forms that the search finds; with `sequences`, norms may be divided too.

    Parameters and buffers in `given` have that form, whatever its cost.
    """
    trained, changed = _trained(stage), _changed(stage.graph)
    options = _options(stage, ranks, trained, changed, sequences=sequences)
    search = _FormSearch(stage, options, FormCosts(ranks=ranks, prices=prices, trained=trained), given or {})
    ways, cost = search.run()
    home: dict[fx.Node, Form] = {**dict.fromkeys(stage.inputs, R), **(given or {})}
    for node, way in ways.items():
        for source, form in way.operands.items():
            if is_stored(source):
                home.setdefault(source, form if isinstance(form, DimSplit) else R)
        home[node] = way.result
    counts = {node: len(found) for node, found in options.items()}
    return ChosenForms(ways=ways, home=home, options=counts, trained=trained, changed=changed, cost=cost)


def _trained(stage: TracedStage) -> frozenset[fx.Node]:
    """Return the values that need a gradient."""
    result: set[fx.Node] = set()
    for node in stage.graph.nodes:
        if node.op == "placeholder":
            needs = stage.tensor(node).requires_grad if is_stored(node) else _arrives_trained(stage, node)
        else:
            needs = (
                _is_numeric(node)
                and any(source in result for source in node.all_input_nodes)
                and not _ends(node)
            )
        if needs:
            result.add(node)
    return frozenset(result)


def _ends(node: fx.Node) -> bool:
    """Return whether no gradient passes an operation; in-place changes without gradient keep the earlier
    one.
    """
    return (without_gradient(node) or operator_name(node) == "detach") and not mutated_arguments(node)


def _arrives_trained(stage: TracedStage, node: fx.Node) -> bool:
    """Return whether an input comes from another stage, which needs its gradient."""
    values = stage.inputs[: len(stage.inputs) - stage.targets]
    return not stage.is_first and node in values and _is_numeric(node)


def _derived(graph: fx.Graph) -> set[fx.Node]:
    """Return the real or complex values that depend on a parameter; others are cheap to replicate."""
    result: set[fx.Node] = set()
    for node in graph.nodes:
        is_parameter = (meaning := role(node)) is not None and meaning.kind == "parameter"
        if is_parameter or (_is_numeric(node) and any(source in result for source in node.all_input_nodes)):
            result.add(node)
    return result


def _is_numeric(node: fx.Node) -> bool:
    """Return whether a value has a dtype that carries gradients: floating point or complex."""
    result = value(node)
    tensors = result if isinstance(result, tuple | list) else (result,)
    return any(isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) for t in tensors)


def _options(
    stage: TracedStage,
    ranks: int,
    trained: frozenset[fx.Node],
    changed: frozenset[fx.Node],
    *,
    sequences: bool = False,
) -> dict[fx.Node, list[Strategy]]:
    """Return the strategies of every operation, replicated first, found from users to operands."""
    wishes: dict[fx.Node, dict[DimSplit, None]] = {}
    result: dict[fx.Node, list[Strategy]] = {}
    derived = _derived(stage.graph)
    for node in reversed(stage.graph.nodes):
        if node.op != "call_function":
            continue
        op, rule = Operation(node, ranks, trained, sequences=sequences), rule_of(node)
        result[node] = [op.replicated()]
        if rule and node in derived and changed.isdisjoint((node, *node.all_input_nodes)):
            result[node] += [way for way in rule(op, wishes.get(node, {})) if way is not None]
        for way in result[node]:
            for source, form in way.operands.items():
                if isinstance(form, DimSplit):
                    wishes.setdefault(source, {})[form] = None
                elif sequences and form == C and len(shape(source)) == _SEQUENCES:
                    wishes.setdefault(source, {})[DimSplit(1)] = (
                        None  # its positions are gathered just before
                    )
    return result


def _changed(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the values that share memory with one changed in place; buffers are changed in their own
    form.
    """
    roots = groups(graph)
    changed = {roots[target] for node in graph.nodes for target in mutated_arguments(node)}
    return frozenset(node for node, root in roots.items() if root in changed and not is_stored(root))


class _FormSearch:
    """The dynamic program."""

    def __init__(
        self,
        stage: TracedStage,
        options: dict[fx.Node, list[Strategy]],
        costs: FormCosts,
        given: Mapping[fx.Node, Form],
    ) -> None:
        self.stage, self.options, self.costs, self.given = stage, options, costs, given
        self.nodes = list(stage.graph.nodes)
        self.number = {node: number for number, node in enumerate(self.nodes)}
        self.ends: dict[fx.Node, float] = {
            source: self.number[node] for node in self.nodes for source in node.all_input_nodes
        }
        self.cuts: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for node, cut in zip(_firsts(stage), stage.cuts, strict=True):
            self.cuts[node] = (*self.cuts.get(node, ()), *cut)
        for node, cut in self.cuts.items():
            edge = self.number[node] - 0.5  # they live until the cut, used or not
            self.ends |= {source: max(edge, self.ends.get(source, edge)) for source in cut}
        self.trained = costs.trained
        self._costs: dict[tuple[fx.Node, Form | KeptValue, Form | KeptValue], float] = {}
        roots = groups(stage.graph)
        changed = {roots[target] for node in self.nodes for target in mutated_arguments(node)}
        self.fixed = {
            node for node, root in roots.items() if root in changed
        }  # another form would be a stale copy

    def run(self) -> tuple[dict[fx.Node, Strategy], float]:
        """Return the strategies of the cheapest path, and its cost."""
        layer: list[tuple[State, _Record]] = [
            (dict.fromkeys(self.stage.inputs, (R,)), _Record(0.0, None, None))
        ]
        for node in self.nodes:
            if node in self.cuts:
                layer = self._cut(layer, node)
            if node.op == "call_function":
                layer = self._step(layer, node)
        output = self.stage.graph.output_node()
        ends = [record._replace(cost=record.cost + self._end(state, output)) for state, record in layer]
        best = min(ends, key=lambda record: record.cost)
        operations = [node for node in self.nodes if node.op == "call_function"]
        return dict(reversed(list(zip(reversed(operations), _ways(best), strict=True)))), best.cost

    def _step(self, layer: Sequence[tuple[State, _Record]], node: fx.Node) -> list[tuple[State, _Record]]:
        following: dict[object, tuple[State, _Record]] = {}
        ending = [
            source
            for source in (node, *node.all_input_nodes)
            if self.ends.get(source, -1) <= self.number[node]
        ]
        done = [(way, self.costs.done(node, way)) for way in self.options[node]]
        keeps, keeps_own = (node in self.trained and keeps(node) for keeps in (keeps_operands, keeps_result))
        for state, record in layer:
            for way, cost in done:
                known = dict(state)
                operands = (self._had(known, *operand, keeps=keeps) for operand in way.operands.items())
                total = record.cost + cost + sum(operands)
                known[node] = (way.result,)
                if keeps_own:
                    total += self._more(known, node, KeptValue.of(way.result))
                for source in ending:
                    known.pop(source, None)
                key = tuple(known.items())
                if total < math.inf and (key not in following or total < following[key][1].cost):
                    following[key] = known, _Record(total, record, way)
        return self._worthwhile(sorted(following.values(), key=lambda item: item[1].cost))[:_MOST]

    def _cut(self, layer: Sequence[tuple[State, _Record]], node: fx.Node) -> list[tuple[State, _Record]]:
        """End a block before `node`: values that cross are replicated, and in no other form from there on."""
        result: dict[object, tuple[State, _Record]] = {}
        for state, record in layer:
            known = dict(state)
            total = record.cost + sum(self._had(known, source, R, keeps=False) for source in self.cuts[node])
            known = {
                source: forms if is_stored(source) else _whole(forms)
                for source, forms in known.items()
                if self.ends.get(source, -1) >= self.number[node]
            }
            key = tuple(known.items())
            if total < math.inf and (key not in result or total < result[key][1].cost):
                result[key] = known, record._replace(cost=total)
        return self._worthwhile(sorted(result.values(), key=lambda item: item[1].cost))

    def _worthwhile(self, layer: list[tuple[State, _Record]]) -> list[tuple[State, _Record]]:
        """Return the states, cheapest first, except those that the cheapest can be converted into for
        less.
        """
        best, record = layer[0]
        return [
            item
            for item in layer
            if item[0] is best or item[1].cost < record.cost + self._between(best, item[0])
        ]

    def _between(self, state: State, other: State) -> float:
        """Return the cost of adding to `state` all forms that `other` has."""
        missing = ((node, form) for node, forms in other.items() for form in forms if form not in state[node])
        return sum(
            math.inf if is_stored(node) else self._cost_of(state, node, form) for node, form in missing
        )

    def _had(self, known: State, node: fx.Node, form: Form, *, keeps: bool) -> float:
        """Add a form of a value, kept for the backward if `keeps`, to the state; return the cost."""
        cost = 0.0
        if node not in known:  # first use of a parameter or buffer: store it in the form needed
            home = self.given.get(node, form if isinstance(form, DimSplit) else R)
            known[node] = (home,)
            cost += self.costs.stored(node, home)
        cost += self._more(known, node, form)
        return cost + (self._more(known, node, KeptValue.of(form)) if keeps and not is_stored(node) else 0)

    def _more(self, known: State, node: fx.Node, what: Form | KeptValue) -> float:
        """Add a form or a kept copy of a value to the state unless it is free; return its cost."""
        if what in known[node]:
            return 0.0
        cost = self._cost_of(known, node, what)
        if cost:
            known[node] = (*known[node], what)
        return cost

    def _cost_of(self, known: State, node: fx.Node, what: Form | KeptValue) -> float:
        start = R if R in known[node] else known[node][0]
        key = (node, start, what)
        result = self._costs.get(key)
        if result is None:
            result = self._costs[key] = self._priced(node, start, what)
        return result

    def _priced(self, node: fx.Node, start: Form | KeptValue, what: Form | KeptValue) -> float:
        if isinstance(what, KeptValue):
            return self.costs.kept(node, what.form)
        assert not isinstance(start, KeptValue)  # the form in which a value is made is first
        return math.inf if node in self.fixed else self.costs.conversion(node, start, what)

    def _end(self, state: State, output: fx.Node) -> float:
        return sum(self._had(dict(state), source, R, keeps=False) for source in output.all_input_nodes)


def _firsts(stage: TracedStage) -> list[fx.Node]:
    """Return the first operation after each edge, or the output."""
    operations = [node for node in stage.graph.nodes if node.op == "call_function"]
    end = stage.graph.output_node()
    return [next((node for node in operations if stage.layer_of[node] >= edge), end) for edge in stage.edges]


def _whole(forms: tuple[Form | KeptValue, ...]) -> tuple[Form | KeptValue, ...]:
    """Return the replicated form of a value, and its kept forms."""
    return (R, *(form for form in forms if isinstance(form, KeptValue)))


def _ways(record: _Record) -> Iterator[Strategy]:
    """Yield the strategies, last first."""
    while record.way is not None and record.before is not None:
        yield record.way
        record = record.before
