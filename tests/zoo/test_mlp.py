"""The uneven perceptron: its layers, its parameters, its loss."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipefit import models


def chain_of(**values: object) -> nn.Sequential:
    with torch.device("meta"):
        chain = models.build("mlp", **values).build()
    assert isinstance(chain, nn.Sequential)
    return chain


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


sizes = st.integers(1, 50)


@settings(max_examples=50)
@given(st.lists(sizes, min_size=1, max_size=6), sizes, sizes)
def test_parameters_are_those_of_the_closed_form(widths: list[int], inputs: int, classes: int) -> None:
    """Each linear layer, including the head, has (before + 1) x after parameters."""
    chain = chain_of(widths=tuple(widths), inputs=inputs, classes=classes)
    ends = [inputs, *widths, classes]
    assert parameters(chain) == sum((ends[i] + 1) * ends[i + 1] for i in range(len(ends) - 1))
    assert len(chain) == 2 * len(widths) + 1
    assert chain(torch.empty(3, inputs, device="meta")).shape == (3, classes)


def test_default_is_uneven() -> None:
    """By default one hidden layer has more than a hundred times the parameters of another."""
    counts = [parameters(layer) for layer in chain_of() if isinstance(layer, nn.Linear)][:-1]
    assert max(counts) > 100 * min(counts)


def test_layers_are_named_after_their_part_and_place() -> None:
    """Layers are named after their kind and place; dropout layers exist only if there is dropout."""
    plain = chain_of(widths=(4, 2), activation="gelu")
    assert [name for name, _ in plain.named_children()] == ["linear0", "gelu0", "linear1", "gelu1", "head"]
    dropped = chain_of(widths=(4,), activation="tanh", dropout=0.25)
    assert [name for name, _ in dropped.named_children()] == ["linear0", "tanh0", "dropout0", "head"]
    assert [layer.p for layer in dropped if isinstance(layer, nn.Dropout)] == [0.25]


def test_the_mean_tells_the_class() -> None:
    """Inputs are noise around a level that rises with the class."""
    torch.manual_seed(0)
    inputs, targets = models.build("mlp", inputs=400, classes=4).batch(400)
    assert inputs.shape == (400, 400)
    levels = torch.stack([inputs[targets == label].mean() for label in range(4)])
    torch.testing.assert_close(levels, torch.tensor([-0.75, -0.25, 0.25, 0.75]), rtol=0, atol=0.05)


def test_loss_of_microbatches() -> None:
    """The mean of the losses of equal microbatches is the loss of the batch; uniform logits lose
    log(classes).
    """
    torch.manual_seed(0)
    task = models.build("mlp", classes=7)
    outputs, (_, targets) = torch.randn(6, 7), task.batch(6)
    parts = [task.loss(o, t) for o, t in zip(outputs.split(2), targets.split(2), strict=True)]
    torch.testing.assert_close(torch.stack(parts).mean(), task.loss(outputs, targets))
    torch.testing.assert_close(task.loss(torch.zeros(6, 7), targets), torch.tensor(7.0).log())
