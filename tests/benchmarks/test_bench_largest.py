"""The benchmark of real training, in small: plans predict correctly, and ours trains the largest model.

Mostly on perceptrons, which train quickly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from amoebanet_job import Job
from bench_largest import (
    Largest,
    Run,
    Runs,
    Timed,
    compare,
    parameters_of,
    ratios,
    run,
    small_job,
    table,
    totals,
)
from partitioners import ADDITIVE, OURS, SCHEDULES, SOLVED, TORCHGPIPE, TorchgpipeSplits, plan_at, splitters
from pipefit.capture import Task
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.models import build
from pipefit.runtime import certify
from pipefit.schema.cluster import Cluster
from support.allocator_events import measured_peaks
from support.gallery_samples import sampled

ROOM = 1 << 20
OFTEN = sampled(SCHEDULES, often=["except_last"])  # kinds of recomputation in every run
BASELINES = (TORCHGPIPE, SOLVED, "uniform", "parameters", "time", "first_last")
ALL = (OURS, ADDITIVE, "bisection", *BASELINES)
FEW = (OURS, TORCHGPIPE, "uniform")  # partitioners in every run
FRONT_HEAVY = TorchgpipeSplits((0, 8, 9, 10, 11), (0, 3, 6, 9, 11))  # in place of measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Perceptrons(Job):
    """The same job with perceptrons of uneven widths in units of `filters`."""

    def task(self, filters: int) -> Task:
        return build("mlp", widths=(filters, 8 * filters, filters, 2 * filters, 4 * filters), inputs=64)


JOB = Perceptrons(
    cluster=Cluster.emulated((4, ROOM)),
    layers=11,
    image_size=0,
    microbatches=2,
    microbatch_size=64,
    values=range(40, 200, 8),
)
RUNS = Runs(JOB)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, as profiles assume: the temporary memory of kernels depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def found(recompute: Recompute, names: tuple[str, ...] = FEW) -> list[Largest]:
    """Run one comparison, for all tests."""
    every = splitters(lambda _: FRONT_HEAVY)
    return compare(JOB, {name: every[name] for name in names}, recompute, RUNS)


@pytest.mark.gallery
@pytest.mark.parametrize("recompute", OFTEN)
def test_ours_trains_the_largest(recompute: Recompute) -> None:
    """Under no partitioner does a larger F train than under ours; all are listed, ours first."""
    rows = found(recompute, ALL)
    assert sorted(row.partitioner for row in rows) == sorted(splitters(lambda _: FRONT_HEAVY)) == sorted(ALL)
    assert rows[0].partitioner == OURS
    assert all(rows[0].filters >= row.filters for row in rows)
    assert any(row.ours_to_this > 1 for row in rows)
    for row in rows:
        assert row.parameters == parameters_of(JOB.task(row.filters))
        assert row.ours_to_this == rows[0].parameters / row.parameters


@pytest.mark.gallery
@pytest.mark.parametrize("recompute", OFTEN)
def test_a_plan_fits_if_and_only_if_it_trains(recompute: Recompute) -> None:
    """Every tried plan that was said to fit trained, with exactly the peaks of plan and dry run; the others
    ran out of memory.
    """
    rows = found(recompute)
    runs = [made for made in RUNS.made.values() if made.recompute == recompute]
    assert {made.said_to_fit for made in runs} == {True, False}
    for made in runs:
        assert made.trained_bytes == (made.planned_bytes if made.said_to_fit else None)
    assert all(row.trained_bytes == row.dry_run_bytes for row in rows)


@pytest.mark.gallery
def test_the_allocator_agrees() -> None:
    """By the allocator's account our largest F needs at most the available memory, and the next one more."""
    best = found("except_last")[0].filters
    for filters, fits in ((best, True), (best + JOB.values.step, False)):
        given = JOB.setting(RUNS.costs(filters), filters, "except_last")
        edges = splitters(lambda _: FRONT_HEAVY)[OURS](given)
        peaks = [max(steps) for steps in measured_peaks(given.task, plan_at(given, edges))]
        assert (max(peaks) <= ROOM) == fits


@pytest.mark.gallery
def test_to_the_byte() -> None:
    """AmoebaNet trains on devices with exactly the bytes of plan and dry run; with one byte
    less it does not.
    """
    job = replace(small_job(), layers=3, image_size=64)
    costs, edges = job.profile(16), (0, 3, 5, 7, 9)
    given = job.setting(costs, 16, "except_last")
    peaks = certify(given.task, plan_at(given, edges)).peak_bytes
    enough, short = (
        run(replace(job, cluster=Cluster.emulated((4, room))).setting(costs, 16, "except_last"), 16, edges)
        for room in (max(peaks), max(peaks) - 1)
    )
    assert enough.trained_bytes == enough.planned_bytes == peaks
    assert short.trained_bytes is None


def test_torchgpipe_times_every_model_once() -> None:
    """The same model has the same splits again, over all layers and devices; another one is timed anew."""
    timed = Timed(seconds=0.01)
    first = timed(JOB.setting(RUNS.costs(40), 40, "never"))
    assert timed(JOB.setting(RUNS.costs(40), 40, "always")) is first
    assert timed(JOB.setting(RUNS.costs(48), 48, "never")) is not first
    assert len(timed.known) == 2
    for edges in first:
        assert (edges[0], edges[-1]) == (0, 11)
        assert sorted(set(edges)) == list(edges)
        assert len(edges) == 5


def test_wrong_plans_are_counted() -> None:
    """A plan said to fit that ran out of memory, and one that trained against its prediction, are counted
    apart from the right ones; errors are of the peaks of trained plans.
    """

    def made(planned: int, fits: bool, trained: int | None) -> Run:
        peaks = None if trained is None else (trained,)
        return Run(
            recompute="never",
            filters=8,
            split=(1,),
            planned_bytes=(planned,),
            said_to_fit=fits,
            trained_bytes=peaks,
        )

    of = totals(
        [],
        [
            made(90, True, 100),
            made(95, True, None),
            made(120, False, None),
            made(105, False, 100),
            made(7, True, 7),
        ],
    )
    assert (of["plans"], of["said_to_fit"], of["said_to_fit_and_trained"]) == (5, 3, 2)
    assert (of["said_not_to_fit"], of["said_not_to_fit_and_ran_out"]) == (2, 1)
    assert of["trained_with_the_peaks_planned"] == 1
    assert of["largest_error_of_a_planned_peak"] == pytest.approx(0.1)


@pytest.mark.gallery
def test_ratios_are_to_torchgpipe_and_to_the_best_baseline() -> None:
    """The best baseline's F lies between torchgpipe's and ours."""
    rows = found("except_last")
    of = ratios(rows)
    assert 1 <= of["to_best_baseline"] <= of["to_torchgpipe"]
    parameters = {row.partitioner: row.parameters for row in rows}
    assert of["to_best_baseline"] == parameters[OURS] / max(parameters[name] for name in FEW[1:])
    assert of["to_torchgpipe"] == parameters[OURS] / parameters[TORCHGPIPE]
    shown = table("except_last", rows)
    assert [row[0] for row in shown.rows] == [row.partitioner for row in rows]
    assert {len(row) for row in shown.rows} == {len(shown.columns)}


@pytest.mark.gallery
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recompute", ["except_last", "except_one"])
def test_convolutions_fit_if_and_only_if_they_train(recompute: Recompute) -> None:
    """The benchmark's original model and devices train exactly if they fit, with ours and equal numbers of
    layers.
    """
    every = splitters(lambda _: pytest.fail("nothing is timed"))
    runs = Runs(small_job())
    rows = compare(runs.job, {name: every[name] for name in (OURS, "uniform")}, recompute, runs)
    for made in runs.made.values():
        assert made.trained_bytes == (made.planned_bytes if made.said_to_fit else None)
    assert [row.trained_bytes for row in rows] == [row.dry_run_bytes for row in rows]
    assert rows[0].filters > rows[1].filters
