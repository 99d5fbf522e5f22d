"""Embeddings, divided by columns or by words: each rank looks up its words, and the rows are summed.

A vocabulary whose size is not a multiple of the ranks is padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pipefit.tensor_parallel.collectives import Collectives, reduced
from pipefit.tensor_parallel.forms import DimSplit, R, divides
from pipefit.tensor_parallel.operations import GROUP, Call, Operation, Strategy, Wishes, nbytes, shape, wished


def embedding(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide an embedding with weights (words, columns)."""
    weight, tokens = op.given["weight"], op.given["indices"]
    if op.given["scale_grad_by_freq"] or op.given["sparse"]:
        return
    for s in wished(wishes, op.last):
        if not s.padded:
            yield op.way(s, (weight, s.at(1)))
    call = Call(target=part_embedding, args=(weight, tokens, op.given["padding_idx"], GROUP))
    yield op.way(R, (weight, vocabulary(shape(weight)[0], 0, op.ranks)), summed=True, call=call)


def vocabulary(words: int, dim: int, ranks: int) -> DimSplit:
    """Return the split of a dimension of `words` words, padded if necessary."""
    return DimSplit(dim) if divides([words], DimSplit(0), ranks) else DimSplit(dim, padded=True)


def part_embedding(weight: Tensor, tokens: Tensor, padding: int, group: Collectives) -> Tensor:
    """Return rows for tokens from a weight divided by words; token `padding` gets no gradient."""
    first = group.rank * len(weight)
    is_mine = (tokens >= first) & (tokens < first + len(weight))
    padding = padding - first if first <= padding < first + len(weight) else -1
    rows = torch.ops.aten.embedding.default(weight, (tokens - first).where(is_mine, 0), padding)
    return reduced(rows * is_mine[..., None], group)


# ---- Cross entropy of logits divided by classes: the vocabulary-parallel loss
#
# A custom function saves only the softmax, as the loss of one worker does; plain operations would save the
# logits too. Three numbers for each row are exchanged. Label smoothing and padded vocabularies are supported.
# (Shoeybi et al., "Megatron-LM", 2019, section 3.)

_NONE, _MEAN = 0, 1


def cross_entropy(op: Operation, wishes: Wishes) -> Iterator[Strategy | None]:
    """Divide the loss of logits (rows, classes) by classes, unless classes have weights."""
    logits, targets = op.given["self"], op.given["target"]
    if len(shape(logits)) != 2 or len(shape(targets)) != 1 or op.given["weight"] is not None:
        return
    classes = shape(logits)[1]
    names = ("reduction", "ignore_index", "label_smoothing")
    args = (logits, targets, classes, *(op.given[name] for name in names), GROUP)
    call = Call(target=part_cross_entropy, args=args)
    way = op.way(R, (logits, vocabulary(classes, 1, op.ranks)), call=call)
    if way is not None:
        yield Strategy(
            operands=way.operands, result=R, call=call, summed=3 * nbytes(logits) // max(classes, 1)
        )


def part_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    classes: int,
    reduction: int,
    ignored: int,
    smoothing: float,
    group: Collectives,
) -> Tensor:
    """Return the loss from logits that are divided by `classes`."""
    if torch.is_autocast_enabled(logits.device.type):
        logits = logits.float()  # as autocast does for one worker's loss
    counts = targets != ignored
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, counts, classes, smoothing, group
    )
    if reduction == _NONE:
        return losses
    return losses.sum() / counts.sum() if reduction == _MEAN else losses.sum()


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row; 0 for ignored rows."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        counts: Tensor,
        classes: int,
        smoothing: float,
        group: Collectives,
    ) -> Tensor:
        rows, first = torch.arange(len(targets), device=targets.device), group.rank * logits.shape[1]
        mine = max(0, min(logits.shape[1], classes - first))  # the classes without the padding
        largest = torch.full_like(logits[:, 0], -torch.inf) if mine == 0 else logits[:, :mine].amax(1)
        shifted = logits - torch.stack(group.all_gather(largest)).amax(0)[:, None]
        shifted[:, mine:] = -torch.inf
        is_mine = (targets >= first) & (targets < first + mine)
        column = (targets - first).where(is_mine, 0)
        chosen = shifted[rows, column].where(is_mine, 0)
        every = shifted[:, :mine].sum(1) if smoothing else torch.zeros_like(chosen)
        exponents = shifted.exp_()
        chosen, every, total = group.all_reduce(torch.stack([chosen, every, exponents.sum(1)]))
        ctx.save_for_backward(exponents.div_(total[:, None]), column, is_mine, counts)
        ctx.mine, ctx.classes, ctx.smoothing = mine, classes, smoothing
        losses = total.log() - (1 - smoothing) * chosen - smoothing / classes * every
        return torch.where(counts, losses, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        softmax, column, is_mine, counts = ctx.saved_tensors
        slope, rows = softmax.clone(), torch.arange(len(column), device=column.device)
        slope[rows, column] -= (1 - ctx.smoothing) * is_mine.to(slope.dtype)
        slope[:, : ctx.mine] -= ctx.smoothing / ctx.classes
        return slope.mul_((counts * gradient)[:, None]), None, None, None, None, None
