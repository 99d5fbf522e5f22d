"""Charts of a page: what-if controls, traffic on the cluster's links, and peak over size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from html import escape
from json import dumps
from math import log2
from typing import NamedTuple

from pipefit.errors import PipefitError
from pipefit.lowering import step_programs
from pipefit.memory import Costs, StageStorages, message_sizes, moved_by_devices
from pipefit.planner import axes_of, points
from pipefit.schema.actions import COLLECTIVE, COPIES, SENDS, Action, Kind, message_of
from pipefit.schema.decisions import What
from pipefit.schema.devices import Member, MemberKind
from pipefit.schema.fit import Attempt, Fit, named_value
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.simulator import Collected, DeviceReader, exchange_of
from pipefit.tables import kept_together
from pipefit.texts import counted
from pipefit.timing import Hop
from pipefit.units import MIB, format_bytes, format_seconds

# ---- What if: other numbers of microbatches and devices, recomputation and faster links


def _own(plan: Plan) -> str:
    """Describe the plan's own figures for comparison; empty without a prediction."""
    if plan.prediction is None:
        return ""
    pairs = zip(plan.prediction.peak_bytes, plan.cluster.budgets, strict=True)
    peak, budget = max(pairs, key=lambda pair: pair[0] / pair[1])
    moves = any(decision.what is not What.RECOMPUTE for decision in plan.decisions)
    step = format_seconds(plan.prediction.step_seconds)
    shares = any(len(stage.devices) > 1 for stage in plan.stages)
    more = [
        words
        for is_so, words in ((moves, "it offloads tensors"), (shares, "its devices share stages"))
        if is_so
    ]
    return (
        f" This plan needs {format_bytes(peak)} of {format_bytes(budget)} and {step} a "
        f"step{'; ' * bool(more)}{' and '.join(more)}{', unlike the plans below' * bool(more)}."
    )


def lesson(plan: Plan) -> str:
    """Return the section's content: a control for each axis, figures, and the data; empty without a grid."""
    axes = axes_of(plan)
    if axes is None:
        return ""
    try:
        result = points(plan, axes)
    except PipefitError:  # the plan was written directly, with settings that no planner uses
        return ""
    rows = [
        [p.peak_bytes, p.budget_bytes, p.step_seconds, p.samples_per_second, round(p.waiting, 4)]
        for p in result
    ]
    start = (
        sum(count <= plan.training.microbatches for count in axes.microbatches) - 1,
        int(any(decision.what is What.RECOMPUTE for decision in plan.decisions)),
        axes.devices.index(len(plan.stages)) if len(plan.stages) in axes.devices else 0,
        axes.links.index(1.0),
    )
    names = ("microbatches", "recomputation", "devices", "links")
    controls = "".join(
        f'<label>{name} <input type="range" min="0" max="{len(values) - 1}" value="{place}" step="1" '
        f'data-axis="{number}" aria-describedby="whatif"><output></output></label>'
        for number, (name, values, place) in enumerate(zip(names, axes, start, strict=True))
    )
    labels = [list(map(str, axes.microbatches)), list(axes.recompute), list(map(str, axes.devices))]
    labels.append([f"x {factor:g}" for factor in axes.links])
    size = plan.training.microbatch_size // plan.stages[0].grid.data
    data = dumps({"axes": labels, "rows": rows}, separators=(",", ":"))
    return (
        "<p>Each position is a plan for the lowest peak with one device per stage, computed when this page "
        "was made, with microbatches of "
        f"{counted(size, 'sample')}.{kept_together(_own(plan))}</p><div "
        f'class="whatif">{controls}</div><div class="outcome"><span>fullest</span><span class="bar"><i '
        'class="c3" id="whatif-bar"></i><u id="whatif-cap"></u></span><span class="figure" '
        'id="whatif-peak"></span></div><p id="whatif" role="status" aria-live="polite"></p><script '
        f'type="application/json" id="grid">{data}</script>'
    )


# ---- Traffic of a step on the cluster's links: messages, copies, and collectives of replicas
#
# Collectives of tensor-parallel ranks inside of layers are not included.


class Stretch(NamedTuple):
    """The source, target and kind of a traffic between two members of the cluster."""

    source: Member
    target: Member
    what: str  # messages, copies or collectives


def traffic(plan: Plan) -> dict[Stretch, int]:
    """Return the bytes of a step by source, target and kind, in order of first appearance.

    The step is the last of those that differ. Bytes between two stages on one device do not travel.
    """
    program, storages = step_programs(plan)[-1], [StageStorages.of(plan, n) for n in range(len(plan.stages))]
    moved, sizes = moved_by_devices(plan, program), message_sizes(plan, program.placement, storages)
    result = Counter[Stretch]()
    for device, actions in enumerate(program.actions):
        for action in actions:
            if action.wait:
                continue
            if action.kind in SENDS:
                message = message_of(device, action, program.placement)
                stretch = Stretch(Member.device(device), Member.device(message.target), "messages")
                result[stretch] += sizes(message)
            elif action.kind in COPIES and action.place is not None:
                _add_copy(result, plan, device, action, moved[device](action))
    for hop in _collectives(plan, program):
        stretch = Stretch(Member.device(hop.source), Member.device(hop.target), "collectives")
        result[stretch] += round(hop.nbytes)
    return {
        stretch: nbytes for stretch, nbytes in result.items() if nbytes and stretch.source != stretch.target
    }


def _collectives(plan: Plan, program: Program) -> Iterator[Hop]:
    """Yield the hops of every collective, by the algorithm of its predicted seconds."""
    result: dict[tuple[Hashable, int], tuple[Collected, list[int]]] = {}
    costs, moved = Costs.of(plan), moved_by_devices(plan, program)
    for device, actions in enumerate(program.actions):
        stages = {n: costs.of_device(plan, n, device, plan.stages[n].devices) for n in plan.stages_of(device)}
        reader = DeviceReader(device, program, plan.cluster, stages, moved[device])
        for begun in (
            reader.collected(action) for action in actions if action.kind in COLLECTIVE and not action.wait
        ):
            result.setdefault((begun.what, begun.turn), (begun, []))[1].append(device)
    for begun, members in result.values():
        yield from exchange_of(plan.cluster, members, begun).hops


def _add_copy(found: Counter[Stretch], plan: Plan, device: int, action: Action, nbytes: int) -> None:
    """Add the bytes of a copy between the device and each member of its place."""
    assert action.place is not None
    here, host = Member.device(device), plan.cluster.devices[device].host
    for member, share in action.place.split(nbytes):
        there = member.at(host)
        pair = (here, there) if action.kind is Kind.OFFLOAD else (there, here)
        found[Stretch(*pair, "copies")] += share


# ---- Picture of the cluster: devices, hosts and their traffic; only hosts if there are many devices

MOST = 16  # boxes in a row: more devices are drawn as hosts, more hosts only listed in a table
_BOX, _GAP = 76, 40  # pixels
_ABOVE, _BELOW = 36, 170  # vertical centres of hosts and devices


def topology(plan: Plan, flows: dict[Stretch, int]) -> str:
    """Return an SVG with a box for every device and its stages, and an arrow for every traffic.

    Many devices are replaced by their hosts. The SVG is empty for larger clusters.
    """
    row = [Member.device(number) for number in range(len(plan.cluster.devices))]
    if len(row) > MOST:
        flows, row = (
            _between_hosts(plan, flows),
            [Member.host(number) for number in range(len(plan.cluster.hosts))],
        )
    if not flows or len(row) > MOST:
        return ""
    uses_memory = any(stretch.what == "copies" for stretch in flows)
    spots = _spots(plan, row, flows, _BELOW if uses_memory else _ABOVE)
    width = max(x for x, _ in spots.values()) + _BOX // 2 + 20
    lowest = max(
        (abs(spots[s.source][0] - spots[s.target][0]) for s in flows if s.what != "copies"), default=0
    )
    height = spots[row[0]][1] + 60 + lowest // 4
    drawn = [_arrow(spots, stretch, nbytes) for stretch, nbytes in flows.items()]
    boxes = [_box(plan, member, spot) for member, spot in spots.items()]
    return (
        f'<svg class="topology" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="devices and hosts, and the bytes that pass between them in a step">{_HEADS}'
        f"{''.join(drawn)}{''.join(boxes)}</svg>"
    )


_HEADS = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z"/></marker></defs>'
)


def _between_hosts(plan: Plan, flows: dict[Stretch, int]) -> dict[Stretch, int]:
    """Return the traffic between hosts instead of devices."""
    result = Counter[Stretch]()
    for (source, target, what), nbytes in flows.items():
        ends = [
            Member.host(plan.cluster.devices[member.number or 0].host)
            if member.kind is MemberKind.DEVICE
            else member
            for member in (source, target)
        ]
        if ends[0] != ends[1] and what != "copies":
            result[Stretch(ends[0], ends[1], what)] += nbytes
    return dict(result)


def _spots(
    plan: Plan, row: Sequence[Member], flows: dict[Stretch, int], level: int
) -> dict[Member, tuple[int, int]]:
    """Return the middle of every box: those of a row at `level`, and above it the hosts and disks in use."""
    left = _BOX // 2 + 20
    below = {member: (left + number * (_BOX + _GAP), level) for number, member in enumerate(row)}
    used = {member for stretch in flows for member in stretch[:2]} - {*row}
    over: dict[Member, tuple[int, int]] = {}
    for member in sorted(used, key=lambda one: (one.kind.value != "host", one.number or 0)):
        near = [below[d][0] for d in row if plan.cluster.devices[d.number or 0].host == member.number]
        middle = sum(near) // len(near) if near else left
        over[member] = (middle + (0 if member.kind is MemberKind.HOST else _BOX + _GAP), _ABOVE)
    return over | below


def _box(plan: Plan, member: Member, spot: tuple[int, int]) -> str:
    x, y = spot[0] - _BOX // 2, spot[1] - 22
    stages = [str(n) for n, stage in enumerate(plan.stages) if member.number in stage.devices]
    is_device = member.kind is MemberKind.DEVICE
    under = (
        f"stage {', '.join(stages)}"
        if is_device and stages
        else "idle"
        if is_device
        else _devices(plan, member)
    )
    text = f'<text x="{spot[0]}" y="{spot[1] - (4 if under else -4)}">{escape(str(member))}</text>'
    more = f'<text class="small" x="{spot[0]}" y="{spot[1] + 13}">{escape(under)}</text>' if under else ""
    kind = member.kind.value
    return f'<g class="{kind}"><rect x="{x}" y="{y}" width="{_BOX}" height="44" rx="6"/>{text}{more}</g>'


def _devices(plan: Plan, member: Member) -> str:
    """Format the number of a host's devices, if they are not drawn."""
    count = sum(device.host == member.number for device in plan.cluster.devices)
    drawn = len(plan.cluster.devices) <= MOST or member.kind is not MemberKind.HOST
    return "" if drawn else counted(count, "device")


def _arrow(spots: dict[Member, tuple[int, int]], stretch: Stretch, nbytes: int) -> str:
    """Return a curve between boxes, wider for more bytes; both directions of a pair bend to different
    sides.
    """
    (x0, y0), (x1, y1) = spots[stretch.source], spots[stretch.target]
    width = max(1.0, min(9.0, log2(nbytes / MIB + 1)))
    if y0 == y1:  # two of a row: messages and sums go below, lent memory above
        side = -1 if stretch.what == "copies" else 1
        away = x1 > x0
        bend = side * (26 + 0.22 * abs(x1 - x0) + (0 if away else 20))
        start, end = y0 + side * 22, y1 + side * 22
        shift = 12 if away else -12
        path = f"M{x0 + shift} {start}Q{(x0 + x1) / 2} {start + bend * 1.6:.0f} {x1 - shift} {end}"
    else:
        away = y1 < y0
        shift = -10 if away else 10
        path = f"M{x0 + shift} {y0 + (-22 if away else 22)}L{x1 + shift} {y1 + (22 if away else -22)}"
    told = f"{stretch.source} to {stretch.target}: {format_bytes(nbytes)} of {stretch.what} a step"
    return (
        f'<path class="{stretch.what}" d="{path}" stroke-width="{width:.1f}" marker-end="url(#head)">'
        f"<title>{escape(told)}</title></path>"
    )


# ---- Peak over size, on a logarithmic scale

_WIDTH, _HEIGHT, _LEFT, _GROWTH_BELOW = 900, 320, 90, 40  # pixels
_MOST_TICKS = 10


def growth(fit: Fit) -> str:
    """Return an SVG of the limiting device's peak over the value, and of its memory."""
    tried = sorted(fit.tried, key=lambda attempt: attempt.value)
    across = _Scale([float(attempt.value) for attempt in tried], _LEFT, _WIDTH - 20, fit.grown == "memory")
    sizes = [size for attempt in tried for size in (attempt.need_bytes, attempt.budget_bytes)]
    up = _Scale([float(size) for size in sizes], _HEIGHT - _GROWTH_BELOW, 20, True)
    budget = _line(across, up, [(one.value, one.budget_bytes) for one in tried], "cap")
    peak = _line(across, up, [(one.value, one.need_bytes) for one in tried], "soft-line")
    points = "".join(_point(fit, across, up, one) for one in tried)
    return (
        f'<svg class="growth" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="peak '
        f"of the fullest device over {escape(fit.grown)}, and its "
        f'memory">{_levels(up, sizes)}{_values(fit, across, tried)}{budget}{peak}{points}</svg>'
    )


class _Scale:
    """A map from values, or their logarithms, to pixels between `begin` and `end`."""

    def __init__(self, values: Sequence[float], begin: float, end: float, logarithmic: bool) -> None:
        self._logarithmic, self._begin = logarithmic, begin
        low, high = self._of(min(values)), self._of(max(values))
        spare = 0.06 * (high - low) or 0.5
        self._low, self._factor = low - spare, (end - begin) / (high - low + 2 * spare)

    def _of(self, value: float) -> float:
        return log2(max(value, 1.0)) if self._logarithmic else value

    def __call__(self, value: float) -> float:
        return self._begin + (self._of(value) - self._low) * self._factor


def _line(across: _Scale, up: _Scale, points: Sequence[tuple[int, int]], kind: str) -> str:
    path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
    return f'<polyline class="{kind}" fill="none" points="{path}"/>'


def _point(fit: Fit, across: _Scale, up: _Scale, attempt: Attempt) -> str:
    told = (
        f"{fit.named(attempt.value)}, {attempt.parameters:,} parameters: device {attempt.device} needs "
        f"{format_bytes(attempt.need_bytes)} of {format_bytes(attempt.budget_bytes)}: {fit.verdict(attempt)}"
    )
    x, y = across(attempt.value), up(attempt.need_bytes)
    kind = "good" if attempt.fits else "bad"
    best = (
        f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="9"/>' if attempt.value == fit.best.value else ""
    )
    return (
        f'{best}<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(told)}</title></circle>'
    )


def _levels(up: _Scale, sizes: Sequence[int]) -> str:
    """Return a few lines at powers of two."""
    first, last = min(sizes).bit_length() - 1, max(sizes).bit_length()
    ticks = [1 << power for power in range(first, last + 1, 1 + (last - first) // _MOST_TICKS)]
    inside = [tick for tick in ticks if 12 < up(tick) < _HEIGHT - _GROWTH_BELOW]
    return "".join(
        f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
        f'<text class="soft" x="4" y="{up(tick) + 4:.1f}">{format_bytes(tick)}</text>'
        for tick in inside
    )


def _values(fit: Fit, across: _Scale, tried: Sequence[Attempt]) -> str:
    """Return the labels of values below the chart and the name of the axis.

    Labels too close to a previous one are omitted.
    """
    shown, last = [], -1e9
    for attempt in tried:
        x = across(attempt.value)
        if x - last > 64:
            label = named_value(fit.grown, attempt.value)
            shown.append(f'<text class="soft" x="{x:.1f}" y="{_HEIGHT - 22}">{label}</text>')
            last = x
    return f'{"".join(shown)}<text x="{_LEFT}" y="{_HEIGHT - 5}">{escape(fit.grown)}</text>'
