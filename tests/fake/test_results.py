"""Cache of operations over fake tensors: it returns the results of torch's own mode for the same
arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.fake_cuda.results import QuickFakeMode
from pipefit.fake_cuda.target import FakeTarget
from pipefit.measure.cpu import Meter
from pipefit.schema.profile import Target
from pipefit.torch_internals.fake_tensors import without_torch_dispatch
from support.saved_tensor_models import MODELS, OPTIMIZERS, TARGETS, train

aten = torch.ops.aten


class Diary(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record of the forms of all results, their storages, and the arguments among them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pages: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = list(tensors_in((args, kwargs or {})))
        results = list(tensors_in(out))
        known = [*given, *results]
        self.pages.append((str(func), type(out), tuple(form(result, known) for result in results)))
        return out


def tensors_in(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, dict):
        yield from tensors_in(list(item.values()))
    elif isinstance(item, list | tuple):
        for one in item:
            yield from tensors_in(one)


def form(tensor: Tensor, known: list[Tensor]) -> object:
    storage = tensor.untyped_storage()
    return (
        (tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.storage_offset()),
        (storage.nbytes(), tensor.requires_grad, torch._C._dispatch_key_set(tensor)),
        next(number for number, one in enumerate(known) if one is tensor),
        next(number for number, one in enumerate(known) if one.untyped_storage()._cdata == storage._cdata),
    )


def trained(target: Target, name: str, optimizer: str) -> list[object]:
    """Return a meter's record of a step of training."""
    build, shape = MODELS[name]
    with FakeTarget(target) as fake, Meter(0):
        model = build().to(fake.device)
        stepper = OPTIMIZERS[optimizer](model.parameters())
        with Diary() as diary:
            train(model, torch.randn(shape, device=fake.device), stepper)
    return diary.pages


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "optimizer"), list(zip(MODELS, cycle(OPTIMIZERS), strict=False)))
@pytest.mark.parametrize("target", TARGETS)
def test_training_does_the_same(
    monkeypatch: pytest.MonkeyPatch, target: Target, name: str, optimizer: str
) -> None:
    """Each operation of training returns torch's uncached result, at first and from the cache."""
    found = [trained(target, name, optimizer) for _ in range(2)]
    monkeypatch.setattr(QuickFakeMode, "_key", lambda *_: None)
    monkeypatch.setattr(torch._subclasses.FakeTensorMode, "cache", {})
    assert found == [trained(target, name, optimizer)] * 2


def calls(mode: QuickFakeMode, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the operations that reach torch from now on."""
    found: list[str] = []
    run = mode._run

    def asked(func: Any, *rest: Any) -> Any:
        found.append(str(func))
        return run(func, *rest)

    monkeypatch.setattr(mode, "_run", asked)
    return found


def test_torch_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation runs once for arguments of one form, and again for any difference that affects results."""
    with QuickFakeMode({}) as mode:
        asked = calls(mode, monkeypatch)
        x, rows = torch.empty(4, 6), torch.empty(6, 4).t()
        for _ in range(2):
            x.add(1), x.add(1.0), x.add(True), rows.add(1), x.double().add(1), x[1:].add(1), x[:, :5].add(1)
            torch._foreach_add([x, rows], 1)
        assert asked.count("aten.add.Tensor") == 7
        assert asked.count("aten._foreach_add.Scalar") == 1
        monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
        x.add(1)
        assert asked.count("aten.add.Tensor") == 8


def test_what_depends_on_more_is_asked_each_time() -> None:
    """Known numbers, results given as an argument, changes of form and storages without memory are not
    cached.
    """
    with QuickFakeMode({}):
        x = torch.empty(4)
        for value in (2.0, 3.0):
            number = torch.tensor(value)
            assert (number * 2).item() == 2 * value
            number.add_(torch.empty(()))
            with pytest.raises(DataDependentOutputException):
                number.item()
        assert all(
            torch.add(x, y, out=out) is out for y in (x, x + 1) for out in (torch.empty(4), torch.empty(4))
        )
        outs = [torch.empty(0), torch.empty(0)]
        assert [tuple(torch.add(x, x, out=out).shape) for out in outs] == [(4,), (4,)]
        shapes = []
        for length in (4, 9, 4):
            x.resize_(length)
            shapes.append((tuple(x.shape), x.untyped_storage().nbytes()))
        assert shapes == [((4,), 16), ((9,), 36), ((4,), 36)]
        y = x.view(2, 2)
        x.untyped_storage().resize_(0)
        for _ in range(2):
            assert x.view(2, 2).untyped_storage().nbytes() == 0
        assert y.untyped_storage().nbytes() == x.untyped_storage().nbytes() == 0


def test_new_fake_tensors_are_those_of_torch() -> None:
    """A fake tensor made like an earlier one has the attributes, keys and copies of one that torch makes."""
    mode = QuickFakeMode({})
    with mode:
        first, second, other = (torch.empty(n, 2) for n in (3, 4, 5))
        view, copied = second.detach(), copy.deepcopy(torch.nn.Parameter(other))
    with without_torch_dispatch():
        of_torch = FakeTensor(mode, torch.empty(4, 2, device="meta"), torch.device("cpu"))
    assert isinstance(first, FakeTensor) and isinstance(copied, torch.nn.Parameter)
    for one in (second, view):
        assert isinstance(one, FakeTensor)
        assert vars(one) == vars(of_torch) == vars(first)
        assert torch._C._dispatch_keys(one) == torch._C._dispatch_keys(of_torch)
        assert (one.shape, one.device, one.is_leaf) == (of_torch.shape, of_torch.device, True)


def test_an_argument_twice() -> None:
    """An operation returns the argument that it changes, whether or not the first call had two equal
    arguments.
    """
    for first in (True, False):
        with QuickFakeMode({}):
            x, y = torch.empty(3), torch.empty(3)
            for twice in (first, not first, first):
                assert aten.add_.Tensor(x, x if twice else y) is x
                z = torch.empty(3)
                assert aten.add.out(z if twice else x, y, out=z) is z
