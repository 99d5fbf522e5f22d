"""torch's data-parallel engines without their peers: DistributedDataParallel and `fully_shard` in a dry run.

Their own code runs: buckets, gathered parameters and reduced gradients are allocated and freed when the
engine does so. Only the process groups are replaced, by groups whose peers are absent.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed import ProcessGroup, Work
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipefit.torch_internals.patches import forms_apart, resizes_seen


class Arrived(Work):
    """A message that has arrived."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        result: Future[Any] = Future()
        result.set_result(self._tensors)
        return result


class AbsentPeers(ProcessGroup):
    """A process group whose peers are absent: results of collectives keep the values they had.

    Args:
        copies: whether a reduce-scatter sums in a copy of its input, as gloo's does.
    """

    def __init__(self, rank: int, size: int, *, copies: bool) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._copies = copies

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:  # type: ignore[override]
        return Arrived(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Work:  # type: ignore[override]
        return Arrived(tensors)

    def _allgather_base(self, output: Tensor, tensor: Tensor, options: Any = None) -> Work:
        return Arrived([output])

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, options: Any = None) -> Work:
        return Arrived([output, tensor.clone()] if self._copies else [output])

    @classmethod
    def like(cls, group: ProcessGroup) -> AbsentPeers:
        """Return a group of the same rank and size as a real one."""
        return cls(group.rank(), group.size(), copies=dist.get_backend(group) == "gloo")


# ---- DistributedDataParallel


class _Reducer:
    """A reducer that keeps its first buckets.

    The real one orders parameters anew after the first backward. It reads its peers' order, and its buckets
    have as many bytes as before.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def reduce_alone(module: DistributedDataParallel) -> None:
    """Give the wrapper another reducer, of the parameters that its module has now, without peers."""
    module.process_group = AbsentPeers.like(module.process_group)
    module._module_parameters = [
        p for name, p in module.module.named_parameters() if name not in module.parameters_to_ignore
    ]
    wrapper: Any = module
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, sparse, names, module.static_graph)
    wrapper.reducer = _Reducer(module.reducer)


# ---- fully_shard


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return isinstance(tensor, _class("torch.distributed.tensor", "DTensor"))


def local_part(tensor: Any) -> Tensor:
    """Return a rank's part of a DTensor; another tensor itself."""
    result: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor
    return result


def undivided(tensor: Any) -> Tensor:
    """Gather a DTensor to host memory, with all ranks of its mesh; return another tensor itself."""
    result: Tensor = tensor.full_tensor().to("cpu") if is_sharded(tensor) else tensor
    return result


def as_divided(tensor: Tensor, like: Any) -> Tensor:
    """Return a whole tensor as a DTensor that is divided like another one, if that is a DTensor."""
    if not is_sharded(like) or is_sharded(tensor) or tensor.shape != like.shape:
        return tensor
    module = sys.modules["torch.distributed.tensor"]
    result: Tensor = module.distribute_tensor(
        tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
    return result


def _class(module: str, name: str) -> Any:
    """Return a class of torch; no class if nobody has imported its module, which takes most of a second."""
    return getattr(sys.modules.get(module), name, ())


def with_local_part(tensor: Any, of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a DTensor like another one; `of` makes its local part from the other's."""
    made: Tensor = type(tensor)(of(tensor._local_tensor), tensor._spec, requires_grad=False)
    return made


def sharding_of(module: Any) -> list[Any]:
    """Return every object in which `fully_shard` keeps tensors, groups and counters of one module."""
    if not isinstance(module, _class("torch.distributed.fsdp", "FSDPModule")):
        return []
    state = module._get_fsdp_state()
    result = [state, state._state_ctx, state._comm_ctx]
    for group in _parameter_groups(state):
        result += [group, group.mesh_info, group.comm_ctx, *group.fsdp_params]
        if group.post_forward_mesh_info is not None:
            result.append(group.post_forward_mesh_info)
    return result


def _parameter_groups(state: Any) -> list[Any]:
    """Return the groups of parameters that one module gathers; torch 2.11 has one group at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


_GROUPS = "shard_process_group", "replicate_process_group", "reduce_scatter_process_group"
_GATHERED = "_unsharded_param", "_unsharded_inner_tensors", "all_gather_outputs"


_COMPOSED = {
    "all_gather_copy_in": "all_gather_copy_in_cuda",  # of a CPU, too
    "split_with_sizes_copy": "split_with_sizes_copy",
    "chunk_cat": "chunk_cat",
}


def local_forms() -> tuple[Any, dict[Any, Any]]:
    """Return the class of DTensors, whose operations a meter leaves to torch, and other operations' forms.

    torch carries an operation of DTensors out on their local parts, which a meter sees. Operations of
    `fully_shard` that consist of others map to functions that call these. Nothing that is not imported yet.
    """
    collectives = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    composed = {} if collectives is None else _COMPOSED
    forms = {
        getattr(getattr(torch.ops.fsdp, name), overload): getattr(collectives, of)
        for name, of in composed.items()
        for overload in getattr(torch.ops.fsdp, name).overloads()
    }
    return _class("torch.distributed.tensor", "DTensor"), forms


@contextmanager
def returning_views() -> Iterator[None]:
    """Let sharded modules return views in the body without a warning: nobody changes them in place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        yield


@contextmanager
def shards_counted(resized: Callable[[UntypedStorage], None]) -> Iterator[None]:
    """Let a meter in the body see the memory of sharded parameters."""
    with resizes_seen(resized), forms_apart():
        yield


@contextmanager
def shards_alone(objects: Sequence[Any], resized: Callable[[UntypedStorage], None]) -> Iterator[None]:
    """Let the engine run without peers in the body, from gathering parameters for the first time on.

    Args:
        objects: those of `sharding_of`, among others; the caller restores their attributes.
        resized: called after each change of a storage's size, which no operation shows.
    """
    for one in objects:
        attributes = vars(one)
        for name in _GROUPS:
            if isinstance(attributes.get(name), ProcessGroup):
                attributes[name] = AbsentPeers.like(attributes[name])
        if "all_gather_outputs" in attributes:
            for name in _GATHERED:
                attributes.pop(name, None)
            attributes["all_gather_outputs"] = []

    with resizes_seen(resized), forms_apart():
        yield
