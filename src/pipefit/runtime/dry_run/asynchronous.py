"""Folding of asynchronous schedules.

A dry run executes a few microbatches, whose effects stand for those of all. The effect of an action on a
device's memory depends on previous actions of its microbatch, on whether gradients and optimizer state exist,
and on the version of weights that it frees; the effect of a copy of state, on whether an update has been
before it. The program determines all of these. So every action gets a label, and actions with equal labels
have equal effects. A dry run executes steps of fewer microbatches that contain all labels of the plan's
steps, in the requested numbers; if there are none, it executes the plan's steps. A device stops after its
last needed label. `EndlessLives` extends the lives of storages in the same way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from pipefit.lowering import begins, distinct_steps, lower, period
from pipefit.memory import Excerpt, NamedExcerpt, StageVersions
from pipefit.runtime.dry_run.microbatches import Bytes, BytesChange, plus
from pipefit.runtime.dry_run.reserved import WORKSPACES, Event, Recorded, events
from pipefit.schema.actions import FORWARDS, Action, Kind
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program, UncheckedProgram, shifted
from pipefit.schema.trace import MemorySample


class Label(NamedTuple):
    """Determinants of an action's effect.

    These are its stage, the actions of its microbatch up to itself, and the context.
    """

    stage: int
    path: tuple[Action, ...]
    context: object

    @property
    def own(self) -> object:
        """The label without earlier actions of the microbatch."""
        return self.stage, self.path[-1:], self.context


class LabelledAction(NamedTuple):
    """An action's label, and its flight: the stage and microbatch it belongs to, if any."""

    label: Label
    flight: tuple[int, int] | None


class Labels:
    """The labels of the actions of one device, step after step."""

    def __init__(self, plan: Plan, device: int) -> None:
        self._plan, self._device = plan, device
        self._before = 0  # microbatches of previous steps
        self._paths: dict[tuple[int, int | None], tuple[Action, ...]] = {}
        self._versions = {
            number: StageVersions(stage.start, (1,) * (stage.stop - stage.start))
            for number, stage in enumerate(plan.stages)
            if device in stage.devices
        }
        self._born: set[object] = set()
        self._updated: set[int] = set()  # layers

    def step(self, program: UncheckedProgram) -> list[LabelledAction]:
        """Return the labels of the device's actions in the next step."""
        actions = [shifted(action, self._before) for action in program.actions[self._device]]
        self._before += program.microbatches
        return [LabelledAction(self._label(action, program), _flight(action)) for action in actions]

    def _label(self, action: Action, program: UncheckedProgram) -> Label:
        if action.moves_state:
            return Label(
                action.stage,
                (action,),
                self._updated.issuperset(subject.layer for subject in program.moved(action)),
            )
        key = action.stage, action.microbatch
        path = self._paths[key] = (*self._paths.get(key, ()), action._replace(microbatch=None))
        return Label(action.stage, path, self._context(action))

    def _context(self, action: Action) -> object:
        """Return determinants of an action's effect other than its microbatch."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch or 0
        versions, first = self._versions[stage], begins(action, self._plan)
        if kind in FORWARDS and first:
            versions.forward(microbatch)
        elif kind is Kind.BACKWARD:
            bears = (stage, action.layers) not in self._born
            self._born.add((stage, action.layers))
            return bears, versions.backward(microbatch, action.layers and action.layers[0])
        elif kind is Kind.STASH:
            return versions.adopt() if action.wait else versions.stash(action.layers)
        elif kind is Kind.STEP:
            updates = range(
                *(action.layers or (self._plan.stages[stage].start, self._plan.stages[stage].stop))
            )
            creates = self._updated.isdisjoint(updates)
            self._updated.update(updates)
            self._born = {one for one in self._born if one[0] != stage}  # type: ignore[index]
            return creates
        return None


def _flight(action: Action) -> tuple[int, int] | None:
    """Return the stage and microbatch of an action.

    Return None for copies of state, which only carry a microbatch's name.
    """
    return None if action.moves_state or action.microbatch is None else (action.stage, action.microbatch)


def labels(plan: Plan, programs: Sequence[UncheckedProgram]) -> list[list[list[LabelledAction]]]:
    """Return the labels of every device in every step."""
    of_devices = [Labels(plan, device) for device in range(len(plan.cluster.devices))]
    return [[of_device.step(program) for of_device in of_devices] for program in programs]


def turns(plan: Plan, of_steps: Sequence[Sequence[LabelledAction]]) -> dict[Label, int]:
    """Return how many actions with each label a device has in one period of the plan's decisions.

    A period is the number of microbatches after which all decisions repeat.
    """
    turn, counts = period(plan), Counter(of_step.label for of_step in of_steps[-1])
    every = {labelled.label for step in of_steps for labelled in step}
    return {label: -(-counts[label] * turn // plan.training.microbatches) or turn for label in every}


def fewer(plan: Plan, programs: Sequence[Program], *, again: bool = False) -> list[UncheckedProgram]:
    """Return steps with the fewest microbatches that contain every label of the steps `programs`.

    Return these steps themselves if fewer microbatches do not suffice. With `again`, each label comes twice
    and then in two turns, or as often as in the plan's steps. A device stops after its last needed label.
    """
    of_devices = list(zip(*labels(plan, programs), strict=True))
    wanted = [_counted(of_steps, turns(plan, of_steps) if again else {}) for of_steps in of_devices]
    least = len(plan.stages) if plan.training.schedule == "pipedream-2bw" else 1
    for count in range(least + -least % period(plan), plan.training.microbatches, period(plan)):
        steps = distinct_steps(plan, microbatches=count)
        if count * steps >= sum(program.microbatches for program in programs):
            continue
        tried = [lower(plan, microbatches=count, entered=count * step, steps=step) for step in range(steps)]
        if result := _cut(plan, tried, wanted):
            return result
    result = _cut(plan, programs, wanted)
    assert result is not None, "the plan's own steps have all their labels"
    return result


def _streams(of_steps: Sequence[Sequence[Sequence[LabelledAction]]]) -> list[list[Label]]:
    """Return the labels of every device, over all steps."""
    return [[one.label for step in steps for one in step] for steps in zip(*of_steps, strict=True)]


def _counted(of_steps: Sequence[Sequence[LabelledAction]], turn: Mapping[Label, int]) -> dict[Label, int]:
    """Return how often each label of a device is needed: once, or twice and in two turns.

    It is not needed more often than it comes in the steps.
    """
    counts = Counter(labelled.label for step in of_steps for labelled in step)
    return {label: min(count, 2 + 2 * turn[label] if turn else 1) for label, count in counts.items()}


def _cut(
    plan: Plan, programs: Sequence[Program], wanted: Sequence[Mapping[Label, int]]
) -> list[UncheckedProgram] | None:
    """Cut each device's actions after its last needed label; None if the steps do not contain all of them."""
    left = list[int]()
    for stream, own in zip(_streams(labels(plan, programs)), wanted, strict=True):
        stop = _stop(stream, own)
        if stop is None:
            return None
        left.append(stop)
    begun = list[UncheckedProgram]()
    for program in programs:
        begun.append(_with(program, [own[:stop] for own, stop in zip(program.actions, left, strict=True)]))
        left = [max(0, stop - len(own)) for own, stop in zip(program.actions, left, strict=True)]
    return begun


def _stop(stream: Sequence[Label], wanted: Mapping[Label, int]) -> int | None:
    """Return the number of actions that contain every label in the wanted number; None if they do not."""
    missing, left = dict(wanted), sum(wanted.values())
    for number, label in enumerate(stream):
        if not left:
            return number
        if missing.get(label, 0):
            missing[label] -= 1
            left -= 1
    return None if left else len(stream)


def _with(program: Program, actions: Sequence[tuple[Action, ...]]) -> UncheckedProgram:
    """Return the program with these actions, whose messages may lack their other ends."""
    return UncheckedProgram(
        placement=program.placement,
        microbatches=program.microbatches,
        actions=tuple(actions),
        bundles=program.bundles,
        carried_in=program.carried_in,
        carried_out=program.carried_out,
    )


class Effects:
    """The effects of labelled actions on one device, and the memory of all its steps that follows from
    them.
    """

    def __init__(self, rest: Bytes) -> None:
        self._level = rest
        self._known: dict[Label, BytesChange] = {}

    def learn(self, of_actions: Sequence[LabelledAction], measured: Sequence[BytesChange]) -> None:
        """Record the effects of the actions of an executed step."""
        for labelled, change in zip(of_actions, measured, strict=True):
            self._known.setdefault(labelled.label, change)

    def samples(
        self, step: int, actions: Sequence[Action], of_actions: Sequence[LabelledAction]
    ) -> Iterator[MemorySample]:
        """Yield the memory samples of a step, whose times are positions in the program."""
        for position, (action, labelled) in enumerate(zip(actions, of_actions, strict=True)):
            change = self._known[labelled.label]
            peak = plus(self._level, change.at_peak)
            yield MemorySample(
                step=step,
                action=str(action),
                seconds=float(position),
                bytes=peak,  # type: ignore[arg-type]
            )
            self._level = plus(self._level, change.after)


# ---- Lives of storages under an asynchronous schedule
# Actions with equal labels allocate equal storages in the same order, and free storages of others, identified
# by their birth: in an earlier action of the same microbatch; or in another action, by its label and by the
# number of such actions since, as for an older version of the weights. This description of an action contains
# no names, is equal in all microbatches, and can be repeated for those that were not run.
#
# The first actions with a label may differ from later ones, because storages from the beginning are freed
# once. If some microbatches are treated differently, effects on others differ too. For a label that comes
# more often than it was run, the last two turns that were run must agree; a turn lasts until all shares of
# the microbatches have been used. If they disagree, or a repetition is impossible, the lives are not
# `consistent`. Costs about a microsecond for each birth and death.

_SETTING_UP = LabelledAction(Label(-1, (), None), None)


class _Where(NamedTuple):
    """Birth of a storage as seen from the action in which it dies, and the number of the birth in its action.

    An action of another microbatch is identified by its own label (`Label.own`) and its number among such
    actions, counted back from 1 for the latest; an action of the same microbatch, with `own` None, by its
    number in the microbatch.
    """

    own: object
    action: int
    place: int


_Deed = tuple[
    int, _Where | Hashable
]  # a birth: bytes, and a workspace's name or 0; a death: 0, and the birth
_Deeds = tuple[_Deed, ...]


class _Birth(NamedTuple):
    """A birth of a storage.

    It has its action, the action's numbers by own label and flight, and the birth's number in it.
    """

    action: LabelledAction
    of_own: int
    of_flight: int
    place: int


class EndlessLives:
    """Lives of one device's storages in steps of an asynchronous schedule, from those seen in fewer steps."""

    def __init__(self) -> None:
        self.consistent = True
        self.excerpts = list[NamedExcerpt]()  # one for each action
        self.turns: Sequence[int] = ()  # of any length, as versions of weights come and go
        self._born: dict[Hashable, _Birth] = {}  # of living storages, by name
        self._told = defaultdict[Label, list[_Deeds]](list)  # of executed actions in order, by label
        self._counts = Counter[object]()  # of actions by own label and by flight

    @property
    def events(self) -> list[Event]:
        """All births and deaths of the unfolded steps."""
        return [event for named_excerpt in self.excerpts for event in named_excerpt.events]

    # ---------------------------------------------------------------- recording

    def learn(self, of_actions: Sequence[LabelledAction], before: Recorded, seen: Sequence[Recorded]) -> None:
        """Record the lives in the actions of an executed step, and `before` it."""
        if not self._told:
            self._learn(_SETTING_UP, before)
        elif events(before):
            self.consistent = False
        for labelled, lives in zip(of_actions, seen, strict=True):
            self._learn(labelled, lives)

    def _learn(self, labelled: LabelledAction, lives: Recorded) -> None:
        births, deeds, own = 0, list[_Deed](), labelled.label.own
        self._counts.update((own, labelled.flight))
        for name, nbytes in events(lives):
            if not nbytes:
                deeds.append((0, self._where(self._born.pop(name), labelled)))
            elif name in WORKSPACES:
                deeds.append((nbytes, name))
            else:
                self._born[name] = _Birth(
                    labelled, self._counts[own] - 1, self._counts[labelled.flight] - 1, births
                )
                deeds.append((nbytes, 0))
                births += 1
        self._told[labelled.label].append(tuple(deeds))

    def _where(self, birth: _Birth, now: LabelledAction) -> _Where:
        if birth.action.flight == now.flight is not None:
            return _Where(None, birth.of_flight, birth.place)
        own = birth.action.label.own
        return _Where(own, self._counts[own] - birth.of_own, birth.place)

    # ---------------------------------------------------------------- unfolding

    def unfold(self, steps: Iterable[Sequence[LabelledAction]], turns: Mapping[Label, int]) -> None:
        """Append the events of these steps, up to an impossible one. `turns` belong to their labels."""
        first = defaultdict[object, list[int]](list)  # every action's first birth, by the keys of `_counts`
        seen, living, born = Counter[Label](), set[Hashable](), 0
        for labelled in chain([_SETTING_UP], *steps):
            deeds = self._deeds(labelled.label, seen[labelled.label], turns.get(labelled.label, 1))
            seen[labelled.label] += 1
            for kept in (labelled.label.own, labelled.flight):
                first[kept].append(born)
            lives = list[Event]()
            name: Hashable
            for nbytes, what in deeds or ():
                if isinstance(what, _Where):
                    name = _name(what, first[labelled.flight if what.own is None else what.own])
                    deeds = deeds if name in living else None
                    living.discard(name)
                elif what:
                    name = what
                else:
                    name, born = born, born + 1
                    living.add(name)
                lives.append((name, nbytes))
            self.excerpts.append(NamedExcerpt(Excerpt(lives)))
            if deeds is None:
                self.consistent = False
                return

    def _deeds(self, label: Label, number: int, turn: int) -> _Deeds | None:
        """Return the births and deaths of an action with this number among those with its label.

        Return None if unknown.
        """
        known = self._told[label]
        if number < len(known):
            return known[number]
        agree = len(known) >= 2 * turn and known[-turn:] == known[-2 * turn : -turn]
        return known[len(known) - turn + (number - len(known)) % turn] if agree else None


def _name(what: _Where, first: Sequence[int]) -> int:
    """Return the name of a storage from the names of the `first` births of actions.

    Return -1 if there are too few actions.
    """
    number = what.action if what.own is None else len(first) - what.action
    return first[number] + what.place if 0 <= number < len(first) else -1
