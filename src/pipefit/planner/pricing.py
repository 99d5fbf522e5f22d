"""Prices what one may want instead of the fastest plan: the fewest devices, and the leanest plan.

The fewest devices are found by bisection, at the plan's own schedule and microbatch size: over the leanest plans that
keep everything, which closed forms tell, and, where these do not fit, over short searches. The leanest plan is the
exact planner's, of all microbatch sizes that were looked at, as it is or with all stages recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from pipefit.alternatives import Alternative
from pipefit.beside import beside
from pipefit.errors import UsageError
from pipefit.planner.arrangements import Trials
from pipefit.planner.driver import plan_of
from pipefit.planner.exact import exact, leanest_of
from pipefit.planner.hybrid import budget_level, candidates
from pipefit.planner.joint import exact_in_time
from pipefit.planner.question import Question
from pipefit.planner.spaces import Space
from pipefit.planner.trial import Arrangement, Trial
from pipefit.schedule.recompute_settings import RECOMPUTE, Recompute
from pipefit.simulator.assembled import Assembled, assembled
from pipefit.training import Training

_CANDIDATES = 2_000_000  # stages that are compared with all that replicas may divide
_LEANER = 0.99  # of the best plan's peak, the most that a leaner plan has


def alternatives(trials: Trials, best: Trial) -> tuple[Alternative, ...]:
    """The alternatives to the best plan of some trials, if that fits. One is looked for beside the other."""
    if not best.fits:
        return ()
    (leanest,) = beside(lambda: tuple(_leanest(trials, best)))
    return (*_fewest_devices(trials, best), *leanest())


def _fewest_devices(trials: Trials, best: Trial) -> Iterator[Alternative]:
    """The plan on the fewest devices, if there are fewer than the best plan has."""
    pinned, one = len(trials.space.stages) == 1, _of_single_devices(trials, best.arrangement)
    most = min(
        best.arrangement.stages * best.arrangement.degree.devices // one.degree.devices, max(trials.space.stages)
    )
    low, high = most - 1 if pinned else 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(trials, one._replace(stages=middle)) else (middle, high)
    found = trials.tried(one._replace(stages=high)) if high < most else None
    if found is not None and found.fits:
        pins = _pins(trials.space, found.question.training, stages=found.arrangement.stages)
        degrees = trials.degrees(found.arrangement.microbatch_size)
        shards = any(degree.tensor != one.degree.tensor for degree in degrees)
        if len(degrees) > 1:
            pins += f" --data {one.degree.data}"
            pins += f" --tensor {one.degree.tensor}" if shards else ""
            if len({degree.sequences for degree in degrees if degree.tensor == one.degree.tensor}) > 1:
                pins += " --sequences" if one.degree.sequences else " --no-sequences"
        simulation, each = found.searched.evaluation.simulation, found.arrangement.degree.devices
        yield _alternative("fewest devices", found.question, simulation, pins, each=each, more_seconds=found.apart)


def _fits(trials: Trials, arrangement: Arrangement) -> bool:
    """Whether the leanest plan of an arrangement that keeps everything fits, or else the plan of a short search."""
    with suppress(UsageError):
        question = trials.question(arrangement)
        if exact_in_time(question) and exact(question).value <= budget_level(question):
            return True
    trial = trials.tried(arrangement)
    return trial is not None and trial.fits


def _of_single_devices(trials: Trials, best: Arrangement) -> Arrangement:
    """The arrangement in which a device computes as many samples at once, with one device a stage unless more were
    asked for.
    """
    least, asked = trials.space.least, trials.space.question.options
    if best.degree == least or asked.data is not None:
        return best._replace(degree=least)
    size = best.microbatch_size // best.degree.data
    return best._replace(degree=least, microbatch_size=size if size in trials.sizes else best.microbatch_size)


def _leanest(trials: Trials, best: Trial) -> Iterator[Alternative]:
    """The leanest plan, if it is so much leaner than the best that it is worth knowing."""
    asked = trials.space.question.options
    ways: tuple[Recompute, ...] = RECOMPUTE[:3] if asked.recompute == "never" else (asked.recompute,)
    lean = _lean(trials, ways)
    if lean is not None and max(lean[1].peak_bytes) <= _LEANER * max(best.searched.evaluation.peaks):
        question, simulation = lean
        again = question.options.recompute
        recompute = f" --recompute {again}" if again != asked.recompute else ""
        shard = f" --shard {question.options.shard}" if question.options.shard != asked.shard else ""
        pins = f"--objective peak{recompute}{shard}{_pins(trials.space, question.training)}"
        yield _alternative("leanest", question, simulation, pins)


def _lean(trials: Trials, ways: Iterable[Recompute]) -> tuple[Question, Assembled] | None:
    """The leanest plan of all these ways to recompute; where layers cannot run twice, of the first of them."""
    for asked in (tuple(ways), tuple(ways)[:1]):
        with suppress(UsageError):
            question, found = leanest_of(_questions(trials, asked))
            simulation = assembled(plan_of(question, found.split))
            if simulation.step_seconds:
                return question, simulation
    return None


def _questions(trials: Trials, ways: Iterable[Recompute]) -> Iterator[Question]:
    """Those of every microbatch size that was looked at; where there are many stages to compare, of whole replicas."""
    for size in trials.sizes:
        first = trials.whole_question(Arrangement(trials.space.schedules[0], max(trials.space.stages), size))
        for recompute in ways:
            question = replace(first, options=replace(first.options, recompute=recompute))
            if candidates(question, question.shards) > _CANDIDATES:
                question = replace(question, options=replace(question.options, shard=question.shards[0]))
            if exact_in_time(question):
                yield question


def _pins(space: Space, training: Training, stages: int | None = None) -> str:
    """The options that ask for this training and so many stages, as far as they were to be chosen."""
    found = []
    if stages is not None:
        found.append(f"--stages {stages}")
    if len(space.sizes) > 1:
        found.append(f"--microbatches {training.microbatches}")
    if len(space.schedules) > 1 and training.schedule != space.schedules[0] and stages != 1:
        found.append(f"--schedule {training.schedule}")
    return "".join(f" {pin}" for pin in found)


def _alternative(
    what: str,
    question: Question,
    simulation: Assembled,
    asked_by: str,
    *,
    each: int = 1,
    more_seconds: float = 0.0,
) -> Alternative:
    """An alternative by the simulation of its plan, or of one of `each` replicas, which add `more_seconds`."""
    return Alternative(
        what=what,
        schedule=question.training.schedule,
        stages=len(simulation.plan.stages),
        devices=each * len(simulation.plan.workers),
        microbatches=question.training.microbatches,
        peak_bytes=max(simulation.peak_bytes),
        step_seconds=simulation.step_seconds[-1] + more_seconds,
        asked_by=asked_by.strip(),
    )
