"""The pass that offloads parameters and gradients while no action uses them.

Parameters are away except during forwards, recomputations, backwards and the update of their layers. They are
copied out only after an update; otherwise their home already has their bytes, and their OFFLOAD frees them at
once:

    RELOAD[5.parameters] WAIT_RELOAD F0[5:7] OFFLOAD[5.parameters] WAIT_OFFLOAD F0[7:9] ...

Gradients are allocated by the first backward of their layers and end with the update. They are away between
backwards, and until an action at the end of the step needs them: the reduction over stages, the agreement,
the update.

    B0[5:7] OFFLOAD[5.gradients] B0[0:5] WAIT_OFFLOAD ... RELOAD[5.gradients] ... WAIT_RELOAD B1[5:7] ...

A RELOAD starts `ahead` compute actions of the device before its use, and an OFFLOAD that copies is joined
`behind` compute actions after it. Every piece of a forward or backward counts, and every update of a run:
with `ahead=1` the parameters of the next run arrive while this one computes. A state stays between two uses
if nothing else is computed meanwhile. Forwards and backwards have been cut at the edges of the layers
(`lowering.passes.recomputation`), so only the layers in use are present. Under ZeRO 3, owners send their
parameters from the UNSHARD of their bucket to its join, so these stay from there to the bucket's next pass.

Under an asynchronous schedule, gradients move from the first backward after an update to the next update
(`gradient_moves`), and the newest parameters within every step (`weights_copied`): forwards use them except
between a STASH and its join, backwards only if no update has come since their forward.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from itertools import chain, pairwise

from pipefit.errors import UsageError
from pipefit.lowering.passes.offload import Absence, Bundles, Timeline, moved_states, named, subjects_of
from pipefit.schema.actions import COLLECTIVE, COMPUTE, FORWARDS, Action, Kind
from pipefit.schema.decisions import Decision, State, What
from pipefit.schema.plan import Plan


def states_copied(actions: Sequence[Action], plan: Plan, bundles: Bundles) -> list[Action]:
    """Return one rank's actions with every decision to offload parameters or gradients carried out.

    Raises:
        UsageError: two decisions move one layer's state, or layers that share a parameter are separated.
    """
    stages = {action.stage for action in actions}
    decisions = [decision for decision in moved_states(plan) if decision.stage in stages]
    if not decisions:
        return list(actions)
    check_moved(decisions, plan)
    copies = StateCopies(Timeline(actions))
    for decision in decisions:
        copies.add(decision, _action(decision, bundles))
    return list(copies.merged())


def weights_copied(
    actions: Sequence[Action], earlier: Sequence[Action], decisions: Sequence[Decision], bundles: Bundles
) -> list[Action]:
    """Return one rank's step after `earlier` compute actions, with the newest weights offloaded between their
    uses.
    """
    copies = StateCopies(Timeline(actions), through_older_weights(earlier, actions))
    for decision in decisions:
        copies.add(decision, _action(decision, bundles))
    return list(copies.merged())


def through_older_weights(earlier: Sequence[Action], actions: Sequence[Action]) -> frozenset[int]:
    """Return the positions in `actions` of passes that use older weights than the newest, after `earlier`
    actions.
    """
    newest = current = 0
    versions, result = dict[int | None, int](), set[int]()
    for position, action in enumerate((*earlier, *actions), start=-len(earlier)):
        if action.kind in FORWARDS:
            versions.setdefault(action.microbatch, current)
        if action.kind is Kind.STASH:
            newest, current = (newest, newest) if action.wait else (current + 1, current)
        elif action.kind is not Kind.STEP and versions.get(action.microbatch) != newest:
            result.add(position)
    return frozenset(result)


def gradient_moves(timeline: Timeline, decisions: Sequence[Decision], bundles: Bundles) -> Iterator[Absence]:
    """Yield one rank's moves by decisions to offload gradients, between two uses."""
    copies = StateCopies(timeline)
    for decision in decisions:
        yield from copies.gaps(decision, _action(decision, bundles))


def brought_in(
    actions: Sequence[Action], stages: Sequence[int], plan: Plan, bundles: Bundles
) -> list[Action]:
    """Return the actions of an evaluation, with all parameters reloaded before it, and freed after it."""
    decisions = [decision for decision in moved_states(plan) if decision.stage in stages]
    offloads = [_action(decision, bundles) for decision in decisions if _kind(decision) == "parameters"]
    reloads = [offload._replace(kind=Kind.RELOAD) for offload in offloads]
    joins = [reload.join for reload in reloads]
    return [*reloads, *joins, *actions, *offloads, *(offload.join for offload in offloads)]


class StateCopies:
    """A rank's actions, and the copies of state to insert before and after each of them.

    Actions at the positions `without` do not need the parameters of their layers.
    """

    def __init__(self, timeline: Timeline, without: Container[int] = ()) -> None:
        self.timeline, self.actions, self.without = timeline, timeline.actions, without
        self.before: dict[int, list[Action]] = defaultdict(list)
        self.behind: dict[int, list[Action]] = defaultdict(list)
        self.computing = [n for n, action in enumerate(self.actions) if _computes(action)]
        self._users_of = defaultdict[tuple[int, int], list[int]](list)  # by stage and layer
        self._users_of_all = list[int]()
        for number, action in enumerate(self.actions):
            if _begins_sum(action) or (_needs_state(action) and action.layers is None):
                self._users_of_all.append(number)
            elif _needs_state(action):
                for layer in range(*action.layers or ()):
                    self._users_of[action.stage, layer].append(number)

    def add(self, decision: Decision, offload: Action) -> None:
        """Insert the copies of one decision."""
        uses = list(self._uses(decision))
        if not uses:
            return
        reload = offload._replace(kind=Kind.RELOAD)
        if _kind(decision) == "parameters":
            self._insert(self._begin(uses[0], decision.ahead), uses[0], reload)
        for move in self.gaps(decision, offload):
            self._leave(move.start, move.freed, offload)
            self._insert(move.back, move.users[0], reload)
        if _kind(decision) == "parameters":
            behind = 0 if self._is_unchanged(decision, uses[-1]) else decision.behind
            self._leave(uses[-1], self._freed(uses[-1], behind), offload)

    def gaps(self, decision: Decision, offload: Action) -> Iterator[Absence]:
        """Yield the moves of a state between two uses."""
        for one, following in self._pairs(decision):
            behind = 0 if self._is_unchanged(decision, one) else decision.behind
            if move := self.gap(offload, one, (following,), behind=behind, ahead=decision.ahead):
                yield move

    def gap(
        self, offload: Action, one: int, users: tuple[int, ...], *, behind: int, ahead: int
    ) -> Absence | None:
        """Return the move of a state after `one` and before `users`; None if nothing is computed while it is
        away.
        """
        freed, begin = self._freed(one, behind), self._begin(users[0], ahead)
        if bisect_right(self.computing, freed) < bisect_left(self.computing, begin):
            return Absence(offload, one, freed, begin, users)
        return None

    def merged(self) -> Iterator[Action]:
        """Yield the actions with the copies inserted."""
        for number, action in enumerate(self.actions):
            yield from self.before[number]
            yield action
            yield from self.behind[number]

    def _uses(self, decision: Decision) -> Iterator[int]:
        """Yield the positions of actions that need the state of a decision.

        Gradients stay from a collective to the update.
        """
        assert isinstance(decision.subject, State)
        gradients, layers = (
            decision.subject.kind == "gradients",
            range(decision.subject.start, decision.subject.stop),
        )
        of_layers = (self._users_of[decision.stage, layer] for layer in layers)
        for number in sorted({*self._users_of_all, *chain.from_iterable(of_layers)}):
            action = self.actions[number]
            if gradients and _begins_sum(action):
                yield number
                continue
            if action.stage != decision.stage or not _needs_state(action):
                continue
            if number in self.without if not gradients else action.kind not in (Kind.BACKWARD, Kind.STEP):
                continue
            yield number

    def _pairs(self, decision: Decision) -> Iterator[tuple[int, int]]:
        """Yield consecutive uses of a state, between which all of it exists.

        Gradients exist once every layer has gone backward since the previous update.
        """
        assert isinstance(decision.subject, State)
        layers = frozenset(range(decision.subject.start, decision.subject.stop))
        missing = layers if decision.subject.kind == "gradients" else frozenset()
        for one, following in pairwise(self._uses(decision)):
            action = self.actions[one]
            if action.kind in COLLECTIVE:
                continue  # it reads them at least until its join
            if action.kind is Kind.BACKWARD:
                missing = missing.difference(range(*action.layers) if action.layers else layers)
            elif action.kind is Kind.STEP and decision.subject.kind == "gradients":
                missing = layers
            if not missing:
                yield one, following

    def _is_unchanged(self, decision: Decision, use: int) -> bool:
        """Return whether a state equals its copy at home after `use`.

        Its OFFLOAD then only frees, without delay.
        """
        return _kind(decision) == "parameters" and self.actions[use].kind is not Kind.STEP

    def _freed(self, use: int, behind: int) -> int:
        """Return the position after which an OFFLOAD that starts after `use` is joined."""
        last = min(bisect_right(self.computing, use) - 1 + behind, len(self.computing) - 1)
        return max(use, self.computing[last]) if behind else use

    def _begin(self, use: int, ahead: int) -> int:
        """Return the position before which the RELOAD for a use starts."""
        if not ahead:
            return use
        first = self.computing[max(bisect_left(self.computing, use) - ahead, 0)]
        return min(use, self.timeline.before_waiting(first))

    def _insert(self, begin: int, use: int, reload: Action) -> None:
        self.before[begin].append(reload)
        self.before[use].append(reload.join)

    def _leave(self, use: int, freed: int, offload: Action) -> None:
        self.behind[use].append(offload)
        self.behind[freed].append(offload.join)


def _computes(action: Action) -> bool:
    """Return whether an action keeps the device computing."""
    return action.kind in COMPUTE and action.place is None


def _needs_state(action: Action) -> bool:
    """Return whether an action computes with the state of its layers, copies it, or sends it to other
    replicas.
    """
    return _computes(action) or action.kind is Kind.UNSHARD or (action.kind is Kind.STASH and not action.wait)


def _begins_sum(action: Action) -> bool:
    """Return whether an action starts a collective over gradients."""
    return action.kind in (Kind.REDUCE, Kind.AGREE) and not action.wait


def _kind(decision: Decision) -> str:
    assert isinstance(decision.subject, State)
    return decision.subject.kind


def _action(decision: Decision, bundles: Bundles) -> Action:
    assert isinstance(decision.subject, State)
    subject = named(subjects_of(decision.subject), bundles)
    return Action(Kind.OFFLOAD, decision.stage, subject=subject, place=decision.place)


def check_moved(decisions: Sequence[Decision], plan: Plan) -> None:
    """Check that every layer's state is moved once, together with all layers that share a parameter with it.

    Raises:
        UsageError: a layer's state is moved twice, or updated on a host, or shares a parameter with layers
            that stay.
    """
    moved: set[tuple[str, int]] = set()
    for decision in decisions:
        run = decision.subject
        assert isinstance(run, State)
        for other in plan.decisions_of(decision.stage, What.UPDATE):
            if other.layers[0] < run.stop and run.start <= other.layers[1]:
                raise UsageError(
                    f"{decision}: the plan has `{other}`, which already offloads them; do only one of both"
                )
        for layer in range(run.start, run.stop):
            if (run.kind, layer) in moved:
                raise UsageError(f"{decision}: the {run.kind} of layer {layer} are already offloaded")
            moved.add((run.kind, layer))
        stage = plan.stages[decision.stage]
        for shared in plan.measurement.shared:
            users = [user for user in shared.users if stage.start <= user < stage.stop]
            inside = [run.start <= user < run.stop for user in users]
            if any(inside) and not all(inside):
                raise UsageError(
                    f"{decision}: layers {', '.join(map(str, users))} share parameter {shared.name!r}: "
                    "offload all these layers, or none"
                )
