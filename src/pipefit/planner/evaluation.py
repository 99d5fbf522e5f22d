"""Candidates (a split with a choice for each stage) and their cached evaluation by the simulator.

Peaks are the exact ledger's, seconds those of the simulated steady step. All candidates of a question share
the programs of equal stages (`simulator.assembled`). A long step under 1F1B is simulated with 2P + 2
microbatches; each further one adds the time between two backwards of the last stage. Under PipeDream 5P are
simulated from an empty pipeline, or more until their times repeat. `Evaluator.whole` simulates a long run of
all microbatches.

Cost: some ten microseconds for each action of a new stage, and half a microsecond for each other action. A
search ends after a number of actions (`Budget`), not after a time, so that its result is the same on any
machine. The unit of work is a new action.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, cached_property
from heapq import nsmallest
from itertools import pairwise
from math import inf
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import UsageError
from pipefit.lowering import Compute, schedule_named
from pipefit.memory import Costs, missing_bytes
from pipefit.planner.driver import plan_of
from pipefit.planner.memory_choices import DevicePrices, Floats, Menu, Menus, StageChoice, decisions_of
from pipefit.planner.options import Means
from pipefit.planner.problem import Question, Split
from pipefit.schema.actions import Kind
from pipefit.schema.decisions import Decision
from pipefit.schema.devices import Member, MemberKind, Place, Share
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from pipefit.simulator import Assembled, Parts
from pipefit.texts import counted

# ---- Seconds of many splits at once, with numpy
#
# A step starts from an empty pipeline, and no transfer waits for the wires of another one. Stages receive,
# compute and send in the order of `lowering.passes.communication`. If links are not shared, the seconds equal
# the simulator's for stages that keep everything, so changes of such a plan that gain nothing need no
# simulation.

_STEPS, _SPLITS = 10, 300  # steps, and splits, that take as long as a new action of a simulation

_Message = tuple[bool, int, int]  # forward, the receiving stage, and the microbatch
_Ints = NDArray[np.intp]


class _Step(NamedTuple):
    """Step of a stage: a computation (`kind`), the posting of an end of a message, or the wait for it."""

    stage: int
    kind: Kind | None
    message: _Message | None = None
    waits: bool = False


class SplitTimer:
    """Timer for many splits of one question into this number of stages, one numpy row per event.

    Cost: a microsecond for every action of a step and 200 splits.
    """

    def __init__(self, question: Question, stages: int) -> None:
        self.question, self._prices = question, DevicePrices(question)
        how = question.training
        self.steps = _in_turn(how.schedule, stages, how.microbatches)
        self._edges, costs = np.array(question.edges), question.measurement.costs
        inputs = [cost.inputs for cost in costs]
        self._forward = np.array([float(sum(value.nbytes for value in own)) for own in inputs])
        self._backward = np.array([float(sum(v.nbytes for v in own if v.has_gradient)) for own in inputs])

    @staticmethod
    def of(question: Question, stages: int) -> SplitTimer | None:
        """Return the timer of splits into `stages`; None for asynchronous schedules."""
        return None if question.training.endless else SplitTimer(question, stages)

    def work(self, splits: int) -> int:
        """Return the work of timing this many splits, in new actions of a simulation."""
        return len(self.steps) * (1 + splits // _SPLITS) // _STEPS

    def seconds(self, splits: Sequence[Split]) -> Floats:
        """Return the seconds of a step of each split.

        Raises:
            UsageError: no link joins the devices of two neighbouring stages.
        """
        edges: _Ints = np.array([split.edges for split in splits]).T
        devices: _Ints = np.array([split.devices for split in splits]).T
        passes = {
            Kind.FORWARD: self._prices.seconds("forward", edges, devices),
            Kind.BACKWARD: self._prices.seconds("backward", edges, devices),
        }
        update = self._prices.seconds("update", edges, devices)
        return self._through(passes, self._sent(edges, devices), update)

    def _through(
        self, passes: dict[Kind, Floats], sent: dict[tuple[bool, int], Floats], update: Floats
    ) -> Floats:
        """Return the time at which the last stage of each split ends."""
        now = list(np.zeros(update.shape))
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
        result: Floats = np.max(np.array(now) + update, axis=0)
        return result

    def _sent(self, edges: _Ints, devices: _Ints) -> dict[tuple[bool, int], Floats]:
        """Return the seconds of the messages to every stage, forward and backward."""
        result = dict[tuple[bool, int], Floats]()
        for stage in range(1, len(devices)):
            cut = self._edges[edges[stage]]
            for source, target, nbytes in (
                (stage - 1, stage, self._forward[cut]),
                (stage, stage - 1, self._backward[cut]),
            ):
                pairs = zip(devices[source].tolist(), devices[target].tolist(), strict=True)
                routes = [self.question.cluster.route(*map(Member.device, pair)) for pair in pairs]
                latency, rate = np.array([route[1::-1] for route in routes]).T
                result[source < target, target] = latency + nbytes / rate
        return result


@cache
def _in_turn(schedule: str, stages: int, microbatches: int) -> tuple[_Step, ...]:
    """Return the steps of all stages, each after the steps that it waits for."""
    left = {stage: _of_stage(schedule, stage, stages, microbatches) for stage in range(stages)}
    result, posts, blocked = list[_Step](), dict[_Message, int](), dict[_Message, _Step]()
    runnable = list(left)
    while runnable:
        stage = runnable.pop()
        for step in left[stage]:
            if step.waits and step.message is not None and posts.get(step.message, 0) < 2:
                blocked[step.message] = step  # its other end is posted later
                break
            result.append(step)
            if step.message is not None and not step.waits:
                posts[step.message] = posts.get(step.message, 0) + 1
                if posts[step.message] == 2 and step.message in blocked:
                    resumed = blocked.pop(step.message)
                    result.append(resumed)
                    runnable.append(resumed.stage)
    return tuple(result)


def _of_stage(schedule: str, stage: int, stages: int, microbatches: int) -> Iterator[_Step]:
    """Yield the steps of one stage in the order of `lowering.passes.communication`."""

    def steps(message: _Message | None, *, waits: bool) -> tuple[_Step, ...]:
        return () if message is None else (_Step(stage, None, message, waits),)

    order = list(schedule_named(schedule)(stage, stages, 1, microbatches))
    ends = [_ends(stage, stages, compute) for compute in order]
    received, sent = [*(one for one, _ in ends), None], [None, *(other for _, other in ends)]
    yield from steps(received[0], waits=False)
    for number, (kind, _, microbatch) in enumerate(order):
        needed, joins = steps(received[number], waits=True), steps(sent[number], waits=True)
        ahead = steps(received[number + 1], waits=False)
        turns_back = (
            kind is Kind.BACKWARD and number > 0 and order[number - 1] == (Kind.FORWARD, stage, microbatch)
        )
        yield from (*needed, *joins, *ahead) if turns_back else (*ahead, *needed)
        yield _Step(stage, kind)
        yield from () if turns_back else joins
        yield from steps(sent[number + 1], waits=False)
    yield from steps(sent[-1], waits=True)


def _ends(stage: int, stages: int, compute: Compute) -> tuple[_Message | None, _Message | None]:
    """Return the message that a forward or backward of a stage needs, and the message that it makes."""
    forward = compute.kind is Kind.FORWARD
    towards = 1 if forward else -1
    needs, makes = (0 <= other < stages for other in (stage - towards, stage + towards))
    return (
        (forward, stage, compute.microbatch) if needs else None,
        (forward, stage + towards, compute.microbatch) if makes else None,
    )


# ---- Candidates

HOST = Place([Share(Member.host(), 1)])
_EACH = 100  # actions that take as long as the fixed cost of a program
_KNOWN = 16  # number of known actions that take as long as a new one
_FEW = 50  # forwards of all stages in a step up to which candidates are simulated by long runs
_STEADY = 1.1  # multiple of a steady step's seconds that the last simulated step hardly takes
_SHORT = 200  # forwards of all stages in a step up to which all microbatches are simulated


class Candidate(NamedTuple):
    """A split and a choice for each of its stages."""

    split: Split
    choices: tuple[StageChoice, ...]


class Evaluation:
    """Simulation of a candidate whose step has `microbatches`, perhaps simulated with another number.

    With `quick`, its seconds are those of the last simulated step, which may differ from those of a long run.
    """

    def __init__(
        self, candidate: Candidate, simulation: Assembled, microbatches: int, *, quick: bool = False
    ) -> None:
        self.candidate, self.simulation, self._microbatches = candidate, simulation, microbatches
        self._quick = quick
        self._left_out = microbatches - simulation.plan.training.microbatches
        self._cluster = simulation.plan.cluster

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Peak bytes of every device."""
        last = self.candidate.split.devices[-1]
        losses = self.simulation.plan.measurement.loss_bytes * self._left_out
        return tuple(
            peak + losses * (device == last) for device, peak in enumerate(self.simulation.peak_bytes)
        )

    @cached_property
    def over(self) -> tuple[int, ...]:
        """Bytes by which every stage's device is above its budget; negative if the device has room."""
        budgets = self._cluster.budgets
        return tuple(self.peaks[device] - budgets[device] for device in self.candidate.split.devices)

    @cached_property
    def over_bytes(self) -> int:
        """Total bytes above the memory of devices and hosts; zero if the candidate fits."""
        devices = sum(
            max(0, peak - budget) for peak, budget in zip(self.peaks, self._cluster.budgets, strict=True)
        )
        missing = missing_bytes(self.simulation.plan, self.simulation.arenas)
        return devices + sum(
            nbytes for member, nbytes in missing.items() if member.kind is not MemberKind.DEVICE
        )

    @property
    def fits(self) -> bool:
        """True if every device and every host has enough memory."""
        return self.over_bytes == 0

    @cached_property
    def seconds(self) -> float:
        """Seconds of a steady step."""
        return self._whole(self.simulation.step_seconds[-1] if self._quick else self.simulation.seconds)

    def takes(self, seconds: float) -> bool:
        """Return whether a steady step takes at least this number of seconds.

        A last simulated step that is far longer decides without a long run.
        """
        last = self._whole(self.simulation.step_seconds[-1])
        return last >= _STEADY * seconds or self.seconds >= seconds

    def _whole(self, simulated: float) -> float:
        """Return the seconds of a step with all microbatches, from those of the simulated step."""
        training = self.simulation.plan.training
        if training.endless:
            return simulated * self._microbatches / training.microbatches
        return simulated + self._left_out * self._period if self._left_out else simulated

    @property
    def _period(self) -> float:
        """Seconds from one microbatch to the next of a synchronous step, by its last stage's last backwards."""
        *_, last = devices = self.candidate.split.devices
        ends = sorted(end for _, end in self.simulation.backwards_run(last).values())
        return (ends[-1] - ends[-1 - len(devices)]) / len(devices)

    @property
    def lends(self) -> bool:
        """True if devices lend memory to others."""
        return any(choice.peers is not None for choice in self.candidate.choices)

    @property
    def order(self) -> tuple[int, float, bool, int]:
        """Sort key, lower is better: missing bytes, seconds, whether memory is lent, the highest peak."""
        return self.over_bytes, self.seconds, self.lends, max(self.peaks)


class Evaluator:
    """Evaluator of the candidates of one question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.menus = Menus(question)
        self._short = replace(question, training=_shortened(question, pinned=self.pinned))
        steps = 1 if self._is_short and question.training.endless else None
        self._parts = Parts(Costs(question.measurement, self._short.training), steps)
        self._simulated: dict[Candidate, Evaluation] = {}  # shared by all evaluators restricted from one
        self.known: dict[Candidate, Evaluation | None] = {}
        self._too_slow: dict[Candidate, float] = {}  # seconds of candidates whose memory is unknown
        self.work = 0  # new actions requested, and equivalent work
        self.effort = 1.0  # scale of every budget
        self.ended = False  # whether a budget has ended a search
        self._refusal = UsageError("no candidate was evaluated")  # error of the last refused candidate

    def restricted(self, means: Means) -> Evaluator:
        """Return an evaluator for fewer techniques that shares all simulations with this one.

        A simulation that one evaluator has made counts as work of every evaluator that uses it, so that the
        length of a search does not depend on other searches.
        """
        result = copy(self)
        result.question, result.menus = self.question.using(means), self.menus.restricted(means)
        result._parts, result.known, result._too_slow, result.work = self._parts.apart(), {}, {}, 0
        return result

    def begin(self, effort: float) -> None:
        """Begin a search whose budgets are scaled by `effort`."""
        self.effort, self.ended = effort, False

    @property
    def count(self) -> int:
        """Number of simulated candidates, over all evaluators that share them."""
        return len(self._simulated)

    @property
    def work_of_all(self) -> int:
        """Work of all evaluators that share simulations, each simulation counted once."""
        clocks = sum(_EACH + value.simulation.actions // _KNOWN for value in self._simulated.values())
        return clocks + self._parts.actions_of_all

    @property
    def remarks(self) -> tuple[str, ...]:
        """A sentence about the limit of work, if it has ended a search."""
        if not self.ended:
            return ()
        return (f"The search stopped at its work limit, after {counted(self.count, 'simulated candidate')}.",)

    def stage_menus(self, split: Split) -> list[tuple[Menu, ...]]:
        """Return the menus of every stage of a split."""
        return [self.menus.of_stage(*edges) for edges in pairwise(split.edges)]

    @property
    def pinned(self) -> bool:
        """True if the question's options fix the recomputation, so that nothing is chosen."""
        return self.question.options.recompute != "never"

    def decisions(self, candidate: Candidate) -> tuple[Decision, ...]:
        """Return the decisions of a candidate's plan."""
        stages = enumerate(zip(candidate.choices, self.stage_menus(candidate.split), strict=True))
        made = tuple(d for stage, (choice, menus) in stages for d in decisions_of(stage, choice, menus, HOST))
        return made if self.question.means.ahead else tuple(replace(decision, ahead=0) for decision in made)

    def at_once(self, splits: Sequence[Split]) -> list[float] | None:
        """Return the seconds of the first step of splits; None if they are unknown.

        The splits keep everything, and no transfer waits for the wires of another one.
        """
        if self._timer is None:
            return None
        self.work += self._timer.work(len(splits))
        try:
            return [*map(float, self._timer.seconds(splits))]
        except UsageError:  # no link joins the devices of neighbouring stages
            return None

    @cached_property
    def _timer(self) -> SplitTimer | None:
        return None if self.pinned else SplitTimer.of(self._short, self.question.stages)

    def kept(self, split: Split) -> Candidate:
        """Return the candidate of a split that keeps everything."""
        return Candidate(
            split, tuple(StageChoice.keep(stop - start) for start, stop in pairwise(split.edges))
        )

    def evaluate(
        self, candidate: Candidate, *, below: float = inf, at_least: float = 0.0
    ) -> Evaluation | None:
        """Return the evaluation of a candidate; None if its decisions cannot be carried out.

        None also if its step does not take less than `below` seconds; its memory is then not computed. A
        step that takes `at_least` these seconds, by a lower bound, is not simulated.
        """
        if at_least >= below:
            self.work += _EACH
            return None
        if candidate not in self.known and self._too_slow.get(candidate, -inf) < below:
            self._simulate(candidate, below)
        return self.known.get(candidate)

    def kept_at(self, split: Split) -> Evaluation:
        """Return the evaluation of a split with only the recomputation that the question requests.

        Raises:
            UsageError: the candidate cannot be carried out.
        """
        result = self.evaluate(self.kept(split))
        return self.refuse() if result is None else result

    def refuse(self) -> NoReturn:
        """Raise the error of the last candidate that could not be carried out.

        Raises:
            UsageError: always.
        """
        raise self._refusal

    def best(self, candidates: Sequence[Candidate]) -> Evaluation | None:
        """Return the best of some candidates; None if none can be carried out."""
        result = [evaluation for evaluation in map(self.evaluate, candidates) if evaluation is not None]
        return min(result, key=lambda one: one.order, default=None)

    def fastest(self, count: int) -> list[Evaluation]:
        """Return the `count` fastest simulated candidates that fit, the fastest first."""
        return nsmallest(
            count, (value for value in self._simulated.values() if value.fits), key=lambda none: none.order
        )

    def whole(self, candidate: Candidate) -> Evaluation:
        """Return the evaluation of a candidate that can be carried out, by a long run of all microbatches."""
        count = self.question.training.microbatches
        if self._is_short:
            return Evaluation(
                candidate, Assembled(self._plan(self.question, candidate), self._whole_parts), count
            )
        result = self.evaluate(candidate)
        assert result is not None, "it can be carried out"
        return Evaluation(candidate, result.simulation, count) if self._is_quick else result

    @cached_property
    def _whole_parts(self) -> Parts:
        """Shared programs of stages in steps of all microbatches."""
        return Parts(Costs(self.question.measurement, self.question.training))

    @property
    def _is_short(self) -> bool:
        """True if a step is simulated with another number of microbatches than it has."""
        return self.question.training != self._short.training

    @property
    def _is_quick(self) -> bool:
        """True if long runs of all candidates would take too long."""
        how, few = self.question.training, self.question.stages * self.question.training.microbatches <= _FEW
        return how.endless and not self._is_short and not few

    def _simulate(self, candidate: Candidate, below: float) -> None:
        """Record the evaluation of a candidate, or that its step takes `below` seconds or more."""
        before = self._parts.actions
        try:
            simulation = Assembled(self._plan(self._short, candidate), self._parts)
            self.work += _EACH + simulation.actions // _KNOWN
            result = self._simulated.get(candidate) or Evaluation(
                candidate, simulation, self.question.training.microbatches, quick=self._is_quick
            )
            # each of these raises UsageError if the decisions cannot be carried out
            if below < inf and result.takes(below):
                self._too_slow[candidate] = below
                return
            _ = result.over_bytes, result.seconds
            self.known[candidate] = self._simulated[candidate] = result
        except UsageError as error:
            self._refusal = error
            self.known[candidate] = None
        finally:
            self.work += self._parts.actions - before

    def _plan(self, question: Question, candidate: Candidate) -> Plan:
        decisions = None if self.pinned else self.decisions(candidate)
        return plan_of(question, candidate.split, decisions=decisions)


class Budget:
    """Work that a part of a search may still do, scaled by the evaluator's effort."""

    def __init__(self, evaluator: Evaluator, work: int) -> None:
        self._evaluator = evaluator
        self._until = evaluator.work + round(work * evaluator.effort)

    def ends(self) -> bool:
        """Return whether the budget is spent; the evaluator records that it ended a search."""
        if self._evaluator.work < self._until:
            return False
        self._evaluator.ended = True
        return True


def _shortened(question: Question, *, pinned: bool) -> Training:
    """Return the training with the number of microbatches that is simulated.

    2P + 2 under 1F1B and 5P under PipeDream; the training itself if that saves little under 1F1B, under other
    schedules, and if the question fixes the recomputation, which may depend on the number of microbatches.
    GPipe holds more memory for more microbatches, and under eager 1F1B the last backwards are closer together
    than those before.
    """
    how, stages = question.training, question.stages
    few = {"1f1b": 2 * stages + 2, "pipedream": 5 * stages}.get(how.schedule, how.microbatches)
    saves = how.endless or (how.microbatches > few and stages * how.microbatches > _SHORT)
    if pinned or not saves:
        return how
    return replace(how, batch_size=how.microbatch_size * few, microbatches=few)
