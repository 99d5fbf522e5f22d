"""What a rank of a tensor group has of every tensor of a chain, and the way to whole tensors and back.

Checkpoints, state dicts and other plans know whole tensors alone, under the names of the original module. An
optimizer's tensors are divided as the parameters are whose shapes they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture.chain import Chain, ChainLayer
from pipefit.capture.constants import named_constants
from pipefit.sharding import Collectives, Shard, assembled
from pipefit.sharding.chain import RankLoss, ShardedChain


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShards:
    """What the ranks of a group have; this one is `group.rank`.

    Args:
        divided: the chain, as the ranks divide it; smaller microbatches are divided like it.
        shards: of all ranks, by the name of a parameter or buffer in the model, or of a buffer that no state dict has,
            which is the layer's with the buffer's own.
        constants: for layers, by their names, the tensors that whole ones have as plain attributes, by such names; no
            forward changes them.
        criterion: the rank's loss; None where the last layer returns it.
    """

    group: Collectives
    divided: ShardedChain
    shards: Mapping[str, tuple[Shard, ...]]
    constants: Mapping[str, Mapping[str, Tensor]]
    criterion: nn.Module | None

    @staticmethod
    def of(divided: ShardedChain, chain: Chain, group: Collectives) -> RankShards:
        """Those of a divided chain, of which `chain` is the rank's."""
        ranks, layers = range(divided.ranks), divided.chain.layers
        of_ranks = [divided.shards(rank) for rank in ranks]
        shards = {name: tuple(own[name] for own in of_ranks) for name in of_ranks[0]}
        for layer in layers:
            for name, buffer in unstored_buffers(layer):
                form = divided.stage.form(buffer)
                shards[name] = tuple(Shard.of(name, buffer.shape, form, rank, len(ranks)) for rank in ranks)
        constants = {
            layer.name: {f"{layer.name}.{local}": tensor for local, tensor in named_constants(layer.module)}
            for layer in layers
        }
        criterion = chain.criterion.module if isinstance(chain.criterion, RankLoss) else None
        return RankShards(group=group, divided=divided, shards=shards, constants=constants, criterion=criterion)

    @property
    def own(self) -> dict[str, Shard]:
        """What this rank has, by the same names."""
        return {name: of_ranks[self.group.rank] for name, of_ranks in self.shards.items()}

    def is_divided(self, name: str) -> bool:
        """Whether ranks have parts of the tensor, instead of all of it each."""
        return self.shards[name][0].dim is not None

    def is_part(self, name: str, tensor: Tensor) -> bool:
        """Whether `tensor`, of what is told under that name, is a part: of a parameter, or an optimizer's like it."""
        return self.is_divided(name) and tuple(tensor.shape) == self._own(name).local_shape

    def whole_shape(self, name: str, tensor: Tensor) -> torch.Size:
        """The shape of the tensor of which the rank has `tensor`."""
        return torch.Size(self._own(name).global_shape) if self.is_part(name, tensor) else tensor.shape

    def part(self, name: str, whole: Tensor) -> Tensor:
        """What this rank has of a whole tensor."""
        return self._own(name).local(whole)

    def part_of_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank's optimizer keeps of that for a whole parameter.

        Raises:
            UsageError: it has a tensor of another shape than the parameter's.
        """
        return self._own(name).local_state(state)

    def whole(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor, on the host, of the parts of all ranks."""
        return assembled(self.shards[name], [part.detach().cpu() for part in parts])

    def _own(self, name: str) -> Shard:
        return self.shards[name][self.group.rank]


def unstored_buffers(layer: ChainLayer) -> list[tuple[str, Tensor]]:
    """The buffers of a layer that no state dict has, each with the layer's name and its own."""
    known = layer.module.state_dict(keep_vars=True).keys()
    return [(f"{layer.name}.{name}", buffer) for name, buffer in layer.module.named_buffers() if name not in known]
