"""A stage of a chain for the ranks of a tensor-parallel group: planned once, then written for every rank.

`shard_stage` decides for all ranks; `ShardedStage.rank` makes the layers of one. A rank has the same number
of layers, with the same names. Its parameters and buffers have the same names too, and are the parts given by
their `TensorShard`. Inputs and outputs of the stage are replicated. Ranks that plan independently compare
their `digest`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipefit.capture import Chain, ChainLayer, GraphLayer, Tree, Values, as_values, operator_name, value
from pipefit.errors import UsageError
from pipefit.schema.profile import Shares, Whole
from pipefit.tensor_parallel.collectives import Collectives
from pipefit.tensor_parallel.forms import DimSplit, Form, R, TensorShard, divides, local_shape
from pipefit.tensor_parallel.operations import flops, nbytes, shape
from pipefit.tensor_parallel.rules import rule_of
from pipefit.tensor_parallel.search import SEQUENCES, ChosenForms, Prices, choose
from pipefit.tensor_parallel.tracing import TracedStage, blocks_begin, is_stored, trace
from pipefit.tensor_parallel.writing import (
    Key,
    LayerCode,
    RankTensors,
    Steps,
    WrittenCollective,
    crossing,
    tensors_of,
    write,
)

# ---- Divided shares of a stage, and reasons for which the rest stays whole

_MOST = 8  # entries about operations that stay whole, at most


def shares(stage: TracedStage, choice: ChosenForms, ranks: int) -> Shares:
    """Return the shares of a stage in the chosen forms."""
    sizes = {n: nbytes(n) for n in choice.home if is_stored(n) and isinstance(stage.tensor(n), nn.Parameter)}
    divided = {node for node in sizes if isinstance(choice.home[node], DimSplit)}
    counts = {node: flops(node) for node in choice.ways}
    every = [_whole(stage, choice, node, ranks) for node, way in choice.ways.items() if not way.divides]
    return Shares(
        ranks=ranks,
        parameter_bytes=sum(sizes.values()),
        divided_bytes=sum(sizes[node] for node in divided),
        rank_bytes=sum(_of_rank(node, choice, ranks) for node in sizes),
        flops=sum(counts.values()),
        divided_flops=sum(counts[node] for node, way in choice.ways.items() if way.divides),
        whole=tuple(
            sorted((each for each in every if each.parameter_bytes or each.flops), key=_size)[:_MOST]
        ),
    )


def _size(each: Whole) -> tuple[int, int]:
    return -each.parameter_bytes, -each.flops


def _of_rank(node: fx.Node, choice: ChosenForms, ranks: int) -> int:
    return math.prod(local_shape(shape(node), choice.home[node], ranks)) * int(value(node).element_size())


def _whole(stage: TracedStage, choice: ChosenForms, node: fx.Node, ranks: int) -> Whole:
    parameters = [
        n for n in node.all_input_nodes if is_stored(n) and isinstance(stage.tensor(n), nn.Parameter)
    ]
    number = stage.layer_of[node]
    return Whole(
        layer=stage.layers[number].name if number < len(stage.layers) else "the loss",
        operator=operator_name(node),
        parameter_bytes=sum(map(nbytes, parameters)),
        flops=flops(node),
        reason=_reason(choice, node, ranks),
    )


def _reason(choice: ChosenForms, node: fx.Node, ranks: int) -> str:
    if rule_of(node) is None:
        return "this operator is not supported"
    if not choice.changed.isdisjoint((node, *node.all_input_nodes)):
        return "it shares memory with a tensor that is changed in place"
    if choice.options[node] == 1:
        return f"its result {shape(node)} cannot be split into {ranks} parts that later operations can use"
    return "sharding would cost more in communication than it saves"


# ---- A sharded stage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStage:
    """The layers of one rank, the loss after them if the stage has it, and its shards by name.

    The loss takes the last layer's values, in the forms that the loss needs, and the targets. `shards` has
    every name of the whole stage's state dict.
    """

    layers: tuple[ChainLayer, ...]
    criterion: GraphLayer | None
    shards: Mapping[str, TensorShard]

    def __call__(self, values: Values, targets: Values = ()) -> Values:
        """Return the stage's outputs for its inputs, or the loss."""
        for layer in self.layers:
            values = layer(values)
        return values if self.criterion is None else self.loss(values, targets)

    def loss(self, values: Values, targets: Values) -> Values:
        """Return the loss of the last layer's values."""
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
    """Divide the layers of a stage between `ranks`, for inputs like `values`.

    With `chain` the stage is its last, and the loss of outputs and `targets` is divided too. Tensors may be
    fake: only their shapes and dtypes matter. The inputs of the first stage, `is_first`, need no gradient.
    With `sequences`, values between attention and MLP may be divided along positions (sequence parallelism),
    which saves memory and sends more.

    Raises:
        UsageError: fewer than two ranks, or a layer that cannot be traced.
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
        raise UsageError(f"a tensor-parallel group of {ranks} cannot shard anything: give at least 2 ranks")


class ShardedStage:
    """A stage and the forms chosen for it."""

    def __init__(self, stage: TracedStage, choice: ChosenForms, ranks: int) -> None:
        self.stage, self.choice, self.ranks = stage, choice, ranks
        self._steps = Steps(stage, choice)

    @property
    def collectives(self) -> tuple[WrittenCollective, ...]:
        """The collectives of one microbatch, for cost estimates."""
        return tuple(self._steps.collectives)

    @cached_property
    def digest(self) -> str:
        """A digest that is equal for ranks that made the same choice."""
        ways = ((node.name, way.result, [*way.operands.values()]) for node, way in self.choice.ways.items())
        homes = ((node.name, form) for node, form in self.choice.home.items() if is_stored(node))
        return hashlib.sha256(repr((self.ranks, *ways, *homes)).encode()).hexdigest()

    @cached_property
    def shares(self) -> Shares:
        """Divided shares of bytes and operations, and the reasons for which the rest stays whole."""
        return shares(self.stage, self.choice, self.ranks)

    def rank(self, group: Collectives) -> RankStage:
        """Return the layers of the rank that `group` belongs to."""
        *layers, loss = self.layers(group, range(len(self.stage.layers) + 1), self.tensors(group.rank))
        criterion = loss.module if self.stage.has_loss else None
        assert criterion is None or isinstance(criterion, GraphLayer)
        return RankStage(layers=tuple(layers), criterion=criterion, shards=self.shards(group.rank))

    def layers(self, group: Collectives, numbers: Iterable[int], tensors: RankTensors) -> list[ChainLayer]:
        """Return some layers of the rank that `group` belongs to, with its `tensors`; the loss is the
        last.
        """
        loss = ChainLayer("loss", nn.Module(), autocast=self.stage.layers[-1].autocast)
        whole = (*self.stage.layers, loss)
        return [
            tensors.layer(whole[n], self.codes[n], group) if n < len(self.codes) else loss for n in numbers
        ]

    def tensors(self, rank: int, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> RankTensors:
        """Return a rank's part of `whole(tensor)` for every tensor of the stage, by default of the tensor."""
        return RankTensors(self.stage, self.choice.home, rank, self.ranks, whole)

    def shards(self, rank: int) -> dict[str, TensorShard]:
        """Return a rank's shard of every tensor of the whole stage's state dict, by its name in the model."""
        tensors = self.tensors(rank)
        return {
            original: tensors.shard(tensor, original)
            for layer in self.stage.layers
            for local, tensor in tensors_of(layer.module)
            if (original := layer.originals.get(local)) is not None
        }

    def form(self, tensor: Tensor) -> Form:
        """Return the form in which the ranks hold a parameter or buffer of the whole layers."""
        return self._forms.get(id(tensor), R)

    @cached_property
    def _forms(self) -> Mapping[int, Form]:
        """The forms of all tensors that are not whole on every rank."""
        return self.tensors(0).forms

    @property
    def into_loss(self) -> int:
        """Number of values that the last layer passes to the loss."""
        return len(self._handed_on[-1])

    @cached_property
    def _handed_on(self) -> list[list[Key]]:
        """Values that each layer passes to the next, or to the loss."""
        return crossing(self._steps, self._arriving[0], len(self.stage.layers) + self.stage.has_loss - 1)

    @property
    def _arriving(self) -> tuple[list[Key], list[Key]]:
        """The inputs of the stage, and the targets."""
        every = [Key(node, R) for node in self.stage.inputs]
        values = len(every) - self.stage.targets
        return every[:values], every[values:]

    @cached_property
    def codes(self) -> list[LayerCode]:
        """The code of every layer, and of the loss after them."""
        steps, stage = self._steps, self.stage
        values, targets = self._arriving
        arriving, leaving = [values, *self._handed_on], [*self._handed_on, steps.outputs]
        if stage.has_loss:
            arriving[-1] = [*arriving[-1], *targets]
        return [write(stage, steps.all, n, arriving[n], leaving[n]) for n in range(len(arriving))]


# ---- A sharded chain: a rank's part is an ordinary chain
#
# Values that cross from block to block are replicated, in the order and form in which the whole chain passes
# them on. So the division of layers does not depend on where stages end, costs of layers add up, a stage of a
# rank is a range of its layers, and stages of other degrees accept its messages. A parameter that several
# layers share is divided in one way.


def trace_chain(chain: Chain, values: Values, targets: Values = ()) -> TracedStage:
    """Return the graph of a chain, which `shard_traced` divides for any number of ranks; see
    `shard_chain`.
    """
    edges = blocks_begin(chain)
    return trace(chain.layers, values, chain=chain, targets=targets, is_first=True, edges=edges)


def shard_chain(
    chain: Chain,
    ranks: int,
    values: Values,
    targets: Values = (),
    *,
    sequences: bool = False,
    prices: Prices | None = None,
    like: ShardedChain | None = None,
) -> ShardedChain:
    """Divide the layers of a chain and its loss between `ranks`, for inputs and targets like these.

    Only shapes and dtypes of tensors matter; tensors may be fake. With `like`, a sharded chain of the same
    model for another number of samples or another mode, parameters and buffers are divided as in `like`. With
    `sequences`, norms and values between attention and MLP are divided along positions (sequence
    parallelism), which saves memory and sends more; parameters and buffers are divided as without it.

    Raises:
        UsageError: fewer than two ranks, or a layer that cannot be traced.
    """
    check_ranks(ranks)
    traced = trace_chain(chain, values, targets)
    return shard_traced(chain, traced, ranks, sequences=sequences, prices=prices, like=like)


def shard_traced(
    chain: Chain,
    traced: TracedStage,
    ranks: int,
    *,
    sequences: bool = False,
    prices: Prices | None = None,
    like: ShardedChain | None = None,
) -> ShardedChain:
    """Divide a chain that `trace_chain` has traced; see `shard_chain`."""
    check_ranks(ranks)
    if sequences and like is None:
        like = shard_traced(chain, traced, ranks, prices=prices)
    given = {} if like is None else _given(chain, traced, like)
    prices = prices or (SEQUENCES if sequences else Prices())
    choice = choose(traced, ranks, prices, sequences=sequences, given=given)
    return ShardedChain(chain, ShardedStage(traced, choice, ranks), sequences=sequences)


class ShardedChain:
    """A chain and the division of its layers among ranks."""

    def __init__(self, chain: Chain, stage: ShardedStage, *, sequences: bool = False) -> None:
        self.chain, self.stage, self.sequences = chain, stage, sequences

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.stage.ranks

    @property
    def collectives(self) -> tuple[WrittenCollective, ...]:
        """The collectives of one microbatch, by layer and direction; the loss follows the last layer."""
        return self.stage.collectives

    @property
    def digest(self) -> str:
        """A digest that is equal for ranks that made the same choice."""
        return self.stage.digest

    @property
    def shares(self) -> Shares:
        """Divided shares of bytes and operations, and the reasons for which the rest stays whole."""
        return self.stage.shares

    def rank(self, group: Collectives) -> Chain:
        """Return the chain of the rank that `group` belongs to: layers of equal names, and the rank's
        loss.
        """
        rank_stage, chain = self.stage.rank(group), self.chain
        if rank_stage.criterion is None:
            return replace(chain, layers=rank_stage.layers, packing="bare")
        return replace(
            chain,
            layers=rank_stage.layers,
            outputs=_tree(self.stage.into_loss),
            criterion=RankLoss(module=rank_stage.criterion, targets=chain.targets),
            packing="bare",
        )

    def shards(self, rank: int) -> dict[str, TensorShard]:
        """Return a rank's shard of every tensor in the layers' state dicts, by its name in the model."""
        return self.stage.shards(rank)

    def of_copy(self, chain: Chain) -> ShardedChain | None:
        """Return the same division of a copy of the chain; None if the chain holds constants."""
        stage = self.stage.stage.of_copy(chain)
        if stage is None:
            return None
        return ShardedChain(
            chain, ShardedStage(stage, self.stage.choice, self.ranks), sequences=self.sequences
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoss:
    """The loss of a rank's chain: takes the last layer's values, in the forms that it needs, and the
    targets.
    """

    module: GraphLayer
    targets: Tree | None

    def __call__(self, outputs: Sequence[Tensor], wanted: Any) -> Tensor:
        given = () if self.targets is None else self.targets.flatten(wanted)
        return as_values(self.module((*outputs, *given)), "the loss")[0]


def _tree(count: int) -> Tree:
    """Return the structure of a tuple of `count` tensors."""
    return Tree.of("the outputs", tuple(torch.empty(0) for _ in range(count)))


def _given(chain: Chain, traced: TracedStage, like: ShardedChain) -> Mapping[fx.Node, Form]:
    """Return the forms of parameters and buffers in `like`, whose layers have the same names for them."""
    forms: dict[int, Form] = {}
    for layer, other in zip(chain.layers, like.chain.layers, strict=True):
        known = dict(tensors_of(other.module))
        forms |= {
            id(t): like.stage.form(known[name]) for name, t in tensors_of(layer.module) if name in known
        }
    stored = {node: traced.tensor(node) for node in traced.graph.nodes if is_stored(node)}
    result = {node: (forms[id(tensor)], tensor) for node, tensor in stored.items() if id(tensor) in forms}
    return {
        node: form
        for node, (form, tensor) in result.items()
        if not isinstance(form, DimSplit) or divides(tensor.shape, form, like.ranks)
    }
