"""ResNet matches torchvision's layout and parameter counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipefit.models import build

SMALL: dict[str, Any] = {"blocks": (2, 1), "width": 4, "num_classes": 3, "image_size": 32}


def chain_of(name: str = "resnet", **settings: Any) -> nn.Sequential:
    chain = build(name, **settings).build()
    assert isinstance(chain, nn.Sequential)
    return chain


def described(name: str = "resnet", **settings: Any) -> nn.Sequential:
    with torch.device("meta"):
        return chain_of(name, **settings)


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("blocks", "count"),
    [((3, 4, 6, 3), 25_557_032), ((3, 4, 23, 3), 44_549_160), ((3, 8, 36, 3), 60_192_808)],
)
def test_published_parameter_counts(blocks: tuple[int, ...], count: int) -> None:
    """ResNet-50, -101 and -152 have torchvision's parameters, in blocks + 7 layers."""
    chain = described(blocks=blocks)
    assert parameters(chain) == count
    assert len(chain) == sum(blocks) + 7


def test_resnet101_is_resnet_with_its_blocks() -> None:
    """`resnet101` is `resnet` with its blocks and settings; it has 40 layers."""
    assert parameters(described("resnet101")) == 44_549_160
    assert len(described("resnet101")) == 40
    narrow = [
        {n: p.shape for n, p in described(name, width=8, num_classes=5).named_parameters()}
        for name in RESNETS
    ]
    assert narrow[0] == narrow[1]


RESNETS = ("resnet", "resnet101")


def test_layers_are_named_after_their_part_and_place() -> None:
    """The names are the stem's four layers, blocks by group and place, and the end's three."""
    blocks = ["block1_1", "block1_2", "block2_1"]
    names = [name for name, _ in described(**SMALL).named_children()]
    assert names == ["conv", "norm", "relu", "pool", *blocks, "avgpool", "flatten", "head"]


def test_sides_and_channels() -> None:
    """The stem quarters the image; every group but the first halves it; channels are four times the inner
    ones.
    """
    chain, values, shapes = chain_of(**SMALL), build("resnet", **SMALL).batch(2)[0], []
    for layer in chain:
        values = layer(values)
        shapes.append(tuple(values.shape[1:3]))
    stem, blocks = [(4, 16), (4, 16), (4, 16), (4, 8)], [(16, 8), (16, 8), (32, 4)]
    assert shapes == [*stem, *blocks, (32, 1), (32,), (3,)]


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("name", ["block1_1", "block1_2", "block2_1"])
def test_a_block_by_hand(name: str, inplace: bool) -> None:
    """A block has 1 x 1, 3 x 3 with the stride, 1 x 1, batch norm after each; it adds the input, projected if
    shapes differ.
    """
    torch.manual_seed(0)
    block: Any = chain_of(**SMALL, inplace=inplace).get_submodule(name)
    images = torch.randn(2, block.conv1.in_channels, 8, 8)
    given = images.clone()
    inner, stride = images, 2 if name == "block2_1" else 1
    for place, (padding, step) in enumerate([(0, 1), (1, stride), (0, 1)], start=1):
        weight = block.get_submodule(f"conv{place}").weight
        inner = nn.functional.conv2d(inner, weight, stride=step, padding=padding)
        inner = (inner - inner.mean((0, 2, 3), keepdim=True)) / (
            inner.var((0, 2, 3), keepdim=True, unbiased=False) + 1e-5
        ).sqrt()
        inner = inner.relu() if place < 3 else inner
    assert isinstance(block.shortcut, nn.Identity) == (name == "block1_2")
    torch.testing.assert_close(block(given), (inner + block.shortcut(images)).relu(), rtol=1e-4, atol=1e-5)
    assert torch.equal(given, images)


def test_inplace_is_a_setting() -> None:
    """Every ReLU is in place by default, as torchvision's are, and none with `inplace=False`; weights are the
    same.
    """
    for inplace in (True, False):
        chain = described(**SMALL, inplace=inplace)
        assert {module.inplace for module in chain.modules() if isinstance(module, nn.ReLU)} == {inplace}


def test_smallest_image_trains_alone() -> None:
    """The smallest accepted image trains in a batch of one, which batch norm refuses for a single pixel."""
    task = build("resnet", blocks=(1, 1), width=4, num_classes=3, image_size=9)
    images, targets = task.batch(1)
    task.loss(task.build()(images), targets).backward()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        task.build()(images[:, :, :8, :8])
