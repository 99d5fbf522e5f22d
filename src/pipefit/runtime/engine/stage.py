"""One stage on one device: its layers, what it keeps for all microbatches, and the updates of its weights.

What it keeps is parameters, versions of them, buffers, optimizer state and losses. How microbatches go through its
layers is in `pipefit.runtime.engine.passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from pipefit.capture.copying import constants
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.memory.model_state import Share
from pipefit.memory.storages import StageStorages
from pipefit.runtime.comm.agreement import Agreement
from pipefit.runtime.engine.flight import Flight
from pipefit.runtime.engine.passes import Passes, seed_update
from pipefit.runtime.engine.specializations import Specialized
from pipefit.runtime.offload.states import GatheredParameters, StateMover
from pipefit.runtime.optim.half_precision import WeightCopies
from pipefit.runtime.optim.updates import Updates, own_parameters
from pipefit.runtime.optim.weight_versions import Weights
from pipefit.schema.actions import COMPUTE, Action, Kind

_THROUGH_LAYERS = COMPUTE - {Kind.STEP}


class StageRunner:
    """Consecutive layers of a model on one device.

    Args:
        task: its optimizer is used.
        usual: its layers, already on `device`, and the loss, which is used on the last stage only.
        storages: the plan's description of the stage: its layers, their values, and whether the loss follows.
        shared: this stage's copies of shared parameters, by their numbers in the profile.
        microbatches: the largest number in a step.
        agreement: what the stages agree on before an update; None if they need not agree.
        rooms: what a version of every layer's weights takes beside them; None where the stage needs no versions,
            because it is not updated with microbatches in flight.
        replica: which of the stage's replicas this is.
        share: what it owns, where replicas divide the stage's state.
        states: moves the stage's state away and back; None where none is moved.
        seed: on which all random draws depend.
        graph_dropped: called when the graph of a layer that saved nothing is gone.
    """

    def __init__(
        self,
        task: Task,
        usual: Specialized,
        storages: StageStorages,
        *,
        shared: dict[int, nn.Parameter],
        microbatches: int,
        agreement: Agreement | None,
        rooms: Sequence[int] | None = None,
        replica: int = 0,
        share: Share | None = None,
        states: StateMover | None = None,
        device: torch.device,
        seed: int,
        graph_dropped: Callable[[], None] = lambda: None,
    ) -> None:
        self.usual, self.storages, self.shared = usual, storages, shared
        self.layers, self.shards = usual.layers, usual.shards
        self.start, self.stop, self.last = storages.start, storages.stop, storages.last
        self.device, self.seed, self.agreement = device, seed, agreement
        self.batch_number = 0  # training batches so far; random draws depend on it
        self.parameters = [p for layer in self.layers for p in layer.module.parameters()]
        own = own_parameters(self.layers)
        elsewhere = {} if states is None else states.copies(own, self.start)
        self.replica, self.share = replica, share
        self.updates = Updates(task, self.layers, self.start, agreement, elsewhere, share)
        self.optimizer, self.scheduler, self.states = self.updates.optimizer, self.updates.scheduler, states
        dtype = getattr(torch, storages.measurement.loss_dtype)
        self.losses = torch.zeros(microbatches, dtype=dtype, device=device) if self.last else None
        divided = share is not None and share.divides_parameters
        self.copies = WeightCopies(self.layers, storages.costs, self.start, divided=divided)
        self.weights = None if rooms is None else Weights(self.layers, self.copies, rooms=rooms, device=device)
        self.gathered = GatheredParameters(share, own, self.copies, self.start)
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
            graph_dropped=graph_dropped,
        )

    def layers_of(self, action: Action) -> tuple[int, int]:
        """The edges of the layers that an action names, which are all of the stage if it names none."""
        return action.layers or (self.start, self.stop)

    @property
    def held(self) -> list[Tensor]:
        """Buffers, which a forward may replace, constants, which are plain attributes, and copies of weights."""
        others = [t for layer in self.layers for t in (*layer.module.buffers(), *constants(layer.module))]
        return [*others, *self.copies.tensors]

    def stores(self, tensor: Tensor) -> bool:
        """Whether this replica of the stage is the one whose tensor is stored: the first one, or of parameters that
        have owners the owner.
        """
        if self.share is None or not isinstance(tensor, nn.Parameter):
            return self.replica == 0
        return self.updates.owns(tensor)

    def lacks(self, tensor: Tensor) -> bool:
        """Whether a tensor has no memory between steps, because another replica keeps it."""
        return bool(self.gathered) and isinstance(tensor, nn.Parameter) and not self.updates.owns(tensor)

    @property
    def is_first_rank(self) -> bool:
        """Whether it has the layers whole, or is the first of those that divide them."""
        return self.shards is None or not self.shards.group.rank

    @property
    def kept_losses(self) -> list[Tensor]:
        """On the last stage, the tensor for the losses of all microbatches."""
        return [] if self.losses is None else [self.losses]

    # ---------------------------------------------------------------- the step's end

    def end_step(self, *, counted: bool) -> None:
        """A step has ended, which counts unless it was an evaluation; until the next one weights may be changed."""
        self.batch_number += counted
        self._outdate()

    def step(self, action: Action) -> None:
        """An update of all layers or of a run of them, unless the stages agreed to skip it; the gradients are freed.

        Raises:
            UsageError: microbatches in flight need the weights that it would change, or what it needs is not here.
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
        """Weights may have changed; copies of divided ones take their values whenever they are gathered."""
        if not self.gathered:
            self.copies.outdate()

    def check_here(self, action: Action, flight: Flight | None) -> None:
        """Check that the parameters and gradients that an action, of that microbatch in flight, needs are here.

        Raises:
            UsageError: some are away.
        """
        layers = self.layers_of(action)
        if self.states is not None and action.place is None:
            version = None if flight is None else flight.version
            newest = self.weights is None or self.weights.needs_newest(action, version)
            self.states.conditions.check_here(action, layers, newest=newest)
        if self.gathered and action.kind in _THROUGH_LAYERS:
            self.gathered.check(action, layers)

    def gather(self, action: Action) -> list[torch.UntypedStorage]:
        """An UNSHARD, the join of one, or a RESHARD, of the memory of parameters; the storages that were resized."""
        return self.gathered.carry_out(action, self.layers_of(action))

    def move(self, action: Action) -> None:
        """An OFFLOAD or RELOAD of the stage's state, or the join of one."""
        self._moving(action).carry_out(action, self.updates)

    def _moving(self, action: Action) -> StateMover:
        if self.states is None:
            raise UsageError(f"{action} moves state, which the plan of this run does not: lower the plan again")
        return self.states

    @contextmanager
    def state_here(self) -> Iterator[None]:
        """Inside, all of the stage's state is on its device, to be looked at or changed."""
        with nullcontext() if self.states is None else self.states.all_here(self.updates):
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, all layers are in evaluation mode; afterwards they are in their modes from before."""
        modes = [(module, module.training) for layer in self.layers for module in layer.module.modules()]
        try:
            for layer in self.layers:
                layer.module.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training

    def abandon(self) -> None:
        """Drop the gradients after a step has failed."""
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
        """Every tensor that the optimizer keeps on the device, master weights included."""
        return self.updates.state_here()

    def reader(self) -> Callable[[Tensor], Tensor]:
        """A function of a tensor of the stage's state that gives it, or a copy of it if its memory is away."""
        return (lambda tensor: tensor) if self.states is None else self.states.reader()
