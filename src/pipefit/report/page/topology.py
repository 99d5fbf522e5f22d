"""The cluster as a picture: its devices and hosts, and what a step sends from one to the other.

Of many devices it has only the hosts, and what passes between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from math import log2

from pipefit.places import Member, MemberKind
from pipefit.plans import Plan
from pipefit.report.page.traffic import Stretch
from pipefit.texts import counted
from pipefit.units import MIB, format_bytes

MOST = 16  # boxes in a row: devices, of more of them hosts, and more of these are told in a table alone
_BOX, _GAP = 76, 40  # pixels
_ABOVE, _BELOW = 36, 170  # where the middles of hosts and of devices are


def topology(plan: Plan, flows: dict[Stretch, int]) -> str:
    """An SVG of a box for every device, with its stages, and an arrow for every stretch that bytes pass; of hosts where
    there are many devices; empty for clusters that are too large for a picture.
    """
    row = [Member.device(number) for number in range(len(plan.cluster.devices))]
    if len(row) > MOST:
        flows, row = _between_hosts(plan, flows), [Member.host(number) for number in range(len(plan.cluster.hosts))]
    if not flows or len(row) > MOST:
        return ""
    uses_memory = any(stretch.what == "copies" for stretch in flows)
    spots = _spots(plan, row, flows, _BELOW if uses_memory else _ABOVE)
    width = max(x for x, _ in spots.values()) + _BOX // 2 + 20
    lowest = max((abs(spots[s.source][0] - spots[s.target][0]) for s in flows if s.what != "copies"), default=0)
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
    """What the devices of one host send to those of another."""
    found = Counter[Stretch]()
    for (source, target, what), nbytes in flows.items():
        ends = [
            Member.host(plan.cluster.devices[one.number or 0].host) if one.kind is MemberKind.DEVICE else one
            for one in (source, target)
        ]
        if ends[0] != ends[1] and what != "copies":
            found[Stretch(ends[0], ends[1], what)] += nbytes
    return dict(found)


def _spots(plan: Plan, row: Sequence[Member], flows: dict[Stretch, int], level: int) -> dict[Member, tuple[int, int]]:
    """The middle of every box: those of a row at `level`, and over it the hosts and disks that are used."""
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
    under = f"stage {', '.join(stages)}" if is_device and stages else "idle" if is_device else _devices(plan, member)
    text = f'<text x="{spot[0]}" y="{spot[1] - (4 if under else -4)}">{escape(str(member))}</text>'
    more = f'<text class="small" x="{spot[0]}" y="{spot[1] + 13}">{escape(under)}</text>' if under else ""
    kind = member.kind.value
    return f'<g class="{kind}"><rect x="{x}" y="{y}" width="{_BOX}" height="44" rx="6"/>{text}{more}</g>'


def _devices(plan: Plan, member: Member) -> str:
    """How many devices a host has, where they are not drawn."""
    count = sum(device.host == member.number for device in plan.cluster.devices)
    drawn = len(plan.cluster.devices) <= MOST or member.kind is not MemberKind.HOST
    return "" if drawn else counted(count, "device")


def _arrow(spots: dict[Member, tuple[int, int]], stretch: Stretch, nbytes: int) -> str:
    """A curve from box to box, wider the more bytes; both directions of a pair bend to different sides."""
    (x0, y0), (x1, y1) = spots[stretch.source], spots[stretch.target]
    width = max(1.0, min(9.0, log2(nbytes / MIB + 1)))
    if y0 == y1:  # two of a row: messages and sums go below, memory that is lent above
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
