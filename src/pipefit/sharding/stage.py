"""A stage of a chain for the ranks of a tensor-parallel group: planned once, then written for every rank.

`shard_stage` decides for all ranks; `ShardedStage.rank` makes the layers of one. Layers are as many as before and have
the names that they had, and so do parameters and buffers, of which a rank has the part that its `Shard` says. What
comes into the stage and leaves it is replicated. Ranks that plan by themselves compare their `digest`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from pipefit.capture.chain import Chain, ChainLayer
from pipefit.capture.graph_layer import GraphLayer
from pipefit.capture.structure import Values
from pipefit.errors import UsageError
from pipefit.sharding.collectives import Collectives
from pipefit.sharding.forms import Form, R
from pipefit.sharding.prices import Prices
from pipefit.sharding.report import shares
from pipefit.sharding.search import Choice, choose
from pipefit.sharding.shards import Shard
from pipefit.sharding.steps import Collective, Key, Steps, crossing
from pipefit.sharding.tracing import TracedStage, is_stored, trace
from pipefit.sharding.writing import LayerCode, RankTensors, tensors_of, write
from pipefit.tensor_shares import Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStage:
    """What one rank runs and has: its layers, the loss behind them if the stage has it, and its shards by name.

    The loss is of the last layer's values, which then are in the forms that the loss needs, and the targets. `shards`
    has every name of the whole stage's state dict.
    """

    layers: tuple[ChainLayer, ...]
    criterion: GraphLayer | None
    shards: Mapping[str, Shard]

    def __call__(self, values: Values, targets: Values = ()) -> Values:
        """What the stage makes of its inputs: its outputs, or the loss."""
        for layer in self.layers:
            values = layer(values)
        return values if self.criterion is None else self.loss(values, targets)

    def loss(self, values: Values, targets: Values) -> Values:
        """The loss of the last layer's values."""
        last = ChainLayer("loss", self.criterion, autocast=self.layers[-1].autocast)  # type: ignore[arg-type]
        return last((*values, *targets))


def shard_stage(
    layers: Sequence[ChainLayer],
    ranks: int,
    values: Values,
    *,
    chain: Chain | None = None,
    targets: Values = (),
    is_first: bool = False,
    sequences: bool = False,
    prices: Prices | None = None,
) -> ShardedStage:
    """How `ranks` share the layers of a stage, for inputs like `values`.

    With `chain` the stage is its last, and the loss of outputs and `targets` is shared too. Tensors may be fake: only
    their shapes and types count. The inputs of the first stage, `is_first`, need no gradient. By
    `sequences`, what is between attention and MLP may be divided along positions (sequence parallelism): less is kept,
    more is sent.

    Raises:
        UsageError: fewer than two ranks, or a layer that cannot be followed.
    """
    check_ranks(ranks)
    stage = trace(layers, values, chain=chain, targets=targets, is_first=is_first)
    return ShardedStage(stage, choose(stage, ranks, prices or Prices(), sequences=sequences), ranks)


def check_ranks(ranks: int) -> None:
    """Check that there is more than one rank.

    Raises:
        UsageError: there is not.
    """
    if ranks < 2:
        raise UsageError(f"a tensor-parallel group of {ranks} shares nothing: give at least 2 ranks")


class ShardedStage:
    """A stage and the forms that were chosen for it."""

    def __init__(self, stage: TracedStage, choice: Choice, ranks: int) -> None:
        self.stage, self.choice, self.ranks = stage, choice, ranks
        self._steps = Steps(stage, choice)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """What the ranks do together for one microbatch, for those who price it."""
        return tuple(self._steps.collectives)

    @cached_property
    def digest(self) -> str:
        """Equal where ranks have made the same choice."""
        ways = ((node.name, way.result, [*way.operands.values()]) for node, way in self.choice.ways.items())
        homes = ((node.name, form) for node, form in self.choice.home.items() if is_stored(node))
        return hashlib.sha256(repr((self.ranks, *ways, *homes)).encode()).hexdigest()

    @cached_property
    def shares(self) -> Shares:
        """What share of bytes and operations is divided, and what keeps the rest whole."""
        return shares(self.stage, self.choice, self.ranks)

    def rank(self, group: Collectives) -> RankStage:
        """The layers of the rank whose end of the group this is."""
        *layers, loss = self.layers(group, range(len(self.stage.layers) + 1), self.tensors(group.rank))
        criterion = loss.module if self.stage.has_loss else None
        assert criterion is None or isinstance(criterion, GraphLayer)
        return RankStage(layers=tuple(layers), criterion=criterion, shards=self.shards(group.rank))

    def layers(self, group: Collectives, numbers: Iterable[int], tensors: RankTensors) -> list[ChainLayer]:
        """Some layers of the rank whose end of the group this is, with its part of `tensors`; behind the last stands
        the loss.
        """
        loss = ChainLayer("loss", nn.Module(), autocast=self.stage.layers[-1].autocast)
        whole = (*self.stage.layers, loss)
        return [tensors.layer(whole[n], self.codes[n], group) if n < len(self.codes) else loss for n in numbers]

    def tensors(self, rank: int, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> RankTensors:
        """A rank's part of what `whole` says for every tensor of the stage, by default the tensor itself."""
        return RankTensors(self.stage, self.choice.home, rank, self.ranks, whole)

    def shards(self, rank: int) -> dict[str, Shard]:
        """What a rank has of every tensor of the whole stage's state dict, by the names in the model."""
        tensors = self.tensors(rank)
        return {
            original: tensors.shard(tensor, original)
            for layer in self.stage.layers
            for local, tensor in tensors_of(layer.module)
            if (original := layer.originals.get(local)) is not None
        }

    def form(self, tensor: Tensor) -> Form:
        """The form in which the ranks have a parameter or buffer of the whole layers."""
        return self.tensors(0).forms.get(id(tensor), R)

    @property
    def into_loss(self) -> int:
        """How many values the last layer hands to the loss."""
        return len(self._handed_on[-1])

    @cached_property
    def _handed_on(self) -> list[list[Key]]:
        """What each layer hands to the next, or to the loss."""
        return crossing(self._steps, self._arriving[0], len(self.stage.layers) + self.stage.has_loss - 1)

    @property
    def _arriving(self) -> tuple[list[Key], list[Key]]:
        """The inputs of the stage, and the targets."""
        every = [Key(node, R) for node in self.stage.inputs]
        values = len(every) - self.stage.targets
        return every[:values], every[values:]

    @cached_property
    def codes(self) -> list[LayerCode]:
        """The code of every layer, and of the loss behind them."""
        steps, stage = self._steps, self.stage
        values, targets = self._arriving
        arriving, leaving = [values, *self._handed_on], [*self._handed_on, steps.outputs]
        if stage.has_loss:
            arriving[-1] = [*arriving[-1], *targets]
        return [write(stage, steps.all, n, arriving[n], leaving[n]) for n in range(len(arriving))]
