"""Profiling: the costs of every layer of a task's model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipefit.capture import Task, recording
from pipefit.errors import UsageError
from pipefit.fake_cuda.isolation import apart
from pipefit.profiler.fake import Progress, profile_sizes
from pipefit.profiler.feedback import measured_coupling, statistics_written, with_coupling
from pipefit.profiler.measured import add_seconds
from pipefit.profiler.on_demand import (
    NotRepeated,
    OnDemand,
    Repeated,
    profiled_beside,
    same_costs,
    stretched,
    with_few_blocks,
)
from pipefit.profiler.pass_meter import PassMeter
from pipefit.schema.profile import MOST_THREADS, ModelProfile, Target
from pipefit.schema.validation import instance, whole

__all__ = [
    "NotRepeated",
    "OnDemand",
    "PassMeter",
    "Progress",
    "Repeated",
    "profile",
    "profiled_beside",
    "same_costs",
    "statistics_written",
    "stretched",
    "with_few_blocks",
]


def profile(
    task: Task,
    *,
    microbatch_size: int | Sequence[int],
    device: str = "fake",
    target: Target = "cpu",
    threads: int = 1,
    tensor: int | Sequence[int] = (),
    sequences: bool = False,
    progress: Progress | None = None,
) -> ModelProfile:
    """Return the costs of every layer of `task`, for one microbatch size or several.

    A plan needs the size of its microbatches; for stages with replicas, the sizes of their local batches; and
    for tensor-parallel stages, the costs of layers divided between the same number of ranks.

    An existing module is not changed, nor are its gradients, buffers and modes, nor torch's random
    generators.

    Args:
        device: `fake` builds no model and finds bytes and FLOPs; `cpu` and `cuda` also measure seconds there.
        For the
            target `cpu`, each operation that this machine has not measured yet runs once, on up to 1 GiB of
            random data.
        target: device type whose kernels autograd's choices follow; with a real device, that device's type.
        threads: CPU threads of a worker (the temporary memory of its kernels depends on them).
        tensor: numbers of tensor-parallel ranks to profile, in addition to whole layers.
        sequences: also profile sequence parallelism: ranks divide values between attention and MLP along
        positions. progress: called with (layers done, number of layers, name of the next one).
    """
    instance("task", task, Task, "pipefit.Task describes how a module is trained")
    asked: Sequence[Any] = microbatch_size if isinstance(microbatch_size, list | tuple) else [microbatch_size]
    sizes = list(dict.fromkeys(whole("microbatch_size", size, 1) for size in asked or [0]))
    whole("threads", threads, 1, MOST_THREADS)
    ranks: Sequence[Any] = tensor if isinstance(tensor, list | tuple) else [tensor]
    degrees = [whole("tensor", degree, 1) for degree in ranks]
    along = instance("sequences", sequences, bool)
    if progress is not None:
        instance("progress", progress, Callable)
    if along and max(degrees, default=1) < 2:
        raise UsageError("sequence parallelism needs several ranks: give their number (tensor), such as 2")
    if device not in ("fake", "cpu", "cuda"):
        raise UsageError(f"{device!r} is not a device to profile on; choose fake, cpu or cuda")
    real = device if device != "fake" else None
    followed: Target = "cuda" if real == "cuda" else target
    generators = range(torch.cuda.device_count()) if real == "cuda" else ()

    def faked() -> ModelProfile:
        with recording("profiling"), torch.random.fork_rng(devices=[]):
            return profile_sizes(
                task,
                sizes,
                target=followed,
                threads=threads,
                tensor=degrees,
                sequences=along,
                progress=progress,
            )

    result = apart(followed, faked)
    with recording("profiling"):
        result = with_coupling(result, measured_coupling(task, result) if result.divides_samples else "")
    if real is None:
        return result
    with recording("profiling"), torch.random.fork_rng(generators, device_type="cuda"):
        return add_seconds(result, task, device=torch.device(real), threads=threads, progress=progress)
