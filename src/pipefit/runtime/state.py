"""State of stages: parameters, buffers and optimizer state, under the names of the original module.

The names do not depend on stages, so another plan, with other stages on other devices, can continue the
training. `Names` maps the names of tied parameters to stored names, `StageState` reads and loads the state of
stages as each rank has it, and `gathered` joins the parts of tensor-parallel ranks to whole tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.capture import ChainLayer, named_constants, stored_entries
from pipefit.errors import UsageError
from pipefit.measure import MemoryMeter
from pipefit.memory import ReplicaShare
from pipefit.runtime.comm.agreement import Agreement
from pipefit.runtime.engine.replicas import RankShards, unstored_buffers
from pipefit.runtime.optim.half_precision import MasterWeights, copies_of
from pipefit.runtime.optim.updates import Updates
from pipefit.schema.plan import Plan
from pipefit.texts import kind_of
from pipefit.torch_internals.data_parallel import as_divided, undivided

# ---- Trained stages, as any engine has them


class TrainedPart(Protocol):
    """A stage on one device whose state is read and restored: pipefit's own, or another engine's."""

    seed: int
    batch_number: int
    device: torch.device
    replica: int
    share: ReplicaShare | None
    shards: RankShards | None
    updates: Updates
    agreement: Agreement | None

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def layers(self) -> Sequence[ChainLayer]: ...
    @property
    def optimizer(self) -> Optimizer | MasterWeights | None: ...
    @property
    def scheduler(self) -> Any: ...
    @property
    def is_first_rank(self) -> bool: ...
    def stores(self, tensor: Tensor) -> bool: ...
    def lacks(self, tensor: Tensor) -> bool: ...
    def reader(self) -> Callable[[Tensor], Tensor]: ...
    def state_here(self) -> AbstractContextManager[None]: ...
    def optimizer_state(self) -> list[Tensor]: ...


class TrainedDevice(Protocol):
    """The stages of one device, and its meter."""

    @property
    def plan(self) -> Plan: ...
    @property
    def stages(self) -> Mapping[int, TrainedPart]: ...
    @property
    def meter(self) -> MemoryMeter | None: ...


# ---- Names of stored tensors
# A tied parameter has several names and, on several stages, several equal copies. It is stored once, under
# its first name, by the first stage that has it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names under which tensors are stored.

    `stored` maps every original name to its stored name; `first` maps every stored name to the number of the
    first layer that holds the tensor.
    """

    stored: Mapping[str, str]
    first: Mapping[str, int]

    @staticmethod
    def of(layers: Sequence[ChainLayer]) -> Names:
        """Return the names of a whole chain, before stages have their own copies of shared parameters."""
        stored: dict[str, str] = {}
        first: dict[str, int] = {}
        met: dict[int, str] = {}
        for number, layer in enumerate(layers):
            for local, tensor in stored_entries(layer.module).items():
                name = layer.originals[local]
                stored.setdefault(
                    name, met.setdefault(id(tensor), name) if isinstance(tensor, nn.Parameter) else name
                )
                first.setdefault(stored[name], number)
        return Names(stored=stored, first=first)

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Original names without a stored tensor, each with the stored name of its tensor."""
        return tuple((name, stored) for name, stored in self.stored.items() if name != stored)

    def are_of(self, name: str, start: int, stop: int) -> bool:
        """Return whether the stage of layers `start` to `stop - 1` stores a tensor under exactly this
        name.
        """
        return self.stored[name] == name and start <= self.first[name] < stop


def held_tensors(layer: ChainLayer) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of a layer that are not in its state dict, such as non-persistent buffers."""
    known = stored_entries(layer.module).keys()
    others = ((name, buffer) for name, buffer in layer.module.named_buffers() if name not in known)
    for local, tensor in (*others, *named_constants(layer.module)):
        if tensor.layout is torch.strided:  # forwards change no other layout in place
            yield f"{layer.name}.{local}", tensor


# ---- State of stages


class StateKey(NamedTuple):
    """Key of one state tensor.

    It is a tensor of the `model`, a `master` copy, an `optimizer` tensor, called `state` there, or a tensor
    that a layer has `held` outside of its state dict.
    """

    kind: Literal["model", "master", "optimizer", "held"]
    name: str
    state: str = ""


@dataclass(frozen=True, slots=True)
class StageState:
    """State of stages, by names in the original module; of tensor shards, the part of one rank or the whole.

    `tensors` has parameters and buffers; `optimizer` has the optimizer's tensors of every parameter, by their
    names in the optimizer; `master_weights` has the float32 copies of parameters; `numbers` has non-tensor
    optimizer state of a parameter, such as the count of its updates; `held` has tensors of layers that are in
    no state dict.
    """

    tensors: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]]
    master_weights: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    held: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def joined(parts: Sequence[StageState]) -> StageState:
        """Join the states of several stages."""

        def together(name: str) -> dict[str, Any]:
            return {key: value for part in parts for key, value in getattr(part, name).items()}

        return StageState(*(together(one.name) for one in fields(StageState)))

    @staticmethod
    def of(stages: Sequence[TrainedPart], *, once: bool = False) -> StageState:
        """Return the state of these stages. Tensors are not copied, unless they are offloaded.

        With `once`, a tensor that several replicas have is included only for the replica that stores it.

        Raises:
            UsageError: a layer's state dict holds an object that is not a tensor; names it.
        """
        tensors: dict[str, Tensor] = {}
        kept: dict[str, dict[str, Tensor]] = {}
        masters: dict[str, Tensor] = {}
        numbers: dict[str, dict[str, Any]] = {}
        held: dict[str, Tensor] = {}
        for stage in stages:
            known = stage.optimizer.state if stage.optimizer is not None else {}
            float32, read = set(copies_of(stage.optimizer).values()), stage.reader()
            for layer in stage.layers:
                held |= held_by(stage, layer) if not once or stage.replica == 0 else {}
                for local, tensor in stored_entries(layer.module).items():
                    _check(layer, local, tensor)
                    if stage.lacks(tensor) or (once and not stage.stores(tensor)):
                        continue
                    name, trained = layer.originals[local], stage.updates.worked_on(tensor)
                    tensors[name] = read(tensor.detach())
                    if trained in float32:
                        masters[name] = read(trained.detach())
                    if trained in known:
                        kept[name] = {k: read(v) for k, v in known[trained].items() if isinstance(v, Tensor)}
                        numbers[name] = {k: v for k, v in known[trained].items() if not isinstance(v, Tensor)}
        return StageState(tensors, kept, masters, numbers, held)

    def entries(self) -> dict[StateKey, Tensor]:
        """Return all tensors by their keys."""
        result: dict[StateKey, Tensor] = {
            StateKey("model", name): tensor for name, tensor in self.tensors.items()
        }
        result |= {StateKey("master", name): tensor for name, tensor in self.master_weights.items()}
        kept = ((name, key, tensor) for name, own in self.optimizer.items() for key, tensor in own.items())
        result |= {StateKey("optimizer", name, key): tensor for name, key, tensor in kept}
        return result | {StateKey("held", name): tensor for name, tensor in self.held.items()}

    def of_tensors(self, tensors: Mapping[StateKey, Tensor]) -> StageState:
        """Return a copy of this state with other tensors."""
        return StageState(
            tensors={name: tensors[StateKey("model", name)] for name in self.tensors},
            optimizer={
                name: {key: tensors[StateKey("optimizer", name, key)] for key in own}
                for name, own in self.optimizer.items()
            },
            master_weights={name: tensors[StateKey("master", name)] for name in self.master_weights},
            numbers=self.numbers,
            held={name: tensors[StateKey("held", name)] for name in self.held},
        )

    def load_into(self, stages: Sequence[TrainedPart], *, replace: bool = False) -> None:
        """Load this state of whole tensors into these stages, whatever plan it was trained under.

        With `replace`, parameters without optimizer state here have none afterwards. A parameter with a
        float32 copy gets the copy's value, rounded to the parameter's precision.

        Raises:
            UsageError: a tensor of the stages is missing in this state, or has another shape.
        """
        values = {**self.tensors, **self.master_weights}
        for stage in stages:
            with stage.state_here():
                self._load(values, stage, replace=replace)

    def _load(self, values: Mapping[str, Tensor], stage: TrainedPart, *, replace: bool) -> None:
        """Load this state into a stage whose tensors are all on its device."""
        for layer in stage.layers:
            for local, tensor in stored_entries(layer.module).items():
                name, trained = layer.originals[local], stage.updates.worked_on(tensor)
                if stage.lacks(tensor):
                    continue
                _copy(values, name, tensor, stage.shards)
                if trained is not tensor:
                    _copy(values, name, trained, stage.shards)
                kept = self.optimizer.get(name)
                if not stage.updates.owns(tensor):
                    continue
                if kept is not None and stage.optimizer is not None:
                    if stage.shards is not None:
                        kept = stage.shards.part_of_state(name, kept)
                    beside = stage.updates.numbers_beside(trained)
                    stage.optimizer.state[trained] = {
                        **{
                            key: _put(value, trained, single=key not in beside) for key, value in kept.items()
                        },
                        **copy.deepcopy(dict(self.numbers.get(name, {}))),
                    }
                elif replace and stage.optimizer is not None:
                    stage.optimizer.state.pop(trained, None)


def _check(layer: ChainLayer, local: str, kept: object) -> None:
    if not isinstance(kept, Tensor):
        raise UsageError(
            f"layer {layer.name} keeps {local} in its state dict, which is {kind_of(kept)} and not a "
            "tensor: states hold only tensors, so keep it in a buffer"
        )


def _copy(tensors: Mapping[str, Tensor], name: str, into: Tensor, shards: RankShards | None) -> None:
    result = tensors.get(name)
    needed = into.shape if shards is None else shards.whole_shape(name, into)
    if result is None or result.shape != needed:
        have = "is missing" if result is None else f"has shape {tuple(result.shape)}"
        raise UsageError(
            f"the state does not fit the model: {name} {have}, but the model needs {tuple(needed)}: load it "
            "into the model that it came from"
        )
    with torch.no_grad():
        into.copy_(as_divided(result if shards is None else shards.part(name, result), into))


def _put(value: Tensor, parameter: Tensor, *, single: bool) -> Tensor:
    """Copy an optimizer tensor to the parameter's device; a `single` number stays on its device, the host."""
    if value.ndim == 0 and single:
        return value.clone()
    return as_divided(value, parameter).to(parameter.device, copy=True)


# ---- Whole tensors
# If one process runs all ranks of a tensor group, their parts are joined in its memory. A worker has one rank
# and gathers the parts of the others tensor by tensor, so all workers of a group must call together. Whole
# tensors are on the host; undivided tensors stay on the stage's device.

Ranks = Sequence[TrainedPart]  # ranks of one replica of a stage: all in order, or the one of this process


def gathered(stages: Iterable[Ranks], *, once: bool = False) -> StageState:
    """Return the whole state of stages.

    With `once`, a tensor of several replicas is included only for the replica that stores it.
    """
    return StageState.joined([_of_ranks(ranks, once=once) for ranks in stages])


def held_by(stage: TrainedPart, layer: ChainLayer) -> dict[str, Tensor]:
    """Return the tensors of a stage's layer that are in no state dict, by names in the whole layer.

    Tensors that only the code of a tensor-parallel rank computes with are not state and are left out.
    """
    if stage.shards is None:
        return dict(held_tensors(layer))
    known = stage.shards.shards
    return {name: buffer for name, buffer in unstored_buffers(layer) if name in known}


def _of_ranks(ranks: Ranks, *, once: bool) -> StageState:
    first, shards = ranks[0], ranks[0].shards
    states = [StageState.of([stage], once=once) for stage in ranks]
    if once or shards is not None:
        states = [own.of_tensors({key: undivided(t) for key, t in own.entries().items()}) for own in states]
    if shards is None:
        return states[0]
    entries = [state.entries() for state in states]
    whole = states[0].of_tensors(
        {entry: _joined(first, entry.name, [own[entry] for own in entries]) for entry in entries[0]}
    )
    constants = {n: t for layer in first.layers for n, t in shards.constants.get(layer.name, {}).items()}
    return whole if once and first.replica else replace(whole, held={**whole.held, **constants})


def _joined(first: TrainedPart, name: str, parts: Sequence[Tensor]) -> Tensor:
    """Return the whole tensor from the parts of all ranks in this process, or of all workers.

    State on the host is gathered through the device, because NCCL gathers only there, and then returned to
    the host.
    """
    own, shards = parts[0], first.shards
    if shards is None or not shards.is_part(name, own):
        return own
    gathered = parts if len(parts) > 1 else shards.group.all_gather(own.to(first.device))
    return shards.whole(name, gathered).to(own.device)
