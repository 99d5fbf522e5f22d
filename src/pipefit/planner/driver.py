"""The driver of all planners: runs one, times it, and makes a plan of the split that it found.

The plan gets predicted peaks and step time, and its provenance: which planner found it, and how good it is proven to
be. A split that does not fit is refused here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from math import isfinite

from pipefit.collecting import uncollected
from pipefit.decisions import Decision
from pipefit.errors import InfeasibleError, UsageError
from pipefit.grids import Stage
from pipefit.planner.accounts import Accounts, accounts
from pipefit.planner.infeasible import explanation
from pipefit.planner.peaks import stage_peaks
from pipefit.planner.question import ON_GRIDS, Found, Options, Planner, Question, Split
from pipefit.planner.undivided import undivided
from pipefit.plans import Plan
from pipefit.predictions import Prediction
from pipefit.provenance import Provenance
from pipefit.schedule.recompute_settings import recompute_decisions
from pipefit.schedule.room import shortage
from pipefit.schedule.slices import check_slices
from pipefit.simulator.assembled import assembled

_SHORT = 0.05  # the part of its budget that a planner has for a change of a question that does not fit
_JUDGING = 200_000  # new actions, and what takes as long, for a refusal


def solved(question: Question, planner: Planner, *, name: str) -> Plan:
    """The plan that `planner`, known as `name`, finds.

    Raises:
        UsageError: the planner cannot answer this question.
        InfeasibleError: a stage needs more than its device has, and the options do not allow that.
    """
    began = time.perf_counter()
    with uncollected():
        found = planner(question)
        seconds = time.perf_counter() - began
        return answer(question, found, planner=planner, name=name, seconds=seconds, asked=question.options)


def answer(
    question: Question,
    found: Found,
    *,
    planner: Planner,
    name: str,
    seconds: float,
    asked: Options,
) -> Plan:
    """The plan of what a planner found in `seconds`; `asked` are the options before anything was chosen.

    Raises:
        InfeasibleError: it does not fit.
        UsageError: its grids cannot be trained.
    """
    plan = plan_of(question, found.split, decisions=found.decisions)
    check_slices(plan, None)
    known = found.simulation
    simulation = assembled(plan) if known is None or known.plan != plan else known
    counted = plan.decisions or found.split.grids
    peaks = simulation.peak_bytes if counted else _by_device(question, found.split)
    if not question.options.allow_infeasible:
        short = shortage(plan, simulation.arenas)
        _check(replace(question, options=asked), found, peaks, short, name, _Judge(planner))
    options = {option: value for option, value in asdict(asked).items() if value is not None}
    bound = found.value if found.proven else found.bound
    told = accounts(plan, simulation) if found.decisions else Accounts()
    return replace(
        plan,
        prediction=Prediction(
            peak_bytes=peaks,
            step_seconds=simulation.step_seconds[-1],
            utilisation=simulation.utilisation,
            compactions=told.compactions,
        ),
        provenance=Provenance(
            planner=name,
            options=options,
            objective=found.objective,
            value=found.value,
            bound=bound if bound is not None and isfinite(bound) else None,
            evaluated=found.evaluated,
            seconds=seconds,
            remarks=(
                *found.remarks,
                *told.remarks,
                *undivided(plan),
                *_whole(plan),
                *_staying(question, found),
                *_unreplicated(question, asked, name),
            ),
        ),
    )


def _whole(plan: Plan) -> Iterator[str]:
    """Why there is one stage, where that is not for the planner to say."""
    if plan.profile.indivisible:
        yield f"The model is one block, as {plan.profile.indivisible}."


def _staying(question: Question, found: Found) -> Iterator[str]:
    """Why no state moves, where a planner might have moved some."""
    if question.staying and found.decisions:
        yield f"No state moves, as {question.staying}."


def _unreplicated(question: Question, asked: Options, name: str) -> Iterator[str]:
    """Why no replicas were considered, where the planner might have chosen some."""
    reason = replace(question, options=asked).changed_by_replicas if name in ON_GRIDS else ""
    if reason and question.training.microbatch_size > 1 and len(question.cluster.devices) > 1:
        yield (
            f"Replicas are not considered, because {reason}: they would train to other numbers. --data N (data=N) "
            "allows that."
        )


class _Judge:
    """Plans changes of a question by the planner itself, in short searches, until a budget of actions is spent."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self._spent = planner, 0

    def __call__(self, question: Question) -> float | None:
        """How full the fullest device of the plan that is found is; None where it does not fit."""
        if self._spent > _JUDGING:
            return None
        try:
            found = self._planner(replace(question, options=replace(question.options, effort=_SHORT)))
        except UsageError:  # nothing of it can be carried out
            return None
        simulation = assembled(plan_of(question, found.split, decisions=found.decisions))
        self._spent += found.work + simulation.actions // 2  # both steps have the same
        budgets = question.cluster.budgets
        full = max(peak / budget for peak, budget in zip(simulation.peak_bytes, budgets, strict=True))
        return None if full > 1 or shortage(simulation.plan, simulation.arenas) else full


def _check(question: Question, found: Found, peaks: tuple[int, ...], short: str, name: str, judge: _Judge) -> None:
    """Check that every device has what its stage needs; `short` says what else has too little room, if anything has.

    Raises:
        InfeasibleError: one has not.
    """
    budgets, split = question.cluster.budgets, found.split
    grids = map(split.grid, range(len(split.devices)))
    devices = tuple(max(grid.devices, key=lambda device: peaks[device] / budgets[device]) for grid in grids)
    over = any(peaks[device] > budgets[device] for device in devices)
    if over or short:
        held, found = tuple(peaks[device] for device in devices), found._replace(split=split._replace(devices=devices))
        where = "" if over else short
        raise InfeasibleError(explanation(question, found, held, planner=name, elsewhere=where, judge=judge))


def plan_of(question: Question, split: Split, *, decisions: tuple[Decision, ...] | None = None) -> Plan:
    """The plan of a split, with these decisions or those that its question's options ask for."""
    training = question.training
    layers = [question.layers(*blocks) for blocks in pairwise(split.edges)]
    stages = tuple(
        Stage(start=start, stop=stop, grid=split.grid(number)) for number, (start, stop) in enumerate(layers)
    )
    if decisions is None:
        decisions = recompute_decisions(
            stages,
            question.edges,
            question.options.recompute,
            training.schedule,
            training.microbatches,
            shared=question.measurement.shared,
        )
    return Plan(
        profile=question.profile, cluster=question.cluster, training=training, stages=stages, decisions=decisions
    )


def _by_device(question: Question, split: Split) -> tuple[int, ...]:
    """Peaks by the closed forms, in the order of devices, 0 for those without a stage."""
    held = dict(zip(split.devices, stage_peaks(question, split), strict=True))
    return tuple(held.get(device, 0) for device in range(len(question.cluster.devices)))
