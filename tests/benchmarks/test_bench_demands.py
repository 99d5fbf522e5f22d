"""What the smallest members of both families need beside the MPress paper, and the arithmetic of the comparison."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise

import pytest

from bench_demands import BERT, GPT, Demand, rows, split_of, versioned, within
from pipefit.simulator import Simulation
from pipelines import equal_profile, make_plan


def test_gpt_under_dapple_needs_what_the_paper_says() -> None:
    """GPT-5.3B on 8 equal devices: total, fullest and emptiest within 10 per cent of Table II."""
    (row,) = rows(GPT, "5.3B")
    assert within(row), row.over
    assert row.split == (4, 3, 3, 3, 3, 4, 4, 4)


def test_bert_under_pipedream_needs_what_the_paper_says() -> None:
    """Bert-0.35B with a version of the weights for each microbatch in flight: every column within 10 per cent.

    With all of a version kept, gradients and optimizer state included, it would not be.
    """
    weights, everything = rows(BERT, "0.35B")
    assert within(weights), weights.over
    assert weights.split == (4, 3, 3, 3, 3, 3, 3, 4)
    assert not within(everything)


@pytest.mark.gallery
def test_plain_operations_would_need_more_than_the_paper_says() -> None:
    """A Bert whose GELU and layer norm are unfused is a fifth to a third above every column."""
    weights, _ = rows(BERT, "0.35B", unfused=True)
    assert weights.over is not None
    assert all(0.2 < over < 0.35 for over in asdict(weights.over).values())


@pytest.mark.parametrize(
    ("version", "more"),
    [("weights", (300, 200, 100, 0)), ("everything", (1200, 800, 400, 0))],
)
def test_a_version_for_every_microbatch_in_flight(version: str, more: tuple[int, ...]) -> None:
    """Of four stages with 100 bytes of weights each, the first holds three versions more than its one, the last none;
    with gradients of as much and optimizer state of twice that, four times the bytes.
    """
    plan = make_plan(equal_profile(4, parameter_bytes=100), [1, 1, 1, 1], microbatches=8)
    synchronous = Simulation(plan, steps=2).peak_bytes
    found = versioned(plan, version)  # type: ignore[arg-type]
    assert tuple(a - b for a, b in zip(found, synchronous, strict=True)) == more


def test_synchronous_stages_hold_as_many_microbatches_as_asynchronous_ones() -> None:
    """Stage s of P has P - s in flight: by the peaks of equal stages that keep nothing else, in steps of one."""
    plan = make_plan(equal_profile(4, parameter_bytes=0, kept_bytes=1000), [1, 1, 1, 1], microbatches=16)
    peaks = Simulation(plan, steps=2).peak_bytes
    assert [round((a - b) / 1000) for a, b in pairwise(peaks)] == [1, 1, 1]


def test_blocks_are_spread_evenly() -> None:
    """The head counts as a block of GPT; longer stages are the latest but the last, or those asked for."""
    assert split_of(GPT, 28) == (4, 3, 3, 3, 3, 4, 4, 4)
    assert split_of(GPT, 128) == (16, 16, 16, 16, 16, 16, 16, 16)
    assert split_of(GPT, 28, longer=(0, 2)) == (5, 3, 4, 3, 3, 3, 3, 4)
    assert split_of(BERT, 26) == (4, 3, 3, 3, 3, 3, 3, 4)
    assert [sum(split_of(job, layers)) for job, layers in ((GPT, 53), (BERT, 34), (BERT, 124))] == [53, 34, 124]


def test_demands_are_compared_column_by_column() -> None:
    """In units of 1e9 bytes, as shares of what was published."""
    found = Demand.of([3 * 10**9, 10**9, 2 * 10**9])
    assert found == Demand(total=6.0, fullest=3.0, emptiest=1.0)
    assert found.over(Demand(total=5.0, fullest=4.0, emptiest=1.0)) == Demand(
        total=pytest.approx(0.2), fullest=-0.25, emptiest=0.0
    )
