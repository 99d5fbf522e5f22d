"""Rows of microbatches between replicas, compared with counting them one by one."""

from __future__ import annotations

from math import lcm, prod

import pytest

from pipefit.errors import UsageError
from pipefit.schema.grids import Division, common_rows, dimensions, rows_of
from pipefit.schema.layer_costs import Value

DEGREES = [(front, behind) for front in range(1, 7) for behind in range(1, 7)]


def value(*shape: int) -> Value:
    """Return a value of this shape."""
    return Value(shape=shape, dtype="float32", nbytes=4 * prod(shape), requires_grad=True)


@pytest.mark.parametrize(("front", "behind"), DEGREES)
def test_every_row_is_sent_once_to_the_replica_that_has_it(front: int, behind: int) -> None:
    """A row's sender and receiver are the replicas whose local batches contain it, and no row is in two
    messages.
    """
    samples = 2 * lcm(front, behind)
    sent = [
        (row, sender, receiver)
        for sender in range(front)
        for receiver, (first, end) in common_rows(rows_of(sender, samples // front), samples // behind)
        for row in range(first, end)
    ]
    assert sent == [(row, row * front // samples, row * behind // samples) for row in range(samples)]


@pytest.mark.parametrize(("front", "behind"), DEGREES)
def test_what_has_no_samples_goes_once_to_every_receiver(front: int, behind: int) -> None:
    """A value without samples comes from the replica that has the receiver's first row, and from no other."""
    samples, division = lcm(front, behind), Division((0, None), front, behind)
    for receiver in range(behind):
        first = receiver * samples // behind * front // samples
        carriers = [sender for sender in range(front) if division.carries_all(sender, receiver)]
        assert carriers == [first]
        assert division.carried(first, receiver) == [(0, 0), (1, None)]


def test_the_dimension_of_samples_is_the_one_that_changes_with_them() -> None:
    """Two sizes in a profile reveal the dimension; constant values have none, and leading dimensions of one
    do not matter.
    """
    one, other = (value(4, 7), value(3, 4), value(1, 4, 2)), (value(2, 7), value(3, 4), value(1, 2, 2))
    assert dimensions(one, other, (4, 2)) == (0, None, 1)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            value(4, 4),
            value(2, 2),
            "value 0 cannot be split between replicas, .* 4x4 for 4 samples and 2x2 for 2 samples",
        ),
        (
            value(12, 5),
            value(6, 5),
            "value 0 cannot be split between replicas, because it does not have a sample dimension: it is 12x5",
        ),
        (value(4, 5), value(5), "value 0 cannot be split between replicas"),
        (
            value(7, 4),
            value(7, 2),
            r"value 0 has its samples along dimension 1 instead of dimension 0 \(7x4 for 4 samples",
        ),
    ],
)
def test_values_that_cannot_be_divided_are_refused(one: Value, other: Value, message: str) -> None:
    """Values with several changing dimensions, several rows for each sample, or non-contiguous rows are
    refused.
    """
    with pytest.raises(UsageError, match=message):
        dimensions((one,), (other,), (4, 2))
