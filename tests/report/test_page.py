"""The page of a plan: its data, its pictures, and its behaviour in a browser."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pipefit.errors import UsageError
from pipefit.planner import plan
from pipefit.report import page as pages
from pipefit.report.page import markup, page
from pipefit.report.page.charts import Stretch, topology, traffic
from pipefit.report.page.scenes import scene
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, SavedTensors, What
from pipefit.schema.devices import Member, parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.json_io import load_cluster
from pipefit.schema.plan import Alternative, Plan
from pipefit.schema.trace import CATEGORIES, Trace
from pipefit.simulator import simulate
from pipefit.units import format_bytes, format_seconds, parse_bytes
from support.browser import CONTRASTS, Opener
from support.pipelines import equal_profile, make_cluster, make_plan, random_profile

LARGEST_PAGE = 2_000_000  # bytes


@pytest.fixture(autouse=True)
def _without_the_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the section of `test_lesson.py`, whose grid of plans takes nearly all of a page's time."""
    monkeypatch.setattr(pages, "lesson", lambda plan: "")


def planned(
    *, layers: int = 6, devices: int = 3, microbatches: int = 4, seed: int = 3, schedule: str = "1f1b"
) -> Plan:
    """Draw layers, split over devices with room for all of them."""
    return plan(
        replace(random_profile(layers, seed=seed), model="mine <script>alert(1)</script>"),
        Cluster.emulated((devices, 1 << 30)),
        batch_size=microbatches,
        microbatches=microbatches,
        schedule=schedule,
        planner="exact",
    )


def with_copies(made: Plan) -> Plan:
    """Return the plan with a saved tensor of its first layer on the host."""
    tensors = SavedTensors(tensors=((0, 0),))
    decided = Decision(
        stage=0, subject=tensors, what=What.OFFLOAD, place=parse_place("host"), why="as <asked>"
    )
    return replace(made, decisions=(decided,), prediction=None)


def sums(differences: list[int]) -> list[int]:
    """Return the cumulative sums of the differences, number by number."""
    return list(itertools.accumulate(differences))


def unpacked(made: str) -> list[dict[str, Any]]:
    """Return the data in a page, as its script reads it."""
    text = re.search(r'<script type="application/gzip" id="scenes">([^<]*)</script>', made)
    assert text
    found: list[dict[str, Any]] = json.loads(gzip.decompress(base64.b64decode(text[1])))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream"])
def test_the_page_holds_every_event_and_every_byte_of_the_trace(schedule: str) -> None:
    """Actions, lanes and categories in the page's data equal the trace's; times are within a tick of it."""
    made = planned(schedule=schedule)
    trace = simulate(made)
    (drawn,) = unpacked(page(made))
    tick = drawn["tick"]
    for device, told in zip(trace.devices, drawn["devices"], strict=True):
        found = Counter(
            drawn["words"][word].replace("*", str(microbatch))
            for lane in told["lanes"]
            for word, microbatch in zip(lane["words"], lane["microbatches"], strict=True)
        )
        assert found == Counter(event.action for event in device.events)
        starts = sorted(start for lane in told["lanes"] for start in sums(lane["starts"]))
        seconds = sorted(event.start_seconds for event in device.events)
        assert all(abs(start * tick - at) <= tick for start, at in zip(starts, seconds, strict=True))
        rows = [sums(row) for row in told["memory"]["bytes"]]
        assert [tuple(row[n] for row in rows) for n in range(len(device.memory))] == [
            s.bytes for s in device.memory
        ]
    assert drawn["categories"] == [category.value for category in CATEGORIES]


def test_a_trace_with_too_many_events_is_shown_by_its_last_steps() -> None:
    """Of three steps, with room for the events of two, the last two are in the data from their begin on."""
    trace = simulate(planned(), steps=3)
    one = sum(event.step == 2 for device in trace.devices for event in device.events)
    drawn = scene(trace, "simulated", most=2 * max(one, samples_of(trace, 2)))
    assert drawn["first"] == 1 and len(drawn["steps"]) == 2
    assert sum(len(lane["words"]) for device in drawn["devices"] for lane in device["lanes"]) == 2 * one


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_what_is_numbered_beyond_the_last_step_is_drawn(steps: int) -> None:
    """The events of an evaluation, or of a failed step, are in the data of a trace with fewer steps."""
    whole = simulate(planned(), steps=3)
    drawn = scene(replace(whole, steps=steps, step_seconds=whole.step_seconds[:steps]), "measured")
    told = sum(len(lane["words"]) for device in drawn["devices"] for lane in device["lanes"])
    assert told == sum(len(device.events) for device in whole.devices)
    assert len(drawn["steps"]) == steps


def samples_of(trace: Trace, step: int) -> int:
    """Return the number of memory samples of a step."""
    return sum(sample.step == step for device in trace.devices for sample in device.memory)


def test_a_page_needs_no_other_file_and_runs_nothing_of_a_name() -> None:
    """The page uses no external address, source or style; a tag in the model's name or in a reason is
    text.
    """
    made = page(with_copies(planned()))
    assert not re.search(r"(?:src|href)\s*=|@import|url\((?!#)|https?:", made)
    assert "<script>alert" not in made and "mine &lt;script&gt;" in made and "as &lt;asked&gt;" in made


def events(made: str) -> int:
    """Return the number of events in a page."""
    return sum(len(lane["words"]) for device in unpacked(made)[0]["devices"] for lane in device["lanes"])


def test_an_event_takes_a_few_bytes_of_a_page() -> None:
    """For 64 more microbatches on 4 devices, thousands of events, the page grows by less than three bytes
    each.
    """
    small, large = (page(planned(layers=4, devices=4, microbatches=count)) for count in (8, 72))
    more = events(large) - events(small)
    assert more > 2500
    assert len(large.encode()) - len(small.encode()) < 3 * more


@pytest.mark.gallery
def test_the_page_of_a_large_plan_is_small() -> None:
    """A plan for 32 devices and 256 microbatches, nearly 100,000 events in all, is below two megabytes."""
    made = page(planned(layers=40, devices=32, microbatches=256))
    assert events(made) > 90_000
    assert len(made.encode()) < LARGEST_PAGE


def test_equal_plans_have_equal_pages() -> None:
    """The page contains neither the date nor the machine."""
    made = planned()
    assert page(made) == page(made)


def test_messages_of_a_step_are_values_and_gradients_of_every_microbatch() -> None:
    """Between neighbours, every microbatch's values go one way and the same bytes of gradients the other."""
    made = planned()
    flows, neighbours = traffic(made), set[Stretch]()
    for stage, after in itertools.pairwise(made.stages):
        values = made.measurement.costs[after.start].inputs
        there = Stretch(Member.device(stage.device), Member.device(after.device), "messages")
        back = Stretch(there.target, there.source, "messages")
        assert flows[there] == 4 * sum(value.nbytes for value in values)
        assert flows.get(back, 0) == 4 * sum(value.nbytes for value in values if value.requires_grad)
        neighbours |= {there, back}
    assert flows.keys() <= neighbours


def test_copies_go_to_their_place_and_come_back() -> None:
    """Tensors offloaded in every microbatch pass the link in both directions, once for each."""
    made = with_copies(planned())
    flows = traffic(made)
    device, host = Member.device(made.stages[0].device), Member.host(0)
    there, back = (flows[Stretch(*pair, "copies")] for pair in ((device, host), (host, device)))
    assert there == back == 4 * made.measurement.costs[0].saved[0].nbytes > 0


def test_the_picture_has_every_device_and_every_stretch() -> None:
    """Each device and the used host have a box, each stretch an arrow; a large cluster has none."""
    made = with_copies(planned())
    flows = traffic(made)
    drawn = topology(made, flows)
    assert [f">device{n}<" in drawn for n in range(3)] == [True] * 3 and ">host0<" in drawn
    assert drawn.count("<title>") == len(flows)
    assert topology(planned(layers=20, devices=17), {}) == ""


def test_replicas_send_their_sums_around_a_ring() -> None:
    """Each of two replicas sends all gradients of its stage to the other, the cost of an all-reduce over
    two.
    """
    costs = equal_profile(6)
    (one,) = costs.measurements
    both = replace(costs, measurements=(one, replace(one, microbatch_size=2)))
    made = make_plan(costs, (2, 4), cluster=make_cluster(4), microbatches=4)
    stages = tuple(
        replace(stage, grid=Grid(devices=(2 * n, 2 * n + 1), data=2)) for n, stage in enumerate(made.stages)
    )
    sliced = replace(
        made, profile=both, stages=stages, training=replace(made.training, batch_size=8), prediction=None
    )
    flows = traffic(sliced)
    for stage in stages:
        gradients = sum(cost.gradient_bytes for cost in one.costs[stage.start : stage.stop])
        first, second = map(Member.device, stage.devices)
        assert (
            flows[Stretch(first, second, "collectives")]
            == flows[Stretch(second, first, "collectives")]
            == gradients
            > 0
        )
    assert "</i>collectives</span>" in page(sliced) and 'class="collectives"' in page(sliced)


def test_of_many_devices_the_picture_has_the_hosts() -> None:
    """Each host has a box with its number of devices, and each connection in use an arrow."""
    cluster = load_cluster("3xdgx1-v100@25GB/s")
    made = plan(
        random_profile(24), cluster, batch_size=2, microbatches=2, planner="uniform", data=1, tensor=1
    )
    flows = traffic(made)
    drawn = topology(made, flows)
    assert [f">host{n}<" in drawn for n in range(4)] == [True, True, True, False] and ">device0<" not in drawn
    assert drawn.count(">8 devices<") == 3
    there = sum(
        nbytes for (source, target, _), nbytes in flows.items()
        if cluster.devices[source.number or 0].host == 0 and cluster.devices[target.number or 0].host == 1
    )  # fmt: skip
    assert f"<title>host0 to host1: {format_bytes(there)} of messages a step</title>" in drawn


@pytest.mark.parametrize(("count", "folds"), [(20, 2), (16, 0)])
def test_bars_of_many_devices_that_are_alike_are_folded(count: int, folds: int) -> None:
    """Each device still has its bar; bars of a run of equal ones are below the first of them."""
    one, two = (device for device in simulate(planned(devices=2)).devices)
    devices = tuple(replace(two if number == 9 else one, device=number) for number in range(count))
    made = markup.peaks(Trace(source="simulated", steps=1, devices=devices, step_seconds=(1.0,)))
    assert [f'data-device="{number}"' in made for number in range(count)] == [True] * count
    shown = re.findall(r"<summary>(.*?)</summary>", made)
    assert shown == ["devices 1 to 8 have the same memory", "devices 11 to 19 have the same memory"][:folds]
    outside = re.sub(r"<details>.*?</details>", "", made)
    assert outside.count("data-device") == (3 if folds else count)


def test_bars_of_devices_that_are_nearly_empty_end_at_the_largest_peak() -> None:
    """Otherwise the bars would be invisible; the budgets stand above them. Other bars end at the largest
    budget.
    """
    devices = simulate(planned(devices=2)).devices
    peak = max(device.peak_bytes for device in devices)
    for times, end in ((16, 16 * peak), (17, peak)):
        budgets = tuple(replace(device, budget_bytes=times * peak) for device in devices)
        trace = Trace(source="simulated", steps=1, devices=budgets, step_seconds=(1.0,))
        made = markup.peaks(trace)
        widths = [sum(map(float, re.findall("width:(.*?)%", bar))) for bar in made.split("<button")[1:]]
        assert widths == pytest.approx([100 * device.peak_bytes / end for device in devices], abs=0.01)
        assert ("<u " in made) == (end > peak) != made.startswith("<p>Bars end at")
        assert markup.scale(trace) == end


def test_decisions_have_no_column_without_words() -> None:
    """The reasons of a manual plan may be unknown."""
    told = with_copies(planned())
    (decision,) = told.decisions
    heads = [
        page(one).rpartition(">technique</th>")[2].partition("</tr>")[0]
        for one in (told, replace(told, decisions=(replace(decision, why=""),)))
    ]
    assert ["target" in one for one in heads] == [True, True] and ["reason" in one for one in heads] == [
        True,
        False,
    ]


def test_a_page_says_which_devices_would_run_out_of_memory() -> None:
    """The head of a plan that does not fit names the devices over budget, instead of `fits`."""
    made = planned()
    tight = replace(made, cluster=Cluster.emulated((3, max(simulate(made).peak_bytes) - 1)), prediction=None)
    assert (
        ">Fits, with " in page(made)
        and ">Fits" not in page(tight)
        and ">This plan does not fit: device " in page(tight)
    )


def test_a_page_says_that_little_is_left_of_a_gpu() -> None:
    """The warning starts at 95 % of a budget; an emulated device's bytes are exact, so it fits."""
    made = planned()
    highest = max(simulate(made).peak_bytes)
    cluster = Cluster.emulated((3, highest + highest // 50)).reserving([0] * 3)
    for backend, words in (("cuda", "Fits tightly, with "), ("emulated", "Fits, with ")):
        prediction = replace(made.prediction, processes=()) if made.prediction else None
        tight = replace(made, cluster=replace(cluster, backend=backend), prediction=prediction)
        assert f'<h1 class="fits">{words}' in page(tight)


@pytest.mark.parametrize(("longer", "told_as"), [(1.25, "+25 %"), (0.999, "+0 %")])
def test_plans_that_were_not_chosen_are_told_with_their_prices(longer: float, told_as: str) -> None:
    """Each alternative has a row: its advantage, its memory, its longer step, and the command for it."""
    made = planned()
    assert made.prediction is not None and "<h2>Alternatives" not in page(made)
    other = Alternative(
        what="fewest devices", schedule="gpipe", stages=1, devices=1, microbatches=2, peak_bytes=3 << 20,
        step_seconds=longer * made.prediction.step_seconds, asked_by="--stages 1",
    )  # fmt: skip
    told = page(replace(made, alternatives=(other,)))
    rows = told.partition("<h2>Alternatives")[2].partition("</section>")[0]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", rows)
    step = format_seconds(other.step_seconds)
    assert cells == ["fewest devices", "1", "1", "2", "gpipe", "3.00 MiB", step, told_as, "--stages 1"]
    assert "Fewest devices: 1 device" not in told  # a sentence would repeat it


def test_a_page_holds_peaks_against_budgets_that_leave_a_reserve() -> None:
    """Figure, bars and verdict use budgets, as in the plan's table; a plan that needs the whole device is
    over.
    """
    made = planned()
    highest = max(simulate(made).peak_bytes)
    cluster = Cluster.emulated((3, 2 * highest))
    half, more = (
        replace(made, cluster=cluster.reserving([left] * 3), prediction=None) for left in (0, highest + 1)
    )
    shares = [
        f"<span>{100 * highest / left:.1f}\N{NO-BREAK SPACE}% of" for left in (2 * highest, highest - 1)
    ]
    assert ">Fits, with " in page(half) and shares[0] in page(half)
    assert ">This plan does not fit: " in page(more) and shares[1] in page(more)
    assert [device["budget"] for device in unpacked(page(more))[0]["devices"]] == [highest - 1] * 3


def test_a_figure_stays_beside_its_unit_on_a_page() -> None:
    """Figures and units do not break, in sentences and under figures, unlike other spaces."""
    words = page(planned())
    told = "".join(re.findall(r"<p>.*?</p>|<span>.*?</span>", words))
    assert re.search(r"[0-9]\N{NO-BREAK SPACE}(B|[KMG]iB)\b", told) and not re.search(
        r"[0-9] (B|[KMG]iB|%)", told
    )


def test_a_recomputed_run_is_told_by_the_names_of_its_layers() -> None:
    """A decision's row names the recomputed layers as in the profile."""
    made = planned()
    stage = made.stages[0]
    decided = Decision(stage=0, subject=Run(start=stage.start, stop=stage.stop), what=What.RECOMPUTE)
    told = page(replace(made, decisions=(decided,), prediction=None))
    assert f">{made.profile.layers[stage.start]}" in told and "<td>recompute</td>" in told


def test_layers_that_fill_a_device_are_told_with_the_largest_first() -> None:
    """Bytes fall in the table of every device; layers beyond the listed ones are one row."""
    made = page(planned(layers=30, devices=2))
    tables = re.findall(r"<summary>device .*?</details>", made, flags=re.DOTALL)
    assert len(tables) == 2 and re.search(r"<td>\d+ others</td>", made)
    for table in tables:
        of_layers = table.partition("the largest activations")[0]
        rows = (re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in of_layers.split("<tr>"))
        sizes = [
            parse_bytes(row[1], least=0) for row in rows if row and not re.search("others$|^added by", row[0])
        ]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_devices_alike_are_filled_in_one_table_under_their_peak() -> None:
    """Two stages of two replicas have two tables, not four, each headed by their devices' peak."""
    costs = equal_profile(6)
    (one,) = costs.measurements
    stages = tuple(
        Stage(start=start, stop=start + 3, grid=Grid(devices=devices, data=2))
        for start, devices in ((0, (0, 2)), (3, (1, 3)))
    )
    made = make_plan(costs, (3, 3), cluster=make_cluster(4), microbatches=4)
    sizes = replace(costs, measurements=(one, replace(one, microbatch_size=2)))
    training = replace(made.training, batch_size=8)
    made = replace(made, profile=sizes, stages=stages, training=training, prediction=None)
    peaks = simulate(made).peak_bytes
    heads = re.findall(r"<summary>(device[^,]*, .*?) at", page(made))
    assert [head.replace("\N{NO-BREAK SPACE}", " ") for head in heads] == [
        f"devices {one} {other}, {format_bytes(peaks[one])}" for one, other in ((0, 2), (1, 3))
    ]


def test_a_measured_trace_is_drawn_beside_the_plan() -> None:
    """Both traces are in the data and their peaks in a table; a trace of other devices is refused."""
    made = planned()
    drawn = page(made, replace(simulate(made), source="measured"))
    assert [one["name"] for one in unpacked(drawn)] == ["simulated", "measured"]
    assert "Predicted and measured" in drawn
    for other in (
        planned(devices=2),
        replace(made, cluster=Cluster.emulated((20, 1 << 30)), prediction=None),
    ):
        with pytest.raises(UsageError, match="different devices"):
            page(made, simulate(other))


def test_a_trace_alone_has_a_page() -> None:
    """A trace saved by train or certify is drawn without a plan."""
    assert "Peak memory of each device" in page(replace(simulate(planned()), source="measured"))


# -------------------------------------------------------------------- in a browser


def test_a_browser_draws_a_large_plan_with_few_shapes(opened: Opener) -> None:
    """The script finishes, draws bars and memory, with at most 3,000 shapes."""
    seen = opened(page(planned(layers=10, devices=8, microbatches=64))).page.content()
    timeline = seen[seen.index('id="timeline"') : seen.index('id="readout"')]
    assert 100 < timeline.count("<rect") + timeline.count("<polygon") <= 3000
    assert "<polygon" in seen[seen.index('id="memory"') :]


def test_playback_shows_the_memory_of_every_device_and_leaves_the_page_as_it_was(opened: Opener) -> None:
    """In the middle of the playback each bar has the bytes of that moment's sample; when stopped, and at its
    end, the page is restored.
    """
    trace = simulate(planned())
    at = opened(page(trace))
    heading, moving, sizes, restored = at.evaluate("""() => {
      const find = (id) => document.getElementById(id);
      const section = document.querySelector(".devices").closest("section");
      let clock = performance.now(), frames = [];
      performance.now = () => clock;
      window.requestAnimationFrame = (next) => { frames.push(next); return frames.length; };
      const run = (seconds) => { clock += 1e3 * seconds; frames.splice(0).forEach((next) => next(clock)); };
      find("whole").click();
      const before = section.outerHTML;
      find("play").click();
      run(4);
      const figures = [...document.querySelectorAll(".device .figure")];
      const sizes = figures.map((figure) => figure.firstChild.textContent.trim());
      const heading = section.querySelector("h2").textContent, moving = find("play").textContent;
      run(5);
      const ended = section.outerHTML === before && find("play").textContent === "play";
      find("timeline").dispatchEvent(new KeyboardEvent("keydown", { key: " " }));
      run(1);
      find("play").click();
      return [heading, moving, sizes, ended && section.outerHTML === before];
    }""")
    assert re.search(r"at (position )?[0-9.]+( s| ms| us|)$", heading) and moving == "stop" and restored
    end = max(event.end_seconds for device in trace.devices for event in device.events)
    held = [
        [sample for sample in device.memory if sample.seconds <= end / 2][-1].total_bytes
        for device in trace.devices
    ]
    assert sizes == [format_bytes(nbytes) for nbytes in held] and at.complaints == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_controls_and_keys_change_what_is_shown_and_everything_can_be_read(
    opened: Opener, *, dark: bool
) -> None:
    """Zooming, walking, choosing a device and going to the peak raise no error, and the readout names an
    action. Texts have a contrast of 4.5 and controls one of 3, focused ones too (WCAG 2.2 AA), in the
    requested scheme.
    """
    at = opened(page(with_copies(planned())), dark=dark)
    device, readout, is_dark, poor = at.evaluate(f"""() => {{
      {CONTRASTS}
      const find = (id) => document.getElementById(id);
      const press = (key) => find("timeline").dispatchEvent(new KeyboardEvent("keydown", {{ key }}));
      for (const id of ["nearer", "farther", "whole", "step", "play", "peak"]) find(id).click();
      "ArrowRight ArrowRight + - 0 p ArrowUp ArrowUp ArrowUp ArrowDown ArrowLeft".split(" ").forEach(press);
      const seen = [find("device").value, find("readout").textContent];
      document.querySelectorAll("details").forEach((fold) => {{ fold.open = true; }});
      return [...seen, luminance(ground(document.body)) < 0.2, contrasts()];
    }}""")
    assert device == "1" and re.search(r"device 1.*1(F|B|STEP)", readout) and at.complaints == []
    assert is_dark == dark and poor == []


@pytest.mark.parametrize("width", [1280, 400])
def test_the_answer_and_both_charts_are_on_the_first_screens(opened: Opener, width: int) -> None:
    """On a wide window the verdict, its figures, the timeline and the memory are above the fold; on a phone
    the page is not wider than its window.
    """
    at = opened(page(with_copies(planned())), width=width)
    bottom = at.evaluate("document.getElementById('memory').getBoundingClientRect().bottom")
    assert bottom <= (900 if width == 1280 else 1500)
    assert at.evaluate("document.documentElement.scrollWidth") <= width
