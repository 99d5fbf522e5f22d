"""The task's module: it has the trained numbers after every step, or raises an error when they are read.

Stages may keep a part of each parameter (tensor shards), some of the parameters (ZeRO-sharded replicas), none
between passes (offloaded parameters), or several copies of each (replicas), which all need the user's
changes.

If one process trains all such stages, it trains a copy of the module. After every step, even a failed one,
the module gets the numbers of the copy; before every step the copy gets numbers that the user has changed in
the module. So the module can be used as if it were trained in place. This costs the module's memory, in
addition to the memory of the plan's devices, and two passes over its numbers per step.

A worker trains its own stages only. Tensors of the module that it lacks are replaced by tensors without
memory, which know their shapes and raise an error when their numbers are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from pipefit.capture import ChainLayer, copy_hooks, copy_of, storage_key
from pipefit.errors import UsageError
from pipefit.runtime.checkpoint.checkpointing import Checkpointing
from pipefit.runtime.checks.plan_check import check_frozen
from pipefit.runtime.engine.stage import StageRunner
from pipefit.runtime.state import StageState
from pipefit.schema.decisions import State, What
from pipefit.schema.plan import Plan
from pipefit.torch_internals import pytree, without_torch_function, wrapper_tensor

# ---- Plans


def needs_copy(plan: Plan) -> bool:
    """Return whether a stage of the plan has only parts of parameters between steps, or several copies."""
    return frees_parameters(plan) or any(len(stage.devices) > 1 for stage in plan.stages)


def frees_parameters(plan: Plan) -> bool:
    """Return whether parameters of a module that is trained in place lose their memory between passes.

    Tensor-parallel ranks have parameters of their own, so the module keeps its memory.
    """
    away = {
        decision.stage
        for decision in plan.decisions
        if decision.what is What.OFFLOAD
        and isinstance(decision.subject, State)
        and decision.subject.kind == "parameters"
    }
    return any(
        stage.grid.tensor == 1
        and (number in away or (stage.grid.data > 1 and stage.grid.shard == "parameters"))
        for number, stage in enumerate(plan.stages)
    )


class TaskModule:
    """The task's module, if a factory makes it: nobody else has it, and nothing is done."""

    def lead(self) -> None:
        """Train the user's changes of the module."""

    def begin(self) -> None:
        """Prepare a step or an evaluation."""
        self.lead()

    def follow(self) -> None:
        """Put trained numbers into the module."""

    def fail(self) -> None:
        """Follow a step that failed."""


# ---- One process


class WholeModule(TaskModule):
    """A module and the copy of it that `stages` train, whose state `checkpoints` read.

    Raises:
        UsageError: a layer's state dict holds an object that is not a tensor; names it.
    """

    def __init__(self, module: nn.Module, stages: Sequence[StageRunner], checkpoints: Checkpointing) -> None:
        self._module, self._stages, self._checkpoints = module, stages, checkpoints
        self._frozen = [
            (name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad
        ]
        self._is_behind = False  # since a step has begun
        self._has_failed = False  # in an update, perhaps of one replica alone
        checkpoints.state()

    def lead(self) -> None:
        """Copy the user's changes of the module into the trained copy.

        After a failed step, make replicas equal.

        Raises:
            UsageError: a parameter that was frozen when the plan was made is trained now.
        """
        check_frozen(self._frozen)
        if self._is_behind:
            self.follow()
        own = self._own
        _load_changes(self._checkpoints, own, replace=self._has_failed)
        self._has_failed = False
        _freeze(self._stages, own)

    def begin(self) -> None:
        """Prepare a step or an evaluation, after which the module is behind."""
        super().begin()
        self._is_behind = True

    def follow(self) -> None:
        """Copy the numbers of the trained copy into the module."""
        state, own = self._checkpoints.state(), self._own
        with torch.no_grad():
            for name, tensor in (*state.tensors.items(), *state.held.items()):
                if name in own:
                    own[name].copy_(tensor)
        self._is_behind = False

    def fail(self) -> None:
        """Follow a step that failed."""
        self._has_failed = True
        with suppress(Exception):  # what fails here fails again at the next step
            self.follow()  # now, so that what the user loads after it is used

    @property
    def _own(self) -> dict[str, Tensor]:
        """Parameters and buffers of the module under all their names."""
        buffers = self._module.named_buffers(remove_duplicate=False)
        return {**dict(buffers), **dict(self._module.named_parameters(remove_duplicate=False))}


def _load_changes(checkpoints: Checkpointing, own: Mapping[str, Tensor], *, replace: bool = False) -> None:
    """Load into the stages those of a module's tensors `own` that differ from the trained ones.

    With `replace`, make replicas equal. All workers of a tensor group must call it together.
    """
    state = checkpoints.state()
    changed = {name for name, tensor in state.tensors.items() if name in own and not _same(own[name], tensor)}
    if changed or replace:
        values = {n: own[n].detach() if n in changed else tensor for n, tensor in state.tensors.items()}
        masters = {name: one for name, one in state.master_weights.items() if name not in changed}
        kept = (state.optimizer, state.numbers) if replace else ({}, {})
        checkpoints.load_state(StageState(values, kept[0], masters, kept[1]), replace=replace)


def _freeze(stages: Sequence[StageRunner], own: Mapping[str, Tensor]) -> None:
    """Freeze and unfreeze the stages' parameters like a module's tensors `own`."""
    for stage in stages:
        for layer in stage.layers:
            for local, parameter in layer.module.named_parameters(remove_duplicate=False):
                if (like := own.get(layer.originals.get(local, ""))) is not None:
                    parameter.requires_grad_(like.requires_grad)


def _same(tensor: Tensor, other: Tensor) -> bool:
    return torch.equal(tensor, other.to(tensor.device))


# ---- Several processes

_PROPERTIES = (
    *("device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_quantized"),
    *("is_sparse", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape"),
)
_METHODS = (
    *("__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "type"),
    *("is_floating_point", "nelement", "numel", "requires_grad_", "size", "stride"),
)
_KNOWN = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(Tensor, name) for name in _METHODS),
    getattr(Tensor, "requires_grad").__set__,  # noqa: B009 -- a property, which torch declares as a bool
    torch.is_complex,
    torch.is_floating_point,
    torch.numel,
}


class Absent(Tensor):
    """A parameter or buffer without memory, in place of one that this process lacks.

    Its shape, strides, dtype and device are known; everything that reads numbers raises an error. Copying
    whole numbers into it, as `load_state_dict` does, puts a tensor with these numbers in its place.
    """

    _name: str  # in messages
    _places: list[tuple[dict[str, Any], str]]  # registries of modules, and names there

    @staticmethod
    def like(tensor: Tensor, name: str) -> Absent:
        """Return an absent tensor with the form, attributes and hooks of `tensor`."""
        result: Absent = wrapper_tensor(
            Absent,
            tensor.shape,
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        is_parameter = isinstance(tensor, nn.Parameter)  # which torch reads in `_is_param`
        vars(result).update({**vars(tensor), "_name": name, "_places": [], "_is_param": is_parameter})
        with without_torch_function():
            copy_hooks(tensor, result)
        return result

    def place_in(self, registry: dict[str, Any], name: str) -> None:
        """Replace the tensor of this name in a module's parameters or buffers."""
        registry[name] = self
        if not any(known is registry and place == name for known, place in self._places):
            self._places.append((registry, name))

    def with_numbers(self, numbers: Tensor) -> Tensor:
        """Return a tensor with these numbers, and with the form, attributes and hooks of this one."""
        result = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
        result.copy_(numbers.detach())
        if isinstance(self, nn.Parameter):
            result = nn.Parameter(result, requires_grad=self.requires_grad)
            private = ("_name", "_places", "_is_param")
            vars(result).update({name: value for name, value in vars(self).items() if name not in private})
            with without_torch_function():
                copy_hooks(self, result)
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            kwargs = kwargs or {}
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func is Tensor.copy_ and isinstance(args[0], Absent) and not isinstance(args[1], Absent):
            result = args[0].with_numbers(args[1])
            for registry, name in args[0]._places:
                registry[name] = result
            return result
        return _refuse((args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        _refuse((args, kwargs))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self._name} of shape {tuple(self.shape)}, which this process lacks>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def _refuse(arguments: Any) -> NoReturn:
    """Raise an error that names the first absent tensor among arguments."""
    first = next(leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Absent))
    raise UsageError(
        f"{first._name} cannot be read on this worker, which does not keep it whole: read a checkpoint "
        "(trainer.save) or the tensors of this worker (trainer.state_dict), "
        "or load whole weights into the module"
    )


class Entry(NamedTuple):
    """A parameter or buffer of a module, under one of its names."""

    name: str
    registry: dict[str, Any]  # the parameters or buffers of the submodule that has it
    local: str

    @property
    def tensor(self) -> Tensor:
        """The present tensor."""
        result: Tensor = self.registry[self.local]
        return result


def entries(module: nn.Module) -> Iterator[Entry]:
    """Yield the parameters and the persistent buffers of a module under all their names."""
    for path, part in module.named_modules(remove_duplicate=False):
        for registry in (part._parameters, part._buffers):
            for local, tensor in registry.items():
                if tensor is not None and local not in part._non_persistent_buffers_set:
                    yield Entry(f"{path}.{local}".removeprefix("."), registry, local)


def is_partial(module: nn.Module) -> bool:
    """Return whether tensors of a module are absent."""
    return any(isinstance(entry.tensor, Absent) for entry in entries(module))


def same_tensors(module: nn.Module, name: str) -> nn.Module:
    """Return a copy of `module`, the model `name`, with the same tensors, and arbitrary for absent ones."""

    def present(one: Tensor) -> Tensor:
        if not isinstance(one, Absent):
            return one
        numbers = torch.rand(one.shape, generator=torch.Generator().manual_seed(0)) / 10
        return one.with_numbers(numbers)  # finite, for comparisons of forwards

    return copy_of(module, name, present)


def without_numbers(module: nn.Module, name: str) -> nn.Module:
    """Return a copy of `module`, the model `name`, for traces: its tensors have forms alone."""

    def bare(one: Tensor) -> Tensor:
        if one.layout is not torch.strided:
            return one
        return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")

    return copy_of(module, name, bare)


class PartialModule(TaskModule):
    """The task's module, trained in place: tensors that this worker, one of several, lacks are absent.

    Args:
        module: the task's module.
        trained: the module that is trained: `module` itself, or a copy with the same tensors.
        layers: all layers of `trained`.
        stages: the stages of this worker, whose state `checkpoints` read.
    """

    def __init__(
        self,
        module: nn.Module,
        trained: nn.Module,
        layers: Sequence[ChainLayer],
        stages: Sequence[StageRunner],
        checkpoints: Checkpointing,
    ) -> None:
        self._stages, self._checkpoints = stages, checkpoints
        self._absent = list[tuple[Entry, Absent]]()
        self._buffers = dict[str, Entry]()  # those that are present, by name
        by_id = dict[int, Absent]()  # so that shared tensors stay shared
        own = {
            key
            for stage in stages
            for layer in (stage.layers if stage.shards is None else ())
            for key, tensor in _registered(layer)
            if not _is_freed(tensor)
        }
        others = {key for layer in layers for key, _ in _registered(layer)} - own
        for entry, like in zip(entries(module), list(entries(trained)), strict=True):
            if _key(tensor := like.tensor) not in others:
                entry.registry[entry.local] = tensor
                if not isinstance(tensor, nn.Parameter):
                    self._buffers[entry.name] = entry
                continue
            if id(tensor) not in by_id:
                by_id[id(tensor)] = Absent.like(tensor, entry.name)
            self._absent.append((entry, by_id[id(tensor)]))

    def is_whole(self) -> bool:
        """Return whether no tensor is absent between steps."""
        return not self._absent

    def lead(self) -> None:
        """Train weights loaded in place of absent ones, and freeze parameters as the module does."""
        own = {entry.name: entry.tensor for entry, _ in self._absent}
        if loaded := {name: one for name, one in own.items() if not isinstance(one, Absent)}:
            _load_changes(self._checkpoints, loaded)
        _freeze(self._stages, own)

    def begin(self) -> None:
        """Prepare a step or an evaluation: tensors that were loaded into the module are absent again."""
        super().begin()
        self._hide()

    def follow(self) -> None:
        """Take the trained buffers, which forwards may replace; loaded tensors are absent again."""
        for stage in self._stages:
            for layer in stage.layers:
                for local, buffer in layer.module.named_buffers(remove_duplicate=False):
                    if (entry := self._buffers.get(layer.originals.get(local, ""))) is not None:
                        entry.registry[entry.local] = buffer
        self._hide()

    def _hide(self) -> None:
        for entry, absent in self._absent:
            if entry.tensor is not absent:
                absent.requires_grad_(entry.tensor.requires_grad)
                absent.place_in(entry.registry, entry.local)


def _registered(layer: ChainLayer) -> Iterator[tuple[int, Tensor]]:
    """Yield the parameters and buffers of a layer, each with a key that is equal in one storage."""
    for tensor in (*layer.module.parameters(), *layer.module.buffers()):
        yield _key(tensor), tensor


def _key(tensor: Tensor) -> int:
    return storage_key(tensor) if tensor.layout is torch.strided else id(tensor)


def _is_freed(tensor: Tensor) -> bool:
    """Return whether a tensor has no memory between steps."""
    return tensor.layout is torch.strided and tensor.numel() > 0 and not tensor.untyped_storage().nbytes()
