"""From a split to a plan: predicted peaks and step time, who found it, and whether it fits."""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

from pipefit.errors import InfeasibleError
from pipefit.planner.infeasible import explanation
from pipefit.planner.peaks import fits, stage_peaks
from pipefit.planner.question import Question, Split
from pipefit.plans import Plan, Prediction, Provenance, Stage
from pipefit.simulator import Simulation


class Found(NamedTuple):
    """A split and how it was found. Where that is `proven`, no split has less than `value` of `objective`."""

    planner: str
    split: Split
    objective: str
    value: float
    evaluated: int
    seconds: float
    proven: bool = True


def answer(question: Question, found: Found) -> Plan:
    """The plan of a split.

    Raises:
        InfeasibleError: a stage needs more than its device has, and the options do not allow that.
    """
    peaks = stage_peaks(question, found.split)
    if not question.options.allow_infeasible and not fits(question, found.split, peaks):
        raise InfeasibleError(explanation(question, found.split, peaks, planner=found.planner))
    options = {name: value for name, value in asdict(question.options).items() if value is not None}
    return Plan(
        profile=question.profile,
        cluster=question.cluster,
        training=question.training,
        stages=_stages(found.split),
        prediction=Prediction(
            peak_bytes=_by_device(question, found.split, peaks), step_seconds=_seconds(question, found)
        ),
        provenance=Provenance(
            planner=found.planner,
            options=options,
            objective=found.objective,
            value=found.value,
            bound=found.value if found.proven else None,
            evaluated=found.evaluated,
            seconds=found.seconds,
        ),
    )


def _stages(split: Split) -> tuple[Stage, ...]:
    edges = zip(split.edges, split.edges[1:], split.devices, strict=False)
    return tuple(Stage(start=start, stop=stop, devices=(device,)) for start, stop, device in edges)


def _by_device(question: Question, split: Split, peaks: tuple[int, ...]) -> tuple[int, ...]:
    """Peaks in the order of devices, 0 for those without a stage."""
    held = dict(zip(split.devices, peaks, strict=True))
    return tuple(held.get(device, 0) for device in range(len(question.cluster.devices)))


def _seconds(question: Question, found: Found) -> float:
    plan = Plan(
        profile=question.profile, cluster=question.cluster, training=question.training, stages=_stages(found.split)
    )
    return Simulation(plan).step_seconds[-1]
