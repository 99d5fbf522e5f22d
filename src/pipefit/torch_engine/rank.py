"""One rank of a plan on torch's engine: its stages, its schedule, and the update after the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.optim import Optimizer

from pipefit.capture import ChainLayer, Task, Values, constants
from pipefit.lowering import computes, drops_early, runs_gpipe, schedule_named
from pipefit.memory import ReplicaShare
from pipefit.own_loop import HostTensors
from pipefit.runtime import (
    Agreement,
    LossScale,
    MasterWeights,
    RankShards,
    StageSources,
    Updates,
    born_apart,
    mark,
    may_be_absent,
    move,
    seed_update,
    unmark,
)
from pipefit.schema.actions import Kind
from pipefit.schema.plan import Plan
from pipefit.torch_engine.stages import Draws, Loss, StageModule, pipeline_stage
from pipefit.torch_internals.pipelining import (
    PipelineSchedule,
    agree_in_advance,
    place_stages,
    release_fake_outputs,
    run_microbatches,
    schedule_of_actions,
)

# ---- Process groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups of a plan.

    `pipelines` has the devices of every replica of the pipeline, `replicas` those of every rank of the plan,
    and `shared` those that hold a shared parameter, by its number and replica.
    """

    pipelines: tuple[dist.ProcessGroup, ...]
    replicas: Mapping[tuple[int, ...], dist.ProcessGroup]
    shared: Mapping[tuple[int, int], dist.ProcessGroup]

    @staticmethod
    def of(plan: Plan) -> Groups:
        """Create the groups. All workers must call it."""

        def group(devices: Sequence[int]) -> dist.ProcessGroup:
            process_group: dist.ProcessGroup = dist.new_group(
                [plan.workers.index(device) for device in devices]
            )
            return process_group

        grids = tuple(dict.fromkeys(stage.devices for stage in plan.stages))
        data = range(plan.stages[0].grid.data)
        return Groups(
            pipelines=tuple(group([grid[replica] for grid in grids]) for replica in data),
            replicas={grid: group(grid) for grid in grids if len(grid) > 1},
            shared={
                (number, replica): group([plan.stages[stage].devices[replica] for stage in stages])
                for number, stages in plan.summed.items()
                for replica in data
            },
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
        """Return whether this replica's tensor is stored: it is the first replica."""
        return self.replica == 0

    def lacks(self, tensor: Tensor) -> bool:
        """Return False: no state is divided."""
        return False

    def reader(self) -> Callable[[Tensor], Tensor]:
        """Return a function that returns a state tensor, which is on the device."""
        return lambda tensor: tensor

    def state_here(self) -> AbstractContextManager[None]:
        """Return an empty context: all state is on the device."""
        return nullcontext()

    def optimizer_state(self) -> list[Tensor]:
        """Return every tensor that the optimizer keeps on the device, master weights included."""
        return self.updates.state_here()


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
        self.replica = plan.stages[numbers[0]].grid.replica_of(number)
        self._draws = Draws(device=device, seed=seed, replicas=plan.stages[0].grid.data, replica=self.replica)
        self._shared = {stage: sources.own_shared(stage, number) for stage in numbers}
        chains = {stage: sources.of(stage, number).chain.measured(plan.measured(stage)) for stage in numbers}
        self.modules: dict[int, StageModule] = {}
        for stage, chain in chains.items():
            place = plan.stages[stage]
            layers = chain.layers[place.start : place.stop]
            move([layer.module for layer in layers], device)
            self.modules[stage] = StageModule(layers, plan, stage, draws=self._draws, host=host)
        self.loss: Loss | None = None
        if (last := len(plan.stages) - 1) in numbers:
            if isinstance(task.loss, nn.Module):
                move([task.loss], device)
            whole = replace(
                chains[last], layers=()
            )  # without layers, so that other stages' layers can be freed
            self.loss = Loss(whole, plan, self.modules[last], self._draws)
        self.agreement = self._agree(sources, number) if plan.training.agrees else None
        self.updates = {
            stage: Updates(task, module.chain_layers, module.start, self.agreement, {})
            for stage, module in self.modules.items()
        }
        self.parts = {
            stage: EnginePart(device, self.replica, module, self.updates[stage], self.agreement, self._draws)
            for stage, module in self.modules.items()
        }
        group = groups.pipelines[self.replica]
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
        plan, replica = self.plan, self.replica

        def group_rank(rank: int) -> int:
            device = plan.stages[plan.ranks[rank][0]].devices[replica]
            return dist.get_group_rank(group, plan.workers.index(device))

        return group_rank

    def _agree(self, sources: StageSources, number: int) -> Agreement:
        """Return this rank's part of the agreement on gradient norms and overflows.

        Each parameter is reported once: by the first replica of the first stage that has it.
        """
        plan, names = self.plan, dict[str, None]()
        reported, trained = dict[str, tuple[nn.Parameter, int]](), dict[int, nn.Parameter]()
        elsewhere = {
            parameter
            for stage, own in self._shared.items()
            for shared, parameter in own.items()
            if plan.holders[shared][0] != stage
        }
        for layer in sources.of(min(self.modules), number).chain.layers:
            names |= {name: None for name, p in layer.named_parameters if p.requires_grad}
        for module in self.modules.values():
            for layer in module.chain_layers:
                for name, parameter in layer.named_parameters:
                    if not parameter.requires_grad:
                        continue
                    trained[id(parameter)] = parameter
                    if not self.replica and parameter not in elsewhere:
                        reported[name] = parameter, 0
        return Agreement(
            list(names),
            reported,
            list(trained.values()),
            clip_norm=plan.training.clip_norm,
            scale=LossScale() if plan.training.scales_loss else None,
            master_weights=plan.training.precision.startswith("master-"),
            double=plan.training.precision == "float64",
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all stages, each once."""
        return list(dict.fromkeys(p for module in self.modules.values() for p in module.parameters()))

    @property
    def held(self) -> list[Tensor]:
        """Every tensor on the device between steps, before the first step."""
        layers = [layer for module in self.modules.values() for layer in module.chain_layers]
        others = [t for layer in layers for t in (*layer.module.buffers(), *constants(layer.module))]
        losses = [] if self.loss is None else [self.loss.losses]
        return [
            *self.parameters,
            *others,
            *losses,
            *(t for u in self.updates.values() for t in u.state_here()),
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
        with born_apart(self.parameters):
            run_microbatches(self.schedule, self.stages, inputs, targets)

    def _update(self) -> None:
        """Sum gradients over copies and replicas, clip them, step the optimizers, and free the gradients."""
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        some_absent = may_be_absent(self.plan.profile)
        for stage, module in self.modules.items():
            for number, parameter in self._shared[stage].items():
                if stage in self.plan.summed.get(number, ()):
                    _sum([parameter], self._groups.shared[number, self.replica], some_absent=some_absent)
            if (group := self._groups.replicas.get(self.plan.stages[stage].devices)) is not None:
                own = set(map(id, module.parameters()))
                _sum([p for p in trained if id(p) in own], group, some_absent=some_absent)
        if self.agreement is not None:
            total = self.agreement.contribution(self._device)
            dist.all_reduce(total)
            self.agreement.conclude(total)
        for stage, updates in self.updates.items():
            module = self.modules[stage]
            seed_update(self._device, self._draws.seed, self._draws.step, 0, module.start)
            updates.step((module.start, module.stop))
        self._draws.step += 1

    def exchanged(self, peak_bytes: int) -> tuple[float, dict[int, int]]:
        """Return the step's mean loss, and the peaks of all devices, given this one's."""
        devices = self.plan.workers
        numbers = torch.zeros(1 + len(devices), dtype=torch.float64, device=self._device)
        if self.loss is not None:
            numbers[0] = self.loss.losses.double().sum() * self.loss.weight
        numbers[1 + dist.get_rank()] = peak_bytes
        dist.all_reduce(numbers)
        loss, *peaks = numbers.tolist()
        return loss, dict(zip(devices, map(int, peaks), strict=True))


def _sum(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *, some_absent: bool) -> None:
    """Add the gradients of all members of a group.

    If values decide which parameters get a gradient, some members may lack gradients that others have.
    """
    if some_absent:
        mark(parameters)
    works = [dist.all_reduce(p.grad, group=group, async_op=True) for p in parameters if p.grad is not None]
    for work in works:
        work.wait()
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
