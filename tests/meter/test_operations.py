"""Memory of operations: the meter, over real and fake tensors, against the allocator's events."""

from __future__ import annotations

import bisect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipefit.fake_cuda.target import FakeTarget
from pipefit.measure.cpu import Meter
from pipefit.measure.kernels import Kernels, threads_of
from support.gallery_samples import sampled
from support.operation_samples import OPERATIONS, Run, backward, embedding_bag


class Marks(TorchDispatchMode):
    """A mode that gives every operator call its own range in the profile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        with record_function(f"operation {len(self.names) - 1}"):
            return func(*args, **(kwargs or {}))


def allocated(run: Run) -> tuple[int, list[tuple[str, int]]]:
    """Return the highest level of `run` and of each operator call, by the allocator's events.

    It takes two runs, because under a dispatch mode the number in `x.add_(1.0)` is made a tensor twice.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as whole:
        run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded, Marks() as marks:
        run()
    memory = changes(recorded)
    times = [time for time, _ in memory]
    peaks = {}
    for event in recorded.profiler.kineto_results.events():
        if event.name().startswith("operation "):
            first, last = (
                bisect.bisect_left(times, event.start_ns()),
                bisect.bisect_right(times, event.end_ns()),
            )
            peaks[int(event.name().split()[1])] = highest(memory[first:last])
    return highest(changes(whole)), takers((name, peaks[number]) for number, name in enumerate(marks.names))


def changes(recorded: profile) -> list[tuple[int, int]]:
    """Return the allocated and freed bytes in the order of the allocator's events."""
    events = recorded.profiler.kineto_results.events()
    return sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda event: event[0]
    )


def highest(changes: Iterable[tuple[int, int]]) -> int:
    """Return the highest level above the first."""
    return max(0, *accumulate((nbytes for _, nbytes in changes), initial=0))


def takers(operations: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the operations that allocate; `torch.tensor` makes its result before `lift_fresh`."""
    return [(name, nbytes) for name, nbytes in operations if nbytes > 0 and name != "aten.lift_fresh.default"]


class Spied(Meter):
    """A meter that records the peak of every operator call: results and workspace."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(0, kernels=kernels)
        self.taken: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.total
        out = super().__torch_dispatch__(func, types, args, kwargs)
        known = self.kernels.of(func, args, kwargs or {}, out)
        self.taken.append((str(func), self.total - before if known is None else known.peak_bytes(out)))
        return out


def metered(run: Run) -> tuple[int, list[tuple[str, int]]]:
    """Return the highest level of `run` and of each operator call, by the meter."""
    kernels = Kernels(torch.get_num_threads())
    meter, spied = Meter(0, kernels=kernels), Spied(kernels)
    meter.begin("run")
    with meter:
        run()
    with spied:
        run()
    assert not kernels.memory.unknown
    kernels.keep()
    return meter.end(0, 0.0).total_bytes, takers(spied.taken)


# Families with some operations that need more memory on two threads than on one
BY_THREADS = (
    *("product", "convolution", "normalisation: layer norm", "normalisation: batch norm channels last"),
    *("attention: fused", "attention: module", "other: large sum"),
)
CASES = [(name, 1) for name in OPERATIONS] + [
    pytest.param(name, 2, marks=() if name.startswith(BY_THREADS) else pytest.mark.gallery)
    for name in OPERATIONS
]


@pytest.mark.sample(20)
@pytest.mark.parametrize(("name", "number"), CASES)
def test_every_operation_takes_what_the_allocator_saw(name: str, number: int) -> None:
    """The meter equals the allocator to the byte, call by call and in total, over real and fake tensors, on
    one thread and on two.
    """
    run = OPERATIONS[name]
    with threads_of(number):
        run()  # what a kernel keeps for the rest of the process is nobody's
        seen = allocated(run)
        assert metered(run) == seen
        with FakeTarget("cpu"):
            assert metered(run) == seen


class Sums(torch.autograd.Function):
    """A backward that sums the gradient with another tensor, in Python."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient + x


def hooked(x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    """Return twice the tensor, with a hook on its gradient."""
    result = x * 2
    result.register_hook(hook)
    return result


def held_by_a_hook(x: Tensor) -> Tensor:
    """Keep the gradient of one of two uses until the backward has ended."""
    kept: list[Tensor] = []
    result = hooked(x, kept.append).exp() + x.cos()
    result.kept = kept
    return result


def attended(x: Tensor, mask: Tensor) -> Tensor:
    """Return attention to `x` itself without a fused kernel."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x, x, x, mask)


def applied(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """Call a function, as an interpreter of a graph does."""
    return function(*arguments)


# Values with several uses; for some of them autograd sums gradients in place, for others it cannot
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "two functions": lambda x: x.sin() + x.cos(),
    "three functions": lambda x: x.sin() + x.cos() + x.tan(),
    "a function and a sum": lambda x: (x.sin() + x) * 3,
    "a sum first": lambda x: (x + x.sin()).exp(),
    "itself twice": lambda x: x * x,
    "a product with itself": lambda x: x @ x,
    "joined with itself": lambda x: torch.cat([x, x]).exp(),
    "views": lambda x: x.view(-1).sin() + x.t().reshape(-1).cos(),
    "another order": lambda x: x.t().contiguous().exp() + x.sin(),
    "parts": lambda x: x[1:] * x[:-1],
    "expanded": lambda x: x.sum(0) + x.sin(),
    "held by a hook": held_by_a_hook,
    "summed by a hook": lambda x: hooked(x, lambda gradient: gradient + gradient.cos()) * 3,
    "summed in Python": lambda x: Sums.apply(x * 2) * 3,
    "recomputed": lambda x: (
        checkpoint(lambda y: y.sin() * y.cos(), x, use_reentrant=False, preserve_rng_state=False) + x.exp()
    ),
    "a bias": lambda x: x.sum() + nn.Linear(64, 512)(x.view(4, 16, 64).transpose(0, 1)).detach().sum(),
    "a bias of a function": lambda x: (
        x.sum()
        + F.linear(x.view(4, 16, 64).transpose(0, 1), torch.ones(512, 64), torch.ones(512)).detach().sum()
    ),
    "a mask of attention": lambda x: attended(x.view(4, 1, 32, 32), torch.ones(32, 32)),
    "a bias after a bilinear product": lambda x: (
        x.sum() + F.bilinear(x[:, :8], x[:, :8], torch.ones(512, 8, 8), torch.ones(512)).detach().sum()
    ),
    "a bias by a function of Python": lambda x: (
        x.sum()
        + applied(torch.add, applied(torch.matmul, x, torch.ones(64, 512)), torch.ones(512)).detach().sum()
    ),
    "a bias in Python": lambda x: (
        x.sum() + ((x.view(4, 16, 64).transpose(0, 1) @ torch.ones(64, 512)) + torch.ones(512)).detach().sum()
    ),
    "an excited channel": lambda x: x * torch.sigmoid(x.mean(1, keepdim=True)),
}


@pytest.mark.parametrize("name", SUMS)
def test_gradients_of_several_uses_are_summed_as_without_a_meter(name: str) -> None:
    """Autograd adds to a gradient in place if nobody else holds it, and the meter lets it."""

    def run() -> None:
        x = torch.rand(64, 64, requires_grad=True)
        backward(SUMS[name](x * 2))

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    seen = highest(changes(recorded))
    assert metered(run)[0] == seen
    with FakeTarget("cpu"):
        assert metered(run)[0] == seen


def test_a_gradient_that_python_holds_is_not_added_to() -> None:
    """Autograd sums into a new tensor if a hook keeps the gradient; that sum is the highest moment here."""

    def run() -> None:
        kept: list[Tensor] = []
        value = torch.rand(64, 64, requires_grad=True) * 2
        sine, passed = value.sin(), value + 1.0  # the later use has the first gradient
        passed.register_hook(kept.append)
        backward((sine + passed) * 3)

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert metered(run)[0] == highest(changes(recorded))


def test_an_operation_that_is_not_measured_is_named() -> None:
    """An operation that is not measured is reported: embedding bags with max allocate by the values of their
    indices.
    """
    kernels = Kernels(torch.get_num_threads())
    with FakeTarget("cpu"), Meter(0, kernels=kernels):
        embedding_bag("max")()
    assert any("embedding_bag" in kernel.operation for kernel in kernels.memory.unknown)


LESSER = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
OF_A_LIBRARY = ("product", "convolution", "normalisation: batch norm", "attention", "recurrent")
COMPARED = """
import json, sys
sys.path[:0] = {folders}
import torch
torch.set_num_threads({threads})
from test_operations import OF_A_LIBRARY, compared
print(json.dumps([torch.backends.cpu.get_cpu_capability(), compared(OF_A_LIBRARY)]))
"""


def compared(families: tuple[str, ...]) -> dict[str, bool]:
    """Return, for every operation of these families, whether the meter over real and fake tensors equals the
    allocator.
    """
    found = {}
    for name in filter(lambda name: name.startswith(families), OPERATIONS):
        run = OPERATIONS[name]
        run()
        seen = allocated(run)
        real = metered(run)
        with FakeTarget("cpu"):
            found[name] = seen == real == metered(run)
    return found


@pytest.mark.gallery
@pytest.mark.parametrize("number", sampled([1, 2], often=[1]))
def test_kernels_of_a_common_laptop_take_what_the_allocator_saw(number: int) -> None:
    """The meter equals the allocator on kernels limited to AVX2: products, convolutions, batch norm,
    attention and recurrent layers.
    """
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", COMPARED.format(folders=folders, threads=number)],
        env={**os.environ, **LESSER}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    capability, found = json.loads(done.stdout)
    assert "AVX512" not in capability
    assert {name.partition(":")[0] for name in found} == {family.partition(":")[0] for family in OF_A_LIBRARY}
    assert [name for name, equal in found.items() if not equal] == []
