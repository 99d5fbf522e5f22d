"""Private names of `torch.distributed.pipelining`, and a process group for one rank without its peers.

torch's engine has no public way to run an order of its own, to pass microbatches that are cut already, or to
run without peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, ProcessGroup, Store, Work
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)

from pipefit.torch_internals.data_parallel import AbsentPeers, Arrived

Microbatch = Sequence[Tensor]
PipelineSchedule = PipelineScheduleSingle | PipelineScheduleMulti
Cell = tuple[int, str, int]  # a stage, `F` or `B`, and a microbatch

# ---- Schedules

_KINDS = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}


def schedule_of_actions(
    stages: list[PipelineStage], microbatches: int, loss: Any, orders: dict[int, list[Cell]]
) -> PipelineScheduleMulti:
    """Return a schedule that computes in the `orders` of all ranks of the stages; torch adds messages."""
    schedule = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        stages, microbatches, loss_fn=loss, scale_grads=False
    )
    schedule._prepare_schedule_with_comms(
        {
            rank: [_Action(stage, _KINDS[kind], microbatch) for stage, kind, microbatch in cells]
            for rank, cells in orders.items()
        }
    )
    return schedule


def place_stages(stages: Sequence[PipelineStage], rank_of: dict[int, int]) -> None:
    """Set the rank of every stage of the pipeline within the stages' group."""
    for stage in stages:
        stage.stage_index_to_group_rank = dict(rank_of)


def run_microbatches(
    schedule: PipelineSchedule,
    stages: Sequence[PipelineStage],
    inputs: Sequence[Microbatch],
    targets: Sequence[Microbatch],
) -> None:
    """Run a step, as `schedule.step` does with a batch that it cuts: torch cuts only one target tensor."""
    for stage in stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._step_microbatches(list(map(tuple, inputs)), None, list(targets), None, return_outputs=False)


_VOTES = "_warmup_p2p", "_initialize_pipeline_distributed_state"  # until torch 2.14, and since


def agree_in_advance(schedule: PipelineSchedule) -> None:
    """Omit the ranks' vote on static metadata, which reads a number that a peer has sent."""

    def agreed(stages: Sequence[PipelineStage], has_backward: bool, initializes: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    for name in _VOTES:
        if hasattr(schedule, name):
            setattr(schedule, name, agreed)


def release_fake_outputs(stages: Sequence[PipelineStage]) -> None:
    """Let stages drop sent fake outputs, as torch since 2.15 drops outputs of its own class only."""
    for stage in stages:
        stage._output_slot_is_releasable = (  # type: ignore[attr-defined]
            lambda output, last=stage.is_last: (not last, "")
        )


# ---- Messages


def wait_for(works: Sequence[Work | None]) -> None:
    """Wait for messages or collectives."""
    for work in works:
        if work is not None:
            work.wait()


def is_of_message(error: RuntimeError) -> bool:
    """Return whether a message or collective raised the error, and not a layer, the loss or an optimizer."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    code = None if place is None else place.tb_frame.f_code
    waits = code in (wait_for.__code__, _wait_batch_p2p.__code__)
    return waits or (code is not None and code.co_filename == distributed_c10d.__file__)


# ---- One rank without its peers
#
# torch's own `fake` process group returns handles that hold nothing. Those of gloo and NCCL keep the tensors
# of a message alive until the caller drops them, and the engine holds some until the end of a step.

_ALONE = "pipefit-alone"


class _Alone(AbsentPeers):
    """A process group without its peers: their messages are never written, and sums are the rank's own."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return Arrived(tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return Arrived(tensors)

    def reduce(self, tensors: list[Tensor], options: Any = None) -> Work:  # type: ignore[override]
        return Arrived(tensors)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return _ALONE

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Name by which torch sorts messages into batches, and finds the group of a mesh."""
        return distributed_c10d._world.pg_names.get(self, _ALONE)

    def _get_backend(self, device: torch.device) -> ProcessGroup:  # type: ignore[override]
        """Return the group, which sends the messages of a batch one by one."""
        return self


def _create(store: Store, rank: int, size: int, timeout: Any) -> ProcessGroup:
    return _Alone(rank, size, copies=False)


@contextmanager
def alone(rank: int, size: int) -> Iterator[None]:
    """Be `rank` of `size` ranks in the body, without the others. The process must have no process group."""
    if not hasattr(dist.Backend, _ALONE.upper()):
        dist.Backend.register_backend(
            _ALONE, _create, devices=["cpu", "cuda", torch._C._get_privateuse1_backend_name()]
        )
    dist.init_process_group(_ALONE, store=HashStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def join_alone(backend: str) -> None:
    """Set up the process group of a single worker."""
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
