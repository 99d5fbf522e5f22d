"""Folding of endless schedules: a dry run executes a few microbatches, whose effects stand for those of all.

What an action does to a device's memory depends on what has been done with its own microbatch, on whether gradients and
optimizer state exist, and on the version of weights that it frees; that of a copy of state, on whether an update has
been before it. All of that is in the program. So every action has a
label, and actions with one label have one effect. A dry run executes steps of fewer microbatches that have all labels
of the plan's own steps, or as many of each as are asked for; where there are none, it executes the plan's own. A device
stops as soon as it has had them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from pipefit.lowering import distinct_steps, lower
from pipefit.lowering.asynchronous import period
from pipefit.lowering.passes.communication import begins
from pipefit.memory.weight_versions import StageVersions
from pipefit.runtime.dry_run.lives import Lives
from pipefit.runtime.dry_run.microbatches import Bytes, Change, plus
from pipefit.runtime.dry_run.reserved import Event
from pipefit.schema.actions import FORWARDS, Action, Kind
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program, UncheckedProgram, shifted
from pipefit.schema.trace import MemorySample


class Label(NamedTuple):
    """What the effect of an action follows from: its stage, what has been done with its microbatch up to itself, and
    what else matters.
    """

    stage: int
    path: tuple[Action, ...]
    context: object

    @property
    def own(self) -> object:
        """The same without what has been done with the microbatch before."""
        return self.stage, self.path[-1:], self.context


class Labelled(NamedTuple):
    """An action: its label, and the stage and microbatch whose actions it belongs to, if it does to any."""

    label: Label
    flight: tuple[int, int] | None


class Labels:
    """The labels of the actions of one device, step after step."""

    def __init__(self, plan: Plan, device: int) -> None:
        self._plan, self._device = plan, device
        self._before = 0  # microbatches of the steps before
        self._paths: dict[tuple[int, int | None], tuple[Action, ...]] = {}
        self._versions = {
            number: StageVersions(stage.start, (1,) * (stage.stop - stage.start))
            for number, stage in enumerate(plan.stages)
            if device in stage.devices
        }
        self._born: set[object] = set()
        self._updated: set[int] = set()  # layers

    def step(self, program: UncheckedProgram) -> list[Labelled]:
        """The labels of the device's actions in the next step."""
        actions = [shifted(action, self._before) for action in program.actions[self._device]]
        self._before += program.microbatches
        return [Labelled(self._label(action, program), _flight(action)) for action in actions]

    def _label(self, action: Action, program: UncheckedProgram) -> Label:
        if action.moves_state:
            return Label(action.stage, (action,), self._updated.issuperset(one.layer for one in program.moved(action)))
        key = action.stage, action.microbatch
        path = self._paths[key] = (*self._paths.get(key, ()), action._replace(microbatch=None))
        return Label(action.stage, path, self._context(action))

    def _context(self, action: Action) -> object:
        """What the effect of an action depends on besides its own microbatch."""
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
            updates = range(*(action.layers or (self._plan.stages[stage].start, self._plan.stages[stage].stop)))
            creates = self._updated.isdisjoint(updates)
            self._updated.update(updates)
            self._born = {one for one in self._born if one[0] != stage}  # type: ignore[index]
            return creates
        return None


def _flight(action: Action) -> tuple[int, int] | None:
    """The stage and microbatch of an action; None for copies of state, which have the name of one at most."""
    return None if action.moves_state or action.microbatch is None else (action.stage, action.microbatch)


def labels(plan: Plan, programs: Sequence[UncheckedProgram]) -> list[list[list[Labelled]]]:
    """The labels of every device in every step."""
    of_devices = [Labels(plan, device) for device in range(len(plan.cluster.devices))]
    return [[one.step(program) for one in of_devices] for program in programs]


def turns(plan: Plan, of_steps: Sequence[Sequence[Labelled]]) -> dict[Label, int]:
    """Of a device's labels, how many actions with each come in as many microbatches as take all shares in turn."""
    turn, counts = period(plan), Counter(one.label for one in of_steps[-1])
    every = {one.label for step in of_steps for one in step}
    return {one: -(-counts[one] * turn // plan.training.microbatches) or turn for one in every}


def fewer(plan: Plan, programs: Sequence[Program], *, again: bool = False) -> list[UncheckedProgram]:
    """Steps with the fewest microbatches that have every label of the steps `programs`, or these themselves.

    If labels are to come `again`, it is in two turns, and twice before these, or as often as in the plan's own steps.
    Behind the last of them a device stops.
    """
    of_devices = list(zip(*labels(plan, programs), strict=True))
    wanted = [_counted(of_steps, turns(plan, of_steps) if again else {}) for of_steps in of_devices]
    least = len(plan.stages) if plan.training.schedule == "pipedream-2bw" else 1
    for count in range(least + -least % period(plan), plan.training.microbatches, period(plan)):
        steps = distinct_steps(plan, microbatches=count)
        if count * steps >= sum(program.microbatches for program in programs):
            continue
        tried = [lower(plan, microbatches=count, entered=count * step, steps=step) for step in range(steps)]
        if found := _cut(plan, tried, wanted):
            return found
    found = _cut(plan, programs, wanted)
    assert found is not None, "the plan's own steps have all their labels"
    return found


def _streams(of_steps: Sequence[Sequence[Sequence[Labelled]]]) -> list[list[Label]]:
    """The labels of every device, of all steps together."""
    return [[one.label for step in steps for one in step] for steps in zip(*of_steps, strict=True)]


def _counted(of_steps: Sequence[Sequence[Labelled]], turn: Mapping[Label, int]) -> dict[Label, int]:
    """How often a device's labels have to come: twice and two turns, if they have any, or as often as they do."""
    counts = Counter(one.label for step in of_steps for one in step)
    return {label: min(count, 2 + 2 * turn[label] if turn else 1) for label, count in counts.items()}


def _cut(
    plan: Plan, programs: Sequence[Program], wanted: Sequence[Mapping[Label, int]]
) -> list[UncheckedProgram] | None:
    """Steps of which each device has only the beginning in which its labels come so often; None if they do not."""
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
    """How many actions have every label as often as it is wanted; None if all of them have not."""
    missing, left = dict(wanted), sum(wanted.values())
    for number, label in enumerate(stream):
        if not left:
            return number
        if missing.get(label, 0):
            missing[label] -= 1
            left -= 1
    return None if left else len(stream)


def _with(program: Program, actions: Sequence[tuple[Action, ...]]) -> UncheckedProgram:
    """The program with these actions, whose messages may be without their other ends."""
    return UncheckedProgram(
        placement=program.placement,
        microbatches=program.microbatches,
        actions=tuple(actions),
        bundles=program.bundles,
        carried_in=program.carried_in,
        carried_out=program.carried_out,
    )


class Effects:
    """The effects of labelled actions on one device, and the memory of all its steps that follows from them."""

    def __init__(self, rest: Bytes) -> None:
        self._level = rest
        self._known: dict[Label, Change] = {}

    def learn(self, of_actions: Sequence[Labelled], measured: Sequence[Change]) -> None:
        """Take note of what the actions of a step that was executed did."""
        for one, change in zip(of_actions, measured, strict=True):
            self._known.setdefault(one.label, change)

    def samples(self, step: int, actions: Sequence[Action], of_actions: Sequence[Labelled]) -> Iterator[MemorySample]:
        """The memory samples of a step, whose times are positions in the program."""
        for position, (action, one) in enumerate(zip(actions, of_actions, strict=True)):
            change = self._known[one.label]
            peak = plus(self._level, change.at_peak)
            yield MemorySample(step=step, action=str(action), seconds=float(position), bytes=peak)  # type: ignore[arg-type]
            self._level = plus(self._level, change.after)


# ----------------------------------------------------------------------------------------------------
# The lives of storages under an endless schedule, of all microbatches from those of a few.
#
# Actions with one label (`pipefit.runtime.dry_run.asynchronous`) allocate the same storages in the same order, and
# free those of others. Which these are is told by where they were born: in an earlier action of the same
# microbatch; or in another one, by what that was and by how many such have come since, as for an older
# version of the weights. So what an action does is told without names, is the same in all microbatches, and
# can be repeated for those that were not run.
#
# The first actions with a label may differ from later ones: what was there from the beginning is freed once.
# And where some of the microbatches are treated in another way, what they leave to others is not the same in
# each. Of a label that comes more often than it was run, the last turns that were run, of actions as many as
# come until all shares of the microbatches have been taken, have to agree. Where they do not, or what is
# repeated cannot be, the lives are not `consistent`. Costs about a microsecond for each birth and death.

_SETTING_UP = Labelled(Label(-1, (), None), None)


class _Where(NamedTuple):
    """Where a storage was born, as seen from the action in which it dies, and the number of its birth there.

    An action of another microbatch is told by what it is in itself (`Label.own`), and by which of these it is, counted
    from 1 for the latest; one of the same microbatch, for which `own` is None, by its number among the actions of that.
    """

    own: object
    action: int
    place: int


_Deed = tuple[int, _Where | int]  # a birth: its bytes, and the name of a workspace or 0; a death: 0, and of what
_Deeds = tuple[_Deed, ...]


class _Birth(NamedTuple):
    """An action in which a storage was born, its number among such ones and among those of its microbatch, and the
    number of the birth in it.
    """

    action: Labelled
    of_own: int
    of_flight: int
    place: int


class EndlessLives:
    """The lives of one device's storages in steps of an endless schedule, from those that were seen in fewer ones."""

    def __init__(self) -> None:
        self.consistent = True
        self.events: list[Event] = []
        self._born: dict[int, _Birth] = {}  # of what lives, by its name
        self._told = defaultdict[Label, list[_Deeds]](list)  # by label, of the actions that were run one by one
        self._counts = Counter[object]()  # of actions by what they are in themselves, and of those of every microbatch

    # ---------------------------------------------------------------- what was seen

    def learn(self, of_actions: Sequence[Labelled], before: Lives, seen: Sequence[Lives]) -> None:
        """Take note of the lives in the actions of a step that was executed, and `before` it."""
        if not self._told:
            self._learn(_SETTING_UP, before)
        elif before:
            self.consistent = False
        for one, lives in zip(of_actions, seen, strict=True):
            self._learn(one, lives)

    def _learn(self, one: Labelled, lives: Lives) -> None:
        births, deeds, own = 0, list[_Deed](), one.label.own
        self._counts.update((own, one.flight))
        for name, nbytes in lives:
            if not nbytes:
                deeds.append((0, self._where(self._born.pop(name), one)))
            elif name < 0:
                deeds.append((nbytes, name))
            else:
                self._born[name] = _Birth(one, self._counts[own] - 1, self._counts[one.flight] - 1, births)
                deeds.append((nbytes, 0))
                births += 1
        self._told[one.label].append(tuple(deeds))

    def _where(self, birth: _Birth, now: Labelled) -> _Where:
        if birth.action.flight == now.flight is not None:
            return _Where(None, birth.of_flight, birth.place)
        own = birth.action.label.own
        return _Where(own, self._counts[own] - birth.of_own, birth.place)

    # ---------------------------------------------------------------- what follows

    def unfold(self, steps: Iterable[Sequence[Labelled]], turns: Mapping[Label, int]) -> None:
        """Tell the events of these steps, up to one that cannot be. `turns` are those of their labels."""
        first = defaultdict[object, list[int]](list)  # the name of every action's first birth, by the same as counts
        seen, living, born = Counter[Label](), set[int](), 0
        for one in chain([_SETTING_UP], *steps):
            deeds = self._deeds(one.label, seen[one.label], turns.get(one.label, 1))
            seen[one.label] += 1
            for kept in (one.label.own, one.flight):
                first[kept].append(born)
            for nbytes, what in deeds or ():
                if isinstance(what, _Where):
                    name = _name(what, first[one.flight if what.own is None else what.own])
                    deeds = deeds if name in living else None
                    living.discard(name)
                elif what:
                    name = what
                else:
                    name, born = born, born + 1
                    living.add(name)
                self.events.append((name, nbytes))
            if deeds is None:
                self.consistent = False
                return

    def _deeds(self, label: Label, number: int, turn: int) -> _Deeds | None:
        """What an action of this number among those with its label does; None where nobody knows."""
        known = self._told[label]
        if number < len(known):
            return known[number]
        agree = len(known) >= 2 * turn and known[-turn:] == known[-2 * turn : -turn]
        return known[len(known) - turn + (number - len(known)) % turn] if agree else None


def _name(what: _Where, first: Sequence[int]) -> int:
    """The name of a storage that was born in one of some actions, of which each one's `first` birth is named; -1 where
    they are fewer.
    """
    number = what.action if what.own is None else len(first) - what.action
    return first[number] + what.place if 0 <= number < len(first) else -1
