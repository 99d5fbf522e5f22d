"""Plans near those that are estimated to be fast, compared by simulation, since estimates leave out messages.

They are the plans of `uniform`, `parameters` and `time` with one degree for all stages, on as many stages as
the devices allow; those of `capture` and `alpa`, if there are few stages to choose from; and plans with one
cut of the fastest plan moved by one block, while that is faster. So the result is never slower than the
splits of Megatron, DeepSpeed, CAPTURE and Alpa, as long as the budget lasts. Then replicas reduce gradients
in more buckets during the backward, and divide their state, if that is faster. Estimates and other planners'
splits reduce after the last backward, which may rank two splits in another order. So these ways are also
tried for the next fastest splits and for splits of one stage, which is what FSDP does with all devices.

Cost: a simulation for each plan whose slowest stage alone would not take longer than a known plan, within a
budget of work, and half as much again for splits that are not the fastest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, product
from typing import NamedTuple

import numpy as np

from pipefit.errors import UsageError
from pipefit.lowering import Recompute
from pipefit.memory import Costs
from pipefit.planner.baselines.alpa import alpa
from pipefit.planner.baselines.capture import CaptureOptions, capture
from pipefit.planner.baselines.simple import parameters, time, uniform
from pipefit.planner.bounds import in_flight
from pipefit.planner.evaluation import Simulated
from pipefit.planner.hybrid import candidates
from pipefit.planner.hybrid.programme import Way
from pipefit.planner.hybrid.tables import DegreeTables, StageSeconds, together_seconds
from pipefit.planner.problem import Degree, Planner, PlannerResult, Question, Split, plan_of, shortened
from pipefit.planner.replicas import answers
from pipefit.schema.decisions import Decision
from pipefit.schema.grids import Grid, Sharding
from pipefit.schema.plan import Objective, Plan
from pipefit.schema.training import Training
from pipefit.simulator import Assembled, Parts
from pipefit.simulator.assembled import assembled
from pipefit.timing import Group, Line

# ---- Simulations of the splits of one question, whose stages may have several devices


class Mixed(NamedTuple):
    """Plan that fits, whose stages may have any degrees, and its simulation."""

    question: Question
    split: Split
    simulation: Simulated
    decisions: tuple[Decision, ...] = ()
    estimated: float = float("inf")  # seconds of the question's plan with the fewest estimated seconds

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.simulation.seconds

    @property
    def peaks(self) -> tuple[int, ...]:
        """Peak bytes of every device."""
        return self.simulation.peaks

    @property
    def is_whole(self) -> bool:
        """True if replicas divide nothing and everything is kept."""
        return not self.decisions and all(grid.shard == "none" for grid in self.split.grids)

    def found(self, evaluated: int, remarks: tuple[str, ...] = ()) -> PlannerResult:
        """Return the plan as a planner's result, after `evaluated` simulations."""
        decisions = self.decisions if self.question.options.recompute == "never" else self.decisions or None
        return PlannerResult(
            self.split,
            Objective.STEP,
            self.seconds,
            evaluated,
            proven=False,
            decisions=decisions,
            remarks=remarks,
            simulation=self.simulation.simulation,
        )

    def completed(self) -> Mixed:
        """Return the plan with all microbatches of a step simulated."""
        simulation = assembled(plan_of(self.question, self.split, decisions=self.decisions or None))
        microbatches = self.question.training.microbatches
        return self._replace(simulation=Simulated(self.split, simulation, microbatches))


_KNOWN = 16  # number of known actions of devices that take as long as a new one


class Simulations:
    """Simulator of a question's splits; `work` is the work so far, in new actions.

    Compared plans differ in a stage or two, so the programs of their other devices are shared
    (`simulator.assembled`). Long steps are simulated with fewer microbatches (`planner.evaluation`).

    Cost: some ten microseconds for each new action of a device, and half a microsecond for each other action.
    """

    def __init__(self, question: Question) -> None:
        self.question, self.work = question, 0
        self._tables: dict[Degree, DegreeTables] = {}
        self._before: dict[
            Degree, dict[object, StageSeconds]
        ] = {}  # seconds before each edge, by kind of device
        self._halves: dict[tuple[int, ...], tuple[Line, ...]] = {}  # of collectives, by replicas
        self._parts_of: dict[Training, Parts] = {}

    def share_of(self, work: int) -> int:
        """Return the part of a budget of work that the question's effort allows."""
        return round(work * self.question.options.effort)

    def fitting(self, split: Split, decisions: tuple[Decision, ...], below: float) -> Mixed | None:
        """Return the plan of a split with these decisions, if it takes less than `below` seconds and fits.

        Raises:
            UsageError: the plan cannot be carried out.
        """
        if not self._first_stage_fits(split, decisions):
            return None
        result = self.of(split, decisions)
        if below == float("inf") and not result.fits:  # peaks take less time to read than steps
            return None
        fits = result.seconds < below and result.fits
        return Mixed(self.question, split, result, decisions) if fits else None

    def _first_stage_fits(self, split: Split, decisions: tuple[Decision, ...]) -> bool:
        """Return whether the first stage, which holds the most microbatches, fits; no other stage is read.

        Raises:
            UsageError: the plan cannot be carried out.
        """
        plan, parts = self._shortened(split, decisions)
        with self._counted(parts):
            of_devices, budgets = parts.of_rank(plan, 0, parts.alike(plan)), self.question.cluster.budgets
            return all(part.memory().peak_bytes <= budgets[device] for device, part in of_devices.items())

    def of(self, split: Split, decisions: tuple[Decision, ...] = ()) -> Simulated:
        """Return the simulation of a split with these decisions, or with those that the question requests.

        Raises:
            UsageError: the plan cannot be carried out, for instance if replicas cannot divide what they
                exchange.
        """
        plan, parts = self._shortened(split, decisions)
        with self._counted(parts):
            result = Assembled(plan, parts)
        self.work += result.actions // _KNOWN
        return Simulated(split, result, self.question.training.microbatches)

    def _shortened(self, split: Split, decisions: tuple[Decision, ...]) -> tuple[Plan, Parts]:
        """Return a plan with the microbatches that are simulated, and the shared programs of its stages."""
        question = replace(self.question, training=shortened(self.question, len(split.devices)))
        return plan_of(question, split, decisions=decisions or None), self._parts(question)

    @contextmanager
    def _counted(self, parts: Parts) -> Iterator[None]:
        """Count what is read in the block as work."""
        before = parts.actions
        try:
            yield
        finally:
            self.work += parts.actions - before

    def may_fit(
        self, split: Split, recompute: Recompute = "never", *, without_parameters: bool = False
    ) -> bool:
        """Return whether stages with this recomputation may fit, by lower bounds of their peaks.

        State stays on the devices, but for parameters if these are elsewhere (`without_parameters`). The cost
        is negligible next to a simulation.
        """
        budgets = self.question.cluster.budgets
        for number, need in enumerate(self._least_bytes(split, recompute)):
            away = self._parameter_bytes(split, number) if without_parameters else 0
            if need - away > min(budgets[device] for device in split.grid(number).devices):
                return False
        return True

    def _parameter_bytes(self, split: Split, number: int) -> int:
        """Return the most parameter bytes that a stage's replica keeps, if replicas divide them by layer."""
        start, stop = self.question.layers(*split.edges[number : number + 2])
        grid = split.grid(number)
        costs = self.question.measured(Degree.of(grid)).costs[start:stop]
        of_layers = [sum(parameter.nbytes for parameter in cost.parameters) for cost in costs]
        return sum(of_layers) if grid.shard != "parameters" else sum(of_layers) // grid.data + max(of_layers)

    def least_bytes(self, split: Split, recompute: Recompute = "never") -> float:
        """Return a lower bound of the peak of the fullest device of such stages."""
        return max(self._least_bytes(split, recompute))

    def _least_bytes(self, split: Split, recompute: Recompute) -> Iterator[float]:
        """Yield lower bounds of the peaks of stages."""
        stages = len(split.devices)
        for number, (start, stop) in enumerate(pairwise(split.edges)):
            grid = split.grid(number)
            tables = self._tables_of(Degree.of(grid))
            yield tables.least(stages - number, Way(grid.shard, recompute), start, stop)

    def _tables_of(self, degree: Degree) -> DegreeTables:
        if degree not in self._tables:
            self._tables[degree] = DegreeTables(self.question, degree)
        return self._tables[degree]

    def least(self, split: Split) -> float:
        """Return a lower bound of a step's seconds.

        The collectives of all microbatches, or the lines of `planner.bounds`, each of the slowest device of a
        stage and the fastest ones of all others: replicas of two stages need not wait for each other.
        """
        how, stages = self.question.training, len(split.devices)
        ranges = [*enumerate(pairwise(split.edges))]
        passes = [self._passes(split.grid(number), *blocks) for number, blocks in ranges]
        forward, backward = np.array([max(of_kinds, key=sum) for of_kinds in passes]).T
        fewest, each = np.array([min(map(sum, of_kinds)) for of_kinds in passes]), forward + backward
        every = how.microbatches
        result = every * max(each.max(), *(self._exchanged(split.grid(n), *blocks) for n, blocks in ranges))
        if how.endless:
            return float(result)
        held = np.array([in_flight(how, number, stages) for number in range(stages)])
        late = fewest.sum() + (every - held) * each + (held - 1) * np.maximum(forward, backward)
        return float(max(result, (fewest.cumsum() - fewest + every * each).max(), late.max()))

    def _passes(self, grid: Grid, start: int, stop: int) -> list[tuple[float, float]]:
        """Return the seconds of a stage's forward and backward, for each of its kinds of devices."""
        degree, devices = Degree.of(grid), self.question.cluster.devices
        kinds = {devices[number].kind.key: devices[number].kind for number in grid.devices}
        known = self._before.setdefault(degree, {})
        for key in kinds.keys() - known.keys():
            known[key] = self._tables_of(degree).before(kinds[key])
        return [
            (float(sums[stop] - sums[start]), float(more[stop] - more[start]))
            for sums, more, _ in map(known.__getitem__, kinds)
        ]

    def _exchanged(self, grid: Grid, start: int, stop: int) -> float:
        """Return the fewest seconds of a microbatch's collectives between the replicas of a stage.

        Its gradients are reduced. Parameters are gathered twice, but those of the first and of the last
        bucket may stay from one pass to the next.
        """
        if not grid.divides_gradients:
            return 0.0
        tables, (_, replicas) = self._tables_of(degree := Degree.of(grid)), degree.groups(grid.devices)
        nbytes = [
            tables.gradients,
            *([tables.gathered] if grid.shard == "parameters" and grid.buckets > 1 else ()),
        ]
        if (key := tuple(replicas)) not in self._halves:
            self._halves[key] = Group.of(self.question.cluster, replicas).halves
        halves = self._halves[key]
        return sum(float(together_seconds(halves, each[start, stop])) for each in nbytes)

    def _parts(self, question: Question) -> Parts:
        """Return the shared programs of stages in steps of a question's microbatches."""
        how = question.training
        if how not in self._parts_of:
            self._parts_of[how] = Parts(Costs(question.measurement, how, question.profile.measurements))
        return self._parts_of[how]


# ---- Search

_WORK = 60_000  # budget of work for simulations
_BUCKETS = 1, 4, 16, 64
_OTHERS = 4  # number of splits next to the fastest
_MANY = 400_000_000  # compared stages times devices, above which no other state and schedules are tried
_MORE = 3  # simulations of ways to divide state after the budget is used up, within twice the budget
_PLANNERS: tuple[Planner, ...] = (uniform, parameters, time)
_ON_GRIDS: tuple[Planner, ...] = (capture, partial(capture, options=CaptureOptions(early_release=True)), alpa)
_CANDIDATES = 20_000  # number of compared stages up to which a question is small


def nearby(simulations: Simulations, best: Mixed | None, at_most: float) -> Mixed | None:
    """Return the fastest of `best` and of neighbouring plans that fit; None if none fits.

    Plans that are certain to take `at_most` seconds or more are left out.
    """
    question, search = simulations.question, _NeighbourSearch(simulations, at_most)
    best = search.first(chain(alike(question), on_grids(question)), best, following=True)
    while best is not None:
        result = search.first(beside(best.split), best)
        if result is best:
            break
        best = result
    best = search.first(_together(question, search.next_to(best)), best, following=True)
    if is_very_large(question):
        return best
    ways, more = product(question.shards, search.of_each_degree()), simulations.share_of(_MORE)
    divided = (_sharing(split, shard, 1) for shard, split in ways)
    result = search.first(divided, best, following=True, more=more)
    if result is None or result is best:
        return best
    return search.first(_together(question, [result.split]), result, following=True, more=more)


def alike(question: Question) -> Iterator[Split]:
    """Yield the simple planners' splits, with one degree for all stages; the most devices come first."""
    devices = len(question.cluster.devices)
    for degree in sorted(question.degrees, key=lambda degree: -degree.devices):
        stages = question.options.stages or min(question.blocks, devices // degree.devices)
        options = replace(question.options, stages=stages, **degree.pins)
        with suppress(UsageError):
            yield from (result.split for result in answers(replace(question, options=options), *_PLANNERS))


def on_grids(question: Question) -> Iterator[Split]:
    """Yield the splits of planners that choose the degree of every stage, if the question is small."""
    if is_small(question):
        for planner in _ON_GRIDS:
            with suppress(UsageError):
                yield planner(question).split


def is_small(question: Question) -> bool:
    """Return whether there are few stages to choose from."""
    return candidates(question, question.shards[:1]) <= _CANDIDATES


def is_very_large(question: Question) -> bool:
    """Return whether stages and devices are too many to try other state and schedules for the best plan."""
    return candidates(question, question.shards[:1]) * len(question.cluster.devices) > _MANY


def beside(split: Split) -> Iterator[Split]:
    """Yield the splits with one cut moved by a block."""
    edges = split.edges
    for number in range(1, len(edges) - 1):
        for cut in (edges[number] - 1, edges[number] + 1):
            if edges[number - 1] < cut < edges[number + 1]:
                yield split._replace(edges=(*edges[:number], cut, *edges[number + 1 :]))


def _together(question: Question, splits: Iterable[Split]) -> Iterator[Split]:
    """Yield the splits whose replicas reduce gradients in more buckets, or also divide their state.

    With more buckets than blocks, collectives of every microbatch would take long to simulate and gain
    little.
    """
    numbers = dict.fromkeys((*_BUCKETS, question.blocks))
    for split, shard, buckets in product(splits, question.shards, numbers):
        if buckets <= question.blocks or shard not in ("gradients", "parameters"):
            yield _sharing(split, shard, buckets)


def _sharing(split: Split, shard: Sharding, buckets: int) -> Split:
    """Return the split whose replicas divide state and reduce gradients like this."""
    grids = (replace(grid, shard=shard, buckets=buckets) if grid.data > 1 else grid for grid in split.grids)
    return split._replace(grids=tuple(grids))


class _NeighbourSearch:
    """Simulations for one question, within a budget."""

    def __init__(self, simulations: Simulations, at_most: float) -> None:
        self._simulations, self._at_most = simulations, at_most
        self._until = simulations.work + simulations.share_of(_WORK)
        self._tried = dict[Split, float]()  # seconds
        self._left = 0  # simulations that may still take more than the budget

    def next_to(self, best: Mixed | None) -> list[Split]:
        """Return the best split, then tried splits with replicas, nearly as fast or of one stage."""
        tried = sorted(self._tried, key=lambda split: (len(split.grids) > 1, self._tried[split]))
        others = [split for split in tried if any(grid.data > 1 for grid in split.grids)]
        alone = sum(len(split.grids) == 1 for split in others)
        self._until = max(self._until, self._simulations.work + self._simulations.share_of(_WORK // 2))
        return [*dict.fromkeys([*([] if best is None else [best.split]), *others[: alone + _OTHERS]])]

    def of_each_degree(self) -> list[Split]:
        """Return the fastest tried split of every combination of degrees, the fastest first."""
        tried = sorted(self._tried, key=self._tried.__getitem__)
        first = {tuple(map(Degree.of, split.grids)): split for split in reversed(tried) if split.grids}
        return sorted(first.values(), key=self._tried.__getitem__)

    def first(
        self, splits: Iterator[Split], best: Mixed | None, *, following: bool = False, more: int = 0
    ) -> Mixed | None:
        """Return the first split that fits and is faster than the best.

        With `following`, the fastest of all splits. Once the budget is used up, as many as `more` are
        simulated within twice the budget.
        """
        self._left = more
        for split in splits:
            result = self._timed(split, best)
            if result is not None and not following:
                return result
            best = result or best
        return best

    def _timed(self, split: Split, best: Mixed | None) -> Mixed | None:
        """Return a split's plan if it fits and is faster than the best, else None."""
        known = self._at_most if best is None else min(self._at_most, best.seconds)
        least = self._simulations.least(split)
        work = self._simulations.work
        if work > self._until * (2 if self._left else 1) or least >= known or split in self._tried:
            return None
        if not self._simulations.may_fit(split):
            self._tried[split] = least
            return None
        self._left -= work > self._until
        try:
            simulation = self._simulations.of(split)
            seconds = self._tried[split] = simulation.seconds
            if best is not None and seconds >= best.seconds:
                return None
            return Mixed(self._simulations.question, split, simulation) if simulation.fits else None
        except UsageError:  # replicas cannot divide what they exchange, or a layer can have no replicas
            return None
