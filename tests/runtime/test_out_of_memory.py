"""Running out of memory is recognized in every error message and at any time."""

from __future__ import annotations

import signal
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import OutOfMemory, PeerLost, WorkerFailed, all_lines
from pipefit.lowering import lower
from pipefit.runtime import train
from pipefit.runtime.comm import transport
from pipefit.runtime.comm.transport import Network
from pipefit.runtime.engine.execution import Result
from pipefit.runtime.engine.tensor_groups import lost, naming_the_lost
from pipefit.runtime.hardware import ran_out
from pipefit.runtime.launch.launch import died
from pipefit.runtime.launch.worker import BUILDING, _report
from pipefit.schema.actions import message_of
from pipefit.tensor_parallel import ProcessGroupCollectives
from support.small_tasks import batch_of, plan_of, task_of, trainer_of

# Messages as torch passes them on
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
SAID = [
    CUBLAS,
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    "Last error:\nFailed to CUDA calloc async 608 bytes",
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9",
]
OTHERS = [
    "CUDA error: device-side assert triggered",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
    "Connection closed by peer [127.0.0.1]:9",
]


@pytest.mark.parametrize("text", SAID)
def test_a_library_that_found_no_memory_is_out_of_memory(text: str) -> None:
    """A plain torch error about a library's allocation failure counts as out of memory."""
    assert ran_out(RuntimeError(text))
    assert ran_out(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"))
    assert not ran_out(ValueError(text))


@pytest.mark.parametrize("text", OTHERS)
def test_other_failures_are_no_lack_of_memory(text: str) -> None:
    """A failed kernel and a broken connection do not count as out of memory."""
    assert not ran_out(RuntimeError(text))


class Failing:
    """A loss that works until it gets an error message to fail with."""

    text = ""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error."""
        if self.text:
            raise RuntimeError(self.text)
        return nn.functional.mse_loss(outputs, targets)


def test_it_is_told_with_the_action_where_it_happened() -> None:
    """An allocation failure of a library in the loss is reported at the last stage's first forward."""
    loss = Failing()
    task = task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 4)], loss=loss)
    trainer = trainer_of(task, [1, 1])
    batch = batch_of(task, trainer.plan)
    for text, kind in ((CUBLAS, OutOfMemory), (OTHERS[0], RuntimeError)):
        loss.text = text
        with pytest.raises(kind) as caught:
            trainer.step(batch)
        assert ("1F0" in str(caught.value)) == (kind is OutOfMemory)


def no_memory_to_build() -> Task:
    """Return a task that can be profiled, but whose workers run out of memory while they build the batch."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        if size > 2:  # a batch of training, not of profiling
            raise RuntimeError(CUBLAS)
        return torch.randn(size, 8), torch.randn(size, 4)

    return Task(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), batch=batch, loss=nn.functional.mse_loss
    )


def test_a_worker_tells_it_at_no_action_too() -> None:
    """A worker that runs out of memory while building its batch ends the training as out of memory, not as a
    failed worker.
    """
    with pytest.raises(
        OutOfMemory, match=r"device 0 ran out of memory while it made its batch: .*CUBLAS_STATUS_ALLOC"
    ):
        train(no_memory_to_build, plan_of(no_memory_to_build(), [2]), steps=1)


@pytest.mark.parametrize(("text", "kind"), [(SAID[6], OutOfMemory), (OTHERS[3], PeerLost)])
def test_a_message_without_memory_blames_no_peer(text: str, kind: type[Exception]) -> None:
    """An NCCL allocation failure, at creation or first use of a communicator, names this device and not a
    peer.
    """
    own = "device 0 ran out of memory for messages"
    plan = plan_of(task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 4)]), [1, 1])
    with (
        mock.patch.object(transport.dist, "new_group", side_effect=RuntimeError(text)),
        mock.patch.object(transport.dist, "get_rank", return_value=0),
        pytest.raises(kind, match=own if kind is OutOfMemory else "could not connect to each other"),
    ):
        transport.connect(plan, lower(plan), torch.device("cpu"), timedelta(seconds=1))
    program = lower(plan)
    (send,) = {action for action in program.actions[0] if str(action) == "0SEND_F0"}
    network = Network(
        timeout=None, device=0, placement=program.placement, workers={0: 0, 1: 1}, channels=mock.MagicMock()
    )
    with (
        mock.patch.object(transport.dist, "isend", side_effect=RuntimeError(text)),
        pytest.raises(kind, match=own if kind is OutOfMemory else "device 1 has ended"),
    ):
        network.start(send, [torch.zeros(1)], message_of(0, send, program.placement))
    shards = ProcessGroupCollectives(around=partial(naming_the_lost, (1, 0), 0))
    with (
        mock.patch.object(transport.dist, "all_reduce", side_effect=RuntimeError(text)),
        pytest.raises(kind, match=own if kind is OutOfMemory else "device 1 has ended"),
    ):
        shards.all_reduce(torch.zeros(1))
    result = Result(
        devices=(0, 1), told=torch.zeros(1), work=mock.Mock(wait=mock.Mock(side_effect=RuntimeError(text)))
    )
    with (
        mock.patch.object(transport.dist, "get_rank", return_value=0),
        pytest.raises(kind, match=own if kind is OutOfMemory else "did not report"),
    ):
        result.join()


def test_all_that_an_error_says_is_told_and_heeded() -> None:
    """All lines of an NCCL error are reported and searched: the cause is in the last line, and the name of
    the torch call says nothing.
    """
    slow = "NCCL error in: NCCLUtils.cpp:77, remote error\nLast error:\nTimeout waiting\nException raised from at x.cpp"
    assert str(lost("it failed", RuntimeError(slow), 0)) == (
        "it failed (NCCL error in: NCCLUtils.cpp:77, remote error Last error: Timeout waiting); raise timeout_seconds "
        "if it is only slow"
    )
    assert all_lines(RuntimeError(SAID[1])) == "CUDA error: out of memory"
    at_start = mock.Mock(**{"plan.workers": (3,), "rank": 0})
    _, between = _report(RuntimeError(SAID[6]), at_start, mock.Mock(action=BUILDING))
    assert between == (
        "device 3 ran out of memory while it built its layers: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error "
        "Last error: Cuda failure 2 'out of memory'"
    )
    died = "Connection closed by peer\nframe #0: c10d::checkTimeout(int)"
    assert str(lost("it failed", RuntimeError(died), 0)) == (
        "it failed (Connection closed by peer); the output of that worker shows the reason"
    )
    assert str(lost("it failed", RuntimeError(SAID[6]), 3)) == (
        "device 3 ran out of memory for messages between workers (NCCL error in: NCCLUtils.cpp:77, unhandled cuda "
        "error Last error: Cuda failure 2 'out of memory'): plan with a larger --reserve"
    )


def test_an_abort_on_a_gpu_is_told_as_a_victim_s() -> None:
    """An abort on a GPU is reported as a victim's; on the CPU, without aborts of waiting ranks, it is an
    ordinary death.
    """
    assert "if another worker ends or hangs" in str(died(-signal.SIGABRT, starting=False, on_gpu=True))
    assert "killed by signal 6" in str(died(-signal.SIGABRT, starting=False))
    assert isinstance(died(-signal.SIGABRT, starting=False, on_gpu=True), WorkerFailed)
