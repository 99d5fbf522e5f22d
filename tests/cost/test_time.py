"""Seconds of layers: measured if available, else the roofline of each operation, by hand."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from random import Random
from typing import Any

import pytest
from torch import nn

from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.memory.stage import Costs
from pipefit.models.settings import OptimizerName, optimizer_of
from pipefit.schema.actions import Action, Kind
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import DeviceKind, Host
from pipefit.schema.layer_costs import Alike, Family, LayerCost, Parameter, Work
from pipefit.schema.profile import Measurement
from pipefit.schema.training import Training
from pipefit.timing import PassSeconds, host_update_seconds, layer_seconds, seconds
from support.known_profiles import profile
from support.pipelines import equal_profile

# Products reach 1e12 FLOP/s in float16, 2e11 in float32; kernels 1e9 byte/s; an operation costs 1 ms
KIND = DeviceKind(
    name="k",
    flops={"float32": 4e11, "float16": 4e12},
    memory_bandwidth=2e9,
    flops_reached={"float32": 0.5, "float16": 0.25},
    bandwidth_reached=0.5,
    attention_reached=0.5,
    operation_seconds=1e-3,
)


@pytest.mark.parametrize(
    ("alike", "dtype", "expected"),
    [
        (Alike(1, 2 * 10**12, 10**9), "float16", 2.001),  # bound by computing
        (Alike(1, 2 * 10**12, 10**9), "float32", 10.001),
        (Alike(1, 10**11, 3 * 10**9), "float16", 3.001),  # bound by moving bytes
        (Alike(1000, 10**9, 0), "float16", 2.0),  # half of it the constant
        (Alike(1, 0, 0), "float16", 0.001),
        (Alike(1, 2 * 10**12, 10**9, "float16"), "float32", 2.001),  # the operation's dtype, not the model's
        (Alike(1, 2 * 10**12, 10**9, "float32"), "float16", 10.001),
    ],
)
def test_an_operation_is_the_longer_of_two_times_and_a_constant(
    alike: Alike, dtype: str, expected: float
) -> None:
    """Time is the longer of computing at the dtype's share of peak and moving bytes at a share of bandwidth,
    times their number.
    """
    assert seconds(Work.of([alike]), KIND, dtype) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("family", "without", "with_tf32", "half"),
    [
        ("", 10.0, 10.0, 2.0),
        ("attention", 20.0, 20.0, 4.0),
        ("convolution", 10.0, 2.5, 2.0),
        ("winograd", 10.0 / 2.25, 2.5, 2.0),
    ],
)
def test_float32_convolutions_run_in_tf32_or_by_winograds_transform(
    family: Family, without: float, with_tf32: float, half: float
) -> None:
    """A device with a TF32 figure convolves float32 images at this rate, but multiplies matrices in float32;
    another saves products of 3 x 3 kernels.
    """
    work = Work.of([Alike(1, 2 * 10**12, 0, "float32", family)])
    kind = replace(KIND, operation_seconds=0.0)
    tensor = replace(
        kind, flops={**kind.flops, "tf32": 16e11}, flops_reached={**kind.flops_reached, "tf32": 0.5}
    )
    assert seconds(work, kind) == pytest.approx(without)
    assert seconds(work, tensor) == pytest.approx(with_tf32)
    assert seconds(Work.of([Alike(1, 2 * 10**12, 0, "float16", family)]), kind) == pytest.approx(half)


@pytest.mark.parametrize(("elements", "expected"), [(None, 2e12 / 2e10), (3e11, 2e12 / 6e11)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_depthwise_convolutions_load_an_element_for_every_product(
    elements: float | None, expected: float, dtype: str
) -> None:
    """Tensor cores are no use: two operations take the time of a loaded element, or a share of the float32 rate."""
    kind = replace(KIND, elements_per_second=elements, operation_seconds=0.0)
    work = Work.of([Alike(1, 2 * 10**12, 0, dtype, "depthwise")])
    tensor = replace(kind, flops={**kind.flops, "tf32": 16e11})
    assert seconds(work, kind) == seconds(work, tensor) == pytest.approx(expected)


@pytest.mark.parametrize(("dtype", "expected"), [("float16", 5.0), ("float32", 3.0), ("", 3.0)])
def test_small_elements_are_bound_by_their_number(dtype: str, expected: float) -> None:
    """With 3e8 elements a second, 3 GB of halves take 5 s; floats reach the share of the bandwidth, as products do."""
    kind = replace(KIND, elements_per_second=3e8, operation_seconds=0.0)
    assert seconds(Work.of([Alike(1, 0, 3 * 10**9, dtype)]), kind) == pytest.approx(expected)
    assert seconds(Work.of([Alike(1, 1, 3 * 10**9, dtype)]), kind) == pytest.approx(3.0)


def part_of_rate(gpu: DeviceKind, *product: int) -> float:
    """Return the part of the rate that a product of these matrices, rows, columns and terms reaches."""
    flops = 2 * prod(product)
    work = Work.of([Alike(1, flops, 0, "float16", "", product)])
    return flops / 1e12 / seconds(work, replace(gpu, operation_seconds=0.0), "float16")


def test_products_run_in_rounds_of_tiles() -> None:
    """On 108 multiprocessors a result of 9 x 12 tiles of 256 x 128 takes a round, as NVIDIA's guide describes; a
    hundred times as many with a column more take most of another round, unless the sum is divided.
    """
    gpu, few, many = replace(KIND, multiprocessors=108), 64, 1 << 14
    assert part_of_rate(gpu, 1, 9 * 256, 12 * 128, few) == pytest.approx(1.0)
    assert part_of_rate(gpu, 1, 9 * 256, 24 * 128, few) == pytest.approx(1.0)
    assert part_of_rate(gpu, 3, 9 * 256, 4 * 128, few) == pytest.approx(1.0)
    assert 0.5 < part_of_rate(gpu, 1, 9 * 256 + 1, 12 * 128, few) < 0.9
    assert part_of_rate(gpu, 1, 9 * 256 + 1, 12 * 128, many) > part_of_rate(
        gpu, 1, 9 * 256 + 1, 12 * 128, few
    )
    assert part_of_rate(gpu, 1, 90 * 256, 120 * 128 + 1, few) > 0.95
    assert part_of_rate(KIND, 1, 9 * 256 + 1, 12 * 128, few) == pytest.approx(1.0)
    plain = replace(
        gpu, flops={"float32": 4e12, "float16": 4e12}
    )  # without tensor cores small tiles are as fast
    assert part_of_rate(plain, 1, 9 * 128, 12 * 64, few) == pytest.approx(1.0)
    assert part_of_rate(gpu, 1, 9 * 128, 12 * 64, few) < 0.8


def test_products_are_never_faster_than_the_rate_of_full_rounds() -> None:
    """Of random sizes none exceeds the rate, large ones reach nearly all, and long sums of small results are
    divided among tiles.
    """
    rng, gpu = Random(1), replace(KIND, multiprocessors=80)
    for _ in range(200):
        sizes = [rng.randrange(1, 1 << rng.randrange(1, 14)) for _ in range(4)]
        assert 0 < part_of_rate(gpu, *sizes) <= 1 + 1e-12
    assert part_of_rate(gpu, 1, 32000, 32000, 64) > 0.95
    assert part_of_rate(gpu, 1, 256, 256, 1 << 16) > 6 * part_of_rate(gpu, 1, 256, 256, 512)


@pytest.mark.parametrize(
    "product", [(1, 1, 4096, 4096), (1, 8, 4096, 4096), (1, 4096, 16, 4096), (1, 1 << 18, 2, 64)]
)
def test_thin_products_are_bound_by_their_bytes(product: tuple[int, int, int, int]) -> None:
    """A result of few rows or columns has tiles as thin, so that its bytes take longer, as on any device."""
    a100 = Cluster.preset("dgx-a100").devices[0].kind
    matrices, rows, columns, terms = product
    moved = 4 * matrices * (rows * terms + terms * columns + rows * columns)
    work = Work.of([Alike(1, 2 * prod(product), moved, "float32", "", product)])
    untiled = seconds(work, replace(a100, multiprocessors=None))
    assert seconds(work, a100) == pytest.approx(untiled, rel=0.3)


def test_backwards_add_gradients_to_those_of_earlier_microbatches() -> None:
    """All but the first microbatch read a gradient and the sum, and write the sum; `pipedream` updates after
    each, and measured seconds are taken as they are.
    """
    found = equal_profile(2, forward_seconds=None, backward_seconds=None).measurements[0]
    parameter = Parameter(name="w", shape=(250,), dtype="float32", nbytes=1000, trainable=True)
    frozen = replace(parameter, name="v", trainable=False)
    cost = replace(found.kinds[0], parameters=(parameter, frozen))
    found = replace(found, kinds=(cost,), layers=(0, 0))

    def backward(count: int, schedule: str = "1f1b", of: Measurement = found) -> float:
        how = Training(batch_size=count, microbatches=count, schedule=schedule)
        return layer_seconds(of, KIND, how)[0].backward

    added = 3 * 1000 / 1e9 + 1e-3
    assert backward(4) - backward(1) == pytest.approx(3 / 4 * added)
    assert backward(4, "pipedream-2bw") == backward(4)
    assert backward(4, "pipedream") == backward(1)
    measured = replace(found, kinds=(replace(cost, backward=replace(cost.backward, seconds=1.0)),))
    assert backward(4, of=measured) == 1.0


def test_layouts_are_converted_for_tensor_cores_only() -> None:
    """Conversions to channels last move bytes in half precision and TF32, and nothing in plain float32."""
    tensor = replace(KIND, flops={**KIND.flops, "tf32": 16e11})
    for kind, dtype, expected in (
        (KIND, "float16", 3.001),
        (KIND, "float32", 0.0),
        (tensor, "float32", 3.001),
    ):
        assert seconds(Work.of([Alike(1, 0, 3 * 10**9, dtype, "layout")]), kind) == pytest.approx(expected)


def test_operations_add_up_one_by_one() -> None:
    """A compute-bound and a bandwidth-bound operation take the sum of both times; a total without operations
    takes a single roofline.
    """
    work = Work.of([Alike(1, 2 * 10**12, 0), Alike(1, 0, 3 * 10**9)])
    assert seconds(work, KIND, "float16") == pytest.approx(2.001 + 3.001)
    assert seconds(replace(work, operations=()), KIND, "float16") == pytest.approx(3.001)


def test_small_operations_reach_less() -> None:
    """FLOP/s grow with the size of a product, up to the efficiency of large ones."""
    reached = [
        size / seconds(Work.of([Alike(1, size, 0)]), KIND, "float16") for size in (10**8, 10**9, 10**12)
    ]
    assert reached == [pytest.approx(1e8 / 1.1e-3), pytest.approx(1e9 / 2e-3), pytest.approx(1e12 / 1.001)]


def test_measured_seconds_are_taken_as_they_are() -> None:
    """Measured seconds override operations; zero work takes zero time."""
    work = replace(Work.of([Alike(1, 10**12, 0)]), seconds=0.25)
    assert seconds(work, KIND, "float16") == 0.25
    assert seconds(Work(flops=0, moved_bytes=0), KIND) == 0.0


@pytest.mark.parametrize(
    "figure",
    ["flops_reached", "attention_reached", "bandwidth_reached", "elements_per_second", "operation_seconds"],
)
def test_every_assumption_can_be_set(figure: str) -> None:
    """Half the efficiency, or twice the constant, makes work longer; each set of assumptions has a separate
    cached stage cost.
    """
    work = Work.of([Alike(1, 10**12, 0), Alike(1, 10**12, 0, "", "attention"), Alike(1, 0, 10**9)])
    slower: Any = {
        "flops_reached": {"float16": 0.125},
        "attention_reached": 0.25,
        "bandwidth_reached": 0.25,
        "elements_per_second": 1e8,
        "operation_seconds": 2e-3,
    }[figure]
    other = replace(KIND, **{figure: slower})
    assert seconds(work, other, "float16") > seconds(work, KIND, "float16")
    found = equal_profile(4, forward_seconds=None)
    costs = Costs(found.measurements[0], Training(batch_size=1, microbatches=1))
    assert costs.stage(0, 2, KIND) is costs.stage(0, 2, replace(KIND))
    assert costs.stage(0, 2, KIND) is not costs.stage(0, 2, other)


def test_a_stage_adds_up_its_layers_and_the_last_one_the_loss() -> None:
    """A stage sums forward, backward and update of its layers; the loss follows only the
    model's last layer.
    """
    found = equal_profile(4, forward_seconds=1.0, backward_seconds=2.0, update_seconds=0.5).measurements[0]
    loss = replace(found.loss, forward=replace(found.loss.forward, seconds=16.0))
    found = replace(found, loss=loss)
    assert (
        layer_seconds(found, KIND, Training(batch_size=1, microbatches=1))[:4]
        == (PassSeconds(1.0, 2.0, 0.5),) * 4
    )
    costs = Costs(found, Training(batch_size=1, microbatches=1))
    first, last = costs.stage(0, 2, KIND), costs.stage(2, 4, KIND)
    actions = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0), Action(Kind.STEP, 0, None)
    assert [first.seconds(action) for action in actions] == [2.0, 4.0, 1.0]
    assert [last.seconds(action) for action in actions[::2]] == [18.0, 1.0]
    assert last.seconds(Action(Kind.FORWARD, 1, 0, layers=(2, 3))) == 1.0
    assert last.seconds(Action(Kind.FORWARD, 1, 0, layers=(3, 4))) == 17.0


def linear(optimizer: OptimizerName, *, frozen: bool = False) -> LayerCost:
    """Build a linear layer of 1,000,000 parameters."""
    module = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 1, bias=False))
    module[0].weight.requires_grad = not frozen
    return (
        profile(
            Task(
                module,
                batch=lambda size: (
                    module[0].weight.new_ones(size, 1000),
                    module[0].weight.new_ones(size, 1),
                ),
                loss=nn.functional.mse_loss,
                optimizer=optimizer_of(optimizer, None),
            ),
            microbatch_size=1,
            target="cuda",
        )
        .measurements[0]
        .costs[0]
    )


@pytest.mark.parametrize(("optimizer", "moved"), [("adamw", 28), ("sgd", 20)])
def test_an_update_on_a_host_moves_its_bytes_once(optimizer: OptimizerName, moved: int) -> None:
    """AdamW reads four numbers a parameter and writes three, SGD with momentum three and two; frozen
    parameters move none.
    """
    host = Host(memory_bytes=1, memory_bandwidth=1e9)
    assert host_update_seconds(linear(optimizer), host) == pytest.approx(moved * 1e6 / 0.8e9, rel=1e-4)
    assert host_update_seconds(linear(optimizer, frozen=True), host) == 0.0
    with pytest.raises(UsageError, match="memory_bandwidth"):
        host_update_seconds(linear(optimizer), Host(memory_bytes=1))
