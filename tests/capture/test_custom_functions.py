"""Custom autograd functions in traced models keep their backward; functions that a trace cannot preserve are
refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionMeta
from torch.nn import functional as F
from torch.nn.modules._functions import CrossMapLRN2d
from torch.utils.checkpoint import checkpoint

from pipefit.capture import Task, capture
from pipefit.capture.model import chain
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.profiler import profile


class Three(nn.Module):
    """Three linear layers; `between` is called in the middle."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.between(self.b, self.a(x)))


def task_of(module: nn.Module) -> Task:
    return Task(module, batch=lambda n: (torch.randn(n, 4), torch.randn(n, 4)), loss=F.mse_loss, name="mine")


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a module's parameters."""
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, how: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x * 2, x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, total: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.saved_tensors[0] + total, None, None


class Outer(Function):
    """A function that calls another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Doubled.apply(x, None, "inside")[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 7


class Scaled(Function):
    """A function whose context is filled in `setup_context`, and whose forward has a default argument."""

    @staticmethod
    def forward(x: Tensor, by: float = 3.0) -> Tensor:
        return x * by

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(output.tanh())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


bound = Scaled.apply


def apart(b: nn.Module, x: Tensor) -> Tensor:
    scaled: Tensor = bound(bound(b(x)), by=5.0)
    return scaled


def several(b: nn.Module, x: Tensor) -> Tensor:
    made, total = Doubled.apply(b(x), None, "sum")
    return made * total


def nested(b: nn.Module, x: Tensor) -> Tensor:
    return Outer.apply(b(x))


def without_graph(b: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        kept = Outer.apply(x)
    return b(x) + kept


def local(b: nn.Module, x: Tensor) -> Tensor:
    class Local(Outer):
        pass

    return Local.apply(b(x))


def of_weights(b: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, Outer.apply(b.weight), b.bias)


def of_integers(b: nn.Module, x: Tensor) -> Tensor:
    return b(x) + Outer.apply(torch.arange(4, device=x.device).float())


def of_torch(b: nn.Module, x: Tensor) -> Tensor:
    """Call a function that comes with torch, whose class can also be reached by name."""
    noise: Tensor = CrossMapLRN2d.apply(b(x).view(-1, 4, 1, 1), 3)
    return noise.flatten(1)


@pytest.mark.parametrize(
    "between", [several, nested, apart, without_graph, local, of_weights, of_integers, of_torch]
)
def test_gradients_are_those_of_the_authors_backward(between: Callable[..., Tensor]) -> None:
    """Outputs and all gradients of the chain equal the module's, bit by bit."""
    torch.manual_seed(0)
    module = Three(between)
    inputs, targets = torch.randn(3, 4), torch.randn(3, 4)
    expected = gradients(module, F.mse_loss(module(inputs), targets))
    found = capture(task_of(module), *sample(task_of(module), 3))
    values = found.flatten(inputs)
    for layer in found.layers:
        values = layer(values)
    ours = gradients(module, found.loss(values, found.flatten_targets(targets)))
    assert set(ours) == set(expected)
    assert all(torch.equal(ours[name], gradient) for name, gradient in expected.items())


def test_what_only_a_backward_needs_is_not_traced() -> None:
    """Filling the context is part of the call: the program does not contain its operations."""
    programs, export = [], torch.export.export

    def exported(*args: Any, **kwargs: Any) -> torch.export.ExportedProgram:
        programs.append(export(*args, **kwargs))
        return programs[-1]

    with mock.patch.object(torch.export, "export", exported):
        capture(task_of(Three(apart)), *sample(task_of(Three(apart)), 3))
    operators = [str(node.target) for program in programs for node in program.graph.nodes]
    assert programs and "aten.tanh.default" not in operators


def test_the_name_says_which_function_it_is() -> None:
    """Tasks that differ in a custom function, or in one of its numbers, have different names."""
    prints = {
        profile(task_of(Three(between)), microbatch_size=2).fingerprint.layers
        for between in (nested, several, local)
    }
    assert len(prints) == 3


# -------------------------------------------------------------------- refused


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class WithModule(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: nn.Module) -> Tensor:
        return part(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def inference(b: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return b(x) + x


def tensor_hook(b: nn.Module, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    return b(x)


def saved_elsewhere(b: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(b(x))


def mapped(b: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(b)(x)


@partial(torch.compile, backend="eager")  # the usual backend takes a second to import, in every process
def compiled(x: Tensor) -> Tensor:
    return torch.relu(x)


TRACED = [
    (
        lambda b, x: InPlace.apply(b(x)),
        "InPlace.apply changes its arguments in place; give pipefit the parts",
    ),
    (lambda b, x: WithModule.apply(x, b), "WithModule.apply takes a Linear"),
    (inference, r"torch.inference_mode\(\), which a trace loses; use torch.no_grad"),
    (tensor_hook, "registers a hook on a tensor"),
    (saved_elsewhere, "saves tensors through hooks"),
    (mapped, "torch.vmap"),
]
ANYWHERE = [
    (lambda b, x: checkpoint(b, x, use_reentrant=False), "calls torch.utils.checkpoint"),
    (lambda b, x: checkpoint(b, x, use_reentrant=True), "calls torch.utils.checkpoint"),
    (lambda b, x: b(compiled(x)), "compiled by torch.compile"),
]


@pytest.mark.parametrize(("between", "says"), TRACED + ANYWHERE)
def test_what_a_trace_would_lose_is_refused_with_its_line(between: Callable[..., Tensor], says: str) -> None:
    """The message names the line, the reason and the remedy."""
    with pytest.raises(
        UsageError, match=rf"mine.* cannot be cut into layers \(.*{__name__.rpartition('.')[2]}.*{says}"
    ):
        profile(task_of(Three(between)), microbatch_size=2)


@pytest.mark.parametrize(("between", "says"), ANYWHERE)
def test_what_changes_memory_is_refused_in_layers_by_hand_too(
    between: Callable[..., Tensor], says: str
) -> None:
    """The message names the layer."""
    parts = chain([nn.Linear(4, 4), ("middle", Three(between))])
    with pytest.raises(UsageError, match=rf"layer middle \(Three\) cannot be planned: .*{says}"):
        profile(task_of(parts), microbatch_size=2)


def full(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda *_: None)


def before(module: nn.Module) -> None:
    module.register_full_backward_pre_hook(lambda *_: None)


@pytest.mark.parametrize("add", [full, before])
def test_hooks_on_a_backward_are_refused_in_a_traced_model(add: Callable[[nn.Module], None]) -> None:
    """The module with the hooks refuses a trace; a manual chain keeps them."""
    module = Three(lambda b, x: b(x))
    add(module.b)
    with pytest.raises(UsageError, match="mine cannot be cut into layers: b has hooks on its backward"):
        profile(task_of(module), microbatch_size=2)
    profile(task_of(chain([module.a, module.b, module.c])), microbatch_size=2)


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


@pytest.mark.sample(3)
@pytest.mark.parametrize("compiler", [torch.compile, compiled_in_place])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("built", [False, True])
def test_compiled_modules_are_refused(
    compiler: Callable[[nn.Module], nn.Module], by_hand: bool, built: bool
) -> None:
    """The message gives the place in the model, whether the module exists or a function builds it."""

    def build() -> nn.Module:
        module = Three(lambda b, x: b(x))
        module.b = compiler(module.b)
        return chain([module.a, ("b", module.b)]) if by_hand else module

    with pytest.raises(UsageError, match=r"b of mine is compiled by torch\.compile"):
        profile(task_of(build if built else build()), microbatch_size=2)


def test_the_trace_leaves_torch_as_it_was() -> None:
    """After a refusal, everything patched during a trace is torch's own again."""
    whole = [{**vars(FunctionMeta)}, torch.inference_mode.__enter__, Tensor.register_hook]
    with pytest.raises(UsageError):
        profile(task_of(Three(inference)), microbatch_size=2)
    assert [{**vars(FunctionMeta)}, torch.inference_mode.__enter__, Tensor.register_hook] == whole
    x = torch.ones(2, requires_grad=True)
    Outer.apply(x).sum().backward()
    assert x.grad.tolist() == [7.0, 7.0]


# -------------------------------------------------------------------- modes


def test_a_module_is_trained_in_the_mode_that_its_owner_left_it_in() -> None:
    """A model in evaluation mode trains without dropout and with its existing statistics, as in a plain
    loop.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)).eval()
    theirs = copy.deepcopy(module)
    from pipefit import Trainer, load_cluster, plan

    task = Task(
        module,
        batch=lambda n: (torch.randn(n, 4), torch.randn(n, 4)),
        loss=F.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    found = profile(task, microbatch_size=4)
    trainer = Trainer(task, plan(found, load_cluster("emulated:2x64MiB"), batch_size=4, stages=2))
    batch = task.batch(4)
    trainer.step(batch)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    F.mse_loss(theirs(batch[0]), batch[1]).backward()
    optimizer.step()
    trained = trainer.state_dict()
    assert all(torch.equal(trained[key], tensor) for key, tensor in theirs.state_dict().items())
