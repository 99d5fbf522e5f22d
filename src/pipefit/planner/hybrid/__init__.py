"""Stages on grids of devices: the exact search over where the model is cut and the degree of every stage."""

from pipefit.planner.hybrid.search import (
    Hybrid,
    Search,
    budget_level,
    candidates,
    fastest,
    leanest,
    least_seconds,
    lowest_peak,
)

__all__ = [
    "Hybrid",
    "Search",
    "budget_level",
    "candidates",
    "fastest",
    "leanest",
    "least_seconds",
    "lowest_peak",
]
