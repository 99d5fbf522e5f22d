"""The answer of a search as text, JSON and page, from documents only."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from pipefit.planner import plan
from pipefit.report.fit import describe_fit
from pipefit.report.page import fit_page
from pipefit.report.page.charts import growth
from pipefit.schema.cluster import Cluster
from pipefit.schema.fit import Attempt, Fit
from pipefit.tables import plain
from support.pipelines import random_profile

BUDGET = 1 << 20


def attempt(value: int, budget: int) -> Attempt:
    """Return a plan of this number of layers over two devices that have `budget`."""
    costs = replace(random_profile(value), model="mine <b>")
    made = plan(costs, Cluster.emulated((2, budget)), batch_size=2, microbatches=2, allow_infeasible=True)
    return Attempt(value=value, plan=made)


@cache
def example() -> Fit:
    """Return a search: four layers fit, six do not, and five are refused."""
    need = max(attempt(4, BUDGET).peak_bytes)
    tried = tuple(attempt(value, need if value != 6 else need // 2) for value in (2, 4, 6))
    return Fit(
        grown="layers",
        sense="largest",
        best=tried[1],
        beyond=tried[2],
        tried=tried,
        refused={5: "five is odd"},
        impossible={6: "layer f needs at least 2.00 MiB"},
    )


def test_the_text_has_the_answer_the_limit_and_the_miss() -> None:
    """The first line has the answer, each value a row, and the last line why the next value does not fit."""
    fit = example()
    lines = plain(describe_fit(fit)).splitlines()
    assert lines[0].startswith("layers=4 is the largest that fits: mine <b> of ")
    assert [line.split()[0] for line in lines[4:7]] == ["2", "4", "6"]
    assert lines[-2].endswith(", 0 B below its budget.")
    assert lines[-1] == "layers=6 does not fit: layer f needs at least 2.00 MiB."
    assert plain(describe_fit(replace(fit, impossible={})), 80).count(" by") == 1  # the table is not cut


def test_without_a_proof_nothing_is_said_not_to_fit() -> None:
    """Text, page, table and repr then say that no plan was found, and the text what was tried."""
    fit = replace(example(), impossible={}, searched="Tried: splits.")
    text = plain(describe_fit(fit))
    page = fit_page(fit).replace("This plan does not fit", "")  # words for other sizes of the plan
    for words in (text, page, repr(fit)):
        assert "does not fit" not in words and "largest that fits" not in words
        assert "layers=4 fits, the largest with a plan found" in words
    assert "No plan was found for layers=6: in the leanest plan tried, device" in text
    assert text.endswith("\nTried: splits.")
    assert [line.count("no plan found") for line in text.splitlines()[4:7]] == [0, 0, 1]
    assert ": fits<" in growth(fit) and ": no plan found<" in growth(fit)


def test_the_text_says_where_the_model_ended_the_search() -> None:
    """Without a larger value, the text quotes the model's refusal; without that either, it says that no
    larger value was tried.
    """
    fit = replace(example(), beyond=None)
    assert plain(describe_fit(fit)).endswith("layers=5 is refused: five is odd.")
    assert plain(describe_fit(fit)).startswith("layers=4 fits, the largest value tried: ")
    assert plain(describe_fit(replace(fit, refused={}))).endswith("There was no larger value to try.")


def test_the_peaks_of_a_dry_run_count() -> None:
    """Dry-run peaks replace planned ones, in the verdict and in JSON."""
    planned = example().best
    heavier = replace(planned, certified_bytes=tuple(peak + 7 for peak in planned.peak_bytes))
    assert planned.fits and not heavier.fits
    assert heavier.over_bytes == 7
    assert heavier.as_json()["peak_bytes"] == list(heavier.certified_bytes or ())
    assert heavier.as_json()["certified"] and not planned.as_json()["certified"]


def test_the_chart_has_a_point_for_every_value_higher_where_more_is_needed() -> None:
    """Every tried value has a circle, whose height follows its peak, and a ring marks the answer."""
    fit = example()
    circles = re.findall(r'<circle class="(good|bad|ring)" cx="([0-9.]+)" cy="([0-9.]+)"', growth(fit))
    points = [(float(x), float(y), kind) for kind, x, y in circles if kind != "ring"]
    assert [kind for _, _, kind in sorted(points)] == ["good", "good", "bad"]
    needs = [attempt.need_bytes for attempt in fit.tried]
    heights = [y for _, y, _ in sorted(points)]
    assert sorted(range(3), key=lambda n: needs[n]) == sorted(range(3), key=lambda n: -heights[n])
    ring = next((x, y) for kind, x, y in circles if kind == "ring")
    assert ring == next((x, y) for kind, x, y in circles if kind == "good" and (x, y) == ring)


def test_the_page_of_a_search_shows_the_plan_too_and_no_tag_of_a_name() -> None:
    """The page has the tried values and the plan that fits; a name with a tag in it is text there."""
    made = fit_page(example())
    assert "layers=4 is the largest that fits" in made and "Peak memory of each device" in made
    assert "mine &lt;b&gt;" in made and "mine <b>" not in made
