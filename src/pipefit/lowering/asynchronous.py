"""Asynchronous schedules: checks of a plan, moves of weight versions, and the actions of steps.

Stages update at different times, and at no moment have all of them seen the same microbatches. Settings that
need such a moment are refused with alternatives, because they would train something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import lcm
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.lowering.local_batches import Slices
from pipefit.lowering.passes.collectives import summed_units
from pipefit.lowering.passes.communication import communicated, drained
from pipefit.lowering.passes.offload import (
    Absence,
    Bundles,
    Inserted,
    Timeline,
    inserted,
    moved_states,
    moves_of,
    named,
    subjects_of,
)
from pipefit.lowering.passes.recomputation import recomputed_units
from pipefit.lowering.passes.state_offload import StateCopies, check_moved, gradient_moves, weights_copied
from pipefit.lowering.passes.updates import run_by_run, unshards_of, update_of
from pipefit.lowering.schedules import Endless, Order, check_alone
from pipefit.schema.actions import FORWARDS, SENDS, UPDATES, Action, Kind
from pipefit.schema.decisions import Decision, SavedTensors, State, StateKind, What
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.program import shifted
from pipefit.texts import counted

# ---- Moves of weight versions: frozen weights are offloaded while no microbatch needs them
#
#     F3 B0 STASH0 OFFLOAD3 STEP0 WAIT_STASH0  F4 WAIT_OFFLOAD3 B1 ...  RELOAD3 WAIT_RELOAD3 B3
#
# From the STASH on, updates change a copy, so the weights of the previous forward may be offloaded. They are
# reloaded before every pass that uses them, run by run if passes have been cut at the edges of the layers,
# and offloaded again after it. Under PipeDream these passes are the backward and the recomputation of one
# microbatch, of several only while the pipeline fills; stage s of P holds P-s-1 older versions, the last
# stage none. Under PipeDream-2BW every stage always has two versions: the forwards of a step use weights from
# the update in the step before last.
#
# A copy is named by a microbatch in flight that used the weights. Before a forward, this is another
# microbatch than its own, so weights stay if no other one is in flight, as between two microbatches of the
# last stage.

_AGAIN = frozenset({Kind.RECOMPUTE, Kind.BACKWARD})


@dataclass(slots=True)
class _Version:
    """A weight version: the microbatches that use it, and the positions after which it was copied."""

    microbatches: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)


class _PassUse(NamedTuple):
    """The passes of a microbatch through some layers that need them at once: a forward, or all later
    passes.
    """

    positions: tuple[int, ...]
    microbatch: int
    is_forward: bool


def version_moves(
    timeline: Timeline, decisions: Sequence[Decision], stage: Stage, bundles: Bundles
) -> Iterator[Absence]:
    """Yield the moves of a rank of one stage by decisions to offload weight versions."""
    if not decisions:
        return
    versions, copies = _versions(timeline, stage), StateCopies(timeline)
    for decision in decisions:
        assert isinstance(decision.subject, State)
        subject = named(subjects_of(decision.subject), bundles)
        for version in versions:
            for microbatch, free, users in _gaps(timeline, decision.subject, version):
                offload = Action(Kind.OFFLOAD, decision.stage, microbatch, None, subject, decision.place)
                if move := copies.gap(offload, free, users, behind=decision.behind, ahead=decision.ahead):
                    yield move


def _versions(timeline: Timeline, stage: Stage) -> list[_Version]:
    """Return the versions of a stage's weights that forwards use, in order."""
    newest = current = _Version()
    result = [current]
    for position, action in enumerate(timeline.actions):
        begins = action.layers is None or action.layers[0] == stage.start
        if action.kind in FORWARDS and begins and action.microbatch is not None:
            current.microbatches.append(action.microbatch)
        elif action.kind is Kind.STASH and action.wait:
            current = newest
        elif action.kind is Kind.STASH:
            if newest is current:
                newest = _Version()
                result.append(newest)
            current.copied.append(position)
    return result


def _gaps(timeline: Timeline, state: State, version: _Version) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield the times when no pass needs the weights of these layers.

    Each has the microbatch that names them, the position from which they are free, and the positions of their
    next use.
    """
    copied = [position for position in version.copied if _touches(timeline.actions[position], state)]
    if not copied:
        return
    free = max(copied)
    uses = sorted(use for m in version.microbatches for use in _uses(timeline, state, m, free))
    for number, use in enumerate(uses):
        later = (pass_use.microbatch for pass_use in uses[number:] if not pass_use.is_forward)
        name = next((m for m in later if _computes(timeline, m)[0] < free), None)
        if use.positions[0] > free and name is not None:
            yield name, free, use.positions
        free = max(free, use.positions[-1])


def _uses(timeline: Timeline, state: State, microbatch: int, since: int) -> Iterator[_PassUse]:
    """Yield the uses of the layers by a microbatch after a position: its forward, and all later passes."""
    for kinds in (FORWARDS, _AGAIN):
        passes = (
            (number, timeline.actions[number]) for number in _computes(timeline, microbatch) if number > since
        )
        result = tuple(
            number for number, action in passes if action.kind in kinds and _touches(action, state)
        )
        if result:
            yield _PassUse(result, microbatch, kinds is FORWARDS)


def _computes(timeline: Timeline, microbatch: int) -> list[int]:
    """Return the positions of a microbatch's compute actions on a rank with one stage, its forward first."""
    return timeline.computes[timeline.actions[0].stage][microbatch]


def _touches(action: Action, state: State) -> bool:
    """Return whether an action includes layers of a state."""
    first, end = action.layers or (state.start, state.stop)
    return first < state.stop and state.start < end


# ---- Checks of a plan


def check_endless(plan: Plan) -> None:
    """Check that every stage can be updated without the others.

    Raises:
        UsageError: several stages on a device, stages that share a parameter, or a decision whose share of
            the microbatches differs between steps.
    """
    name = plan.training.schedule
    for stages in plan.ranks:
        check_alone(name, len(stages))
    for number, members in plan.summed.items():
        shared = plan.measurement.shared[number].name
        raise UsageError(
            f"stages {', '.join(map(str, members))} share parameter {shared!r}, whose gradients would be "
            f"summed before every update, but schedule {name} updates every stage separately: put all "
            "layers of the parameter into one stage, untie them, or use schedule 1f1b"
        )
    for number, stage in enumerate(plan.stages):
        _check_divided(plan, number, stage.grid)
    check_moved(moved_states(plan), plan)
    for decision in plan.decisions:
        if isinstance(decision.subject, State):
            _check_state(plan, decision, decision.subject)
        every, count = decision.microbatches.every, plan.training.microbatches
        if count % every:
            raise UsageError(
                f"{decision}: it applies to a share of every {counted(every, 'microbatch')}, but "
                f"microbatches are numbered across steps under schedule {name}, and {every} does not divide "
                f"the {count} microbatches of a step, so steps would differ: use a share of every "
                f"{_divisors(count)}, or all"
            )


def _check_divided(plan: Plan, number: int, grid: Grid) -> None:
    """Check that replicas divide nothing that every weight version would need a part of.

    Raises:
        UsageError: they do.
    """
    name, where = plan.training.schedule, f"stage {number} has {grid.data} replicas that shard {grid.shard}"
    if grid.shard == "parameters":
        raise UsageError(
            f"{where}, but under schedule {name} every microbatch uses its own weight version, which would "
            "have to be gathered for each microbatch and again for its backward: shard gradients "
            "(shard='gradients'), which keeps weights on all replicas, or use schedule 1f1b"
        )
    if grid.shard != "none" and plan.training.versions == "everything":
        raise UsageError(
            f"{where}, but versions='everything' reserves memory for these in every weight version as if "
            "each replica had all of them: keep versions of weights only (versions='weights'), or do not "
            "shard"
        )


def _check_state(plan: Plan, decision: Decision, state: State) -> None:
    """Check that a stage has the weights that a decision moves: older versions, or newest ones.

    Raises:
        UsageError: it does not, or the layers must stay; says why.
    """
    last = len(plan.stages) - 1
    if state.kind in ("optimizer", "gradients"):
        return
    if state.kind == "versions" and plan.training.schedule == "pipedream" and decision.stage == last:
        raise UsageError(
            f"{decision}: stage {last} is the last stage and updates in place, so it does not keep older "
            "weights; omit the decision"
        )
    _check_layers(plan, decision, state)


def _check_layers(plan: Plan, decision: Decision, state: State) -> None:
    """Check that layers whose weights move are trained, and share no weights with other layers.

    Raises:
        UsageError: they are not, or do.
    """
    layers, stage = range(state.start, state.stop), plan.stages[decision.stage]
    costs = plan.measurement.costs[state.start : state.stop]
    if not any(cost.trained_bytes for cost in costs):
        raise UsageError(f"{decision}: these layers do not have trained weights; omit the decision")
    frozen = next(
        (n for n, cost in zip(layers, costs, strict=True) if cost.trained_bytes < cost.parameter_bytes), None
    )
    if state.kind == "parameters" and frozen is not None:
        raise UsageError(
            f"{decision}: layer {frozen} has frozen weights, which all microbatches use; omit the decision, "
            "or use schedule 1f1b"
        )
    for shared in plan.measurement.shared:
        inside = [user in layers for user in shared.users if stage.start <= user < stage.stop]
        if shared.gradient_bytes and any(inside) and not all(inside):
            raise UsageError(
                f"{decision}: other layers of the stage share parameter {shared.name!r}; offload the "
                "weights of all layers that share it, or of none"
            )


def check_in_turn(plan: Plan, entered: int) -> None:
    """Check that a step after `entered` microbatches begins at the start of the decisions' period.

    Raises:
        UsageError: the previous batch was smaller.
    """
    if entered % (turn := period(plan)):
        raise UsageError(
            f"the plan decides for shares of every {turn} microbatches, but the previous batch had another "
            "number of microbatches, so shares would now cross step boundaries, where the plan's peaks do "
            "not hold: after such a batch finish the microbatches in flight (Trainer.finish), avoid such "
            "batches, or decide for all microbatches"
        )


def period(plan: Plan) -> int:
    """Return the number of consecutive microbatches after which all decisions repeat."""
    return lcm(*(decision.microbatches.every for decision in plan.decisions))


def _divisors(count: int) -> str:
    """Return the numbers that divide `count`, in words."""
    return " or ".join(str(number) for number in range(2, count + 1) if count % number == 0) or "1"


def carried(actions: Sequence[Action]) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """Return the starts that these actions join but do not contain, and the starts that they leave to be
    joined.
    """
    before, begun = list[Action](), dict[Action, None]()
    for action in actions:
        if action.in_background and not action.wait:
            begun[action] = None
        elif action.wait and action.start in begun:
            del begun[action.start]
        elif action.wait:
            before.append(action.start)
    return tuple(before), tuple(begun)


# ---- A device's step, cut out of its actions in all steps
#
# The order of a rank's forwards and backwards does not depend on the ends of steps, unless it is drained. But
# actions next to a forward or backward may belong to a microbatch of another step: an early recomputation,
# the end of a copy that began in the previous step, or the start of one for the next step. Therefore a
# `RankActions` decides them for the surrounding steps too, and the step takes the part next to its own
# actions.
#
#     step before        F3 OFFLOAD3 B0 | the next one    WAIT_OFFLOAD3 F4 B1 ... WAIT_RELOAD3 B3
#
# A drain finds some of this done, and does the rest: it first joins offloads in progress, so that offloaded
# tensors never take more than in a full pipeline; then it reloads everything just before the backward that
# needs it. Gradients and weights are offloaded again between backwards of the drain if steps do so too, whose
# slots they use.


class Entered(NamedTuple):
    """The microbatches and steps that have entered a pipeline since it was empty.

    `smaller` has the microbatches in flight with fewer samples than the plan's: their numbers, counted from
    the next one that enters, and their samples.
    """

    microbatches: int = 0
    steps: int = 0
    smaller: tuple[tuple[int, int], ...] = ()


def settled(plan: Plan, microbatches: int | None = None) -> int:
    """Return the number of microbatches after which all steps are equal.

    `microbatches` is the size of a step, default the plan's.

    Steps are equal once the pipeline is full. If a decision reaches over the ends of steps, the microbatches
    still in flight must have entered a full pipeline too, and none may use the first weights. If weights move
    under two versions, two steps must have passed.
    """
    stages, kinds = len(plan.stages), {d.subject.kind for d in plan.decisions if isinstance(d.subject, State)}
    if plan.training.schedule == "pipedream-2bw" and not kinds.isdisjoint(("parameters", "versions")):
        return max(2 * stages, (microbatches or plan.training.microbatches) + 1)
    far = [d for d in plan.decisions if not (isinstance(d.subject, State) and d.subject.kind == "optimizer")]
    reaches = any(decision.ahead or decision.what is What.OFFLOAD for decision in far)
    return 2 * stages - 1 if reaches else stages


def as_early(plan: Plan, entered: int) -> int:
    """Return the fewest microbatches after which a step equals the step after `entered`."""
    least = settled(plan)
    return entered if entered <= least else least + (entered - least) % period(plan)


class RankActions:
    """The actions of one rank's device, from an empty pipeline on.

    They are those of `entered` microbatches in `steps` earlier steps, of a step, and of the following ones.

    Microbatches are counted from the first one in the pipeline. Under two versions, weights depend on the
    ends of steps, but only on whether there was more than one, provided that each had a microbatch for every
    stage.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Endless,
        rank: int,
        bundles: Bundles,
        slices: Slices,
        *,
        microbatches: int,
        entered: int,
        steps: int,
    ) -> None:
        self._plan, self._schedule, self._rank, self._bundles = plan, schedule, rank, bundles
        self._slices = slices
        self._microbatches, self._entered = microbatches, entered
        self._earlier = list(self._before(entered, steps))
        self._own = self._order(microbatches, entered)

    def step(self) -> list[Action]:
        """Return the actions of the step, with microbatches counted from its own first one."""
        alone = not self._plan.decisions and self._plan.stages[self._rank].grid.data == 1
        units = [[action] for action in (*self._earlier, *self._own)] if alone else self._units
        own = chain(*units[len(self._earlier) : len(self._earlier) + len(self._own)])
        actions = self._communicated(own, before=self._last)
        if moves := self._moves():
            before, behind = (self._by_action(places) for places in inserted(moves))
            actions = [one for a in actions for one in (*before.get(a, ()), a, *behind.get(a, ()))]
        return self._finished(actions)

    def drain(self) -> list[Action]:
        """Return the actions that end the microbatches in flight after the earlier steps, instead of a
        step.
        """
        done = {
            action for unit in self._units[: len(self._earlier)] for action in unit if not action.moves_state
        }
        soon = replace(
            self._plan, decisions=tuple(replace(decision, ahead=0) for decision in self._plan.decisions)
        )
        units = self._divided([*self._earlier, *self._own], soon)[len(self._earlier) :]
        order = [action for unit in units for action in unit if action not in done]
        actions = list(drained(order, self._plan, self._slices, before=self._last))
        if moves := self._moves():
            actions = list(self._with_the_rest(actions, moves))
        return self._finished(actions)

    def _finished(self, actions: Sequence[Action]) -> list[Action]:
        """Return the actions with offloaded parameters and microbatches counted from the step's first."""
        copied = (
            weights_copied(actions, self._earlier, self._parameters, self._bundles)
            if self._parameters
            else actions
        )
        return [shifted(action, -self._entered) for action in self._slices.together(copied)]

    def _communicated(self, order: Iterable[Action], *, before: Action | None = None) -> list[Action]:
        """Return an order of the stream with its receives, loads and sends."""
        return list(communicated(list(order), self._plan, self._slices, before=before, endless=True))

    def _with_the_rest(self, actions: Sequence[Action], moves: Sequence[Absence]) -> Iterator[Action]:
        """Yield the actions of a drain with the unfinished moves of earlier steps, and the drain's own
        moves.
        """
        earlier = list(chain(*self._units[: len(self._earlier)]))
        past = self._communicated(earlier) if earlier else []
        done = set(past)
        at, own = self._timeline.actions, {action: number for number, action in enumerate(actions)}
        left = [move for move in moves if at[move.start] in done and at[move.users[0]] not in done]
        joins = [move.offload.join for move in left if at[move.freed] not in done]
        needed: dict[Action, list[Action]] = {}
        for move in left:
            reload = () if at[move.back] in done else (move.reload,)
            first = min((at[user] for user in move.users), key=own.__getitem__)
            needed.setdefault(first, []).extend((*reload, move.reload.join))
        begun = next((n for n, a in enumerate(actions) if not (a.wait and a.kind in SENDS)), len(actions))
        yield from (*actions[:begun], *joins)
        timeline, stage = Timeline([*past, *actions]), self._plan.stages[self._rank]
        again = [
            *version_moves(timeline, self._of_state("versions"), stage, self._bundles),
            *gradient_moves(timeline, self._gradients, self._bundles),
        ]
        known = {move.offload._replace(microbatch=None) for move in moves}
        again = [m for m in again if m.start >= len(past) and m.offload._replace(microbatch=None) in known]
        before, behind = inserted(again)
        for number, action in enumerate(actions[begun:], start=len(past) + begun):
            yield from (*needed.get(action, ()), *before[number], action, *behind[number])

    def _before(self, entered: int, steps: int) -> Iterator[Action]:
        """Yield the compute actions of the earlier steps: of one, or of two with the shortest possible last
        one.
        """
        last = len(self._plan.stages)
        sizes = (entered - last, last) if steps > 1 and entered >= 2 * last else (entered,)
        for size, before in zip(sizes, (0, entered - last), strict=False):
            yield from self._order(size, before) if size else ()

    def _order(self, microbatches: int, entered: int) -> Order:
        """Return the order of compute actions in a step after `entered` microbatches."""
        order = self._schedule(self._rank, len(self._plan.stages), microbatches, entered)
        return [shifted(action, entered) for action in order]

    @property
    def _last(self) -> Action | None:
        """The last forward or backward of the earlier steps, whose sends are not joined yet."""
        return next((action for action in reversed(self._earlier) if action.kind not in UPDATES), None)

    @cached_property
    def _units(self) -> list[list[Action]]:
        """The expansion of every action of the earlier steps, this step and the next one, without a drain."""
        entered = self._entered + self._microbatches
        own = self._own if self._microbatches else []
        return self._divided(
            [*self._earlier, *own, *self._order(len(self._plan.stages), entered)], self._plan
        )

    def _divided(self, order: Order, plan: Plan) -> list[list[Action]]:
        """Return the expansion of every action of an order.

        Passes become pieces by the decisions of `plan`, and updates runs; gradient reductions are inserted.
        """
        summed = {(self._rank, action.microbatch) for action in order if action.kind is Kind.STEP}
        units = summed_units(recomputed_units(order, plan, summed=summed), plan, self._rank)
        pairs = zip(chain([None], order), units, strict=False)
        return [[one for action in unit for one in self._updated(before, action)] for before, unit in pairs]

    def _updated(self, before: Action | None, action: Action) -> list[Action]:
        """Return the expansion of an update or weight copy.

        If parameters move, the copy `before` an update goes with it.
        """
        if action.kind not in UPDATES:
            return [action]
        if action.kind is Kind.STASH:
            apart = self._parameters and not action.wait
            return [] if apart else list(run_by_run(action, self._plan)) if self._parameters else [action]
        stash = before if self._parameters and before is not None and before.kind is Kind.STASH else None
        unshards = unshards_of(self._plan, [self._rank], action.microbatch)
        return [*update_of(action, self._plan, self._bundles, stash=stash), *unshards]

    @cached_property
    def _timeline(self) -> Timeline:
        return Timeline(self._communicated(chain(*self._units)))

    def _moves(self) -> list[Absence]:
        """Return all moves in the stream except those of updates."""
        tensors = [d for d in self._offloads if isinstance(d.subject, SavedTensors)]
        versions = self._of_state("versions")
        if not tensors and not versions and not self._gradients:
            return []
        return [
            *moves_of(self._timeline, tensors, self._plan, self._bundles),
            *version_moves(self._timeline, versions, self._plan.stages[self._rank], self._bundles),
            *gradient_moves(self._timeline, self._gradients, self._bundles),
        ]

    @cached_property
    def _offloads(self) -> tuple[Decision, ...]:
        return tuple(self._plan.decisions_of(self._rank, What.OFFLOAD))

    @property
    def _gradients(self) -> list[Decision]:
        return self._of_state("gradients")

    @property
    def _parameters(self) -> list[Decision]:
        return self._of_state("parameters")

    def _of_state(self, kind: StateKind) -> list[Decision]:
        return [d for d in self._offloads if isinstance(d.subject, State) and d.subject.kind == kind]

    def _by_action(self, places: Inserted) -> dict[Action, list[Action]]:
        return {self._timeline.actions[position]: copies for position, copies in places.items()}
