"""Runs programs on batches with the devices of one process.

It serves trainers and comparisons with plain training.

A batch is cut into microbatches, each weighted by its part of the batch, and every device executes its part
of the program. If one process has all devices of a plan, each runs until it would wait for another; devices
of a tensor group also wait for each other within actions, and therefore run on separate threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from pipefit.capture import Chain, Task
from pipefit.errors import OutOfMemory, WorkerFailed
from pipefit.lowering import updates_alone
from pipefit.runtime.engine.batches import Cut, cut_batch
from pipefit.runtime.engine.runner import DeviceRunner, Microbatch
from pipefit.runtime.engine.specializations import Retracing, Specializations
from pipefit.runtime.engine.tensor_groups import TensorGroups, Together, lost
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.tensor_parallel import Turn, pause

# ---- All devices in turn


def run_in_turn(
    runners: Sequence[DeviceRunner],
    inputs: Sequence[Microbatch],
    targets: Sequence[Microbatch],
    *,
    groups: TensorGroups | None = None,
    around: Callable[[], AbstractContextManager[object]] | None = None,
    **options: Any,
) -> None:
    """Run one step of all devices in this process, each until it would wait for another.

    `groups` are tensor groups, whose ranks wait for each other if all are in this process. `around` makes a
    context for everything that runs, here and on each of their threads; `options` are passed on to `step`.
    """
    together = groups if isinstance(groups, Together) else None
    threads: list[Turn] = []
    running: dict[int, Callable[[], bool]] = {}
    for runner in runners:
        step = runner.step(inputs, targets, **options)
        if together is not None and runner.number in together.devices:
            threads.append(Turn(partial(_run, step, around or nullcontext)))
            running[runner.number] = threads[-1].advance
        else:
            running[runner.number] = partial(_has_ended, step)
    try:
        while running:
            before = _progress(runners, together)
            with (around or nullcontext)():
                running = {number: advance for number, advance in running.items() if not advance()}
            assert before != _progress(runners, together) or not running, (
                "message_order refuses programs that would hang"
            )
    except BaseException:
        for thread in threads:
            thread.abandon()
        if together is not None:
            together.abandon()
        for runner in runners:
            runner.abandon()
        raise


def _has_ended(step: Iterator[None]) -> bool:
    """Run a device until it waits; return whether its step has ended."""
    return next(step, StopIteration) is StopIteration


def _run(step: Iterator[None], around: Callable[[], AbstractContextManager[object]]) -> None:
    """Run the whole step of a device on a thread with turns."""
    with around():
        for _ in step:
            pause()


def _progress(runners: Sequence[DeviceRunner], together: Together | None) -> tuple[int, ...]:
    """Return counters that grow as long as a device makes progress."""
    return *(len(runner.record.events) for runner in runners), 0 if together is None else together.arrivals


# ---- Results of a step
# All workers exchange the loss and the peaks in one message. An asynchronous schedule does not wait for it:
# the first stages would wait for the losses of the last stage, and that would drain the pipeline.


@dataclass(slots=True, kw_only=True)
class Result:
    """The result of one step during its exchange between workers; `work` is None once it is complete."""

    devices: tuple[int, ...]
    told: Tensor  # the loss, and the peak of every device
    work: Any

    def join(self) -> None:
        """Wait until all workers have contributed.

        Raises:
            PeerLost: another worker did not.
        """
        if self.work is not None:
            try:
                self.work.wait()
            except RuntimeError as error:
                raise _lost(error, self.devices) from error
        self.told, self.work = self.told.cpu(), None  # on a GPU, this waits for the step

    def joined(self) -> tuple[float, dict[int, int]]:
        """Wait for all workers; return the loss, and the peak bytes by device.

        Raises:
            PeerLost: another worker did not contribute.
        """
        self.join()
        loss, *peaks = self.told.tolist()
        return float(loss), {device: int(peak) for device, peak in zip(self.devices, peaks, strict=True)}


def tell(
    plan: Plan, runners: Sequence[DeviceRunner], weights: Sequence[float], *, distributed: bool
) -> Result:
    """Begin to exchange loss and peaks of the step that has just ended with all workers.

    The last stage computes the losses: each replica those of its local batches, reported by the first tensor
    shard. `weights` are the weights of the microbatches in the mean loss.

    Raises:
        PeerLost: another worker is gone.
    """
    workers, exchanged = plan.workers, distributed and len(plan.workers) > 1
    direct = exchanged and dist.get_backend() == "nccl"  # gloo takes tensors on the host
    device = next(iter(runners[0].stages.values())).device if direct else torch.device("cpu")
    tensor = torch.zeros(1 + len(workers), dtype=torch.float64, device=device)
    for runner in runners:
        tensor[1 + workers.index(runner.number)] = runner.record.step_peak_bytes
        for number, stage in runner.stages.items():
            grid = plan.stages[number].grid
            if stage.losses is not None and not grid.shard_of(runner.number):
                losses = stage.losses[: len(weights)]
                tensor[0] += (
                    losses @ torch.tensor(weights, dtype=losses.dtype, device=losses.device) / grid.data
                )
    try:
        work = dist.all_reduce(tensor, async_op=True) if exchanged else None
    except RuntimeError as error:
        raise _lost(error, workers) from error
    return Result(devices=workers, told=tensor, work=work)


def _lost(error: RuntimeError, workers: tuple[int, ...]) -> WorkerFailed | OutOfMemory:
    return lost("a worker did not report its loss and peaks", error, workers[dist.get_rank()])


# ---- Execution

Around = Callable[[], AbstractContextManager[object]]


class Execution:
    """The devices of one process; `distributed` if other processes run devices too.

    `chain` flattens batches; it is kept without layers, so that stages can free theirs.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        chain: Chain,
        runners: Sequence[DeviceRunner],
        *,
        groups: TensorGroups,
        distributed: bool,
    ) -> None:
        self.plan, self.runners, self.distributed = plan, runners, distributed
        self.chain, self._groups = replace(chain, layers=()), groups
        retracing = Retracing(task, plan)
        self._specializations: Mapping[int, Specializations] = {
            runner.number: Specializations(retracing, runner.usual, traced=chain.traced) for runner in runners
        }

    def cut(self, batch: tuple[Any, Any]) -> Cut:
        """Cut `batch`, a pair of inputs and targets, into microbatches."""
        given, wanted = batch
        return cut_batch(self.plan, self.chain.flatten(given), self.chain.flatten_targets(wanted))

    def drop_gradients(self) -> None:
        """Drop gradients from before the step, such as the caller's, which must not enter its update."""
        for runner in self.runners:
            for stage in runner.stages.values():
                for layer in stage.layers:
                    layer.module.zero_grad(set_to_none=True)

    def run(
        self, cut: Cut, program: Program, batches: int, *, training: bool, around: Around | None = None
    ) -> Result:
        """Run `program` on one of the `batches` of an update.

        Return its mean loss, still on its way to all workers. `around` makes a context for everything that
        runs, on other threads too.
        """
        samples = sum(cut.sizes)
        shares = [size / samples for size in cut.sizes]
        alone = updates_alone(self.plan)
        self.run_program(
            program,
            inputs=cut.inputs,
            targets=cut.targets,
            weights=[1.0 if alone else share / batches for share in shares],
            specializations={
                n: known.of_all(cut.sizes, training) for n, known in self._specializations.items()
            },
            training=training,
            around=around,
        )
        return tell(self.plan, self.runners, shares, distributed=self.distributed)

    def run_program(self, program: Program, *, training: bool = True, **options: Any) -> None:
        """Run all devices of this process; restore torch's random generators."""
        stages = [stage for runner in self.runners for stage in runner.stages.values()]
        devices = [stage.device for stage in stages if stage.device.type == "cuda"]
        with torch.random.fork_rng(devices, device_type="cuda"):
            run_in_turn(self.runners, program=program, groups=self._groups, training=training, **options)
