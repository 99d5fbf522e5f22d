"""One rank of a plan on torch's engine: its stages, its schedule, and the update after the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.optim import Optimizer

from pipefit.capture import ChainLayer, Task, Values, constants
from pipefit.errors import PipefitError, causes
from pipefit.lowering import computes, runs_gpipe, schedule_named
from pipefit.memory import ReplicaShare, drops_early, share_of
from pipefit.own_loop import HostTensors
from pipefit.runtime import (
    Agreement,
    MasterWeights,
    RankShards,
    StageSources,
    Updates,
    agreement_of,
    born_apart,
    groups_in_order,
    mark,
    may_be_absent,
    move,
    naming_the_lost,
    put_on_device,
    seed_update,
    unmark,
    usual_layers,
)
from pipefit.schema.actions import Kind
from pipefit.schema.plan import Plan
from pipefit.tensor_parallel import Collectives, Loan, ProcessGroupCollectives, lent
from pipefit.torch_engine.stages import Draws, Loss, StageModule, divide, pipeline_stage
from pipefit.torch_internals.data_parallel import is_sharded, local_part, returning_views
from pipefit.torch_internals.pipelining import (
    PipelineSchedule,
    agree_in_advance,
    place_stages,
    release_fake_outputs,
    run_microbatches,
    schedule_of_actions,
    wait_for,
)

# ---- Process groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups of a plan.

    A device's place is its position in the grid of its stages. `pipelines` has the devices of every place,
    which send to each other, and `shared` those that hold a shared parameter, by its number and the place.
    `replicas` has the devices that hold the same layers and shards, and `tensor` those of one replica.
    """

    pipelines: tuple[dist.ProcessGroup, ...]
    replicas: Mapping[tuple[int, ...], dist.ProcessGroup]
    shared: Mapping[tuple[int, int], dist.ProcessGroup]
    tensor: Mapping[tuple[int, ...], dist.ProcessGroup]

    @staticmethod
    def of(plan: Plan, timeout: timedelta | None = None) -> Groups:
        """Create the groups, whose collectives and messages fail after `timeout`. All workers must call it.

        Default: torch's timeout.

        Raises:
            UsageError: a tensor group names its devices in another order than that of the workers.
        """

        def group(devices: Sequence[int]) -> dist.ProcessGroup:
            process_group: dist.ProcessGroup = dist.new_group(
                [plan.workers.index(device) for device in devices], timeout=timeout
            )
            return process_group

        grids = tuple(dict.fromkeys(stage.devices for stage in plan.stages))
        places, replicas = (
            range(len(grids[0])),
            dict.fromkeys(
                stage.grid.holding(shard) for stage in plan.stages for shard in range(stage.grid.tensor)
            ),
        )
        return Groups(
            pipelines=tuple(group([grid[place] for grid in grids]) for place in places),
            replicas={devices: group(devices) for devices in replicas if len(devices) > 1},
            shared={
                (number, place): group([plan.stages[stage].devices[place] for stage in stages])
                for number, stages in plan.summed.items()
                for place in places
            },
            tensor={devices: group(devices) for devices in groups_in_order(plan)},
        )

    def collectives(self, group: tuple[int, ...], rank: int) -> Collectives:
        """Return the collectives of this worker in a tensor group, in which it has this `rank`."""
        return ProcessGroupCollectives(
            group=self.tensor[group], around=partial(naming_the_lost, group, group[rank])
        )


# ---- The rank


@dataclass(slots=True)
class EnginePart:
    """A stage of a rank, for checkpoints (`pipefit.runtime.TrainedPart`)."""

    device: torch.device
    replica: int
    module: StageModule
    updates: Updates
    agreement: Agreement | None
    draws: Draws
    share: ReplicaShare | None = None
    shards: RankShards | None = None
    is_first_rank: bool = True

    @property
    def start(self) -> int:
        """The number of the first layer."""
        return self.module.start

    @property
    def stop(self) -> int:
        """The number after the last layer."""
        return self.module.stop

    @property
    def layers(self) -> Sequence[ChainLayer]:
        """The layers."""
        return self.module.chain_layers

    @property
    def optimizer(self) -> Optimizer | MasterWeights | None:
        """The optimizer; None without trained parameters."""
        return self.updates.optimizer

    @property
    def scheduler(self) -> Any:
        """The scheduler of the learning rate; None if the task has none."""
        return self.updates.scheduler

    @property
    def seed(self) -> int:
        """The seed of random draws."""
        return self.draws.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self.draws.seed = seed

    @property
    def batch_number(self) -> int:
        """Number of trained batches, on which random draws depend."""
        return self.draws.step

    @batch_number.setter
    def batch_number(self, number: int) -> None:
        self.draws.step = number

    def stores(self, tensor: Tensor) -> bool:
        """Return whether this replica's tensor is stored: it is the first replica, or the owner."""
        if is_sharded(tensor):
            return True  # all replicas gather it
        if self.share is None or not isinstance(tensor, nn.Parameter):
            return self.replica == 0
        return self.updates.owns(tensor)

    def lacks(self, tensor: Tensor) -> bool:
        """Return False: every replica keeps all parameters."""
        return False

    def reader(self) -> Callable[[Tensor], Tensor]:
        """Return a function that returns a state tensor, which is on the device."""
        return lambda tensor: tensor

    def state_here(self) -> AbstractContextManager[None]:
        """Return an empty context: all state is on the device."""
        return nullcontext()

    def optimizer_state(self) -> list[Tensor]:
        """Return every tensor that the optimizer keeps on the device, master weights included."""
        return list(map(local_part, self.updates.state_here()))


class EngineRank:
    """The stages of one device on torch's engine.

    Args:
        task: the task, whose optimizer and scheduler it uses.
        plan: the plan.
        sources: chains of the stages.
        number: the device's number in the plan.
        device: the torch device.
        groups: the plan's process groups.
        host: host memory for saved tensors.
        seed: seed of random draws.
        peers: False if the other ranks are absent, as in a dry run.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        sources: StageSources,
        number: int,
        *,
        device: torch.device,
        groups: Groups,
        host: HostTensors,
        seed: int = 0,
        peers: bool = True,
    ) -> None:
        self.plan, self._groups, self._device, numbers = plan, groups, device, plan.stages_of(number)
        grid = plan.stages[numbers[0]].grid
        self.replica, self._shard, self._place = (
            grid.replica_of(number),
            grid.shard_of(number),
            grid.devices.index(number),
        )
        self._draws = Draws(device=device, seed=seed, replicas=grid.data, replica=self.replica)
        self._shared = {stage: sources.own_shared(stage, number) for stage in numbers}
        usual = {stage: usual_layers(plan, sources.of(stage, number), stage) for stage in numbers}
        self.modules: dict[int, StageModule] = {}
        for stage, own in usual.items():
            put_on_device(own, task, device)
            self.modules[stage] = StageModule(own.layers, plan, stage, draws=self._draws, host=host)
            if plan.stages[stage].grid.divides_gradients:
                replicas = groups.replicas[self._replicas(stage)]
                divide(self.modules[stage], plan, stage, task, replicas=replicas, device=device)
        self.loss: Loss | None = None
        if (last := len(plan.stages) - 1) in numbers:
            if isinstance(task.loss, nn.Module):
                move([task.loss], device)
            self.loss = Loss(usual[last].loss, plan, self.modules[last], self._draws)
        self.agreement = None
        if plan.training.agrees:
            self.agreement = agreement_of(task, plan, sources, number, partial(_share_of, plan), splits=True)
        self._shares = {stage: _share_of(plan, stage, number) for stage in numbers}
        self.updates = {
            stage: Updates(task, module.chain_layers, module.start, self.agreement, {}, self._shares[stage])
            for stage, module in self.modules.items()
        }
        self.parts = {
            stage: EnginePart(
                device,
                self.replica,
                module,
                self.updates[stage],
                self.agreement,
                self._draws,
                self._shares[stage],
                usual[stage].shards,
                is_first_rank=not self._shard
                and not (self.replica and plan.stages[stage].grid.divides_gradients),
            )
            for stage, module in self.modules.items()
        }
        group = groups.pipelines[self._place]
        self.stages = [
            pipeline_stage(module, plan, stage, device=device, group=group)
            for stage, module in self.modules.items()
        ]
        self.schedule = schedule_of(plan, self.stages, self.loss or _no_loss, self._rank_within(group))
        if not peers:
            agree_in_advance(self.schedule)
            release_fake_outputs(self.stages)

    def _rank_within(self, group: dist.ProcessGroup) -> Callable[[int], int]:
        """Return the function from a rank of the plan to its rank in the group of a pipeline."""
        plan, place = self.plan, self._place

        def group_rank(rank: int) -> int:
            device = plan.stages[plan.ranks[rank][0]].devices[place]
            return dist.get_group_rank(group, plan.workers.index(device))

        return group_rank

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all stages, each once."""
        return list(dict.fromkeys(p for module in self.modules.values() for p in module.parameters()))

    @property
    def held(self) -> list[Tensor]:
        """Every tensor on the device between steps, before the first step."""
        layers = [layer for module in self.modules.values() for layer in module.chain_layers]
        others = [t for layer in layers for t in (*layer.module.buffers(), *constants(layer.module))]
        copies = [tensor for module in self.modules.values() for tensor in module.copies.tensors]
        losses = [] if self.loss is None else [self.loss.losses]
        return [
            *map(local_part, self.parameters),
            *others,
            *copies,
            *losses,
            *(local_part(t) for u in self.updates.values() for t in u.state_here()),
        ]

    def step(
        self,
        local_batches: Callable[[], tuple[Sequence[Values], Sequence[Values]]],
        *,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        """Train one step on the inputs and targets of the rank's local batches, which are on the device.

        They are freed before the update.
        """
        self._run(*local_batches())
        before_update()
        self._update()

    def _run(self, inputs: Sequence[Values], targets: Sequence[Values]) -> None:
        """Run the schedule."""
        for module in self.modules.values():
            module.begin_step()
        if self.loss is not None and self.agreement is not None and self.agreement.scale is not None:
            self.loss.scale = self.agreement.scale.value
        whole = [parameter for parameter in self.parameters if not is_sharded(parameter)]
        with born_apart(whole), _raising_own_errors(), returning_views():
            run_microbatches(self.schedule, self.stages, inputs, targets)

    def _update(self) -> None:
        """Sum gradients over copies and replicas, clip them, step the optimizers, and free the gradients.

        If replicas divide optimizer state, the owner of a layer gets the sum, updates the layer, and sends
        it.
        """
        some_absent = may_be_absent(self.plan.profile)
        for stage in self.modules:
            for number, parameter in self._shared[stage].items():
                if stage in self.plan.summed.get(number, ()):
                    group = self._groups.shared[number, self._place]
                    _sum([(parameter, None)], group, some_absent=some_absent)
            replicas = self._groups.replicas.get(self._replicas(stage))
            if replicas is not None and not self.plan.stages[stage].grid.divides_gradients:
                _sum(self._owned(stage), replicas, some_absent=some_absent)
        if self.agreement is not None:
            self._agree(self.agreement)
        for stage, updates in self.updates.items():
            module = self.modules[stage]
            seed_update(self._device, self._draws.seed, self._draws.step, 0, module.start)
            updates.step((module.start, module.stop))
        for stage, share in self._shares.items():
            if share is not None:
                self._send_parameters(stage)
        self._draws.step += 1

    def _agree(self, agreement: Agreement) -> None:
        """Clip the gradients by their norm over all stages, and decide whether this step is skipped."""
        total = agreement.contribution(self._device)
        with lent(total) as (vector,):
            dist.all_reduce(vector)
        agreement.conclude(total)

    def _send_parameters(self, stage: int) -> None:
        """Send the parameters of a stage from the replicas that have updated them to the others."""
        group, owned = self._groups.replicas[self._replicas(stage)], self._owned(stage)
        loan = Loan([parameter.detach() for parameter, _ in owned])
        pairs = zip(loan.tensors, (owner for _, owner in owned), strict=True)
        _wait([dist.broadcast(tensor, owner, group=group, async_op=True) for tensor, owner in pairs], loan)

    def _replicas(self, stage: int) -> tuple[int, ...]:
        """Return the devices that hold the same layers and shards of a stage as this one."""
        return self.plan.stages[stage].grid.holding(self._shard)

    def _owned(self, stage: int) -> list[tuple[nn.Parameter, int | None]]:
        """Return the trained parameters of a stage, each with the worker that owns it; None without ZeRO."""
        updates, module, share = self.updates[stage], self.modules[stage], self._shares[stage]
        workers = [self.plan.workers.index(device) for device in self._replicas(stage)]
        return [
            (parameter, None if share is None else workers[share.owner(layer)])
            for layer in range(module.start, module.stop)
            for parameter in updates.parameters((layer, layer + 1))
            if parameter.requires_grad
        ]

    def exchanged(self, peak_bytes: int) -> tuple[float, dict[int, int]]:
        """Return the step's mean loss, and the peaks of all devices, given this one's."""
        devices = self.plan.workers
        numbers = torch.zeros(1 + len(devices), dtype=torch.float64, device=self._device)
        if self.loss is not None and not self._shard:
            numbers[0] = self.loss.losses.double().sum() * self.loss.weight
        numbers[1 + dist.get_rank()] = peak_bytes
        dist.all_reduce(numbers)
        loss, *peaks = numbers.tolist()
        return loss, dict(zip(devices, map(int, peaks), strict=True))


def _share_of(plan: Plan, stage: int, device: int) -> ReplicaShare | None:
    """Return the layers that a device owns, if replicas divide optimizer state only."""
    return None if plan.stages[stage].grid.divides_gradients else share_of(plan, stage, device)


@contextmanager
def _raising_own_errors() -> Iterator[None]:
    """Raise errors of pipefit that torch's engine has wrapped."""
    try:
        yield
    except RuntimeError as error:
        for cause in causes(error):
            if isinstance(cause, PipefitError):
                raise cause from cause.__cause__
        raise


def _wait(works: Sequence[dist.Work | None], loan: Loan) -> None:
    """Wait for collectives on lent tensors, and end the loan."""
    wait_for(works)
    loan.wait()


def _sum(
    owned: Sequence[tuple[nn.Parameter, int | None]], group: dist.ProcessGroup, *, some_absent: bool
) -> None:
    """Add the gradients of all members of a group: for all of them, or for the worker that owns a parameter.

    If values decide which parameters get a gradient, some members may lack gradients that others have.
    """
    parameters = [parameter for parameter, _ in owned]
    if some_absent:
        mark(parameters)
    present = [(p.grad, owner) for p, owner in owned if p.grad is not None]
    loan = Loan([gradient for gradient, _ in present])
    _wait(
        [
            dist.all_reduce(gradient, group=group, async_op=True)
            if owner is None
            else dist.reduce(gradient, owner, group=group, async_op=True)
            for gradient, (_, owner) in zip(loan.tensors, present, strict=True)
        ],
        loan,
    )
    if some_absent:
        unmark(parameters)


def _no_loss(outputs: Values, targets: Values) -> Tensor:
    raise AssertionError("only the last stage has a loss")


_KINDS = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}


def schedule_of(
    plan: Plan,
    stages: list[PipelineStage],
    loss: Callable[[Any, Any], Any],
    group_rank: Callable[[int], int],
) -> PipelineSchedule:
    """Return the schedule of one rank, with its `stages`.

    torch's own classes run the orders that they have; any other order runs as a list of actions. `group_rank`
    maps a rank of the plan to its rank in the stages' group.
    """
    microbatches = plan.training.microbatches
    ranks = {group_rank(rank): numbers for rank, numbers in enumerate(plan.ranks)}
    place_stages(stages, {stage: rank for rank, numbers in ranks.items() for stage in numbers})
    if runs_gpipe(plan):
        return ScheduleGPipe(stages[0], microbatches, loss_fn=loss, scale_grads=False)
    if drops_early(plan):
        return Schedule1F1B(stages[0], microbatches, loss_fn=loss, scale_grads=False)
    orders = computes(plan, schedule_named(plan.training.schedule), microbatches)
    cells = {
        group_rank(rank): [(a.stage, _KINDS[a.kind], a.microbatch) for a in order if a.microbatch is not None]
        for rank, order in enumerate(orders)
    }
    return schedule_of_actions(stages, microbatches, loss, cells)
