"""Families of operators: ranks are divided and compute the numbers of the module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.tensor_parallel import Prices, ShardedStage
from pipefit.tensor_parallel.forms import DimSplit
from support.ranks_and_whole import CHEAP, Case, differences

WIDTH, LENGTH = 8, 6


class Of(nn.Module):
    """A function between two linear layers, with the given parameters."""

    def __init__(
        self, run: Callable[..., Tensor], *, inner: int = WIDTH, outer: int = WIDTH, **parts: nn.Module
    ) -> None:
        super().__init__()
        self.up, self.down, self.run = nn.Linear(WIDTH, inner), nn.Linear(outer, WIDTH), run
        self.parts = nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.run(self.up(x), **self.parts))


def sequences(size: int) -> tuple[Tensor, Tensor]:
    """Return random sequences and their targets."""
    return torch.randn(size, LENGTH, WIDTH), torch.randn(size, LENGTH, WIDTH)


def task(
    *layers: nn.Module, batch: Callable[[int], tuple[Tensor, Tensor]] = sequences, loss=F.mse_loss
) -> Task:
    """Return a task with layers as a chain."""
    return Task(nn.Sequential(*layers), batch=batch, loss=loss)


def of(run: Callable[..., Tensor], **options: object) -> Task:
    """Return a task with a function in the middle of a network."""
    return task(Of(run, **options))


def heads(x: Tensor, count: int = 4) -> Tensor:
    """Reshape (batch, length, features) into heads."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """Merge heads back."""
    return x.transpose(1, 2).flatten(2)


def attend(x: Tensor, **options: object) -> Tensor:
    """Compute attention of a fused projection, cut into three equal blocks."""
    return merged(F.scaled_dot_product_attention(*map(heads, x.chunk(3, -1)), **options))


def grouped(x: Tensor, *, fused: bool) -> Tensor:
    """Compute attention of four query heads and two key heads, in one projection of unequal blocks."""
    q, k, v = x.split((8, 4, 4), -1)
    k, v = heads(k, 2), heads(v, 2)
    if not fused:
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
    return merged(F.scaled_dot_product_attention(heads(q), k, v, enable_gqa=fused))


def one_head(x: Tensor) -> Tensor:
    """Compute attention of four query heads and one shared key head, with slices."""
    q, k, v = x[..., :8], x[..., 8:10], x[..., 10:]
    k, v = (heads(y, 1).expand(-1, 4, -1, -1) for y in (k, v))
    return merged(F.scaled_dot_product_attention(heads(q), k, v))


def by_hand(x: Tensor) -> Tensor:
    """Compute attention with plain products, scores and masks."""
    q, k, v = map(heads, x.chunk(3, -1))
    scores = (q @ k.mT / 3).masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), float("-inf"))
    return merged(F.dropout(scores.softmax(-1), 0.2) @ v)


def merged_with_batch(x: Tensor) -> Tensor:
    """Compute attention with heads after the batch dimension, as torch's own modules do."""
    q, k, v = (heads(y).reshape(-1, LENGTH, 2) for y in x.chunk(3, -1))
    return merged(torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).view(-1, 4, LENGTH, 2))


def turned(x: Tensor) -> Tensor:
    """Apply rotary positions, which swap the halves of every head."""
    q = heads(x)
    a, b = q[..., :1], q[..., 1:]
    angles = torch.arange(LENGTH)[:, None].double()
    return merged(q * angles.cos() + torch.cat((-b, a), -1) * angles.sin())


def in_place(x: Tensor) -> Tensor:
    """Change values in place without other readers."""
    return x.mul_(2).add_(1).relu_()


def filled(x: Tensor) -> Tensor:
    """Copy into a new value, whose gradient goes to the source of the copy."""
    return torch.zeros_like(x).copy_(x).mul_(2).sin()


def seen_elsewhere(x: Tensor) -> Tensor:
    """Change a view in place; its base shows the change."""
    y = x * 2
    y[:, 1:].mul_(3)
    return y


def changed_without_gradient(x: Tensor) -> Tensor:
    """Change a value in place without autograd."""
    y = x * 2
    with torch.no_grad():
        y.mul_(3)
    return y


class Remembering(nn.Module):
    """A layer that changes a part of a buffer in every forward, after a use of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(1, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.mean
        with torch.no_grad():
            self.mean[:4].mul_(0.5)
        return y + self.mean


def without_gradient(x: Tensor) -> Tensor:
    """Use a value with and without a gradient."""
    with torch.no_grad():
        scale = x.abs().amax(1, keepdim=True)
    return x / scale


DIVIDED = {
    "gelu": of(F.gelu, inner=12, outer=12),
    "gated": of(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], inner=24, outer=12),
    "glu": of(F.glu, inner=24, outer=12),
    "fused projection": of(attend, inner=24),
    "causal": of(lambda x: attend(x, is_causal=True), inner=24),
    "dropped weights": of(lambda x: attend(x, dropout_p=0.3, is_causal=True), inner=24),
    "mask and dropped weights": of(
        lambda x: attend(x, dropout_p=0.3, attn_mask=torch.arange(LENGTH).double() / 5, scale=0.7), inner=24
    ),
    "unequal projection": of(lambda x: grouped(x, fused=False), inner=16),
    "unequal projection, grouped": of(lambda x: grouped(x, fused=True), inner=16),
    "by hand": of(by_hand, inner=24),
    "heads in the batch": of(merged_with_batch, inner=24),
    "norm of every head": of(
        lambda x, norm: merged(norm(heads(x))), inner=24, outer=24, norm=nn.LayerNorm(6)
    ),
    "rms norm of every head": of(lambda x, norm: merged(norm(heads(x))), norm=nn.RMSNorm(2)),
    "rotary": of(turned),
    "dropout": of(lambda x: F.dropout(x, 0.4), inner=12, outer=12),
    "transposed dropout": of(lambda x: F.dropout(x.transpose(1, 2), 0.4).transpose(1, 2), inner=12, outer=12),
    "in place": of(in_place),
    "no gradient": of(without_gradient),
    "stack": of(lambda x: torch.stack((x.sin(), x.cos()), 0).sum(0)),
    "unbind": of(lambda x: torch.mul(*x.unflatten(-1, (2, 12)).unbind(2)), inner=24, outer=12),
    "running sum": of(lambda x: x.cumsum(1)),
    "pad": of(lambda x: F.pad(x, (0, 0, 2, 1))[:, 2:-1]),
    "roll": of(lambda x: x.roll(2, 1)),
    "rows by number": of(lambda x: x.transpose(0, 1)[torch.tensor([3, 0, 1, 2, 5, 4])].transpose(0, 1)),
    "flip": of(lambda x: x.flip(1)),
    "repeat": of(lambda x: x.mean(1, keepdim=True).repeat(1, LENGTH, 1)),
}  # fmt: skip


def check(task: Task, ranks: int = 2, prices: Prices = CHEAP) -> ShardedStage:
    """Return the stage, after a check that its ranks compute the numbers of the module."""
    case = Case.of(task)
    stage, found = case.by_ranks(ranks, prices)
    plain = case.plain()
    for numbers in found:
        assert differences(numbers, plain) == []
    return stage


def test_one_head_of_keys_for_all_queries() -> None:
    """Query heads are divided, and the keys and values that they share are gathered."""
    stage = check(of(one_head, inner=12), prices=Prices(stored=20.0))
    attention = next(node for node in stage.choice.ways if "attention" in node.name)
    assert stage.choice.home[attention] == DimSplit(1)


class Summed(nn.Module):
    """Experts with two weights in Einstein sums; every token goes through all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, WIDTH, 12)), nn.Parameter(torch.randn(3, 12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("blef,efd->bld", torch.einsum("bld,edf->blef", x, self.up).tanh(), self.down)


def test_einstein_sums_are_divided_by_letters() -> None:
    """Einstein sums are divided along a letter of both weights, with one all-reduce."""
    stage = check(task(Summed()))
    assert (
        stage.shares.divided_bytes / stage.shares.parameter_bytes
        == stage.shares.divided_flops / stage.shares.flops
        == 1
    )
    assert [each.kind for each in stage.collectives] == ["all_reduce"]
    assert stage.shares.flops == 2 * (2 * 2 * LENGTH * 3 * WIDTH * 12)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", DIVIDED)
def test_what_is_between_two_linear_layers_is_divided(name: str) -> None:
    """Functions between two linear layers are divided: each rank has a part of both weights, numbers equal
    the module's, and each direction has one all-reduce.
    """
    stage = check(DIVIDED[name])
    assert stage.shares.divided_bytes >= 0.9 * stage.shares.parameter_bytes
    assert stage.shares.divided_flops / stage.shares.flops == 1
    assert [each.kind for each in stage.collectives if each.nbytes > 8 * WIDTH] == ["all_reduce"]


def test_what_is_changed_in_place_and_seen_elsewhere_is_whole() -> None:
    """A view that is changed in place stays with its base, which is replicated."""
    stage = check(of(seen_elsewhere))
    assert {each.reason for each in stage.shares.whole} == {
        "it shares memory with a tensor that is changed in place"
    }


def test_a_copy_into_a_new_value_is_whole() -> None:
    """A copy into a new value stays in place and whole: torch differentiates only the in-place copy."""
    check(of(filled))


def test_a_change_in_place_without_a_gradient_leaves_the_gradient() -> None:
    """An in-place change under `no_grad` is not replaced by a new value, which would lose the gradient."""
    check(of(changed_without_gradient))


def test_a_buffer_of_which_a_part_is_changed_is_one_on_every_rank() -> None:
    """A partly changed buffer is one buffer on every rank; no copy of another form is changed instead."""
    check(task(nn.Linear(WIDTH, WIDTH), Remembering(), nn.Linear(WIDTH, WIDTH)))


def test_an_unknown_operator_is_whole() -> None:
    """An operator without a rule, a Fourier transform, is replicated: numbers stay right, and the report
    names it.
    """
    stage = check(of(lambda x: torch.fft.fft(x, dim=1).abs()))
    assert stage.shares.divided_bytes > 0  # what is before and behind it is divided all the same


class Reversed(torch.autograd.Function):
    """A function with the identity as forward and a negated gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


class Adversary(nn.Module):
    """A model that is not a chain, so that it is traced twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Of(Reversed.apply)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_custom_function_keeps_its_backward() -> None:
    """A custom function in a traced layer is replicated and keeps its own backward."""
    check(Task(Adversary(), batch=sequences, loss=F.mse_loss))


class Words(nn.Module):
    """An embedding and a head, with one weight if `tied`."""

    def __init__(self, words: int, *, tied: bool, padding: int | None = None) -> None:
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(words, WIDTH, padding_idx=padding),
            nn.Linear(WIDTH, words, bias=not tied),
        )
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).tanh()).flatten(0, 1)


def words(count: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return tokens, and targets with some ignored."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        targets = torch.randint(count, (size * LENGTH,))
        return torch.randint(count, (size, LENGTH)), targets.where(torch.arange(len(targets)) % 4 > 0, -100)

    return batch


@pytest.mark.sample(4)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("count", "ranks"), [(96, 2), (97, 2), (97, 3), (97, 4)])
def test_a_vocabulary_is_divided_from_the_embedding_to_the_loss(count: int, ranks: int, tied: bool) -> None:
    """A vocabulary is divided from the embedding to the loss, even if its size is not a multiple of the
    ranks, and with a padding token; logits are never gathered.
    """
    model = Words(count, tied=tied, padding=1)
    stage = check(Task(model, batch=words(count), loss=F.cross_entropy), ranks)
    last = stage.shards(ranks - 1)["head.weight"]
    assert (last.dim, last.padding > 0) == (0, count % ranks > 0)
    assert (
        max(each.nbytes for each in stage.collectives) == 2 * LENGTH * WIDTH * 8
    )  # an embedded token, no logits


@pytest.mark.sample(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_of_a_divided_vocabulary(reduction: str, smoothing: float) -> None:
    """The loss of a divided, padded vocabulary supports label smoothing and both reductions."""
    loss = nn.CrossEntropyLoss(reduction=reduction, label_smoothing=smoothing)
    check(Task(Words(13, tied=False), batch=words(13), loss=loss), 3)


def test_a_loss_with_weights_of_classes_is_whole() -> None:
    """A loss with class weights, which the vocabulary-parallel loss does not support, is replicated."""
    weights = torch.linspace(0.5, 2, 12).double()
    check(
        Task(Words(12, tied=False), batch=words(12), loss=lambda x, y: F.cross_entropy(x, y, weight=weights))
    )


def images(size: int) -> tuple[Tensor, Tensor]:
    """Return small images and their classes."""
    return torch.randn(size, 3, 8, 8), torch.randint(4, (size,))


class Residual(nn.Module):
    """Convolutions with batch norm around an in-place sum."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.two(self.norm1(self.one(x)).relu_()))
        y += x
        return y.relu_()


CONVOLUTIONS = {
    "batch norm": [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)],
    "group norm": [nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.AvgPool2d(2)],
    "instance norm": [nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True, track_running_stats=True)],
    "depthwise": [nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8, padding="same"), nn.GELU(), nn.Conv2d(8, 8, 1)],
    "groups": [nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 3, groups=4), nn.ReLU()],
    "transposed": [nn.Conv2d(3, 8, 3, 2), nn.ConvTranspose2d(8, 8, 2, 2), nn.Tanh(), nn.Upsample(scale_factor=2)],
    "residual": [nn.Conv2d(3, 8, 1), Residual()],
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_divided_by_channels(name: str) -> None:
    """Convolutions are divided by channels, with norms over channels and their buffers, pooling and a linear
    head.
    """
    layers = (*CONVOLUTIONS[name], nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LazyLinear(4))
    model = nn.Sequential(*layers)
    model(images(2)[0])
    stage = check(Task(model, batch=images, loss=F.cross_entropy))
    assert stage.shares.divided_bytes / stage.shares.parameter_bytes > 0.75
    assert (
        stage.shares.divided_flops / stage.shares.flops > 0.5
    )  # not the first convolution, of three channels


def test_a_frozen_weight_is_divided_and_gets_no_gradient() -> None:
    """A frozen weight next to an adapter is divided and gets no gradient; only the adapter is trained."""
    model = Of(F.gelu, inner=12, outer=12)
    model.up.requires_grad_(False)
    stage = check(task(nn.Linear(WIDTH, WIDTH), model))
    assert stage.shares.divided_bytes / stage.shares.parameter_bytes > 0.8
