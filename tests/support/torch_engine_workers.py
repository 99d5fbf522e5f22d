"""Gloo workers that train plans on torch's engine, and their peaks by the CPU allocator's own events.

The workers stay alive across trainings. Each joins a new process group for every training.
"""

from __future__ import annotations

import gc
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

import pipefit
from pipefit.capture import Task
from pipefit.runtime.launch.forks import forks, start
from pipefit.schema.plan import Plan
from pipefit.tensor_parallel import lent
from pipefit.torch_engine.rank import EngineRank

STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Losses of the steps, final tensors by their names in the model, and peaks of every step."""

    losses: list[float]
    state: dict[str, Tensor]
    peaks: list[int]


class Workers:
    """A pool of worker processes; `train` uses as many as the plan has devices."""

    def __init__(self, count: int = 4) -> None:
        context = forks()  # pipefit's own fork server, which tests of the launch use in this process too
        pipes = [context.Pipe() for _ in range(count)]
        self._ends = [end for end, _ in pipes]
        self._process = context.Process(target=_work_together, args=([end for _, end in pipes],), daemon=True)
        start(self._process)

    def train(self, plan: Plan, make: Callable[..., Task], *arguments: Any) -> dict[int, Trained]:
        """Train the task `make(*arguments)` by a plan; return the results of every device."""
        answers = self.run(len(plan.workers), _trained, plan, make, arguments)
        return dict(zip(plan.workers, answers, strict=True))

    def run(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in `count` workers that share a process group; return their results."""
        with tempfile.TemporaryDirectory() as folder:
            for rank, end in enumerate(self._ends[:count]):
                end.send((rank, count, str(Path(folder) / "store"), function, arguments))
            answers = [end.recv() for end in self._ends[:count]]
        failed = [str(answer) for answer in answers if isinstance(answer, Failure)]
        assert not failed, "\n".join(failed)
        return answers

    def close(self) -> None:
        """End the workers."""
        for end in self._ends:
            end.send(None)
        self._process.join()


class Failure(str):
    """The traceback of a worker's exception."""

    __slots__ = ()


def _work_together(ends: list[Connection]) -> None:
    """Work at the first end, and in forks at the others: imports, which take two seconds, are done once."""
    for number in range(1, len(ends)):
        if os.fork() == 0:
            try:
                _work(number, ends)
            finally:
                os._exit(0)
    _work(0, ends)
    for _ in ends[1:]:
        os.wait()


def _work(number: int, ends: list[Connection]) -> None:
    for other in {*ends} - {ends[number]}:
        other.close()  # without its worker an end is closed, and the test fails at once
    end = ends[number]
    # In each fork: if its first backward starts several threads, as since torch 2.14, these would replace the
    # parent's pool of kernel threads at the same time, and torch would abort.
    torch.set_num_threads(1)
    while (order := end.recv()) is not None:
        rank, count, store, function, arguments = order
        dist.init_process_group("gloo", store=dist.FileStore(store, count), rank=rank, world_size=count)
        try:
            answer = function(*arguments)
        except BaseException:  # noqa: BLE001 - the test reports it
            answer = Failure(traceback.format_exc())
        finally:
            dist.destroy_process_group()
        end.send(answer)  # the store's folder is removed when all have answered


def _trained(plan: Plan, make: Callable[..., Task], arguments: tuple[Any, ...]) -> Trained:
    task = make(*arguments)
    unmetered = replace(plan, cluster=replace(plan.cluster, backend="cpu"))
    step, losses = EngineRank.step, []

    def marked(self: EngineRank, *args: Any, **kwargs: Any) -> None:
        with record_function("a step"):
            step(self, *args, **kwargs)

    with (
        _uncollected(),
        mock.patch.object(EngineRank, "step", marked),
        mock.patch.object(dist, "all_reduce", _reduced),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as observed,
    ):
        pipeline = pipefit.pipeline(task, unmetered, numbers=False)
        resident = _resident(pipeline)
        for number in range(STEPS):
            torch.manual_seed(number)
            inputs, targets = task.batch(plan.training.batch_size)
            losses.append(pipeline.step(inputs, target=targets))
    state = {name: whole_copy(tensor) for name, tensor in pipeline.state_dict().items()}
    return Trained(losses=losses, state=state, peaks=_peaks(observed, resident))


def whole_copy(tensor: Any) -> Tensor:
    """Return a copy of a tensor, whole if replicas divide it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


_all_reduce = dist.all_reduce


def _reduced(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Reduce a tensor whose memory gloo's thread cannot hold on to: torch records no frees of that thread.

    torch since 2.14 votes by such a sum before the first step.
    """
    with lent(tensor) as shared:
        _all_reduce(shared[0], op, group=group)
    return mock.Mock()


@contextmanager
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _resident(pipeline: Any) -> int:
    """Return the bytes of everything on the device before the first step."""
    modules = [part for stage in pipeline.stages for part in stage.submod.modules()]
    tensors = [t for module in modules for t in _tensors(module)]
    tensors += [t for stage in pipeline.stages for t in stage.submod.copies.tensors]  # of weights
    loss = pipeline.schedule._loss_fn
    tensors += (
        [t for t in vars(loss).values() if isinstance(t, Tensor)] if not hasattr(loss, "__code__") else []
    )
    tensors += [t for optimizer in pipeline.optimizers for t in _state(optimizer)]
    here = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in here}.values())


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    held: list[Mapping[str, Any]] = [vars(module), module._parameters, module._buffers]
    for attributes in held:
        yield from (value for value in attributes.values() if isinstance(value, Tensor))


def _state(optimizer: Any) -> Iterator[Tensor]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]  # float32 copies, if the parameters are in half precision
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _peaks(observed: profile, resident: int) -> list[int]:
    """Return the highest level in every step."""
    events = observed.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda event: event[0]
    )
    peaks, level = [], resident
    for begun, ended in sorted((e.start_ns(), e.end_ns()) for e in events if e.name() == "a step"):
        peak = level
        for at, nbytes in memory:
            if begun <= at <= ended:
                level += nbytes
                peak = max(peak, level)
        peaks.append(peak)
    return peaks
