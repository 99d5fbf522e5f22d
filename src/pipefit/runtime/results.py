"""The mean loss of a step and the peaks of its devices, which all workers tell each other in one message.

Under an endless schedule nobody waits for it: a worker that is ahead would have to wait until the last stage has
computed the step's losses, and that would drain the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.errors import OutOfMemory, WorkerFailed
from pipefit.plans import Plan
from pipefit.runtime.lost import lost
from pipefit.runtime.runner import DeviceRunner


@dataclass(slots=True, kw_only=True)
class Result:
    """The result of one step, on its way between the workers; `work` is None where it has come, or there is no way."""

    devices: tuple[int, ...]
    told: Tensor  # the loss, and the peak of every device
    work: Any

    def join(self) -> None:
        """Return when all workers have told theirs.

        Raises:
            PeerLost: another worker did not.
        """
        if self.work is not None:
            try:
                self.work.wait()
            except RuntimeError as error:
                raise _lost(error, self.devices) from error
        self.told, self.work = self.told.cpu(), None  # a GPU has then computed all before it

    def joined(self) -> tuple[float, dict[int, int]]:
        """The loss and the peaks by device, when all workers have told theirs.

        Raises:
            PeerLost: another worker did not.
        """
        self.join()
        loss, *peaks = self.told.tolist()
        return float(loss), {device: int(peak) for device, peak in zip(self.devices, peaks, strict=True)}


def tell(plan: Plan, runners: Sequence[DeviceRunner], weights: Sequence[float], *, distributed: bool) -> Result:
    """Tell all workers what this one's `runners` know of the step that has just ended.

    The last stage has computed the losses, each replica those of its slices, and of its tensor shards the first tells
    them; `weights` are those of its microbatches in the mean.

    Raises:
        PeerLost: another worker is gone.
    """
    workers, exchanged = plan.workers, distributed and len(plan.workers) > 1
    direct = exchanged and dist.get_backend() == "nccl"  # gloo takes tensors on the host
    device = next(iter(runners[0].stages.values())).device if direct else torch.device("cpu")
    told = torch.zeros(1 + len(workers), dtype=torch.float64, device=device)
    for runner in runners:
        told[1 + workers.index(runner.number)] = runner.record.step_peak_bytes
        for number, stage in runner.stages.items():
            grid = plan.stages[number].grid
            if stage.losses is not None and not grid.shard_of(runner.number):
                losses = stage.losses[: len(weights)]
                told[0] += losses @ torch.tensor(weights, dtype=losses.dtype, device=losses.device) / grid.data
    try:
        work = dist.all_reduce(told, async_op=True) if exchanged else None
    except RuntimeError as error:
        raise _lost(error, workers) from error
    return Result(devices=workers, told=told, work=work)


def _lost(error: RuntimeError, workers: tuple[int, ...]) -> WorkerFailed | OutOfMemory:
    return lost("a worker did not report its loss and peaks", error, workers[dist.get_rank()])
