"""The printed plan matches the plan."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from math import comb
from types import SimpleNamespace
from typing import Any

import pytest

from pipefit.errors import UsageError
from pipefit.planner import plan
from pipefit.planner.open_choices import chosen_from
from pipefit.planner.problem import Degree
from pipefit.report.plan import describe_plan, stage_table, told_sharing
from pipefit.report.show import text
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import Kernel, KernelMemory
from pipefit.schema.plan import Plan, Prediction
from pipefit.schema.profile import Block
from pipefit.schema.trace import AllocatorPeaks, Stream, Trace
from pipefit.simulator import simulate
from pipefit.tables import plain
from pipefit.units import format_bytes
from support.pipelines import equal_profile, make_cluster, make_plan
from support.replica_profiles import gridded
from support.synthetic_models import alike, devices, profile, training, vgg_like

AMPLE = 1 << 40


@cache
def made(**options: object) -> Plan:
    return plan(
        profile(vgg_like()), devices(*[40000] * 4), training("1f1b", 8), allow_infeasible=True, **options
    )


def said(shown: Plan) -> str:
    """Return the plan's printed text without line breaks."""
    return " ".join(text(shown).split())


def test_no_line_is_longer_than_80_columns() -> None:
    """Long names continue on the next line, the bar and the counts give way, and no figure is cut."""
    shown = made(stages=4)
    names = tuple(f"{'decoder.' * 9}{n}" for n in range(30))
    for one in (shown, replace(shown, profile=replace(shown.profile, layers=names))):
        assert max(map(len, text(one).splitlines())) <= 80
        for stage in one.stages:
            assert re.search(rf"  {format_bytes(one.prediction.peak_bytes[stage.device])}(  |\n)", text(one))
    assert "".join(text(one).split()).count("decoder.") >= 8 * 9


def test_many_devices_of_a_stage_are_named_in_short() -> None:
    """The short form keeps lines within 80 columns."""
    shown = gridded(64, 1, samples=64)
    assert re.search(r"\n +0 +0-63 +layer0 ", text(shown))
    assert max(map(len, text(shown).splitlines())) <= 80


@pytest.mark.parametrize(
    ("stages", "batch", "layers"), [(1, 1, 1), (1, 1, 3), (2, 1, 2), (2, 2, 3), (3, 4, 3)]
)
@pytest.mark.parametrize("planner", ["joint", "exact"])
def test_one_of_a_kind_is_not_said_in_the_plural(planner: str, stages: int, batch: int, layers: int) -> None:
    """Singular and plural are right for stages, microbatches, samples, arrangements and splits."""
    shown = said(plan(profile(alike(layers)), devices(*[AMPLE] * stages), batch_size=batch, planner=planner))
    nouns = "(stage|microbatch|sample|layer|split|arrangement)"
    assert not re.search(rf"(?<![-0-9.,])1 {nouns}e?s\b", shown), shown
    assert not re.search(rf"(?<![\w.])[0-9]*[02-9] {nouns}\b", shown), shown


def test_one_arrangement_was_searched() -> None:
    """If one arrangement was searched, the verb is singular."""
    shown = said(
        plan(profile(alike(4)), devices(AMPLE, AMPLE), batch_size=8, microbatches=8, schedule="1f1b", data=1)
    )
    assert "1 of these arrangements was searched." in shown


def test_stages_of_any_degrees_are_of_any_number() -> None:
    """If stages may have any degrees, all numbers of stages up to the most are named, not only eighths."""
    space: Any = SimpleNamespace(stages=(2, 4, 6, 8, 10, 12, 14, 16), schedules=("1f1b",))
    assert chosen_from(space, [4], [Degree(1, 1)], 3) == (
        "It is chosen from 2, 4, 6, 8, 10, 12, 14 or 16 stages, microbatches of 4 samples and schedule 1f1b; "
        "3 of these arrangements were searched."
    )
    assert chosen_from(space, [4], [Degree(1, 1), Degree(2, 1)], 0) == (
        "It is chosen from 1 to 16 stages of 1 or 2 replicas, microbatches of 4 samples and schedule 1f1b."
    )


def test_how_devices_share_stages_is_said() -> None:
    """Stages with equal sharing are listed together; for stages of one device each, the sentence is
    absent.
    """
    made = gridded(1, 2, 4, 2, samples=4)
    assert "replica" not in said(gridded(1, 1))
    assert "Stages 1 and 3 have 2 replicas. Stage 2 has 4 replicas." in said(made)
    grid = replace(made.stages[1].grid, shard="optimizer", buckets=2)
    made = replace(made, stages=(made.stages[0], replace(made.stages[1], grid=grid), *made.stages[2:]))
    assert "Stage 1 has 2 replicas that shard optimizer state, all-reducing in 2 buckets. Stage 2" in said(
        made
    )


def test_many_stages_that_share_alike_are_said_as_a_run() -> None:
    """Sixteen separate numbers would fill a line."""
    pairs = [Stage(start=n, stop=n + 1, grid=Grid(devices=(2 * n, 2 * n + 1), data=2)) for n in range(6)]
    pairs[4] = replace(pairs[4], grid=Grid.of(8))
    assert list(told_sharing(pairs)) == ["Stages 0 to 3 and 5 have 2 replicas."]
    assert list(told_sharing(pairs[:2])) == ["Stages 0 and 1 have 2 replicas."]


def test_every_stage_has_a_row_with_its_layers_peak_and_budget() -> None:
    """Each row has the layers by name, their count, the peak in bytes and as a part of the budget, with a bar
    of that length.
    """
    shown = made()
    for stage, row in zip(shown.stages, stage_table(shown).rows, strict=True):
        peak = shown.prediction.peak_bytes[stage.device]
        assert row[2].startswith(f"layer{stage.start}") and row[2].endswith(f"layer{stage.stop - 1}")
        assert row[3] == str(stage.stop - stage.start)
        assert row[5] == format_bytes(peak)
        assert row[7] == f"{100 * peak / 40000:.1f} %"
        assert row[8].count("#") == round(20 * peak / 40000)


def test_a_plan_with_a_stage_that_ends_inside_a_block_tells_layers() -> None:
    """All rows count and name the unit of the heading: blocks if every stage has whole blocks, otherwise
    layers.
    """
    taken = made()
    blocks = Block(name="first", layers=5), Block(name="rest", layers=25)
    for cut, heading, named, counts in (
        (5, "blocks", ["first", "rest"], ["1", "1"]),
        (4, "layers", ["layer0 .. layer3", "layer4 .. layer29"], ["4", "26"]),
        (6, "layers", ["layer0 .. layer5", "layer6 .. layer29"], ["6", "24"]),
    ):
        stages = tuple(
            replace(stage, start=start, stop=stop)
            for stage, (start, stop) in zip(taken.stages, ((0, cut), (cut, 30)), strict=False)
        )
        profile = replace(taken.profile, blocks=blocks)
        table = stage_table(replace(taken, profile=profile, stages=stages, prediction=None, provenance=None))
        assert table.columns[2] == heading
        assert [row[2] for row in table.rows] == named
        assert [row[3] for row in table.rows] == counts


def test_a_device_that_is_too_small_is_marked() -> None:
    """The mark is in its row, and in the sentence on the limit."""
    shown = plan(
        profile(vgg_like()), devices(*[9000] * 4), training("1f1b", 8), planner="exact", allow_infeasible=True
    )
    assert any(row[7].endswith(" over") for row in stage_table(shown).rows)
    short = max(shown.prediction.peak_bytes) - 9000
    assert f"{format_bytes(short)} over its budget." in said(shown)


def test_an_exact_plan_is_called_proven_and_covers_all_splits() -> None:
    """The sentence has the number of splits."""
    words = said(made(planner="exact"))
    assert "Proven optimal: no split brings the peak of the fullest device below" in words
    assert f"all {comb(29, 3):,} splits" in words


def test_a_baseline_is_proven_only_for_what_it_minimises() -> None:
    """The sentence names the planner's measure, and claims nothing about memory."""
    words = said(made(planner="uniform"))
    assert "It minimises only the blocks of the longest stage: 8 is the lowest possible." in words
    assert "splits of" not in words


@pytest.mark.parametrize(
    ("bound", "says"),
    [
        (None, "does not know the lowest"),
        (0.0, "does not know the lowest"),
        (1000.0, "at most 100.0 % above"),
    ],
)
def test_an_unproven_plan_says_how_far_it_may_be_off(bound: float | None, says: str) -> None:
    """The sentence gives the gap to the bound, or says that there is none."""
    shown = made()
    provenance = replace(shown.provenance, value=2000.0, bound=bound)
    assert says in said(replace(shown, provenance=provenance))


@pytest.mark.parametrize(
    "wrong", [{"value": 10**400}, {"bound": -1.0}, {"seconds": float("inf")}, {"value": "much"}]
)
def test_a_measure_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    """A size too large for any text, a negative bound, infinite seconds, and non-numbers are named."""
    with pytest.raises(UsageError, match=next(iter(wrong))):
        replace(made().provenance, **wrong)


def test_little_room_on_a_gpu_is_called_tight() -> None:
    """The threshold is 95 % of the tensors' budget, or of the device if a dry run reported its process's
    memory; emulated devices never are tight, because their bytes are exact.
    """
    cluster = Cluster.preset("dgx1-v100").reserving([1 << 30] * 8)
    budget, memory = cluster.budgets[0], cluster.devices[0].memory_bytes

    def told(peak: int, process: int | None = None, on: Cluster = cluster) -> bool:
        held = process and AllocatorPeaks(
            settings="", requested_bytes=1, allocated_bytes=1, reserved_bytes=process
        )
        known = (held,) * 8 if held else ()
        found = Prediction(peak_bytes=(peak,) * 8, step_seconds=1.0, processes=known)
        shown = said(replace(make_plan(equal_profile(2), [2]), cluster=on, prediction=found))
        assert "was not checked" in shown or known or on.backend != "cuda"
        tight = "Tight: " in shown
        assert tight == (" tight" in shown) == ("of device 0." in shown)
        assert ("%, process tight" in shown) == (tight and peak < edge)
        assert ("processes take 95 % or more of device" in shown) == (tight and process is not None)
        return tight

    edge = -(-95 * budget // 100)
    assert (told(edge - 1), told(edge)) == (False, True)
    end = -(-95 * memory // 100)
    assert (told(budget, end - 1), told(1, end), told(edge, end)) == (False, True, True)
    assert not told(budget, on=replace(cluster, backend="emulated"))


def test_equal_stages_wait_for_the_ideal_bubble() -> None:
    """Four equal stages on fast links, with four microbatches under GPipe, are idle (4 - 1) / (4 + 4 - 1) of
    a step.
    """
    made_by_hand = make_plan(equal_profile(4), [1] * 4, microbatches=4, schedule="gpipe")
    shown = replace(
        made_by_hand,
        prediction=Prediction(
            peak_bytes=(1, 1, 1, 1), step_seconds=1.0, utilisation=simulate(made_by_hand).utilisation()
        ),
    )
    says = "Devices are idle 43 % of the step; the ideal bubble of gpipe with 4 stages and 4 microbatches is 43 %."
    assert says in said(shown)


def test_a_device_that_runs_forwards_again_is_not_waiting() -> None:
    """One device computes all the time, however much of it is recomputation, and no ideal bubble is named for
    it.
    """
    for recompute in ("never", "always"):
        alone = plan(profile(alike(8)), devices(AMPLE), training("gpipe", 4), recompute=recompute)
        assert "Devices are idle 0 % of the step." in said(alone)
    shown = plan(profile(alike(8)), devices(*[AMPLE] * 4), training("gpipe", 4), recompute="always")
    assert "ideal bubble" not in said(shown)
    assert waits(shown) == f"{waits_of(simulate(shown)):.0f}"


def waits(shown: Plan) -> str:
    """Return the explanation's idle share."""
    return said(shown).partition("Devices are idle ")[2].partition(" %")[0]


def waits_of(trace: Trace) -> float:
    """Return the percentage of the last step without a running action, from the events."""
    length = trace.step_seconds[-1]
    events = [event for device in trace.devices for event in device.events if event.stream is Stream.COMPUTE]
    busy = sum(event.end_seconds - event.start_seconds for event in events if event.step == trace.steps - 1)
    return 100 * (1 - busy / length / len(trace.devices))


def test_a_plan_written_by_hand_is_explained_as_far_as_it_goes() -> None:
    """Without prediction and planner, the stages are shown all the same."""
    words = said(replace(made(), prediction=None, provenance=None))
    assert "layer0" in words
    assert "does not contain predicted peaks" in words
    assert "does not name its planner" in words


def test_where_the_peaks_hold_is_one_sentence() -> None:
    """The sentence names processor, instructions, torch and threads of the profile; it is absent for
    unmeasured kernels.
    """
    shown = made()
    assumed = replace(
        shown.profile.assumptions, cpu="Some CPU (1/2/3)", capability="AVX9", torch="7.1", threads=3
    )
    lines = plain(describe_plan(replace(shown, profile=replace(shown.profile, assumptions=assumed))))
    (line,) = [line for line in lines.splitlines() if "Some CPU" in line]
    assert line.startswith("Peaks are for Some CPU (1/2/3) with AVX9, torch 7.1 and 3 threads: kernels may ")
    assert "elsewhere" not in said(shown)


def test_a_plan_says_whether_its_seconds_were_measured() -> None:
    """If the profile has measured seconds, the plan names their device; otherwise, the parts of the device's
    figures that estimates use.
    """
    measured = made()
    assumed = replace(measured.profile.assumptions, device="cuda:0")
    measured = replace(measured, profile=replace(measured.profile, assumptions=assumed))
    says = (
        "Seconds of layers were measured on cuda:0, those of messages and copies are estimated by the links."
    )
    assert says in said(measured)
    alone = plan(measured.profile, devices(AMPLE), measured.training)
    assert "Seconds of layers were measured on cuda:0." in said(alone)
    guessed = plan(equal_profile(4, forward_seconds=None), make_cluster(2), training("gpipe", 4))
    says = "Seconds are estimated, not measured: synthetic by 60 % of 1 TFLOP/s, 80 % of 100 GB/s, 0 us an operation."
    assert says in said(guessed)
    assert says not in said(replace(guessed, prediction=None))


def test_kernels_that_could_not_be_measured_are_named() -> None:
    """The first has its reason, the others are counted; the sentence is absent if all are known."""
    shown = made()
    known = Kernel(operation="aten.mm(float32[1x1])", peak_bytes=4)
    unknown = [
        Kernel(operation=f"aten.{name}", peak_bytes=None, reason="too large")
        for name in ("mm", "sort", "cat")
    ]
    for count, words in (
        (1, "aten.mm: too large."),
        (2, "aten.mm and 1 other: too large."),
        (3, " and 2 others: "),
    ):
        memory = KernelMemory(kernels=(known, *unknown[:count]))
        lines = plain(describe_plan(replace(shown, profile=replace(shown.profile, kernels=memory))))
        (line,) = [
            one
            for one in lines.splitlines()
            if one.startswith("Peaks do not include the memory that kernels need inside ")
        ]
        assert words in line
    memory = KernelMemory(kernels=(known,))
    assert "do not include" not in said(replace(shown, profile=replace(shown.profile, kernels=memory)))
