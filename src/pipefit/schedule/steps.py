"""A device's step under an endless schedule, cut out of all that the device does before it, in it and after it.

The order of a rank's forwards and backwards is the same wherever steps end, unless it is drained. What stands next to a
forward or backward may belong to a microbatch of another step: a recomputation that comes early, the end of a copy that
began in the step before, the begin of one that the next step needs. So all of that is decided in a `Stream`, which has
the steps around the own one too, and the step takes the part that stands next to its own actions.

    step before        F3 OFFLOAD3 B0 | the next one    WAIT_OFFLOAD3 F4 B1 ... WAIT_RELOAD3 B3

A drain finds some of that done, and does the rest: copies on their way out are joined first, so that what is away never
takes more than in a full pipeline; then everything comes back just before the backward that needs it. Gradients and
weights leave again between backwards of the drain, if they do so in steps, whose slots they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from pipefit.actions import SENDS, UPDATES, Action, Kind
from pipefit.decisions import Decision, SavedTensors, State, StateKind, What
from pipefit.plans import Plan
from pipefit.program import shifted
from pipefit.schedule.bundles import Bundles
from pipefit.schedule.communication import communicated, drained
from pipefit.schedule.copies import Inserted, Move, Timeline, inserted, moves_of
from pipefit.schedule.endless import period
from pipefit.schedule.order import Endless, Order
from pipefit.schedule.recomputation import recomputed_units
from pipefit.schedule.slices import Slices
from pipefit.schedule.state_copies import gradient_moves, weights_copied
from pipefit.schedule.sums import summed_units
from pipefit.schedule.updates import run_by_run, unshards_of, update_of
from pipefit.schedule.version_moves import version_moves


class Entered(NamedTuple):
    """What has entered a pipeline since it was empty.

    Microbatches in flight that are `smaller` than the plan's have numbers, counted from the next one that enters, and
    samples.
    """

    microbatches: int = 0
    steps: int = 0
    smaller: tuple[tuple[int, int], ...] = ()


def settled(plan: Plan, microbatches: int | None = None) -> int:
    """After how many microbatches steps of so many are all alike; of the plan's unless given.

    That is as soon as the pipeline is full. Where a decision reaches over the ends of steps, those that are still in
    flight must have gone forward in a full pipeline too, and none of them through the first weights. Where weights move
    under two versions, two steps must have come before.
    """
    stages, kinds = len(plan.stages), {d.subject.kind for d in plan.decisions if isinstance(d.subject, State)}
    if plan.training.schedule == "pipedream-2bw" and not kinds.isdisjoint(("parameters", "versions")):
        return max(2 * stages, (microbatches or plan.training.microbatches) + 1)
    far = [d for d in plan.decisions if not (isinstance(d.subject, State) and d.subject.kind == "optimizer")]
    reaches = any(decision.ahead or decision.what is What.OFFLOAD for decision in far)
    return 2 * stages - 1 if reaches else stages


def as_early(plan: Plan, entered: int) -> int:
    """The fewest microbatches after which a step is like that after `entered`."""
    least = settled(plan)
    return entered if entered <= least else least + (entered - least) % period(plan)


class Stream:
    """What a device of one rank does, from an empty pipeline on: `entered` microbatches of `steps` earlier steps, a
    step, and what follows.

    Microbatches are counted from the first one in the pipeline. Under two versions weights depend on where steps end,
    though only on whether there was more than one, and that each had a microbatch for every stage.
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
        """The actions of the step, its microbatches counted from its own first one."""
        alone = not self._plan.decisions and self._plan.stages[self._rank].grid.data == 1
        units = [[action] for action in (*self._earlier, *self._own)] if alone else self._units
        own = chain(*units[len(self._earlier) : len(self._earlier) + len(self._own)])
        actions = self._communicated(own, before=self._last)
        if moves := self._moves():
            before, behind = (self._by_action(places) for places in inserted(moves))
            actions = [one for a in actions for one in (*before.get(a, ()), a, *behind.get(a, ()))]
        return self._finished(actions)

    def drain(self) -> list[Action]:
        """The actions that end what is in flight after the earlier steps, in the place of a step."""
        done = {action for unit in self._units[: len(self._earlier)] for action in unit if not action.moves_state}
        soon = replace(self._plan, decisions=tuple(replace(decision, ahead=0) for decision in self._plan.decisions))
        units = self._divided([*self._earlier, *self._own], soon)[len(self._earlier) :]
        order = [action for unit in units for action in unit if action not in done]
        actions = list(drained(order, self._plan, self._slices, before=self._last))
        if moves := self._moves():
            actions = list(self._with_the_rest(actions, moves))
        return self._finished(actions)

    def _finished(self, actions: Sequence[Action]) -> list[Action]:
        """The actions with the parameters away between them, and with microbatches counted from the own first one."""
        copied = (
            weights_copied(actions, self._earlier, self._parameters, self._bundles) if self._parameters else actions
        )
        return [shifted(action, -self._entered) for action in self._slices.together(copied)]

    def _communicated(self, order: Iterable[Action], *, before: Action | None = None) -> list[Action]:
        """An order of the stream with its receives, loads and sends."""
        return list(communicated(list(order), self._plan, self._slices, before=before, endless=True))

    def _with_the_rest(self, actions: Sequence[Action], moves: Sequence[Move]) -> Iterator[Action]:
        """The actions of a drain with what the earlier steps have left to do of their moves, and its own moves."""
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
        """The compute actions of the earlier steps: of one, or of two of which the last is as short as it may be."""
        last = len(self._plan.stages)
        sizes = (entered - last, last) if steps > 1 and entered >= 2 * last else (entered,)
        for size, before in zip(sizes, (0, entered - last), strict=False):
            yield from self._order(size, before) if size else ()

    def _order(self, microbatches: int, entered: int) -> Order:
        """The order of compute actions in a step after `entered` microbatches."""
        order = self._schedule(self._rank, len(self._plan.stages), microbatches, entered)
        return [shifted(action, entered) for action in order]

    @property
    def _last(self) -> Action | None:
        """The last forward or backward of the earlier steps, whose sends are not joined yet."""
        return next((action for action in reversed(self._earlier) if action.kind not in UPDATES), None)

    @cached_property
    def _units(self) -> list[list[Action]]:
        """What every action of the earlier steps, the own one and the next becomes if nothing is drained."""
        entered = self._entered + self._microbatches
        own = self._own if self._microbatches else []
        return self._divided([*self._earlier, *own, *self._order(len(self._plan.stages), entered)], self._plan)

    def _divided(self, order: Order, plan: Plan) -> list[list[Action]]:
        """What every action of an order becomes: passes in pieces by the decisions of `plan`, updates in runs, and sums
        of gradients.
        """
        summed = {(self._rank, action.microbatch) for action in order if action.kind is Kind.STEP}
        units = summed_units(recomputed_units(order, plan, summed=summed), plan, self._rank)
        pairs = zip(chain([None], order), units, strict=False)
        return [[one for action in unit for one in self._updated(before, action)] for before, unit in pairs]

    def _updated(self, before: Action | None, action: Action) -> list[Action]:
        """What an update becomes, or the copy of the weights `before` it, which goes with it if parameters move."""
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

    def _moves(self) -> list[Move]:
        """All that is moved away and back in the stream, but for updates."""
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
