"""Folding of endless schedules: a dry run executes a few microbatches, whose effects stand for those of all.

What an action does to a device's memory depends on what has been done with its own microbatch, on whether gradients and
optimizer state exist, and on the version of weights that it frees; that of a copy of state, on whether an update has
been before it. All of that is in the program. So every action has a
label, and actions with one label have one effect. A dry run executes steps of fewer microbatches that have all labels
of the plan's own steps, or as many of each as are asked for; where there are none, it executes the plan's own. A device
stops as soon as it has had them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pipefit.actions import FORWARDS, Action, Kind
from pipefit.cost.versions import StageVersions
from pipefit.plans import Plan
from pipefit.program import Program, UncheckedProgram, shifted
from pipefit.runtime.folding import Bytes, Change, plus
from pipefit.schedule import distinct_steps, lower
from pipefit.schedule.communication import begins
from pipefit.schedule.endless import period
from pipefit.trace import MemorySample


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
