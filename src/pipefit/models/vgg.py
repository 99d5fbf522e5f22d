"""VGG-11, the classic uneven chain: early layers have the activations, one late layer the parameters.

30 layers in torchvision's order: its `features[i]` is layer i here, its `classifier[j]` is layer 23 + j.
132,863,336 parameters by default; the first fully connected layer has 102.8 million of them. In float32 the
eight convolutions' outputs are 28 MiB per 224 x 224 image. (Simonyan and Zisserman, "Very Deep Convolutional
Networks for Large-Scale Image Recognition", 2015, configuration A.)
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Annotated

from torch import nn

from pipefit.capture import Task
from pipefit.models.settings import (
    OptimizerName,
    Rate,
    Share,
    Size,
    at_least,
    checked,
    class_loss,
    initialise,
    noise_batch,
    optimizer_of,
)

# Configuration A: output channels of each convolution as multiples of the first one's, with pooling after
# each group
_GROUPS = ((1,), (2,), (4, 4), (8, 8), (8, 8))
_POOLED = 7  # height and width after the adaptive pool
_SGD_RATE = 1e-3  # without batch norm, ten times this rate diverges


@checked
def vgg11(
    *,
    num_classes: Size = 1000,
    image_size: Annotated[int, at_least(2 ** len(_GROUPS))] = 224,
    width: Size = 64,
    dropout: Share = 0.5,
    inplace: bool = True,
    optimizer: OptimizerName = "sgd",
    lr: Rate | None = None,
) -> Task:
    """VGG-11 on square images (batch, 3, image_size, image_size).

    `width` is the channel count of the first convolution; every other one, and the classifier, scales with
    it. `inplace` lets each ReLU overwrite its input. `lr` None means the optimizer's usual rate.

    Raises:
        UsageError: a setting has a wrong value.
    """
    return Task(
        partial(_chain, num_classes=num_classes, width=width, dropout=dropout, inplace=inplace),
        batch=partial(noise_batch, shape=(3, image_size, image_size), classes=num_classes),
        loss=class_loss,
        optimizer=optimizer_of(optimizer, lr, sgd_rate=_SGD_RATE),
        name="vgg11",
    )


def _chain(*, num_classes: int, width: int, dropout: float, inplace: bool) -> nn.Sequential:
    chain = nn.Sequential(
        _features(width, inplace)
        | OrderedDict(avgpool=nn.AdaptiveAvgPool2d(_POOLED), flatten=nn.Flatten())
        | _classifier(num_classes, width, dropout, inplace)
    )
    chain.apply(initialise)
    return chain


def _features(width: int, inplace: bool) -> OrderedDict[str, nn.Module]:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 3
    for group, multiples in enumerate(_GROUPS, start=1):
        for place, multiple in enumerate(multiples, start=1):
            layers[f"conv{group}_{place}"] = nn.Conv2d(channels, multiple * width, kernel_size=3, padding=1)
            layers[f"relu{group}_{place}"] = nn.ReLU(inplace=inplace)
            channels = multiple * width
        layers[f"pool{group}"] = nn.MaxPool2d(kernel_size=2)
    return layers


def _classifier(num_classes: int, width: int, dropout: float, inplace: bool) -> OrderedDict[str, nn.Module]:
    hidden = 64 * width
    return OrderedDict(
        fc1=nn.Linear(_GROUPS[-1][-1] * width * _POOLED**2, hidden),
        fc1_relu=nn.ReLU(inplace=inplace),
        fc1_dropout=nn.Dropout(dropout),
        fc2=nn.Linear(hidden, hidden),
        fc2_relu=nn.ReLU(inplace=inplace),
        fc2_dropout=nn.Dropout(dropout),
        fc3=nn.Linear(hidden, num_classes),
    )
