"""Pages in real use: opened in real time, navigated by keyboard, printed; the console stays empty."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pipefit.report.page import page
from pipefit.schema.plan import Alternative, Plan
from report.test_page import planned, with_copies
from support.browser import Opener

SECONDS = 1.0  # in which a page is open


def with_all_sections() -> Plan:
    """Return a plan with copies and an alternative with long options."""
    other = Alternative(
        what="fewest devices", schedule="eager-1f1b", stages=1, devices=1, microbatches=16, peak_bytes=3 << 20,
        step_seconds=1.25, asked_by="--objective peak --recompute always --microbatches 64 --shard parameters",
    )  # fmt: skip
    made = with_copies(planned(devices=4))
    return Plan(
        profile=made.profile, cluster=made.cluster, training=made.training, stages=made.stages,
        decisions=made.decisions, provenance=made.provenance, alternatives=(other,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "microbatches"),
    [(4, 40), pytest.param(32, 256, marks=pytest.mark.gallery)],
    ids=["4", "32 devices"],
)
def test_a_page_opens_within_a_second(opened: Opener, devices: int, microbatches: int) -> None:
    """The limit applies to the processor seconds of the page's thread until everything is drawn, independent
    of machine load.
    """
    made = page(planned(layers=devices + 8, devices=devices, microbatches=microbatches))
    assert 0 < opened(made).cpu_seconds() < SECONDS


def test_devices_that_do_nothing_take_no_room_in_the_timeline(opened: Opener) -> None:
    """Of three devices, the two with stages have rows; each of the three has its bar and can be chosen."""
    made = replace(planned(devices=2), cluster=planned(devices=3).cluster, prediction=None)
    at = opened(page(made))
    labels = "[...document.querySelectorAll('#timeline text')].map((one) => one.textContent)"
    assert [one for one in at.evaluate(labels) if one.startswith("device")] == ["device 0", "device 1"]
    assert at.evaluate("document.querySelectorAll('button.device').length") == 3
    at.evaluate("document.querySelectorAll('button.device')[2].click()")
    assert at.evaluate("document.getElementById('device').value") == "2" and at.complaints == []


def test_keys_that_are_pressed_walk_through_the_page_and_nothing_complains(opened: Opener) -> None:
    """The tab key reaches the timeline and the sliders; the arrow keys read actions and move the controls
    there.
    """
    at = opened(page(with_all_sections()))
    where = "document.activeElement.id || document.activeElement.dataset.axis"

    def go_to(name: str) -> None:
        for _ in range(60):
            at.press("Tab")
            if at.evaluate(where) == name:
                return
        raise AssertionError(f"the tabulator does not reach {name}")

    go_to("timeline")
    at.press("ArrowRight", "ArrowRight", "+", "p")
    assert re.match(r"device \d, .* at \dB", at.evaluate("document.getElementById('readout').textContent"))
    go_to("0")
    told = "document.getElementById('whatif').textContent"
    before = at.evaluate(told)
    at.press("Home", "ArrowRight", "ArrowRight")
    assert at.evaluate(told) != before
    assert at.complaints == []


def test_complaints_are_heard(opened: Opener) -> None:
    """Console messages, exceptions, and policy violations are recorded."""
    wrong = """<script>console.error("written"); (async () => { throw new Error("thrown"); })();</script>
    <img src="https://example.invalid/picture.png"></body>"""
    at = opened(page(planned()).replace("</body>", wrong))
    at.evaluate("new Promise((done) => setTimeout(done, 50))")
    found, at.complaints = " ".join(at.complaints), []
    assert "written" in found and "thrown" in found and "Content Security Policy" in found


def test_a_page_is_read_on_paper(opened: Opener) -> None:
    """On A4, bars and legends have their colours, the text is not cut at the side, and controls are
    hidden.
    """
    at = opened(page(with_all_sections()), width=720)
    at.page.emulate_media(media="print")
    wide = '[...document.querySelectorAll(".wide, section, .device")]'
    cut = "one.getClientRects().length && one.scrollWidth > one.clientWidth + 1"
    assert at.evaluate(f"{wide}.filter((one) => {cut}).map((one) => one.textContent)") == []
    coloured = """[...document.querySelectorAll(".legend i, .bar i")].every(
      (one) => getComputedStyle(one).printColorAdjust === "exact")"""
    assert at.evaluate(coloured) is True
    controls = '[...document.querySelectorAll("button:not(.device), select, input")]'
    assert at.evaluate(f"{controls}.filter((one) => one.getClientRects().length).length") == 0
    assert at.page.pdf(width="8.27in", height="11.69in").startswith(b"%PDF") and at.complaints == []
