"""Half-precision copies of weights: one for each stage, with the numbers of plain autocast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit import profiler
from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.memory.stage import Costs
from pipefit.models import build
from pipefit.report import show
from pipefit.report.show import describe_profile
from pipefit.runtime import Trainer, certify
from pipefit.runtime.optim.half_precision import WeightCopy, using
from pipefit.schema.actions import Action, Kind
from pipefit.schema.decisions import Decision, Run, State, What
from pipefit.schema.grids import Sharding
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import Category
from pipefit.schema.training import Training
from pipefit.simulator import simulate
from pipefit.simulator.simulation import contents
from pipefit.tensor_parallel.comparison import Turn, pause
from support.asynchronous_decisions import moved
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.local_batches import sliced_plan
from support.small_tasks import batch_of, plan_of, task_of
from support.step_peaks import step_peaks

WIDTH, SEPARATE = 8, "pipefit.profiler.layer.cast_by"

pytestmark = pytest.mark.usefixtures("one_thread")


class Twice(nn.Module):
    """A layer that multiplies by its weight twice, adds its table directly, and has a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.table, self.fixed = (
            nn.Parameter(torch.randn(WIDTH)),
            nn.Linear(WIDTH, WIDTH).requires_grad_(False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed((x @ self.weight).tanh() @ self.weight) + self.table


class Again(nn.Module):
    """A layer that multiplies by another layer's weight."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).sin()


def layers(middle: Callable[[], nn.Module] = Twice) -> list[nn.Module]:
    """Build products, a norm, and activations between them."""
    ends = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
    return [ends[0], nn.LayerNorm(WIDTH), middle(), nn.Linear(WIDTH, WIDTH), nn.GELU(), ends[1]]


def tied() -> list[nn.Module]:
    """Build layers whose third multiplies by the first one's weight."""
    found = layers()
    assert isinstance(found[0], nn.Linear)
    return [*found[:2], Again(found[0]), *found[3:]]


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs.float(), targets)


def mixed(made: Callable[[], Sequence[nn.Module]] = layers) -> Task:
    """Return a task under autocast."""
    adam = partial(torch.optim.AdamW, lr=0.01)
    return replace(task_of(made, loss=squared, optimizer=adam), precision="mixed-bfloat16")


@cache
def profiled(made: Callable[[], Sequence[nn.Module]] = layers, sizes: tuple[int, ...] = (2,)) -> ModelProfile:
    return profile(mixed(made), microbatch_size=sizes)


def trained_layers() -> list[nn.Module]:
    """Build the same layers with all weights trainable, as versions require."""
    return layers(lambda: nn.Linear(WIDTH, WIDTH))


def unlike(made: Callable[[], Sequence[nn.Module]], sizes: tuple[int, ...] = (2,)) -> ModelProfile:
    """Return the profile with separate copies in every forward, as autocast makes them without pipefit."""
    with mock.patch(SEPARATE, return_value=[]):
        return profiler.profile(mixed(made), microbatch_size=sizes)


def planned(
    schedule: str = "1f1b", *decisions: Decision, of: ModelProfile | None = None, **settings: Any
) -> Plan:
    """Return a plan with two stages and six microbatches."""
    found = plan_of(mixed(), [3, 3], microbatches=6, schedule=schedule, profiled=of or profiled(), **settings)
    return replace(found, decisions=decisions)


def recomputed(stage: int, start: int, stop: int) -> Decision:
    return Decision(stage=stage, subject=Run(start=start, stop=stop), what=What.RECOMPUTE)


def parameters(task: Task, plan: Plan, steps: int = 3) -> dict[str, Tensor]:
    """Return all parameters after some steps."""
    trainer = Trainer(task, plan)
    for step in range(steps):
        trainer.step(batch_of(task, plan, step))
    return trainer.state_dict()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def test_which_weights_have_copies() -> None:
    """Weights that autocast casts and keeps have copies; norms, tables and frozen weights have none."""
    found = [
        {p.name: p.copy_bytes for p in cost.parameters if p.copy_bytes}
        for cost in profiled().measurements[0].costs
    ]
    linear = {"weight": 2 * WIDTH * WIDTH, "bias": 2 * WIDTH}
    assert found == [
        linear,
        {},
        {"weight": 2 * WIDTH * WIDTH},
        linear,
        {},
        {"weight": 2 * WIDTH * 4, "bias": 8},
    ]


@pytest.mark.parametrize("decisions", [(), (recomputed(0, 0, 2), recomputed(1, 3, 5))])
def test_numbers_are_those_of_plain_autocast(decisions: tuple[Decision, ...]) -> None:
    """Parameters after three steps of AdamW equal plain autocast bit by bit, without recomputation and with
    recomputed runs.
    """
    task, plan = mixed(), planned("1f1b", *decisions)
    torch.manual_seed(0)
    plain = task.build()
    optimizer = task.optimizer(p for p in plain.parameters() if p.requires_grad)
    for step in range(3):
        for x, y in zip(*(part.split(2) for part in batch_of(task, plan, step)), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = squared(plain(x), y)
            (loss / 6).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(0)
    assert same(parameters(task, plan), dict(plain.state_dict()))


def test_an_evaluation_uses_the_copies_of_the_weights_as_they_are() -> None:
    """An evaluation uses the current weights: its loss is plain autocast's, after a step and after a manual
    change of a weight.
    """
    task, plan = mixed(), planned()
    trainer, plain = Trainer(task, plan), task.build()
    for step in range(2):
        x, y = batch_of(task, plan, step)
        trainer.step((x, y))
        with torch.no_grad():
            next(trainer.stages).parameters[0].mul_(1.5)
        plain.load_state_dict(trainer.state_dict())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            wanted = [squared(plain(part), of) for part, of in zip(x.split(2), y.split(2), strict=True)]
        assert trainer.evaluate((x, y)) == pytest.approx(float(torch.stack(wanted).mean()), rel=1e-6)


@pytest.mark.parametrize("schedule", ["pipedream", pytest.param("pipedream-2bw", marks=pytest.mark.gallery)])
def test_every_version_has_copies_of_its_own(schedule: str) -> None:
    """Every version has its own copies: parameters equal those of forwards with separate copies bit by bit,
    despite updates in between.
    """
    once, each = (planned(schedule, of=of) for of in (profiled(trained_layers), unlike(trained_layers)))
    trained = [parameters(mixed(trained_layers), plan) for plan in (once, each)]
    assert same(*trained)


def in_stages(task: Task, found: ModelProfile) -> Plan:
    """Return four stages of one block each, the first with the embedding, and eight microbatches."""
    return plan_of(task, [2, 1, 1, len(found.layers) - 4], size=1, microbatches=8, profiled=found)


@pytest.mark.gallery
def test_a_gpt_has_copies_once_and_not_for_each_microbatch_in_flight() -> None:
    """A GPT with four microbatches in flight saves the copies of three of them; copies of biases were never
    kept.
    """
    task = replace(
        build("gpt", layers=4, hidden=32, heads=4, vocabulary=32, sequence=8), precision="mixed-bfloat16"
    )
    once = profile(task, microbatch_size=1, target="cuda")
    with mock.patch(SEPARATE, return_value=[]):
        each = profiler.profile(task, microbatch_size=1, target="cuda")
    weights, biases = 2 * 12 * 32 * 32, 2 * 9 * 32
    plans = [in_stages(task, found) for found in (once, each)]
    traces = [simulate(plan) for plan in plans]
    levels = [{row.action: row.total_bytes for row in t.devices[0].memory if row.step == 0} for t in traces]
    assert traces[0].peak_bytes == certify(task, plans[0]).peak_bytes
    assert [levels[1][name] - levels[0][name] for name in ("0F0", "0F3", "0F7")] == [
        0,
        3 * weights,
        3 * weights,
    ]
    assert once.measurements[0].costs[1].copy_bytes == weights + biases


def checked(task: Task, plan: Plan, *, steps: int = 2) -> None:
    """Assert equal peaks of all devices in every step: simulator, dry run, meter and allocator."""
    found = step_peaks(task, plan, steps=steps)
    assert found.simulated == found.dry == found.metered == found.allocated


def test_peaks_with_runs_recomputed_and_parameters_away() -> None:
    """Copies stay on the device while the parameters of their layers are on the host."""
    away = moved(0, State(start=0, stop=1, kind="parameters"), "host", behind=0)
    checked(mixed(), planned("1f1b", recomputed(0, 1, 3), away))


def test_layers_share_the_copy_of_a_weight_that_they_share() -> None:
    """Two layers of a stage with one weight share one copy of it; on two stages each has one."""
    task, found = mixed(tied), profiled(tied)
    checked(task, plan_of(task, [1, 5], microbatches=3, profiled=found))
    together = plan_of(task, [3, 3], microbatches=3, profiled=found)
    first, second = (trace.devices[0].memory[0] for trace in (simulate(together), certify(task, together)))
    held = WIDTH * WIDTH + WIDTH + 2 * WIDTH  # the shared weight, a bias, the norm's
    for row in (first, second):
        assert row.by_category[Category.PARAMETERS] == 4 * held + 2 * (WIDTH * WIDTH + WIDTH)


def test_copies_are_used_whatever_other_threads_do_in_between() -> None:
    """A forward that waits for another thread keeps its copies, though that thread's autocast has ended."""
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(2, 4)
    copy, saved = WeightCopy.of(weight, torch.bfloat16), list[Tensor]()

    def waiting() -> None:
        with using([(weight, copy)], torch.bfloat16, (x,)):
            pause()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                x.requires_grad_() @ weight

    first = Turn(waiting)
    first.advance()
    with torch.autocast("cpu", torch.bfloat16):
        x @ torch.randn(4, 4)
    assert first.advance()
    assert copy.tensor.data_ptr() in {tensor.data_ptr() for tensor in saved}


@pytest.mark.gallery
@pytest.mark.parametrize("schedule", ["pipedream", pytest.param("pipedream-2bw", marks=pytest.mark.gallery)])
def test_peaks_of_versions(schedule: str) -> None:
    """A weight version has its own copies, which leave the device with it."""
    versions = moved(0, State(start=0, stop=2, kind="versions"), "host", ahead=1)
    plan = planned(schedule, versions, of=profiled(trained_layers))
    checked(mixed(trained_layers), plan, steps=3)


class Averaged(nn.Linear):
    """A layer that reads its weight outside the product too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.weight.detach().mean())


class Cleared(nn.Linear):
    """A layer that has its weight cast again."""

    def forward(self, x: Tensor) -> Tensor:
        torch.clear_autocast_cache()
        return super().forward(x)


class Product(torch.autograd.Function):
    """A product whose backward multiplies by the float32 weight, which autograd does not keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        wide = gradient.float()
        return (wide @ ctx.weight.t()).to(x.dtype), x.float().t() @ wide


class Backward(nn.Linear):
    """A layer that reads its weight outside the product in its backward alone."""

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = Product.apply(x, self.weight)
        return product + self.bias


def read_otherwise() -> list[nn.Module]:
    """Build layers with weights that are read only through their copies, and some that are not."""
    middle: list[nn.Module] = [made(WIDTH, WIDTH) for made in (Averaged, Cleared, Backward)]
    return [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), *middle, nn.Linear(WIDTH, 4)]


def shared_and_read() -> list[nn.Module]:
    """Build layers whose third multiplies by the first one's weight, which the first also reads directly."""
    first = Averaged(WIDTH, WIDTH)
    return [first, nn.LayerNorm(WIDTH), Again(first), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4)]


def cast_only(found: ModelProfile) -> list[list[str]]:
    """Return, for each layer, the parameters that it reads only through their copies."""
    return [[one.name for one in cost.parameters if one.cast_only] for cost in found.measurements[0].costs]


def test_which_weights_are_read_through_their_copies_alone() -> None:
    """Weights of products are read only through their copies, unless the forward or the backward also reads
    or casts them directly.
    """
    linear = ["weight", "bias"]
    assert cast_only(profiled()) == [linear, [], ["weight"], linear, [], linear]
    assert cast_only(profiled(read_otherwise)) == [linear, [], ["bias"], [], [], linear]
    copies = [
        one.copy_bytes
        for cost in profiled(read_otherwise).measurements[0].costs[2:5]
        for one in cost.parameters
    ]
    assert all(copies[:5])  # all that they multiply by have copies
    assert profiled(tied).measurements[0].shared[0].cast_only == (0, 2)
    assert profiled(shared_and_read).measurements[0].shared[0].cast_only == (2,)


def of_replicas(
    made: Callable[[], Sequence[nn.Module]], data: int, what: Sharding, *decisions: Decision
) -> Plan:
    """Return a plan with one stage of replicas at a ZeRO level, two microbatches and three buckets."""
    found = profiled(made, (4, 4 // data))
    plan = sliced_plan(found, [0, 6], [data], shard=(what,), buckets=(3,))
    how = Training(batch_size=8, microbatches=2, precision=found.assumptions.precision)
    return replace(plan, training=how, decisions=decisions)


KINDS = product([trained_layers, tied, read_otherwise, shared_and_read], [2, 4])
OFTEN = [(trained_layers, 4), (tied, 2), (read_otherwise, 4), (shared_and_read, 2)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("made", "data"), sampled([*KINDS], often=OFTEN))
def test_divided_parameters_have_copies_while_they_are_gathered(
    made: Callable[[], Sequence[nn.Module]], data: int
) -> None:
    """Divided parameters have copies while they are gathered: peaks are exact, and numbers equal replicas
    with all parameters bit by bit.

    Passes are split into buckets. Four replicas are composed of two.
    """
    kept, divided = (of_replicas(made, data, what) for what in ("none", "parameters"))
    found = step_peaks(mixed(made), divided)
    assert found.dry == found.metered
    if (
        profiled(made).measurements[0].shared
    ):  # of two users of a parameter in one stage the simulator tells a bound
        every = zip(found.simulated, found.dry, found.allocated, strict=True)
        assert all(one >= two >= three for peaks in every for one, two, three in zip(*peaks, strict=True))
    else:
        assert found.simulated == found.dry == found.allocated
    assert same(parameters(mixed(made), kept), parameters(mixed(made), divided))


def test_others_have_the_copy_alone() -> None:
    """Non-owners have the copy alone, layer by layer: between steps an owner has float32 and no replica a
    copy; all-gathers take half the bytes in layers that are only products.
    """
    plan = of_replicas(trained_layers, 4, "parameters")
    costs, layer = Costs.of(plan), WIDTH * WIDTH + WIDTH
    sizes = [4 * layer, 4 * 2 * WIDTH, 4 * layer, 4 * layer, 0, 4 * (4 * WIDTH + 4)]
    stages = [costs.of_device(plan, 0, device, plan.stages[0].devices) for device in range(4)]
    for stage in stages:
        assert stage.share is not None
        owned = [stage.share.owns(number) for number in range(6)]
        assert stage.rest.parameter_bytes == sum(size for size, own in zip(sizes, owned, strict=True) if own)
        norm = 0 if owned[1] else sizes[1]
        wanted = [sizes[0] // 2, norm, sizes[2] // 2, sizes[3] // 2, 0, sizes[5] // 2]
        assert [stage.rest.unsharded_bytes(number) for number in range(6)] == wanted
        assert (
            stage.collective_bytes(Action(Kind.UNSHARD, 0, layers=(0, 6))) == sum(sizes) // 2 + sizes[1] // 2
        )


def test_divided_parameters_on_the_host_are_cast_when_they_are_back() -> None:
    """Float32 weights on the owner's host between passes are cast after their reload."""
    away = moved(0, State(start=0, stop=1, kind="parameters"), "host", behind=0)
    kept, divided = of_replicas(trained_layers, 2, "none"), of_replicas(trained_layers, 2, "parameters", away)
    checked(mixed(trained_layers), divided)
    assert same(parameters(mixed(trained_layers), kept), parameters(mixed(trained_layers), divided))


class Apart(nn.Linear):
    """A layer that multiplies in training, and reads its weight directly in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else super().forward(x) + self.weight.sum()


def apart() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), Apart(WIDTH, WIDTH), Apart(WIDTH, 4)]


def test_evaluation_that_reads_what_is_not_there_is_refused() -> None:
    """An evaluation that reads a float32 weight is refused, with the layer, on a replica with the
    half-precision weight alone; whole replicas evaluate it.
    """
    found = profiled(apart, (4, 2))
    whole, divided = (sliced_plan(found, [0, 3], [2], shard=(what,)) for what in ("none", "parameters"))
    batch = batch_of(mixed(apart), whole, 0)
    one, other = Trainer(mixed(apart), whole), Trainer(mixed(apart), divided)
    assert one.step(batch) == other.step(batch)
    assert one.evaluate(batch) > 0
    with pytest.raises(
        UsageError, match=r"reads 'weight' in full precision in aten\.sum.*, but only its half-precision copy"
    ):
        other.evaluate(batch)


def test_what_fills_a_replica_tells_what_is_gathered() -> None:
    """The report of a replica's peak gives the gathered bytes of each layer, as in the ledger."""
    plan = of_replicas(read_otherwise, 2, "parameters")
    for device, trace in enumerate(simulate(plan).devices):
        found = contents(plan, device)
        assert found is not None
        assert trace.peak is not None
        told = sum(row.parameter_bytes + row.copy_bytes for row in found.layers)
        assert told == trace.peak.by_category[Category.PARAMETERS]
        assert any(row.copy_bytes for row in found.layers)


def test_prints_tell_copies_in_a_line_of_their_own() -> None:
    """Copies have a separate line in prints: those of all layers for a profile, those of each stage for a
    plan.
    """
    own = [2 * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH * WIDTH, 2 * (WIDTH * WIDTH + WIDTH) + 2 * (WIDTH * 4 + 4)]
    told = [block for block in describe_profile(profiled()) if isinstance(block, str)]
    assert f"half-precision copies of weights, among the parameters: {sum(own)} B" in told
    line = f"Half-precision copies of weights: {own[0]} B, {own[1]} B on each device of stages 0 to 1, once for all"
    assert line in " ".join(show.text(planned()).split())
    with mock.patch("pipefit.report.plan._FEW_STAGES", 1):
        assert line.replace(f"{own[0]} B, {own[1]} B", f"{min(own)} B to {max(own)} B") in " ".join(
            show.text(planned()).split()
        )
    assert [
        sum(row.copy_bytes for row in found.layers)
        for device in (0, 1)
        if (found := contents(planned(), device))
    ] == own
