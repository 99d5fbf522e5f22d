"""Training under torch's stream sanitizer; prints the number of memory accesses, and of unordered ones. Run
as a script; with `unjoined`, streams do not wait for pipefit's copies.

    build/cuda/bin/python tests/emulated/sanitized.py [unjoined]

torch's sanitizer sees only operators, and tensors by their start address. Here it also sees copies by the
driver, all views of a storage are one object, and freed storages are remembered: their memory may be reused
while a copy reads it. (torch/cuda/_sanitizer.py)
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from torch.cuda import _sanitizer as sanitizer

from pipefit.capture import Task
from pipefit.models import build
from pipefit.profiler import profile
from pipefit.runtime import Trainer
from pipefit.runtime.offload.cuda import CudaDriver, OnStreams
from pipefit.schema.decisions import Decision, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.schema.plan import Plan
from support.offload_choices import movable
from support.offloaded_state import away
from support.small_tasks import batch_of, plan_of

REACHED = "device0*1+device1*1+device2*1+host0*1"


class Watch(sanitizer.EventHandler):
    """Counter of accesses, and of accesses that no event orders."""

    def __init__(self) -> None:
        super().__init__()
        self.accesses, self.unordered = 0, 0

    def touched(self, stream: int, read: set[int], written: set[int], by: str) -> None:
        """Record work of a stream on memory, by the start of its storages."""
        self.accesses += len(read | written)
        names = {start: [by] for start in read | written}
        self.unordered += len(self._handle_kernel_launch(stream, read - written, written, set(), by, names))

    def _handle_memory_allocation(self, data_ptr: int) -> None:
        if data_ptr not in self.tensors_accessed.accesses:
            super()._handle_memory_allocation(data_ptr)

    def _handle_memory_deallocation(self, data_ptr: int) -> None:
        """Keep the record of accesses after a free."""

    def storage_at(self, address: int) -> set[int]:
        """Return the start of the device storage that contains an address; nothing for host memory."""
        on_host = address >= 1 << 46  # addresses of emulated devices rise from 1 << 45
        return (
            set() if on_host else {max(start for start in self.tensors_accessed.accesses if start <= address)}
        )


class Arguments(sanitizer.ArgumentHandler):
    """Tensors by their storages."""

    def _handle_argument(self, value: Any, is_write: bool, metadata_only: bool, *_: Any, **__: Any) -> None:
        if (
            isinstance(value, torch.Tensor)
            and value.is_cuda
            and (start := value.untyped_storage().data_ptr())
        ):
            (self.dataptrs_written if is_write else set() if metadata_only else self.dataptrs_read).add(start)


class Mode(sanitizer.CUDASanitizerDispatchMode):
    """Mode that reports every operator to a `Watch`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        factory, seen = bool(sanitizer.FACTORY_FUNCTION_REGEX.match(func._schema.name)), Arguments()
        seen.parse_inputs(func._schema, args, kwargs or {}, is_factory=factory)
        out = func(*args, **(kwargs or {}))
        seen.parse_outputs(func._schema, out, is_factory=factory)
        if seen.dataptrs_read or seen.dataptrs_written:
            stream = torch.cuda.current_stream().cuda_stream
            self.event_handler.touched(stream, seen.dataptrs_read, seen.dataptrs_written, str(func))
        return out


def moving_plan(task: Task) -> Plan:
    """Return three stages: two keep every other tensor on the host, and the last one's optimizer state is
    there.
    """
    found = profile(task, microbatch_size=2, target="cuda")
    plan = plan_of(task, [2, 2, 2], size=2, microbatches=4, memory_bytes=1 << 34, profiled=found)
    link = replace(plan.cluster.links[0], members=parse_place(REACHED).members)
    saved = [
        Decision(
            stage=stage,
            subject=SavedTensors(tensors=tuple(movable(plan, stage)[::2])),
            what=What.OFFLOAD,
            place=parse_place("host"),
            ahead=1,
        )
        for stage in (0, 1)
    ]
    cluster = replace(plan.cluster, backend="cuda", links=(link,))
    return replace(plan, cluster=cluster, decisions=(*saved, away(2, 4, 6, ahead=1)))


def main(*options: str) -> None:
    """Train two steps."""
    task = build("gpt", layers=3, hidden=32, heads=2, vocabulary=100, sequence=16, dropout=0.0)
    plan = moving_plan(task)
    watch, copied = Watch(), CudaDriver.copy

    def copy(driver: CudaDriver, target: int, source: int, nbytes: int, stream: int) -> None:
        watch.touched(stream, watch.storage_at(source), watch.storage_at(target), "copy")
        copied(driver, target, source, nbytes, stream)

    CudaDriver.copy = copy
    if "unjoined" in options:
        OnStreams.join = lambda copies, handle: None
    sanitizer.ArgumentHandler, sanitizer.EventHandler = Arguments, lambda: watch
    with Mode():
        trainer = Trainer(task, plan, numbers=False)
        for step in range(2):
            trainer.step(batch_of(task, plan, step))
    print(watch.accesses, watch.unordered)


if __name__ == "__main__":
    main(*sys.argv[1:])
