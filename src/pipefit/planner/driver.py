"""The driver of all planners: runs one, times it, and makes a plan of the split that it found.

The plan gets predicted peaks and step time, and its provenance: which planner found it, and how good it is proven to
be. A split that does not fit is refused here.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import pairwise

from pipefit.errors import InfeasibleError
from pipefit.planner.infeasible import explanation
from pipefit.planner.peaks import fits, stage_peaks
from pipefit.planner.question import Found, Planner, Question, Split
from pipefit.plans import Grid, Plan, Prediction, Stage
from pipefit.provenance import Provenance
from pipefit.schedule.whole_stages import whole_stages
from pipefit.simulator import Simulation


def solved(question: Question, planner: Planner, *, name: str) -> Plan:
    """The plan that `planner`, known as `name`, finds.

    Raises:
        UsageError: the planner cannot answer this question.
        InfeasibleError: a stage needs more than its device has, and the options do not allow that.
    """
    began = time.perf_counter()
    found = planner(question)
    return _answer(question, found, name, time.perf_counter() - began)


def _answer(question: Question, found: Found, name: str, seconds: float) -> Plan:
    """The plan of a split that it took `seconds` to find.

    Raises:
        InfeasibleError: the split does not fit.
    """
    peaks = stage_peaks(question, found.split)
    if not question.options.allow_infeasible and not fits(question, found.split, peaks):
        raise InfeasibleError(explanation(question, found.split, peaks, planner=name))
    simulation = Simulation(plan_of(question, found.split))
    options = {option: value for option, value in asdict(question.options).items() if value is not None}
    return plan_of(
        question,
        found.split,
        prediction=Prediction(
            peak_bytes=_by_device(question, found.split, peaks),
            step_seconds=simulation.step_seconds[-1],
            utilisation=simulation.utilisation,
        ),
        provenance=Provenance(
            planner=name,
            options=options,
            objective=found.objective,
            value=found.value,
            bound=found.value if found.proven else None,
            evaluated=found.evaluated,
            seconds=seconds,
        ),
    )


def plan_of(
    question: Question, split: Split, *, prediction: Prediction | None = None, provenance: Provenance | None = None
) -> Plan:
    """The plan of a split, with the decisions that its question's options ask for."""
    training = question.training
    layers = [question.layers(*blocks) for blocks in pairwise(split.edges)]
    stages = tuple(
        Stage(start=start, stop=stop, grid=Grid.of(device))
        for (start, stop), device in zip(layers, split.devices, strict=True)
    )
    return Plan(
        profile=question.profile,
        cluster=question.cluster,
        training=training,
        stages=stages,
        decisions=whole_stages(stages, question.options.recompute, training.schedule, training.microbatches),
        prediction=prediction,
        provenance=provenance,
    )


def _by_device(question: Question, split: Split, peaks: tuple[int, ...]) -> tuple[int, ...]:
    """Peaks in the order of devices, 0 for those without a stage."""
    held = dict(zip(split.devices, peaks, strict=True))
    return tuple(held.get(device, 0) for device in range(len(question.cluster.devices)))
