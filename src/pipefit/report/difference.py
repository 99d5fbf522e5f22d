"""The difference between two plans, or two traces: the changes, their costs, and the reasons.

`pipefit compare` shows how far a prediction is from a measurement of the same plan. This module shows the
effects of a changed plan: the request, layers on other devices, recomputed and offloaded memory, and the
change of each device's memory by category and of the step time. Plans are simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from pipefit.schema.decisions import Decision, Run, SavedTensors, State, What
from pipefit.schema.grids import Grid
from pipefit.schema.json_io import ChangedLayers, DiffAnswer
from pipefit.schema.plan import Plan
from pipefit.schema.profile import differences
from pipefit.schema.trace import CATEGORIES, DeviceTrace, Trace
from pipefit.simulator import simulate
from pipefit.tables import Block, Table
from pipefit.texts import counted, numbered
from pipefit.units import format_bytes, format_number, format_seconds

_MOST_WHYS = 2
_MOST_TENSORS = 4  # kinds of tensors that one change lists


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDifference:
    """One device's peak before and after, in bytes; None if one of the two lacks the device.

    `by_category` has the differences between the two peaks, without unchanged categories.
    """

    device: int
    before_bytes: int | None
    after_bytes: int | None
    by_category: dict[str, int]

    @property
    def changed_bytes(self) -> int:
        """The increase of the peak."""
        return (self.after_bytes or 0) - (self.before_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """A run of layers that the plans treat differently: its devices, recomputation or offloading.

    Layers are those of the model, by name, from `first` to `last`. If saved tensors move, `tensors` lists
    them by the operation that saved them, their bytes, and their number.
    """

    first: str
    last: str
    before: str  # empty if there was no treatment
    after: str
    why: str = ""
    tensors: tuple[str, ...] = ()

    def as_json(self) -> ChangedLayers:
        """Return plain data."""
        told = ChangedLayers(
            layers=[self.first, self.last], before=self.before, after=self.after, why=self.why
        )
        if self.tensors:
            told["tensors"] = list(self.tensors)
        return told

    def __str__(self) -> str:
        span = self.first if self.first == self.last else f"{self.first} .. {self.last}"
        named = self.tensors[:_MOST_TENSORS] + (("...",) if len(self.tensors) > _MOST_TENSORS else ())
        which = f": {', '.join(named)}" if named else ""
        why = f" ({self.why})" if self.why else ""
        if self.before and self.after:
            return f"{span}: {self.before}, then {self.after}{which}{why}"
        return (
            f"{span}: {self.after}{which}{why}" if self.after else f"{span}: no longer {self.before}{which}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDifference:
    """All differences. Seconds are those of the last step, None without a clock; rates are None for
    traces.
    """

    asked: tuple[str, ...]
    changes: tuple[LayerChange, ...]
    devices: tuple[DeviceDifference, ...]
    before_seconds: float | None
    after_seconds: float | None
    before_rate: float | None = None  # samples per second
    after_rate: float | None = None
    before_busy: float | None = None  # share of a step in which the busiest device computes
    after_busy: float | None = None

    def __repr__(self) -> str:
        """Return one line: the second document's costs relative to the first."""
        return f"<PlanDifference: {_price(self)}>"

    @property
    def highest_bytes(self) -> tuple[int, int]:
        """The highest peak of all devices, before and after."""
        before = (device.before_bytes or 0 for device in self.devices)
        after = (device.after_bytes or 0 for device in self.devices)
        return max(before, default=0), max(after, default=0)

    def as_json(self) -> DiffAnswer:
        """Return plain data, the shape of `pipefit diff --json`."""
        return {
            "asked": list(self.asked),
            "changes": [change.as_json() for change in self.changes],
            "devices": [
                {
                    "device": difference.device,
                    "before_bytes": difference.before_bytes,
                    "after_bytes": difference.after_bytes,
                    "by_category": difference.by_category,
                }
                for difference in self.devices
            ],
            "step_seconds": [self.before_seconds, self.after_seconds],
            "samples_per_second": [self.before_rate, self.after_rate],
            "busiest_device_computes": [self.before_busy, self.after_busy],
        }


def difference_of_plans(before: Plan, after: Plan) -> PlanDifference:
    """Compare the second plan with the first."""
    traces = simulate(before), simulate(after)
    result = difference_of_traces(*traces)
    rates = [
        plan.training.batch_size / trace.step_seconds[-1]
        if trace.step_seconds and trace.step_seconds[-1]
        else None
        for plan, trace in zip((before, after), traces, strict=True)
    ]
    return replace(
        result,
        asked=tuple(_asked(before, after)),
        changes=(*_placed(before, after), *_treated(before, after)),
        before_rate=rates[0],
        after_rate=rates[1],
    )


def difference_of_traces(before: Trace, after: Trace) -> PlanDifference:
    """Compare the second trace with the first, device by device."""
    ours, theirs = ({device.device: device for device in trace.devices} for trace in (before, after))
    asked = [] if before.source == after.source else [f"{before.source}, then {after.source}"]
    return PlanDifference(
        asked=tuple(asked),
        changes=(),
        devices=tuple(_device(n, ours.get(n), theirs.get(n)) for n in sorted({*ours, *theirs})),
        before_seconds=before.last_seconds,
        after_seconds=after.last_seconds,
        before_busy=_busiest(before),
        after_busy=_busiest(after),
    )


def _busiest(trace: Trace) -> float | None:
    return max(trace.utilisation(), default=None) if trace.last_seconds else None


def _device(number: int, before: DeviceTrace | None, after: DeviceTrace | None) -> DeviceDifference:
    held, holds = (trace.peak.by_category if trace and trace.peak else {} for trace in (before, after))
    apart = {category.value: holds.get(category, 0) - held.get(category, 0) for category in CATEGORIES}
    return DeviceDifference(
        device=number,
        before_bytes=None if before is None else before.peak_bytes,
        after_bytes=None if after is None else after.peak_bytes,
        by_category={name: nbytes for name, nbytes in apart.items() if nbytes},
    )


# ---- Differences between two plans


def _asked(before: Plan, after: Plan) -> Iterator[str]:
    """Yield the differences between the requests, as phrases: the first value, then the second."""
    if before.cluster != after.cluster:
        same = str(before.cluster) == str(after.cluster)
        yield f"{before.cluster}, then " + (
            "the same cluster with other links or reserves" if same else str(after.cluster)
        )
    ours, theirs = (plan.profile.fingerprint for plan in (before, after))
    if ours.digest != theirs.digest:
        told = differences(ours, theirs, before.profile.layers)
        yield f"another model: {'; '.join(told)}" if told else "another model"
    kernels = [plan.profile.assumptions.target for plan in (before, after)]
    pairs = [*zip(before.training.phrases, after.training.phrases, strict=True), (*kernels,)]
    yield from (f"{one}, then {two}" for one, two in pairs if one != two)
    planners = [plan.provenance.planner if plan.provenance else "hand" for plan in (before, after)]
    if planners[0] != planners[1]:
        yield f"planned by {planners[0]}, then by {planners[1]}"


def _placed(before: Plan, after: Plan) -> Iterator[LayerChange]:
    """Yield the layers that are on other devices, or shared differently between devices."""
    ours, theirs = _places(before), _places(after)
    names = [name for name in before.profile.layers if name in theirs]
    pairs = [(name, ours[name], theirs[name]) for name in names]
    for (one, two), run in groupby(pairs, key=lambda pair: pair[1:]):
        if one != two:
            layers = [name for name, *_ in run]
            yield LayerChange(first=layers[0], last=layers[-1], before=f"on {one}", after=f"on {two}")


def _places(plan: Plan) -> dict[str, str]:
    """Return the devices of every layer and the sharing between them, in words."""
    return {
        name: _place(stage.grid)
        for stage in plan.stages
        for name in plan.profile.layers[stage.start : stage.stop]
    }


def _place(grid: Grid) -> str:
    devices = f"device{'s' * (len(grid.devices) > 1)} {numbered(grid.devices)}"
    return f"{devices} as {grid.sharing}" if grid.sharing else devices


class _Treated(NamedTuple):
    """A plan's treatment of a layer or one of its saved tensors, in words; empty without treatment."""

    how: str = ""
    why: str = ""
    tensor: str = ""


_Treatments = dict[tuple[What, str], dict[tuple[str, int], _Treated]]


def _treated(before: Plan, after: Plan) -> Iterator[LayerChange]:
    """Yield the differences in recomputation and offloading, by runs of layers with the same treatments."""
    ours, theirs = _treatments(before), _treatments(after)
    for kind in dict.fromkeys([*ours, *theirs]):
        had, has = ours.get(kind, {}), theirs.get(kind, {})
        result: dict[tuple[str, str], dict[str, list[_Treated]]] = {}
        for subject in dict.fromkeys([*had, *has]):
            treated, two = had.get(subject, _Treated()), has.get(subject, _Treated())
            if treated.how != two.how:
                layers = result.setdefault((treated.how, two.how), {})
                layers.setdefault(subject[0], []).append(two if two.how else treated)
        for (one_how, two_how), layers in result.items():
            for run in _runs(after if two_how else before, list(layers)):
                yield _change(run, one_how, two_how, [told for name in run for told in layers[name]])


def _change(run: list[str], before: str, after: str, told: Sequence[_Treated]) -> LayerChange:
    reasons = [treated.why for treated in told if treated.why] if after else []
    kinds = Counter(one.tensor for one in told if one.tensor)
    return LayerChange(
        first=run[0],
        last=run[-1],
        before=before,
        after=after,
        why="; ".join(list(dict.fromkeys(reasons))[:_MOST_WHYS]),
        tensors=tuple(f"{count} x {name}" if count > 1 else name for name, count in kinds.items()),
    )


def _treatments(plan: Plan) -> _Treatments:
    """Return the treatments of layers and their saved tensors, by kind and target."""
    result: _Treatments = {}
    for decision in plan.decisions:
        kind = decision.what, _done(decision)
        subjects = result.setdefault(kind, {})
        for layer, number in _subjects(decision):
            before = subjects.get((plan.profile.layers[layer], number), _Treated())
            how = " and ".join(filter(None, (before.how, _treatment(decision))))
            tensor = "" if number < 0 else _tensor(plan, decision.stage, layer, number)
            subjects[plan.profile.layers[layer], number] = _Treated(how, decision.why or before.why, tensor)
    return result


def _tensor(plan: Plan, stage: int, layer: int, number: int) -> str:
    """Describe a saved tensor: the operation that saved it, or its dtype, and its bytes."""
    saved = next(
        saved_tensor
        for saved_tensor in plan.measured(stage).costs[layer].saved
        if saved_tensor.index == number
    )
    return f"{saved.operation or saved.dtype} {format_bytes(saved.nbytes)}"


def _treatment(decision: Decision) -> str:
    """Describe a decision: the technique, the microbatches, and the distance from its use."""
    taken, every, _ = decision.microbatches
    words = [_done(decision) + (f" for {taken} of {every} microbatches" if taken < every else "")]
    if decision.ahead:
        back = "" if decision.what is What.RECOMPUTE else "reloaded "
        words.append(f"{back}{counted(decision.ahead, 'pass')} early")
    if decision.what is What.OFFLOAD and decision.behind != 1:
        words.append(f"with {counted(decision.behind, 'pass')} to finish")
    return ", ".join(words)


def _done(decision: Decision) -> str:
    match decision.what, decision.subject:
        case What.RECOMPUTE, _:
            return "recomputed"
        case What.UPDATE, _:
            return f"updated on {decision.place}"
        case _, State(kind=kind):
            return f"{'optimizer state' if kind == 'optimizer' else kind} offloaded to {decision.place}"
        case _:
            return f"saved tensors offloaded to {decision.place}"


def _subjects(decision: Decision) -> Iterator[tuple[int, int]]:
    """Yield the layers of a decision, each with the number of a saved tensor, or -1 for the layer itself."""
    match decision.subject:
        case SavedTensors(tensors=tensors):
            yield from tensors
        case Run(start=start, stop=stop) | State(start=start, stop=stop):
            yield from ((layer, -1) for layer in range(start, stop))


def _runs(plan: Plan, names: Sequence[str]) -> Iterator[list[str]]:
    """Yield runs of consecutive layers of the model."""
    wanted = set(names)
    for chosen, run in groupby(plan.profile.layers, key=lambda name: name in wanted):
        if chosen:
            yield [*run]


# ---- Text


def describe_difference(difference: PlanDifference) -> list[Block]:
    """Describe a difference: the costs, the request, a row for each device, and the changes."""
    blocks: list[Block] = ["\n".join([_price(difference), *_time(difference)])]
    if difference.asked:
        blocks.append("Request:\n" + "\n".join(f"  {phrase}" for phrase in difference.asked))
    blocks.append(_devices(difference))
    if difference.changes:
        blocks.append("Changes:\n" + "\n".join(f"  {change}" for change in difference.changes))
    return blocks


def _price(difference: PlanDifference) -> str:
    """Describe the second document's costs relative to the first: memory of the fullest device, and time."""
    before, after = difference.highest_bytes
    told = [
        f"{format_bytes(abs(after - before))} {'more' if after > before else 'less'} on the fullest device"
    ]
    told = told if after != before else ["the same memory on the fullest device"]
    one, two = difference.before_seconds, difference.after_seconds
    if one and two:
        told.append(f"a step that is {_beside(two / one)}")
    nothing = not difference.changes and not difference.asked and before == after and one == two
    return "The two are the same." if nothing else f"The second takes {' and '.join(told)}."


def _beside(ratio: float) -> str:
    """Describe a ratio of times: in percent, or as a factor from 2 on."""
    if ratio >= 2:
        return f"{ratio:.3g} times as long"
    return f"{abs(100 * (ratio - 1)):.1f} % {'longer' if ratio > 1 else 'shorter'}"


def _time(difference: PlanDifference) -> Iterator[str]:
    one, two = difference.before_seconds, difference.after_seconds
    if one is None or two is None:
        return
    rates = ""
    if difference.before_rate and difference.after_rate:
        before, after = map(format_number, (difference.before_rate, difference.after_rate))
        rates = f", {before} and {after} samples per second"
    yield f"A step takes {format_seconds(one)}, then {format_seconds(two)}{rates}."
    if difference.before_busy and difference.after_busy:
        yield (
            f"The busiest device computes {100 * difference.before_busy:.0f} % of the step, then "
            f"{100 * difference.after_busy:.0f} %."
        )


def _devices(difference: PlanDifference) -> Table:
    """Return a row for each device, with the category that changed most."""
    rows = tuple(
        (
            str(one.device),
            "-" if one.before_bytes is None else format_bytes(one.before_bytes),
            "-" if one.after_bytes is None else format_bytes(one.after_bytes),
            _signed(one.changed_bytes),
            _most(one.by_category),
        )
        for one in difference.devices
    )
    title = f"peaks of {counted(len(rows), 'device')}"
    return Table(("device", "first", "second", "change", "most of it"), rows, title=title)


def _most(by_category: dict[str, int]) -> str:
    """Describe the category that changed most, possibly by more than the total."""
    name = max(by_category, key=lambda category: abs(by_category[category]), default="")
    return f"{name} {_signed(by_category[name])}" if name else "-"


def _signed(nbytes: int) -> str:
    return "none" if not nbytes else f"{'+' if nbytes > 0 else '-'}{format_bytes(abs(nbytes))}"
