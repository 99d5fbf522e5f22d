"""The two ends of a graph segment: gradients pass, activations are not held."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipefit.runtime.engine.in_flight import GraphEnds, backward, enter, leave

ANCHOR = torch.empty(0, requires_grad=True)


class Inspect(torch.autograd.Function):
    """An identity whose backward calls a function after its gradient's storage is handed over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[], None]) -> Tensor:
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.look()
        return gradient * 2, None


def enclosed(
    *values: Tensor, differentiable: tuple[bool, ...] = (True,)
) -> tuple[GraphEnds, tuple[Tensor, ...]]:
    """Return a new graph segment over these inputs."""
    graph = GraphEnds()
    return graph, enter(graph, values, differentiable, ANCHOR)


def dead(reference: weakref.ref[Any]) -> bool:
    """Check that the storage is freed."""
    return reference() is None


def storage(tensor: Tensor) -> weakref.ref[Any]:
    """Return a weak reference to the tensor's storage."""
    return weakref.ref(tensor.untyped_storage())


def test_gradients_are_autograds() -> None:
    """Gradients of inputs and parameters through a graph segment are those of one autograd graph."""
    x, weight, gradient = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)
    whole = x.clone().requires_grad_()
    expected = torch.autograd.grad((whole @ weight).tanh(), (whole, weight), gradient)
    graph, (entered,) = enclosed(x)
    leave(graph, ((entered @ weight).tanh(),))
    graph.incoming = [gradient.clone()]
    backward(graph)
    assert torch.equal(graph.outgoing[0], expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_outputs_may_go_before_the_backward() -> None:
    """An output that no operation saved is freed when its holder drops it, and the backward still runs."""
    graph, (entered,) = enclosed(torch.randn(3, 4))
    output = entered @ torch.randn(4, 2)
    leave(graph, (output,))
    reference = storage(output)
    del output
    assert dead(reference)
    graph.incoming = [torch.ones(3, 2)]
    backward(graph)
    assert graph.outgoing[0].shape == (3, 4)


def test_inputs_may_go_before_the_backward() -> None:
    """An input that no operation saved is freed when its holders drop it: the segment does not start with a
    leaf.
    """
    x = torch.randn(3, 4)
    graph, entered = enclosed(x)
    leave(graph, (entered[0] + 1,))
    reference = storage(x)
    del x, entered
    assert dead(reference)
    graph.incoming = [torch.ones(3, 4)]
    backward(graph)
    assert torch.equal(graph.outgoing[0], torch.ones(3, 4))


def test_a_received_gradient_is_freed_once_used() -> None:
    """A received gradient is freed before an earlier operation's backward runs."""
    seen: list[bool] = []
    graph, (entered,) = enclosed(torch.randn(3, 4))
    leave(graph, (Inspect.apply(entered, lambda: seen.append(dead(reference))) * torch.randn(3, 4),))
    gradient = torch.ones(3, 4)
    reference = storage(gradient)
    graph.incoming = [gradient]
    del gradient
    backward(graph)
    assert seen == [True]


def test_an_in_place_operation_may_come_first() -> None:
    """An in-place operation may write into an input and its memory, which autograd forbids for leaves with
    gradients.
    """
    x = torch.tensor([-1.0, 2.0])
    graph, (entered,) = enclosed(x)
    leave(graph, (entered.relu_() * 1,))
    graph.incoming = [torch.tensor([5.0, 7.0])]
    backward(graph)
    assert torch.equal(x, torch.tensor([0.0, 2.0]))
    assert torch.equal(graph.outgoing[0], torch.tensor([0.0, 7.0]))


def test_integers_and_masks_pass_without_gradients() -> None:
    """Integer and boolean values pass along with the others and get no gradient."""
    tokens, mask, x = torch.tensor([1, 0]), torch.tensor([True, False]), torch.randn(2)
    graph, entered = enclosed(tokens, mask, x, differentiable=(False, False, True))
    assert [value.requires_grad for value in entered] == [False, False, True]
    leave(graph, (entered[2] * entered[1], entered[0]))
    graph.incoming = [torch.tensor([3.0, 3.0]), None]
    backward(graph)
    assert graph.outgoing[:2] == (None, None)
    assert torch.equal(graph.outgoing[2], torch.tensor([3.0, 0.0]))


def test_an_unused_input_gets_no_gradient() -> None:
    """An unused input gets no gradient."""
    graph, entered = enclosed(torch.randn(2), torch.randn(2), differentiable=(True, True))
    leave(graph, (entered[0] * 2,))
    graph.incoming = [torch.ones(2)]
    backward(graph)
    assert graph.outgoing[1] is None
    assert torch.equal(graph.outgoing[0], torch.full((2,), 2.0))


def test_without_anything_to_learn_the_backward_does_nothing() -> None:
    """A segment without trainable values is built without a root; its backward only drops incoming gradients."""
    graph = GraphEnds()
    leave(graph, (torch.randn(2) * 2,))
    assert graph.root is None
    gradient = torch.ones(2)
    reference = storage(gradient)
    graph.incoming = [gradient]
    del gradient
    backward(graph)
    assert dead(reference)
    assert graph.outgoing == ()


def test_a_backward_leaves_nothing_behind() -> None:
    """After a backward the graph holds no root, no incoming gradients and no saved tensors."""
    graph, (entered,) = enclosed(torch.randn(3))
    middle = entered.exp()
    reference = storage(middle)
    leave(graph, (middle * 1,))
    del middle, entered
    assert not dead(reference)
    graph.incoming = [torch.ones(3)]
    backward(graph)
    assert (graph.root, graph.incoming) == (None, None)
    assert dead(reference)
