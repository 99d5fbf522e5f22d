"""Tables, figures and the page of the comparison with published measurements."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import log10
from typing import Any

Record = Mapping[str, Any]  # what `__main__.record` returns for a row

MEMORY = ("allocated", "reserved", "used")


def over(record: Record, what: str) -> float | None:
    """Return the predicted figure above the measured one, as a share of that; None if one is missing."""
    measured, predicted = record["measured"].get(what), record["predicted"].get(what)
    return predicted / measured - 1 if measured and predicted else None


def errors(records: Iterable[Record], what: str) -> list[float]:
    """Return the errors of all records that have this figure, with sign."""
    return [error for record in records if (error := over(record, what)) is not None]


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value below which this part of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def summary(found: Sequence[float]) -> dict[str, float]:
    """Return the count, median and 90 and 95 % quantile of absolute errors, and the median with sign."""
    sizes = [abs(error) for error in found]
    return {
        "rows": len(found),
        "median": statistics.median(sizes),
        "of 90 %": quantile(sizes, 0.9),
        "of 95 %": quantile(sizes, 0.95),
        "signed median": statistics.median(found),
        "lowest": min(found),
        "highest": max(found),
    }


def grouped(
    records: Iterable[Record], by: Callable[[Record], str], what: str
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the summaries of groups, in alphabetical order."""
    groups = defaultdict(list)
    for record in records:
        if (error := over(record, what)) is not None:
            groups[by(record)].append(error)
    for name in sorted(groups):
        yield name, summary(groups[name])


def refused(records: Iterable[Record]) -> list[tuple[str, int]]:
    """Return the reasons for rows without a prediction, the most frequent first."""
    return Counter(record["refused"] for record in records if record["refused"]).most_common()


def fits(records: Iterable[Record]) -> dict[str, dict[str, int]]:
    """Return, by source, how many statements about fitting are right: `fits`, and `does not` where it ran out."""
    result: dict[str, dict[str, int]] = {}
    for record in records:
        for name in ("fits", "next"):
            said, predicted = record["measured"].get(name), record["predicted"].get(name)
            if said is None or predicted is None:
                continue
            counts = result.setdefault(record["source"], {"right": 0, "wrong": 0})
            counts["right" if said == predicted else "wrong"] += 1
    return result


def tau(records: Sequence[Record], what: str = "seconds", *, apart: float = 0.0) -> tuple[float, int] | None:
    """Return Kendall's tau of different plans of one model with one batch on equal devices, and the number of pairs.

    The figures of a pair differ by more than a share `apart` of the smaller one.
    """
    concordant = pairs = 0
    groups = defaultdict(list)
    for record in records:
        if over(record, what) is not None:
            found = record["measured"][what], record["predicted"][what]
            groups[tuple(record["job"])].append((record["plan"], *found))
    for group in groups.values():
        for (plan, one, mine), (another, other, its) in combinations(group, 2):
            if plan != another and max(one, other) > (1 + apart) * min(one, other):
                pairs += 1
                concordant += (one < other) == (mine < its) and mine != its
    return (2 * concordant / pairs - 1, pairs) if pairs else None


def percent(share: float) -> str:
    """Format a share with sign."""
    return f"{100 * share:+.1f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def summaries(title: str, groups: Iterable[tuple[str, dict[str, float]]]) -> str:
    """Return the table of summaries."""
    rows = [
        (name, int(s["rows"]), f"{100 * s['median']:.1f} %", f"{100 * s['of 90 %']:.1f} %", percent(s["lowest"]),
         percent(s["highest"]))
        for name, s in groups
    ]  # fmt: skip
    return table((title, "rows", "median error", "90 % within", "lowest", "highest"), rows)


def worst(records: Iterable[Record], what: str, count: int = 10) -> str:
    """Return the table of the largest errors."""
    known = [record for record in records if over(record, what) is not None]
    known.sort(key=lambda record: -abs(over(record, what) or 0))
    rows = [
        (r["id"], r["model"], r["plan"], f"{r['measured'][what]:.4g}", f"{r['predicted'][what]:.4g}",
         percent(over(r, what) or 0))
        for r in known[:count]
    ]  # fmt: skip
    return table(("row", "model", "plan", "measured", "predicted", "error"), rows)


# ---- Scatter plots

_COLORS = (
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#17becf",
)
_WIDTH, _HEIGHT, _EDGE = 560, 420, 60


def scatter(records: Iterable[Record], whats: Sequence[str], title: str, unit: float) -> str:
    """Return an SVG with predicted over measured figures on logarithmic axes, colored by source."""
    points = [
        (record["source"], record["measured"][what] / unit, record["predicted"][what] / unit)
        for record in records
        for what in whats
        if over(record, what) is not None
    ]
    if not points:
        return ""
    figures = [figure for _, *both in points for figure in both]
    low, high = log10(min(figures)) - 0.05, log10(max(figures)) + 0.05
    side = _HEIGHT - 2 * _EDGE

    def at(value: float) -> float:
        return (log10(value) - low) / (high - low) * side

    colors = dict(zip(sorted({source for source, *_ in points}), _COLORS * 3, strict=False))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_EDGE}" y="24" font-size="14">{title}</text>',
        f'<rect x="{_EDGE}" y="{_EDGE}" width="{side}" height="{side}" fill="none" stroke="#888"/>',
        f'<line x1="{_EDGE}" y1="{_EDGE + side}" x2="{_EDGE + side}" y2="{_EDGE}" stroke="#888"/>',
        f'<text x="{_EDGE + side / 2 - 30:.0f}" y="{_HEIGHT - 18}">measured</text>',
        f'<text x="14" y="{_HEIGHT / 2:.0f}" transform="rotate(-90 14 {_HEIGHT / 2:.0f})">predicted</text>',
    ]
    for power in range(int(low) - 1, int(high) + 2):
        for factor in (1, 2, 5):
            value = factor * 10.0**power
            if low <= log10(value) <= high:
                x, y = _EDGE + at(value), _EDGE + side - at(value)
                parts.append(f'<text x="{x - 6:.0f}" y="{_EDGE + side + 15}">{value:g}</text>')
                parts.append(f'<text x="{_EDGE - 30}" y="{y + 4:.0f}">{value:g}</text>')
    for source, measured, predicted in points:
        x, y = _EDGE + at(measured), _EDGE + side - at(predicted)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colors[source]}" fill-opacity="0.6"/>'
        )
    for number, (source, color) in enumerate(colors.items()):
        y = _EDGE + 14 * number + 8
        parts.append(f'<circle cx="{_EDGE + side + 18}" cy="{y - 4}" r="4" fill="{color}"/>')
        parts.append(f'<text x="{_EDGE + side + 28}" y="{y}">{source}</text>')
    return "\n".join((*parts, "</svg>")) + "\n"
