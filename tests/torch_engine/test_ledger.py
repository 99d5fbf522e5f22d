"""The simulator's ledger of torch's engine: its peaks are those of the dry run of that engine's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipefit
from pipefit.cli import main
from pipefit.errors import UsageError
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.memory import receive_buffers, receives_ahead
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import ALL_MICROBATCHES, Decision, Microbatches, Run, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Sharding
from pipefit.schema.json_io import save
from pipefit.schema.plan import Plan
from support.known_profiles import profile
from support.random_layer_chains import KINDS, LOSSES, Part, mean_of_all
from support.small_tasks import plan_of, task_of
from support.torch_engine_cases import divided_case, engine_case

ADAM = partial(torch.optim.Adam, lr=0.1)


def odd_layers(*names: str) -> pipefit.Task:
    """Return a task of these kinds of layers, whose loss uses the first value."""

    def build() -> nn.Module:
        kinds = [KINDS[name] for name in names]
        return nn.Sequential(*(Part(kind.function, kind.module()) for kind in kinds))

    def batch(size: int) -> tuple[Tensor, ...]:
        return torch.randn(2, size, 8, 8).unbind()

    return replace(some_layers(), module=build, batch=batch, loss=LOSSES[1])


def some_layers() -> pipefit.Task:
    """Return a task of single operations."""

    def layers() -> list[nn.Module]:
        return [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.GELU()]

    return task_of(layers, inputs=64, outputs=64)


def certified_and_simulated(task: pipefit.Task, plan: Plan) -> list[tuple[int, int]]:
    """Return the peaks of every device of a plan, in the first step and in a later one."""
    dry, ledger = pipefit.certify_pipeline(task, plan), pipefit.simulate(plan, engine="torch")
    return [
        (dry.devices[device].step_peak_bytes(step), ledger.devices[device].step_peak_bytes(step))
        for device in plan.workers
        for step in range(2)
    ]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("split", "schedule", "microbatches", "recompute"),
    [
        ((2, 2, 2), "1f1b", 5, "never"),
        ((1, 1, 2, 2), "1f1b", 4, "never"),
        ((1, 1, 2, 2), "1f1b", 9, "never"),
        ((2, 2, 2), "1f1b", 2, "never"),
        ((2, 4), "gpipe", 3, "never"),
        ((2, 2, 2), "gpipe", 4, "stages"),
        ((2, 2, 2), "1f1b", 5, "always"),
        ((2, 2, 2), "eager-1f1b", 4, "never"),
        ((1, 2, 3), "torchgpipe", 3, "never"),
        ((6,), "1f1b", 3, "never"),
    ],
)
def test_equal_to_the_byte(split: tuple[int, ...], schedule: str, microbatches: int, recompute: str) -> None:
    """Layers of one operation: the ledger knows every storage of the engine."""
    plan = plan_of(
        some_layers(), split, size=8, schedule=schedule, microbatches=microbatches, recompute=recompute
    )
    assert all(dry == ledger for dry, ledger in certified_and_simulated(some_layers(), plan))


def pictures(size: int) -> tuple[Tensor, Tensor]:
    """Draw pictures and targets."""
    return torch.randn(size, 3, 16, 16), torch.randn(size, 4)


def convolutions() -> nn.Sequential:
    """Return two convolutions with a pool between them."""
    first = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1)
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(512, 4))


@pytest.mark.parametrize("recompute", ["always", "stages"])
def test_recomputation_is_that_of_torch(recompute: str) -> None:
    """It ends with the last saved tensor, and keeps the inputs of a run until the run's backward has ended."""
    task = pipefit.Task(convolutions, batch=pictures, loss=F.mse_loss, name="convolutions")
    plan = plan_of(task, (4, 2), microbatches=2, schedule="gpipe", size=8, recompute=recompute)
    assert all(dry == ledger for dry, ledger in certified_and_simulated(task, plan))


def test_copies_of_inputs_in_a_recomputation() -> None:
    """A run that begins in place works on copies of its inputs, in the forward and again when it is recomputed."""

    def layers() -> list[nn.Module]:
        return [nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)]

    task = task_of(layers, inputs=64, outputs=64)
    for schedule in ("1f1b", "gpipe"):
        plan = plan_of(task, (1, 4), size=8, microbatches=3, schedule=schedule, recompute="stages")
        assert all(dry == ledger for dry, ledger in certified_and_simulated(task, plan))


class FirstColumns(nn.Module):
    """Four columns of its input; the backward needs no saved tensor, and makes a gradient of all columns."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :4]


class Averaged(nn.Module):
    """Rows times their means, whose forward needs much more memory than its backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.detach().repeat(1, 8).mean(1, keepdim=True)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("split", "stage", "run"),
    [((5,), 0, (2, 4)), ((1, 4), 1, (1, 4)), ((4, 1), 0, (0, 4)), ((4,), 0, (0, 4)), ((2, 2), 1, (2, 4))],
)
def test_recomputation_starts_late(
    split: tuple[int, ...], stage: int, run: tuple[int, int], schedule: str
) -> None:
    """Layers at the end of a run that save nothing go backward before it is recomputed."""

    def layers() -> list[nn.Module]:
        whole = nn.Linear(8, 64), nn.Linear(64, 512), Averaged(), FirstColumns(), nn.Linear(4, 4)
        return list(whole[: sum(split)])

    task = task_of(layers, outputs=4)
    again = Decision(stage=stage, subject=Run(start=run[0], stop=run[1]), what=What.RECOMPUTE)
    plan = replace(plan_of(task, split, size=8, microbatches=3, schedule=schedule), decisions=(again,))
    assert all(dry == ledger for dry, ledger in certified_and_simulated(task, plan))


class Gated(torch.autograd.Function):
    """`x * sigmoid(x)`; keeps the sigmoid where autograd's hooks do not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.gate = x.sigmoid()
        ctx.save_for_backward(x)
        return x * ctx.gate

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * ctx.gate * (1 + x * (1 - ctx.gate))


class GatedLinear(nn.Linear):
    """A linear layer and a gate."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Gated.apply(super().forward(x))
        return result


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("split", [(2, 2), (4,)])
def test_tensors_that_hooks_do_not_see(split: tuple[int, ...], schedule: str, recompute: Recompute) -> None:
    """The first forward keeps them although its layers are recomputed, until the backward has ended."""
    task = task_of(lambda: [GatedLinear(64, 64) for _ in range(4)], inputs=64, outputs=64)
    plan = plan_of(task, split, size=8, microbatches=4, schedule=schedule, recompute=recompute)
    assert all(dry == ledger for dry, ledger in certified_and_simulated(task, plan))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_copies_of_weights_for_autocast(schedule: str, recompute: Recompute) -> None:
    """All microbatches share one half-precision copy of each weight, which `torch.autocast` would make anew.

    A recomputation counts an activation until the bias has its gradient. That is not at the peak if kernels take
    more memory before.
    """
    task = replace(some_layers(), precision="mixed-bfloat16", loss=mse_of_floats)
    options = {"microbatches": 6, "schedule": schedule, "recompute": recompute}
    plan = plan_of(task, (3, 3), size=8, **options)
    activation = 8 * 96 * 2 if recompute == "always" else 0
    assert all(dry <= ledger <= dry + activation for dry, ledger in certified_and_simulated(task, plan))


def mse_of_floats(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error in float32."""
    return F.mse_loss(outputs.float(), targets.float())


class Rectified(nn.Module):
    """A residual block that saves its output, which its backward needs first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x) + x)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("split", [(1, 1, 1), (3,)])
def test_outputs_that_their_layer_saves(split: tuple[int, ...], schedule: str, recompute: Recompute) -> None:
    """The engine may hold outputs of a stage until its backward has ended, unlike outputs that are recomputed."""
    task = task_of(lambda: [Rectified() for _ in range(3)], inputs=64, outputs=64)
    options = {"microbatches": 4, "schedule": schedule, "recompute": recompute}
    peaks = certified_and_simulated(task, plan_of(task, split, size=64, **options))
    if split == (3,) and recompute == "always":
        assert all(ledger >= dry for dry, ledger in peaks)
    else:
        assert all(ledger == dry for dry, ledger in peaks)


def test_gradients_in_buffers_that_a_layer_passes_on() -> None:
    """The layer before one that passes the gradient of its output on receives it in the buffer, too."""
    task = replace(odd_layers("linear", "norm", "every other", "detached", "linear"), loss=mean_of_all)
    plan = plan_of(task, (4, 1), size=2, microbatches=3)
    assert all(dry == ledger for dry, ledger in certified_and_simulated(task, plan))


@pytest.mark.parametrize("layer", ["sum", "joined"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_gradient_of_several_inputs(schedule: str, layer: str) -> None:
    """The engine sends the gradient of a sum once for each addend, and needs a copy for all but one."""
    task = odd_layers("linear", "copied halves", layer, "linear")
    plan = plan_of(task, (2, 2), size=4, microbatches=3, schedule=schedule)
    assert all(dry == ledger for dry, ledger in certified_and_simulated(task, plan))


@pytest.mark.sample(4)
@pytest.mark.parametrize("recompute", ["never", "always", "stages"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("split", [(5,), (1, 4), (3, 2)])
def test_values_that_the_loss_never_uses(split: tuple[int, ...], schedule: str, recompute: Recompute) -> None:
    """The engine holds no tensor for the backward of such a value, although it holds the value itself."""
    task = odd_layers("linear", "tanh", "fork", "tanh", "linear")
    options = {"microbatches": 3, "schedule": schedule, "recompute": recompute}
    plan = plan_of(task, split, size=4, **options)
    assert all(dry == ledger for dry, ledger in certified_and_simulated(task, plan))


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("split", [(5,), (1, 4), (3, 2)])
def test_recomputed_layers_that_save_nothing(split: tuple[int, ...], schedule: str) -> None:
    """`torch.utils.checkpoint` keeps no inputs for them, and does not run them again."""
    task = odd_layers("linear", "dropout", "fork", "flip", "linear")
    plan = plan_of(task, split, size=4, microbatches=3, schedule=schedule, recompute="always")
    assert all(dry == ledger for dry, ledger in certified_and_simulated(task, plan))


def test_outputs_that_are_copies_of_inputs() -> None:
    """The engine holds the last stage's outputs, also those that a recomputed run in place has copied."""
    task = odd_layers("linear", "fork", "relu in place", "flip", "linear")
    again = Decision(stage=1, subject=Run(start=2, stop=3), what=What.RECOMPUTE)
    plan = replace(plan_of(task, (2, 3), size=4, microbatches=3, schedule="1f1b"), decisions=(again,))
    assert all(dry == ledger for dry, ledger in certified_and_simulated(task, plan))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_recomputations_start_with_their_backward(schedule: str) -> None:
    """The engine recomputes a run when its backward begins, however far ahead the plan would start it."""
    again = Decision(stage=0, subject=Run(start=0, stop=2), what=What.RECOMPUTE, ahead=2)
    plan = replace(
        plan_of(some_layers(), (3, 3), size=8, microbatches=4, schedule=schedule), decisions=(again,)
    )
    assert all(dry == ledger for dry, ledger in certified_and_simulated(some_layers(), plan))


@pytest.mark.parametrize("split", [(6,), (3, 3)])
def test_gradient_norms_are_freed_before_the_update(split: tuple[int, ...]) -> None:
    """The norms of all stages are a tensor on each device only until gradients are clipped."""
    task = replace(some_layers(), optimizer=ADAM)
    plan = plan_of(task, split, size=8, microbatches=2)
    plan = replace(plan, training=replace(plan.training, clip_norm=0.5))
    assert all(dry == ledger for dry, ledger in certified_and_simulated(task, plan))


NORMS = 512  # bytes of gradient norms, and of loss scaling


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [*range(1, 11), *range(12, 40)])  # 11 has no plan
def test_random_plans(seed: int) -> None:
    """Peaks of random plans without decisions are equal but for gradient norms and loss scaling."""
    task, plan = engine_case(seed)
    plan = replace(plan, decisions=())
    assert all(abs(ledger - dry) <= NORMS for dry, ledger in certified_and_simulated(task, plan))


# ---- Replicas that divide gradients or parameters


def test_tensors_at_the_host_free_the_device() -> None:
    """A plan that offloads two saved tensors of the first stage holds less there, by the engine's own code."""
    plan = plan_of(task := some_layers(), (3, 3), schedule="gpipe", microbatches=4)
    moves = Decision(
        stage=0,
        subject=SavedTensors(tensors=tuple(own_tensors(plan, range(1, 3)))),
        what=What.OFFLOAD,
        place=parse_place("host"),
    )
    moving = replace(plan, decisions=(moves,))
    kept, less = (pipefit.certify_pipeline(task, one).peak_bytes[0] for one in (plan, moving))
    assert less < kept


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("split", "recompute", "tensors"),
    [
        ((6,), (), ((1, 0),)),  # two layers save its storage
        ((6,), (), ((1, 0), (5, 0))),
        ((6,), (), ((0, 0), (3, 0))),  # the first one is the input of the stage
        ((6,), (0, 2), ((2, 0), (3, 0))),
        ((1, 5), (), ((2, 0), (4, 0))),
        ((1, 5), (1, 2), ((2, 0),)),
        ((1, 5), (3, 5), ((1, 0), (5, 0))),
    ],
)
@pytest.mark.parametrize("microbatches", [ALL_MICROBATCHES, Microbatches(1, 2, 1)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager-1f1b"])
def test_moves_within_a_pass(
    split: tuple[int, ...],
    recompute: tuple[int, ...],
    tensors: tuple[tuple[int, int], ...],
    microbatches: Microbatches,
    schedule: str,
) -> None:
    """The engine moves storages with the passes of all layers that save them, also in the last stage.

    A copy on the device is freed before the gradient of a bias is summed, unlike a saved tensor.
    """
    moves = Decision(
        stage=len(split) - 1,
        subject=SavedTensors(tensors=tensors),
        what=What.OFFLOAD,
        place=parse_place("host"),
        microbatches=microbatches,
    )
    again = [
        Decision(stage=len(split) - 1, subject=Run(start=start, stop=stop), what=What.RECOMPUTE)
        for start, stop in [recompute] * bool(recompute)
    ]
    plan = plan_of(some_layers(), split, size=8, microbatches=4, schedule=schedule)
    moving = replace(plan, decisions=(moves, *again))
    bias = 96 * 4
    assert all(dry <= ledger <= dry + bias for dry, ledger in certified_and_simulated(some_layers(), moving))


def own_tensors(plan: Plan, layers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the layers and indices of saved tensors that layers make themselves or get from another layer."""
    for layer in layers:
        for tensor in plan.measurement.costs[layer].saved:
            if tensor.origin.kind in ("own", "input") and not tensor.hidden:
                yield layer, tensor.index


def uneven_layers() -> pipefit.Task:
    """Return a task whose parameters have rows that two or three replicas cannot divide equally."""

    def layers() -> list[nn.Module]:
        first = nn.Linear(16, 15), nn.Tanh(), nn.Linear(15, 33), nn.ReLU()
        return [*first, nn.LayerNorm(33), nn.Linear(33, 9), nn.Tanh(), nn.Linear(9, 5)]

    return task_of(layers, inputs=16, outputs=5, optimizer=ADAM)


def divided_plan(
    task: pipefit.Task,
    split: tuple[int, ...],
    shard: Sharding,
    *,
    data: int = 2,
    devices: int | None = None,
    size: int = 4,
    **options: Any,
) -> Plan:
    """Return a plan of `split` layers a stage, each with `data` replicas that divide gradients or parameters."""
    profiled = profile(task, microbatch_size=(size, size * data), threads=torch.get_num_threads())
    plan = plan_of(task, split, size=size * data, devices=devices, profiled=profiled, **options)
    ranks = devices or len(split)
    grids = [
        Grid(devices=tuple(range(n % ranks * data, n % ranks * data + data)), data=data, shard=shard)
        for n in range(len(split))
    ]
    stages = tuple(replace(stage, grid=grid) for stage, grid in zip(plan.stages, grids, strict=True))
    return replace(plan, stages=stages, cluster=Cluster.emulated((ranks * data, 1 << 30)))


@pytest.mark.sample(6)
@pytest.mark.parametrize("shard", ["gradients", "parameters"])
@pytest.mark.parametrize(
    ("split", "schedule", "microbatches", "options"),
    [
        ((3, 5), "1f1b", 4, {}),
        ((3, 5), "1f1b", 1, {"data": 3}),
        ((2, 6), "gpipe", 3, {"data": 3}),
        ((8,), "1f1b", 3, {}),
        ((7, 1), "gpipe", 1, {"data": 3, "size": 1}),
        ((2, 2, 4), "eager-1f1b", 5, {}),
        ((3, 5), "torchgpipe", 3, {}),
        ((1, 1, 1, 5), "gpipe", 4, {"devices": 2}),
        ((1, 1, 1, 1, 1, 1, 1, 1), "gpipe", 2, {"devices": 2}),
    ],
)
def test_divided_state_to_the_byte(
    shard: Sharding, split: tuple[int, ...], schedule: str, microbatches: int, options: dict[str, Any]
) -> None:
    """Gathers, reductions and parts of every tensor are those of FSDP2, also with several stages on a device."""
    task = uneven_layers()
    plan = divided_plan(task, split, shard, schedule=schedule, microbatches=microbatches, **options)
    assert all(dry == ledger for dry, ledger in certified_and_simulated(task, plan))


def frozen(*shape: int, weight_only: bool = False) -> nn.Linear:
    """Return a linear layer without gradients of its parameters, or of its weight."""
    layer = nn.Linear(*shape)
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(weight_only)
    return layer


class Unused(nn.Linear):
    """A linear layer with a parameter of two numbers that no forward uses."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.unused = nn.Parameter(torch.zeros(2))


@pytest.mark.sample(4)
@pytest.mark.parametrize("shard", ["gradients", "parameters"])
@pytest.mark.parametrize(
    ("between", "split", "microbatches"),
    [
        (lambda: [frozen(300, 301), nn.Tanh(), frozen(301, 300)], (2, 3, 2), 4),
        (lambda: [frozen(300, 301, weight_only=True), nn.Tanh(), nn.Linear(301, 300)], (3, 4), 3),
        (lambda: [nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 300)], (2, 2, 3), 4),
    ],
)
def test_frozen_parameters_with_divided_state(
    shard: Sharding, between: Callable[[], list[nn.Module]], split: tuple[int, ...], microbatches: int
) -> None:
    """The memory of a forward, which has the highest peak here, is that of FSDP2 to the byte."""

    def layers() -> list[nn.Module]:
        return [frozen(16, 300), nn.Tanh(), *between(), nn.Tanh(), nn.Linear(300, 5)]

    task = task_of(layers, inputs=16, outputs=5, optimizer=ADAM)
    plan = divided_plan(task, split, shard, microbatches=microbatches)
    assert all(dry == ledger for dry, ledger in certified_and_simulated(task, plan))


def test_recomputation_that_no_backward_needs() -> None:
    """Frozen layers before all others are not recomputed, so FSDP2 does not gather them again."""

    def layers() -> list[nn.Module]:
        return [frozen(16, 64), frozen(64, 64), *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 5)]

    task = task_of(layers, inputs=16, outputs=5, optimizer=ADAM)
    plan = divided_plan(task, (3, 3), "parameters", microbatches=3, recompute="always")
    assert all(dry <= ledger <= 1.03 * dry for dry, ledger in certified_and_simulated(task, plan))


def test_state_of_parameters_without_gradients() -> None:
    """Optimizer state is divided although a parameter has none."""

    def layers() -> list[nn.Module]:
        return [nn.Linear(16, 64), Unused(64), nn.Tanh(), Unused(64), nn.Linear(64, 5)]

    task = task_of(layers, inputs=16, outputs=5, optimizer=ADAM)
    plan = divided_plan(task, (4, 1), "gradients", microbatches=2, data=4)
    assert all(dry <= ledger <= dry + 1024 for dry, ledger in certified_and_simulated(task, plan))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_casts_of_divided_weights(shard: Sharding, schedule: str) -> None:
    """Every microbatch in flight keeps its casts of weights, and a backward frees one after the other.

    One cast counts to the end of its layer's backward. That is not at the peak if kernels take more memory before.
    """
    task = replace(some_layers(), precision="mixed-bfloat16", loss=mse_of_floats)
    plan = divided_plan(task, (3, 3), shard, microbatches=6, schedule=schedule)
    biases, cast = 4 * 96, 64 * 96 * 2
    assert all(dry - biases <= ledger <= dry + cast for dry, ledger in certified_and_simulated(task, plan))


@pytest.mark.parametrize("recompute", ["always", "stages"])
def test_recomputation_with_divided_state(recompute: Recompute) -> None:
    """Gathers of a recomputation change nothing of how it differs from the dry run."""
    task = uneven_layers()
    options = {"schedule": "gpipe", "microbatches": 3, "recompute": recompute}
    divided, whole = (
        [dry - ledger for dry, ledger in certified_and_simulated(task, plan)[1::2]]
        for plan in (divided_plan(task, (4, 4), shard, **options) for shard in ("parameters", "none"))
    )
    assert divided == whole


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", [seed for seed in range(59) if seed not in (7, 16, 30, 42, 52)])  # no plan
def test_random_divided_plans(seed: int) -> None:
    """Peaks, with the tolerance of whole replicas; FSDP2 also fills in gradients that no loss has."""
    task, plan = divided_case(seed)
    plan = replace(plan, decisions=())
    if any(value.unused for cost in plan.measurement.costs for value in cost.outputs):
        pytest.skip("values without gradients")
    assert all(abs(ledger - dry) <= NORMS for dry, ledger in certified_and_simulated(task, plan))


def test_seconds_of_divided_state() -> None:
    """Replicas that divide parameters gather them more often, so a step is longer than with gradients alone."""
    gradients, parameters = (
        pipefit.simulate(divided_plan(uneven_layers(), (3, 5), shard, microbatches=4), engine="torch")
        for shard in ("gradients", "parameters")
    )
    assert gradients.step_seconds[-1] < parameters.step_seconds[-1]


def test_receive_buffers() -> None:
    """One buffer for every microbatch and direction: inputs of later stages, gradients of earlier ones.

    Since torch 2.15 there are none between steps.
    """
    plan = plan_of(some_layers(), (2, 2, 2), size=8, microbatches=5)
    narrow, wide = 8 * 64 * 4, 8 * 96 * 4
    ahead = {0: 5 * narrow, 1: 5 * (narrow + wide), 2: 5 * wide}
    assert receive_buffers(plan) == (ahead if receives_ahead() else dict.fromkeys(range(3), 0))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`pipefit simulate --engine torch` says what that engine holds; it refuses plans that the engine cannot run."""
    plan = plan_of(some_layers(), (2, 2, 2), size=8, microbatches=5)
    save(plan, tmp_path / "plan.json")
    assert main(["simulate", str(tmp_path / "plan.json"), "--engine", "torch"]) == 0
    told = "torch's engine holds 25.00 KiB of receive buffers on device 1" in capsys.readouterr().out
    assert told is receives_ahead()
    endless = replace(plan, training=replace(plan.training, schedule="pipedream"))
    with pytest.raises(UsageError, match="ends every step with an empty pipeline"):
        pipefit.simulate(endless, engine="torch")
