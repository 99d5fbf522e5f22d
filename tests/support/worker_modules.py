"""Workers that read the modules they train, as a user's script does; run by `tests/runtime/test_worker_modules.py`."""

from __future__ import annotations

import copy
import io
import pickle
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit import Plan, Task, Trainer
from pipefit.checkpoints import whole
from pipefit.errors import UsageError
from pipefit.runtime.checkpoint.background_saver import _Writing

WIDTH, BATCH, MICROBATCHES = 8, 8, 2
OPTIMIZER = partial(torch.optim.AdamW, lr=0.01)


class Tied(nn.Module):
    """A module to be traced: blocks with a buffer, then the first layer's weight again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.scale: Tensor
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        x = self.first(x)
        for part in self.blocks:
            x = x + part(x)
        result: Tensor = self.last(x * self.scale)
        return result


def block() -> nn.Sequential:
    """Build a block that tensor-parallel ranks can divide."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def written() -> nn.Sequential:
    """Build a module whose parts are layers."""
    torch.manual_seed(0)
    return nn.Sequential(block(), block(), nn.LayerNorm(WIDTH))


def traced() -> nn.Module:
    """Build a module that is traced."""
    torch.manual_seed(0)
    return Tied()


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return a random batch."""
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def task_of(module: nn.Module) -> Task:
    """Return a task that trains this module."""
    return Task(module, batch=batch, loss=F.mse_loss, optimizer=OPTIMIZER, name="read")


def train(module: nn.Module, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Train plainly; yield every batch after its step."""
    optimizer = OPTIMIZER(module.parameters())
    torch.manual_seed(1)
    for _ in range(steps):
        inputs, targets = batch(BATCH)
        for given, wanted in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            loss: Any = F.mse_loss(module(given), wanted) / MICROBATCHES
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield inputs, targets


# ---- Reading

_GIVEN = torch.ones(3, WIDTH)
REFUSAL = "cannot be read on this worker"


def _saved(one: Any) -> Any:
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _changed(one: Tensor) -> Tensor:
    with torch.no_grad():
        return one.mul_(1)


_OF_MODULES: dict[str, Callable[[Any], Any]] = {
    "call": lambda one: one(_GIVEN),
    "state_dict": lambda one: one.state_dict(),
    "deepcopy": lambda one: copy.deepcopy(one).state_dict(),
    "pickle": lambda one: pickle.loads(pickle.dumps(one)).state_dict(),
    "save": lambda one: _saved(one.state_dict()),
    "save parameters": lambda one: _saved(one.state_dict(keep_vars=True)),
    "vector": lambda one: nn.utils.parameters_to_vector(one.parameters()),
}
_OF_TENSORS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda one: one.norm(),
    "data": lambda one: one.data + 0,
    "numpy": lambda one: torch.from_numpy(one.detach().clone().numpy()),
    "tolist": lambda one: one.tolist(),
    "save": _saved,
    "deepcopy": copy.deepcopy,
    "change": _changed,
    "several": lambda one: torch.stack(torch._foreach_norm([one])),
}


def read(own: nn.Module, plain: nn.Module) -> set[str]:
    """Read a module, its parts and its tensors in every way, and assert that it equals a plain one.

    Return the names of what raised the error of absent tensors.
    """
    refused = set()
    like = dict(plain.named_modules())
    parts = {path: part for path, part in own.named_modules() if list(like[path].parameters())}
    held, known = own.state_dict(keep_vars=True), plain.state_dict(keep_vars=True)
    readings = [
        *((path, ways, parts[path], like[path]) for path in parts for ways in [_OF_MODULES]),
        *((name, ways, held[name], known[name]) for name in held for ways in [_OF_TENSORS]),
    ]
    for name, ways, one, other in readings:
        for way, reading in ways.items():
            if isinstance(one, nn.ModuleList) and way == "call":
                continue
            try:
                result = reading(one)
            except UsageError as error:
                if REFUSAL not in str(error):
                    raise
                refused.add(name)
            else:
                expected = reading(other)
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5, msg=f"{name}: {way}")
    assert list(map(_form, held.values())) == list(map(_form, known.values()))
    return refused


def _form(tensor: Tensor) -> object:
    known = tensor.shape, tensor.stride(), tensor.numel(), tensor.dtype, tensor.device, tensor.requires_grad
    return (*known, isinstance(tensor, nn.Parameter), tensor.is_leaf, tensor.grad)


# ---- Workers


def reading_workers(rank: int, folder: str, plans: dict[str, Plan]) -> None:
    """Train every plan on two workers, and read the module before and after steps, evaluations and saves.

    The first worker completes checkpoints late. Whole weights are loaded into the module between steps, and the
    checkpoint into another trainer of it.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/meet")
    complete = _Writing._complete

    def late(writing: _Writing) -> None:
        time.sleep(0.2)
        complete(writing)

    mock.patch.object(_Writing, "_complete", late).start()
    for name, plan in plans.items():
        own, plain = (BUILT[name.partition(" ")[0]]() for _ in range(2))
        _trains(own, plain, plan, Path(folder) / name, is_whole=" whole " in f"{name} ")
    dist.destroy_process_group()


def _trains(own: nn.Module, plain: nn.Module, plan: Plan, saved: Path, *, is_whole: bool) -> None:
    trainer, loop = Trainer(task_of(own), plan), train(plain, 3)
    read(own, plain)
    for given in islice(loop, 2):
        trainer.step(given)
        refused = read(own, plain)
        assert ("" in refused) is not is_whole  # the module as a whole
        assert len(refused) < len(list(own.named_modules())) + len(own.state_dict(keep_vars=True))
        trainer.evaluate(given)
        trainer.save(saved, background=False)
        assert whole(saved), "saved by all workers"
        assert read(own, plain) == refused
        if trainer.steps_done == 1:  # other weights, which the next step trains
            plain.load_state_dict({name: tensor / 2 for name, tensor in plain.state_dict().items()})
        own.load_state_dict(plain.state_dict())
        assert not read(own, plain)
    again = Trainer(task_of(own), plan)
    again.load(saved)
    again.step(next(loop))
    if not is_whole:
        assert read(own, plain) == refused
        later = Trainer(task_of(own), plan)
        with pytest.raises(UsageError, match="load a checkpoint"):
            later.step(batch(BATCH))
        later.load_state_dict(plain.state_dict())
    assert read(own, plain) == refused


BUILT: dict[str, Callable[[], nn.Module]] = {"written": written, "traced": traced}
