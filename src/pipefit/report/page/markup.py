"""Parts of a page as HTML that need no script: figures, bars and legends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from pipefit.schema.trace import CATEGORIES, DeviceTrace, Trace
from pipefit.tables import kept_together
from pipefit.texts import printable
from pipefit.units import format_bytes

_MANY = 16  # devices, of which bars that are alike are folded
_EMPTY = 16  # times what they hold is what devices have of which bars would show nothing


def text(words: str) -> str:
    """Words from outside, safe in HTML."""
    return escape(printable(words))


def _sentence(words: str) -> str:
    """Words as `text`, with figures beside their units however wide the page is."""
    return escape(kept_together(printable(words)))


def head(title: str, verdict: str, where: str, facts: Sequence[tuple[str, str, str]], *, fits: bool) -> str:
    """The top of a page: what it is of, whether it fits, and figures; `where` is HTML."""
    return (
        f'<header><h1>{text(title)} <em class="{"fits" if fits else "over"}">{verdict}</em></h1>{where}'
        f'<dl class="tiles">{tiles(facts)}</dl></header>'
    )


def tiles(facts: Sequence[tuple[str, str, str]]) -> str:
    """Figures that are read first: a name, the figure, and what it is compared with."""
    return "".join(
        f"<div><dt>{text(name)}</dt><dd><b>{text(figure)}</b> <span>{_sentence(beside)}</span></dd></div>"
        for name, figure, beside in facts
    )


def scale(trace: Trace) -> int:
    """The bytes at the end of bars: the largest peak or budget; the largest peak where that is next to nothing."""
    peak = max((device.peak_bytes for device in trace.devices), default=0)
    budget = max((device.budget_bytes for device in trace.devices), default=0)
    return peak if 0 < _EMPTY * peak < budget else max(peak, budget, 1)


def peaks(trace: Trace) -> str:
    """A bar for every device: what fills it at its peak by category, beside its budget.

    Of many devices, those whose bars are that of the one before them are folded away below it.
    """
    largest = scale(trace)
    fewest = 1 if len(trace.devices) > _MANY else len(trace.devices)
    budgets = sorted({device.budget_bytes for device in trace.devices if device.budget_bytes > largest})
    have = " to ".join(map(format_bytes, dict.fromkeys((*budgets[:1], *budgets[-1:]))))
    beyond = f"<p>{_sentence(f'Bars end at {format_bytes(largest)}. Devices have {have}.')}</p>" if budgets else ""
    bars = "".join(_alike(tuple(run), largest, fewest) for _, run in groupby(trace.devices, key=_bar))
    return beyond + bars


def _bar(device: DeviceTrace) -> tuple[object, ...]:
    """What a device's bar shows."""
    return device.budget_bytes, None if device.peak is None else tuple(device.peak.by_category.items())


def _alike(devices: Sequence[DeviceTrace], largest: int, fewest: int) -> str:
    """The bars of devices that are alike; all but the first in a fold, if these are more than `fewest`."""
    first, *others = (_peak(device, largest) for device in devices)
    if len(others) <= fewest:
        return "".join((first, *others))
    to = "and" if len(others) == 2 else "to"
    named = f"devices {devices[1].device} {to} {devices[-1].device} are filled alike"
    return f"{first}<details><summary>{named}</summary>{''.join(others)}</details>"


def _peak(device: DeviceTrace, largest: int) -> str:
    filled = device.peak.by_category if device.peak else {}
    parts = "".join(
        f'<i class="c{CATEGORIES.index(category)}" style="width:{100 * nbytes / largest:.3f}%" '
        f'title="{text(category.value)}: {format_bytes(nbytes)}"></i>'
        for category, nbytes in filled.items()
    )
    budget = device.budget_bytes
    cap = f'<u style="left:{100 * budget / largest:.3f}%" title="budget {format_bytes(budget)}"></u>'
    cap = cap if 0 < budget <= largest else ""
    over = budget and device.peak_bytes > budget
    share = f"{100 * device.peak_bytes / budget:.1f} %" if budget else ""
    at = f" at {text(device.peak.action)}" if device.peak else ""
    return (
        f'<button type="button" class="device" data-device="{device.device}"><span>device {device.device}</span>'
        f'<span class="bar">{parts}{cap}</span><span class="figure{" over" if over else ""}">'
        f"{format_bytes(device.peak_bytes)} <small>{share}{at}</small></span></button>"
    )


def legend(names: Iterable[tuple[str, str]]) -> str:
    """Coloured squares and what they stand for: pairs of a class and a name."""
    return "".join(f'<span><i class="{kind}"></i>{text(name)}</span>' for kind, name in names)
