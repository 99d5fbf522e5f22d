"""Driver of all planners: run a planner, time it, and make a plan of its split.

The plan gets predicted peaks and step time, an account of what each technique frees and costs, and its
provenance: the planner, and how good the plan is proven to be. If a split does not fit, the driver raises an
error that names changes that would fit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, isfinite
from typing import NamedTuple

from pipefit.errors import InfeasibleError, UsageError
from pipefit.lowering import check_slices
from pipefit.memory import shortage
from pipefit.planner.closed_forms.bands import stage_peak
from pipefit.planner.exact import exact
from pipefit.planner.options import PlanOptions
from pipefit.planner.problem import ON_GRIDS, Planner, PlannerResult, Question, Split, plan_of
from pipefit.processes import uncollected
from pipefit.schema.decisions import Decision, SavedTensors, State, What
from pipefit.schema.plan import Compaction, Plan, Prediction, Provenance
from pipefit.simulator import Assembled
from pipefit.simulator.assembled import assembled
from pipefit.texts import first_to_last
from pipefit.units import format_bytes, format_seconds

# ---- Accounts of techniques

_ACTIONS = 300_000  # total over all simulated steps

Group = tuple[int, str]  # a stage, and the technique used on it


class Accounts(NamedTuple):
    """Effects of techniques on stages, and the number of groups left out."""

    compactions: tuple[Compaction, ...] = ()
    left_out: int = 0

    @property
    def remarks(self) -> tuple[str, ...]:
        """A sentence about the groups that were left out."""
        if not self.left_out:
            return ()
        count = len(self.compactions)
        return (
            (
                f"Of {count + self.left_out} ways in which stages free memory, the {count} with most layers "
                "are shown."
            ),
        )


def accounts(plan: Plan, whole: Assembled, *, most_actions: int = _ACTIONS) -> Accounts:
    """Account for each technique on each stage of `plan`, whose simulation is `whole`.

    The plan is simulated once more without the technique, so that bytes come from the ledger, seconds from
    the simulator, and both include interactions between techniques. The budget of `most_actions` simulated
    actions limits the number of groups; those with the most layers come first.
    """
    groups = Counter[Group]()
    for decision in plan.decisions:
        groups[decision.stage, _technique(decision)] += len(_layers(decision))
    actions = whole.actions
    told = sorted(group for group, _ in groups.most_common(max(1, most_actions // max(1, actions))))
    return Accounts(tuple(_compactions(plan, whole, told)), len(groups) - len(told))


def _compactions(plan: Plan, whole: Assembled, groups: Sequence[Group]) -> Iterator[Compaction]:
    for stage, technique in groups:
        own = [d for d in plan.decisions if (d.stage, _technique(d)) == (stage, technique)]
        without = tuple(d for d in plan.decisions if (d.stage, _technique(d)) != (stage, technique))
        simulation = Assembled(replace(plan, decisions=without), whole.parts)
        device = plan.stages[stage].devices[0]  # replicas have equal peaks
        yield Compaction(
            stage=stage,
            what=technique,
            layers=len({layer for decision in own for layer in _layers(decision)}),
            freed_bytes=simulation.peak_of(device) - whole.peak_of(device),
            added_seconds=whole.seconds - simulation.seconds,
        )


def _technique(decision: Decision) -> str:
    """Return the name of a decision's technique."""
    if decision.what is What.RECOMPUTE:
        return "recompute"
    what = f"offload {decision.subject.kind} to" if isinstance(decision.subject, State) else "offload to"
    return f"{what} {decision.place}"


def _layers(decision: Decision) -> tuple[int, ...]:
    subject = decision.subject
    return decision.layers if isinstance(subject, SavedTensors) else tuple(range(subject.start, subject.stop))


# ---- Price of dividing state


def undivided(plan: Plan) -> Iterator[str]:
    """Yield a sentence with the fullest device's peak and the step's seconds if replicas divided no state."""
    if any(stage.grid.shard != "none" for stage in plan.stages):
        grids = (replace(stage.grid, shard="none") for stage in plan.stages)
        whole = replace(
            plan, stages=tuple(replace(s, grid=grid) for s, grid in zip(plan.stages, grids, strict=True))
        )
        simulation, budgets = assembled(whole), plan.cluster.budgets
        peaks = simulation.peak_bytes
        fullest = max(range(len(peaks)), key=lambda device: peaks[device] / budgets[device])
        yield (
            f"Without sharding between replicas, device {fullest} would need {format_bytes(peaks[fullest])} "
            f"and a step would take {format_seconds(simulation.seconds)}."
        )


# ---- Why a plan does not fit, and changes that would fit
#
# Each suggested change has been planned. For planners of splits alone the exact search judges a change, a
# dozen times at most. A planner that compacts judges its own changes, each with a small part of its budget,
# until the budget for all of them is spent.

_BEST = "exact", "joint"  # planners that find a split that fits if one exists
_BISECTIONS, _CLOSE = 8, 0.01  # of memory, if a search has to find each plan: most steps, and part of the end
_MORE_DEVICES = 8  # maximum factor by which the number of devices is increased


Judge = Callable[[Question], float | None]  # share of the fullest device's budget, or None if no plan fits


def explanation(
    question: Question,
    result: PlannerResult,
    peaks: tuple[int, ...],
    *,
    planner: str,
    elsewhere: str = "",
    judge: Judge | None = None,
) -> str:
    """Explain why a plan does not fit, and which changes would fit.

    Names the fullest device with its stage, the host that is short (`elsewhere`), or both. For a planner that
    compacts, `judge` decides whether a change fits; otherwise the exact search does.
    """
    budgets = question.cluster.budgets
    full = max(peak / budgets[device] for peak, device in zip(peaks, result.split.devices, strict=True))
    device = _device(question, result, peaks) if full > 1 else ""
    where = "; ".join(filter(None, (device, elsewhere)))
    compacts = result.decisions is not None
    none_fits = ""
    if planner in _BEST:
        none_fits = "; no plan was found that fits" if compacts else "; no other split fits either"
    if question.profile.indivisible:
        none_fits += f"; the model is one block, because {question.profile.indivisible}"
    if question.staying and compacts:
        none_fits += f"; state cannot be offloaded, because {question.staying}"
    if planner in ON_GRIDS and question.changed_by_replicas:
        why = f"{question.changed_by_replicas}, so replicas would train to other numbers"
        none_fits += f"; replicas are not considered, because {why} (--data N, data=N, allows them)"
    asked = judge if compacts and judge is not None else _fullest
    return f"{where}{none_fits}. {_remedies(question, planner, asked, float('inf') if elsewhere else full)}"


def _device(question: Question, result: PlannerResult, peaks: tuple[int, ...]) -> str:
    """Describe the fullest device: its stage, the missing bytes, and its use in percent."""
    budgets, split = question.cluster.budgets, result.split
    stage = max(range(len(peaks)), key=lambda s: peaks[s] / budgets[split.devices[s]])
    device, need = split.devices[stage], peaks[stage]
    names = question.profile.span(*question.layers(*split.edges[stage : stage + 2]))
    budget, reserve = budgets[device], question.cluster.reserves[device]
    left = f", {format_bytes(reserve)} of the device are reserved for non-tensor memory" if reserve else ""
    freed = ", even with recomputation and offloading" if result.decisions else ""
    return (
        f"device {device} needs {format_bytes(need)} for stage {stage} ({first_to_last(names)}), "
        f"{format_bytes(need - budget)} over its {format_bytes(budget)} ({ceil(100 * need / budget)} % "
        f"full{left})"
        f"{freed}"
    )


def _remedies(question: Question, planner: str, judge: Judge, full: float) -> str:
    """List changes with which the model fits, the cheapest first, or say that more devices would not help.

    The refused plan fits in `full` times the memory.
    """
    if planner not in _BEST and _fullest(question) is not None:
        return "What would fit: another split; use the joint or the exact planner"
    widest = max(degree.devices for degree in question.degrees)
    most = min(_MORE_DEVICES * len(question.cluster.devices), question.blocks * widest)
    if question.training.schedule == "pipedream-2bw":  # a step needs a microbatch for every stage
        most = min(most, question.training.microbatches)
    size = format_bytes(max(device.memory_bytes for device in question.cluster.devices))
    more, useless = "", ""
    if question.options.stages is None and most > len(question.cluster.devices):
        count = _enough_devices(question, most, judge)
        more = f"{count} devices of {size}" if count else ""
        useless = "" if count else _useless(size, most, exactly=judge is _fullest)
    memory = _more_memory(question) if judge is _fullest else _less_memory(question, judge, full)
    changes = filter(None, (*_free(question, judge), more, memory))
    by = "" if planner in _BEST or judge is not _fullest else " by the exact planner"
    return f"What would fit{by}: {'; '.join(changes)}{useless}"


def _useless(size: str, most: int, *, exactly: bool) -> str:
    """Say that more devices do not help, as far as that is known."""
    if exactly:
        return f". More devices of {size} do not help, up to {most}"
    return f". For more devices of {size}, up to {most}, no plan was found that fits"


def _free(question: Question, judge: Judge) -> Iterator[str]:
    """Yield changes that need no other hardware."""
    training, options = question.training, question.options
    changes: list[tuple[str, Callable[[], Question]]] = []
    if training.schedule != "1f1b":
        changes.append(
            ("schedule 1f1b", lambda: replace(question, training=replace(training, schedule="1f1b")))
        )
    if options.stages is not None and options.stages < min(question.blocks, len(question.cluster.devices)):
        changes.append(
            ("a stage on every device", lambda: replace(question, options=replace(options, stages=None)))
        )
    for size in sorted({m.microbatch_size for m in question.profile.measurements}, reverse=True):
        if size < training.microbatch_size and training.batch_size % size == 0:
            parts = training.batch_size // size
            changes.append((f"{parts} microbatches", _in_parts(question, parts)))
    for name, change in changes:
        full = judge(change())
        if full is not None:
            yield f"{name} (the fullest device is then {ceil(100 * full)} % full)"


def _in_parts(question: Question, parts: int) -> Callable[[], Question]:
    return lambda: replace(question, training=replace(question.training, microbatches=parts))


def _enough_devices(question: Question, most: int, judge: Judge) -> int | None:
    """Return the fewest devices of the largest size with which the model fits, by doubling and bisection.

    None if it does not fit on `most`.
    """
    low = high = len(question.cluster.devices)
    while high == low or judge(_with_devices(question, high)) is None:
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        fits_already = judge(_with_devices(question, middle)) is not None
        low, high = (low, middle) if fits_already else (middle, high)
    return high


def _with_devices(question: Question, count: int) -> Question:
    cluster, present = question.cluster, range(len(question.cluster.devices))
    largest = max(present, key=lambda number: cluster.devices[number].memory_bytes)
    return replace(question, cluster=cluster.with_copies(largest, count - len(present)))


def _more_memory(question: Question) -> str:
    """Return the memory that the same number of devices would need."""
    value = exact(question).value
    if question.equal_budgets:
        each = int(value) + max(question.cluster.reserves)
        return f"the same devices with {format_bytes(each)} each ({each} bytes)"
    return f"{ceil(1000 * (value - 1)) / 10} % more memory on every device"


def _less_memory(question: Question, judge: Judge, full: float) -> str:
    """Return memory with which the same devices have a plan, by bisection; empty if a split alone fits.

    The bisection lies between the present memory and the memory that the refused plan needs, or a split
    without compaction. All devices grow in proportion.
    """
    low, high, byte = 1.0, min(_share(question), full), 1 / min(question.cluster.budgets)
    if high <= low:
        return ""
    for _ in range(_BISECTIONS):
        if high - low < _CLOSE * high:
            break
        middle = (low + high) / 2
        used = judge(_with_memory(question, middle))
        low, high = (middle, high) if used is None else (low, min(middle, used * middle + byte))
    larger = _with_memory(question, high).cluster.devices
    if question.equal_budgets:
        each = larger[0].memory_bytes
        return f"the same devices with at most {format_bytes(each)} each ({each} bytes)"
    return f"at most {ceil(1000 * (high - 1)) / 10} % more memory on every device"


def _with_memory(question: Question, times: float) -> Question:
    """Return the question with all budgets multiplied by `times`."""
    cluster = question.cluster
    more = (ceil(times * budget) - budget for budget in cluster.budgets)
    devices = tuple(
        replace(device, memory_bytes=device.memory_bytes + n)
        for device, n in zip(cluster.devices, more, strict=True)
    )
    return replace(question, cluster=replace(cluster, devices=devices))


def _share(question: Question) -> float:
    """Return the lowest peak of all plans without compaction, as a share of its device's budget.

    Raises:
        UsageError: no plan has the requested degrees.
    """
    value = exact(question).value
    return value / question.cluster.budgets[0] if question.equal_budgets else value


def _fullest(question: Question) -> float | None:
    """Return the fullest device's use in the plan with the lowest peak; None if above 1 or without a plan."""
    try:
        share = _share(question)
    except UsageError:
        return None
    return share if share <= 1 else None


# ---- Peaks of one split


def stage_peaks(question: Question, split: Split) -> tuple[int, ...]:
    """Return the peak bytes of every stage."""
    return tuple(range_peak(question, stage, *edges) for stage, edges in enumerate(pairwise(split.edges)))


def range_peak(question: Question, stage: int, start: int, stop: int) -> int:
    """Return the peak bytes of blocks `start` to `stop - 1` as stage number `stage`."""
    band = question.ranges.band(stop - start, first=start, last=start)
    return int(stage_peak(band, question.surroundings(stage))[-1, 0])


def fits(question: Question, split: Split, peaks: tuple[int, ...]) -> bool:
    """Return whether every stage fits its device."""
    budgets = question.cluster.budgets
    return all(peak <= budgets[device] for peak, device in zip(peaks, split.devices, strict=True))


# ---- Plans

_SHORT = 0.05  # part of its budget that a planner gets for each suggested change
_JUDGING = 200_000  # budget for all suggested changes together, in new actions or equivalent work


def solved(question: Question, planner: Planner, *, name: str) -> Plan:
    """Run `planner`, known as `name`, and return its plan.

    Raises:
        UsageError: the planner does not support this question.
        InfeasibleError: a stage needs more memory than its device has, and the options do not allow that.
    """
    began = time.perf_counter()
    with uncollected():
        result = planner(question)
        seconds = time.perf_counter() - began
        return answer(question, result, planner=planner, name=name, seconds=seconds, asked=question.options)


def unexplained(question: Question, planner: Planner, *, name: str) -> Assembled:
    """Run `planner` and return the simulation of its plan, which has a prediction without explanations.

    Raises:
        UsageError: the planner does not support this question.
    """
    with uncollected():
        result = planner(question)
        simulation = _simulated(plan_of(question, result.split, decisions=result.decisions), result)
        prediction = _prediction(_peaks(question, result, simulation), simulation)
        provenance = Provenance(
            planner=name,
            options=question.options.recorded,
            objective=result.objective,
            value=result.value,
            bound=None,
            evaluated=result.evaluated,
            seconds=0.0,
            remarks=result.remarks,
        )
        simulation.plan = replace(simulation.plan, prediction=prediction, provenance=provenance)
        return simulation


def explained(plan: Plan) -> Plan:
    """Return a plan with the effects of its techniques."""
    assert plan.prediction is not None
    assert plan.provenance is not None
    with uncollected():
        told = accounts(plan, assembled(plan))
    return replace(
        plan,
        prediction=replace(plan.prediction, compactions=told.compactions),
        provenance=replace(plan.provenance, remarks=(*plan.provenance.remarks, *told.remarks)),
    )


def _simulated(plan: Plan, result: PlannerResult) -> Assembled:
    """Return the simulation of a planner's plan, which the planner may have made."""
    known = result.simulation
    return assembled(plan) if known is None or known.plan != plan else known


def _prediction(peaks: tuple[int, ...], simulation: Assembled) -> Prediction:
    """Return the prediction of a step in a long run."""
    longer = simulation.step_seconds[-1] / simulation.seconds if simulation.seconds else 1.0
    return Prediction(
        peak_bytes=peaks,
        step_seconds=simulation.seconds,
        utilisation=tuple(longer * share for share in simulation.utilisation),
    )


def answer(
    question: Question,
    result: PlannerResult,
    *,
    planner: Planner,
    name: str,
    seconds: float,
    asked: PlanOptions,
) -> Plan:
    """Make the plan of a planner's result, found in `seconds`; `asked` are the options before any choice.

    Raises:
        InfeasibleError: the plan does not fit.
        UsageError: the plan's grids cannot be trained.
    """
    plan = plan_of(question, result.split, decisions=result.decisions)
    check_slices(plan, None)
    simulation = _simulated(plan, result)
    peaks = _peaks(question, result, simulation)
    if not question.options.allow_infeasible:
        short = shortage(plan, simulation.arenas)
        _check(replace(question, options=asked), result, peaks, short, name, _Judge(planner))
    bound = result.value if result.proven else result.bound
    told = accounts(plan, simulation) if result.decisions else Accounts()
    return replace(
        plan,
        prediction=replace(_prediction(peaks, simulation), compactions=told.compactions),
        provenance=Provenance(
            planner=name,
            options=asked.recorded,
            objective=result.objective,
            value=result.value,
            bound=bound if bound is not None and isfinite(bound) else None,
            evaluated=result.evaluated,
            seconds=seconds,
            remarks=(
                *result.remarks,
                *told.remarks,
                *undivided(plan),
                *_whole(plan),
                *_staying(question, result),
                *_unreplicated(question, asked, name),
            ),
        ),
    )


def _whole(plan: Plan) -> Iterator[str]:
    """Yield the reason why the plan has one stage, if the model is indivisible."""
    if plan.profile.indivisible:
        yield f"The model is one block, because {plan.profile.indivisible}."


def _staying(question: Question, result: PlannerResult) -> Iterator[str]:
    """Yield the reason why no state moves, if the plan frees memory in other ways."""
    if question.staying and result.decisions:
        yield f"State is not offloaded, because {question.staying}."


def _unreplicated(question: Question, asked: PlanOptions, name: str) -> Iterator[str]:
    """Yield the reason why no replicas were considered, if the planner might have chosen some."""
    reason = replace(question, options=asked).changed_by_replicas if name in ON_GRIDS else ""
    if reason and question.training.microbatch_size > 1 and len(question.cluster.devices) > 1:
        yield (
            f"Replicas are not considered, because {reason}, so they would train to other numbers. --data N "
            "(data=N) allows them."
        )


class _Judge:
    """Judge of changed questions, by short searches of the planner, until a budget of actions is spent."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self._spent = planner, 0

    def __call__(self, question: Question) -> float | None:
        """Return the fullest device's use in the plan found.

        None if the plan does not fit or the budget is spent.
        """
        if self._spent > _JUDGING:
            return None
        try:
            result = self._planner(replace(question, options=replace(question.options, effort=_SHORT)))
        except UsageError:  # no candidate can be carried out
            return None
        simulation = assembled(plan_of(question, result.split, decisions=result.decisions))
        self._spent += (
            result.work + simulation.actions // 2
        )  # half, since both simulated steps have the same actions
        budgets = question.cluster.budgets
        full = max(peak / budget for peak, budget in zip(simulation.peak_bytes, budgets, strict=True))
        return None if full > 1 or shortage(simulation.plan, simulation.arenas) else full


def _check(
    question: Question, result: PlannerResult, peaks: tuple[int, ...], short: str, name: str, judge: _Judge
) -> None:
    """Check that every device has the memory of its stage; `short` names another shortage, if there is one.

    Raises:
        InfeasibleError: a device, or the memory that `short` names, is too small.
    """
    budgets, split = question.cluster.budgets, result.split
    grids = map(split.grid, range(len(split.devices)))
    devices = tuple(max(grid.devices, key=lambda device: peaks[device] / budgets[device]) for grid in grids)
    over = any(peaks[device] > budgets[device] for device in devices)
    if over or short:
        held, result = (
            tuple(peaks[device] for device in devices),
            result._replace(split=split._replace(devices=devices)),
        )
        raise InfeasibleError(explanation(question, result, held, planner=name, elsewhere=short, judge=judge))


def _peaks(question: Question, result: PlannerResult, simulation: Assembled) -> tuple[int, ...]:
    """Return the peaks of all devices, by closed forms if these suffice."""
    counted = simulation.plan.decisions or result.split.grids
    return simulation.peak_bytes if counted else _by_device(question, result.split)


def _by_device(question: Question, split: Split) -> tuple[int, ...]:
    """Return peaks by the closed forms, in the order of devices; 0 for devices without a stage."""
    held = dict(zip(split.devices, stage_peaks(question, split), strict=True))
    return tuple(held.get(device, 0) for device in range(len(question.cluster.devices)))
