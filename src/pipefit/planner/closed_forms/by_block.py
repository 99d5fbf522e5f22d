"""Peaks of stages whose blocks are each recomputed by themselves, for all ranges of blocks at once.

The forward of a block keeps only the block's inputs. In the backward the blocks of a stage come back one by one, the
last first. While block k of blocks i to j - 1 is at work, the device holds

    the inputs of blocks i to k, and copies of the buffers that feed back
    what block k saves and needs itself, as if it were a stage of its own, and the gradients of its outputs
    the gradients of all parameters, or in a step's first backward those of blocks k to j - 1

so that every peak is the highest over k of a number of block k alone, plus sums over the edges before it: running
maxima. They are lower bounds of the ledger's peaks, and mostly equal to them. They are lower where blocks share a
parameter, or release inputs that earlier blocks keep; of blocks that work in place on their inputs they may be either.

Costs: as many numbers as four arrays of a band.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipefit.cost.storages import StageStorages
from pipefit.planner.closed_forms.bands import Band, Ints, Recomputed
from pipefit.planner.closed_forms.lifetimes import NEVER, lifetimes
from pipefit.profiles import Measurement

_NOTHING = -(1 << 60)


class Inputs(NamedTuple):
    """Bytes of what every block takes from the blocks before it; 0 for the first one.

    `new` are the storages that the block before has made, and `saved` those of them that the block saves. `as_stage` is
    what the block saves of its inputs as a stage of its own, which receives every value in a storage of its own.
    """

    new: Ints
    saved: Ints
    as_stage: Ints

    @staticmethod
    def of(measurement: Measurement, edges: Sequence[int]) -> Inputs:
        """Those of the blocks between these edges."""
        layers, model = len(measurement.layers), lifetimes(measurement)
        whole, columns = StageStorages(measurement, 0, layers), [(0, 0, 0)]
        for (before, start), stop in zip(pairwise(edges), edges[2:], strict=False):
            end = stop + (stop == layers)  # the loss goes with the last block
            new = set(whole.values(start)) - set(whole.values(before))
            saves = {number for layer in whole.layers[start:end] for number in layer.saves}
            fresh = (value.nbytes for value in model.fresh[start] if value.saver != NEVER and value.saver < end)
            sizes = whole.sizes
            as_stage = sum(fresh)
            saved = min(sum(sizes[n] for n in new & saves), as_stage)  # more of a storage may be released, too
            columns.append((sum(sizes[n] for n in new), saved, as_stage))
        return Inputs(*(np.array(column, np.int64) for column in zip(*columns, strict=True)))


class Blocks(NamedTuple):
    """Bytes of every block of a model.

    `alone` is the band of blocks as stages. `first` and `later` are the highest bytes of a block's backward, with what
    it has saved, where another block of the stage comes after it; `gradients` those of the values at its end there.
    `copies` and `born` are sums over the blocks before each edge: of buffers that feed back, and of gradients.
    """

    alone: Band
    first: Ints
    later: Ints
    gradients: Ints
    inputs: Inputs
    copies: Ints
    born: Ints


def recomputed_by_block(band: Band, blocks: Blocks) -> Band:
    """The band for stages whose blocks are recomputed by themselves, made of that of the same stages."""
    one, inputs = blocks.alone, blocks.inputs
    width, starts = band.valid.shape
    i = band.first + np.arange(starts)
    end = np.minimum(i + np.arange(1, width + 1)[:, None], len(inputs.new))
    last = end - 1
    taken = np.cumsum(inputs.new)  # up to a block's own inputs
    kept = taken + blocks.copies[:-1]
    before = np.concatenate(([0], taken[:-1])) + blocks.copies[:-1] - inputs.as_stage + inputs.saved
    follow_inputs = np.concatenate((one.inputs[0, :-1], [0]))  # of blocks that others follow: without targets
    base = follow_inputs[i] - kept[i]

    def highest(of_first: Ints, of_block: Ints) -> Ints:
        """The highest number of the blocks of every range but its last."""
        found = np.full((width, starts), _NOTHING, np.int64)
        found[1:] = of_first[i]
        for row in range(2, width):
            np.maximum(found[row - 1], base + of_block[np.minimum(i + row - 1, len(of_block) - 1)], out=found[row])
        return found

    def recompute(born: Ints) -> Ints:
        """The second forward of every block; `born` are the gradients of the blocks up to it."""
        working = kept + one.forward_peak[0] + one.buffers[0]
        inner = working + blocks.gradients - born
        inside = highest(follow_inputs - kept + inner, inner) - band.output_gradients
        found: Ints = np.maximum(inside, band.inputs - kept[i] + (working - born)[last])
        return found

    def backward(inner: Ints, peak: Ints, born: Ints) -> Ints:
        """The backward of every block."""
        beside = before + one.buffers[0] - born
        inside = highest(inner + one.buffers[0] - born, beside + inner)
        own = one.retained[0] + one.output_gradients[0] + peak
        at_end = np.where(last == i, (own + one.buffers[0] - born)[last], base + (beside + own)[last])
        found: Ints = np.maximum(inside, at_end)
        return found

    none, born = np.zeros_like(blocks.born[1:]), blocks.born[1:]
    of_range = blocks.born[end]
    return replace(
        band,
        kept=band.inputs + kept[last] - kept[i] + np.diff(blocks.copies)[last],
        checkpoint_peak=_running(kept + one.checkpoint_peak[0], i, width) - kept[i],
        checkpoint_sent=one.checkpoint_sent[0][last],
        recomputed=Recomputed(
            forward_first=recompute(born) + of_range,
            forward_later=recompute(none),
            backward_first=backward(blocks.first, one.backward_first_peak[0], born) + of_range,
            backward_later=backward(blocks.later, one.backward_later_peak[0], none),
        ),
        _sums={},
    )


def _running(of_block: Ints, starts: Ints, width: int) -> Ints:
    """The highest number of the blocks of every range."""
    at = np.minimum(starts + np.arange(width)[:, None], len(of_block) - 1)
    found: Ints = np.maximum.accumulate(of_block[at], axis=0)
    return found
