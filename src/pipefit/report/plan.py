"""A plan explained: what is where, what limits it, how good it is known to be, and how fast it should run."""

from __future__ import annotations

from collections.abc import Iterator
from math import comb

from pipefit.plans import Objective, Plan, Provenance, Stage, What
from pipefit.report.tables import Table, plain
from pipefit.simulator import simulate
from pipefit.units import format_bytes, format_seconds

_BAR = 20
_PEAKS = (Objective.PEAK, Objective.PEAK_SHARE)  # what a planner is proven to have minimised over all splits


def explain(plan: Plan) -> str:
    """A table of the stages and a few sentences, in plain text."""
    sentences = [_limit(plan), *_planner(plan), *_time(plan)]
    return plain([_head(plan), stage_table(plan), "\n".join(sentence for sentence in sentences if sentence)])


def stage_table(plan: Plan) -> Table:
    """A row for each stage: device, layers, parameters, and the predicted peak as a part of the device's budget."""
    rows = tuple(_row(plan, number, stage) for number, stage in enumerate(plan.stages))
    return Table(("stage", "device", "layers", "count", "parameters", "peak", "of budget", "full", ""), rows)


def _head(plan: Plan) -> str:
    training = plan.training
    return (
        f"{plan.profile.model}: {len(plan.profile.layers)} layers in {len(plan.stages)} stages on {plan.cluster}\n"
        f"{training.schedule}, a batch of {training.batch_size} in {training.microbatches} microbatches of "
        f"{training.microbatch_size}, {training.precision}"
    )


def _row(plan: Plan, number: int, stage: Stage) -> tuple[str, ...]:
    names = plan.profile.layers[stage.start : stage.stop]
    span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
    parameters = sum(cost.parameter_bytes for cost in plan.measurement.costs[stage.start : stage.stop])
    budget = plan.cluster.budgets[stage.device]
    full = _fullness(plan, stage)
    peak = format_bytes(plan.prediction.peak_bytes[stage.device]) if plan.prediction else "-"
    percent = "-" if full is None else f"{100 * full:.1f} %"
    cells = (
        str(number),
        str(stage.device),
        span,
        str(len(names)),
        format_bytes(parameters),
        peak,
        format_bytes(budget),
    )
    return (*cells, percent, "" if full is None else _bar(full))


def _fullness(plan: Plan, stage: Stage) -> float | None:
    """Predicted peak as a part of the budget."""
    if plan.prediction is None:
        return None
    return plan.prediction.peak_bytes[stage.device] / plan.cluster.budgets[stage.device]


def _bar(full: float) -> str:
    filled = min(_BAR, round(full * _BAR))
    return "#" * filled + "." * (_BAR - filled) + (" does not fit" if full > 1 else "")


def _limit(plan: Plan) -> str:
    """The fullest device, and how much room it has or lacks."""
    if plan.prediction is None:
        return "This plan holds no predicted peaks: pipefit simulate shows them."
    number, stage = max(enumerate(plan.stages), key=lambda item: _fullness(plan, item[1]) or 0.0)
    budget, peak = plan.cluster.budgets[stage.device], plan.prediction.peak_bytes[stage.device]
    room = (
        f"which leaves it {format_bytes(budget - peak)} free"
        if peak <= budget
        else f"{format_bytes(peak - budget)} more than it has"
    )
    return f"Device {stage.device} limits: stage {number} needs {format_bytes(peak)}, {room}."


def _planner(plan: Plan) -> Iterator[str]:
    """Who planned it and how good it is known to be."""
    made = plan.provenance
    if made is None:
        yield "This plan does not say which planner made it."
        return
    took = f" in {format_seconds(made.seconds)}" if made.seconds else ""
    yield f"Planned by the {made.planner} planner{took}. {_optimality(made)}"
    splits = comb(len(plan.profile.layers) - 1, len(plan.stages) - 1)
    if made.bound == made.value and made.objective in _PEAKS:
        yield f"This holds for all {splits:,} splits of {len(plan.profile.layers)} layers in {len(plan.stages)} stages."


def _optimality(made: Provenance) -> str:
    value, what = _value(made), made.objective.partition(",")[0]
    if made.bound is None:
        return f"The {what} is {value}; this planner does not tell how far that is from the lowest possible."
    if made.bound == made.value and made.objective not in _PEAKS:
        return f"It minimises only the {what}: {value} is the lowest possible."
    if made.bound == made.value:
        return f"Proven optimal: no split brings the {what} below {value}."
    gap = 100 * (made.value / made.bound - 1)
    return f"The {what} is {value}, at most {gap:.1f} % above the lowest possible."


def _value(made: Provenance) -> str:
    """The value in the unit of its objective."""
    match made.objective.unit:
        case "share":
            return f"{100 * made.value:.1f} % of its budget"
        case "bytes":
            return format_bytes(round(made.value))
        case "seconds":
            return format_seconds(made.value)
        case "layers":
            return f"{made.value:g}"


def _time(plan: Plan) -> Iterator[str]:
    """Step time, throughput, and how long devices wait: what a simulated step leaves of their time."""
    if plan.prediction is None or plan.prediction.step_seconds <= 0:
        return
    step, busy = plan.prediction.step_seconds, simulate(plan).utilisation()
    used = {device for stage in plan.stages for device in stage.devices}
    waiting = 1 - sum(busy[device] for device in used) / len(used)
    yield (
        f"A step takes {format_seconds(step)}: {plan.training.batch_size / step:.3g} samples per second. "
        f"Devices wait {100 * max(waiting, 0.0):.0f} % of it{_bubble(plan)}."
    )


def _bubble(plan: Plan) -> str:
    """The ideal bubble of GPipe and 1F1B, (P - 1) / (M + P - 1): what stages of equal time without messages would wait.

    It is defined for one stage on each device. Under recomputation it is not, as devices run forwards again while they
    would wait.
    """
    stages, microbatches = len(plan.stages), plan.training.microbatches
    recomputes = any(decision.what is What.RECOMPUTE for decision in plan.decisions)
    if stages == 1 or len(plan.ranks) < stages or recomputes:
        return ""
    share = (stages - 1) / (microbatches + stages - 1)
    return (
        f"; the ideal bubble of {plan.training.schedule} with {stages} stages and {microbatches} microbatches "
        f"is {100 * share:.0f} %"
    )
