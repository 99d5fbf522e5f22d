"""AmoebaNet-D matches the published parameter counts, an explicit genotype, and its pairs."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipefit.models import build
from support.gallery_samples import sampled

SMALL: dict[str, Any] = {"layers": 3, "filters": 16, "num_classes": 4, "image_size": 64}


def chain_of(**settings: Any) -> nn.Sequential:
    chain = build("amoebanet", **settings).build()
    assert isinstance(chain, nn.Sequential)
    return chain


def described(**settings: Any) -> nn.Sequential:
    with torch.device("meta"):
        return chain_of(**settings)


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


PUBLISHED = [
    (18, 256, 122_470_120),
    (36, 544, 1_055_832_376),
    (36, 808, 2_322_395_707),
    (36, 1008, 3_610_012_132),
]


@pytest.mark.parametrize(
    ("layers", "filters", "count"),
    sampled(PUBLISHED, often=PUBLISHED[:1]),
)
def test_published_parameter_counts(layers: int, filters: int, count: int) -> None:
    """AmoebaNet-D (L, F) has the parameters of the GPipe and mCAP papers in L + 6 layers, counted without
    memory.
    """
    with FakeTensorMode():
        chain = chain_of(layers=layers, filters=filters)
    assert parameters(chain) == count
    assert len(chain) == layers + 6


def test_order_of_the_cells() -> None:
    """The order is three stems, then normal cells in three equal groups with a reduction between them, then
    the classifier.
    """
    names = [name for name, _ in described(layers=6).named_children()]
    first, second, third = (["normal1", "normal2"], ["normal3", "normal4"], ["normal5", "normal6"])
    groups = [*first, "reduction1", *second, "reduction2", *third]
    assert names == ["stem1", "stem2", "stem3", *groups, "classifier"]


def test_pairs_and_shapes() -> None:
    """Every cell passes on its result and the very tensor that came in; reductions double channels, halve the
    sides.
    """
    torch.manual_seed(0)
    chain = chain_of(**SMALL)
    values: Any = build("amoebanet", **SMALL).batch(2)[0]
    shapes = []
    for layer in chain[:-1]:
        before = values[0] if isinstance(values, tuple) else values
        values = layer(values)
        if isinstance(values, tuple):
            assert values[1] is before
        shapes.append(tuple((values[0] if isinstance(values, tuple) else values).shape[1:3]))
    # channels are 4 x outputs joined: three of a reduction cell, four of a normal one
    stems, cells = (
        [(4, 32), (3 * 8, 16), (3 * 16, 8)],
        [(4 * 16, 8), (3 * 32, 4), (4 * 32, 4), (3 * 64, 2), (4 * 64, 2)],
    )
    assert shapes == stems + cells
    assert chain[-1](values).shape == (2, 4)


def test_a_normal_cell_by_hand() -> None:
    """A normal cell computes the five sums of the genotype and joins states 0, 3, 4 and 6."""
    torch.manual_seed(0)
    cell: Any = chain_of(**SMALL).get_submodule("normal1")
    images, skip = torch.randn(2, 48, 8, 8), torch.randn(2, 24, 16, 16)
    joined, passed = cell((images, skip))
    run = list(cell.operations)
    zero, one = cell.enter(images), cell.enter_skip(skip)
    two = run[0](one) + nn.functional.max_pool2d(one, 3, stride=1, padding=1)
    three = one + run[3](zero)
    four = run[4](zero) + run[5](zero)
    five = nn.functional.max_pool2d(two, 3, stride=1, padding=1) + two
    six = nn.functional.avg_pool2d(one, 3, stride=1, padding=1, count_include_pad=False) + run[9](five)
    torch.testing.assert_close(joined, torch.cat((zero, three, four, six), dim=1))
    assert passed is images
    assert [parameters(run[place]) for place in (1, 2, 6, 7, 8)] == [0] * 5


def test_a_reduction_cell_by_hand() -> None:
    """A reduction cell computes its five sums, striding where an operation reads an input, and joins states 4
    to 6.
    """
    torch.manual_seed(0)
    cell: Any = chain_of(**SMALL).get_submodule("reduction1")
    images, skip = torch.randn(2, 64, 8, 8), torch.randn(2, 48, 8, 8)
    joined, _ = cell((images, skip))
    run = list(cell.operations)
    zero, one = cell.enter(images), cell.enter_skip(skip)
    two = nn.functional.max_pool2d(zero, 2) + nn.functional.max_pool2d(zero, 3, stride=2, padding=1)
    three = two + run[3](one)
    four = run[4](two) + nn.functional.max_pool2d(two, 3, stride=1, padding=1)
    five = three + nn.functional.max_pool2d(one, 2)
    six = nn.functional.avg_pool2d(two, 3, stride=1, padding=1, count_include_pad=False) + run[9](three)
    torch.testing.assert_close(joined, torch.cat((four, five, six), dim=1))
    assert three.shape[2:] == (4, 4)


def test_a_halved_skip_sees_every_other_pixel() -> None:
    """One half of a larger skip's channels reads pixels of even rows and columns, the other those of odd
    ones.
    """
    halving: Any = chain_of(**SMALL).get_submodule("normal1.enter_skip")
    halving.norm.eval()
    even = torch.zeros(1, 24, 6, 6)
    even[:, :, ::2, ::2] = torch.rand(1, 24, 3, 3)
    odd = even.roll((1, 1), dims=(2, 3))
    assert halving(even)[:, :8].any() and not halving(even)[:, 8:].any()
    assert halving(odd)[:, 8:].any() and not halving(odd)[:, :8].any()


def test_average_pools_have_the_same_weights() -> None:
    """`pooling="average"` replaces only the 3 x 3 maximum pools: weights are the same, the 2 x 2 ones
    stay.
    """
    maximum, average = described(**SMALL), described(**SMALL, pooling="average")
    assert {n: p.shape for n, p in maximum.named_parameters()} == {
        n: p.shape for n, p in average.named_parameters()
    }
    kernels = [
        sorted({pool.kernel_size for pool in chain.modules() if isinstance(pool, nn.MaxPool2d)})
        for chain in (maximum, average)
    ]
    assert kernels == [[2, 3], [2]]


@pytest.mark.gallery
def test_the_loss_falls_by_a_third_on_fresh_batches() -> None:
    """A tiny model lowers its median loss on fresh batches by a third within 24 steps."""
    torch.manual_seed(0)
    task = build("amoebanet", **SMALL, lr=0.01)
    chain = task.build()
    optimizer = task.optimizer(chain.parameters())
    losses = []
    for _ in range(24):
        images, targets = task.batch(16)
        loss = task.loss(chain(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert median(losses[-9:]) < 2 / 3 * median(losses[:5])


def test_weights_decay_under_sgd_alone() -> None:
    """The default is SGD with momentum 0.9 and weight decay 1e-4, as the mCAP paper trains it."""
    group = build("amoebanet").optimizer([nn.Parameter(torch.zeros(2))]).param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.9, 1e-4)
