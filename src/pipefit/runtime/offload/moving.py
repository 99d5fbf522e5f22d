"""Offloading of a device's saved tensors: their storages lose their memory, and get it back.

A tensor is named by its layer and its number among the tensors that autograd saves there. The forward of a
layer with offloaded tensors is therefore watched: every tensor that autograd saves passes a hook, which keeps
weak references to the storages in question. Only the graph owns them, as without the hook.

When the copy of a storage has arrived, the storage is resized to nothing. All of its views, in any layer,
lose their memory with it, and get it back when the storage is resized back and its bytes have returned: one
copy serves all views, and the graph is not touched. The program decides the order; actions that do not fit it
raise an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from pipefit.errors import UsageError
from pipefit.memory import StageStorages, Whereabouts, slots
from pipefit.runtime.offload.copying import Copier, Slot, SlotPart
from pipefit.runtime.offload.lending import Borrowed
from pipefit.schema.actions import Action, Bundle, Kind, Subject
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Member
from pipefit.schema.program import UncheckedProgram
from pipefit.texts import dtype_name

# ---- Pieces of tensors in blocks
#
# The tensors of a bundle lie in its blocks one after the other, as one row of bytes: k tensors in m blocks
# are at most k + m - 1 pieces, and each piece is one copy. (MPress, D2D swap.)


class TensorPiece(NamedTuple):
    """`nbytes` of a tensor, from `offset` on, that are `within` bytes into a block; both are numbered."""

    tensor: int
    offset: int
    block: int
    within: int
    nbytes: int


def pieces(tensors: Sequence[int], blocks: Sequence[int]) -> Iterator[TensorPiece]:
    """Yield the pieces of tensors in blocks of these sizes: each block is filled before the next one."""
    block, within = 0, 0
    for tensor, nbytes in enumerate(tensors):
        offset = 0
        while offset < nbytes:
            if within == blocks[block]:
                block, within = block + 1, 0
                continue
            taken = min(nbytes - offset, blocks[block] - within)
            yield TensorPiece(tensor, offset, block, within, taken)
            offset, within = offset + taken, within + taken


# ---- Moves of saved tensors

Wanted = Mapping[int, Collection[int | str]]  # by layer, the numbers of saved tensors


class OffloadedTensor(NamedTuple):
    """A saved tensor that may be offloaded: its storage, shape and dtype."""

    storage: ref[torch.UntypedStorage]
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True, kw_only=True)
class TensorMove:
    """The move of one OFFLOAD for one microbatch: the storages with their bytes, and the reserved slots.

    A last microbatch may be smaller than the plan's, and then does not fill its slots.
    """

    action: Action
    storages: Sequence[tuple[ref[torch.UntypedStorage], int]]
    slots: Sequence[tuple[Member, Slot]]
    copy: Any
    state: Whereabouts = Whereabouts.LEAVING


class Luggage:
    """The saved tensors of one microbatch in one stage that its program offloads, and their moves.

    `wanted` are the numbers of those tensors, by layer. `weights` returns the memory of a layer's weights in
    the microbatch's version, if there are versions; `away` are the layers whose weights have been offloaded,
    for this microbatch or another one with the same version.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.found: dict[Subject, OffloadedTensor] = {}
        self.moves: dict[Subject | Bundle, TensorMove] = {}
        self.weights: Callable[[int], list[torch.UntypedStorage]] | None = None
        self.away: set[int] = set()

    def watching(self, layer: int) -> AbstractContextManager[None]:
        """Return a context for the forward of a layer in which the wanted saved tensors are found."""
        return self._watching(layer) if layer in self.wanted else nullcontext()

    @contextmanager
    def _watching(self, layer: int) -> Iterator[None]:
        """Hook the saved tensors of a layer.

        The hooks check for in-place changes, because autograd then does not.
        """
        wanted, count = self.wanted[layer], 0

        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            nonlocal count
            if count in wanted:
                storage, dtype = ref(tensor.untyped_storage()), dtype_name(tensor.dtype)
                self.found[Subject(layer, count)] = OffloadedTensor(storage, tuple(tensor.shape), dtype)
            count += 1
            return tensor.detach(), tensor._version  # the tensor may be the result of the node that keeps it

        with torch.autograd.graph.saved_tensors_hooks(pack, _unchanged):
            yield


def _unchanged(saved: tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor if it has not been changed.

    Raises:
        RuntimeError: it has been changed, with the words of autograd's error.
    """
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError("a saved tensor has been modified by an inplace operation")
    return tensor


class Mover:
    """Executes the OFFLOADs and RELOADs of device `number`.

    Args:
        stages: the storages of the device's stages, by their numbers.
        borrowed: the slots that the device may use.
        resized: called with every storage that has got or lost its memory.
    """

    def __init__(
        self,
        number: int,
        cluster: Cluster,
        stages: Mapping[int, StageStorages],
        *,
        borrowed: Borrowed,
        copier: Copier,
        resized: Callable[[torch.UntypedStorage], None],
    ) -> None:
        self.number, self.cluster, self.stages = number, cluster, stages
        self.borrowed, self.copier, self.resized = borrowed, copier, resized
        self._program: UncheckedProgram | None = None
        self._wanted: dict[tuple[int, int | None], dict[int, set[int | str]]] = {}

    def begin(self, program: UncheckedProgram) -> None:
        """Execute `program` from now on: find the saved tensors that it offloads."""
        if program is self._program:
            return
        self._program, self._wanted = program, {}
        for action in program.actions[self.number]:
            if action.kind is Kind.OFFLOAD and not action.wait and not action.moves_state:
                if action.place is None:
                    raise UsageError(f"{action} lacks a place: write @host, or @device3 for a peer")
                wanted = self._wanted.setdefault((action.stage, action.microbatch), defaultdict(set))
                for subject in program.moved(action):
                    if subject.what != "versions":
                        wanted[subject.layer].add(subject.what)

    def luggage(self, stage: int, microbatch: int) -> Luggage:
        """Return an empty luggage for a microbatch of this number in a stage."""
        return Luggage(self._wanted.get((stage, microbatch), {}))

    # ---------------------------------------------------------------- the four actions

    def carry_out(
        self, action: Action, luggage: Luggage, *, readers: Iterable[Tensor], smaller: bool
    ) -> None:
        """Execute an OFFLOAD, a RELOAD or the WAIT of one. The tensors of `readers` are still read or sent.

        A microbatch that is `smaller` than the plan's may have smaller storages.

        Raises:
            UsageError: the action does not fit the state of the microbatch.
        """
        match action.kind, action.wait:
            case Kind.OFFLOAD, False:
                self._offload(action, luggage, smaller=smaller)
            case Kind.OFFLOAD, True:
                self._offloaded(action, luggage, readers)
            case Kind.RELOAD, False:
                self._reload(action, luggage)
            case _:
                self._reloaded(action, luggage)

    def _offload(self, action: Action, luggage: Luggage, *, smaller: bool) -> None:
        """Begin to copy storages out."""
        storages = self._storages(action, luggage, smaller=smaller)
        taken = [(member, self.borrowed.take(member, nbytes)) for member, nbytes in self._slots(action)]
        luggage.moves[_subject(action)] = TensorMove(
            action=action,
            storages=[(ref(storage), nbytes) for storage, nbytes in storages],
            slots=taken,
            copy=self.copy(storages, taken, outward=True),
        )
        luggage.away |= self._weights_of(action)

    def _offloaded(self, action: Action, luggage: Luggage, readers: Iterable[Tensor]) -> None:
        """Wait for the copies and free the memory of the storages."""
        move = luggage.moves[_subject(action)]
        self.copier.join(move.copy)
        read = {tensor.untyped_storage()._cdata for tensor in readers}
        for storage, _ in self._present(action, move):
            if storage._cdata in read:
                raise UsageError(
                    f"{action} frees a tensor that is still read or sent: put it after the last use and its "
                    "WAIT"
                )
            storage.resize_(0)
            self.resized(storage)
        move.state = Whereabouts.AWAY

    def _reload(self, action: Action, luggage: Luggage) -> None:
        """Allocate memory for the storages, and begin to copy back."""
        move = luggage.moves.get(_subject(action))
        if move is None or move.state is not Whereabouts.AWAY or move.action.place != action.place:
            state = Whereabouts.HERE if move is None else f"{move.state} (@{move.action.place})"
            raise UsageError(f"{action} reloads a storage that is {state}")
        storages = self._present(action, move)
        for storage, nbytes in storages:
            storage.resize_(nbytes)
            self.resized(storage)
        move.copy = self.copy(storages, move.slots, outward=False)
        move.state = Whereabouts.RETURNING

    def _reloaded(self, action: Action, luggage: Luggage) -> None:
        """Wait for the copies and free the slots."""
        move = luggage.moves.pop(_subject(action))
        self.copier.join(move.copy)
        for member, slot in move.slots:
            self.borrowed.give_back(member, slot)
        luggage.away -= self._weights_of(action)

    def abandon(self) -> None:
        """End all copies and free all slots, after a failed step."""
        self.copier.abandon()
        self.borrowed.free_all()

    def check_present(
        self, action: Action, luggage: Luggage, layers: range, inputs: Sequence[Tensor] = ()
    ) -> None:
        """Check that tensors for a backward of `layers`, or for an action with `inputs`, are present.

        Raises:
            UsageError: a needed tensor is not on the device.
        """
        for move in luggage.moves.values():
            moved = {storage._cdata for storage, _ in self._present(action, move)}
            savers = {
                saver for subject in self._moved(move.action) for saver in self._savers(action, subject)
            }
            gone = move.state is not Whereabouts.LEAVING
            read = gone and any(tensor.untyped_storage()._cdata in moved for tensor in inputs)
            if read or savers.intersection(layers):
                back = move.action._replace(kind=Kind.RELOAD)
                raise UsageError(
                    f"{action} needs a tensor that is {move.state}: {back.join} must come before it"
                )
        self.check_weights(action, luggage, layers)

    def check_weights(self, action: Action, luggage: Luggage, layers: range) -> None:
        """Check that weights of `layers` have not been offloaded.

        Raises:
            UsageError: weights of one of the layers are not on the device, or about to leave it.
        """
        if gone := luggage.away.intersection(layers):
            raise UsageError(
                f"{action} needs the offloaded weights of layer {min(gone)}: RELOAD them and wait for the "
                "reload first"
            )

    # ---------------------------------------------------------------- storages and slots

    def _moved(self, action: Action) -> tuple[Subject, ...]:
        assert self._program is not None
        return self._program.moved(action)

    def _weights_of(self, action: Action) -> set[int]:
        """Return the layers whose weight versions an action moves."""
        return {subject.layer for subject in self._moved(action) if subject.what == "versions"}

    def _savers(self, action: Action, subject: Subject) -> tuple[int, ...]:
        return (subject.layer,) if subject.what == "versions" else self.stages[action.stage].savers(subject)

    def _storages(
        self, action: Action, luggage: Luggage, *, smaller: bool
    ) -> list[tuple[torch.UntypedStorage, int]]:
        """Return the storages that an OFFLOAD moves, with their bytes.

        Raises:
            UsageError: one does not exist, is not as planned, cannot be moved, or is moved already.
        """
        stage, storages = self.stages[action.stage], list[tuple[torch.UntypedStorage, int]]()
        moved = {s._cdata for move in luggage.moves.values() for s, _ in self._present(action, move)}
        for subject in self._moved(action):
            if subject.what == "versions":
                storages += _weights(action, luggage, subject.layer, stage.version_bytes(subject.layer))
                continue
            if not stage.sizes[stage.storage(subject)]:  # a parameter or a constant, which stays
                continue
            storage = _found(action, subject, luggage)
            if storage._cdata in moved:
                raise UsageError(f"{action} offloads the storage of saved tensor {subject} a second time")
            if not storage.resizable():
                raise UsageError(
                    f"{action} cannot offload saved tensor {subject}: its memory does not belong to torch, "
                    "but for example to a numpy array; keep it on the device"
                )
            self._check_planned(action, subject, luggage.found[subject], storage.nbytes(), smaller=smaller)
            moved.add(storage._cdata)
            storages.append((storage, storage.nbytes()))
        return storages

    def _check_planned(
        self, action: Action, subject: Subject, found: OffloadedTensor, nbytes: int, *, smaller: bool
    ) -> None:
        """Check that a saved tensor has the profiled dtype, shape and storage size."""
        stage = self.stages[action.stage]
        planned = stage.sizes[stage.storage(subject)]
        saved = next(t for t in stage.costs[subject.layer - stage.start].saved if t.index == subject.what)
        like = found.dtype == saved.dtype and (found.shape == saved.shape or smaller)
        if not like or (nbytes != planned and not (smaller and nbytes < planned)):
            why = "the model saves other tensors than when it was profiled; profile and plan it again"
            if smaller:
                why = (
                    "a smaller microbatch saves other tensors; omit it, or do not offload the tensors that "
                    "this layer saves"
                )
            raise UsageError(
                f"{action}: saved tensor {subject} is {list(found.shape)} of {found.dtype} in {nbytes} "
                "bytes, but by "
                f"the plan {list(saved.shape)} of {saved.dtype} in {planned}: {why}"
            )

    def _present(self, action: Action, move: TensorMove) -> list[tuple[torch.UntypedStorage, int]]:
        """Return the storages of a move, which the graph still holds, with their bytes."""
        result = [(storage(), nbytes) for storage, nbytes in move.storages]
        if any(storage is None for storage, _ in result):
            raise UsageError(
                f"{action} comes after the backward that needed the tensors that {move.action} offloaded, or "
                "no backward needs them: profile and plan the model again"
            )
        return [(storage, nbytes) for storage, nbytes in result if storage is not None]

    def _slots(self, action: Action) -> list[tuple[Member, int]]:
        """Return the slots of an action, as lender and size."""
        assert action.place is not None
        stage = self.stages[action.stage]
        nbytes = sum(map(stage.nbytes, self._moved(action)))
        return slots(action.place, nbytes, self.cluster.devices[self.number].host)

    def copy(
        self,
        storages: Sequence[tuple[torch.UntypedStorage, int]],
        there: Sequence[tuple[Member, Slot]],
        *,
        outward: bool,
        paced: bool = True,
    ) -> Any:
        """Begin to copy between storages and slots, each in order as one row of bytes.

        Unless `paced`, the time of the links is ignored.
        """
        here = Member.device(self.number)
        parts = [
            SlotPart(storages[tensor][0], offset, there[block][1], within, nbytes, there[block][0])
            for tensor, offset, block, within, nbytes in pieces(
                [nbytes for _, nbytes in storages], [slot.nbytes for _, slot in there]
            )
        ]
        seconds = self.cluster.seconds(
            (
                *((here, member) if outward else (member, here)),
                sum(part.nbytes for part in parts if part.slot is slot),
            )
            for member, slot in there
        )
        paced = paced and self.cluster.backend == "emulated"
        return self.copier.start(parts, outward=outward, seconds=seconds * paced)

    def join(self, copy: Any) -> None:
        """Order later computations after a copy."""
        self.copier.join(copy)

    def settle(self, copy: Any) -> None:
        """Wait until a copy is complete for the host too."""
        self.copier.settle(copy)


def _subject(action: Action) -> Subject | Bundle:
    assert action.subject is not None
    return action.subject


def _found(action: Action, subject: Subject, luggage: Luggage) -> torch.UntypedStorage:
    """Return the storage of a saved tensor.

    Raises:
        UsageError: the layer has saved no such tensor, or its backward is over.
    """
    result = luggage.found.get(subject)
    storage = None if result is None else result.storage()
    if storage is None:
        raise UsageError(
            f"{action} offloads a missing tensor: layer {subject.layer} has not saved tensor {subject.what} "
            "yet, its backward is over, or it keeps the tensor in a way that cannot be offloaded, such as "
            "on the context of a custom function"
        )
    return storage


def _weights(
    action: Action, luggage: Luggage, layer: int, planned: int
) -> list[tuple[torch.UntypedStorage, int]]:
    """Return the storages of a layer's weights in a microbatch's version, with their bytes.

    The bytes must be as `planned`.

    Raises:
        UsageError: the schedule lacks versions, the microbatch's is still in use, or it takes other bytes.
    """
    if layer in luggage.away:
        raise UsageError(f"{action} offloads the weights of layer {layer} a second time")
    if luggage.weights is None:
        raise UsageError(
            f"{action} offloads weight versions, but the plan's schedule is synchronous and has none"
        )
    storages = [(storage, storage.nbytes()) for storage in luggage.weights(layer)]
    if (nbytes := sum(nbytes for _, nbytes in storages)) != planned:
        raise UsageError(
            f"{action}: the weights of layer {layer} are {nbytes} bytes, but {planned} by the plan: profile "
            "the model and plan it again, or keep them on the device"
        )
    return storages
