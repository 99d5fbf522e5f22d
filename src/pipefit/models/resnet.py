"""ResNet of bottleneck blocks: few parameters, large activations, batch norm in every block.

In torchvision's layout: the stem's convolution, norm, ReLU and pool are four layers, each bottleneck block is
one, and the pool, the flatten and the classifier end the chain: blocks + 7 layers. ResNet-101 has 40 layers
and 44,549,160 parameters. (He et al., "Deep Residual Learning for Image Recognition", 2016; the stride is in
the 3 x 3 convolution.)
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.models.settings import (
    OptimizerName,
    Rate,
    Size,
    Sizes,
    checked,
    class_loss,
    initialise,
    noise_batch,
    optimizer_of,
)

_RESNET101 = (3, 4, 23, 3)
_EXPANSION = 4  # ratio of a block's output channels to its inner ones
_SGD_RATE = 0.1
_SGD_DECAY = 1e-4


@checked
def resnet(
    *,
    blocks: Sizes = _RESNET101,
    num_classes: Size = 1000,
    image_size: Size = 224,
    width: Size = 64,
    inplace: bool = True,
    optimizer: OptimizerName = "sgd",
    lr: Rate | None = None,
) -> Task:
    """ResNet on square images (batch, 3, image_size, image_size): `blocks` bottleneck blocks in each group.

    `width` is the channel count of the stem and of the first group's inner convolutions; each group doubles
    it and halves the image. `inplace` lets each ReLU overwrite its input. `lr` None means the optimizer's
    usual rate.

    Raises:
        UsageError: a setting has a wrong value, or the last group's images would be single pixels.
    """
    _check_image("resnet", image_size, groups=len(blocks))
    return Task(
        partial(_chain, blocks=blocks, num_classes=num_classes, width=width, inplace=inplace),
        batch=partial(noise_batch, shape=(3, image_size, image_size), classes=num_classes),
        loss=class_loss,
        optimizer=optimizer_of(optimizer, lr, sgd_rate=_SGD_RATE, sgd_decay=_SGD_DECAY),
        name="resnet",
    )


@checked
def resnet101(
    *,
    num_classes: Size = 1000,
    image_size: Size = 224,
    width: Size = 64,
    inplace: bool = True,
    optimizer: OptimizerName = "sgd",
    lr: Rate | None = None,
) -> Task:
    """ResNet-101, which is `resnet` with 3, 4, 23 and 3 blocks.

    Raises:
        UsageError: a setting has a wrong value, or the last group's images would be single pixels.
    """
    _check_image("resnet101", image_size, groups=len(_RESNET101))
    task = resnet(
        blocks=_RESNET101, num_classes=num_classes, image_size=image_size, width=width, inplace=inplace,
        optimizer=optimizer, lr=lr,
    )  # fmt: skip
    return replace(task, name="resnet101")


class Bottleneck(nn.Module):
    """Three convolutions, narrow in the middle, added to their input; the ReLU follows the sum."""

    def __init__(self, *, inward: int, inner: int, stride: int, inplace: bool) -> None:
        super().__init__()
        outward = _EXPANSION * inner
        self.conv1 = nn.Conv2d(inward, inner, kernel_size=1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outward, kernel_size=1, bias=False)
        self.norm3 = nn.BatchNorm2d(outward)
        self.relu = nn.ReLU(inplace=inplace)
        self.shortcut = (
            nn.Identity() if inward == outward and stride == 1 else _projection(inward, outward, stride)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, inward, side, side) to (batch, 4 x inner, side / stride rounded up, the same)."""
        inner = self.relu(self.norm1(self.conv1(images)))
        inner = self.relu(self.norm2(self.conv2(inner)))
        summed = self.norm3(self.conv3(inner))
        summed += self.shortcut(images)
        rectified: Tensor = self.relu(summed)
        return rectified


def _projection(inward: int, outward: int, stride: int) -> nn.Sequential:
    """Return the shortcut of a block whose output and input shapes differ."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(inward, outward, kernel_size=1, stride=stride, bias=False),
            norm=nn.BatchNorm2d(outward),
        )
    )


def _check_image(model: str, image_size: int, *, groups: int) -> None:
    """Refuse images that would shrink to one pixel, because batch norm cannot train on them."""
    least = 2 ** (groups + 1) + 1
    if image_size < least:
        raise UsageError(
            f"{model}: image_size={image_size} leaves single pixels for the last of {groups} groups of "
            f"blocks, but batch norm needs more: use {least} or more"
        )


def _chain(*, blocks: tuple[int, ...], num_classes: int, width: int, inplace: bool) -> nn.Sequential:
    chain: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False),
        norm=nn.BatchNorm2d(width),
        relu=nn.ReLU(inplace=inplace),
        pool=nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )
    channels = width
    for group, count in enumerate(blocks, start=1):
        inner = width * 2 ** (group - 1)
        for place in range(1, count + 1):
            stride = 2 if group > 1 and place == 1 else 1
            chain[f"block{group}_{place}"] = Bottleneck(
                inward=channels, inner=inner, stride=stride, inplace=inplace
            )
            channels = _EXPANSION * inner
    chain["avgpool"] = nn.AdaptiveAvgPool2d(1)
    chain["flatten"] = nn.Flatten()
    chain["head"] = nn.Linear(channels, num_classes)
    model = nn.Sequential(chain)
    model.apply(initialise)
    return model
