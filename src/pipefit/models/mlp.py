"""A multilayer perceptron of very uneven layers, for which equal layer counts per stage are a bad split.

A linear layer of a by b has (a + 1) b parameters and 4 b output bytes per example; neighbours differ up to a
hundredfold by default (1.6 million parameters in all). Every linear layer and every activation is a separate
layer. It trains in milliseconds, which makes it the model for tests and demonstrations. (Rumelhart, Hinton
and Williams, "Learning Representations by Back-propagating Errors", 1986.)
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Literal

from torch import nn

from pipefit.capture import Task
from pipefit.models.settings import (
    OptimizerName,
    Rate,
    Share,
    Size,
    Sizes,
    checked,
    class_loss,
    noise_batch,
    optimizer_of,
)

Activation = Literal["relu", "gelu", "tanh"]

_ACTIVATIONS: dict[Activation, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}


@checked
def mlp(
    *,
    widths: Sizes = (64, 2048, 32, 1024, 16, 512, 2048, 128),
    inputs: Size = 784,
    classes: Size = 10,
    activation: Activation = "relu",
    dropout: Share = 0.0,
    optimizer: OptimizerName = "sgd",
    lr: Rate | None = None,
) -> Task:
    """A perceptron on (batch, inputs) with hidden layers of the given widths, to logits (batch, classes).

    2 layers per width (3 if `dropout` is above 0) and the head. `lr` None means the optimizer's usual rate.

    Raises:
        UsageError: a setting has a wrong value.
    """
    return Task(
        partial(
            _chain, widths=widths, inputs=inputs, classes=classes, activation=activation, dropout=dropout
        ),
        batch=partial(noise_batch, shape=(inputs,), classes=classes),
        loss=class_loss,
        optimizer=optimizer_of(optimizer, lr),
        name="mlp",
    )


def _chain(
    *, widths: tuple[int, ...], inputs: int, classes: int, activation: Activation, dropout: float
) -> nn.Sequential:
    chain: OrderedDict[str, nn.Module] = OrderedDict()
    for place, (before, after) in enumerate(zip((inputs, *widths), widths, strict=False)):
        chain[f"linear{place}"] = nn.Linear(before, after)
        chain[f"{activation}{place}"] = _ACTIVATIONS[activation]()
        if dropout:
            chain[f"dropout{place}"] = nn.Dropout(dropout)
    chain["head"] = nn.Linear(widths[-1], classes)
    return nn.Sequential(chain)
