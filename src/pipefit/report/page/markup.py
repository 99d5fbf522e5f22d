"""Parts of a page as HTML without a script: figures, bars and legends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from pipefit.schema.trace import CATEGORIES, DeviceTrace, Trace
from pipefit.tables import Block, html, kept_together
from pipefit.texts import counted, printable
from pipefit.units import format_bytes

_MANY = 16  # devices from which on equal bars are folded
_MOST_ROWS = 10  # of a table that is shown unfolded
_EMPTY = 16  # bars show nothing if devices have this multiple of the bytes that they hold


def text(words: str) -> str:
    """Escape words from outside for HTML."""
    return escape(printable(words))


def sentence(words: str) -> str:
    """Escape words as `text`, without line breaks between figures and units."""
    return escape(kept_together(printable(words)))


def head(verdict: str, where: str, facts: Sequence[tuple[str, str, str]], *, fits: bool) -> str:
    """Return the top of a page: the verdict, its subject and figures; `where` is HTML."""
    return (
        f'<header><h1 class="{"fits" if fits else "over"}">{sentence(verdict)}</h1>{where}'
        f'<dl class="tiles">{tiles(facts)}</dl></header>'
    )


def tiles(facts: Sequence[tuple[str, str, str]]) -> str:
    """Return the main figures: name, figure, and comparison of each."""
    return "".join(
        f"<div><dt>{text(name)}</dt><dd><b>{text(figure)}</b> <span>{sentence(beside)}</span></dd></div>"
        for name, figure, beside in facts
    )


def scale(trace: Trace) -> int:
    """Return the bytes at the end of bars: the largest peak or budget.

    If the largest peak is tiny compared with the budgets, it is the scale.
    """
    peak = max((device.peak_bytes for device in trace.devices), default=0)
    budget = max((device.budget_bytes for device in trace.devices), default=0)
    return peak if 0 < _EMPTY * peak < budget else max(peak, budget, 1)


def peaks(trace: Trace) -> str:
    """Return a bar for every device: its peak by category, next to its budget.

    With many devices, bars that equal the previous one are folded.
    """
    largest = scale(trace)
    fewest = 1 if len(trace.devices) > _MANY else len(trace.devices)
    budgets = sorted({device.budget_bytes for device in trace.devices if device.budget_bytes > largest})
    have = " to ".join(map(format_bytes, dict.fromkeys((*budgets[:1], *budgets[-1:]))))
    beyond = (
        f"<p>{sentence(f'Bars end at {format_bytes(largest)}. Devices have {have}.')}</p>" if budgets else ""
    )
    bars = "".join(_alike(tuple(run), largest, fewest) for _, run in groupby(trace.devices, key=_bar))
    return beyond + bars


def _bar(device: DeviceTrace) -> tuple[object, ...]:
    """Return a key of a device's bar."""
    return device.budget_bytes, None if device.peak is None else tuple(device.peak.by_category.items())


def _alike(devices: Sequence[DeviceTrace], largest: int, fewest: int) -> str:
    """Return equal bars; all but the first in a fold, if these are more than `fewest`."""
    first, *others = (_peak(device, largest) for device in devices)
    if len(others) <= fewest:
        return "".join((first, *others))
    to = "and" if len(others) == 2 else "to"
    named = f"devices {devices[1].device} {to} {devices[-1].device} have the same memory"
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
        f'<button type="button" class="device" data-device="{device.device}">'
        f"<span>device {device.device}</span>"
        f'<span class="bar">{parts}{cap}</span><span class="figure{" over" if over else ""}">'
        f"{format_bytes(device.peak_bytes)} <small>{share}{at}</small></span></button>"
    )


def folded(block: Block) -> str:
    """Return a block as HTML; a table of more than ten rows is folded under its title or size."""
    if isinstance(block, str) or len(block.rows) <= _MOST_ROWS:
        return html([block])
    summary = f"{f'{block.title}, ' if block.title else ''}{counted(len(block.rows), 'row')}"
    return f'<details><summary>{text(summary)}</summary><div class="wide">{html([block])}</div></details>'


def legend(names: Iterable[tuple[str, str]]) -> str:
    """Return coloured squares with their meanings, from pairs of a class and a name."""
    return "".join(f'<span><i class="{kind}"></i>{text(name)}</span>' for kind, name in names)
