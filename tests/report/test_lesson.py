"""Controls of a page: each position shows the figures of a plan."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product

import pytest

from pipefit.planner import axes_of, points
from pipefit.planner import plan as planned
from pipefit.report.page import page
from pipefit.report.page.charts import _own, lesson
from pipefit.schema.decisions import Decision, State, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid
from pipefit.schema.plan import Plan, Prediction
from pipefit.simulator import simulate
from pipefit.tables import kept_together
from pipefit.units import format_bytes, format_seconds
from support.browser import Opener
from support.pipelines import equal_profile, make_cluster, make_plan, random_profile

PLAN = make_plan(random_profile(6), (2, 2, 2), microbatches=4)


def grid_of(plan: Plan) -> dict[str, list[list[float]]]:
    """Return the data of a page's controls."""
    return grid_in(lesson(plan))


def grid_in(text: str) -> dict[str, list[list[float]]]:
    """Return the data of the controls in a page's text."""
    found = re.search(r'id="grid">(.*?)</script>', text)
    assert found is not None
    data: dict[str, list[list[float]]] = json.loads(found[1])
    return data


def test_every_position_is_a_plan_of_lowest_peak_that_is_simulated() -> None:
    """Peaks and seconds match at four corners and in the middle, with unchanged links or another rate."""
    axes = axes_of(PLAN)
    assert axes is not None
    found = dict(zip(product(*axes), points(PLAN, axes), strict=True))
    for choice in ((1, "never", 1, 1.0), (4, "never", 3, 0.25), (4, "always", 2, 4.0), (16, "never", 3, 1.0)):
        count, recompute, devices, factor = choice
        made = planned(
            PLAN.profile, PLAN.cluster, batch_size=count * PLAN.training.microbatch_size, microbatches=count,
            schedule=PLAN.training.schedule, recompute=recompute, stages=devices, planner="exact", data=1, tensor=1,
            allow_infeasible=True,
        )  # fmt: skip
        links = tuple(
            replace(link, bytes_per_second=factor * link.bytes_per_second) for link in PLAN.cluster.links
        )
        trace = simulate(replace(made, cluster=replace(PLAN.cluster, links=links)))
        assert found[choice].peak_bytes == max(trace.peak_bytes)
        assert found[choice].step_seconds == trace.step_seconds[-1]
        assert found[choice].samples_per_second * trace.step_seconds[-1] == pytest.approx(
            made.training.batch_size
        )


def test_more_microbatches_leave_less_waiting() -> None:
    """The bubble of a pipeline shrinks with more microbatches."""
    axes = axes_of(PLAN)
    assert axes is not None
    found = dict(zip(product(*axes), points(PLAN, axes), strict=True))
    waits = [found[count, "never", 3, 1.0].waiting for count in axes.microbatches]
    assert waits == sorted(waits, reverse=True) and waits[0] > waits[-1]


def test_the_grid_has_the_plans_own_place_and_a_row_for_each_position() -> None:
    """Controls start at the plan's position; a plan with an asynchronous schedule is without a grid."""
    data = grid_of(PLAN)
    assert len(data["rows"]) == len(list(product(*data["axes"])))
    assert [axis[place] for axis, place in zip(data["axes"], places_of(PLAN), strict=True)] == [
        "4",
        "never",
        "3",
        "x 1",
    ]
    assert axes_of(make_plan(random_profile(6), (3, 3), schedule="pipedream")) is None
    assert "<h2>Explore other plans" not in page(simulate(PLAN))


def test_a_model_of_many_layers_has_controls() -> None:
    """The controls offer the same numbers of microbatches as for a small model."""
    axes = axes_of(make_plan(equal_profile(300), (150, 150), microbatches=4))
    assert axes is not None and axes.microbatches == (1, 4, 16) and axes.devices == (1, 2)


def test_a_plan_of_replicas_has_the_grid_of_what_one_of_them_computes() -> None:
    """Microbatches have the size of a local batch, and controls start at the number of devices that equals
    the stages.
    """
    costs = equal_profile(6)
    (one,) = costs.measurements
    both = replace(costs, measurements=(one, replace(one, microbatch_size=2)))
    made = make_plan(costs, (3, 3), cluster=make_cluster(4), microbatches=4)
    stages = tuple(
        replace(stage, grid=Grid(devices=(2 * n, 2 * n + 1), data=2)) for n, stage in enumerate(made.stages)
    )
    training = replace(made.training, batch_size=8)
    sliced = replace(made, profile=both, stages=stages, training=training, prediction=None)
    assert sliced.training.microbatch_size == 2 and sliced.is_sliced
    axes = axes_of(sliced)
    assert axes is not None
    found = dict(zip(product(*axes), points(sliced, axes), strict=True))
    alone = planned(costs, make_cluster(4), batch_size=4, microbatches=4, stages=2, data=1, planner="exact")
    trace = simulate(alone)
    assert found[4, "never", 2, 1.0][0] == max(trace.peak_bytes)
    assert found[4, "never", 2, 1.0].step_seconds == trace.step_seconds[-1]
    known = replace(sliced, prediction=Prediction(peak_bytes=(1,) * 4, step_seconds=1.0))
    assert "a step; its devices share stages, unlike the plans below." in _own(known)
    assert "with microbatches of 1 sample." in lesson(sliced)


def test_the_plans_own_figures_stand_beside_the_grid() -> None:
    """The page has the plan's peak, budget and step, and says that it offloads tensors; controls start at the
    nearest position.
    """
    made = planned(
        PLAN.profile,
        PLAN.cluster,
        batch_size=6,
        microbatches=6,
        stages=3,
        recompute="always",
        planner="exact",
    )
    assert made.prediction is not None
    peak, budget = max(
        zip(made.prediction.peak_bytes, made.cluster.budgets, strict=True), key=lambda one: one[0] / one[1]
    )
    step = format_seconds(made.prediction.step_seconds)
    assert f"This plan needs {format_bytes(peak)} of {format_bytes(budget)} and {step} a step." in _own(made)
    text = lesson(made)
    assert kept_together(_own(made)) in text
    assert "always" in [
        axis[place] for axis, place in zip(grid_in(text)["axes"], places_of(made), strict=True)
    ]
    moved = Decision(stage=0, subject=State(start=0, stop=1, kind="optimizer"), what=What.OFFLOAD,
                     place=parse_place("host0"))  # fmt: skip
    assert "it offloads tensors, unlike the plans below." in _own(replace(made, decisions=(moved,)))
    many = replace(made, training=replace(made.training, batch_size=4000, microbatches=4000), prediction=None)
    axes = axes_of(many)
    assert axes is not None and axes.microbatches[places_of(many)[0]] == 16


def places_of(plan: Plan) -> list[int]:
    """Return the initial positions of the controls."""
    return [int(value) for value in re.findall(r'value="(\d+)"', lesson(plan))]


def test_controls_are_labelled_and_reached_by_the_keyboard() -> None:
    """Each is a native control within its label, and its output is announced."""
    text = lesson(PLAN)
    assert len(re.findall(r'<label>[a-z]+ <input type="range"', text)) == 4
    assert 'role="status" aria-live="polite"' in text


def test_a_browser_moves_the_controls(opened: Opener) -> None:
    """A change of each control shows the matching row of the grid, without errors."""
    at = opened(page(PLAN))
    texts = at.evaluate("""() => {
      const told = [], say = () => told.push(document.getElementById("whatif").textContent);
      say();
      for (const control of document.querySelectorAll("[data-axis]")) {
        control.value = control.value === control.max ? "0" : control.max;
        control.dispatchEvent(new Event("input"));
        say();
      }
      return told;
    }""")
    assert len(texts) == 5 and all("samples per second" in text for text in texts)
    assert len(set(texts)) >= 4 and at.complaints == []
