"""One stage on one device: its layers, its lasting state, and the updates of its weights.

The lasting state is parameters, versions of them, buffers, optimizer state and losses.
`runtime.engine.forward_backward` runs microbatches through the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipefit.capture import Task, constants
from pipefit.errors import UsageError
from pipefit.memory import ReplicaShare, StageStorages, share_of
from pipefit.runtime.comm.agreement import Agreement
from pipefit.runtime.comm.transport import Transport
from pipefit.runtime.engine.forward_backward import Passes, seed_update
from pipefit.runtime.engine.in_flight import Flight
from pipefit.runtime.engine.replicas import Specialized, StageSources
from pipefit.runtime.offload.lending import Lending
from pipefit.runtime.offload.states import GatheredParameters, StateMover
from pipefit.runtime.optim.half_precision import WeightCopies
from pipefit.runtime.optim.updates import Updates, own_parameters
from pipefit.runtime.optim.weight_versions import Weights
from pipefit.schema.actions import COMPUTE, Action, Kind
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Objects that all devices of a run share.

    `sources` has the chains of the stages, `lending` says which devices lend memory for offloaded tensors. In
    a dry run, `absent` is the number of trained parameters in layers that are left out, and `shares` has, by
    stage and device, shares that differ from the plan's.
    """

    task: Task
    sources: StageSources
    plan: Plan
    program: Program
    transport: Transport
    clock: Callable[[], float]
    seed: int
    on_action: Callable[[int], None] | None = None
    lending: Lending = field(default_factory=Lending)
    absent: int = 0
    shares: Mapping[tuple[int, int], ReplicaShare] = field(default_factory=dict)

    def share(self, stage: int, device: int) -> ReplicaShare | None:
        """Return a device's ZeRO share of a stage; None if nothing is sharded."""
        return self.shares.get((stage, device)) or share_of(self.plan, stage, device)


_THROUGH_LAYERS = COMPUTE - {Kind.STEP}


class StageRunner:
    """Consecutive layers of a model on one device.

    Args:
        site: the run, whose task has the optimizer and scheduler.
        usual: the stage's layers, already on `device`, and the loss, which is used on the last stage only.
        storages: the plan's description of the stage: its layers, their values, and whether the loss follows.
        shared: this stage's copies of shared parameters, by their numbers in the profile.
        agreement: agreement of the stages before an update; None if they need none.
        share: its ZeRO share of the stage's state, if replicas shard the state.
        states: offloads and reloads the stage's state; None if no state is offloaded.
        device: its device.
        replica: number of the replica that it trains.
    """

    def __init__(
        self,
        site: Site,
        usual: Specialized,
        storages: StageStorages,
        *,
        device: torch.device,
        replica: int,
        shared: dict[int, nn.Parameter],
        agreement: Agreement | None,
        share: ReplicaShare | None,
        states: StateMover | None,
    ) -> None:
        how = site.plan.training
        self.usual, self.storages, self.shared = usual, storages, shared
        self.layers, self.shards = usual.layers, usual.shards
        self.start, self.stop, self.last = storages.start, storages.stop, storages.last
        self.device, self.seed, self.agreement = device, site.seed, agreement
        self.batch_number = 0  # training batches so far; random draws depend on it
        self.parameters = [p for layer in self.layers for p in layer.module.parameters()]
        own = own_parameters(self.layers)
        elsewhere = {} if states is None else states.copies(own, self.start)
        self.replica, self.share = replica, share
        self.updates = Updates(site.task, self.layers, self.start, agreement, elsewhere, share)
        self.optimizer, self.scheduler, self.states = self.updates.optimizer, self.updates.scheduler, states
        dtype = getattr(torch, storages.measurement.loss_dtype)
        self.losses = torch.zeros(how.microbatches, dtype=dtype, device=device) if self.last else None
        divided = share is not None and share.divides_parameters
        self.copies = WeightCopies(self.layers, storages.costs, self.start, divided=divided)
        rooms = [storages.room_bytes(layer) for layer in range(self.start, self.stop)]
        self.weights = Weights(self.layers, self.copies, rooms=rooms, device=device) if how.endless else None
        self.gathered = GatheredParameters(share, own, self.copies, storages)
        if states is not None:
            states.put_away(self.updates)
        self.passes = Passes(
            self.layers,
            storages,
            losses=self.losses,
            copies=self.copies,
            weights=self.weights,
            watching=self.gathered.watching,
            agreement=agreement,
            device=device,
        )

    def layers_of(self, action: Action) -> tuple[int, int]:
        """Return the first and end layer of an action; all of the stage if it names none."""
        return action.layers or (self.start, self.stop)

    @property
    def held(self) -> list[Tensor]:
        """Buffers, which a forward may replace, constants, which are plain attributes, and copies of
        weights.
        """
        others = [t for layer in self.layers for t in (*layer.module.buffers(), *constants(layer.module))]
        return [*others, *self.copies.tensors]

    def stores(self, tensor: Tensor) -> bool:
        """Return whether this replica's tensor is stored: it is the first replica, or the shard owner."""
        if self.share is None or not isinstance(tensor, nn.Parameter):
            return self.replica == 0
        return self.updates.owns(tensor)

    def lacks(self, tensor: Tensor) -> bool:
        """Return whether another replica owns a tensor, so that it lacks memory between steps."""
        return bool(self.gathered) and isinstance(tensor, nn.Parameter) and not self.updates.owns(tensor)

    @property
    def is_first_rank(self) -> bool:
        """True if the stage holds whole layers, or belongs to the first tensor-parallel rank."""
        return self.shards is None or not self.shards.group.rank

    @property
    def kept_losses(self) -> list[Tensor]:
        """On the last stage, the tensor for the losses of all microbatches."""
        return [] if self.losses is None else [self.losses]

    # ---------------------------------------------------------------- end of a step

    def end_step(self, *, counted: bool) -> None:
        """Count a step that has ended, unless it was an evaluation.

        Until the next one, weights may be changed.
        """
        self.batch_number += counted
        self._outdate()

    def step(self, action: Action) -> None:
        """Update all layers or a run of them, unless the stages agreed to skip the update.

        Free the gradients.

        Raises:
            UsageError: microbatches in flight need the present weights, or state that the update needs is
                offloaded.
        """
        layers = self.layers_of(action)
        if self.weights is not None:
            self.weights.check_update(layers)
        if action.place is not None:
            self._moving(action).update_elsewhere(action, layers, self.updates)
            return
        if self.states is not None:
            self.states.update(action, layers)
        seed_update(self.device, self.seed, self.batch_number, action.microbatch or 0, layers[0])
        self.updates.step(layers)
        if self.weights is not None:
            self.weights.updated(layers)
        self._outdate()

    def _outdate(self) -> None:
        """Mark copies of weights as outdated.

        Copies of sharded weights are refreshed at every gathering instead.
        """
        if not self.gathered:
            self.copies.outdate()

    def check_here(self, action: Action, flight: Flight | None) -> None:
        """Check that parameters and gradients that an action needs are on the device.

        `flight` is the action's microbatch in flight.

        Raises:
            UsageError: some are offloaded, or not gathered.
        """
        layers = self.layers_of(action)
        if self.states is not None and action.place is None:
            version = None if flight is None else flight.version
            newest = self.weights is None or self.weights.needs_newest(action, version)
            self.states.conditions.check_here(action, layers, newest=newest)
        if self.gathered and action.kind in _THROUGH_LAYERS:
            self.gathered.check(action, layers)

    def gather(self, action: Action) -> list[torch.UntypedStorage]:
        """Execute an UNSHARD, its WAIT, or a RESHARD of parameters; return the resized storages."""
        return self.gathered.carry_out(action, self.layers_of(action))

    def move(self, action: Action) -> None:
        """Execute an OFFLOAD or RELOAD of the stage's state, or its WAIT."""
        self._moving(action).carry_out(action, self.updates)

    def _moving(self, action: Action) -> StateMover:
        if self.states is None:
            raise UsageError(
                f"{action} offloads state, but the plan of this run does not: lower the plan again"
            )
        return self.states

    @contextmanager
    def state_here(self) -> Iterator[None]:
        """Keep all of the stage's state on the device in the context, so that it can be read or changed."""
        with nullcontext() if self.states is None else self.states.all_here(self.updates):
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put all layers into evaluation mode in the context; restore their modes afterwards."""
        modes = [(module, module.training) for layer in self.layers for module in layer.module.modules()]
        try:
            for layer in self.layers:
                layer.module.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training

    def abandon(self) -> None:
        """Drop the gradients after a failed step."""
        for parameter in self.parameters:
            parameter.grad = None
        self.gathered.abandon()
        self._outdate()
        if self.weights is not None:
            self.weights.forget()
        if self.states is not None:
            self.states.abandon(self.updates)
        else:
            self.updates.abandon()

    def optimizer_state(self) -> list[Tensor]:
        """Return every tensor that the optimizer keeps on the device, master weights included."""
        return self.updates.state_here()

    def reader(self) -> Callable[[Tensor], Tensor]:
        """Return a function that reads a state tensor of the stage, from a copy if it is offloaded."""
        return (lambda tensor: tensor) if self.states is None else self.states.reader()
