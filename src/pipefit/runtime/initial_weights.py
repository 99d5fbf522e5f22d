"""The layers that a training starts from, with the weights of plain training under the same seed.

Of several workers the first builds the model as its owner wrote it. The others build it over fake tensors, which have
no bytes, and the first sends each the parameters, buffers and constants of its own stages, over gloo; where replicas
divide parameters, those of the layers that it owns. So a host holds the model once and the workers' parts of it,
however many workers there are, and the random numbers are those of one plain initialisation. What the first worker does
not train is freed before its first step.

A worker builds the whole model itself where it cannot do without the bytes: the task has a module, and no function that
builds one; the function returns a module that exists already; parameters share memory; a layer holds a tensor that
copies of it do not reach, as one that a function of C holds; or the plan has tensor shards, which are parts of a whole.
It takes up the first worker's weights then too, as the random numbers of its own module may have been others: replicas,
shards and weights that stages share have to begin alike.
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
from torch._subclasses.fake_tensor import FakeTensor

from pipefit.capture.chain import Chain, ChainLayer
from pipefit.capture.copying import constants, copied
from pipefit.capture.model import built, capture
from pipefit.capture.random_state import put_back, seed_torch
from pipefit.capture.refused import refuse_meta, refuse_without_memory
from pipefit.capture.sample import Sample
from pipefit.capture.storages import flat, storage_key
from pipefit.capture.task import Task
from pipefit.errors import PipefitError
from pipefit.fake_cuda.chain import built_without_bytes, faked
from pipefit.fake_cuda.target import FakeTarget
from pipefit.memory.arenas import tensor_groups
from pipefit.runtime.comm.transport import check_members
from pipefit.runtime.dry_run.devices import kept_layers
from pipefit.runtime.engine.tensor_groups import lost
from pipefit.schema.plan import Plan

_PIECE_BYTES = 64 << 20  # between two signs of life
_PATIENCE = timedelta(days=1)  # building may take any time, and a worker that ends breaks the connection

OnWeights = Callable[[bool], None]
Form = tuple[tuple[int, ...], torch.dtype]


class Start(NamedTuple):
    """A task whose module is built, and the chain of that module, which holds the same tensors."""

    task: Task
    chain: Chain


def start_of(task: Task, plan: Plan, seed: int, first: Sample, on_weights: OnWeights) -> Start:
    """The model as this worker needs it, captured with `first`, a microbatch: with bytes at least for its own layers.

    All workers must call it. `on_weights` is called with whether this worker waits for another, again and again. In a
    single process, and where the task has a module that exists, it is the whole model; all workers train the weights
    of the first one's.

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


# -------------------------------------------------------------------- a model without bytes


def _without_bytes(task: Task, plan: Plan, seed: int, first: Sample) -> Start | None:
    """The model with memory, of any content, for this worker's layers alone; None where it has to have all of it."""
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
        return None  # where the task itself is to blame, building the model tells so
    return _with_memory(bare, chain, _own(chain, plan, dist.get_rank()))


def _is_new(module: nn.Module) -> bool:
    """Whether a module was built without bytes, and none of its parameters shares memory with another tensor."""
    parameters = list(module.parameters())
    keys = [storage_key(parameter) for parameter in parameters]
    others = {storage_key(tensor) for tensor in _strided((*module.buffers(), *constants(module)))}
    bare = all(parameter.is_meta or isinstance(parameter, FakeTensor) for parameter in parameters)
    return bare and len(set(keys)) == len(keys) and others.isdisjoint(keys)


def _with_memory(bare: Task, chain: Chain, own: Sequence[ChainLayer]) -> Start | None:
    """A copy of a module and its chain in which the layers `own` have memory; None where not all of theirs is seen."""
    assert isinstance(bare.module, nn.Module)
    modules = [layer.module for layer in own]
    wanted = {storage_key(t) for m in modules for t in _strided((*m.parameters(), *m.buffers(), *constants(m)))}

    def convert(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or storage_key(tensor) not in wanted:
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    whole = nn.ModuleList([bare.module, *(layer.module for layer in chain.layers)])
    module, *copies = copied(whole, convert).children()
    layers = tuple(replace(layer, module=copy) for layer, copy in zip(chain.layers, copies, strict=True))
    mine = set(map(id, modules))
    if any(_holds_fakes(copy) for copy, layer in zip(copies, chain.layers, strict=True) if id(layer.module) in mine):
        return None
    return Start(replace(bare, module=module), replace(chain, layers=layers))


def _holds_fakes(module: nn.Module) -> bool:
    """Whether a tensor without bytes can be reached from a module, by whatever way."""
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


# -------------------------------------------------------------------- what is sent


def _numbers(plan: Plan, worker: int) -> Iterator[int]:
    """The layers of a worker's stages, by their numbers."""
    for number in plan.stages_of(plan.workers[worker]):
        yield from range(plan.stages[number].start, plan.stages[number].stop)


def _own(chain: Chain, plan: Plan, worker: int) -> list[ChainLayer]:
    """The layers of a worker's stages."""
    return [chain.layers[number] for number in _numbers(plan, worker)]


def _tensors(chain: Chain, plan: Plan, worker: int, kept: Mapping[int, Container[int]]) -> list[Tensor]:
    """Parameters of the layers of which a worker's device keeps them, and the storages of all other tensors of its
    layers, each once and in one order.
    """
    found: dict[tuple[bool, int], Tensor] = {}
    for number in _numbers(plan, worker):
        layer = chain.layers[number]
        parameters = tuple(layer.module.parameters()) if number in kept[plan.workers[worker]] else ()
        for parameter in _strided(parameters):
            found.setdefault((True, id(parameter)), parameter.detach())
        for tensor in _strided((*layer.module.buffers(), *constants(layer.module))):
            found.setdefault((False, storage_key(tensor)), flat(tensor.detach()))
    return list(found.values())


def _strided(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    return (tensor for tensor in tensors if tensor.layout is torch.strided)


def _form(tensor: Tensor) -> Form:
    return tuple(tensor.shape), tensor.dtype


def _compared(
    forms: list[Form], chain: Chain, plan: Plan, group: dist.ProcessGroup, kept: Mapping[int, Container[int]]
) -> list[bool]:
    """For every worker, whether its tensors have the `forms` of those that worker 0 has in its `chain`."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, forms, group=group)
    same: list[Any] = [None]
    if dist.get_rank() == 0:
        same = [[n > 0 and f == list(map(_form, _tensors(chain, plan, n, kept))) for n, f in enumerate(told)]]
    dist.broadcast_object_list(same, src=0, group=group)
    found: list[bool] = same[0]
    return found


@contextmanager
def _between_workers(plan: Plan) -> Iterator[dist.ProcessGroup]:
    """A process group for what is on the host, whatever the workers' own backend is.

    Raises:
        PeerLost: another worker failed.
    """
    try:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_PATIENCE)
        check_members(group, "weights")
        yield group
        dist.destroy_process_group(group)
    except RuntimeError as error:
        what = "another worker is gone while weights were handed out"
        raise lost(what, error, plan.workers[dist.get_rank()]) from error


def _send(tensor: Tensor, worker: int, group: dist.ProcessGroup, on_weights: OnWeights) -> None:
    for piece in _pieces(tensor.cpu().contiguous()):
        on_weights(False)
        dist.send(piece, worker, group=group)


def _receive(tensor: Tensor, worker: int, group: dist.ProcessGroup, on_weights: OnWeights) -> None:
    """Take up what worker 0 sends; bytes that are the same are not written, as pages of a file may be shared."""
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
    """The bytes of a contiguous tensor, in pieces that share its memory."""
    return torch.split(tensor.reshape(-1).view(torch.uint8), _PIECE_BYTES) if tensor.numel() else ()
