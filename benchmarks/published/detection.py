"""SSD300 on a ResNet-50, the detector of NVIDIA's DeepLearningExamples, with its loss.

Boxes are taken as offsets from their default boxes already; computing these takes a twentieth of what the loss does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from images import timm
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit import Task, chain

_SIDE, _CLASSES = 300, 81
_CHANNELS, _INNER = (1024, 512, 512, 256, 256, 256), (256, 256, 128, 128, 128)
_BOXES = (4, 6, 6, 6, 4, 4)  # at every place of a map of features
_ALL_BOXES = sum(count * side**2 for count, side in zip(_BOXES, (38, 19, 10, 5, 3, 1), strict=True))


def smaller(inputs: int, inner: int, outputs: int, *, halved: bool) -> nn.Sequential:
    """Return the convolutions from one map of features to a smaller one."""
    return nn.Sequential(
        nn.Conv2d(inputs, inner, 1, bias=False),
        nn.BatchNorm2d(inner),
        nn.ReLU(inplace=True),
        nn.Conv2d(inner, outputs, 3, *((2, 1) if halved else (1, 0)), bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Detector(nn.Module):
    """Six maps of features, the first made by three groups of a ResNet-50, and a box and classes for each default."""

    def __init__(self) -> None:
        super().__init__()
        net = timm().create_model("resnet50")
        first = net.layer3[0]
        first.conv2.stride = first.downsample[0].stride = (1, 1)
        self.features = nn.Sequential(
            net.conv1, net.bn1, net.act1, net.maxpool, net.layer1, net.layer2, net.layer3
        )
        sizes = zip(pairwise(_CHANNELS), _INNER, strict=True)
        self.others = nn.ModuleList(
            smaller(inputs, inner, outputs, halved=number < 3)
            for number, ((inputs, outputs), inner) in enumerate(sizes)
        )
        heads = list(zip(_CHANNELS, _BOXES, strict=True))
        self.places = nn.ModuleList(nn.Conv2d(inputs, 4 * count, 3, padding=1) for inputs, count in heads)
        self.classes = nn.ModuleList(
            nn.Conv2d(inputs, _CLASSES * count, 3, padding=1) for inputs, count in heads
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Map (batch, 3, 300, 300) to boxes (batch, 4, boxes) and logits (batch, classes, boxes)."""
        maps = [self.features(images)]
        for other in self.others:
            maps.append(other(maps[-1]))
        places, logits = [], []
        for each, place, logit in zip(maps, self.places, self.classes, strict=True):
            places.append(place(each).reshape(len(images), 4, -1))
            logits.append(logit(each).reshape(len(images), _CLASSES, -1))
        return torch.cat(places, 2), torch.cat(logits, 2)


def loss(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of boxes that contain something, and of three times as many of the worst others."""
    places, logits = (each.float() for each in outputs)
    boxes, classes = targets
    full = classes > 0
    counts = full.sum(1, keepdim=True)
    distances = F.smooth_l1_loss(places, boxes, reduction="none").sum(1)
    entropies = F.cross_entropy(logits, classes, reduction="none")
    order = entropies.detach().masked_fill(full, 0).sort(dim=1, descending=True).indices
    worst = order.sort(dim=1).indices < 3 * counts
    total = (full * distances).sum(1) + ((full | worst) * entropies).sum(1)
    return (total / counts.squeeze(1).clamp(min=1)).mean()


def batch(size: int, *, form: torch.memory_format) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return random images, and boxes and classes for all default boxes."""
    images = torch.randn(size, 3, _SIDE, _SIDE).contiguous(memory_format=form)
    return images, (torch.randn(size, 4, _ALL_BOXES), torch.randint(_CLASSES, (size, _ALL_BOXES)))


def task(form: torch.memory_format, optimizer: Callable[..., torch.optim.Optimizer]) -> Task:
    """Return the task of SSD300 for images of a memory format; weights keep the usual one."""
    return Task(
        lambda: chain([Detector()]),
        batch=partial(batch, form=form),
        loss=loss,
        optimizer=optimizer,
        name="SSD300",
    )
