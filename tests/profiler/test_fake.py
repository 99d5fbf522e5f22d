"""The fake profiler: saved tensors and their storages, without allocation or side effects."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.memory.microbatch import Flights
from pipefit.memory.storages import StageStorages
from pipefit.models import build
from pipefit.profiler import profile
from pipefit.schema.actions import parse_action
from pipefit.schema.layer_costs import LayerCost, Origin, Work
from pipefit.schema.profile import ModelProfile, Target
from support.small_tasks import task_of

OWN, INPUT, PARAMETER = Origin(kind="own"), Origin(kind="input"), Origin(kind="parameter")
SIZE, WIDTH = 3, 8
ROW = SIZE * WIDTH * 4


def first_sum(output: torch.Tensor | tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
    """Return the sum of the first output."""
    return (output if isinstance(output, torch.Tensor) else output[0]).sum()


def behind_a_linear(layer: Callable[[], nn.Module]) -> LayerCost:
    """Return the cost of a layer after a linear one, whose output needs a gradient."""
    task = task_of(lambda: [nn.Linear(8, WIDTH), layer()], outputs=WIDTH, loss=first_sum)
    return profile(task, microbatch_size=SIZE).measurements[0].costs[1]


@pytest.mark.parametrize(
    ("layer", "saved", "output"),
    [
        (lambda: nn.Linear(8, WIDTH), {INPUT, PARAMETER}, OWN),
        (lambda: nn.Linear(8, WIDTH, bias=False).requires_grad_(False), {PARAMETER}, OWN),
        (nn.ReLU, {OWN}, OWN),
        (lambda: nn.ReLU(inplace=True), {INPUT}, INPUT),
        (nn.Tanh, {OWN}, OWN),
        (nn.GELU, {INPUT}, OWN),
        (nn.Identity, set(), INPUT),
        (lambda: nn.Unflatten(1, (2, 4)), set(), INPUT),
        (lambda: nn.Softmax(1), {OWN}, OWN),
    ],
)
def test_saved_tensors_name_whose_storage_they_are(
    layer: Callable[[], nn.Module], saved: set[Origin], output: Origin
) -> None:
    """A linear layer keeps its input, an activation its output or its input; an in-place one works in its
    input's.
    """
    cost = behind_a_linear(layer)
    assert {tensor.origin for tensor in cost.saved} == saved
    assert cost.output_origins == (output,)
    assert cost.storages == ((ROW,) if output == OWN else ())


def test_norms_and_dropout_keep_storages_of_their_own() -> None:
    """LayerNorm keeps its input and two numbers a row; CPU dropout keeps a mask as large as its input."""
    norm, dropout = behind_a_linear(lambda: nn.LayerNorm(WIDTH)), behind_a_linear(nn.Dropout)
    assert sorted(tensor.nbytes for tensor in norm.saved if tensor.origin.kind == "own") == [4 * SIZE] * 2
    assert INPUT in norm.saved_storages
    (mask,) = dropout.saved
    assert (mask.nbytes, mask.origin.kind, mask.dtype) == (ROW, "own", "float32")


def test_several_outputs_may_share_one_storage() -> None:
    """Chunks of one tensor are two outputs of one storage, counted once."""

    class Chunks(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (x * x).chunk(2, dim=1)

    cost = behind_a_linear(Chunks)
    assert cost.output_origins == (OWN, OWN)
    assert cost.storages == (ROW,)
    assert [value.nbytes for value in cost.outputs] == [ROW // 2] * 2


def stage(task: Task) -> StageStorages:
    """Return all layers but the last on one device, without the loss."""
    measurement = profile(task, microbatch_size=SIZE).measurements[0]
    return StageStorages(measurement, 0, len(measurement.layers) - 1)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_storage_that_two_layers_hold_counts_once(inplace: bool) -> None:
    """In Linear, ReLU, Linear the stage keeps its input and one activation, shared by ReLU and the second
    Linear.
    """
    task = task_of(
        lambda: [nn.Linear(8, 100), nn.ReLU(inplace), nn.Linear(100, 50, bias=False), nn.Linear(50, 4)]
    )
    activation, output = SIZE * 100 * 4, SIZE * 50 * 4
    storages = stage(task)
    flights = Flights(storages)
    loaded, arriving = flights.apply(flights.start, parse_action("0LOAD0"))
    _, forward = flights.apply(loaded, parse_action("0F0"))
    assert arriving.after_bytes == ROW
    assert forward.after_bytes == activation + output
    assert sum(layer.cost.saved_bytes for layer in storages.layers) == ROW + 2 * activation  # the plain sum


def test_layers_that_are_alike_are_measured_once() -> None:
    """A GPT of twelve blocks has four kinds of layers, and the profiler reports progress."""
    seen: list[tuple[int, int, str]] = []
    task = build("gpt", layers=12, hidden=32, heads=4, vocabulary=64, sequence=16)
    found = profile(task, microbatch_size=1, progress=lambda *at: seen.append(at))
    (measurement,) = found.measurements
    assert len(measurement.kinds) == 4
    assert measurement.layers == (0, *[1] * 12, 2, 3)
    assert [at[0] for at in seen] == list(range(15))
    assert seen[-1] == (14, 15, "head")


def test_the_first_layer_is_another_kind() -> None:
    """The first layer has another key: its input needs no gradient, so it computes none."""
    task = task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)], outputs=8)
    (measurement,) = profile(task, microbatch_size=SIZE).measurements
    assert measurement.layers == (0, 1, 1)
    first, second = measurement.kinds
    assert (first.gradient_storages, second.gradient_storages) == ((), (ROW,))
    assert first.backward.flops * 2 == second.backward.flops


def test_work_of_a_linear_layer() -> None:
    """A product takes 2 m n k operations forward, twice that backward: one product for the weights and one
    for the input.
    """
    forward = 2 * SIZE * 8 * WIDTH
    cost = behind_a_linear(lambda: nn.Linear(8, WIDTH))
    assert cost.forward.flops == forward
    assert cost.backward.flops == 2 * forward
    assert cost.update.flops == 0
    assert cost.forward.moved_bytes == 2 * ROW + (8 * WIDTH + WIDTH) * 4


@pytest.mark.parametrize(
    ("optimizer", "states", "rest"),
    [
        (partial(torch.optim.SGD, lr=0.1), 0, 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1, 0),
        (torch.optim.AdamW, 2, 4),
        (partial(torch.optim.Adam, amsgrad=True), 3, 4),
        (torch.optim.RMSprop, 1, 4),
    ],
)
def test_optimizer_state_is_a_multiple_of_the_parameters(
    optimizer: Callable[..., torch.optim.Optimizer], states: int, rest: int
) -> None:
    """State is a multiple of the parameters, with some optimizers plus a count per parameter; gradients have
    the parameters' size.
    """
    task = task_of(lambda: [nn.Linear(8, 4)], optimizer=optimizer)
    (cost,) = profile(task, microbatch_size=SIZE).measurements[0].kinds
    assert cost.parameter_bytes == cost.gradient_bytes == (8 * 4 + 4) * 4
    assert cost.state_bytes == states * cost.parameter_bytes + rest * 2
    assert cost.update_first_peak_bytes >= cost.state_bytes


def test_frozen_parameters_cost_no_gradients_and_no_state() -> None:
    """Frozen parameters have neither gradients nor optimizer state."""
    task = task_of(
        lambda: [nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4)], optimizer=torch.optim.AdamW
    )
    frozen, learning = profile(task, microbatch_size=SIZE).measurements[0].costs
    assert (frozen.gradient_bytes, frozen.state_bytes, frozen.update_first_peak_bytes, frozen.saved) == (
        0,
        0,
        0,
        (),
    )
    assert not any(parameter.trainable for parameter in frozen.parameters)
    assert learning.gradient_bytes and learning.state_bytes


def saved_bytes(found: ModelProfile) -> int:
    """Return the saved bytes of all layers, layer by layer."""
    return sum(cost.saved_bytes for cost in found.measurements[0].costs)


def test_a_cuda_target_saves_boolean_masks() -> None:
    """For CUDA dropout saves a byte per element, on the CPU the element's type: fewer bytes in all."""
    task = build(
        "gpt", layers=1, hidden=32, heads=4, vocabulary=64, sequence=16, dropout=0.1, attention="eager"
    )
    cpu, cuda = (profile(task, microbatch_size=SIZE, target=target) for target in ("cpu", "cuda"))
    masks = [
        [tensor for cost in found.measurements[0].costs for tensor in cost.saved if tensor.dtype == "bool"]
        for found in (cpu, cuda)
    ]
    assert len(masks[1]) >= len(masks[0]) + 4  # embedding, attention, two residual additions
    assert saved_bytes(cuda) < saved_bytes(cpu)
    assert (cpu.assumptions.target, cuda.assumptions.target) == ("cpu", "cuda")


def test_a_large_model_needs_no_memory() -> None:
    """GPT-2 XL, with 6.6 GB of parameters, is profiled for CUDA, without running kernels, in under half a
    gigabyte.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    task = build("gpt", layers=48, hidden=1600, heads=25)
    (measurement,) = profile(task, microbatch_size=4, target="cuda").measurements
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(cost.parameter_bytes for cost in measurement.costs) > 6 << 30
    assert sum(cost.saved_bytes for cost in measurement.costs) > 19 << 30
    assert (after - before) * 1024 < 500 << 20


def test_an_existing_module_is_left_alone() -> None:
    """A user's module keeps tensors, numbers and mode; its profile is that of training in this mode."""
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4)).eval()
    tensors, before = (
        dict(module.state_dict(keep_vars=True)),
        {k: v.clone() for k, v in module.state_dict().items()},
    )
    task = Task(module, batch=lambda size: (torch.randn(size, 8), torch.randn(size, 4)), loss=F.mse_loss)
    found = profile(task, microbatch_size=SIZE)
    after = module.state_dict(keep_vars=True)
    assert all(
        after[name] is tensor and torch.equal(tensor, before[name]) for name, tensor in tensors.items()
    )
    assert not module.training and all(parameter.grad is None for parameter in module.parameters())
    built = Task(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4)).eval(),
        batch=task.batch,
        loss=task.loss,
    )
    assert found == profile(built, microbatch_size=SIZE)


def test_a_profile_says_what_it_took_for_granted() -> None:
    """The profile records target, device, precision, optimizer, torch and threads."""
    taken = profile(task_of(lambda: [nn.Linear(8, 4)]), microbatch_size=1, threads=2).assumptions
    assert (taken.target, taken.device, taken.precision, taken.optimizer) == ("cpu", "fake", "float32", "SGD")
    assert (taken.torch, taken.threads) == (torch.__version__, 2)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"microbatch_size": 0}, "microbatch_size must be a whole number of at least 1, not 0"),
        ({"microbatch_size": 1, "threads": 0}, "threads must be a whole number from 1 to 1024, not 0"),
        ({"microbatch_size": 1, "device": "tpu"}, "'tpu' is not a device"),
        ({"microbatch_size": 1, "target": "tpu"}, "'tpu' is not a target"),
    ],
)
def test_wrong_questions_are_refused(question: dict[str, object], words: str) -> None:
    """Invalid sizes, threads, devices and targets are refused in one sentence."""
    with pytest.raises(UsageError, match=words):
        profile(task_of(lambda: [nn.Linear(8, 4)]), **question)  # type: ignore[arg-type]


@pytest.mark.sample(2)
@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_batch_norm_that_averages_over_all_batches(target: Target, exists: bool) -> None:
    """A batch norm without momentum reads its count of batches; fake tensors have a count, too."""

    def make(momentum: float | None) -> tuple[LayerCost, ...]:
        def build() -> nn.Module:
            return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())

        task = Task(
            build() if exists else build,
            batch=lambda size: (torch.randn(size, 3, 8, 8), torch.randn(size, 4, 6, 6)),
            loss=F.mse_loss,
        )
        return profile(task, microbatch_size=2, target=target).measurements[0].costs

    def bytes_of(cost: LayerCost) -> LayerCost:
        none = Work(flops=0, moved_bytes=0)  # reading a number moves eight bytes
        return replace(cost, forward=none, backward=none, update=none)

    assert [bytes_of(cost) for cost in make(None)] == [bytes_of(cost) for cost in make(0.1)]
