"""Why a plan does not fit, and the cheapest changes with which the model fits. Each change has been planned first.

Planners of splits alone are asked by the exact search, a dozen times at most. A planner that compacts is asked itself,
with a small part of its budget for each change, until all of them together have spent what there is for a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil

from pipefit.errors import UsageError
from pipefit.planner.exact import exact
from pipefit.planner.question import ON_GRIDS, Found, Question
from pipefit.texts import first_to_last
from pipefit.units import format_bytes

_BEST = "exact", "joint"  # planners that find a split that fits if there is one
_BISECTIONS = 4  # of memory, where a search has to find each plan
_MORE_DEVICES = 8  # times as many devices are tried at most


Judge = Callable[[Question], float | None]  # how full the fullest device of a plan is; None where none was found to fit


def explanation(
    question: Question,
    found: Found,
    peaks: tuple[int, ...],
    *,
    planner: str,
    elsewhere: str = "",
    judge: Judge | None = None,
) -> str:
    """What does not fit, and what would: the fullest device with its stage, or the host that is short (`elsewhere`).

    `judge` says what fits where a planner compacts; otherwise the exact search does.
    """
    where = elsewhere or _device(question, found, peaks)
    compacts = found.decisions is not None
    none_fits = ""
    if planner in _BEST:
        none_fits = "; no plan was found that fits" if compacts else "; no other split fits either"
    if question.profile.indivisible:
        none_fits += f"; the model is one block, as {question.profile.indivisible}"
    if question.staying and compacts:
        none_fits += f"; no state moves, as {question.staying}"
    if planner in ON_GRIDS and question.changed_by_replicas:
        why = f"{question.changed_by_replicas}, and replicas would train to other numbers"
        none_fits += f"; replicas are not considered, because {why} (--data N, data=N, allows them)"
    asked = judge if compacts and judge is not None else _fullest
    return f"{where}{none_fits}. {_remedies(question, planner, asked)}"


def _device(question: Question, found: Found, peaks: tuple[int, ...]) -> str:
    """The device that is the fullest, its stage, by how many bytes it does not fit, and how full it is."""
    budgets, split = question.cluster.budgets, found.split
    stage = max(range(len(peaks)), key=lambda s: peaks[s] / budgets[split.devices[s]])
    device, need = split.devices[stage], peaks[stage]
    names = question.profile.span(*question.layers(*split.edges[stage : stage + 2]))
    budget, reserve = budgets[device], question.cluster.reserves[device]
    left = f", {format_bytes(reserve)} of the device are left to what its process takes besides" if reserve else ""
    freed = ", with what recomputing and moving tensors frees" if found.decisions else ""
    return (
        f"device {device} needs {format_bytes(need)} for stage {stage} ({first_to_last(names)}), "
        f"{format_bytes(need - budget)} over its {format_bytes(budget)} ({ceil(100 * need / budget)} % full{left})"
        f"{freed}"
    )


def _remedies(question: Question, planner: str, judge: Judge) -> str:
    """Changes with which the model fits, the cheapest first; or that more devices would not make it fit."""
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
    memory = _more_memory(question) if judge is _fullest else _less_memory(question, judge)
    changes = filter(None, (*_free(question, judge), more, memory))
    by = "" if planner in _BEST or judge is not _fullest else " by the exact planner"
    return f"What would fit{by}: {'; '.join(changes)}{useless}"


def _useless(size: str, most: int, *, exactly: bool) -> str:
    """That more devices do not help, as far as that is known."""
    if exactly:
        return f". More devices of {size} do not help, up to {most} of them"
    return f". No plan for more devices of {size} was found to fit, up to {most} of them"


def _free(question: Question, judge: Judge) -> Iterator[str]:
    """Changes that need no other hardware."""
    training, options = question.training, question.options
    changes: list[tuple[str, Callable[[], Question]]] = []
    if training.schedule != "1f1b":
        changes.append(("schedule 1f1b", lambda: replace(question, training=replace(training, schedule="1f1b"))))
    if options.stages is not None and options.stages < min(question.blocks, len(question.cluster.devices)):
        changes.append(("a stage on every device", lambda: replace(question, options=replace(options, stages=None))))
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
    """The fewest devices of the largest size with which the model fits, by doubling and bisection.

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
    cluster = question.cluster
    largest = max(cluster.devices, key=lambda device: device.memory_bytes)
    more = (largest,) * (count - len(cluster.devices))
    return replace(question, cluster=replace(cluster, devices=cluster.devices + more))


def _more_memory(question: Question) -> str:
    """The memory that the same number of devices would need."""
    value = exact(question).value
    if question.equal_budgets:
        each = int(value) + max(question.cluster.reserves)
        return f"the same devices with {format_bytes(each)} each ({each} bytes)"
    return f"{ceil(1000 * (value - 1)) / 10} % more memory on every device"


def _less_memory(question: Question, judge: Judge) -> str:
    """Memory with which the same devices have a plan: by bisection from what they have to what a split alone needs.

    All devices get more in the same proportion.
    """
    low, high = 1.0, _share(question)
    if high <= low:
        return ""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if judge(_with_memory(question, middle)) is None else (low, middle)
    larger = _with_memory(question, high).cluster.devices
    if question.equal_budgets:
        return f"the same devices with {format_bytes(larger[0].memory_bytes)} each ({larger[0].memory_bytes} bytes)"
    return f"{ceil(1000 * (high - 1)) / 10} % more memory on every device"


def _with_memory(question: Question, times: float) -> Question:
    """The question on devices whose budgets are so many times as large."""
    cluster = question.cluster
    more = (ceil(times * budget) - budget for budget in cluster.budgets)
    devices = tuple(
        replace(one, memory_bytes=one.memory_bytes + n) for one, n in zip(cluster.devices, more, strict=True)
    )
    return replace(question, cluster=replace(cluster, devices=devices))


def _share(question: Question) -> float:
    """The lowest peak of all plans without compaction, as a part of its device's budget.

    Raises:
        UsageError: there is no plan of the degrees that are asked for.
    """
    value = exact(question).value
    return value / question.cluster.budgets[0] if question.equal_budgets else value


def _fullest(question: Question) -> float | None:
    """How full the fullest device of the plan with the lowest peak is; None where it does not fit, or there is none."""
    try:
        share = _share(question)
    except UsageError:
        return None
    return share if share <= 1 else None
