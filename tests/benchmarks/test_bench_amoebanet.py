"""The AmoebaNet benchmark in small: its comparisons, and the consistency of its rows.

Mostly on perceptrons, which are profiled and dry-run quickly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from torchgpipe.balance import balance_cost

from amoebanet_job import Job
from bench_amoebanet import (
    FILTERS,
    Comparison,
    alone,
    compare,
    fixed,
    largest_table,
    measured_before,
    papers_job,
    summarised,
    summary_table,
)
from partitioners import (
    ADDITIVE,
    OURS,
    SCHEDULES,
    SOLVED,
    TORCHGPIPE,
    Splitter,
    TorchgpipeSplits,
    outcome,
    plan_at,
    splitters,
)
from pipefit.capture import Task
from pipefit.largest.growth import with_memory
from pipefit.lowering import lower
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.models import build
from pipefit.runtime import certify
from pipefit.schema.actions import Kind
from pipefit.schema.json_io import load_cluster
from support.gallery_samples import sampled

ROOM = 1 << 20
OFTEN = sampled(SCHEDULES, often=["except_last"])  # kinds of recomputation in every run
BASELINES = (TORCHGPIPE, SOLVED, "uniform", "parameters", "time", "first_last")
ALL = (OURS, ADDITIVE, "bisection", *BASELINES)
FEW = (OURS, TORCHGPIPE, "time")  # partitioners in every run
FRONT_HEAVY = TorchgpipeSplits((0, 8, 9, 10, 11), (0, 3, 6, 9, 11))  # in place of measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Perceptrons(Job):
    """The same job with perceptrons of uneven widths in units of `filters`."""

    def task(self, filters: int) -> Task:
        return build("mlp", widths=(filters, 8 * filters, filters, 2 * filters, 4 * filters), inputs=64)


JOB = Perceptrons(
    cluster=with_memory(load_cluster("4x-titan-rtx").reserving([0] * 4), ROOM),
    layers=11,
    image_size=0,
    microbatches=3,
    microbatch_size=64,
    values=range(24, 400, 8),
    target="cuda",
)
costs = cache(JOB.profile)


@cache
def found(recompute: Recompute, names: tuple[str, ...] = FEW) -> Comparison:
    """Run one comparison, for all tests."""
    return compare(JOB, 40, recompute, chosen(names), costs, once=("time",))


def chosen(names: tuple[str, ...]) -> dict[str, Splitter]:
    """Return the partitioners with these names."""
    every = splitters(lambda _: FRONT_HEAVY)
    return {name: every[name] for name in names}


@pytest.mark.gallery
@pytest.mark.parametrize("recompute", OFTEN)
def test_ours_is_the_emptiest_and_the_largest(recompute: Recompute) -> None:
    """No partitioner has a lower peak at one F, nor a larger F, than ours; all are listed, ours first."""
    balance, largest, _ = found(recompute, ALL)
    names = sorted(splitters(lambda _: FRONT_HEAVY))
    assert sorted(row.partitioner for row in balance) == sorted(row.partitioner for row in largest) == names
    assert balance[0].partitioner == largest[0].partitioner == OURS
    assert all(max(balance[0].peak_bytes) <= max(row.peak_bytes) for row in balance)
    assert all(largest[0].filters >= row.filters and row.ours_to_this >= 1 for row in largest)
    assert any(row.ours_to_this > 1 for row in largest)


@pytest.mark.gallery
@pytest.mark.parametrize("recompute", OFTEN)
def test_the_edges_are_certified(recompute: Recompute) -> None:
    """Every largest F fits in its dry run and the next one does not, as their plans predict, to the byte."""
    for row in found(recompute).largest:
        assert row.need_bytes <= ROOM < row.next_need_bytes
        assert (row.certified, row.off_plan_bytes) == (True, 0)


@pytest.mark.gallery
def test_parameters_are_those_of_the_module() -> None:
    """Parameters are counted on the model, and so is their ratio."""
    rows = {row.partitioner: row for row in found("except_last").largest}
    counted = {
        name: sum(p.numel() for p in JOB.task(rows[name].filters).build().parameters())
        for name in (OURS, TORCHGPIPE)
    }
    assert {name: rows[name].parameters for name in counted} == counted
    assert rows[TORCHGPIPE].ours_to_this == counted[OURS] / counted[TORCHGPIPE]


@pytest.mark.gallery
def test_without_dry_runs_the_plans_are_believed() -> None:
    """Without dry runs every partitioner has the same F and bytes, uncertified and untimed."""
    believed = compare(JOB, 40, "except_last", chosen(FEW), costs, once=("time",), certify=False)
    for believes, knows in zip(believed.largest, found("except_last").largest, strict=True):
        assert (believes.certified, believes.off_plan_bytes) == (False, None)
        assert replace(believes, certified=True, off_plan_bytes=0) == knows
    assert believed.our_seconds is None and summarised(believed)["search_seconds"] is None
    assert {row[-2] for row in largest_table("except_last", believed.largest).rows} == {"plan"}


def test_measurings_are_read_from_an_earlier_run(tmp_path: Path) -> None:
    """Measurements are read by F and samples, in their order."""
    times = [[3, 1, 2], [4, 1, 2]]
    earlier = {
        "filters": 544,
        "samples": 8,
        "measurings": [{"microseconds": of, "split": [1, 2]} for of in times],
    }
    (tmp_path / "earlier.json").write_text(json.dumps({"torchgpipe": [earlier]}))
    assert measured_before(tmp_path / "earlier.json") == {(544, 8): times}


@pytest.mark.gallery
def test_recomputing_makes_room() -> None:
    """With any recomputation a larger F fits than without."""
    largest = {recompute: found(recompute).largest[0].filters for recompute in SCHEDULES}
    assert all(largest["never"] < largest[recompute] for recompute in set(SCHEDULES) - {"never"})


@pytest.mark.parametrize(("recompute", "kept"), [("except_last", JOB.microbatches - 1), ("except_one", 0)])
def test_the_kept_microbatch_is_the_one_whose_backward_comes_first(recompute: Recompute, kept: int) -> None:
    """Only the kept microbatch runs one forward; under torchgpipe's order it is the last one, under ours the
    first.
    """
    program = lower(plan_at(JOB.setting(costs(40), 40, recompute), (0, 3, 6, 9, 11)))
    for actions in program.actions:
        assert {action.microbatch for action in actions if action.kind is Kind.FORWARD} == {kept}
        assert next(action.microbatch for action in actions if action.kind is Kind.BACKWARD) == kept


@pytest.mark.gallery
def test_what_is_asked_once_is_used_at_every_size() -> None:
    """torchgpipe's split at one F serves its largest F too; so does the split of a partitioner
    called once.
    """
    balance = {row.partitioner: row for row in found("except_last").balance}
    largest = {row.partitioner: row for row in found("except_last").largest}
    assert balance[TORCHGPIPE].split == largest[TORCHGPIPE].split == (8, 1, 1, 1)
    assert balance["time"].split == largest["time"].split


@pytest.mark.gallery
def test_a_single_measuring_is_split_by_torchgpipe() -> None:
    """The split is that of torchgpipe's solver, and the largest F is that of its plans."""
    times = [30, 10, 40, 10, 50, 90, 20, 60, 50, 30, 50]
    single = alone(JOB, times, costs)
    assert list(single["split"]) == balance_cost(times, 4)
    largest = single["largest"]["never"]["filters"]
    edges = tuple(sum(single["split"][:stage]) for stage in range(5))
    fits = [
        max(outcome(JOB.setting(costs(filters), filters, "never"), edges).peak_bytes) <= ROOM
        for filters in (largest, largest + 8)
    ]
    assert fits == [True, False]


@pytest.mark.gallery
@pytest.mark.parametrize("recompute", OFTEN)
def test_ratios_are_to_torchgpipe_and_to_the_best_baseline(recompute: Recompute) -> None:
    """The best baseline's F lies between torchgpipe's and ours."""
    of = summarised(found(recompute))
    assert 1 <= of["parameters_to_best_baseline"] <= of["parameters_to_torchgpipe"]
    assert of["peak_to_torchgpipe"] <= of["peak_to_best_baseline"] <= 1
    rows = {row.partitioner: row for row in found(recompute).balance}
    ours, lowest = rows[OURS], rows[of["best_baseline_by_peak"]]
    assert of["peak_to_best_baseline"] == pytest.approx(max(ours.peak_bytes) / max(lowest.peak_bytes))
    assert of["throughput_to_torchgpipe"] == pytest.approx(
        ours.samples_per_second / rows[TORCHGPIPE].samples_per_second
    )
    table = summary_table({recompute: of})
    assert [len(row) for row in table.rows] == [len(table.columns)]


MINIATURE = replace(papers_job(), layers=3, image_size=64, microbatch_size=2)


def test_the_model_of_the_job_has_average_pools() -> None:
    """The model has average pools and nine layers to split between."""
    chain = MINIATURE.task(32).build()
    assert len(list(chain.children())) == 9
    assert not any("MaxPool2d((3" in str(module) for module in chain.modules())


@pytest.mark.gallery
def test_the_job_itself_in_miniature() -> None:
    """AmoebaNet's dry run under GPipe with recomputation equals its plan, to the byte."""
    given = MINIATURE.setting(MINIATURE.profile(32), 32, "except_last")
    edges = splitters(lambda _: FRONT_HEAVY)[OURS](given)
    peaks = certify(given.task, plan_at(given, edges)).peak_bytes
    assert peaks == outcome(given, edges).peak_bytes


@pytest.mark.gallery
@pytest.mark.timeout(3600)
def test_the_largest_models_of_the_paper_are_certified() -> None:
    """Under torchgpipe's default, ours and equal numbers of layers, dry runs have the bytes of the plans."""
    job, every = papers_job(), splitters(lambda _: pytest.fail("nothing is timed"))
    chosen = {OURS: every[OURS], "uniform": every["uniform"], TORCHGPIPE: fixed((0, 18, 26, 34, 42))}
    rows = compare(job, FILTERS, "except_last", chosen, cache(job.profile)).largest
    assert [(row.certified, row.off_plan_bytes) for row in rows] == [(True, 0)] * 3
    assert all(rows[0].filters > row.filters for row in rows[1:])
