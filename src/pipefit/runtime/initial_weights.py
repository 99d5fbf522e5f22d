"""Initial layers of a training, with the weights of plain training under the same seed.

With several workers, the first one builds the model as the user wrote it. The others build it over fake
tensors, which have no bytes, and the first one sends each worker the parameters, buffers and constants of its
stages over gloo; of ZeRO-sharded parameters, those of the layers that the worker owns. So a host holds the
model once plus the workers' parts of it, for any number of workers, and the random numbers are those of one
plain initialisation. Layers that the first worker does not train are freed before its first step.

A worker builds the whole model if it needs the bytes: the task has a module and no factory; the factory
returns an existing module; parameters share memory; a layer holds a tensor that copies of the layer do not
reach, for example in a C function; or the plan has tensor shards, which are parts of a whole. It then
receives the first worker's weights too, because its own module may have drawn other random numbers, and
replicas, shards and tied weights must begin equal.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipefit.capture import (
    Chain,
    ChainLayer,
    Sample,
    Task,
    built,
    capture,
    constants,
    copied,
    put_back,
    refuse_meta,
    refuse_without_memory,
    seed_torch,
    storage_key,
)
from pipefit.capture.storages import flat
from pipefit.errors import PipefitError
from pipefit.fake_cuda.chain import built_without_bytes, faked
from pipefit.fake_cuda.target import FakeTarget
from pipefit.memory import tensor_groups
from pipefit.runtime.comm.transport import check_members
from pipefit.runtime.dry_run.devices import kept_layers
from pipefit.runtime.engine.tensor_groups import lost
from pipefit.schema.plan import Plan
from pipefit.torch_internals.fake_tensors import FakeTensor

_PIECE_BYTES = 64 << 20  # between two calls of `on_weights`
_PATIENCE = timedelta(days=1)  # building may take any time, and a worker that ends breaks the connection

OnWeights = Callable[[bool], None]
Form = tuple[tuple[int, ...], torch.dtype]


class Start(NamedTuple):
    """A task whose module is built, and the chain of that module, which holds the same tensors."""

    task: Task
    chain: Chain


def start_of(task: Task, plan: Plan, seed: int, first: Sample, on_weights: OnWeights) -> Start:
    """Return the model for this worker, captured with the microbatch `first`.

    At least the worker's own layers have memory. All workers must call it. `on_weights` is called repeatedly
    with whether this worker waits for another. In a single process, and if the task has an existing module,
    it is the whole model; all workers train the first worker's weights.

    Raises:
        UsageError: the model cannot be built or captured.
        PeerLost: another worker failed meanwhile.
    """
    exists = isinstance(task.module, nn.Module)
    if not dist.is_initialized() or (tensor_groups(plan) and not exists):
        return _whole(task, plan, seed, first)
    rank = dist.get_rank()
    bare = None if rank == 0 or exists else _without_bytes(task, plan, seed, first)
    start = bare or _whole(task, plan, seed, first)
    kept = kept_layers(plan)
    with _between_workers(plan) as group:
        on_weights(rank > 0)
        forms = list(map(_form, _tensors(start.chain, plan, rank, kept)))
        is_same = _compared(forms, start.chain, plan, group, kept)
        for worker, same in enumerate(is_same):
            if same and rank in (0, worker):
                for tensor in _tensors(start.chain, plan, worker, kept):
                    (_send if rank == 0 else _receive)(tensor, worker, group, on_weights)
        on_weights(True)
        dist.barrier(group=group)
        on_weights(False)
    return start if bare is None or is_same[rank] else _whole(task, plan, seed, first)


def _whole(task: Task, plan: Plan, seed: int, first: Sample) -> Start:
    target = plan.cluster.target
    whole = built(task, seed=seed, target=target)
    assert isinstance(whole.module, nn.Module)
    refuse_meta(whole.module, task.name)
    refuse_without_memory(whole.module, task.name)
    return Start(whole, capture(whole, *first, target=target))


# ---- Models without bytes


def _without_bytes(task: Task, plan: Plan, seed: int, first: Sample) -> Start | None:
    """Return the model with uninitialised memory for this worker's layers alone.

    Return None if it needs the whole model.
    """
    target = plan.cluster.target
    try:
        with put_back(), FakeTarget("cpu") as fake:
            seed_torch(seed, target="cpu")
            module = built_without_bytes(task, fake)
            if not _is_new(module):
                return None
            bare = faked(replace(task, module=module), fake)
            chain = capture(bare, *first, target=target)
    except PipefitError:
        return None  # building the whole model reports errors of the task
    return _with_memory(bare, chain, _own(chain, plan, dist.get_rank()))


def _is_new(module: nn.Module) -> bool:
    """Return whether a module was built without bytes and its parameters do not share memory."""
    parameters = list(module.parameters())
    keys = [storage_key(parameter) for parameter in parameters]
    others = {storage_key(tensor) for tensor in _strided((*module.buffers(), *constants(module)))}
    bare = all(parameter.is_meta or isinstance(parameter, FakeTensor) for parameter in parameters)
    return bare and len(set(keys)) == len(keys) and others.isdisjoint(keys)


def _with_memory(bare: Task, chain: Chain, own: Sequence[ChainLayer]) -> Start | None:
    """Copy a module and its chain with memory for the layers `own`.

    Return None if one of them still holds a fake tensor.
    """
    assert isinstance(bare.module, nn.Module)
    modules = [layer.module for layer in own]
    wanted = {
        storage_key(t) for m in modules for t in _strided((*m.parameters(), *m.buffers(), *constants(m)))
    }

    def convert(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or storage_key(tensor) not in wanted:
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    whole = nn.ModuleList([bare.module, *(layer.module for layer in chain.layers)])
    module, *copies = copied(whole, convert).children()
    layers = tuple(replace(layer, module=copy) for layer, copy in zip(chain.layers, copies, strict=True))
    mine = set(map(id, modules))
    if any(
        _holds_fakes(copy)
        for copy, layer in zip(copies, chain.layers, strict=True)
        if id(layer.module) in mine
    ):
        return None
    return Start(replace(bare, module=module), replace(chain, layers=layers))


def _holds_fakes(module: nn.Module) -> bool:
    """Return whether a fake tensor can be reached from a module by any chain of references."""
    pending: list[Any] = [module]
    met = {id(module)}
    while pending:
        held = pending.pop()
        if isinstance(held, FakeTensor):
            return True
        skipped = id(held.__globals__) if isinstance(held, FunctionType) else None
        for other in gc.get_referents(held):
            if id(other) not in met and id(other) != skipped and not isinstance(other, ModuleType | type):
                met.add(id(other))
                pending.append(other)
    return False


# ---- Sending weights between workers


def _numbers(chain: Chain, plan: Plan, worker: int) -> Iterator[int]:
    """Yield the numbers of the layers of a worker's stages, of a chain that may be another model's."""
    for number in plan.stages_of(plan.workers[worker]):
        yield from range(plan.stages[number].start, min(plan.stages[number].stop, len(chain.layers)))


def _own(chain: Chain, plan: Plan, worker: int) -> list[ChainLayer]:
    """Return the layers of a worker's stages."""
    return [chain.layers[number] for number in _numbers(chain, plan, worker)]


def _tensors(chain: Chain, plan: Plan, worker: int, kept: Mapping[int, Container[int]]) -> list[Tensor]:
    """Return the tensors that a worker receives, in a fixed order, each once.

    These are the parameters of the layers in `kept` for the worker's device, and the storages of all other
    tensors of its layers.
    """
    result: dict[tuple[bool, int], Tensor] = {}
    for number in _numbers(chain, plan, worker):
        layer = chain.layers[number]
        parameters = tuple(layer.module.parameters()) if number in kept[plan.workers[worker]] else ()
        for parameter in _strided(parameters):
            result.setdefault((True, id(parameter)), parameter.detach())
        for tensor in _strided((*layer.module.buffers(), *constants(layer.module))):
            result.setdefault((False, storage_key(tensor)), flat(tensor.detach()))
    return list(result.values())


def _strided(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    return (tensor for tensor in tensors if tensor.layout is torch.strided)


def _form(tensor: Tensor) -> Form:
    return tuple(tensor.shape), tensor.dtype


def _compared(
    forms: list[Form], chain: Chain, plan: Plan, group: dist.ProcessGroup, kept: Mapping[int, Container[int]]
) -> list[bool]:
    """Return for every worker whether its tensors have the shapes and dtypes that worker 0 has for it."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, forms, group=group)
    same: list[Any] = [None]
    if dist.get_rank() == 0:
        same = [[n > 0 and f == list(map(_form, _tensors(chain, plan, n, kept))) for n, f in enumerate(told)]]
    dist.broadcast_object_list(same, src=0, group=group)
    result: list[bool] = same[0]
    return result


@contextmanager
def _between_workers(plan: Plan) -> Iterator[dist.ProcessGroup]:
    """Open a gloo process group for tensors on the host, whatever the workers' backend is.

    Raises:
        PeerLost: another worker failed.
    """
    try:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_PATIENCE)
        check_members(group, "weights")
        yield group
        dist.destroy_process_group(group)
    except RuntimeError as error:
        what = "another worker ended while weights were sent"
        raise lost(what, error, plan.workers[dist.get_rank()]) from error


def _send(tensor: Tensor, worker: int, group: dist.ProcessGroup, on_weights: OnWeights) -> None:
    for piece in _pieces(tensor.cpu().contiguous()):
        on_weights(False)
        dist.send(piece, worker, group=group)


def _receive(tensor: Tensor, worker: int, group: dist.ProcessGroup, on_weights: OnWeights) -> None:
    """Receive a tensor from worker 0.

    Equal bytes are not written, because pages of a mapped file may be shared.
    """
    dense, differs = tensor.contiguous(), False
    for piece in _pieces(dense):
        on_weights(True)
        received = torch.empty(piece.shape, dtype=piece.dtype)
        dist.recv(received, 0, group=group)
        if not torch.equal(piece.cpu(), received):
            piece.copy_(received)
            differs = True
    if differs and not tensor.is_contiguous():
        tensor.copy_(dense)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Split the bytes of a contiguous tensor into views."""
    return torch.split(tensor.reshape(-1).view(torch.uint8), _PIECE_BYTES) if tensor.numel() else ()
