"""Half-precision parameters with float32 master copies, against a loop with explicit copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.runtime import Trainer
from pipefit.runtime.options import StepReport
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from support.copies_by_hand import FIRST_SCALE, ByHand
from support.known_profiles import profile
from support.small_tasks import profile_of

Batch = tuple[Tensor, Tensor]
SAMPLES, MICROBATCH = 8, 4
DTYPES = {"master-bfloat16": torch.bfloat16, "master-float16": torch.float16}
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


# Sums over threads may be taken in another order
pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------- the tasks


def network() -> nn.Sequential:
    """Return linear layers without randomness."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4)
    )


class Head(nn.Module):
    """Logits by the weight of an embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Compute rows of logits."""
        return F.linear(x, self.weight)


def tied() -> nn.Sequential:
    """Return an embedding whose weight is the head's too."""
    torch.manual_seed(3)
    embedding = nn.Embedding(20, 8)
    return nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), Head(embedding.weight))


def partly_frozen() -> nn.Sequential:
    """Return layers, one of them frozen and one with a frozen weight."""
    module = network()
    module[0].requires_grad_(False)
    module[2].weight.requires_grad_(False)
    return module


def rows(size: int) -> Batch:
    """Return made-up regression data."""
    return torch.randn(size, 12), torch.randn(size, 4)


def words(size: int) -> Batch:
    """Return made-up tokens."""
    return torch.randint(0, 20, (size,)), torch.randint(0, 20, (size,))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of squares in float32."""
    return F.mse_loss(outputs.float(), targets.float())


def tiny_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss whose gradients underflow in float16 unless they are scaled."""
    return squares(outputs, targets) * 1e-5


def half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of squares in half precision."""
    return F.mse_loss(outputs, targets)


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy in float32."""
    return F.cross_entropy(outputs.float(), targets)


def task_of(
    precision: str = "master-bfloat16", module: Callable[[], nn.Module] = network, **settings: Any
) -> Task:
    """Return a task that trains `module` with master weights, by AdamW by default."""
    usual = {"batch": rows, "loss": squares, "optimizer": ADAMW}
    return Task(module, precision=precision, **(usual | settings))


def plan_of(
    task: Task, split: Sequence[int], *, clip_norm: float | None = None, microbatches: int = 2
) -> Plan:
    """Return a plan whose stage s holds `split[s]` layers on device s."""
    costs = profile_of(task, SAMPLES // microbatches)
    edges = [0, *accumulate(split)]
    return Plan(
        profile=costs,
        cluster=Cluster.emulated((len(split), 1 << 30)),
        training=Training(
            batch_size=SAMPLES,
            microbatches=microbatches,
            precision=costs.assumptions.precision,
            clip_norm=clip_norm,
        ),
        stages=tuple(Stage(start=a, stop=b, grid=Grid.of(k)) for k, (a, b) in enumerate(pairwise(edges))),
    )


def batches(task: Task, steps: int = 3) -> list[Batch]:
    """Return the batches of all steps."""
    found = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        found.append(task.batch(SAMPLES))
    return found


def differences(trainer: Trainer, hand: ByHand) -> list[str]:
    """Return the names that are not bitwise equal: parameters, float32 copies."""
    state, theirs = trainer.state, hand.module.state_dict()
    assert state.tensors.keys() == theirs.keys()
    found = [name for name, tensor in theirs.items() if not torch.equal(state.tensors[name], tensor)]
    assert all(state.tensors[name].dtype is hand.dtype for name in hand.names)
    assert state.master_weights.keys() >= hand.copies.keys()
    return found + [
        f"copy of {name}"
        for name, copy in hand.copies.items()
        if not torch.equal(state.master_weights[name], copy)
    ]


# ---------------------------------------------------------------- numbers


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
@pytest.mark.parametrize("split", [(6,), (1, 3, 2)])
def test_numbers_are_those_of_copies_kept_by_hand(
    precision: str, optimizer: Callable[..., torch.optim.Optimizer], split: tuple[int, ...]
) -> None:
    """Parameters and copies are bitwise those of a plain loop with float32 copies, on one to three stages."""
    task = task_of(precision, optimizer=optimizer)
    trainer = Trainer(task, plan_of(task, split))
    hand = ByHand(network(), DTYPES[precision], squares, optimizer)
    for batch in batches(task):
        trainer.step(batch)
        assert not hand.step(batch)
        assert differences(trainer, hand) == []


def to_zero(size: int) -> Batch:
    """Return rows with zeros as targets."""
    return torch.randn(size, 12), torch.zeros(size, 12)


def test_updates_too_small_for_half_precision_add_up() -> None:
    """Steps of a thousandth of a parameter move it with master weights, and leave it unchanged without."""
    moved = {}
    for precision in ("bfloat16", "master-bfloat16"):
        optimizer = partial(torch.optim.Adam, lr=1e-3)
        task = task_of(precision, lambda: nn.Sequential(nn.LayerNorm(12)), batch=to_zero, optimizer=optimizer)
        trainer = Trainer(task, plan_of(task, (1,)))
        for batch in batches(task, steps=5):
            trainer.step(batch)
        moved[precision] = (trainer.state_dict()["0.weight"] != 1).tolist()
    assert moved == {"bfloat16": [False] * 12, "master-bfloat16": [True] * 12}


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("split", [(6,), (2, 2, 2)])
def test_clipping_is_done_in_single_precision(precision: str, split: tuple[int, ...]) -> None:
    """Clipping is in float32, bitwise: the norm of gradients, and their products with the clipping factor."""
    task, reports = task_of(precision, optimizer=MOMENTUM), list[StepReport]()
    trainer = Trainer(task, plan_of(task, split, clip_norm=0.05), callbacks=[reports.append])
    hand = ByHand(network(), DTYPES[precision], squares, MOMENTUM, clip_norm=0.05)
    for batch in batches(task):
        trainer.step(batch)
        hand.step(batch)
        assert differences(trainer, hand) == []
        assert reports[-1].gradient_norm == hand.norm > 0.05


@pytest.mark.parametrize("clip_norm", [None, 1e-6])
def test_small_gradients_survive_in_float16_by_the_loss_scale(clip_norm: float | None) -> None:
    """Gradients are divided by the loss scale in float32, since float16 would round them to zero; an overflow
    in one stage skips the update of all, and leaves parameters and copies alone.
    """
    task, reports = task_of("master-float16", loss=tiny_squares, optimizer=MOMENTUM), list[StepReport]()
    trainer = Trainer(task, plan_of(task, (2, 2, 2), clip_norm=clip_norm), callbacks=[reports.append])
    hand = ByHand(network(), torch.float16, tiny_squares, MOMENTUM, clip_norm=clip_norm)
    for step, (x, y) in enumerate(batches(task)):
        batch = (x, y * 6e4) if step == 1 else (x, y)
        trainer.step(batch)
        skipped = hand.step(batch)
        assert differences(trainer, hand) == []
        assert (reports[-1].skipped, reports[-1].loss_scale) == (skipped, hand.scale)
    assert [report.skipped for report in reports] == [False, True, False]
    assert reports[0].gradient_norm is not None and 0 < reports[0].gradient_norm < 1e-4


def test_a_loss_scale_that_half_precision_cannot_hold_is_halved() -> None:
    """A first loss scale beyond float16 starts the backward from infinity: that step is skipped and the scale
    halved, the next step runs.
    """
    task, reports = task_of("master-float16", loss=half_squares), list[StepReport]()
    trainer = Trainer(task, plan_of(task, (3, 3), microbatches=1), callbacks=[reports.append])
    for batch in batches(task):
        trainer.step(batch)
    assert [report.skipped for report in reports] == [True, False, False]
    assert [report.loss_scale for report in reports] == [FIRST_SCALE / 2] * 3


@pytest.mark.parametrize("split", [(4,), (2, 2), (1, 2, 1)])
def test_weights_tied_across_stages_have_one_value(split: tuple[int, ...]) -> None:
    """Every stage's copy of a shared parameter stays equal; one microbatch, so that sums have one order."""
    task = task_of(module=tied, batch=words, loss=entropy)
    trainer = Trainer(task, plan_of(task, split, microbatches=1, clip_norm=1.0))
    hand = ByHand(tied(), torch.bfloat16, entropy, ADAMW, microbatches=1, clip_norm=1.0)
    for batch in batches(task):
        trainer.step(batch)
        hand.step(batch)
        assert differences(trainer, hand) == []
        assert torch.equal(trainer.state.master_weights["3.weight"], trainer.state.master_weights["0.weight"])
    trained = [copy for stage in trainer.stages for copy in stage.optimizer.copies.values()]
    assert len(trained) == len(hand.copies) + (len(split) > 1)


def test_frozen_parameters_have_no_copy() -> None:
    """Frozen parameters stay unchanged in half precision, without a float32 copy."""
    task = task_of(module=partly_frozen)
    trainer = Trainer(task, plan_of(task, (1, 3, 2)))
    hand = ByHand(partly_frozen(), torch.bfloat16, squares, ADAMW)
    for batch in batches(task):
        trainer.step(batch)
        hand.step(batch)
    assert differences(trainer, hand) == []
    assert trainer.state.master_weights.keys() == {"2.bias", "4.weight", "4.bias", "5.weight", "5.bias"}


def test_groups_and_schedulers_reach_the_copies() -> None:
    """Options of parameter groups, by their original names, and a rate that halves after every update apply
    to the copies.
    """

    def options(name: str, parameter: Tensor) -> dict[str, Any]:
        return {"weight_decay": 0.5} if name.endswith("weight") and parameter.ndim > 1 else {}

    def halve(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    reports = list[StepReport]()
    task = task_of(groups=options, scheduler=halve)
    trainer = Trainer(task, plan_of(task, (2, 4)), callbacks=[reports.append])
    hand = ByHand(network(), torch.bfloat16, squares, ADAMW, groups=options)
    scheduler = halve(hand.optimizer)
    for batch in batches(task):
        trainer.step(batch)
        hand.step(batch)
        scheduler.step()
        assert differences(trainer, hand) == []
    assert [report.learning_rate for report in reports] == [0.005, 0.0025, 0.00125]


def test_gradients_accumulate_in_half_precision() -> None:
    """With accumulate=2 gradients accumulate in half precision, and every second batch updates the copies."""
    task = task_of()
    trainer = Trainer(task, plan_of(task, (3, 3)), accumulate=2)
    before = {name: copy.clone() for name, copy in trainer.state.master_weights.items()}
    first, second, _ = batches(task)
    trainer.step(first)
    assert all(torch.equal(copy, before[name]) for name, copy in trainer.state.master_weights.items())
    trainer.step(second)
    assert not any(torch.equal(copy, before[name]) for name, copy in trainer.state.master_weights.items())


# ---------------------------------------------------------------- the state


@pytest.mark.parametrize("split", [(6,), (3, 3)])
def test_another_plan_goes_on_exactly(split: tuple[int, ...]) -> None:
    """A plan of another split resumes from three stages' state exactly: parameters, copies and optimizer
    state.
    """
    task = task_of()
    hand, given = ByHand(network(), torch.bfloat16, squares, ADAMW), batches(task, steps=4)
    first, second = Trainer(task, plan_of(task, (1, 3, 2))), Trainer(task, plan_of(task, split), seed=5)
    for batch in given[:2]:
        first.step(batch)
    first.state.load_into(list(second.stages))
    for batch in given[2:]:
        second.step(batch)
    for batch in given:
        hand.step(batch)
    assert differences(second, hand) == []


def test_a_plan_of_single_precision_starts_from_the_copies() -> None:
    """A float32 plan starts from the copies' exact values, not the rounded ones; and back."""
    task = task_of()
    single = replace(task, precision="float32")
    trained, taken = Trainer(task, plan_of(task, (3, 3))), Trainer(single, plan_of(single, (6,)))
    for batch in batches(task):
        trained.step(batch)
    trained.state.load_into(list(taken.stages))
    masters = trained.state.master_weights
    assert all(torch.equal(tensor, masters[name]) for name, tensor in taken.state_dict().items())
    back = Trainer(task, plan_of(task, (2, 4)))
    taken.state.load_into(list(back.stages))
    assert all(torch.equal(copy, masters[name]) for name, copy in back.state.master_weights.items())


# ---------------------------------------------------------------- the optimizer


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    """An optimizer over the module's parameters, which would not update the copies, is refused with the
    reason.
    """
    module = network()
    task = task_of(module=module, optimizer=lambda groups: ADAMW(module.parameters()))
    with pytest.raises(UsageError, match="other parameters than the groups of its stage"):
        profile(task, microbatch_size=MICROBATCH)


def test_an_optimizer_that_joins_the_groups_is_stepped_layer_by_layer() -> None:
    """An optimizer with one group for all parameters is stepped layer by layer, with the same numbers."""

    def joined(groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return ADAMW([parameter for group in groups for parameter in group["params"]])

    task = task_of(optimizer=joined)
    trainer, hand = Trainer(task, plan_of(task, (6,))), ByHand(network(), torch.bfloat16, squares, ADAMW)
    for batch in batches(task):
        trainer.step(batch)
        hand.step(batch)
    assert differences(trainer, hand) == []


def test_an_update_that_fails_leaves_no_gradients_behind() -> None:
    """After an error inside the optimizer the copies have no float32 gradients, and all groups are restored."""

    class Failing(torch.optim.SGD):
        works = True

        def step(self, closure: Any = None) -> Any:
            if not self.works:
                raise RuntimeError("no update today")
            return super().step(closure)

    task = task_of(optimizer=partial(Failing, lr=0.1))
    trainer = Trainer(task, plan_of(task, (6,)))
    (stage,) = trainer.stages
    groups, stage.optimizer.optimizer.works = list(stage.optimizer.param_groups), False
    with pytest.raises(RuntimeError, match="no update today"):
        trainer.step(batches(task)[0])
    assert stage.optimizer.param_groups == groups
    assert all(copy.grad is None for copy in stage.optimizer.copies.values())
