"""The planner of MPress: the compute-balanced split, with memory compaction until every device has room.

The steps of the paper; a tensor is all that a block keeps of a microbatch:

    1. The split is that of `time`; one simulated step gives every tensor its live interval.
    2. Devices are mapped so that stages that lack memory have neighbours with some left (`planner.mapping`).
    3. Each stage that lacks memory gets a first assignment: the host takes tensors with very long live
       intervals; then tensors are recomputed if that adds less than a swap would, late blocks first and thus
       consecutive ones; then the host takes the remaining excess, peers take tensors without another place,
       and the host takes the optimizer state of the fewest blocks needed if tensors are not enough.
    4. A step is simulated; on every stage the tensor that adds the most delay moves to peers instead, as long
       as they have memory; faster results are kept, until gains are negligible.

Choices that the paper leaves open are options (`MpressOptions`). Recomputation is of whole blocks, as in the
paper. On symmetric links, step 2 is skipped. `joint` chooses the split too, and is never slower.

Cost: one simulation for each round, some twenty; programs of many actions get fewer rounds, which the result
reports. (Zhou et al., "MPress", HPCA 2023, sections III and IV.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from pipefit.planner.baselines.simple import time
from pipefit.planner.evaluation import Budget, Candidate, Evaluation, Evaluator
from pipefit.planner.filling import Filler
from pipefit.planner.mapping import Mapping, mapped_stages, peer_rates, shared_out
from pipefit.planner.memory_choices import KEPT, TO_HOST, TO_PEERS, BlockPrices, Menu, StageChoice, parts_of
from pipefit.planner.problem import PlannerResult, Question, Split
from pipefit.schema.plan import Objective

# ---- Cost rule of the paper, and its table of six tensors
#
# A saved tensor has a live interval, the time between its forward and its backward. Recomputation adds the
# full time of a second forward. Copies to the host or to peers run in parallel with computation and add only
# the time by which they exceed the live interval.


class Technique(StrEnum):
    """Treatment of a saved tensor between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    HOST = "host"
    PEER = "peers"


class TensorCosts(NamedTuple):
    """Costs of the techniques for one tensor, in seconds; None for an unavailable technique.

    `recompute_seconds` is the time of a second forward, `host_seconds` and `peer_seconds` are the times of
    offload and reload together, and `interval_seconds` is the live interval between forward and backward.
    """

    nbytes: int
    interval_seconds: float
    recompute_seconds: float | None = None
    host_seconds: float | None = None
    peer_seconds: float | None = None

    @property
    def added_seconds(self) -> dict[Technique, float]:
        """Seconds that every available technique adds to a step."""
        result = {} if self.recompute_seconds is None else {Technique.RECOMPUTE: self.recompute_seconds}
        for technique, seconds in (Technique.HOST, self.host_seconds), (Technique.PEER, self.peer_seconds):
            if seconds is not None:
                result[technique] = max(0.0, seconds - self.interval_seconds)
        return result


def mpress_choice(costs: TensorCosts) -> Technique:
    """Choose the technique for one tensor by the rule of the paper, if peers have memory to spare.

    The host, if the live interval hides the copies. Otherwise the cheaper of recomputation and the host, or
    peers if they add less than that. The rule ignores other tensors on the same link.
    """
    added = costs.added_seconds
    if added.get(Technique.HOST) == 0:
        return Technique.HOST
    first = [t for t in (Technique.RECOMPUTE, Technique.HOST) if t in added]
    without_peers = min(first, key=added.__getitem__, default=Technique.PEER)
    return Technique.PEER if added.get(Technique.PEER, float("inf")) < added[without_peers] else without_peers


# ---- Planner

_ACTIONS = 40_000  # in the programs of all rounds
_CORRECTIONS = 6  # corrections of the first assignment by the bytes of the simulated step
_PLACES = {Technique.HOST: TO_HOST, Technique.PEER: TO_PEERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class MpressOptions:
    """Choices that the paper leaves open.

    A live interval is very long if it is at least `long_interval` times the seconds that the host's link
    needs for all bytes that the stage then has in transit, out and back. Spare memory is lent in pieces of
    `quantum_bytes`. Gains below the part `least_gain` of a step are negligible, and after `patience` such
    rounds in a row the planner stops.
    """

    long_interval: float = 1.0
    quantum_bytes: int = 64 << 20
    least_gain: float = 0.005
    patience: int = 2


def mpress(question: Question, options: MpressOptions | None = None) -> PlannerResult:
    """Return the compacted time split."""
    evaluator = Evaluator(question)
    evaluator.begin(question.options.effort)
    result = evaluator.whole(compacted(Filler(evaluator), options or MpressOptions()).candidate)
    return PlannerResult(
        result.candidate.split,
        Objective.STEP,
        result.seconds,
        evaluated=evaluator.count,
        work=evaluator.work,
        proven=False,
        decisions=None if evaluator.pinned else evaluator.decisions(result.candidate),
        remarks=evaluator.told_end() if evaluator.ended else (),
    )


def compacted(filler: Filler, options: MpressOptions) -> Evaluation:
    """Return the evaluation of the compacted time split."""
    evaluator = filler.evaluator
    split, budget = time(filler.question).split, Budget(evaluator, _ACTIONS)
    kept = evaluator.kept_at(split)
    if kept.fits or evaluator.pinned:
        return kept
    mapping = _mapping(filler, kept)
    assignment = _Assignment(filler, Split(split.edges, mapping.devices), kept, mapping, options)
    first = assignment.first()
    return kept if first is None else _refined(assignment, first, mapping, options, budget)


def _mapping(filler: Filler, kept: Evaluation) -> Mapping:
    """Return the devices of the stages, and the bytes that stages lend to each other."""
    split, lend = kept.candidate.split, filler.question.means.peers
    needs = [_at_peers(filler, split, stage, over) for stage, over in enumerate(kept.over)]
    return mapped_stages(filler.question, split, needs, [max(0, -over) if lend else 0 for over in kept.over])


def _at_peers(filler: Filler, split: Split, stage: int, over: int) -> int:
    """Return the bytes that peers reserve if a stage frees `over` bytes there.

    Whole blocks, of all microbatches in flight but one, and one more block for tensors in transit.
    """
    menus, held = filler.evaluator.stage_menus(split)[stage], filler.in_flight(split, stage)
    each = max(menu.movable_bytes for menu in menus)
    if over <= 0 or held < 3 or not each:
        return max(0, over)
    return (-(-over // (each * (held - 2))) + 1) * each * (held - 1)


class _Tensor(NamedTuple):
    """All tensors that a block keeps of a microbatch: their bytes, and the costs of techniques."""

    block: int
    nbytes: int
    costs: TensorCosts


class _Assignment:
    """First assignment of techniques on the stages of a split."""

    def __init__(
        self, filler: Filler, split: Split, kept: Evaluation, mapping: Mapping, options: MpressOptions
    ) -> None:
        self.filler, self.split, self.kept, self.mapping, self.options = filler, split, kept, mapping, options
        self.menus = filler.evaluator.stage_menus(split)
        self._prices = BlockPrices(filler.question)
        self._rates = peer_rates(filler.question.cluster)
        self.tensors = [self._tensors(stage) for stage in range(len(self.menus))]

    def first(self) -> Evaluation | None:
        """Return the first assignment that fits, after corrections by simulated bytes, or the leanest."""
        best: Evaluation | None = None
        needs = [float(over) for over in self.kept.over]
        for _ in range(_CORRECTIONS):
            choices, freed = zip(*map(self._choice, range(len(needs)), needs), strict=True)
            result = self.filler.evaluator.evaluate(Candidate(self.split, choices))
            if result is None:
                return best
            best = result if best is None or result.order < best.order else best
            if result.fits:
                return best
            corrected = zip(needs, freed, result.over, strict=True)
            needs = [least + over if over > 0 else need for need, least, over in corrected]
        return best

    def _choice(self, stage: int, need: float) -> tuple[StageChoice, float]:
        """Return the techniques of a stage that frees `need` bytes, and the bytes freed by estimate."""
        menus, tensors = self.menus[stage], self.tensors[stage]
        chosen = [Technique.KEEP] * len(menus)
        held, shares = self.filler.in_flight(self.split, stage), self.mapping.lenders_of(stage)
        room, left = sum(shares.values()), need
        for tensor, technique in _ordered(tensors, held, self.options):
            if left <= 0 or _freed(technique, held) <= _freed(chosen[tensor.block], held):
                continue
            if technique is Technique.PEER:
                room -= tensor.nbytes * max(1, held - 1)
                if room < 0:
                    break
            before, chosen[tensor.block] = chosen[tensor.block], technique
            left -= tensor.nbytes * (_freed(technique, held) - _freed(before, held))
        recipes = tuple(
            len(menu.recipes) - 1 if t is Technique.RECOMPUTE else 0
            for menu, t in zip(menus, chosen, strict=True)
        )
        places = tuple(_PLACES.get(technique, KEPT) for technique in chosen)
        peers = shared_out(shares, self.mapping.devices) if TO_PEERS in places else None
        states = parts_of(menus[: self.filler.states(menus, left)])
        choice = StageChoice(recipes, places, near=self._near(stage, places), states=states, peers=peers)
        return choice, need - min(left, 0.0)

    def _near(self, stage: int, places: Sequence[int]) -> int:
        """Return the number of tensors to the host that have the time of one forward."""
        most, total, count = self.filler.host_bytes(self.split, stage)[0], 0.0, 0
        for tensor in self.tensors[stage]:
            if places[tensor.block] == TO_HOST:
                total += tensor.nbytes
                count += total <= most or not count
        return count

    def _tensors(self, stage: int) -> list[_Tensor]:
        """Return the tensors of a stage, with their live intervals and the times of techniques."""
        menus, waits = self.menus[stage], self._interval(stage)
        rate, across = self.filler.rates(self.split)[stage], self._peer_rate(stage)
        result = []
        for block, menu in reversed(list(enumerate(menus))):
            nbytes, recipe = menu.movable_bytes, menu.recipes[-1]
            costs = TensorCosts(
                nbytes=nbytes,
                interval_seconds=waits,
                recompute_seconds=recipe.seconds if recipe.runs else None,
                host_seconds=2 * nbytes / rate if rate and nbytes else None,
                peer_seconds=2 * nbytes / across if across and nbytes else None,
            )
            if costs.added_seconds:
                result.append(_Tensor(block, nbytes or recipe.nbytes, costs))
            waits += self._passes(stage, block)
        return result[::-1]

    def _peer_rate(self, stage: int) -> float:
        """Return the bytes per second to all lenders of a stage."""
        rates, at = self._rates, self.mapping.devices
        return sum(float(rates[at[stage], at[lender]]) for lender in self.mapping.lenders_of(stage))

    def _passes(self, stage: int, block: int) -> float:
        """Return the seconds forward and backward of a block of a stage."""
        at = self.split.edges[stage] + block
        return sum(
            float(times[at + 1] - times[at]) for times in (self._prices.forward, self._prices.backward)
        )

    def _interval(self, stage: int) -> float:
        """Return the median seconds from a forward's end to its backward's start, over all microbatches."""
        simulation, device = self.kept.simulation, self.kept.candidate.split.devices[stage]
        ends = simulation.forwards_ended(device)
        waits = [begin - ends[m] for m, (begin, _) in simulation.backwards_run(device).items() if m in ends]
        return max(0.0, median(waits)) if waits else 0.0


def _freed(technique: Technique, held: int) -> int:
    """Return for how many microbatches in flight a technique frees bytes; a swap keeps two on the device."""
    if technique is Technique.RECOMPUTE:
        return held
    return 0 if technique is Technique.KEEP else max(0, held - 2)


def _ordered(
    tensors: Sequence[_Tensor], held: int, options: MpressOptions
) -> Iterator[tuple[_Tensor, Technique]]:
    """Yield the tensors of a stage in the order of the first assignment, each with its technique.

    Tensors come again with techniques that free more, for stages on which the first ones are not enough.
    """
    on_the_way = 0.0
    by_interval = sorted(tensors, key=lambda tensor: -tensor.costs.interval_seconds)
    for tensor in by_interval:
        trip = tensor.costs.host_seconds
        if trip is not None:
            queue = held * (on_the_way + trip)
            if tensor.costs.interval_seconds >= options.long_interval * queue:
                on_the_way += trip
                yield tensor, Technique.HOST
    for tensor in sorted(tensors, key=lambda tensor: -tensor.block):
        if tensor.costs.recompute_seconds is not None and _recomputes(tensor, on_the_way, held):
            yield tensor, Technique.RECOMPUTE
    for technique in (Technique.HOST, Technique.RECOMPUTE, Technique.PEER):
        for tensor in reversed(by_interval) if technique is Technique.RECOMPUTE else by_interval:
            if technique in tensor.costs.added_seconds:
                yield tensor, technique


def _recomputes(tensor: _Tensor, on_the_way: float, held: int) -> bool:
    """Return whether recomputation adds less than a swap after all transfers in the queue."""
    costs, trip = tensor.costs, tensor.costs.host_seconds
    behind = None if trip is None else held * (on_the_way + trip)
    queued = TensorCosts(
        nbytes=costs.nbytes,
        interval_seconds=costs.interval_seconds,
        recompute_seconds=costs.recompute_seconds,
        host_seconds=behind,
    )
    return mpress_choice(queued) is Technique.RECOMPUTE


# ---- Peers


def _refined(
    assignment: _Assignment, start: Evaluation, mapping: Mapping, options: MpressOptions, budget: Budget
) -> Evaluation:
    """Return the assignment with tensors moved to peers, as long as steps get visibly shorter."""
    best, without = start, 0
    candidate, room = start.candidate, _room(best, options)
    while without < options.patience and not budget.ends():
        relieved = _relieved(assignment, candidate, mapping, room)
        result = None if relieved is None else assignment.filler.evaluator.evaluate(relieved)
        if result is None or result.over_bytes > best.over_bytes:
            return best
        candidate = result.candidate
        visible = result.order < (best.over_bytes, best.seconds * (1 - options.least_gain), 0)
        best, without = (result, 0) if visible else (best, without + 1)
    return best


def _room(evaluation: Evaluation, options: MpressOptions) -> list[int]:
    """Return the bytes that every stage's device can lend, in whole pieces."""
    return [max(0, -over) // options.quantum_bytes * options.quantum_bytes for over in evaluation.over]


def _relieved(
    assignment: _Assignment, candidate: Candidate, mapping: Mapping, room: list[int]
) -> Candidate | None:
    """Return the candidate with one more tensor of every stage at its lenders; None if no tensor can move.

    The lenders' `room` shrinks.
    """
    choices, changed = list(candidate.choices), False
    for stage, choice in enumerate(choices):
        shares = mapping.lenders_of(stage)
        tensor = _slowest(assignment.tensors[stage], choice, assignment.menus[stage])
        if tensor is None or not shares:
            continue
        need = tensor.nbytes * max(1, assignment.filler.in_flight(assignment.split, stage) - 1)
        parts = {lender: need * n // sum(shares.values()) + 1 for lender, n in shares.items()}
        if all(parts[lender] <= room[lender] for lender in parts):
            for lender, part in parts.items():
                room[lender] -= part
            recipes = (*choice.recipes[: tensor.block], 0, *choice.recipes[tensor.block + 1 :])
            places = (*choice.places[: tensor.block], TO_PEERS, *choice.places[tensor.block + 1 :])
            peers = shared_out(shares, mapping.devices)
            choices[stage], changed = choice._replace(recipes=recipes, places=places, peers=peers), True
    return Candidate(candidate.split, tuple(choices)) if changed else None


def _slowest(tensors: Sequence[_Tensor], choice: StageChoice, menus: Sequence[Menu]) -> _Tensor | None:
    """Return the tensor whose technique adds the most seconds; None without a tensor that peers could hold.

    A swap adds the time that the link cannot hide, shared by all swapped tensors of the stage.
    """

    def added(tensor: _Tensor) -> float:
        if choice.recipes[tensor.block]:
            return tensor.costs.recompute_seconds or 0.0
        return tensor.costs.added_seconds.get(Technique.HOST, 0.0)

    movable = [t for t in tensors if menus[t.block].tensors]
    used = [t for t in movable if choice.recipes[t.block] or choice.places[t.block] == TO_HOST]
    return max(used, key=added, default=None)
