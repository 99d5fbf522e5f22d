"""A snapshot of what a process trains: its tensors on the host, and the settings that go into a checkpoint with them.

It is taken between two steps, so that training may go on while it is written. It takes as many bytes of the host's
memory as the tensors have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipefit.checkpoints.manifest import (
    DTYPES,
    GroupSettings,
    Kind,
    ParameterNumbers,
    Part,
    Setting,
    Shard,
    StoredTensor,
    TrainedStage,
    joined_settings,
    tensor_key,
)
from pipefit.errors import UsageError
from pipefit.runtime.master_weights import MasterWeights
from pipefit.runtime.naming import Names
from pipefit.runtime.settings import options_of, scalar, state_of
from pipefit.runtime.stage import StageRunner
from pipefit.runtime.told import Ranks, Told
from pipefit.texts import dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of some stages: `tensors` by their keys, and the settings."""

    tensors: dict[str, Tensor]
    stored: tuple[StoredTensor, ...]
    stages: tuple[TrainedStage, ...]
    groups: tuple[GroupSettings, ...]
    numbers: tuple[ParameterNumbers, ...]
    scheduler: dict[str, Setting] | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def part(self, shard: Shard) -> Part:
        """What the worker contributes to the manifest, when its tensors are in `shard`."""
        return Part(
            shard=shard,
            tensors=self.stored,
            stages=self.stages,
            groups=self.groups,
            numbers=self.numbers,
            scheduler=self.scheduler,
        )


def snapshot(
    stages: Sequence[tuple[int, Ranks]], names: Names, devices: Mapping[int, int], rank: int, *, once: bool
) -> Snapshot:
    """The present state of `stages`, each with its number, as it is: `copied` makes it independent of the training.

    Several of one number are replicas of a stage. Of each tensor that they have, `once` takes the one that is stored.
    Workers that have ranks of one replica ask together; with `once`, the first of them has it all.

    Raises:
        UsageError: something cannot be written: a tensor's dtype or layout, an option, a scheduler's state. Names it.
    """
    found = [(number, ranks[0], Told.of([ranks], once=once)) for number, ranks in stages]
    kept = [(number, stage, told) for number, stage, told in found if not once or stage.is_first_rank]
    told = Told.joined([told for _, _, told in kept])
    runners = [stage for _, stage, _ in kept]
    telling = [stage for stage in runners if not once or stage.replica == 0 or stage.share is not None]
    first = [(number, stage) for number, stage, _ in kept if not once or stage.replica == 0]
    tensors: dict[str, Tensor] = {}
    stored = []
    for kind, name, state, tensor in _tensors(told, runners, names):
        tensors[tensor_key(kind, name, state)] = _checked(tensor, tensor_key(kind, name, state))
        dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        stored.append(StoredTensor(name=name, kind=kind, state=state, shard=rank, dtype=dtype, shape=shape))
    groups, scheduler = _groups(telling, names)
    return Snapshot(
        tensors=tensors,
        stored=tuple(stored),
        stages=tuple(
            TrainedStage(start=stage.start, stop=stage.stop, device=devices[number], batches=stage.batch_number)
            for number, stage in first
        ),
        groups=groups,
        numbers=tuple(
            ParameterNumbers(
                name=name, values={key: scalar(v, f"the optimizer's {key} of {name}") for key, v in values.items()}
            )
            for name, values in told.state.numbers.items()
            if values and _stores(runners, names, name)
        ),
        scheduler=scheduler,
    )


def copied(tensors: dict[str, Tensor], progress: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    """Copies of tensors in the host's memory; `progress` is called before each.

    Each is taken out of `tensors`, so that what is away, and was read for this alone, is freed as it is copied.
    """
    found = dict[str, Tensor]()
    for key in list(tensors):
        progress()
        found[key] = tensors.pop(key).detach().to("cpu", copy=True)
    return found


def named_parameters(stage: StageRunner, names: Names) -> dict[Tensor, str]:
    """What a stage's optimizer works on, parameters or their float32 copies, each with the name it is stored under."""
    found = dict[Tensor, str]()
    for layer in stage.layers:
        for local, tensor in layer.module.state_dict(keep_vars=True).items():
            found[stage.updates.worked_on(tensor)] = names.stored[layer.originals[local]]
    return found


def _tensors(told: Told, stages: Sequence[StageRunner], names: Names) -> Iterator[tuple[Kind, str, str, Tensor]]:
    """Kind, name, name in the optimizer, and every tensor that these stages have told and store, each once."""
    state = told.state
    own = [name for name in state.tensors if _stores(stages, names, name)]
    yield from (("model", name, "", state.tensors[name]) for name in own)
    yield from (("master", name, "", state.master_weights[name]) for name in own if name in state.master_weights)
    for name in own:
        yield from (("optimizer", name, key, tensor) for key, tensor in state.optimizer.get(name, {}).items())
    yield from (("held", name, "", tensor) for name, tensor in told.held.items())


def _stores(stages: Sequence[StageRunner], names: Names, name: str) -> bool:
    return any(names.are_of(name, stage.start, stage.stop) for stage in stages)


def _groups(stages: Sequence[StageRunner], names: Names) -> tuple[tuple[GroupSettings, ...], dict[str, Setting] | None]:
    """The settings of every parameter group, and what the schedulers keep for all groups together."""
    found: list[GroupSettings] = []
    known: list[dict[str, Setting]] = []
    for stage in stages:
        if stage.optimizer is None:
            continue
        groups, named = stage.optimizer.param_groups, named_parameters(stage, names)
        scheduled: list[dict[str, Setting]] = [{} for _ in groups]
        if stage.scheduler is not None:
            common, scheduled = state_of(stage.scheduler, len(groups))
            known.append(common)
        for group, own in zip(groups, scheduled, strict=True):
            parameters = tuple(named[parameter] for parameter in group["params"])
            options = options_of(group, f"the optimizer {_optimizer_name(stage)}")
            found.append(GroupSettings(parameters=parameters, options=options, scheduled=own))
    return tuple(found), joined_settings(known)


def _optimizer_name(stage: StageRunner) -> str:
    optimizer = stage.optimizer
    return type(optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer).__name__


def _checked(tensor: Tensor, key: str) -> Tensor:
    """The tensor, if a shard can hold it.

    Raises:
        UsageError: it cannot.
    """
    dtype = dtype_name(tensor.dtype)
    if tensor.layout != torch.strided or dtype not in DTYPES or tensor.is_quantized:
        raise UsageError(
            f"{key} is a tensor of {tensor.dtype} and layout {tensor.layout}, which no checkpoint can hold: it takes "
            f"dense tensors of {', '.join(DTYPES)}"
        )
    return tensor
