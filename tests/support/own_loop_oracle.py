"""The plain loop of a model, and its peaks by the CPU allocator's own events.

It shares no code with pipefit: the profile of torch lists every allocated and freed byte.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree

from support.own_loop_models import Model

STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Losses, final tensors, and the peaks of each step."""

    losses: list[float]
    state: dict[str, Tensor]
    peaks: list[int]

    def equals(self, other: Trained) -> bool:
        """Return whether all numbers are bitwise equal."""
        return self.losses == other.losses and all(
            torch.equal(value, other.state[name]) for name, value in self.state.items()
        )


def bytes_of(tensors: Any) -> int:
    """Return the bytes of the storages of all tensors in a tree."""
    leaves = [t for t in pytree.tree_leaves(tensors) if isinstance(t, Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in leaves}.values())


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect garbage before the body, and none inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def peaks_of(run: Callable[[], Any], resident: int, marks: str) -> list[int]:
    """Return the highest level in each range whose name begins with `marks`."""
    with uncollected(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as observed:
        run()
    events = observed.profiler.kineto_results.events()
    memory = sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda e: e[0]
    )
    ranges = sorted((e.start_ns(), e.end_ns()) for e in events if e.name().startswith(marks))
    level, peaks = resident, [0] * len(ranges)
    for at, nbytes in memory:
        level += nbytes
        for number, (start, end) in enumerate(ranges):
            if start <= at <= end:
                peaks[number] = max(peaks[number], level)
    return peaks


def train(model: Model, module: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int = 7) -> Trained:
    """Train in a plain loop."""
    torch.manual_seed(seed)
    batches = [model.batch() for _ in range(STEPS)]
    losses: list[float] = []

    def loop() -> None:
        for batch in batches:
            with record_function("step"):  # a loader makes the next batch while the last one is in use
                inputs, targets = pytree.tree_map_only(Tensor, Tensor.clone, batch)
                optimizer.zero_grad()
                if isinstance(inputs, dict):
                    outputs = module(**inputs)
                else:
                    outputs = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
                if model.loss is not None:
                    loss = model.loss(outputs, targets)
                else:
                    loss = outputs["loss"] if isinstance(outputs, dict) else outputs
                loss.backward()
                optimizer.step()
            losses.append(loss.item())

    lasting = [*module.parameters(), *module.buffers(), *map(dict, optimizer.state.values())]
    peaks = peaks_of(loop, bytes_of(lasting), "step")
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return Trained(losses=losses, state=state, peaks=peaks)
