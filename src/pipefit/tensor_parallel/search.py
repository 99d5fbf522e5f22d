"""The forms of all values of a stage: a dynamic programme along its graph.

Backwards, every operation is asked for the forms in which it can use its operands; these wishes are what the operations
before it try to fulfil. Forwards, a state is the forms in which each value that is still needed can be had, the one it
was made in first; of equal states the cheapest is kept. Parameters have the form in which they are first met, and a
tied one is part of the state until its last use. At most 200 are kept at a time, so the search is linear in the
number of operations; with all states kept it is exact for its prices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, fx

from pipefit.capture.flat import groups, mutated_arguments, operator_name, role, value
from pipefit.tensor_parallel.forms import C, Form, R, Split
from pipefit.tensor_parallel.operations import Operation, Strategy, flops, nbytes, shape
from pipefit.tensor_parallel.rules import rule_of
from pipefit.tensor_parallel.rules.elementwise import COPIES
from pipefit.tensor_parallel.rules.reshaping import CUTS, VIEWS
from pipefit.tensor_parallel.tracing import TracedStage, is_stored, without_gradient

# ----------------------------------------------------------------------------------------------------
# What a choice of forms costs, in bytes: what a rank sends, and, at a price, what it stores.
#
# Sums send each byte twice, or once where every rank gets its part, and gathers once; a rank sends (ranks -
# 1) / ranks of the whole. Computing counts too, so that of two equal choices the divided one is taken. These
# are proxies of memory: the exact bytes are a dry run's.

_STATES = 4  # a parameter's gradient and two states of an optimizer are divided with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a byte that a rank stores is worth, in bytes that it sends; and how many operations one of those is."""

    stored: float = 0.3
    flops: float = 1000.0


SEQUENCES = Prices(stored=2.0)  # of sequence parallelism, which is asked for to store less


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
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
        """To have a value in another form than that in which it is made."""
        if not isinstance(value(node), Tensor):
            return math.inf  # lists are never converted
        back = node in self.trained
        if not isinstance(home, Split):
            times = 2 * back if form == C else float(back) if isinstance(form, Split) else 0.0
        else:
            times = 1 + (back if form != R else 0.0)
        return times * self._sent * nbytes(node)

    def stored(self, node: fx.Node, form: Form) -> float:
        """To have a parameter or buffer in a form, with all that an optimizer has for it."""
        return _STATES * self.kept(node, form)

    def done(self, node: fx.Node, way: Strategy) -> float:
        """To do an operation."""
        computed = flops(node) / (self.ranks if way.divides else 1) / self.prices.flops
        times = 1 + (node in self.trained) if way.scattered else 2
        return times * self._sent * way.summed + computed

    def kept(self, node: fx.Node, form: Form) -> float:
        """To keep a value in a form until the backward."""
        return self.prices.stored * nbytes(node) / (self.ranks if isinstance(form, Split) else 1)


# ----------------------------------------------------------------------------------------------------
# What a backward is likely to keep, told by operators: those that most of them keep are known by name.
#
# Sums, copies and views keep nothing of their operands; products, norms and curves do. A guess for a search,
# whose exact bytes are a dry run's.

_CURVES = frozenset({"softmax", "log_softmax", "relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt"})  # known by results
_LOOKS = VIEWS | CUTS | {"transpose", "permute", "t", "expand", "select", "slice", "alias", "detach"}
_SUMS = frozenset({"add", "sub", "neg", "rsub", "sum", "mean", "cumsum"})
_MOVES = frozenset({"cat", "stack", "repeat", "repeat_interleave", "pad", "roll", "flip", "index", "embedding"})
_KEEPS_NO_OPERAND = COPIES | _CURVES | _LOOKS | _SUMS | _MOVES | {"dropout"}


def keeps_result(node: fx.Node) -> bool:
    """Whether the backward of an operation needs what it made, or something of that size."""
    return operator_name(node) in _CURVES | {"scaled_dot_product_attention", "dropout"}


def keeps_operands(node: fx.Node) -> bool:
    """Whether the backward of an operation needs what went in; that of a product with a number needs nothing."""
    name = operator_name(node)
    if node.target is operator.getitem or name in _KEEPS_NO_OPERAND:
        return False
    return not (name in ("mul", "div") and len(node.all_input_nodes) == 1)


# ----------------------------------------------------------------------------------------------------

_MOST = 200
_SEQUENCES = 3  # dimensions of values that products take: samples, positions, features


class Kept(NamedTuple):
    """A value is kept for the backward, in this form; a partial gradient is no form of its own there."""

    form: Form

    @staticmethod
    def of(form: Form) -> Kept:
        """For a value that is used in a form."""
        return Kept(form if isinstance(form, Split) else R)


State = dict[fx.Node, tuple[Form | Kept, ...]]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How every operation is done, the form in which each value is made or stored, and what each could have been.

    `options` counts the strategies of every operation. `trained` are the values that need a gradient, `changed` those
    that share memory with what is changed in place.
    """

    ways: dict[fx.Node, Strategy]
    home: dict[fx.Node, Form]
    options: dict[fx.Node, int]
    trained: frozenset[fx.Node]
    changed: frozenset[fx.Node]
    cost: float


class _Record(NamedTuple):
    """The cheapest way into a state: its cost, the record before, and the operation's strategy."""

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
) -> Choice:
    """The cheapest forms that the search finds; by `sequences` norms and what is around them may be divided too.

    Parameters and buffers that are `given` a form have it, whatever that costs.
    """
    trained, changed = _trained(stage), _changed(stage.graph)
    options = _options(stage, ranks, trained, changed, sequences=sequences)
    search = _Search(stage, options, Costs(ranks=ranks, prices=prices, trained=trained), given or {})
    ways, cost = search.run()
    home: dict[fx.Node, Form] = {**dict.fromkeys(stage.inputs, R), **(given or {})}
    for node, way in ways.items():
        for source, form in way.operands.items():
            if is_stored(source):
                home.setdefault(source, form if isinstance(form, Split) else R)
        home[node] = way.result
    counts = {node: len(found) for node, found in options.items()}
    return Choice(ways=ways, home=home, options=counts, trained=trained, changed=changed, cost=cost)


def _trained(stage: TracedStage) -> frozenset[fx.Node]:
    """The values that need a gradient."""
    found: set[fx.Node] = set()
    for node in stage.graph.nodes:
        if node.op == "placeholder":
            needs = stage.tensor(node).requires_grad if is_stored(node) else _arrives_trained(stage, node)
        else:
            needs = _is_numeric(node) and any(source in found for source in node.all_input_nodes) and not _ends(node)
        if needs:
            found.add(node)
    return frozenset(found)


def _ends(node: fx.Node) -> bool:
    """Whether no gradient goes back through an operation; what is changed in place without one still has its own."""
    return (without_gradient(node) or operator_name(node) == "detach") and not mutated_arguments(node)


def _arrives_trained(stage: TracedStage, node: fx.Node) -> bool:
    """Whether an input is of another stage, which needs its gradient."""
    values = stage.inputs[: len(stage.inputs) - stage.targets]
    return not stage.is_first and node in values and _is_numeric(node)


def _derived(graph: fx.Graph) -> set[fx.Node]:
    """The real or complex values that depend on a parameter: all others, such as masks, are cheap to have whole."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_parameter = (meaning := role(node)) is not None and meaning.kind == "parameter"
        if is_parameter or (_is_numeric(node) and any(source in found for source in node.all_input_nodes)):
            found.add(node)
    return found


def _is_numeric(node: fx.Node) -> bool:
    """Whether it is of a type through which gradients go, complex numbers included."""
    found = value(node)
    tensors = found if isinstance(found, tuple | list) else (found,)
    return any(isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) for t in tensors)


def _options(
    stage: TracedStage,
    ranks: int,
    trained: frozenset[fx.Node],
    changed: frozenset[fx.Node],
    *,
    sequences: bool = False,
) -> dict[fx.Node, list[Strategy]]:
    """The strategies of every operation, replicated first; found backwards, as users know what they need."""
    wishes: dict[fx.Node, dict[Split, None]] = {}
    found: dict[fx.Node, list[Strategy]] = {}
    derived = _derived(stage.graph)
    for node in reversed(stage.graph.nodes):
        if node.op != "call_function":
            continue
        op, rule = Operation(node, ranks, trained, sequences=sequences), rule_of(node)
        found[node] = [op.replicated()]
        if rule and node in derived and changed.isdisjoint((node, *node.all_input_nodes)):
            found[node] += [way for way in rule(op, wishes.get(node, {})) if way is not None]
        for way in found[node]:
            for source, form in way.operands.items():
                if isinstance(form, Split):
                    wishes.setdefault(source, {})[form] = None
                elif sequences and form == C and len(shape(source)) == _SEQUENCES:
                    wishes.setdefault(source, {})[Split(1)] = None  # its positions are put together just before
    return found


def _changed(graph: fx.Graph) -> frozenset[fx.Node]:
    """The values that share memory with one that is changed in place; buffers are changed in the form they have."""
    roots = groups(graph)
    changed = {roots[target] for node in graph.nodes for target in mutated_arguments(node)}
    return frozenset(node for node, root in roots.items() if root in changed and not is_stored(root))


class _Search:
    """The dynamic programme."""

    def __init__(
        self,
        stage: TracedStage,
        options: dict[fx.Node, list[Strategy]],
        costs: Costs,
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
            edge = self.number[node] - 0.5  # they live until there, used or not
            self.ends |= {source: max(edge, self.ends.get(source, edge)) for source in cut}
        self.trained = costs.trained
        self._costs: dict[tuple[fx.Node, Form | Kept, Form | Kept], float] = {}
        roots = groups(stage.graph)
        changed = {roots[target] for node in self.nodes for target in mutated_arguments(node)}
        self.fixed = {node for node, root in roots.items() if root in changed}  # another form would be an old copy

    def run(self) -> tuple[dict[fx.Node, Strategy], float]:
        """The strategies of the cheapest way, and its cost."""
        layer: list[tuple[State, _Record]] = [(dict.fromkeys(self.stage.inputs, (R,)), _Record(0.0, None, None))]
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
        ending = [source for source in (node, *node.all_input_nodes) if self.ends.get(source, -1) <= self.number[node]]
        done = [(way, self.costs.done(node, way)) for way in self.options[node]]
        keeps, keeps_own = (node in self.trained and keeps(node) for keeps in (keeps_operands, keeps_result))
        for state, record in layer:
            for way, cost in done:
                known = dict(state)
                operands = (self._had(known, *operand, keeps=keeps) for operand in way.operands.items())
                total = record.cost + cost + sum(operands)
                known[node] = (way.result,)
                if keeps_own:
                    total += self._more(known, node, Kept.of(way.result))
                for source in ending:
                    known.pop(source, None)
                key = tuple(known.items())
                if total < math.inf and (key not in following or total < following[key][1].cost):
                    following[key] = known, _Record(total, record, way)
        return self._worthwhile(sorted(following.values(), key=lambda item: item[1].cost))[:_MOST]

    def _cut(self, layer: Sequence[tuple[State, _Record]], node: fx.Node) -> list[tuple[State, _Record]]:
        """In front of `node` a block ends: what crosses is had whole, and in no other form from there on."""
        found: dict[object, tuple[State, _Record]] = {}
        for state, record in layer:
            known = dict(state)
            total = record.cost + sum(self._had(known, source, R, keeps=False) for source in self.cuts[node])
            known = {
                source: forms if is_stored(source) else _whole(forms)
                for source, forms in known.items()
                if self.ends.get(source, -1) >= self.number[node]
            }
            key = tuple(known.items())
            if total < math.inf and (key not in found or total < found[key][1].cost):
                found[key] = known, record._replace(cost=total)
        return self._worthwhile(sorted(found.values(), key=lambda item: item[1].cost))

    def _worthwhile(self, layer: list[tuple[State, _Record]]) -> list[tuple[State, _Record]]:
        """The states, cheapest first, but for those that the cheapest can be made into for less."""
        best, record = layer[0]
        return [item for item in layer if item[0] is best or item[1].cost < record.cost + self._between(best, item[0])]

    def _between(self, state: State, other: State) -> float:
        """What it takes to have in `state` all that is had in `other`."""
        missing = ((node, form) for node, forms in other.items() for form in forms if form not in state[node])
        return sum(math.inf if is_stored(node) else self._cost_of(state, node, form) for node, form in missing)

    def _had(self, known: State, node: fx.Node, form: Form, *, keeps: bool) -> float:
        """The cost of having a value in a form, and of keeping it for the backward; both are so from now on."""
        cost = 0.0
        if node not in known:  # a parameter or buffer, met first: it is stored as it is needed
            home = self.given.get(node, form if isinstance(form, Split) else R)
            known[node] = (home,)
            cost += self.costs.stored(node, home)
        cost += self._more(known, node, form)
        return cost + (self._more(known, node, Kept.of(form)) if keeps and not is_stored(node) else 0)

    def _more(self, known: State, node: fx.Node, what: Form | Kept) -> float:
        """The cost of one form of a value more, or of keeping it; what is had for nothing needs no place in a state."""
        if what in known[node]:
            return 0.0
        cost = self._cost_of(known, node, what)
        if cost:
            known[node] = (*known[node], what)
        return cost

    def _cost_of(self, known: State, node: fx.Node, what: Form | Kept) -> float:
        start = R if R in known[node] else known[node][0]
        key = (node, start, what)
        found = self._costs.get(key)
        if found is None:
            found = self._costs[key] = self._priced(node, start, what)
        return found

    def _priced(self, node: fx.Node, start: Form | Kept, what: Form | Kept) -> float:
        if isinstance(what, Kept):
            return self.costs.kept(node, what.form)
        assert not isinstance(start, Kept)  # the form in which a value is made comes first
        return math.inf if node in self.fixed else self.costs.conversion(node, start, what)

    def _end(self, state: State, output: fx.Node) -> float:
        return sum(self._had(dict(state), source, R, keeps=False) for source in output.all_input_nodes)


def _firsts(stage: TracedStage) -> list[fx.Node]:
    """The first operation behind each edge, or the end."""
    operations = [node for node in stage.graph.nodes if node.op == "call_function"]
    end = stage.graph.output_node()
    return [next((node for node in operations if stage.layer_of[node] >= edge), end) for edge in stage.edges]


def _whole(forms: tuple[Form | Kept, ...]) -> tuple[Form | Kept, ...]:
    """Of the forms in which a value is had, the whole one; and in which it is kept."""
    return (R, *(form for form in forms if isinstance(form, Kept)))


def _ways(record: _Record) -> Iterator[Strategy]:
    """The strategies, last first."""
    while record.way is not None and record.before is not None:
        yield record.way
        record = record.before
