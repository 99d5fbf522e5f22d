"""Comparison of a plan with plain training: intact plans pass, and plans with an injected fault fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task, capture
from pipefit.capture.comparison import NotComparable
from pipefit.capture.model import built
from pipefit.capture.plain_training import DrawRecording, Draws, MeanDraws, Replaying
from pipefit.capture.sample import sample
from pipefit.errors import PipefitWarning, UsageError
from pipefit.lowering.passes.recomputation import Recompute, recompute_decisions
from pipefit.runtime import Trainer, certify_numbers
from pipefit.runtime.checks import comparison
from pipefit.runtime.checks.plan_comparison import PlanNumbers, compare_plan
from pipefit.runtime.comm import agreement, collectives, transport
from pipefit.runtime.comm import collectives as gradients
from pipefit.runtime.engine import assembly, execution, forward_backward
from pipefit.runtime.engine.in_flight import Flight
from pipefit.runtime.offload import copying
from pipefit.runtime.optim import half_precision, updates
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Microbatches, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.tensor_parallel import comparison as lockstep
from pipefit.tensor_parallel import forms
from support.known_profiles import profile
from support.offload_choices import movable

WIDTH, MICROBATCHES = 8, 3
Break = Callable[[pytest.MonkeyPatch], None]


class Model(nn.Module):
    """A model with dropout in residual blocks, a tied embedding and head, and a bias used twice."""

    def __init__(self, *, norm: Callable[[int], nn.Module] = nn.LayerNorm, dropout: float = 0.3) -> None:
        super().__init__()
        self.embed, self.head = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                norm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, WIDTH)
            )
            for _ in range(2)
        )
        self.head.weight, self.bias = self.embed.weight, nn.Parameter(torch.randn(WIDTH))
        self.head.bias = self.bias

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH) * 3


def decay(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.2 if parameter.ndim > 1 else 0.0}


def slower(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def task_of(**options: Any) -> Task:
    kept = {"optimizer": partial(torch.optim.AdamW, lr=0.01), "module": Model, **options}
    return Task(
        **{"batch": batch, "loss": F.mse_loss, "groups": decay, "scheduler": slower, "name": "net", **kept}
    )


TASK = task_of()
NORMED = task_of(module=partial(Model, norm=nn.BatchNorm1d, dropout=0.0))
MASTERS = task_of(precision="master-bfloat16")
MOMENTUM = task_of(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))


@lru_cache
def profiled(task: Task) -> ModelProfile:
    return profile(task, microbatch_size=(4, 2), tensor=(1, 2))


def planned(
    task: Task, *grids: Grid, recompute: Recompute = "never", offload: bool = False, **training: Any
) -> Plan:
    """Return a plan of about equal stages on these grids; `offload` moves saved tensors to the host."""
    found = profiled(task)
    layers, count = len(found.layers), len(grids)
    edges = pairwise(layers * number // count for number in range(count + 1))
    stages = tuple(Stage(start=a, stop=b, grid=grid) for (a, b), grid in zip(edges, grids, strict=True))
    options = {"clip_norm": 0.5, "precision": task.precision or "float32", **training}
    plan = Plan(
        profile=found,
        cluster=Cluster.emulated((sum(len(grid.devices) for grid in grids), 1 << 30)),
        training=Training(batch_size=4 * MICROBATCHES, microbatches=MICROBATCHES, **options),
        stages=stages,
        decisions=recompute_decisions(stages, found.edges, recompute, "1f1b", MICROBATCHES),
    )
    if not offload:
        return plan
    moved = Decision(
        stage=0,
        subject=SavedTensors(tensors=tuple(movable(plan, 0)[:4])),
        what=What.OFFLOAD,
        place=parse_place("host"),
        microbatches=Microbatches(1, 1, 0),
    )
    return replace(plan, decisions=(moved,), training=replace(plan.training, schedule="gpipe"))


@lru_cache
def captured(task: Task) -> Any:
    whole = built(task, seed=0)
    batches = [sample(task, 4, seed=seed) for seed in (0, 1)]
    chain = capture(whole, *batches[0])
    return whole, chain.measured(profiled(task).at(4)), batches


def compared(task: Task, plan: Plan) -> PlanNumbers:
    whole, chain, batches = captured(task)
    return compare_plan(whole, plan, chain, batches, plan.training.microbatches)


ONE, TWO = Grid.of(0), (Grid.of(0), Grid.of(1))
REPLICAS = Grid(devices=(0, 1), data=2, buckets=2)
OWNERS = Grid(devices=(0, 1), data=2, shard="optimizer", buckets=2)
GATHERED = Grid(devices=(0, 1), data=2, shard="parameters", buckets=2)
FEWER = Grid(devices=(0, 1), data=2), Grid.of(2)
RANKS = Grid(devices=(0, 1), tensor=2)


# -------------------------------------------------------------------- injected faults


def sums_of_replicas(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transport._ProcessCollective, "add_up", lambda self, members, owners: self._end())


def last_of_a_bucket(patch: pytest.MonkeyPatch) -> None:
    of_layers = gradients._of_layers

    def fewer(*args: Any) -> gradients.Exchanged:
        tensors, owners = of_layers(*args)
        return gradients.Exchanged(tensors[:-1], owners[:-1])

    patch.setattr(gradients, "_of_layers", fewer)


def sums_of_tied(patch: pytest.MonkeyPatch) -> None:
    summed = gradients.summed_gradients

    def apart(stage: Any, action: Any, others: Any) -> gradients.Exchanged:
        tensors, owners = summed(stage, action, others)
        return gradients.Exchanged(
            [t.clone() for t in tensors] if isinstance(action.subject, tuple) else tensors, owners
        )

    patch.setattr(collectives, "summed_gradients", apart)


def updates_of_owners(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transport._ProcessCollective, "hand_out", lambda self, owners: self._end())


def rows_between_degrees(patch: pytest.MonkeyPatch) -> None:
    from pipefit.runtime.engine import runner

    part = runner.DeviceMessages._part

    def first_rows(self: Any, action: Any, message: Any, boundary: Any) -> Any:
        found = part(self, action, message, boundary)
        return None if found is None else found._replace(rows=(0, found.rows[1] - found.rows[0]))

    patch.setattr(runner.DeviceMessages, "_part", first_rows)


def doubled_norm(patch: pytest.MonkeyPatch) -> None:
    factor = agreement.Agreement._factor
    patch.setattr(agreement.Agreement, "_factor", lambda self, norm, clip: factor(self, 2 * norm, clip))


def counted_twice(patch: pytest.MonkeyPatch) -> None:
    """Count a parameter with two names twice in the norm."""
    make = assembly.Agreement

    def twice(names: Sequence[str], own: Any, *args: Any, **options: Any) -> agreement.Agreement:
        again = {"again": own["bias"]} if "bias" in own else {}
        return make([*names, "again"], {**own, **again}, *args, **options)

    patch.setattr(assembly, "Agreement", twice)


def weight_of_microbatches(patch: pytest.MonkeyPatch) -> None:
    run = execution.Execution.run_program

    def heavier(self: Any, program: Any, *, weights: Sequence[float], **options: Any) -> None:
        run(self, program, weights=[weights[0] * 1.5, *weights[1:]], **options)

    patch.setattr(execution.Execution, "run_program", heavier)


def scheduler_twice(patch: pytest.MonkeyPatch) -> None:
    end = updates.Updates._end

    def twice(self: Any, layers: Any) -> None:
        end(self, layers)
        self.scheduler.step()

    patch.setattr(updates.Updates, "_end", twice)


def gradient_kept(patch: pytest.MonkeyPatch) -> None:
    """Keep gradients after an update."""
    step = updates.Updates.step

    def keep(self: Any, layers: Any) -> None:
        gradients = [(p, p.grad) for p in self.parameters(layers)]
        step(self, layers)
        for parameter, gradient in gradients:
            parameter.grad = gradient

    patch.setattr(updates.Updates, "step", keep)
    patch.setattr(execution.Execution, "drop_gradients", lambda self: None)


def other_draws(patch: pytest.MonkeyPatch) -> None:
    """Recompute with other random numbers than the forward."""
    recompute = forward_backward.Passes.recompute

    def again(self: Any, flight: Any, first: int, end: int) -> None:
        flight.seed += 1
        recompute(self, flight, first, end)
        flight.seed -= 1

    patch.setattr(forward_backward.Passes, "recompute", again)


def offset_of_shards(patch: pytest.MonkeyPatch) -> None:
    """Give every rank the first rank's part."""
    local = forms.TensorShard.local

    def first(self: Any, whole: Tensor) -> Tensor:
        begin = self.ranges[0][0] if self.ranges else 0
        return local(
            replace(self, ranges=tuple((start - begin, stop - begin) for start, stop in self.ranges)), whole
        )

    patch.setattr(forms.TensorShard, "local", first)


def sums_of_ranks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lockstep, "_add_up", lambda tensors: None)


def copies_of_masters(patch: pytest.MonkeyPatch) -> None:
    """Update float32 copies without rounding them into the parameters."""
    update = half_precision.MasterWeights._update

    def forgotten(self: Any, stepper: Any, parameters: Any) -> None:
        before = [parameter.clone() for parameter in parameters]
        update(self, stepper, parameters)
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)

    patch.setattr(half_precision.MasterWeights, "_update", forgotten)


def inputs_of_another(patch: pytest.MonkeyPatch) -> None:
    """Feed a stage the rows of another microbatch."""
    rows = Flight.rows

    def other(self: Any, load: Any, microbatches: Any) -> Any:
        return rows(self, load, [*microbatches[1:], microbatches[0]] if load.stage == 0 else microbatches)

    patch.setattr(Flight, "rows", other)


def bytes_of_another(patch: pytest.MonkeyPatch) -> None:
    """Reload the tensors of another microbatch."""
    carry, last = copying.carry, dict[tuple[int, int], Any]()

    def carried(parts: Any, *, outward: bool) -> None:
        key = len(parts), sum(part.nbytes for part in parts)
        if outward and key not in last:
            last[key] = [part._replace(slot=part.slot) for part in parts]
        elif not outward and key in last:
            parts = [part._replace(slot=first.slot) for part, first in zip(parts, last[key], strict=True)]
        carry(parts, outward=outward)

    patch.setattr(copying, "carry", carried)


def update_of_another_group(patch: pytest.MonkeyPatch) -> None:
    """Update all parameters with the options of one group."""
    groups = updates.parameter_groups
    patch.setattr(
        updates, "parameter_groups", lambda layers, options: groups(layers, lambda *_: {"weight_decay": 0.2})
    )


def buffers_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Discard the buffers of a forward."""
    layer = forward_backward.Passes._layer

    def run(self: Any, flight: Any, number: int, values: Any) -> Any:
        held = [b for b in flight.layers[number - self.start].module.buffers() if b.is_floating_point()]
        before = [buffer.clone() for buffer in held]
        found = layer(self, flight, number, values)
        for buffer, value in zip(held, before, strict=True):
            buffer.data.copy_(value)
        return found

    patch.setattr(forward_backward.Passes, "_layer", run)


SEAMS: dict[str, tuple[Break, Task, tuple[Grid, ...], dict[str, Any]]] = {
    "sums of replicas": (sums_of_replicas, TASK, (REPLICAS,), {"clip_norm": None}),
    "the last tensor of a bucket": (last_of_a_bucket, TASK, (REPLICAS,), {}),
    "sums of tied gradients": (sums_of_tied, TASK, TWO, {}),
    "updates of owners": (updates_of_owners, TASK, (OWNERS,), {}),
    "rows between degrees": (rows_between_degrees, TASK, FEWER, {}),
    "a doubled norm, momentum": (doubled_norm, MOMENTUM, (ONE,), {}),
    "a doubled norm, AdamW": (doubled_norm, TASK, TWO, {}),
    "a parameter counted twice": (counted_twice, TASK, (ONE,), {}),
    "weights of microbatches": (weight_of_microbatches, TASK, TWO, {}),
    "the scheduler twice": (scheduler_twice, TASK, (ONE,), {}),
    "gradients kept": (gradient_kept, TASK, (ONE,), {}),
    "stale shards": (updates_of_owners, TASK, (GATHERED,), {}),
    "other draws in a recomputation": (other_draws, TASK, TWO, {"recompute": "always"}),
    "the offset of shards": (offset_of_shards, TASK, (RANKS,), {}),
    "sums of ranks": (sums_of_ranks, TASK, (RANKS,), {}),
    "master weights not copied back": (copies_of_masters, MASTERS, (ONE,), {}),
    "inputs of another microbatch": (inputs_of_another, TASK, TWO, {}),
    "bytes of another microbatch": (bytes_of_another, TASK, (ONE,), {"offload": True}),
    "options of another group": (update_of_another_group, TASK, (ONE,), {}),
    "buffers forgotten": (buffers_forgotten, NORMED, (REPLICAS,), {}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SEAMS)
def test_a_plan_with_a_broken_seam_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An intact plan passes the comparison; the same plan with a fault fails."""
    broken, task, grids, options = SEAMS[name]
    plan = planned(task, *grids, **options)
    right = compared(task, plan)
    assert right.tensors and not right.differences, str(right)
    broken(monkeypatch)
    assert compared(task, plan).differences


# -------------------------------------------------------------------- callers of the comparison


@pytest.mark.compares_plans
def test_a_trainer_refuses_a_plan_that_trains_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer refuses a plan with different numbers before its first step; the error names the difference
    and `numbers=False`.
    """
    plan = planned(TASK, *TWO)
    assert not Trainer(TASK, plan).not_compared
    sums_of_tied(monkeypatch)
    with pytest.raises(
        UsageError, match=r"net trains differently by this plan .* of its update apart.*numbers=False"
    ):
        Trainer(TASK, plan)
    Trainer(TASK, plan, numbers=False)


@pytest.mark.compares_plans
def test_a_trainer_says_what_it_has_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer names the parts that it skips because they take too long, and the command that compares."""
    monkeypatch.setattr(comparison, "LONGEST_SECONDS", 0.0)
    with pytest.warns(
        PipefitWarning, match=r"training of net by the plan was not compared .*certify --numbers"
    ):
        trainer = Trainer(TASK, planned(TASK, ONE))
    assert "by the plan was not compared with plain training: it takes about" in trainer.not_compared


def test_a_certificate_says_that_the_plan_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate states that the plan was compared, and is refused for a plan with different numbers."""
    plan = planned(TASK, *TWO)
    assert "net trains by the plan exactly like plain training: 2 steps of" in str(
        certify_numbers(TASK, plan)
    )
    counted_twice(monkeypatch)
    with pytest.raises(UsageError, match="trains differently by this plan than plainly"):
        certify_numbers(TASK, plan)


def test_what_plain_training_cannot_say_is_told() -> None:
    """Asynchronous schedules, and statistics of local batches between stages of other degrees, are reported
    as not comparable.
    """
    with pytest.raises(NotComparable, match="older weights"):
        compared(TASK, planned(TASK, *TWO, schedule="pipedream-2bw", clip_norm=None))
    with pytest.raises(NotComparable, match="samples depend on each other"):
        compared(NORMED, planned(NORMED, *FEWER))


class Interlocked(nn.Module):
    """A model with a penalty on the mean of a batch, too small to be seen in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return x, 3e-5 * self.weight * x.mean(0).square().sum()


def test_samples_that_depend_on_each_other_only_in_gradients_are_compared_by_replica() -> None:
    """Local batches are compared with plain training of local batches, even if losses show no difference."""
    task = replace(
        MOMENTUM, module=Interlocked, loss=lambda outputs, y: F.mse_loss(outputs[0], y) + outputs[1]
    )
    assert not compared(task, planned(task, REPLICAS)).differences


def test_a_comparison_leaves_model_and_generators_as_they_were() -> None:
    """A comparison leaves parameters, buffers, gradients and random generators unchanged."""
    whole, _, _ = captured(NORMED)
    before = {name: tensor.clone() for name, tensor in whole.module.state_dict().items()}
    drawn = torch.get_rng_state()
    compared(NORMED, planned(NORMED, REPLICAS))
    assert all(torch.equal(before[name], tensor) for name, tensor in whole.module.state_dict().items())
    assert all(parameter.grad is None for parameter in whole.module.parameters())
    assert torch.equal(drawn, torch.get_rng_state())


def test_attention_without_dropout_draws_nothing() -> None:
    """A fused attention without dropout is no random draw, so that models with one are compared."""
    draws, query = Draws(), torch.randn(1, 2, 4, 8)
    with DrawRecording(draws, "key"):
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        torch.dropout(query, 0.5, True)
    assert len(draws.of["key"]) == 1


@pytest.mark.parametrize("inplace", [False, True])
def test_slopes_of_a_randomized_relu_are_replayed(inplace: bool) -> None:
    """A randomized ReLU writes its slopes into an argument, which its backward reads: they are replayed too."""
    draws, start = Draws(), torch.randn(40)

    def forward_backward() -> tuple[Tensor, Tensor]:
        x = start.clone().requires_grad_()
        y = F.rrelu(x * 1, training=True, inplace=inplace)
        y.sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    with DrawRecording(draws, "key"):
        first = forward_backward()
    with Replaying(draws.joined([["key"]])):
        again = forward_backward()
    with MeanDraws():
        mean, slopes = forward_backward()
    assert all(map(torch.equal, first, again))
    assert slopes.unique().tolist() == pytest.approx([(1 / 8 + 1 / 3) / 2, 1])
    assert torch.allclose(mean, start * slopes)
