"""Folding of endless schedules: a dry run executes a few microbatches, whose effects stand for those of all.

What an action does to a device's memory depends on what has been done with its own microbatch, on whether gradients and
optimizer state exist, and on the version of weights that it frees; that of a copy of state, on whether an update has
been before it. All of that is in the program. So every action has a
label, and actions with one label have one effect. A dry run executes steps of fewer microbatches that have all labels
of the plan's own steps; where there are none, it executes the plan's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipefit.actions import FORWARDS, Action, Kind
from pipefit.cost.versions import StageVersions
from pipefit.plans import Plan
from pipefit.program import Program, shifted
from pipefit.runtime.folding import Bytes, Change, plus
from pipefit.schedule import distinct_steps, lower
from pipefit.schedule.communication import begins
from pipefit.schedule.endless import period
from pipefit.trace import MemorySample

Label = tuple[object, ...]


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

    def step(self, program: Program) -> list[Label]:
        """The labels of the device's actions in the next step."""
        found = [self._label(shifted(action, self._before), program) for action in program.actions[self._device]]
        self._before += program.microbatches
        return found

    def _label(self, action: Action, program: Program) -> Label:
        if action.moves_state:
            return action.stage, (action,), self._updated.issuperset(one.layer for one in program.moved(action))
        key = action.stage, action.microbatch
        path = self._paths[key] = (*self._paths.get(key, ()), action._replace(microbatch=None))
        return action.stage, path, self._context(action)

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


def labels(plan: Plan, programs: Sequence[Program]) -> list[list[list[Label]]]:
    """The labels of every device in every step."""
    of_devices = [Labels(plan, device) for device in range(len(plan.cluster.devices))]
    return [[one.step(program) for one in of_devices] for program in programs]


def fewer(plan: Plan, programs: Sequence[Program]) -> list[Program]:
    """Steps with the fewest microbatches that have every label of the steps `programs`, or these themselves."""
    wanted = _known(labels(plan, programs))
    least = len(plan.stages) if plan.training.schedule == "pipedream-2bw" else 1
    for count in range(least + -least % period(plan), plan.training.microbatches, period(plan)):
        steps = distinct_steps(plan, microbatches=count)
        if count * steps >= sum(program.microbatches for program in programs):
            continue
        tried = [lower(plan, microbatches=count, entered=count * step, steps=step) for step in range(steps)]
        if wanted <= _known(labels(plan, tried)):
            return tried
    return list(programs)


def _known(of_steps: list[list[list[Label]]]) -> set[Label]:
    return {label for step in of_steps for device in step for label in device}


class Effects:
    """The effects of labelled actions on one device, and the memory of all its steps that follows from them."""

    def __init__(self, rest: Bytes) -> None:
        self._level = rest
        self._known: dict[Label, Change] = {}

    def learn(self, of_actions: Sequence[Label], measured: Sequence[Change]) -> None:
        """Take note of what the actions of a step that was executed did."""
        for label, change in zip(of_actions, measured, strict=True):
            self._known.setdefault(label, change)

    def samples(self, step: int, actions: Sequence[Action], of_actions: Sequence[Label]) -> Iterator[MemorySample]:
        """The memory samples of a step, whose times are positions in the program."""
        for position, (action, label) in enumerate(zip(actions, of_actions, strict=True)):
            change = self._known[label]
            peak = plus(self._level, change.at_peak)
            yield MemorySample(step=step, action=str(action), seconds=float(position), bytes=peak)  # type: ignore[arg-type]
            self._level = plus(self._level, change.after)
