"""The controls of a page: what each position says is a plan's."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from browser import browsed
from pipefit.planner import plan as planned
from pipefit.plans import Plan
from pipefit.report.page import page
from pipefit.report.page.lesson import axes_of, lesson, points
from pipefit.simulator import simulate
from pipelines import make_plan, random_profile

PLAN = make_plan(random_profile(6), (2, 2, 2), microbatches=4)


def grid_of(plan: Plan) -> dict[str, list[list[float]]]:
    """The data of a page's controls."""
    found = re.search(r'id="grid">(.*?)</script>', lesson(plan))
    assert found is not None
    data: dict[str, list[list[float]]] = json.loads(found[1])
    return data


def test_every_position_is_a_plan_of_lowest_peak_that_is_simulated() -> None:
    """Peaks and seconds at four corners and in the middle; with the links as they are, or of another rate."""
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
        links = tuple(replace(link, bytes_per_second=factor * link.bytes_per_second) for link in PLAN.cluster.links)
        trace = simulate(replace(made, cluster=replace(PLAN.cluster, links=links)))
        assert found[choice].peak_bytes == max(trace.peak_bytes)
        assert found[choice].step_seconds == trace.step_seconds[-1]
        assert found[choice].samples_per_second * trace.step_seconds[-1] == pytest.approx(made.training.batch_size)


def test_more_microbatches_leave_less_waiting() -> None:
    """What the control teaches first: the bubble of a pipeline shrinks."""
    axes = axes_of(PLAN)
    assert axes is not None
    found = dict(zip(product(*axes), points(PLAN, axes), strict=True))
    waits = [found[count, "never", 3, 1.0].waiting for count in axes.microbatches]
    assert waits == sorted(waits, reverse=True) and waits[0] > waits[-1]


def test_the_grid_has_the_plans_own_place_and_a_row_for_each_position() -> None:
    """Controls begin where the plan is; a model of very many layers, or a schedule without an end, has no grid."""
    data = grid_of(PLAN)
    assert len(data["rows"]) == len(list(product(*data["axes"])))
    places = [int(value) for value in re.findall(r'value="(\d+)"', lesson(PLAN))]
    assert [axis[place] for axis, place in zip(data["axes"], places, strict=True)] == ["4", "never", "3", "x 1"]
    assert axes_of(make_plan(random_profile(201), (101, 100))) is None
    assert "<h2>What if" not in page(simulate(PLAN))


def test_controls_are_labelled_and_reached_by_the_keyboard() -> None:
    """Each is a native control within its label, and what they say is announced."""
    text = lesson(PLAN)
    assert len(re.findall(r'<label>[a-z]+ <input type="range"', text)) == 4
    assert 'role="status" aria-live="polite"' in text


def test_a_browser_moves_the_controls(tmp_path: Path) -> None:
    """A change of each control changes what is told, to the row of the grid, and nothing fails."""
    script = """<script>
    const failed = []; addEventListener("error", (event) => failed.push(event.message));
    const wait = setInterval(() => {
      if (document.documentElement.dataset.ready !== "yes") return;
      clearInterval(wait);
      const told = [];
      const say = () => told.push(document.getElementById("whatif").textContent);
      say();
      for (const control of document.querySelectorAll("[data-axis]")) {
        control.value = control.value === control.max ? "0" : control.max;
        control.dispatchEvent(new Event("input"));
        say();
      }
      const output = document.createElement("output");
      output.textContent = `told:${failed.length}:${told.join("|")}:end`;
      document.body.append(output);
    }, 20);</script></body>"""
    seen = browsed(page(PLAN).replace("</body>", script), tmp_path)
    found = re.search(r"told:(\d+):(.*?):end", seen)
    assert found is not None and found[1] == "0"
    texts = found[2].split("|")
    assert len(texts) == 5 and all("samples per second" in text for text in texts)
    assert len(set(texts)) >= 4
