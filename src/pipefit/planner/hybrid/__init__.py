"""Stages on grids of devices: exact search over the cuts of the model and the degree of every stage."""

from pipefit.planner.hybrid.fastest_plans import Least, fastest
from pipefit.planner.hybrid.search import (
    Hybrid,
    HybridSearch,
    budget_level,
    candidates,
    leanest,
    leanest_split,
    searches,
)

__all__ = [
    "Hybrid",
    "HybridSearch",
    "Least",
    "budget_level",
    "candidates",
    "fastest",
    "leanest",
    "leanest_split",
    "searches",
]
