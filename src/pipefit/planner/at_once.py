"""The seconds of many splits at once, by numpy: what a step takes from an empty pipeline on, if no transfer waits for
another one's wires.

Stages receive, compute and send in the order that `schedule.communication` gives them, and every time is a row of
numbers, one for each split. Where links are nobody else's that is what the simulator says of stages that keep
everything, so that whoever changes such a plan need not simulate the changes that gain nothing.

Costs: a microsecond for every action of a step and 200 splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.actions import Kind
from pipefit.errors import UsageError
from pipefit.places import Member
from pipefit.planner.prices import Floats, Prices
from pipefit.planner.question import Question, Split
from pipefit.schedule import schedule_named
from pipefit.schedule.order import Compute

_STEPS, _SPLITS = 10, 300  # steps, and splits, that take as long as a new action of a simulation

_Message = tuple[bool, int, int]  # forward, the receiving stage, and the microbatch
_Ints = NDArray[np.intp]


class _Step(NamedTuple):
    """Something that a stage does: it computes (a kind), or it posts an end of a message, or waits for one."""

    stage: int
    kind: Kind | None
    message: _Message | None = None
    waits: bool = False


class AtOnce:
    """Steps of splits of one question on devices in this order."""

    def __init__(self, question: Question, devices: Sequence[int]) -> None:
        self.question, self._prices = question, Prices(question)
        how = question.training
        self.steps = _in_turn(how.schedule, len(devices), how.microbatches)
        self._edges, costs = np.array(question.edges), question.measurement.costs
        inputs = [cost.inputs for cost in costs]
        self._forward = np.array([float(sum(value.nbytes for value in own)) for own in inputs])
        self._backward = np.array([float(sum(v.nbytes for v in own if v.has_gradient)) for own in inputs])
        self._routes = {
            (one, other): question.cluster.route(Member.device(devices[one]), Member.device(devices[other]))
            for stage in range(1, len(devices))
            for one, other in ((stage - 1, stage), (stage, stage - 1))
        }

    @staticmethod
    def of(question: Question, split: Split) -> AtOnce | None:
        """That of a split's devices; None where steps overlap, or something does not join the devices."""
        try:
            return None if question.training.endless else AtOnce(question, split.devices)
        except UsageError:
            return None

    def work(self, splits: int) -> int:
        """New actions of a simulation that take as long as so many splits."""
        return len(self.steps) * (1 + splits // _SPLITS) // _STEPS

    def seconds(self, splits: Sequence[Split]) -> Floats:
        """What a step of each split takes."""
        edges: _Ints = np.array([split.edges for split in splits]).T
        return self._through(edges, dict(zip((Kind.FORWARD, Kind.BACKWARD), self._passes(edges), strict=True)))

    def _through(self, edges: _Ints, passes: dict[Kind, Floats]) -> Floats:
        """When the last stage of each split has ended."""
        sent, now = self._sent(edges), list(np.zeros(edges[1:].shape))
        posted, ended = dict[_Message, Floats](), dict[_Message, Floats]()
        for stage, kind, message, waits in self.steps:
            if kind is not None:
                now[stage] = now[stage] + passes[kind][stage]
            elif waits and message is not None:
                now[stage] = np.maximum(now[stage], ended[message])
            elif message in posted:
                ended[message] = np.maximum(posted.pop(message), now[stage]) + sent[message[:2]]
            elif message is not None:
                posted[message] = now[stage]
        update: Floats = self._prices.update[edges]
        found: Floats = np.max(np.array(now) + np.diff(update, axis=0), axis=0)
        return found

    def _passes(self, edges: _Ints) -> tuple[Floats, Floats]:
        """Seconds of a forward and of a backward, for every stage and split."""
        forward, backward = (np.diff(times[edges], axis=0) for times in (self._prices.forward, self._prices.backward))
        return forward, backward

    def _sent(self, edges: _Ints) -> dict[tuple[bool, int], Floats]:
        """Seconds of the messages to every stage, forward and backward."""
        found = dict[tuple[bool, int], Floats]()
        for (source, target), route in self._routes.items():
            forward = source < target
            cut = self._edges[edges[max(source, target)]]
            nbytes = (self._forward if forward else self._backward)[cut]
            found[forward, target] = route.latency_seconds + nbytes / route.bytes_per_second
        return found


@cache
def _in_turn(schedule: str, stages: int, microbatches: int) -> tuple[_Step, ...]:
    """What all stages do in a step, each after what it waits for."""
    left = {stage: _of_stage(schedule, stage, stages, microbatches) for stage in range(stages)}
    found, posts, blocked = list[_Step](), dict[_Message, int](), dict[_Message, _Step]()
    runnable = list(left)
    while runnable:
        stage = runnable.pop()
        for step in left[stage]:
            if step.waits and step.message is not None and posts.get(step.message, 0) < 2:
                blocked[step.message] = step  # the other end is posted, and never waits for this message before
                break
            found.append(step)
            if step.message is not None and not step.waits:
                posts[step.message] = posts.get(step.message, 0) + 1
                if posts[step.message] == 2 and step.message in blocked:
                    resumed = blocked.pop(step.message)
                    found.append(resumed)
                    runnable.append(resumed.stage)
    return tuple(found)


def _of_stage(schedule: str, stage: int, stages: int, microbatches: int) -> Iterator[_Step]:
    """What one stage does in a step, in the order of `schedule.communication`."""

    def steps(message: _Message | None, *, waits: bool) -> tuple[_Step, ...]:
        return () if message is None else (_Step(stage, None, message, waits),)

    order = list(schedule_named(schedule)(stage, stages, 1, microbatches))
    ends = [_ends(stage, stages, compute) for compute in order]
    received, sent = [*(one for one, _ in ends), None], [None, *(other for _, other in ends)]
    yield from steps(received[0], waits=False)
    for number, (kind, _, microbatch) in enumerate(order):
        needed, joins = steps(received[number], waits=True), steps(sent[number], waits=True)
        ahead = steps(received[number + 1], waits=False)
        turns_back = kind is Kind.BACKWARD and number > 0 and order[number - 1] == (Kind.FORWARD, stage, microbatch)
        yield from (*needed, *joins, *ahead) if turns_back else (*ahead, *needed)
        yield _Step(stage, kind)
        yield from () if turns_back else joins
        yield from steps(sent[number + 1], waits=False)
    yield from steps(sent[-1], waits=True)


def _ends(stage: int, stages: int, compute: Compute) -> tuple[_Message | None, _Message | None]:
    """The message that a forward or backward of a stage needs, and the one that it makes."""
    forward = compute.kind is Kind.FORWARD
    towards = 1 if forward else -1
    needs, makes = (0 <= other < stages for other in (stage - towards, stage + towards))
    return (
        (forward, stage, compute.microbatch) if needs else None,
        (forward, stage + towards, compute.microbatch) if makes else None,
    )
