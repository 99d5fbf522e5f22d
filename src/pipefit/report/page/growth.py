"""Peak against size as a chart: every value that was tried, beside the memory there is, on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log2

from pipefit.fits import Attempt, Fit, named_value
from pipefit.units import format_bytes

_WIDTH, _HEIGHT, _LEFT, _BELOW = 900, 320, 90, 40  # pixels
_MOST_TICKS = 10


def growth(fit: Fit) -> str:
    """An SVG of the peak of the device that limits, over the value, and of that device's memory."""
    tried = sorted(fit.tried, key=lambda attempt: attempt.value)
    across = _Scale([float(attempt.value) for attempt in tried], _LEFT, _WIDTH - 20, fit.grown == "memory")
    sizes = [size for attempt in tried for size in (attempt.need_bytes, attempt.budget_bytes)]
    up = _Scale([float(size) for size in sizes], _HEIGHT - _BELOW, 20, True)
    budget = _line(across, up, [(one.value, one.budget_bytes) for one in tried], "cap")
    peak = _line(across, up, [(one.value, one.need_bytes) for one in tried], "soft-line")
    points = "".join(_point(fit, across, up, one) for one in tried)
    return (
        f'<svg class="growth" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="peak of the '
        f'fullest device over {escape(fit.grown)}, beside its memory">{_levels(up, sizes)}{_values(fit, across, tried)}'
        f"{budget}{peak}{points}</svg>"
    )


class _Scale:
    """From values to pixels between `begin` and `end`, by their logarithms if so asked."""

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
        f"{format_bytes(attempt.need_bytes)} of {format_bytes(attempt.budget_bytes)}, which "
        f"{'fits' if attempt.fits else 'does not fit'}"
    )
    x, y = across(attempt.value), up(attempt.need_bytes)
    kind = "good" if attempt.fits else "bad"
    best = f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="9"/>' if attempt.value == fit.best.value else ""
    return f'{best}<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(told)}</title></circle>'


def _levels(up: _Scale, sizes: Sequence[int]) -> str:
    """Lines at powers of two, a few of them."""
    first, last = min(sizes).bit_length() - 1, max(sizes).bit_length()
    ticks = [1 << power for power in range(first, last + 1, 1 + (last - first) // _MOST_TICKS)]
    inside = [tick for tick in ticks if 12 < up(tick) < _HEIGHT - _BELOW]
    return "".join(
        f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
        f'<text class="soft" x="4" y="{up(tick) + 4:.1f}">{format_bytes(tick)}</text>'
        for tick in inside
    )


def _values(fit: Fit, across: _Scale, tried: Sequence[Attempt]) -> str:
    """The values below the chart, of those that are too close the first; and what they are."""
    shown, last = [], -1e9
    for attempt in tried:
        x = across(attempt.value)
        if x - last > 64:
            shown.append(
                f'<text class="soft" x="{x:.1f}" y="{_HEIGHT - 22}">{named_value(fit.grown, attempt.value)}</text>'
            )
            last = x
    return f'{"".join(shown)}<text x="{_LEFT}" y="{_HEIGHT - 5}">{escape(fit.grown)}</text>'
