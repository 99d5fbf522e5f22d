"""U-Net matches the published parameter counts, a closed form of its layers, and the content of its long
skips.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipefit.models import build

SMALL: dict[str, Any] = {
    "depth": 2,
    "width": 4,
    "convolutions": 1,
    "num_classes": 3,
    "image_size": 8,
    "dropout": 0.0,
}


def chain_of(**settings: Any) -> nn.Sequential:
    chain = build("unet", **settings).build()
    assert isinstance(chain, nn.Sequential)
    return chain


def described(**settings: Any) -> nn.Sequential:
    with torch.device("meta"):
        return chain_of(**settings)


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("convolutions", "width", "millions"), [(6, 72, 362.2), (11, 128, 2210), (24, 128, 4990), (24, 160, 7800)]
)
def test_published_parameter_counts(convolutions: int, width: int, millions: float) -> None:
    """U-Net (B, C) has the parameters of the torchgpipe paper's table, to its digits."""
    count = parameters(described(convolutions=convolutions, width=width, num_classes=1)) / 1e6
    assert count == pytest.approx(millions, abs=0.05 if millions < 1000 else 5)


@pytest.mark.parametrize(("depth", "convolutions"), [(1, 1), (2, 3), (5, 2)])
def test_every_block_but_the_last_has_a_step_behind_it(depth: int, convolutions: int) -> None:
    """There are (2 D + 1) (B + 1) layers: blocks with a step after each but the last, and the head."""
    assert len(described(depth=depth, convolutions=convolutions)) == (2 * depth + 1) * (convolutions + 1)


def test_layers_are_named_after_their_part_and_place() -> None:
    """Layers are named after their function, their level and their place."""
    down, up = ["encode1_1", "down1", "encode2_1", "down2"], ["up2", "decode2_1", "up1", "decode1_1"]
    assert [name for name, _ in chain_of(**SMALL).named_children()] == [*down, "bottom_1", *up, "head"]


def test_what_crosses_each_cut() -> None:
    """Each layer passes on its result and the encoders' results that a decoder still needs, untouched."""
    chain = chain_of(**SMALL)
    values: Any = build("unet", **SMALL).batch(2)[0]
    shapes, seen = [], []
    for name, layer in chain.named_children():
        values = layer(values)
        parts = values if isinstance(values, tuple) else (values,)
        seen += [parts[0]] if name.startswith("encode") else []
        assert all(skip is encoded for skip, encoded in zip(parts[1:], seen, strict=False))
        shapes.append([tuple(part.shape[1:3]) for part in parts])
    one, two = (4, 8), (8, 4)  # channels and side of the skips of the two levels
    assert shapes == [
        *([(4, 8)], [(4, 4), one], [(8, 4), one], [(8, 2), one, two]),
        [(8, 2), one, two],
        *([(16, 4), one], [(4, 4), one], [(8, 8)], [(2, 8)], [(3, 8)]),
    ]


def test_the_skips_carry_the_details() -> None:
    """A change invisible to the pools still reaches the logits, through the first skip."""
    torch.manual_seed(0)
    chain = chain_of(**SMALL)
    encoded = chain[:1](torch.randn(1, 3, 8, 8))
    pooled, skip = chain[1](encoded)
    assert not torch.equal(chain[2:]((pooled, skip)), chain[2:]((pooled, -skip)))


def test_one_block_by_hand() -> None:
    """A block's first convolution changes the channels, and each is followed by instance norm and leaky
    ReLU.
    """
    chain = chain_of(**SMALL | {"convolutions": 3})
    sizes = [(layer.conv.in_channels, layer.conv.out_channels) for layer in map(chain.get_submodule, BLOCKS)]
    assert sizes == [*[(4, 8), (8, 8), (8, 8)], *[(8, 16), (16, 16), (16, 8)], *[(16, 4), (4, 4), (4, 4)]]
    images = torch.randn(2, 4, 4, 4)
    layer: Any = chain.get_submodule("encode2_1")
    convolved = nn.functional.conv2d(images, layer.conv.weight, padding=1)
    normed = (convolved - convolved.mean((2, 3), keepdim=True)) / (
        convolved.var((2, 3), keepdim=True, unbiased=False) + 1e-5
    ).sqrt()
    torch.testing.assert_close(layer(images), torch.where(normed > 0, normed, 0.01 * normed))


BLOCKS = [f"{block}_{place}" for block in ("encode2", "bottom", "decode2") for place in (1, 2, 3)]


def test_targets_are_per_pixel() -> None:
    """Every pixel has a class, that of its patch; the patches are as large as a pixel of the deepest
    images.
    """
    images, targets = build("unet", **SMALL | {"image_size": 16, "channels": 2}).batch(3)
    assert images.shape == (3, 2, 16, 16)
    assert targets.shape == (3, 16, 16)
    corners = targets[:, ::4, ::4]
    assert torch.equal(corners.repeat_interleave(4, 1).repeat_interleave(4, 2), targets)
    assert corners.unique().tolist() == [0, 1, 2]


def test_brighter_patches_are_of_higher_classes() -> None:
    """The mean over the pixels of a class rises from class to class in even steps around zero."""
    torch.manual_seed(0)
    images, targets = build("unet", depth=3, image_size=64, num_classes=4).batch(32)
    means = [images.mean(1)[targets == label].mean().item() for label in range(4)]
    assert means == pytest.approx([-0.75, -0.25, 0.25, 0.75], abs=0.02)


def test_loss_is_the_mean_over_pixels() -> None:
    """The loss is the mean cross entropy over all pixels, so equal microbatches average to their batch."""
    task = build("unet", **SMALL)
    chain = chain_of(**SMALL)
    images, targets = task.batch(4)
    logits = chain(images)
    by_hand = -logits.log_softmax(1).gather(1, targets[:, None]).mean()
    torch.testing.assert_close(task.loss(logits, targets), by_hand)
    parts = [task.loss(chain(i), t) for i, t in zip(images.split(2), targets.split(2), strict=True)]
    torch.testing.assert_close(torch.stack(parts).mean(), by_hand)
