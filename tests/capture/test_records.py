"""Batches and outputs of dataclasses and mappings reach the module and the loss unchanged, and train."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from pipefit.capture import Task, capture
from pipefit.capture.sample import sample
from pipefit.capture.structure import OpenedDataclass, closed, opened
from pipefit.errors import UsageError
from pipefit.profiler import profile
from pipefit.runtime import Trainer
from support.small_tasks import plan_of

SGD = partial(torch.optim.SGD, lr=0.1)


@dataclass
class Points:
    """Points with a name and a part of a custom class."""

    at: Tensor
    name: str = "points"
    weights: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Output of a model with a field that is not an argument."""

    logits: Tensor
    around: Points
    loss: Tensor | None = None
    made: int = field(init=False, default=0)


class Net(nn.Module):
    """A module that takes a dataclass and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, points: Points, labels: Tensor | None = None) -> Found:
        assert type(points) is Points and points.name == "mine"
        logits = self.last(self.first(points.at).relu() * points.weights)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Found(logits=logits, around=Points(at=logits.detach()), loss=loss)


def points(size: int) -> Points:
    """Return made-up points."""
    return Points(torch.randn(size, 4), "mine", torch.rand(size, 4))


def own_loss(size: int) -> tuple[Any, None]:
    """Return a mapping of keyword arguments that is not a dictionary."""
    return UserDict(points=points(size), labels=torch.randint(2, (size,))), None


def labelled(size: int) -> tuple[Any, Points]:
    """Return a dataclass for the module, and one for the loss."""
    return (points(size),), Points(torch.randint(2, (size,)), "labels")


def outside(outputs: Found, targets: Points) -> Tensor:
    """Compute a loss from the dataclasses."""
    assert (
        type(outputs) is Found
        and type(outputs.around) is Points
        and outputs.made == 0
        and outputs.loss is None
    )
    assert type(targets) is Points and targets.name == "labels" and targets.weights is None
    return F.cross_entropy(outputs.logits, targets.at)


TASKS = {
    "own loss": Task(Net, batch=own_loss, loss=None, optimizer=SGD),
    "loss outside": Task(Net, batch=labelled, loss=outside, optimizer=SGD),
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_dataclasses_are_trained_as_they_are(task: Task) -> None:
    """Inputs, outputs and targets of classes unknown to torch train to the numbers of a plain loop."""
    torch.manual_seed(3)
    ours = Net()
    theirs = Net()
    theirs.load_state_dict(ours.state_dict())
    task = replace(task, module=ours)
    costs = profile(task, microbatch_size=2)
    plan = plan_of(task, [1, len(costs.layers) - 1], profiled=costs)
    (inputs, targets), optimizer = task.batch(plan.training.batch_size), SGD(theirs.parameters())
    trainer = Trainer(task, plan)
    for _ in range(2):
        found = trainer.step((inputs, targets))
        outputs = theirs(**inputs) if targets is None else theirs(*inputs)
        loss = outputs.loss if targets is None else F.cross_entropy(outputs.logits, targets.at)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert found == pytest.approx(loss.item(), rel=1e-5)
    assert type(inputs["points"] if targets is None else inputs[0]) is Points


def test_another_setting_is_refused_by_its_place() -> None:
    """A non-tensor field of a dataclass is a setting: another value is refused with its path."""
    task = TASKS["loss outside"]
    found = capture(task, *sample(task, 2))
    with pytest.raises(UsageError, match="'other', but the model was captured with 'mine'"):
        found.flatten(opened((replace(points(2), name="other"),)))


def test_records_are_closed_to_what_they_were() -> None:
    """Flattened and restored, a tree has the same classes and values; mappings become dictionaries."""
    made = Found(logits=torch.ones(2), around=Points(torch.zeros(1)))
    tree = closed(opened([made, (UserDict(a=made),)]))
    again = tree[1][0]["a"]
    assert type(tree[1][0]) is dict and tree[0] is not made and type(again) is Found
    assert again.logits is made.logits and again.around.at is made.around.at
    assert tree[0].logits is made.logits and type(tree[0].around) is Points


def test_leaves_are_told_by_their_fields() -> None:
    """The path of a tensor in a dataclass uses field names, as in an error."""
    named, spec = pytree.tree_flatten_with_path(opened({"x": Points(torch.ones(1), "mine")}))
    assert [pytree.keystr(path) for path, _ in named] == ["['x'].at", "['x'].name", "['x'].weights"]
    again = pytree.tree_unflatten([leaf for _, leaf in named], spec)
    assert isinstance(again["x"], OpenedDataclass) and closed(again)["x"].name == "mine"
