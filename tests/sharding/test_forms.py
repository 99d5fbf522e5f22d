"""Forms: parts, wholes and reshaped splits, against the owner of every element."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipefit.tensor_parallel.forms import (
    DimSplit,
    TensorShard,
    assembled,
    dealt,
    divides,
    join,
    local_shape,
    take,
)
from pipefit.tensor_parallel.rules.reshaping import through_reshape


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], DimSplit, int]:
    """Draw a shape, a split of one of its dimensions, and the number of ranks."""
    ranks, dim = draw(st.integers(2, 4)), draw(st.integers(0, 2))
    blocks = tuple(ranks * size for size in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    repeats, padded = draw(st.integers(1, 3)), draw(st.booleans())
    shape = draw(st.lists(st.integers(1, 4), min_size=3, max_size=3))
    if padded:
        shape[dim] = draw(st.integers(ranks, 4 * ranks + 1))
        return shape, DimSplit(dim, padded=True), ranks
    shape[dim] = repeats * sum(blocks)
    return shape, DimSplit(dim, repeats, blocks if len(set(blocks)) > 1 else ()), ranks


def owners(shape: list[int], split: DimSplit, ranks: int) -> Tensor:
    """Return the owner of each element, counted element by element."""
    size = shape[split.dim]
    found = []
    row = size // split.repeats
    for _ in range(split.repeats):
        for block in split.blocks or (row,):
            share = math.ceil(block / ranks)
            found += [place // share for place in range(block)]
    return torch.tensor(found).reshape([-1 if d == split.dim else 1 for d in range(len(shape))]).expand(shape)


@given(splits())
def test_a_rank_has_the_elements_that_are_its_own_in_order(case: tuple[list[int], DimSplit, int]) -> None:
    """A rank's part has the elements that it owns, in the order of the whole, padded with zeros."""
    shape, split, ranks = case
    whole, owner = torch.arange(1, math.prod(shape) + 1).reshape(shape), owners(*case)
    for rank in range(ranks):
        part = take(whole, split, rank, ranks)
        assert list(part.shape) == local_shape(shape, split, ranks)
        assert part[part != 0].tolist() == whole[owner == rank].tolist()


@given(splits())
def test_the_parts_of_all_ranks_make_the_whole(case: tuple[list[int], DimSplit, int]) -> None:
    """The joined parts of all ranks equal the tensor, as a value and as a parameter's shards."""
    shape, split, ranks = case
    whole = torch.randn(shape)
    parts = [take(whole, split, rank, ranks) for rank in range(ranks)]
    shards = [TensorShard.of("weight", shape, split, rank, ranks) for rank in range(ranks)]
    assert torch.equal(join(parts, split, shape[split.dim]), whole)
    assert torch.equal(dealt(whole, split, ranks), torch.stack(parts))
    assert all(torch.equal(shard.local(whole), part) for shard, part in zip(shards, parts, strict=True))
    assert torch.equal(assembled(shards, parts), whole)


@given(splits())
def test_a_part_has_memory_of_its_own(case: tuple[list[int], DimSplit, int]) -> None:
    """A part's storage is as large as the part, not as the whole."""
    shape, split, ranks = case
    part = take(torch.randn(shape), split, 0, ranks)
    assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Draw two shapes of the same elements, with common groups of dimensions and ones between them."""
    before, after = [], []
    for _ in range(draw(st.integers(1, 3))):
        factors = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
        for shape in (before, after):
            merged = list(factors)
            while len(merged) > 1 and draw(st.booleans()):
                place = draw(st.integers(0, len(merged) - 2))
                merged[place : place + 2] = [merged[place] * merged[place + 1]]
            shape.extend(merged)
    return before, after


@given(reshapes(), st.data())
def test_a_split_seen_through_a_reshape_divides_the_same_elements(
    shapes: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    """A split seen through a reshape keeps every element's owner, and a reshaped part equals the part of the
    reshaped tensor.
    """
    before, after = shapes
    ranks = data.draw(st.integers(2, 3))
    split = DimSplit(data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(1, 3)))
    if not divides(before, split, ranks):
        return
    found = through_reshape(before, after, split, ranks)
    if found is None:
        return
    assert torch.equal(owners(before, split, ranks).reshape(after), owners(after, found, ranks))
    whole = torch.arange(math.prod(before)).reshape(before)
    for rank in range(ranks):
        part = take(whole, split, rank, ranks).reshape(local_shape(after, found, ranks))
        assert torch.equal(part, take(whole.reshape(after), found, rank, ranks))


@pytest.mark.parametrize(
    ("before", "after", "split", "found"),
    [
        ([2, 8, 12], [2, 8, 4, 3], DimSplit(2), DimSplit(2)),  # heads out of features
        ([2, 8, 4, 3], [2, 8, 12], DimSplit(2), DimSplit(2)),
        ([2, 4, 8, 3], [8, 8, 3], DimSplit(1), DimSplit(0, 2)),  # heads merged behind a batch
        ([2, 8, 12], [2, 8, 3, 4], DimSplit(2, 3), DimSplit(3)),  # a fused projection
        ([2, 8, 12], [16, 12], DimSplit(2, 1, (8, 2, 2)), DimSplit(1, 1, (8, 2, 2))),
        ([2, 8, 12], [2, 8, 3, 4], DimSplit(2, 1, (8, 2, 2)), None),
        ([2, 3, 7], [6, 7], DimSplit(2, padded=True), DimSplit(1, padded=True)),
        ([4, 6], [24], DimSplit(1), DimSplit(0, 4)),
        ([24], [4, 6], DimSplit(0), DimSplit(0)),
    ],
)
def test_reshapes_of_heads_and_fused_projections_keep_what_is_divided(
    before: list[int], after: list[int], split: DimSplit, found: DimSplit | None
) -> None:
    """Reshapes of heads and fused projections, as in models, keep their split."""
    assert through_reshape(before, after, split, 2) == found


@pytest.mark.parametrize("shape", [[0, 4], [4, 0, 2]])
def test_nothing_cannot_be_shared(shape: list[int]) -> None:
    """A dimension without elements is not divided."""
    assert not any(divides(shape, DimSplit(dim), 2) for dim, size in enumerate(shape) if size == 0)
