"""Comparison of divided blocks with whole ones: errors in the rewriting of a graph are found and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Chain, Task, capture
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.models import build
from pipefit.models.hugging_face import hf
from pipefit.tensor_parallel import ShardedChain, collectives, shard_chain, tracing
from pipefit.tensor_parallel.comparison import Compared, compare_blocks
from pipefit.tensor_parallel.forms import join, take
from pipefit.tensor_parallel.rules import products
from pipefit.tensor_parallel.rules.products import with_bias
from support.ranks_and_whole import CHEAP

Broken = Callable[[pytest.MonkeyPatch], None]
GPT = {"layers": 3, "hidden": 16, "heads": 2, "vocabulary": 11, "sequence": 12, "dropout": 0.1}


class Mixing(nn.Module):
    """Products around a wide value, which is gathered and split again, and a view changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.back = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y[:, :4].mul_(3)
        wide = self.up(y).tanh()
        turned = wide.flip(-1)
        return self.down(turned * self.back(y)) + y


class Traced(nn.Module):
    """A module that is not an `nn.Sequential`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


def by_hand() -> Task:
    """Return a task with a chain of layers, two of them equal."""
    model = nn.Sequential(nn.Linear(8, 8), Mixing(), nn.ReLU(inplace=True), Mixing(), nn.Linear(8, 8))
    batch: Any = lambda n: (torch.randn(n, 8), torch.randn(n, 8))  # noqa: E731
    return Task(model, batch=batch, loss=nn.MSELoss(), optimizer=torch.optim.SGD, name="hand")


def divided(task: Task, ranks: int = 2, size: int = 2) -> tuple[ShardedChain, Any, Any]:
    """Return a chain, divided as far as possible, with its inputs and targets."""
    module = task.build()
    chain: Chain = capture(
        Task(module, batch=task.batch, loss=task.loss, name=task.name), *sample(task, size)
    )
    inputs, targets = sample(task, size)
    values, wanted = chain.flatten(inputs), chain.flatten_targets(targets)
    return shard_chain(chain, ranks, values, wanted, prices=CHEAP), values, wanted


def compare(task: Task, ranks: int = 2, **options: Any) -> Compared:
    """Compare without a memory limit."""
    return compare_blocks(*divided(task, ranks), **{"free_bytes": 1 << 33, **options})


def test_equal_blocks_are_compared_once_and_nothing_else_changes() -> None:
    """Equal blocks are compared once, in double precision for a single-precision model too; weights,
    gradients and the caller's random state stay unchanged.
    """
    sharded, values, targets = divided(by_hand(), 4)
    before = [p.clone() for layer in sharded.chain.layers for p in layer.module.parameters()]
    state = torch.get_rng_state()
    found = compare_blocks(sharded, values, targets, free_bytes=1 << 33)
    after = [p for layer in sharded.chain.layers for p in layer.module.parameters()]
    assert found.blocks == 4 and found.apart < 1e-12 and not found.left_out
    assert all(p.grad is None and torch.equal(p, b) for p, b in zip(after, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def no_sum_backward(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(collectives, "_summed", lambda gradient, group: gradient.clone())


def no_sum_forward(broken: pytest.MonkeyPatch) -> None:
    def forward(ctx: Any, partial: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(partial)
        return partial

    broken.setattr(collectives._Reduce, "forward", staticmethod(forward))


def wrong_slice(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(
        collectives, "take", lambda whole, form, rank, ranks: take(whole, form, (rank + 1) % ranks, ranks)
    )


def wrong_order(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(collectives, "join", lambda parts, form, size: join([*reversed(parts)], form, size))


def bias_twice(broken: pytest.MonkeyPatch) -> None:
    def row_linear(x: Tensor, weight: Tensor, bias: Tensor, form: None, group: Any) -> Tensor:
        return collectives.reduced(with_bias(F.linear(x, weight), bias), group)

    broken.setattr(products, "row_linear", row_linear)


def unseen_change(broken: pytest.MonkeyPatch) -> None:
    """Replace an in-place change of a view by a new value, which the view's base does not show."""
    broken.setattr(tracing, "groups", lambda graph: {node: node for node in graph.nodes})


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "fault", [no_sum_backward, no_sum_forward, wrong_slice, wrong_order, bias_twice, unseen_change]
)
def test_a_rewriting_that_is_broken_is_refused(fault: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    """A faulty rewriting is refused with the layer, the difference and a fix; without the fault the
    comparison passes.
    """
    assert not compare(by_hand()).left_out
    fault(monkeypatch)
    said = (
        r"layer [0-4] of hand, sharded over 2 tensor-parallel ranks, "
        r"computes other numbers than unsharded: .* apart.*"
    )
    with pytest.raises(
        UsageError, match=said + r"\(1e-09 of the largest value is allowed\).*--tensor 1.*numbers=False"
    ):
        compare(by_hand())


@pytest.mark.sample(1)
@pytest.mark.parametrize("hidden", [16, 240])
def test_short_sequences_show_it_too(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is found in shortened sequences of traced layers too, without dropout; the width may be a
    multiple of the length.
    """
    inner = build("gpt", **GPT | {"layers": 1, "sequence": 20, "hidden": hidden})
    task = Task(
        Traced(inner.build()), batch=inner.batch, loss=inner.loss, name="traced", optimizer=torch.optim.SGD
    )
    sharded, values, targets = divided(task)
    fine = compare_blocks(sharded, values, targets, free_bytes=1 << 33, longest=0.0)
    assert fine.blocks and not fine.left_out and fine.apart < 1e-9
    no_sum_backward(monkeypatch)
    with pytest.raises(UsageError, match=r"sequences of 8 instead of 20 positions and without dropout"):
        compare_blocks(sharded, values, targets, free_bytes=1 << 33, longest=0.0)


WIDE = {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 260, "num_attention_heads": 4}
WIDE |= {"vocab_size": 500, "max_position_embeddings": 40, "sequence": 40}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 96, "n_head": 4, "vocab_size": 500, "n_positions": 40},
    "llama": {**WIDE, "num_key_value_heads": 2},
    "bert": WIDE,
    "t5": {
        "num_layers": 2,
        "num_decoder_layers": 2,
        "d_model": 96,
        "d_kv": 24,
        "d_ff": 260,
        "vocab_size": 500,
    },
    "mixtral": {**WIDE, "num_key_value_heads": 2, "num_local_experts": 4},
}


@pytest.mark.gallery
@pytest.mark.parametrize("longest", [100.0, 0.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers_agree_in_full_and_cut_short(family: str, longest: float) -> None:
    """Families of transformers pass in full and shortened, with masks, position tables, pairs of positions
    and expert tokens of other sizes.
    """
    pytest.importorskip("transformers")
    found = compare(hf(family, **FAMILIES[family]), longest=longest)
    assert found.blocks > 2 and not found.left_out and found.apart < 1e-9


def test_layers_by_hand_take_shorter_batches_as_they_are() -> None:
    """The layers of an untraced chain take shorter batches; the layers of its ranks are traced for a length,
    without dropout.
    """
    found = compare(build("gpt", **GPT), longest=0.0)
    assert found.blocks == 4 and not found.left_out and found.apart < 1e-9


@torch.library.custom_op("pipefit_tests::single", mutates_args=())
def single(x: Tensor) -> Tensor:
    """Compute with a kernel without double precision."""
    if x.dtype is torch.float64:
        raise RuntimeError("no double here")
    return x.clone()


single.register_fake(torch.empty_like)
single.register_autograd(lambda ctx, gradient: gradient)


class Narrow(nn.Module):
    """A divided layer with such a kernel, which fails in other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(single(x))))


def test_what_has_no_double_precision_is_compared_in_its_own() -> None:
    """A layer without double precision is compared in its own dtype, within its rounding."""
    model = nn.Sequential(Narrow(), nn.Linear(8, 8))
    found = compare(Task(model, batch=by_hand().batch, loss=nn.MSELoss(), optimizer=torch.optim.SGD))
    assert found.blocks == 2 and not found.left_out and 0 < found.apart < 1e-4


def test_what_is_left_out_says_why() -> None:
    """Skipped comparisons name the reason: too little memory, or too much time with a batch that cannot be
    shortened.
    """
    assert (
        "layer 0 needs 2.25 KiB on the host, which has 10 B free"
        in compare(by_hand(), free_bytes=10).left_out
    )
    assert (
        "would take about 0 s, and its batches cannot be shortened"
        in compare(by_hand(), longest=-1.0).left_out
    )
