"""Peak against size, as one HTML file that needs no network: what was tried, and the memory there is."""

from __future__ import annotations

from pipefit.fits import Fit
from pipefit.units import format_bytes


def plot_fit(fit: Fit) -> str:
    """The peak of the fullest device over the value, logarithmic, with its budget and the answer marked.

    About 5 MB, nearly all of it plotly's own script.
    """
    from plotly import graph_objects as go

    values = [attempt.value for attempt in fit.tried]
    peaks = [attempt.need_bytes for attempt in fit.tried]
    budgets = [attempt.budget_bytes for attempt in fit.tried]
    hover_texts = [
        f"{fit.named(a.value)}<br>{a.parameters:,} parameters<br>device {a.device}: {format_bytes(a.need_bytes)} "
        f"of {format_bytes(a.budget_bytes)}<br>{'fits' if a.fits else 'does not fit'}"
        for a in fit.tried
    ]
    colours = ["#2a7f62" if attempt.fits else "#c0392b" for attempt in fit.tried]
    peak = go.Scatter(
        x=values,
        y=peaks,
        name="peak of the fullest device",
        mode="lines+markers",
        line={"color": "#8899a6"},
        marker={"color": colours, "size": 9},
        hovertext=hover_texts,
        hoverinfo="text",
    )
    budget = go.Scatter(x=values, y=budgets, name="its memory", mode="lines", line={"color": "#222", "dash": "dash"})
    figure = go.Figure([peak, budget])
    ticks = _ticks(min(*peaks, *budgets), max(*peaks, *budgets))
    figure.update_layout(
        title=f"{_escaped(fit.best.plan.profile.model)}: {fit.named(fit.best.value)} is the "
        f"{fit.sense} that fits {_escaped(fit.best.plan.cluster.name)}",
        xaxis_title=f"{fit.grown}, bytes" if fit.grown == "memory" else fit.grown,
        yaxis={
            "type": "log",
            "title": "bytes",
            "tickvals": ticks,
            "ticktext": [format_bytes(tick) for tick in ticks],
        },
        template="plotly_white",
    )
    if fit.grown == "memory":
        figure.update_xaxes(type="log")
    return str(figure.to_html(include_plotlyjs=True, full_html=True, div_id="fit"))


def _ticks(low: int, high: int) -> list[int]:
    """Powers of two from below the lowest to above the highest, at most a dozen or so."""
    first, last = max(low, 1).bit_length() - 1, high.bit_length()
    return [1 << power for power in range(first, last + 1, 1 + (last - first) // 12)]


def _escaped(text: str) -> str:
    """Names come from outside, and plotly reads tags in a title."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
