"""Updates of a stage: of all its layers at once, or of runs of them in order, on the device or at a place.

An update at a place runs on a thread in parallel with the device, which waits until the gradients have
arrived; the caller continues. The optimizer there updates copies of the parameters, with the gradients that
were sent, and does not touch the stage's parameters. Its operations and shapes are those of an update on the
device, so the numbers are equal but for a GPU's kernels, which round other intermediate results. Next to an
emulated device it ends no earlier than the host's memory bandwidth allows.

Optimizer state that lies on the host for parameters of a GPU, such as the counters of Adam's steps, stays
there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from pipefit.capture import ChainLayer, Task, updating
from pipefit.capture.parameter_groups import (
    ParameterKind,
    Trained,
    alike,
    kinds_of,
    parameter_groups,
    trained,
)
from pipefit.errors import UsageError
from pipefit.memory import HomeState, Layers, ReplicaShare
from pipefit.runtime.comm.agreement import Agreement
from pipefit.runtime.offload.copying import Pace
from pipefit.runtime.optim.half_precision import (
    MasterWeights,
    copies_of,
    make_optimizer,
    make_scheduler,
)
from pipefit.tensor_parallel import TensorShard
from pipefit.torch_internals import TorchDispatchMode, pytree, without_dispatch_modes

# ---- Steps of some of an optimizer's parameters
# A torch optimizer loops over its `param_groups` and keeps state by parameter, so a step of some groups is
# the part of a whole step that concerns them. A part is an object of the optimizer's class with the same
# attributes but other groups; the state is shared, so that parts may run in parallel. Anything that an
# optimizer does outside of its groups would be repeated by every part, and raises an error: attributes that
# its step changes, and hooks on its steps. Costs microseconds per parameter.

_PUT_IN = frozenset({"param_groups", "_opt_called"})  # may differ between a part and its whole


class Undivided(UsageError):
    """Error for an optimizer that does more in a step than its groups say.

    `reason` follows the `name` of its class.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)  # arguments for unpickling
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return (
            f"optimizer {self.name} {self.reason}, so it cannot update a stage in parts: keep its state on "
            "the device, as planners do, or use an optimizer such as AdamW or SGD"
        )


def step_part(
    optimizer: Optimizer | MasterWeights, parameters: Sequence[Tensor], others: Sequence[Tensor]
) -> None:
    """Step those groups of an optimizer that hold these parameters, and none of the `others`.

    Raises:
        Undivided: the optimizer does more in a step than its groups say.
    """
    before = [other._version for other in others]
    if isinstance(optimizer, MasterWeights):
        whole = optimizer.optimizer
        part = part_of(whole, [optimizer.copies[parameter] for parameter in parameters])
        optimizer.step(part)
    else:
        whole, part = optimizer, part_of(optimizer, parameters)
        part.step()
    whole.__dict__["_opt_called"] = True  # torch's schedulers check it
    if before != [other._version for other in others]:
        raise Undivided(type(whole).__name__, "changes parameters outside its groups")
    changed = sorted(
        name for name in part.__dict__.keys() - _PUT_IN if part.__dict__[name] is not whole.__dict__.get(name)
    )
    if changed:
        raise Undivided(type(whole).__name__, f"changes its attribute {changed[0]!r} in its step")


def check_state_apart(
    optimizer: Optimizer | MasterWeights, own: Sequence[Tensor], others: Sequence[Tensor]
) -> None:
    """Check that optimizer tensors for the parameters `own` can be moved without those for `others`.

    Raises:
        Undivided: it keeps one tensor for both, such as a table of the values of 8-bit codes.
    """
    kept = [
        {
            item.untyped_storage()._cdata
            for parameter in parameters
            if parameter in optimizer.state
            for item in optimizer.state[parameter].values()
            if isinstance(item, Tensor)
        }
        for parameters in (own, others)
    ]
    if not kept[0].isdisjoint(kept[1]):
        whole = optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer
        raise Undivided(type(whole).__name__, "shares one tensor between several parameters")


def part_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Optimizer:
    """Return the optimizer with only those of its groups that hold these parameters.

    Raises:
        Undivided: a group holds others too, or steps have hooks.
    """
    wanted = set(map(id, parameters))
    groups = [group for group in optimizer.param_groups if not wanted.isdisjoint(map(id, group["params"]))]
    if not wanted.issuperset(id(parameter) for group in groups for parameter in group["params"]):
        raise Undivided(type(optimizer).__name__, "has put parameters of several layers into one group")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise Undivided(type(optimizer).__name__, "has hooks on its steps")
    part: Optimizer = object.__new__(type(optimizer))
    part.__dict__ = {name: value for name, value in optimizer.__dict__.items() if name != "step"}
    part.param_groups = groups
    return part


# ---- Tensors that an optimizer makes at its construction, in addition to its state
# Examples are slow copies of weights, or a learning rate in a tensor.
#
# with MadeTensors() as made:
#     optimizer = task.optimizer(groups)
# made.alive                      # the results that are still referenced


class MadeTensors(TorchDispatchMode):
    """Dispatch mode that records the results of all operations by weak references."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._results += [
            TensorWeakRef(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)
        ]
        return result

    @property
    def alive(self) -> list[Tensor]:
        """Recorded results that still exist."""
        found = [result() for result in self._results]
        return [tensor for tensor in found if tensor is not None]


# ---- Places of an optimizer's single numbers, such as the counters of Adam's steps
# They are on the host or on a device. A checkpoint does not say which, because it may have been saved on
# other devices, or by an optimizer with other options. So the optimizer steps a small parameter on the
# device, and its state is inspected. Costs a millisecond for every group, if a parameter is not on the host.


def kept_beside(
    make: Callable[[list[dict[str, Any]]], Optimizer], options: Mapping[str, Any], parameter: Tensor
) -> frozenset[str]:
    """Return names of single numbers that an optimizer with these options keeps on a parameter's device.

    Empty if the optimizer cannot step a small parameter with the same number of dimensions.
    """
    generators = [parameter.device] if parameter.device.type == "cuda" else []
    with suppress(Exception), torch.random.fork_rng(generators, device_type="cuda"), torch.enable_grad():
        small = nn.Parameter(
            torch.zeros([1] * parameter.ndim, dtype=parameter.dtype, device=parameter.device)
        )
        small.grad = torch.zeros_like(small)
        optimizer = make([{**options, "params": [small]}])
        optimizer.step()
        return frozenset(
            name
            for name, item in optimizer.state[small].items()
            if isinstance(item, Tensor) and item.ndim == 0 and item.device == parameter.device
        )
    return frozenset()


# ---- Elementwise optimizers
# Tensor-parallel ranks can update parts of a parameter if the optimizer updates every element separately, as
# AdamW and SGD do. Others compute with rows, columns, norms or products of a whole parameter: on a part they
# would train other numbers without an error. So an optimizer is tried on small parameters, and on parts of
# them, when layers are profiled for ranks, and when these begin to train. Costs milliseconds.


def check_elementwise(
    task: Task,
    layers: Sequence[ChainLayer],
    shards: Mapping[str, TensorShard],
    device: torch.device,
    *,
    instead: str = "no tensor parallelism",
) -> None:
    """Check that ranks can update parts of the parameters of `layers` with the task's optimizer.

    `shards` has the shards of a rank, by parameter names in the model; the optimizer is tried on `device`,
    never on fake tensors. `instead` is the other way out.

    Raises:
        UsageError: it computes an element's update from more than this element.
    """
    names = {
        id(parameter): layer.originals[local]
        for layer in layers
        for local, parameter in layer.module.named_parameters(remove_duplicate=False)
    }
    kinds = kinds_of(
        parameter_groups(layers, task.groups), lambda parameter: shards[names[id(parameter)]].dim
    )
    if not kinds:
        return
    with without_dispatch_modes(), torch.random.fork_rng(devices=[]):
        whole, parts = (trained(task, kinds, parts=n > 0, seed=n, device=device) for n in range(2))
        for kind, one, part in zip(kinds, whole, parts, strict=True):
            if kind.divided is not None and not _is_divided(kind, one, part):
                raise UsageError(
                    f"optimizer {type(part.optimizer).__name__} of {task.name} does not update parameters "
                    "element by element (it uses norms, rows or random numbers of whole tensors), but ranks "
                    f"hold only shards: use an optimizer such as AdamW or SGD, or {instead}"
                )


def _is_divided(kind: ParameterKind, whole: Trained, part: Trained) -> bool:
    """Return whether a part was updated as within the whole, and its state is divided like it."""
    state = part.optimizer.state.get(part.parameter, {}).values()
    kept = [item for item in state if isinstance(item, Tensor) and item.numel() > 1]
    is_alike = alike([kind.part(whole.parameter.detach())], [part.parameter.detach()])
    return is_alike and all(item.shape == part.parameter.shape for item in kept)


# ---- Updates

Elsewhere = Mapping[nn.Parameter, nn.Parameter | None]
_OF_GPUS = "fused", "capturable"  # options of groups for steps on a GPU


class SentGradients(NamedTuple):
    """Gradients that have been sent to a place, as tensors `there`; `arrive` waits for their arrival."""

    there: Mapping[nn.Parameter, Tensor]
    arrive: Callable[[], None]


class Updates:
    """The optimizer of a stage that begins at layer `start`, and its scheduler.

    Args:
        share: this replica's share of the stage: it updates only these layers; None for all.
        agreement: agreement of the stages before an update; None if they need none.
        elsewhere: the copies of parameters that are updated at a place; None for each in a dry run, which
            updates only parameters on the device.

    Raises:
        UsageError: the optimizer's steps are for GPUs only, and the plan updates layers at a place.
    """

    def __init__(
        self,
        task: Task,
        layers: Sequence[ChainLayer],
        start: int,
        agreement: Agreement | None,
        elsewhere: Elsewhere,
        share: ReplicaShare | None = None,
    ) -> None:
        self._start, self._stop, self._agreement, self._share = start, start + len(layers), agreement, share
        self._make, self._beside = task.optimizer, dict[tuple[int, int, torch.dtype], frozenset[str]]()
        self._elsewhere, self._own = elsewhere, own_parameters(layers)
        owned = [own for n, own in enumerate(self._own, start=start) if share is None or share.owns(n)]
        self._owned = frozenset(id(parameter) for own in owned for parameter in own)
        groups = _of(self._owned, parameter_groups(layers, task.groups))
        if elsewhere:
            groups = _with_copies(groups, elsewhere)
        with MadeTensors() as self._made:
            self.optimizer = make_optimizer(task, groups, agreement) if groups else None
        if elsewhere and self.optimizer is not None:
            _check_for_hosts(self.optimizer)
        self.scheduler = make_scheduler(task, self.optimizer)
        self._updated: set[int] = set()  # layers, in this step
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: list[Future[None]] = []
        self._pace = Pace()

    def parameters(self, layers: Layers) -> list[nn.Parameter]:
        """Return the parameters of these layers, each with the first layer of the stage that has it."""
        return [p for own in self._own[layers[0] - self._start : layers[1] - self._start] for p in own]

    def owned(self, layers: Layers) -> list[nn.Parameter]:
        """Return the parameters of these layers that this replica owns, trained or not."""
        own = [layer for layer in range(*layers) if self._share is None or self._share.owns(layer)]
        return [parameter for layer in own for parameter in self.parameters((layer, layer + 1))]

    def updated(self, layers: Layers) -> list[nn.Parameter]:
        """Return the parameters of these layers that this replica updates: the trained ones that it owns."""
        return [parameter for parameter in self.owned(layers) if parameter.requires_grad]

    def owns(self, parameter: Tensor) -> bool:
        """Return whether a parameter belongs to a layer that this replica owns."""
        return id(parameter) in self._owned

    def worked_on(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the optimizer updates for a parameter.

        It is the parameter, its copy at a place, or the float32 copy of one of these.
        """
        copy = self._elsewhere.get(parameter) if isinstance(parameter, nn.Parameter) else None
        result = parameter if copy is None else copy
        return copies_of(self.optimizer).get(result, result)

    def numbers_beside(self, trained: Tensor) -> frozenset[str]:
        """Return names of single numbers that the optimizer keeps on the device of an updated tensor.

        The set is empty on the host.
        """
        if trained.device.type == "cpu" or self.optimizer is None:
            return frozenset()
        asked = self._group_of[id(trained)], trained.ndim, trained.dtype
        if asked not in self._beside:
            self._beside[asked] = kept_beside(self._make, self.optimizer.param_groups[asked[0]], trained)
        return self._beside[asked]

    @cached_property
    def _group_of(self) -> dict[int, int]:
        """Numbers of groups by the ids of the tensors that the optimizer updates."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {id(trained): number for number, group in enumerate(groups) for trained in group["params"]}

    @property
    def made(self) -> list[Tensor]:
        """Living tensors that the optimizer made at its construction; empty if layers are updated at a
        place.
        """
        return [] if self._elsewhere else self._made.alive

    def state_here(self) -> list[Tensor]:
        """Return the optimizer's tensors on the device.

        These are tensors for parameters that are not updated at a place, and tensors made at its
        construction. State is read by parameter, because a thread may add state for others meanwhile.
        """
        kept = self._kept([p for own in self._own for p in own if p not in self._elsewhere])
        return [*self.made, *kept]

    def state(self, layers: Layers, planned: int) -> list[Tensor]:
        """Return the optimizer's tensors for these layers on the devices of its updates, with float32 copies.

        A plan for GPUs may be trained on devices whose memory is the host's. If the tensors take more than
        `planned`, single numbers such as the counters of Adam's steps are left out: next to a GPU they would
        be on the host.
        """
        result = self._kept(self.parameters(layers))
        more = sum(tensor.untyped_storage().nbytes() for tensor in result) > planned
        return [tensor for tensor in result if tensor.ndim or not more]

    def check_apart(self, layers: Layers) -> None:
        """Check that optimizer tensors for these layers are not shared with other layers.

        Then they can be moved alone.

        Raises:
            Undivided: the optimizer keeps one tensor for both.
        """
        if self.optimizer is not None:
            own = self.updated(layers)
            check_state_apart(
                self.optimizer, [*map(self.worked_on, own)], [*map(self.worked_on, self._others(own))]
            )

    def _kept(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        copies, result = copies_of(self.optimizer), list[Tensor]()
        for parameter in parameters:
            result += [copy for copy in (copies.get(parameter),) if copy is not None]
            result += [item for item in self._items(parameter) if self._moves(item, parameter)]
        return result

    def _items(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return the tensors that the optimizer keeps for a parameter."""
        known, trained = self.optimizer.state if self.optimizer else {}, self.worked_on(parameter)
        return (
            [item for item in known[trained].values() if isinstance(item, Tensor)] if trained in known else []
        )

    def _moves(self, item: Tensor, parameter: nn.Parameter) -> bool:
        """Return whether an optimizer tensor is on the device of the parameter's updated tensor."""
        return item.device == self.worked_on(parameter).device

    def is_whole(self, kept: HomeState) -> bool:
        """Return whether all tensors of a state exist: gradients and optimizer state may lack parameters."""
        if kept.kind == "parameters":
            return True
        trained = self.updated(kept.layers)
        if kept.kind == "gradients":
            return all(p.grad is not None for p in trained)
        known = self.optimizer.state if self.optimizer else {}
        return all(self.worked_on(p) in known for p in trained)

    # ---------------------------------------------------------------- updates

    def step(self, layers: Layers) -> None:
        """Update these layers on the device, unless the stages agreed to skip the update.

        Free their gradients.
        """
        parameters = self.updated(layers)
        if self.optimizer is not None and parameters and not self._skipped:
            with updating():
                if layers == (self._start, self._stop):
                    self.optimizer.step()
                else:
                    step_part(self.optimizer, parameters, self._others(parameters))
        for parameter in self.parameters(layers):
            parameter.grad = None
        self._end(layers)

    def _others(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the trained parameters on the device that belong to updates of other layers."""
        left_out = {*map(id, parameters), *map(id, self._elsewhere)}
        return [p for own in self._own for p in own if p.requires_grad and id(p) not in left_out]

    def start_elsewhere(
        self, layers: Layers, gradients: SentGradients, seconds: float
    ) -> Future[None] | None:
        """Begin to update these layers at their place after the arrival of the `gradients`.

        It takes at least `seconds`. Return None if there is nothing to update.
        """
        copies = [copy for p in self.updated(layers) if (copy := self._elsewhere[p]) is not None]
        if self.optimizer is None or not copies or self._skipped:
            return None
        for parameter, gradient in gradients.there.items():
            copy = self._elsewhere[parameter]
            assert copy is not None
            copy.grad = gradient
        if self._thread is None:
            self._thread = ThreadPoolExecutor(
                1, "pipefit-updates", torch.set_num_threads, (torch.get_num_threads(),)
            )
        step = partial(self._step_elsewhere, copies, gradients.arrive)
        started = self._thread.submit(self._pace.keeping(seconds, step))
        self._under_way.append(started)
        return started

    def _step_elsewhere(self, copies: Sequence[nn.Parameter], arrive: Callable[[], None]) -> None:
        assert self.optimizer is not None
        try:
            arrive()
            left_out = set(map(id, copies))
            others = [
                copy for copy in self._elsewhere.values() if copy is not None and id(copy) not in left_out
            ]
            step_part(self.optimizer, copies, others)
        finally:
            for copy in copies:
                copy.grad = None

    def end_elsewhere(self, layers: Layers, started: Future[None] | None) -> None:
        """Wait until an update at a place has ended."""
        if started is not None:
            started.result()
            self._under_way.remove(started)
        self._end(layers)

    def abandon(self) -> None:
        """End all updates after a failed step."""
        self._pace.abandon()
        for started in self._under_way:
            started.exception()
        self._under_way.clear()
        self._updated.clear()

    @property
    def _skipped(self) -> bool:
        return self._agreement is not None and self._agreement.overflow

    def _end(self, layers: Layers) -> None:
        """Note that these layers are updated; after the last ones of the stage, step the scheduler."""
        self._updated.update(range(*layers))
        if len(self._updated) < self._stop - self._start:
            return
        self._updated.clear()
        if self.scheduler is not None and not self._skipped:
            self.scheduler.step()


def _of(wanted: Container[int], layers: Sequence[Sequence[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Return the groups of every layer, restricted to parameters with these ids; drop empty groups."""
    result = list[list[dict[str, Any]]]()
    for groups in layers:
        kept = [{**group, "params": [p for p in group["params"] if id(p) in wanted]} for group in groups]
        result.append([group for group in kept if group["params"]])
    return [groups for groups in result if groups]


def _check_for_hosts(optimizer: Optimizer | MasterWeights) -> None:
    """Check that no group has an option that requires a GPU."""
    for option in _OF_GPUS:
        if any(group.get(option) for group in optimizer.param_groups):
            raise UsageError(
                f"the plan updates layers on the host, which does not work with {option}=True: create the "
                "optimizer without fused and capturable, or update all layers on their devices"
            )


def own_parameters(layers: Sequence[ChainLayer]) -> list[list[nn.Parameter]]:
    """Return the parameters of every layer that no layer before it has."""
    met: set[int] = set()
    result: list[list[nn.Parameter]] = []
    for layer in layers:
        own = [parameter for parameter in layer.module.parameters() if id(parameter) not in met]
        met.update(map(id, own))
        result.append(own)
    return result


def _with_copies(
    groups: Sequence[Sequence[dict[str, object]]], elsewhere: Elsewhere
) -> list[list[dict[str, object]]]:
    """Return the groups of every layer with copies in place of the parameters that are updated at a place."""
    result = []
    for of_layer in groups:
        changed = []
        for group in of_layer:
            parameters = group["params"]
            assert isinstance(parameters, list)
            there = [elsewhere.get(parameter, parameter) for parameter in parameters]
            kept = [parameter for parameter in there if parameter is not None]
            changed += [{**group, "params": kept}] if kept else []
        result += [changed] if changed else []
    return result
