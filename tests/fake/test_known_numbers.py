"""Numeric parameters, such as gates and temperatures, on fake devices."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from pipefit.capture import Task
from pipefit.fake_cuda.target import FakeTarget, Target
from pipefit.profiler import profile
from pipefit.schema.training import Precision
from support.saved_tensor_models import TARGETS


class Gated(nn.Module):
    """A linear layer times a trained number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gate


@pytest.mark.parametrize("target", TARGETS)
def test_they_are_cast_and_moved_and_their_numbers_are_not_known(target: Target) -> None:
    """Torch keeps weak references to tensors of known numbers, with which `Module.to` fails."""
    with FakeTarget(target) as fake, fake.assuming_nothing():
        gated = nn.Sequential(Gated(), Gated()).to(torch.bfloat16).to(fake.device)
        assert {(p.dtype, p.device) for p in gated.parameters()} == {(torch.bfloat16, fake.device)}
        assert isinstance(gated[0], Gated)
        with pytest.raises(DataDependentOutputException):
            gated[0].gate.item()


@pytest.mark.parametrize("target", TARGETS)
def test_known_numbers_follow_operations_on_known_numbers_alone(target: Target) -> None:
    """Counted steps and results of known numbers are read; a number that is changed by an unknown one is not known.

    Operations on unknown numbers of the same form have run before, so their results are cached.
    """
    with FakeTarget(target) as fake, fake.assuming_nothing():
        unknown = torch.empty(())
        _ = unknown * unknown, unknown.clone().mul_(unknown)
        original = torch.zeros(())
        step, count = torch.tensor(0.5), torch.tensor(3)
        step += 1
        count += 1
        step.add_(2, alpha=2)
        assert (step.item(), count.item(), original.item()) == (5.5, 4, 0.0)
        assert step.add_(count) is step
        assert step.item() == 9.5
        assert (step * torch.tensor(2.0)).item() == 19.0
        for result in (step * unknown, unknown * step, step.mul_(unknown), step):
            assert result.shape == () and result.dtype == torch.float32
            with pytest.raises(DataDependentOutputException):
                result.item()


@pytest.mark.parametrize("target", TARGETS)
def test_a_factory_reads_lists_that_it_makes(target: Target) -> None:
    """Rates that grow from block to block are plain numbers; trained ones, or those of a forward, are not known."""
    with FakeTarget(target) as fake:
        with fake.assuming_nothing():
            rates = torch.linspace(0, 0.5, 6)
            groups = [group.tolist() for group in rates.split([1, 2, 3])]
            assert [rate for group in groups for rate in group] == pytest.approx(
                [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
            )
            assert [int(place) for place in torch.arange(3) + torch.tensor([1, 1, 2])] == [1, 2, 4]
            rates[1:3] = torch.empty(2)
            trained = nn.ParameterList([torch.linspace(0, 1, 4)]).to(torch.bfloat16).to(fake.device)
            for unknown in (rates[0], trained[0][0]):
                with pytest.raises(DataDependentOutputException):
                    unknown.item()
        assert torch.linspace(0, 1, 4).constant is None  # type: ignore[attr-defined]
        with fake.assuming_nothing():  # a forward made the same range before
            assert torch.linspace(0, 1, 4).tolist() == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])


class Placed(nn.Module):
    """A linear layer whose input gets the numbers of its places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("places", torch.arange(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.places)


@pytest.mark.parametrize("target", TARGETS)
def test_layers_with_numbers_are_copied_without_them(target: Target) -> None:
    """`nn.TransformerEncoder` copies its layer; what follows for a copy is not true of the original."""
    with FakeTarget(target) as fake, fake.assuming_nothing():
        original = Placed()
        changed = copy.deepcopy(original)
        assert (changed.places.shape, changed.places.dtype) == ((8,), torch.int64)
        changed.places += 1
        with pytest.raises(DataDependentOutputException):
            changed.places.tolist()
        assert original.places.tolist() == [*range(8)]


@pytest.mark.parametrize("target", TARGETS)
def test_known_numbers_follow_the_memory_that_a_tensor_has(target: Target) -> None:
    """A tensor over an array has the array's numbers; one with other data has the numbers of none."""
    with FakeTarget(target) as fake, fake.assuming_nothing():
        array = np.arange(3.0)
        over = torch.from_numpy(array)
        array[0] = 9
        assert over.tolist() == [9.0, 1.0, 2.0]
        over.mul_(2)
        assert array.tolist() == over.tolist() == [18.0, 2.0, 4.0]
        other = torch.arange(3.0)
        other.data = torch.randn(3)
        with pytest.raises(DataDependentOutputException):
            other.tolist()


@pytest.mark.parametrize("number", [3, 0.5], ids=["integer", "double"])
@pytest.mark.parametrize("target", TARGETS)
def test_numbers_that_torch_remembers_are_not_known_for_longer(target: Target, number: float) -> None:
    """Torch since 2.14 also remembers single integers and doubles: not those of trained parameters, of
    replaced data, or of tensors that were changed before they were copied.
    """
    with FakeTarget(target) as fake, fake.assuming_nothing():
        made = torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)
        assert made.item() == number
        trained = nn.Parameter(made.clone(), requires_grad=False)
        replaced, changed = made.clone(), made.clone()
        replaced.data = torch.empty((), dtype=made.dtype)
        changed += torch.empty((), dtype=made.dtype)
        for unknown in (trained, replaced, changed, copy.deepcopy(changed)):
            with pytest.raises(DataDependentOutputException):
                unknown.item()


def test_a_factory_of_copied_layers_fits() -> None:
    """The layers have buffers of known numbers."""

    def build() -> nn.Module:
        layer = Placed()
        return nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)))

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 8), torch.randn(size, 8)

    task = Task(build, batch=batch, loss=nn.functional.mse_loss)
    found, expected = (profile(one, microbatch_size=2) for one in (task, replace(task, module=build())))
    assert found.measurements == expected.measurements


@pytest.mark.parametrize("precision", [None, "bfloat16", "master-bfloat16"])
def test_a_factory_is_profiled_as_the_module_that_it_builds(precision: Precision | None) -> None:
    """The result is the same whether the factory or the task's precision casts the parameters."""
    dtype = torch.float32 if precision else torch.float64

    def build() -> nn.Module:
        return nn.Sequential(Gated(), nn.Tanh(), Gated()).to(dtype)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 8, dtype=dtype), torch.randn(size, 8, dtype=dtype)

    task = Task(build, batch=batch, loss=nn.functional.mse_loss, precision=precision)
    found, expected = (profile(one, microbatch_size=2) for one in (task, replace(task, module=build())))
    assert found.measurements == expected.measurements
    assert found.fingerprint == expected.fingerprint
