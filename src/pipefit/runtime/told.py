"""What stages tell of their state: whole tensors, under the names of the original module, whoever has parts of them.

Where one process runs all ranks of a tensor group, their parts are put together in its memory. A worker has one rank,
and gathers the parts of the others, tensor by tensor, so that all workers of a group have to ask together. Whole
tensors are on the host; what is not divided is as the stage has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pipefit.capture.chain import ChainLayer
from pipefit.runtime.naming import held_tensors
from pipefit.runtime.rank_shards import unstored_buffers
from pipefit.runtime.stage import StageRunner
from pipefit.runtime.state import StageState

Ranks = Sequence[StageRunner]  # of one replica of a stage: all of its ranks in order, or that of this process


@dataclass(frozen=True, slots=True)
class Told:
    """The state of some stages, and by name what their layers hold that no state dict has."""

    state: StageState = field(default_factory=lambda: StageState({}, {}))
    held: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(stages: Iterable[Ranks], *, once: bool = False) -> Told:
        """What stages tell; of what several replicas have, with `once` what is stored."""
        return Told.joined([_of_stage(ranks, once=once) for ranks in stages])

    @staticmethod
    def joined(parts: Iterable[Told]) -> Told:
        """All of these together."""
        state, held = StageState({}, {}), dict[str, Tensor]()
        for part in parts:
            own, held = part.state, {**held, **part.held}
            state = StageState(
                {**state.tensors, **own.tensors},
                {**state.optimizer, **own.optimizer},
                {**state.master_weights, **own.master_weights},
                {**state.numbers, **own.numbers},
            )
        return Told(state, held)


def held_by(stage: StageRunner, layer: ChainLayer) -> dict[str, Tensor]:
    """What a layer of a stage holds that no state dict has, by its name in the whole layer, as the stage has it.

    What a rank's code holds beside that, because it computes with it, is nobody's state.
    """
    if stage.shards is None:
        return dict(held_tensors(layer))
    known = stage.shards.shards
    return {name: buffer for name, buffer in unstored_buffers(layer) if name in known}


def _of_stage(ranks: Ranks, *, once: bool) -> Told:
    first, shards = ranks[0], ranks[0].shards
    states = [StageState.of([stage], once=once) for stage in ranks]
    held = [_held(stage) if not once or stage.replica == 0 else {} for stage in ranks]
    if shards is None:
        return Told(states[0], held[0])
    entries = [state.entries() for state in states]
    constants = {n: t for layer in first.layers for n, t in shards.constants.get(layer.name, {}).items()}
    return Told(
        states[0].of_tensors({one: _joined(first, one.name, [own[one] for own in entries]) for one in entries[0]}),
        {name: _joined(first, name, [own[name] for own in held]) for name in held[0]}
        | (constants if not once or first.replica == 0 else {}),
    )


def _held(stage: StageRunner) -> dict[str, Tensor]:
    return {name: tensor for layer in stage.layers for name, tensor in held_by(stage, layer).items()}


def _joined(first: StageRunner, name: str, parts: Sequence[Tensor]) -> Tensor:
    """The whole tensor of the parts of all ranks in this process, or of a worker's, which others have beside it.

    State that is on the host is gathered by way of the device, as NCCL knows no other way, and is on the host again.
    """
    own, shards = parts[0], first.shards
    if shards is None or not shards.is_part(name, own):
        return own
    gathered = parts if len(parts) > 1 else shards.group.all_gather(own.to(first.device))
    return shards.whole(name, gathered).to(own.device)
