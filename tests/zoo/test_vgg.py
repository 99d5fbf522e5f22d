"""VGG-11 matches torchvision's layout and parameter count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipefit.models import build


def chain_of(**settings: int | float | bool) -> nn.Sequential:
    with torch.device("meta"):
        chain = build("vgg11", **settings).build()
    assert isinstance(chain, nn.Sequential)
    return chain


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_published_parameter_count() -> None:
    """The default has torchvision's 132,863,336 parameters, 102,764,544 of them in the first fully connected
    layer.
    """
    chain = chain_of()
    assert parameters(chain) == 132_863_336
    assert parameters(chain.get_submodule("fc1")) == 102_764_544


def test_layers_are_torchvisions_in_its_order() -> None:
    """The thirty layers are 21 features, pool, flatten and 7 classifier layers, of torchvision's types in its
    order.
    """
    conv, relu, pool, linear, drop = nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Linear, nn.Dropout
    one, two = [conv, relu, pool], [conv, relu, conv, relu, pool]
    features = [*one, *one, *two, *two, *two]
    classifier = [linear, relu, drop, linear, relu, drop, linear]
    chain = chain_of()
    assert len(features) == 21
    assert len(chain) == 30
    assert [type(layer) for layer in chain] == [*features, nn.AdaptiveAvgPool2d, nn.Flatten, *classifier]


def test_layers_are_named_after_their_part_and_place() -> None:
    """Layers are named after their group and place."""
    names = [name for name, _ in chain_of().named_children()]
    assert names[:4] == ["conv1_1", "relu1_1", "pool1", "conv2_1"]
    assert names[19:25] == ["relu5_2", "pool5", "avgpool", "flatten", "fc1", "fc1_relu"]
    assert names[-1] == "fc3"


def test_dropout_and_inplace_are_settings() -> None:
    """Dropout is 0.5 and every ReLU in place by default; both can be changed, and the layers stay 30."""
    for settings, dropout, inplace in (({}, 0.5, True), ({"dropout": 0.0, "inplace": False}, 0.0, False)):
        chain = chain_of(**settings)
        assert len(chain) == 30
        assert [layer.p for layer in chain if isinstance(layer, nn.Dropout)] == [dropout] * 2
        assert {layer.inplace for layer in chain if isinstance(layer, nn.ReLU)} == {inplace}


@pytest.mark.parametrize(("width", "classes"), [(1, 1), (2, 10), (8, 3)])
def test_parameters_are_those_of_the_closed_form(width: int, classes: int) -> None:
    """Convolutions of 3 x 3 over w, 2w, 4w, 4w, 8w, ... channels and the classifier's three products, plus
    biases, add up.
    """
    convolutions = 9 * (3 * width + (2 + 8 + 16 + 32 + 3 * 64) * width**2) + 43 * width
    classifier = (
        (8 * 49 * width + 1) * 64 * width + (64 * width + 1) * 64 * width + (64 * width + 1) * classes
    )
    assert parameters(chain_of(width=width, num_classes=classes)) == convolutions + classifier


@pytest.mark.parametrize("size", [32, 65, 224])
def test_any_image_size(size: int) -> None:
    """Images of 32 or more pixels a side give logits (batch, classes); the batch has that size."""
    task = build("vgg11", image_size=size, width=1, num_classes=6)
    chain = task.build()
    images, targets = task.batch(2)
    assert images.shape == (2, 3, size, size)
    assert chain(images).shape == (2, 6)
    assert targets.shape == (2,)


@pytest.mark.parametrize("width", [2, 16])
def test_signals_keep_their_scale(width: int) -> None:
    """At the start, logits and the gradient at the first layer are neither vanishing nor exploding, at any
    width.
    """
    torch.manual_seed(0)
    task = build("vgg11", width=width, image_size=64, num_classes=10)
    chain = task.build()
    images, targets = task.batch(8)
    logits = chain(images)
    task.loss(logits, targets).backward()
    assert 0.05 < logits.std() < 5
    assert 1e-3 < chain.get_submodule("conv1_1").weight.grad.norm() < 10
