"""Memory of the smallest models of both families, against the MPress paper, and the
comparison's arithmetic.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest

from bench_demands import BERT, GPT, Demand, rows, split_of, within


def test_gpt_under_dapple_needs_what_the_paper_says() -> None:
    """GPT-5.3B on 8 equal devices: total, fullest and emptiest are within 10 per cent of Table II."""
    (row,) = rows(GPT, "5.3B")
    assert within(row), row.over
    assert row.split == (4, 3, 3, 3, 3, 4, 4, 4)


@pytest.mark.gallery
def test_bert_under_pipedream_needs_what_the_paper_says() -> None:
    """Bert-0.35B with weight versions: total, fullest and emptiest are within 10 per cent of Table II.

    With full versions, gradients and optimizer state included, total and fullest would be above that.
    """
    weights, everything = rows(BERT, "0.35B")
    assert weights.over is not None and everything.over is not None
    assert weights.split == (4, 3, 3, 3, 3, 3, 3, 4)
    assert within(weights), weights.over
    assert min(everything.over.total, everything.over.fullest) > 0.1


@pytest.mark.gallery
def test_plain_operations_would_need_more_than_the_paper_says() -> None:
    """A Bert with unfused GELU and layer norm is over a quarter above every column."""
    weights, _ = rows(BERT, "0.35B", unfused=True)
    assert weights.over is not None
    assert all(0.25 < over < 0.35 for over in asdict(weights.over).values())


def test_blocks_are_spread_evenly() -> None:
    """The head counts as a block of GPT; longer stages are the latest but the last, or the requested ones."""
    assert split_of(GPT, 28) == (4, 3, 3, 3, 3, 4, 4, 4)
    assert split_of(GPT, 128) == (16, 16, 16, 16, 16, 16, 16, 16)
    assert split_of(GPT, 28, longer=(0, 2)) == (5, 3, 4, 3, 3, 3, 3, 4)
    assert split_of(BERT, 26) == (4, 3, 3, 3, 3, 3, 3, 4)
    assert [sum(split_of(job, layers)) for job, layers in ((GPT, 53), (BERT, 34), (BERT, 124))] == [
        53,
        34,
        124,
    ]


def test_demands_are_compared_column_by_column() -> None:
    """Memory is in units of 1e9 bytes, with a context on every device, as shares of the published values."""
    found = Demand.of([2_600_000_000, 600_000_000, 1_600_000_000])
    assert found == Demand(total=6.0, fullest=3.0, emptiest=1.0)
    assert found.over(Demand(total=5.0, fullest=4.0, emptiest=1.0)) == Demand(
        total=pytest.approx(0.2), fullest=-0.25, emptiest=0.0
    )
