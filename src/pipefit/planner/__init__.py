"""Planners: from a profile, a cluster and a training to a plan. Call `plan`."""

from pipefit.planner.baselines.alpa import alpa
from pipefit.planner.baselines.bisection import bisection
from pipefit.planner.baselines.capture import capture
from pipefit.planner.baselines.mcap import additive, bayesian, best_split, mcap_bf, mcap_bo, true_peaks
from pipefit.planner.baselines.mpress import mpress
from pipefit.planner.baselines.simple import exhaustive, first_last, parameters, time, uniform
from pipefit.planner.bounds import step_bound
from pipefit.planner.closed_forms.ranges import Ranges
from pipefit.planner.closed_forms.surroundings import surroundings
from pipefit.planner.driver import explained, solved, unexplained
from pipefit.planner.exact import exact
from pipefit.planner.joint import exact_in_time, joint
from pipefit.planner.lean import ALL_AWAY, STATE_AWAY, at_hosts, lean, split_without_state
from pipefit.planner.neighbours import Simulations
from pipefit.planner.open_choices import (
    Profiles,
    by_distance,
    check_first,
    microbatch_sizes,
    sizes_of,
    training_of,
    with_slices,
)
from pipefit.planner.options import Means, PlanArguments, PlanOptions
from pipefit.planner.plans import ON_RUNS, PLANNERS, Answer, answered, check_planner, plan, plan_again
from pipefit.planner.problem import (
    ON_GRIDS,
    Degree,
    Planner,
    PlannerResult,
    Question,
    Split,
    changed_by_replicas,
    check_degrees,
    plan_of,
)
from pipefit.planner.what_if import Axes, Remedy, axes_of, points, remedies

__all__ = [
    "ALL_AWAY",
    "ON_GRIDS",
    "ON_RUNS",
    "PLANNERS",
    "STATE_AWAY",
    "Answer",
    "Axes",
    "Degree",
    "Means",
    "PlanArguments",
    "PlanOptions",
    "Planner",
    "PlannerResult",
    "Profiles",
    "Question",
    "Ranges",
    "Remedy",
    "Simulations",
    "Split",
    "additive",
    "alpa",
    "answered",
    "at_hosts",
    "axes_of",
    "bayesian",
    "best_split",
    "bisection",
    "by_distance",
    "capture",
    "changed_by_replicas",
    "check_degrees",
    "check_first",
    "check_planner",
    "exact",
    "exact_in_time",
    "exhaustive",
    "explained",
    "first_last",
    "joint",
    "lean",
    "mcap_bf",
    "mcap_bo",
    "microbatch_sizes",
    "mpress",
    "parameters",
    "plan",
    "plan_again",
    "plan_of",
    "points",
    "remedies",
    "sizes_of",
    "solved",
    "split_without_state",
    "step_bound",
    "surroundings",
    "time",
    "training_of",
    "true_peaks",
    "unexplained",
    "uniform",
    "with_slices",
]
