"""A tensor-parallel rank's chain: numbers, and values between blocks, equal the whole chain's."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Chain, Task, capture
from pipefit.capture.chain import ChainLayer, as_values, packing_of
from pipefit.capture.random_state import seed_torch
from pipefit.capture.storages import contiguous, orders_of
from pipefit.models import build
from pipefit.tensor_parallel import LockstepCollectives, ShardedChain, assembled, in_lockstep, shard_chain
from pipefit.tensor_parallel.tracing import blocks_begin
from support.gallery_samples import sampled
from support.ranks_and_whole import CHEAP, DEAR, Case, InDouble, Listening

Values = tuple[Tensor, ...]


class Apart(nn.Module):
    """A layer that returns a list of a transposed value, a part of it, and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> list[Tensor]:
        made = self.linear(x)
        return [made.transpose(1, 2), made[..., ::2], x]


class Together(nn.Module):
    """A layer that uses two of the values of `Apart`, changes one in place, and returns its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 8)

    def forward(self, values: Sequence[Tensor]) -> Values:
        turned, _, x = values
        inner = torch.relu_(self.up(turned.transpose(1, 2)))
        return self.down(inner), torch.tanh_(x * 2), self.down.weight


class Last(nn.Module):
    """A layer that uses a parameter of the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 8)

    def forward(self, values: Values) -> Tensor:
        x, y, weight = values
        return self.head(F.linear(x + y, weight.T))


def by_hand() -> Task:
    """Return a task with a chain of layers that return unusual values."""
    model = nn.Sequential(nn.Linear(8, 8), Apart(), Together(), Last())
    return Task(
        model,
        batch=lambda n: (torch.randn(n, 4, 8), torch.randn(n, 4, 8)),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
    )


def in_place() -> Task:
    """Return a task with a chain of whole layers that change the values of the layers before in place."""
    model = nn.Sequential(
        *(
            nn.Linear(8, 32),
            nn.SiLU(inplace=True),
            nn.Linear(32, 8),
            nn.Unflatten(-1, (2, 4)),
            nn.ReLU(inplace=True),
        ),
        *(nn.Flatten(), nn.Hardtanh(-0.5, 0.5, inplace=True), nn.Dropout(0.2, inplace=True), nn.Linear(8, 4)),
        nn.ELU(inplace=True),
    )
    return Task(
        model,
        batch=lambda n: (torch.randn(n, 8), torch.randn(n, 4)),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
    )


MODELS: dict[str, Callable[[], Task]] = {
    "gpt": lambda: build(
        "gpt", layers=2, hidden=16, heads=2, vocabulary=11, sequence=8, dropout=0.1, tied=True
    ),
    "bert": lambda: build("bert", layers=2, hidden=16, heads=2, vocabulary=12, sequence=8, dropout=0.0),
    "mlp": lambda: build("mlp", widths=(16, 32, 16), inputs=8, classes=4),
    "unet": lambda: build("unet", depth=1, width=4, convolutions=1, image_size=8, dropout=0.0),
    "by hand": by_hand,
    "in place": in_place,
}


def captured(case: Case) -> tuple[Chain, Values, Values]:
    """Return a chain of the case's module, and its flat inputs and targets."""
    task = Task(copy.deepcopy(case.module), batch=case.task.batch, loss=case.task.loss, name=case.task.name)
    with InDouble():
        chain = capture(task, case.inputs, case.targets)
    return chain, chain.flatten(case.inputs), chain.flatten_targets(case.targets)


def divided(
    chain: Chain, ranks: int, values: Values, targets: Values, like: ShardedChain | None = None
) -> ShardedChain:
    """Return the chain, divided as far as possible, in double precision."""
    with InDouble():
        return shard_chain(chain, ranks, values, targets, prices=CHEAP, like=like)


def leaves(values: Values) -> Values:
    """Return copies of values that need a gradient if the originals do."""
    return tuple(v.detach().clone().requires_grad_(v.requires_grad) for v in values)


def arrived(received: Values) -> Values:
    """Return copies of received leaves, which a stage may change in place."""
    return tuple(v.clone() for v in received)


def settled(chain: Chain, values: Values) -> Chain:
    """Return the chain with the layouts of values between layers, as a profile finds them by running every
    layer once.
    """
    layers: list[ChainLayer] = []
    packing, orders = chain.layers[0].packing, ()
    for number, before in enumerate(chain.layers):
        is_last, layer = number + 1 == len(chain.layers), replace(before, packing=packing, orders=orders)
        outputs = layer.outputs(arrived(leaves(values)))
        packing, found = packing_of(outputs), as_values(outputs, layer.name)
        orders = () if is_last else orders_of(found)
        layers.append(replace(layer, leaves=None if is_last else orders))
        values = found if is_last else contiguous(found, orders)
    return replace(chain, layers=tuple(layers), packing=packing)


class Crossed(NamedTuple):
    """Values between blocks: their shapes, strides, dtypes, and whether they need a gradient."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


def stages(chains: Sequence[Chain], values: Values, targets: Values) -> tuple[float, list[list[Crossed]]]:
    """Return the loss through one stage a block, taken from the chains in turn, and the values between
    blocks.

    Stages receive their own leaves, as on separate devices, and gradients are passed back explicitly.
    """
    edges = [0, *blocks_begin(chains[0]), len(chains[0].layers)]
    sent: list[Values] = []
    received: list[Values] = []
    with InDouble():
        for number, (start, stop) in enumerate(pairwise(edges)):
            chain = chains[number % len(chains)]
            for layer in chain.layers[start:stop]:
                values = layer(values)
            if stop < len(chain.layers):
                sent.append(values)
                received.append(leaves(values))
                values = arrived(received[-1])
        loss = chain.loss(values, targets)
    loss.backward()
    for gone, come in zip(reversed(sent), reversed(received), strict=True):
        pairs = [(v, r.grad) for v, r in zip(gone, come, strict=True) if r.grad is not None]
        torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs])
    return float(loss.detach()), [
        [Crossed(tuple(v.shape), v.stride(), v.dtype, v.requires_grad) for v in values] for values in sent
    ]


def gradients(chain: Chain) -> dict[str, Tensor]:
    """Return the gradients of all parameters by their names in the model."""
    named = (
        (layer.originals.get(n), p) for layer in chain.layers for n, p in layer.module.named_parameters()
    )
    return {name: p.grad for name, p in named if name is not None and p.grad is not None}


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", sampled([2, 4], often=[4]))
@pytest.mark.parametrize("model", MODELS)
def test_stages_of_ranks_are_those_of_the_whole(model: str, ranks: int) -> None:
    """Stages of ranks, one a block, exchange the values of the whole chain, with its loss and gradients."""
    case = Case.of(MODELS[model]())
    whole, values, targets = captured(case)
    whole = settled(whole, values)
    seed_torch(1, target="cpu")
    loss, crossed = stages([whole], values, targets)
    sharded = divided(captured(case)[0], ranks, values, targets)

    def run(group: LockstepCollectives) -> tuple[float, list[list[Crossed]], dict[str, Tensor]]:
        chain = sharded.rank(group)
        assert [layer.name for layer in chain.layers] == [layer.name for layer in whole.layers]
        chain = settled(chain, values)
        seed_torch(1, target="cpu")
        return *stages([chain], values, targets), gradients(chain)

    found, expected = in_lockstep(ranks, run), gradients(whole)
    shards = [sharded.shards(rank) for rank in range(ranks)]
    assert sharded.shares.divided_bytes / sharded.shares.parameter_bytes > 0
    for one in found:
        assert one[0] == pytest.approx(loss, rel=1e-12)
        assert one[1] == crossed
        assert one[2].keys() == expected.keys()
    for name, gradient in expected.items():
        put_together = assembled([shard[name] for shard in shards], [one[2][name] for one in found])
        assert float((put_together - gradient).abs().max()) <= 1e-12 * max(
            float(gradient.abs().max()), 1e-2
        ), name


@pytest.mark.parametrize("model", ["gpt", "unet", "by hand"])
def test_stages_of_other_degrees_go_together(model: str) -> None:
    """Divided stages next to whole ones have the whole chain's loss."""
    case = Case.of(MODELS[model]())
    chain, values, targets = captured(case)
    whole = settled(chain, values)
    sharded = divided(captured(case)[0], 2, values, targets)

    def run(group: LockstepCollectives) -> float:
        rank = settled(sharded.rank(group), values)
        seed_torch(1, target="cpu")
        return stages([copy.deepcopy(whole), rank], values, targets)[0]

    again = settled(captured(case)[0], values)
    seed_torch(1, target="cpu")
    loss, _ = stages([again], values, targets)
    assert in_lockstep(2, run) == pytest.approx([loss] * 2, rel=1e-12)


def test_chains_for_other_numbers_of_samples_divide_parameters_alike() -> None:
    """Chains for one sample and for many divide parameters equally, though their cheapest forms differ."""
    case = Case.of(build("gpt", layers=1, hidden=16, heads=2, vocabulary=11, sequence=8))
    chain, values, targets = captured(case)
    many = tuple(v.repeat(64, 1) for v in values), tuple(t.repeat(64, *[1] * (t.ndim - 1)) for t in targets)
    cheap, dear = (
        shard_chain(chain, 2, values, targets, prices=CHEAP),
        shard_chain(chain, 2, *many, prices=DEAR),
    )
    assert cheap.shards(1) != dear.shards(1)
    assert shard_chain(chain, 2, *many, prices=DEAR, like=cheap).shards(1) == cheap.shards(1)
    assert shard_chain(chain, 2, values, targets, prices=CHEAP, like=dear).shards(1) == dear.shards(1)


def test_chains_that_are_divided_alike_have_one_digest() -> None:
    """Equally divided chains have equal digests, so that ranks that plan separately can compare plans."""
    chain, values, targets = captured(Case.of(MODELS["mlp"]()))
    one, other = (shard_chain(chain, 2, values, targets, prices=CHEAP) for _ in range(2))
    assert one.digest == other.digest != shard_chain(chain, 2, values, targets, prices=DEAR).digest


def test_collectives_are_said_for_their_layers() -> None:
    """The collectives reported for a layer and direction are those of the layer's separate run."""
    chain, values, targets = captured(Case.of(MODELS["gpt"]()))
    sharded = divided(chain, 2, values, targets)
    said = Counter((each.kind, each.phase, each.layer, each.nbytes) for each in sharded.collectives)

    def run(group: LockstepCollectives) -> Counter[tuple[str, str, int, int]]:
        listening = Listening(group)
        rank, given = sharded.rank(listening), values
        for number, layer in enumerate(rank.layers):
            listening.layer, listening.phase = number, "forward"
            given = tuple(v.detach().requires_grad_(v.requires_grad) for v in given)
            made = layer(given)
            listening.phase = "backward"
            torch.autograd.backward([v.sum() for v in made if v.requires_grad], retain_graph=True)
            given = made
        return listening.heard

    without_loss = Counter({key: count for key, count in said.items() if key[2] < len(chain.layers)})
    assert in_lockstep(2, run) == [without_loss] * 2
