"""A plan in words: its stages and peaks, its limit, the planner, its speed, and the conditions of its
figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb

from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import What
from pipefit.schema.grids import Stage
from pipefit.schema.plan import TIGHT, Alternative, Compaction, Plan, Prediction, fullness
from pipefit.schema.profile import samples
from pipefit.schema.trace import AllocatorPeaks
from pipefit.tables import Block, Table
from pipefit.texts import counted, numbered
from pipefit.units import format_bytes, format_number, format_seconds

# ---- Alternatives to a plan, with their prices


def paragraph(alternatives: Sequence[Alternative], step_seconds: float) -> Iterator[str]:
    """Yield a line for each of a plan's alternatives.

    `step_seconds` is the plan's step time.
    """
    lines = [_line(alternative, step_seconds) for alternative in alternatives]
    if lines:
        yield "\n".join(lines)


def priced(alternatives: Sequence[Alternative], step_seconds: float) -> Iterator[Table]:
    """Yield a table with a row for each alternative; nothing if there are none."""
    if alternatives:
        columns = (
            "best for",
            "stages",
            "devices",
            "microbatches",
            "schedule",
            "fullest",
            "step",
            "longer",
            "options",
        )
        yield Table(columns, tuple(_row(alternative, step_seconds) for alternative in alternatives))


def _row(alternative: Alternative, step_seconds: float) -> tuple[str, ...]:
    counts = (str(number) for number in (alternative.stages, alternative.devices, alternative.microbatches))
    prices = (
        format_bytes(alternative.peak_bytes),
        format_seconds(alternative.step_seconds),
        _longer(alternative, step_seconds) or "-",
    )
    return alternative.what, *counts, alternative.schedule, *prices, alternative.asked_by


def _longer(alternative: Alternative, step_seconds: float) -> str:
    """Format the relative difference of an alternative's step time; empty if unknown."""
    return f"{100 * (alternative.step_seconds / step_seconds - 1):+z.0f} %" if step_seconds else ""


def _line(alternative: Alternative, step_seconds: float) -> str:
    """Describe an alternative: its memory, its step time, and the options that select it."""
    longer = _longer(alternative, step_seconds)
    by = f" ({longer})" if longer else ""
    return (
        f"{alternative.what.capitalize()}: {counted(alternative.devices, 'device')}, at most "
        f"{format_bytes(alternative.peak_bytes)} on one, "
        f"{format_seconds(alternative.step_seconds)} a step{by}: {alternative.asked_by}"
    )


# ---- Effects of recomputation and offloading on each stage

_HIDDEN = 1e-4  # share of a step below which added time is hidden behind other work


def table(compactions: Sequence[Compaction], step_seconds: float) -> Iterator[Table]:
    """Yield a table with a row for every compaction and its price per byte; nothing if there are none."""
    if compactions:
        columns = ("stage", "technique", "layers", "peak", "step", "cost per GiB")
        yield Table(columns, tuple(_compactions_row(compaction, step_seconds) for compaction in compactions))


def _compactions_row(compaction: Compaction, step_seconds: float) -> tuple[str, ...]:
    freed = (
        f"{'-' if compaction.freed_bytes > 0 else '+'}{format_bytes(abs(compaction.freed_bytes))}"
        if compaction.freed_bytes
        else "none"
    )
    what = compaction.what if len(compaction.what) <= 31 else f"{compaction.what[:30]}\N{HORIZONTAL ELLIPSIS}"
    head = str(compaction.stage), what, str(compaction.layers), freed
    if abs(compaction.added_seconds) <= _HIDDEN * step_seconds:
        return (*head, "hidden", "nothing" if compaction.freed_bytes > 0 else "-")
    added = format_seconds(abs(compaction.added_seconds))
    price = (
        f"{format_seconds(compaction.added_seconds / compaction.freed_bytes * 2**30)}"
        if compaction.freed_bytes > 0
        else "-"
    )
    return (
        *head,
        f"{'+' if compaction.added_seconds > 0 else '-'}{added}",
        price if compaction.added_seconds > 0 else "-",
    )


def effect(compaction: Compaction, step_seconds: float) -> str:
    """Describe a compaction's technique, the bytes that it frees, and the seconds that it adds."""
    frees = f"frees {format_bytes(compaction.freed_bytes)}" if compaction.freed_bytes > 0 else "frees nothing"
    if abs(compaction.added_seconds) <= _HIDDEN * step_seconds:
        cost = "adds no time"
    else:
        change = "adds" if compaction.added_seconds > 0 else "saves"
        cost = f"{change} {format_seconds(abs(compaction.added_seconds))} a step"
    return f"{compaction.what} ({counted(compaction.layers, 'layer')}) {frees} and {cost}"


# ---- The plan

_BAR = 20  # characters
_SIZES = "parameters", "peak", "of budget", "full", ""


def describe_plan(plan: Plan) -> list[Block]:
    """Describe a plan: the request, a row for each stage, the compactions, sentences, and alternatives."""
    told, step = "\n".join(sentences(plan)), predicted_seconds(plan)
    return [head(plan), stage_table(plan), *freed(plan), told, *paragraph(plan.alternatives, step)]


def head(plan: Plan) -> str:
    """Describe the model, the cluster and the training."""
    training = plan.training
    return (
        f"{plan.headline}\n"
        f"{training.phrases[0]}, a batch of {training.batch_size} in "
        f"{counted(training.microbatches, 'microbatch')} of "
        f"{samples(training.microbatch_size, plan.profile.fingerprint.lengths)}, {training.precision}"
    )


def stage_table(plan: Plan) -> Table:
    """Return a row for each stage: device, blocks, parameters, peak and budget.

    Without blocks, or if a stage ends inside one, all rows list layers.
    """
    edges = frozenset(plan.profile.edges)
    whole = bool(plan.profile.blocks) and all({stage.start, stage.stop} <= edges for stage in plan.stages)
    rows = tuple(_plan_row(plan, number, stage, whole=whole) for number, stage in enumerate(plan.stages))
    return Table(
        ("stage", "device", "blocks" if whole else "layers", "count", *_SIZES),
        rows,
        spare=("", "count", "of budget"),
    )


def freed(plan: Plan) -> Iterator[Table]:
    """Yield the table of compactions, if any."""
    yield from table(plan.prediction.compactions, predicted_seconds(plan)) if plan.prediction else ()


def sentences(plan: Plan) -> Iterator[str]:
    """Yield the sharing of stages, the limit, the planner, the speed, and the conditions of the figures."""
    yield from told_sharing(plan.stages)
    yield from _coupled(plan)
    yield _limit(plan)
    yield from _copies(plan)
    yield from _planner(plan)
    yield from _time(plan)
    yield from _caveats(plan)


def predicted_seconds(plan: Plan) -> float:
    """Return the seconds of a step; 0 without a prediction."""
    return plan.prediction.step_seconds if plan.prediction else 0.0


def holds_for(plan: Plan) -> str:
    """Name the machine on which kernels were measured, in a sentence; empty if no CPU kernels were."""
    assumptions = plan.profile.assumptions
    if not assumptions.cpu:
        return ""
    threads = counted(assumptions.threads, "thread")
    return (
        f"Peaks are for {assumptions.cpu} with {assumptions.capability}, torch {assumptions.torch} and "
        f"{threads}: kernels may need other memory elsewhere."
    )


def told_sharing(stages: Sequence[Stage]) -> Iterator[str]:
    """Yield a sentence for every way in which devices share stages, with the numbers of these stages."""
    for way in dict.fromkeys(stage.grid.sharing for stage in stages if stage.grid.sharing):
        result = [number for number, stage in enumerate(stages) if stage.grid.sharing == way]
        *before, last = [run.replace("-", " to ") for run in numbered(result).split(" ")]
        runs = f"{', '.join(before)} and {last}" if before else last
        yield f"Stage{'s' if result[1:] else ''} {runs} {'have' if result[1:] else 'has'} {way}."


def _coupled(plan: Plan) -> Iterator[str]:
    """Yield a warning if replicas are known to change the computed values."""
    degrees = {stage.grid.data for stage in plan.stages}
    reason = plan.profile.coupled or plan.profile.draws
    if plan.is_sliced and reason:
        (data, *others), how = sorted(degrees), plan.training
        as_slices = (
            f": the numbers of {how.microbatches * data} microbatches of "
            f"{counted(how.microbatch_size // data, 'sample')}"
        )
        yield (
            "Replicas train to other numbers than one device would with these microbatches, because "
            f"{reason}{'' if others else as_slices}."
        )


def _plan_row(plan: Plan, number: int, stage: Stage, *, whole: bool) -> tuple[str, ...]:
    """Return the row of a stage, by blocks if all stages consist of `whole` ones, otherwise by layers."""
    names = (
        plan.profile.span(stage.start, stage.stop) if whole else plan.profile.layers[stage.start : stage.stop]
    )
    span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
    measured = plan.measured(number)
    parameters = sum(cost.parameter_bytes for cost in measured.costs[stage.start : stage.stop])
    parameters -= sum(
        shared.nbytes * max(0, sum(stage.start <= user < stage.stop for user in shared.users) - 1)
        for shared in measured.shared
    )
    fullest, full = _fullest(plan, stage), _fullness(plan, stage)
    budget = plan.cluster.budgets[fullest]
    peak = format_bytes(plan.prediction.peak_bytes[fullest]) if plan.prediction else "-"
    tight = plan.prediction is not None and plan.prediction.is_tight(plan.cluster, fullest)
    part = ("-", "") if full is None else (fullness(full, tight=tight), _bar(full))
    named = str(number), numbered(stage.devices), span, str(len(names))
    return (*named, format_bytes(parameters), peak, format_bytes(budget), *part)


def _fullest(plan: Plan, stage: Stage) -> int:
    """Return the device of a stage with the highest predicted share of its budget.

    Without a prediction, returns the device with the smallest budget.
    """
    peaks = plan.prediction.peak_bytes if plan.prediction else (1,) * len(plan.cluster.budgets)
    return max(stage.devices, key=lambda device: peaks[device] / plan.cluster.budgets[device])


def _fullness(plan: Plan, stage: Stage) -> float | None:
    """Return the predicted peak as a share of the budget of the stage's fullest device; None without a
    prediction.
    """
    prediction, device = plan.prediction, _fullest(plan, stage)
    return None if prediction is None else prediction.peak_bytes[device] / plan.cluster.budgets[device]


def _bar(full: float) -> str:
    filled = min(_BAR, round(full * _BAR))
    return "#" * filled + "." * (_BAR - filled)


def _limit(plan: Plan) -> str:
    """Describe the fullest device, and its distance from its budget."""
    if plan.prediction is None:
        return "This plan does not contain predicted peaks: pipefit simulate shows them."
    number, stage = max(enumerate(plan.stages), key=lambda item: _fullness(plan, item[1]) or 0.0)
    device = _fullest(plan, stage)
    budget, peak = plan.cluster.budgets[device], plan.prediction.peak_bytes[device]
    room = (
        f"{format_bytes(budget - peak)} below its budget"
        if peak <= budget
        else f"{format_bytes(peak - budget)} over its budget"
    )
    return f"Device {device} limits: stage {number} needs {format_bytes(peak)}, {room}."


def _planner(plan: Plan) -> Iterator[str]:
    """Yield the planner, and the proven quality of the plan."""
    provenance = plan.provenance
    if provenance is None:
        yield "This plan does not name its planner."
        return
    yield str(provenance)
    if provenance.proves_lowest_peak and plan.is_sliced:
        divided = "" if "shard" in provenance.options else ", sharded or not"
        yield (
            f"This holds for every split of {plan.profile.parts}, with any number of replicas of each "
            f"stage{divided}."
        )
    elif provenance.proves_lowest_peak:
        parts = len(plan.profile.block_names)
        splits = comb(parts - 1, len(plan.stages) - 1)
        into = f"{counted(parts, plan.profile.part)} in {counted(len(plan.stages), 'stage')}"
        yield (
            f"This holds for all {splits:,} splits of {into}."
            if splits > 1
            else f"It is the only split of {into}."
        )


def _time(plan: Plan) -> Iterator[str]:
    """Yield the step time, the throughput, and the idle time of devices in the simulated step."""
    if plan.prediction is None or plan.prediction.step_seconds <= 0:
        return
    step, busy = plan.prediction.step_seconds, plan.prediction.utilisation
    speed = (
        f"A step takes {format_seconds(step)}: {format_number(plan.training.batch_size / step)} samples per "
        "second."
    )
    if not busy:
        yield speed
        return
    used = {device for stage in plan.stages for device in stage.devices}
    waiting = 1 - sum(busy[device] for device in used) / len(used)
    yield f"{speed} Devices are idle {100 * max(waiting, 0.0):.0f} % of the step{_bubble(plan)}."


def _bubble(plan: Plan) -> str:
    """Describe the ideal bubble of GPipe and 1F1B, (P - 1) / (M + P - 1).

    It is the idle time with equal stages and no messages.

    It is defined for one stage on each device, and without recomputation, which devices may run in idle time.
    """
    stages, microbatches = len(plan.stages), plan.training.microbatches
    recomputes = any(decision.what is What.RECOMPUTE for decision in plan.decisions)
    if stages == 1 or len(plan.ranks) < stages or recomputes:
        return ""
    if plan.training.endless:
        return f"; with equal stages and free messages they would not be idle under {plan.training.schedule}"
    share = (stages - 1) / (microbatches + stages - 1)
    return (
        f"; the ideal bubble of {plan.training.schedule} with {stages} stages and "
        f"{counted(microbatches, 'microbatch')} is {100 * share:.0f} %"
    )


def _seconds(plan: Plan) -> str:
    """Describe whether layer seconds were measured or estimated, and by which rates."""
    if not plan.measurement.estimated:
        moves = len(plan.workers) > 1 or any(decision.place is not None for decision in plan.decisions)
        links = ", those of messages and copies are estimated by the links" if moves else ""
        return f"Seconds of layers were measured on {plan.profile.assumptions.device}{links}."
    used = {device for stage in plan.stages for device in stage.devices}
    kinds = {
        plan.cluster.devices[device].kind.key: plan.cluster.devices[device].kind for device in sorted(used)
    }
    by = "; ".join(f"{kind.name} by {kind.estimates(plan.training.dtype)}" for kind in kinds.values())
    return f"Seconds are estimated, not measured: {by}."


def _caveats(plan: Plan) -> Iterator[str]:
    """Yield the divided shares, the processes' memory, and the conditions and gaps of the figures."""
    shares = dict.fromkeys(plan.measured(number).shares for number in range(len(plan.stages)))
    yield from (f"Of the model {share.sentence}." for share in shares if share is not None)
    yield from _reserves(plan.cluster, plan.workers, plan.prediction)
    if plan.prediction is not None:
        yield from filter(None, (_seconds(plan), holds_for(plan)))
        if gap := plan.profile.kernels.gap:
            yield f"{gap[0].upper()}{gap[1:]}."


_FEW_STAGES = 8  # whose copies are told one by one


def _copies(plan: Plan) -> list[str]:
    """Return a line about half-precision weight copies of each stage, or of many; empty without copies."""
    stages = [plan.measured(n).copy_bytes(stage.start, stage.stop) for n, stage in enumerate(plan.stages)]
    few = stages if len(stages) <= _FEW_STAGES else ()
    sizes = ", ".join(map(format_bytes, few)) or f"{format_bytes(min(stages))} to {format_bytes(max(stages))}"
    each = f"{sizes} on each device of stages 0 to {len(stages) - 1}" if len(stages) > 1 else sizes
    divides = any(stage.grid.shard == "parameters" for stage in plan.stages)
    gathered = "; replicas that shard parameters keep copies of gathered layers only" if divides else ""
    line = f"Half-precision copies of weights: {each}, once for all microbatches{gathered}."
    return [line] if any(stages) else []


def _reserves(cluster: Cluster, devices: tuple[int, ...], prediction: Prediction | None) -> Iterator[str]:
    """Yield sentences about reserves for GPU processes among `devices`, and the memory that these processes
    take.
    """
    left = {cluster.reserves[device] for device in devices}
    if any(left):
        sizes = format_bytes(min(left)) + (f" to {format_bytes(max(left))}" if len(left) > 1 else "")
        yield f"Budgets reserve {sizes} of a device for non-tensor memory."
    if prediction is not None and cluster.backend == "cuda":
        yield _taken(cluster, prediction)
        if tight := [
            str(device) for device in dict.fromkeys(devices) if prediction.is_tight(cluster, device)
        ]:
            named = f"device{'s' * (len(tight) > 1)} {', '.join(tight)}"
            least = f"{100 * TIGHT:.0f} % or more of"
            what = (
                f"processes take {least}" if prediction.processes else f"tensors take {least} the budget of"
            )
            room = "Uncounted memory, such as cuDNN's workspaces, may not fit there."
            yield f"Tight: {what} {named}. {room}"


def _taken(cluster: Cluster, prediction: Prediction) -> str:
    """Describe the fullest process; or say that it is unknown."""
    known = {device: process for device, process in enumerate(prediction.processes) if process}
    if not known:
        return (
            "The memory that GPUs reserve was not checked: pipefit certify checks it, and so does pipefit "
            "plan of a MODEL."
        )
    fullest = max(
        known, key=lambda device: known[device].process_bytes / cluster.devices[device].memory_bytes
    )
    return f"By a dry run, {_process(known[fullest], fullest, cluster.devices[fullest].memory_bytes)}."


def _process(process: AllocatorPeaks, device: int, memory: int) -> str:
    """Describe the memory of a device's process."""
    return (
        f"the process of device {device} needs {format_bytes(process.process_bytes)} of its "
        f"{format_bytes(memory)} ({100 * process.process_bytes / memory:.1f} %): {process}"
    )
