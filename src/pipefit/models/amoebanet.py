"""AmoebaNet-D (L, F), found by evolution: cells of ten operations that pass on a pair, their result and their
input.

layers + 6 layers: a convolution stem and two reduction cells as stems, three groups of layers / 3 normal
cells with a reduction between groups, the classifier. Cells start at filters / 4 channels; every reduction
doubles them and halves the image. For 1000 classes (18, 256) has 122,470,120 parameters, (36, 544)
1,055,832,376, (36, 808) 2,322,395,707 and (36, 1008) 3,610,012,132; the mCAP paper trains the largest that
fits.

Real et al., "Regularized Evolution for Image Classifier Architecture Search", 2019. Huang et al., "GPipe",
2019, whose sizes need a normal cell that joins states 0, 3, 4 and 6, as the authors' TensorFlow code does;
their figure does not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.models.settings import (
    OptimizerName,
    Rate,
    Size,
    checked,
    class_loss,
    initialise,
    multiple_of,
    noise_batch,
    optimizer_of,
)

Values = Tensor | tuple[Tensor, Tensor]  # the stem's result, or a cell's result and its input
Pooling = Literal["max", "average"]

_SGD_RATE = 0.1
_SGD_DECAY = 1e-4


@checked
def amoebanet(
    *,
    layers: Annotated[int, multiple_of(3, least=3)] = 18,
    filters: Annotated[int, multiple_of(8, least=8)] = 256,
    num_classes: Size = 1000,
    image_size: Annotated[int, multiple_of(32, least=64)] = 224,
    pooling: Pooling = "max",
    optimizer: OptimizerName = "sgd",
    lr: Rate | None = None,
) -> Task:
    """AmoebaNet-D with `layers` normal cells on square images (batch, 3, image_size, image_size).

    `pooling="average"` replaces the 3 x 3 maximum pools by average pools, which save less for the backward,
    as in torchgpipe's benchmark, whose model mCAP and others measured. `lr` None means the optimizer's usual
    rate; SGD decays weights by 1e-4.

    Raises:
        UsageError: a setting has a wrong value.
    """
    return Task(
        partial(_chain, layers=layers, filters=filters, num_classes=num_classes, pooling=pooling),
        batch=partial(noise_batch, shape=(3, image_size, image_size), classes=num_classes),
        loss=class_loss,
        optimizer=optimizer_of(optimizer, lr, sgd_rate=_SGD_RATE, sgd_decay=_SGD_DECAY),
        name="amoebanet",
    )


def _same(_channels: int, _stride: int) -> nn.Module:
    return nn.Identity()


def _average3(_channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(kernel_size=3, stride=stride, padding=1, count_include_pad=False)


def _max2(_channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(kernel_size=2, stride=stride)


def _max3(_channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(kernel_size=3, stride=stride, padding=1)


def _conv1(channels: int, stride: int) -> nn.Module:
    return nn.Sequential(*_convolve(channels, channels, stride=(stride, stride)))


def _conv3(channels: int, stride: int) -> nn.Module:
    inner = channels // 4
    return nn.Sequential(
        *_convolve(channels, inner),
        *_convolve(inner, inner, kernel=(3, 3), stride=(stride, stride)),
        *_convolve(inner, channels),
    )


def _conv7(channels: int, stride: int) -> nn.Module:
    inner = channels // 4
    return nn.Sequential(
        *_convolve(channels, inner),
        *_convolve(inner, inner, kernel=(1, 7), stride=(1, stride)),
        *_convolve(inner, inner, kernel=(7, 1), stride=(stride, 1)),
        *_convolve(inner, channels),
    )


def _convolve(
    inward: int, outward: int, *, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Return ReLU, convolution and batch norm, the order of all convolutions here."""
    padding = kernel[0] // 2, kernel[1] // 2
    return (
        nn.ReLU(),
        nn.Conv2d(inward, outward, kernel_size=kernel, stride=stride, padding=padding, bias=False),
        nn.BatchNorm2d(outward),
    )


Operation = Callable[[int, int], nn.Module]  # from channels and stride to a module that keeps the channels


class Genotype(NamedTuple):
    """The computation of a cell.

    States 0 and 1 are its input and its skip, and each sum of two operations is a new state.

    An operation is written with the state that it reads; `outputs` are the states whose channels are the
    result.
    """

    sums: tuple[tuple[tuple[Operation, int], tuple[Operation, int]], ...]
    outputs: tuple[int, ...]
    stride: int  # of the operations that read state 0 or 1


_NORMAL = Genotype(
    sums=(
        ((_conv1, 1), (_max3, 1)),
        ((_same, 1), (_conv7, 0)),
        ((_conv1, 0), (_conv7, 0)),
        ((_max3, 2), (_same, 2)),
        ((_average3, 1), (_conv1, 5)),
    ),
    outputs=(0, 3, 4, 6),
    stride=1,
)
_REDUCTION = Genotype(
    sums=(
        ((_max2, 0), (_max3, 0)),
        ((_same, 2), (_conv3, 1)),
        ((_conv7, 2), (_max3, 2)),
        ((_same, 3), (_max2, 1)),
        ((_average3, 2), (_conv1, 3)),
    ),
    outputs=(4, 5, 6),
    stride=2,
)


class Halving(nn.Module):
    """Halving of the images: one half of the channels reads the even rows and columns, the other the odd
    ones.
    """

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(inward, outward // 2, kernel_size=1, stride=2, bias=False)
        self.odd = nn.Conv2d(inward, outward // 2, kernel_size=1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outward)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, inward, side, side) to (batch, outward, side / 2, side / 2); side is even."""
        rectified = self.relu(images)
        shifted = F.pad(rectified[:, :, 1:, 1:], (0, 1, 0, 1))
        normed: Tensor = self.norm(torch.cat((self.even(rectified), self.odd(shifted)), dim=1))
        return normed


class Cell(nn.Module):
    """A normal or a reduction cell: five sums of two operations, concatenated.

    Both inputs are first mapped to the cell's channels.
    """

    def __init__(
        self,
        genotype: Genotype,
        *,
        inward: int,
        skipped: int,
        channels: int,
        halve_skip: bool,
        pooling: Pooling,
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.enter = nn.Sequential(*_convolve(inward, channels))
        self.enter_skip = (
            Halving(skipped, channels) if halve_skip else nn.Sequential(*_convolve(skipped, channels))
        )
        self.operations = nn.ModuleList(
            (_average3 if make is _max3 and pooling == "average" else make)(
                channels, genotype.stride if state < 2 else 1
            )
            for pair in genotype.sums
            for make, state in pair
        )

    def forward(self, values: Values) -> tuple[Tensor, Tensor]:
        """Map (the last cell's result, its input) to (this cell's result, the last cell's result).

        The first cell gets one tensor, the stem's, and uses it for both. The result is (batch, outputs x
        channels, side / stride, ...).
        """
        images, skip = values if isinstance(values, tuple) else (values, values)
        states = [self.enter(images), self.enter_skip(skip)]
        operations = iter(self.operations)
        for (_, first), (_, second) in self.genotype.sums:
            states.append(next(operations)(states[first]) + next(operations)(states[second]))
        return torch.cat([states[output] for output in self.genotype.outputs], dim=1), images


class Classifier(nn.Module):
    """The mean over the images of the last cell, and a linear layer. The skip ends here."""

    def __init__(self, inward: int, num_classes: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(inward, num_classes)

    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        """Map (batch, inward, side, side) and a skip to logits (batch, num_classes)."""
        logits: Tensor = self.linear(self.pool(values[0]).flatten(1))
        return logits


def _chain(*, layers: int, filters: int, num_classes: int, pooling: Pooling) -> nn.Sequential:
    channels = filters // 4
    stem = nn.Conv2d(3, channels, kernel_size=3, stride=2, padding=1, bias=False)
    chain: OrderedDict[str, nn.Module] = OrderedDict(
        stem1=nn.Sequential(nn.ReLU(), stem, nn.BatchNorm2d(channels))
    )
    normal = [("normal", _NORMAL)] * (layers // 3)
    kinds = (
        [("stem", _REDUCTION)] * 2
        + normal
        + [("reduction", _REDUCTION)]
        + normal
        + [("reduction", _REDUCTION)]
    )
    skipped, inward, halved = channels, channels, False
    places = {"stem": 1, "normal": 0, "reduction": 0}
    for kind, genotype in kinds + normal:
        channels *= genotype.stride
        places[kind] += 1
        chain[f"{kind}{places[kind]}"] = Cell(
            genotype, inward=inward, skipped=skipped, channels=channels, halve_skip=halved, pooling=pooling
        )
        skipped, inward, halved = inward, len(genotype.outputs) * channels, genotype is _REDUCTION
    chain["classifier"] = Classifier(inward, num_classes)
    model = nn.Sequential(chain)
    model.apply(initialise)
    return model
