"""Tuples of one tensor, lists and single tensors: every layer and the loss get the containers of plain
training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.lowering.passes.recomputation import recompute_decisions
from pipefit.runtime import Trainer, certify
from pipefit.simulator import simulate
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.small_tasks import SGD, plan_of


class Strict(nn.Module):
    """A layer that takes and returns given containers: a tensor, or a tuple or list of one or two."""

    def __init__(self, takes: str, gives: str) -> None:
        super().__init__()
        self.takes, self.gives, self.linear = takes, gives, nn.Linear(4, 4)

    def forward(self, given: Any) -> Any:
        assert form(given) == self.takes, f"{form(given)} instead of {self.takes}"
        x = self.linear(given if isinstance(given, Tensor) else sum(given))
        kind, _, count = self.gives.partition(" ")
        return x if kind == "tensor" else {"tuple": tuple, "list": list}[kind]([x, x.tanh()][: int(count)])


def form(given: Any) -> str:
    """Return the name of a value's container."""
    return "tensor" if isinstance(given, Tensor) else f"{type(given).__name__} {len(given)}"


def packed(tensors: list[Tensor], kind: str) -> Any:
    return (
        tensors[0] if kind == "tensor" else {"tuple": tuple, "list": list}[kind.split(maxsplit=1)[0]](tensors)
    )


def task_of(forms: list[str], targets: str = "tensor") -> Task:
    """Return the task of a chain with these containers at its boundaries, inputs and outputs included."""

    def batch(size: int) -> tuple[Any, Any]:
        wide = 1 if forms[0] == "tensor" else int(forms[0].split()[1])
        aims = 1 if targets == "tensor" else int(targets.split()[1])
        inputs = packed([torch.randn(size, 4) for _ in range(wide)], forms[0])
        return inputs, packed([torch.randn(size, 4) for _ in range(aims)], targets)

    def loss(outputs: Any, wanted: Any) -> Tensor:
        assert (form(outputs), form(wanted)) == (forms[-1], targets)
        found = outputs if isinstance(outputs, Tensor) else sum(outputs)
        return (found - (wanted if isinstance(wanted, Tensor) else sum(wanted))).pow(2).mean()

    def build() -> nn.Module:
        return nn.Sequential(*(Strict(a, b) for a, b in pairwise(forms)))

    return Task(build, batch=batch, loss=loss, optimizer=SGD, name="strict")


def cut(tree: Any, start: int, stop: int) -> Any:
    return tree[start:stop] if isinstance(tree, Tensor) else type(tree)(tensor[start:stop] for tensor in tree)


def plainly(task: Task, steps: int, size: int, microbatches: int) -> dict[str, Tensor]:
    """Return the state after `steps` steps of plain training."""
    torch.manual_seed(0)
    module = task.build()
    optimizer = task.optimizer(module.parameters())
    for step in range(steps):
        torch.manual_seed(step)
        inputs, targets = task.batch(size * microbatches)
        for start in range(0, size * microbatches, size):
            part = cut(inputs, start, start + size), cut(targets, start, start + size)
            assert task.loss is not None
            (task.loss(module(part[0]), part[1]) / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


FORMS = [
    ["tuple 1", "tensor", "tensor"],
    ["tensor", "tuple 1", "tensor"],
    ["tensor", "tuple 1", "tuple 1", "tuple 1"],
    ["list 1", "list 1", "tensor", "list 1"],
    ["list 2", "list 2", "tuple 2", "list 2"],
    ["tuple 2", "tuple 1", "list 1", "tuple 2"],
    ["tensor", "tensor", "list 2"],
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("recompute", sampled(["never", "always"], often=["always"]))
@pytest.mark.parametrize("forms", FORMS, ids=" > ".join)
def test_every_part_gets_what_the_one_before_gave(forms: list[str], recompute: Any) -> None:
    """Containers between layers, between stages and at the loss keep their type; numbers equal plain
    training, and peaks are exact, in evaluations and smaller batches too.
    """
    task = task_of(forms)
    layers = len(forms) - 1
    made = plan_of(task, [1] * layers)
    training = made.training
    plan = replace(
        made,
        decisions=recompute_decisions(
            made.stages,
            made.profile.edges,
            recompute,
            training.schedule,
            training.microbatches,
        ),
    )
    torch.manual_seed(0)
    trainer = Trainer(task, plan)
    for step in range(2):
        torch.manual_seed(step)
        trainer.step(task.batch(4))
    wanted = plainly(task, 2, 2, 2)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in trainer.state_dict().items())
    assert trainer.trace.peak_bytes == certify(task, plan).peak_bytes == simulate(plan, steps=2).peak_bytes
    trainer.evaluate(task.batch(3))
    trainer.step(task.batch(3))


@pytest.mark.parametrize("targets", ["tuple 1", "list 1", "tuple 2", "list 2"])
def test_the_loss_gets_the_targets_as_they_are(targets: str) -> None:
    """The loss gets a tuple of one target as such, as in plain training."""
    task = task_of(["tensor", "tensor"], targets)
    trainer = Trainer(task, plan_of(task, [1]))
    trainer.step(task.batch(4))


def test_layers_that_take_their_input_otherwise_are_not_alike() -> None:
    """Two layers of one class and size are different kinds if one takes a tuple of one and the other a
    tensor.
    """

    class Either(nn.Linear):
        def forward(self, given: Any) -> Any:
            return super().forward(given if isinstance(given, Tensor) else given[0])

    class Wrap(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x * 2,)

    task = replace(
        task_of(["tensor", "tensor"]), module=lambda: nn.Sequential(Either(4, 4), Wrap(), Either(4, 4))
    )
    first, _, last = profile(task, microbatch_size=2).measurements[0].costs[:3]
    assert (first.packing, last.packing) == ("bare", "tuple")


class Paired(nn.Module):
    """A module, not a Sequential, with a tuple as its only argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(pair, tuple)
        return self.linear(sum(pair)).tanh()


@pytest.mark.parametrize("count", [1, 2])
def test_a_module_whose_argument_is_a_tuple_gets_one(count: int) -> None:
    """A tuple inside the tuple of arguments is one argument, even if it holds one tensor."""

    def batch(size: int) -> tuple[Any, Tensor]:
        return (tuple(torch.randn(size, 4) for _ in range(count)),), torch.randn(size, 4)

    task = replace(task_of(["tensor", "tensor"]), module=Paired, batch=batch, loss=nn.functional.mse_loss)
    plan = plan_of(task, [...], size=4, microbatches=1)
    torch.manual_seed(1)
    trainer, given = Trainer(task, plan), task.batch(4)
    torch.manual_seed(0)
    module = Paired()
    assert trainer.step(given) == pytest.approx(nn.functional.mse_loss(module(*given[0]), given[1]).item())


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (lambda n: (), "the inputs of a batch of strict contain no tensor"),
        (lambda n: [], "the inputs of a batch of strict contain no tensor"),
        (lambda n: {}, "the inputs of a batch of strict contain no tensor"),
        (lambda n: None, "the inputs of a batch must be a tensor"),
        (lambda n: {"x": torch.randn(n, 4)}, "must be a tensor, or a tuple or list of tensors, not a dict"),
        (
            lambda n: (torch.randn(n, 4), (torch.randn(n, 4),)),
            "must be a tensor, or a tuple or list of tensors, not a",
        ),
        (lambda n: (torch.randn(n, 4), 3), "must all be tensors"),
    ],
)
def test_inputs_that_no_chain_can_take_are_refused(inputs: Callable[[int], Any], words: str) -> None:
    """Empty inputs, and inputs in another container than in plain training, are refused."""
    task = task_of(["tuple 2", "tensor"])
    with pytest.raises(UsageError, match=words):
        profile(replace(task, batch=lambda size: (inputs(size), torch.randn(size, 4))), microbatch_size=2)


@pytest.mark.parametrize("empty", [(), {}])
def test_a_traced_module_without_inputs_is_refused(empty: Any) -> None:
    """A traced module without inputs is refused: it has no samples to split into microbatches."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor | None = None) -> Tensor:
            return self.weight * 2

    task = replace(task_of(["tensor", "tensor"]), module=Constant)
    with pytest.raises(UsageError, match="contain no tensor"):
        profile(replace(task, batch=lambda size: (empty, torch.randn(size, 4))), microbatch_size=2)
    with pytest.raises(UsageError, match="does not use its inputs"):
        profile(task, microbatch_size=2)


@pytest.mark.parametrize("nothing", [(), []])
def test_a_part_that_returns_nothing_is_refused(nothing: Any) -> None:
    """A layer that returns an empty tuple is refused."""

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return nothing

    task = replace(task_of(["tensor", "tensor"]), module=lambda: nn.Sequential(nn.Linear(4, 4), Nothing()))
    with pytest.raises(UsageError, match=f"1 returns an empty {type(nothing).__name__}"):
        profile(task, microbatch_size=2)


@pytest.mark.parametrize("nothing", [(), [], {}])
def test_targets_may_hold_nothing(nothing: Any) -> None:
    """Targets may be empty for a loss that needs none."""
    task = task_of(["tensor", "tensor"])

    def loss(outputs: Tensor, targets: Any) -> Tensor:
        assert targets == nothing and type(targets) is type(nothing)
        return outputs.mean()

    task = replace(task, batch=lambda size: (torch.randn(size, 4), nothing), loss=loss)
    Trainer(task, plan_of(task, [1])).step(task.batch(4))


def test_a_step_takes_a_list_for_a_tuple_and_nothing_else() -> None:
    """`step` takes lists in place of tuples, as a DataLoader makes them; dictionaries and other nestings are
    refused.
    """
    task = task_of(["tuple 2", "tensor"])
    trainer = Trainer(task, plan_of(task, [1]))
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    trainer.step(([a, b], b))
    for inputs in ({"a": a, "b": b}, (a, (b,)), (a,), (a, b, b)):
        with pytest.raises(UsageError, match="the inputs changed"):
            trainer.step((inputs, b))
