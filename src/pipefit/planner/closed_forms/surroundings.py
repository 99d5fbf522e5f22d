"""Surroundings of compute actions: the other contents of memory during an action.

The bytes of a device in addition to the action's depend on the number of other microbatches in flight, on
whether gradients exist, on messages in transit, and on the next receive. A stage of a 1F1B schedule meets
about eight combinations of these, even with a thousand microbatches. Planners compute the peak of each
combination, whose maximum equals the simulated peak. Under an asynchronous schedule updates have surroundings
too, and steps differ until the pipeline is full; draining needs no more than the steps before.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from operator import ge
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.lowering import (
    ENDLESS,
    Following,
    Recompute,
    answers_next,
    distinct_steps_of,
    following_of,
    is_backward_of,
    pass_of,
    recomputed_microbatches,
    schedule_named,
)
from pipefit.memory import StageVersions
from pipefit.schema.actions import FORWARDS, UPDATES, Action, Kind
from pipefit.schema.decisions import ALL_MICROBATCHES
from pipefit.schema.program import shifted
from pipefit.schema.training import Versions


class Surroundings(NamedTuple):
    """Surroundings of one compute action of a stage, or of one update with microbatches in flight."""

    kind: Kind  # FORWARD, FORWARD_ONLY, RECOMPUTE, BACKWARD or STEP
    in_flight: int  # other microbatches whose activations are held
    gradients: bool  # parameter gradients exist already
    receiving: Kind | None  # the next compute action, whose receive has started
    sending: Kind | None  # the previous compute action, whose send has not been joined
    checkpoints: int = 0  # other microbatches of which only the inputs are held
    recomputed: bool = False  # a BACKWARD after a second forward
    versions: int = 0  # versions of the weights in addition to the newest
    rooms: int = 0  # versions with room for gradients and optimizer state
    brief: bool = False  # the messages last for the first or last actions of a pass, not for the whole
    early: bool = False  # before the first update creates optimizer state; no later step starts like this

    @property
    def alone(self) -> Surroundings:
        """The same surroundings without other microbatches and versions."""
        return self._replace(in_flight=0, checkpoints=0, versions=0, rooms=0)


def surroundings(
    schedule: str,
    stage: int,
    stages: int,
    microbatches: int,
    recompute: Recompute = "never",
    versions: Versions = "weights",
) -> tuple[Surroundings, ...]:
    """Return the surroundings of `stage`, without those that others with more in flight dominate.

    Raises:
        UsageError: the schedule is unknown or does not support this recomputation.
    """
    if (
        schedule in _WARM_UP
    ):  # equals the first stage of a shorter pipeline; more microbatches add nothing new
        stage, stages = 0, stages - stage
        microbatches = min(microbatches, _WARM_UP[schedule] * stages + _STEADY)
    return _surroundings(schedule, stage, stages, microbatches, recompute, versions)


@cache
def _surroundings(
    schedule: str, stage: int, stages: int, microbatches: int, recompute: Recompute, versions: Versions
) -> tuple[Surroundings, ...]:
    steps: Iterable[list[Action]]
    following = None
    if schedule in ENDLESS:
        steps = _endless_orders(schedule, stage, stages, microbatches, recompute)
    else:
        steps = [whole_stage_order(schedule, stage, stages, microbatches, recompute)]
        following = following_of(schedule_named(schedule), stages, 1, microbatches)
    highest: dict[Surroundings, Surroundings] = {}
    walk = _Walk(endless=schedule in ENDLESS, rooms=versions == "everything", following=following)
    for result in walk.through(steps):
        alike = result._replace(in_flight=0)
        if alike not in highest or highest[alike].in_flight < result.in_flight:
            highest[alike] = result
    return tuple(_covering(highest.values()))


_WARM_UP = {
    "1f1b": 1,
    "eager-1f1b": 2,
}  # forwards of a stage, per remaining stage, before its backwards start
_STEADY = 4  # microbatches in the steady phase; the first and last may differ in recomputation


class _Messages(NamedTuple):
    """Messages of a stage during an action."""

    following: Kind | None  # of the next pass
    receiving: Kind | None  # as in `Surroundings`
    sending: Kind | None
    brief: bool


class _Walk:
    """Contents of a stage's memory as it goes through its steps."""

    def __init__(self, *, endless: bool, rooms: bool, following: Following | None = None) -> None:
        self.held = self.inputs = 0
        self.last: Action | None = None  # the last compute action
        self.early, self.gradients, self.rooms = endless, False, rooms
        self.weights = StageVersions(0, (1,)) if endless else None
        self.following = following

    def through(self, steps: Iterable[Sequence[Action]]) -> Iterator[Surroundings]:
        """Yield the surroundings of every compute action, and of every update with microbatches in flight."""
        for order in steps:
            computes = [action for action in order if action.kind not in UPDATES]
            messages = self._messages([list(actions) for _, actions in groupby(computes, pass_of)])
            receiving = computes[0].kind if computes else None
            for action in order:
                if action.kind in UPDATES:
                    yield from self._update(action, receiving)
                    continue
                around = next(messages)
                receiving = around.following
                yield self._around(action, around)
                self._done(action)

    def _messages(self, passes: Sequence[Sequence[Action]]) -> Iterator[_Messages]:
        """Yield the messages during each action of the passes."""
        before, behind = self.last, [*passes[1:], []]
        answered = False  # the neighbor that sends this pass's inputs next needs the previous pass's results
        for actions, after in zip(passes, behind, strict=True):
            receiving = after[-1].kind if after else None
            answers = bool(after) and answers_next(pass_of(actions[0]), pass_of(after[0]), self.following)
            for number, action in enumerate(actions):
                starts = not answers or (action is actions[-1] and len(after) == 1)
                sent = before is None or is_backward_of(action, before) or (answered and number > 0)
                yield _Messages(
                    following=receiving,
                    receiving=receiving if starts else None,
                    sending=None if before is None or sent else before.kind,
                    brief=answers or answered,
                )
            before, answered = actions[-1], answers

    def _around(self, action: Action, messages: _Messages) -> Surroundings:
        kind = action.kind
        versions = 0 if self.weights is None else self.weights.count - 1
        return Surroundings(
            kind,
            in_flight=self.held - (kind is Kind.BACKWARD),
            gradients=self.gradients,
            receiving=messages.receiving,
            sending=messages.sending,
            checkpoints=self.inputs - (kind is Kind.RECOMPUTE),
            recomputed=self.last is not None
            and (self.last.kind, self.last.microbatch) == (Kind.RECOMPUTE, action.microbatch),
            versions=versions,
            rooms=versions * self.rooms,
            brief=messages.brief,
            early=self.early,
        )

    def _done(self, action: Action) -> None:
        kind = action.kind
        self.held += {Kind.FORWARD: 1, Kind.RECOMPUTE: 1, Kind.BACKWARD: -1}.get(kind, 0)
        self.inputs += {Kind.FORWARD_ONLY: 1, Kind.RECOMPUTE: -1}.get(kind, 0)
        self.gradients = self.gradients or kind is Kind.BACKWARD
        if self.weights is not None and kind in FORWARDS:
            self.weights.forward(action.microbatch or 0)
        elif self.weights is not None and kind is Kind.BACKWARD:
            self.weights.backward(action.microbatch or 0)
        self.last = action

    def _update(self, action: Action, receiving: Kind | None) -> Iterator[Surroundings]:
        assert self.weights is not None, "synchronous schedules do not update within a step"
        if action.kind is Kind.STASH:
            self.weights.adopt() if action.wait else self.weights.stash()
            return
        assert self.last is not None, "an update follows a backward"
        messages = _Messages(following=receiving, receiving=receiving, sending=self.last.kind, brief=False)
        yield self._around(action, messages)
        self.gradients = self.early = False


def whole_stage_order(
    schedule: str, stage: int, stages: int, microbatches: int, recompute: Recompute
) -> list[Action]:
    """Return the compute actions of a stage on its own device, recomputed as a whole or not at all."""
    again = recomputed_microbatches(recompute, schedule, microbatches) or ()
    computes = (Action(*compute) for compute in schedule_named(schedule)(stage, stages, 1, microbatches))
    return [part for action in computes for part in _twice(action, again)]


def _endless_orders(
    schedule: str, stage: int, stages: int, microbatches: int, recompute: Recompute
) -> Iterator[list[Action]]:
    """Yield the compute actions and updates of every distinct step, with microbatches numbered throughout.

    Raises:
        UsageError: the recomputation setting leaves out a microbatch of a step.
    """
    if recompute not in ("never", "always", "stages"):
        raise UsageError(
            f"recompute {recompute} exempts a microbatch of each step, but steps overlap under schedule "
            f"{schedule}: use recompute always, stages or never"
        )
    again = () if recompute == "never" else ALL_MICROBATCHES
    for step in range(distinct_steps_of(schedule, stages, microbatches)):
        entered = step * microbatches
        order = ENDLESS[schedule](stage, stages, microbatches, min(entered, stages))
        yield [shifted(part, entered) for action in order for part in _twice(action, again)]


def _twice(action: Action, again: Container[int | None]) -> Iterator[Action]:
    """Yield the action, or the actions with a second forward if its microbatch is recomputed."""
    twice = action.microbatch in again
    if twice and action.kind is Kind.BACKWARD:
        yield action._replace(kind=Kind.RECOMPUTE)
    yield action._replace(kind=Kind.FORWARD_ONLY) if twice and action.kind is Kind.FORWARD else action


def _covering(found: Iterable[Surroundings]) -> Iterator[Surroundings]:
    """Yield the surroundings that no others cover.

    Others cover if they are equal but for at least the same numbers in flight, of checkpoints and of
    versions.
    """
    groups: dict[Surroundings, list[Surroundings]] = {}
    for one in found:
        groups.setdefault(one.alone, []).append(one)
    for group in groups.values():
        kept: list[tuple[int, ...]] = []
        for one in sorted(group, key=_counts, reverse=True):
            if not any(all(map(ge, other, _counts(one))) for other in kept):
                kept.append(_counts(one))
                yield one


def _counts(one: Surroundings) -> tuple[int, ...]:
    return one.in_flight, one.checkpoints, one.versions, one.rooms
