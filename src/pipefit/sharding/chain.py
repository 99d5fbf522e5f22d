"""A whole chain for the ranks of a tensor-parallel group: a rank's part of it is an ordinary chain.

What crosses from block to block is whole on every rank, in the order and form in which the whole chain hands it on. So
how layers are divided does not depend on where stages end, costs of layers add up, a stage of a rank is a range of its
layers, and stages of other degrees take what it sends. A parameter that several layers share is divided in one way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from pipefit.capture.chain import Chain, as_values
from pipefit.capture.graph_layer import GraphLayer
from pipefit.capture.structure import Tree, Values
from pipefit.sharding.collectives import Collectives
from pipefit.sharding.forms import Form, Split, divides
from pipefit.sharding.prices import SEQUENCES, Prices
from pipefit.sharding.search import choose
from pipefit.sharding.shards import Shard
from pipefit.sharding.stage import ShardedStage, check_ranks
from pipefit.sharding.steps import Collective
from pipefit.sharding.tracing import TracedStage, blocks_begin, is_stored, trace
from pipefit.sharding.writing import tensors_of
from pipefit.tensor_shares import Shares


def trace_chain(chain: Chain, values: Values, targets: Values = ()) -> TracedStage:
    """The graph of a chain, from which `shard_traced` makes one for any number of ranks; see `shard_chain`."""
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
    """How `ranks` share the layers of a chain and its loss, for inputs like `values` and targets like `targets`.

    Only shapes and types of tensors count, which may be fake. With `like`, a sharded chain of the same model for
    another number of samples or another mode, parameters and buffers are divided as there. By `sequences`, norms and
    what is between attention and MLP are divided along positions (sequence parallelism), so that less is kept and more
    is sent; parameters and buffers are divided as without it.

    Raises:
        UsageError: fewer than two ranks, or a layer that cannot be followed.
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
    """As `shard_chain`, of a chain that `trace_chain` has traced."""
    check_ranks(ranks)
    if sequences and like is None:
        like = shard_traced(chain, traced, ranks, prices=prices)
    given = {} if like is None else _given(chain, traced, like)
    prices = prices or (SEQUENCES if sequences else Prices())
    choice = choose(traced, ranks, prices, sequences=sequences, given=given)
    return ShardedChain(chain, ShardedStage(traced, choice, ranks), sequences=sequences)


class ShardedChain:
    """A chain and how its layers are divided among ranks."""

    def __init__(self, chain: Chain, stage: ShardedStage, *, sequences: bool = False) -> None:
        self.chain, self.stage, self.sequences = chain, stage, sequences

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.stage.ranks

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """What the ranks do together for one microbatch, by layer and direction; the loss is behind the last layer."""
        return self.stage.collectives

    @property
    def digest(self) -> str:
        """Equal where ranks have made the same choice."""
        return self.stage.digest

    @property
    def shares(self) -> Shares:
        """What share of bytes and operations is divided, and what keeps the rest whole."""
        return self.stage.shares

    def rank(self, group: Collectives) -> Chain:
        """The chain of the rank whose end of the group this is: layers of the same names, and its own loss."""
        made, chain = self.stage.rank(group), self.chain
        if made.criterion is None:
            return replace(chain, layers=made.layers, packing="bare")
        return replace(
            chain,
            layers=made.layers,
            outputs=_tree(self.stage.into_loss),
            criterion=RankLoss(module=made.criterion, targets=chain.targets),
            packing="bare",
        )

    def shards(self, rank: int) -> dict[str, Shard]:
        """What a rank has of every tensor of the model's state dict that the layers hold, by the names in the model."""
        return self.stage.shards(rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoss:
    """The loss of a rank's chain: of the last layer's values, in the forms that it needs, and the targets."""

    module: GraphLayer
    targets: Tree | None

    def __call__(self, outputs: Sequence[Tensor], wanted: Any) -> Tensor:
        given = () if self.targets is None else self.targets.flatten(wanted)
        return as_values(self.module((*outputs, *given)), "the loss")[0]


def _tree(count: int) -> Tree:
    """The shape of a tuple of so many tensors."""
    return Tree.of("the outputs", tuple(torch.empty(0) for _ in range(count)))


def _given(chain: Chain, traced: TracedStage, like: ShardedChain) -> Mapping[fx.Node, Form]:
    """The forms of parameters and buffers as they are in `like`, whose layers have the same names for them."""
    forms: dict[int, Form] = {}
    for layer, other in zip(chain.layers, like.chain.layers, strict=True):
        known = dict(tensors_of(other.module))
        forms |= {id(t): like.stage.form(known[name]) for name, t in tensors_of(layer.module) if name in known}
    stored = {node: traced.tensor(node) for node in traced.graph.nodes if is_stored(node)}
    found = {node: (forms[id(tensor)], tensor) for node, tensor in stored.items() if id(tensor) in forms}
    return {
        node: form
        for node, (form, tensor) in found.items()
        if not isinstance(form, Split) or divides(tensor.shape, form, like.ranks)
    }
