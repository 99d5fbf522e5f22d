"""A tensor-parallel rank's stage: its layers, the reported collectives, and its part of all state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pipefit.capture import Task, capture
from pipefit.capture.graph_layer import GraphLayer
from pipefit.capture.random_state import seed_torch
from pipefit.errors import UsageError
from pipefit.models import build
from pipefit.tensor_parallel import (
    Alone,
    LockstepCollectives,
    Prices,
    ShardedStage,
    TensorShard,
    assembled,
    in_lockstep,
    shard_stage,
)
from support.clashing_names import Named
from support.ranks_and_whole import CHEAP, Listening

TOKENS = torch.arange(32).reshape(4, 8) % 11


def layers(words: int = 11) -> nn.Sequential:
    """Build a small chain with two tied layers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(words, 16),
        nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64)),
        nn.GELU(),
        nn.Linear(64, 16),
        nn.Linear(16, words, bias=False),
        nn.Flatten(0, 1),
    )
    model[4].weight = model[0].weight
    return model.double()


def task() -> Task:
    """Return the task of the chain on tokens."""
    return Task(layers(), batch=lambda size: (TOKENS[:size], TOKENS[:size].flatten()), loss=F.cross_entropy)


def whole(ranks: int = 2, prices: Prices = CHEAP) -> ShardedStage:
    """Return the stage of all layers and the loss."""
    chain = capture(task(), TOKENS, TOKENS.flatten())
    given: dict[str, Any] = {
        "chain": chain,
        "targets": (TOKENS.flatten(),),
        "is_first": True,
        "prices": prices,
    }
    return shard_stage(chain.layers, ranks, (TOKENS,), **given)


def test_layers_are_as_many_as_before_and_keep_their_names() -> None:
    """Each rank has every layer under its name, with parameters of their shards' shapes."""
    stage, chain = whole(), capture(task(), TOKENS, TOKENS.flatten())
    rank = stage.rank(Alone(rank=1, size=2))
    assert [layer.name for layer in rank.layers] == [layer.name for layer in chain.layers]
    for ours, theirs in zip(rank.layers, chain.layers, strict=True):
        assert ours.originals == theirs.originals
        assert ours.module.state_dict().keys() == theirs.module.state_dict().keys()
        for local, tensor in ours.module.state_dict().items():
            assert tuple(tensor.shape) == rank.shards[ours.originals[local]].local_shape


def test_tied_layers_share_one_part() -> None:
    """A parameter of two layers is one parameter on a rank too."""
    rank = whole().rank(Alone(rank=0, size=2))
    assert rank.layers[0].module.get_parameter("weight") is rank.layers[4].module.get_parameter("weight")


@pytest.mark.parametrize("model", [Named, lambda: nn.Sequential(nn.Linear(8, 8), Named(), nn.Linear(8, 8))])
def test_parts_of_a_model_may_have_any_names(model: Callable[[], nn.Module]) -> None:
    """A model's layers may have any names: a rank has all of them in addition to its own, and computes the
    numbers of the module.
    """
    torch.manual_seed(0)
    module, x = model().double(), torch.randn(4, 8).double()
    chain = capture(Task(module, batch=lambda size: (x[:size], x[:size]), loss=F.mse_loss), x, x)
    stage = shard_stage(chain.layers, 2, (x,), chain=chain, targets=(x,), is_first=True, prices=CHEAP)
    expected = float(F.mse_loss(module(x), x).detach())
    for loss in in_lockstep(2, lambda group: float(stage.rank(group)((x,), (x,))[0].detach())):
        assert loss == pytest.approx(expected, rel=1e-12)


def test_what_a_layer_has_beside_a_model_s_own_is_named_apart() -> None:
    """Attributes that a layer adds to a model's own avoid the names of the model."""
    (layer, *_), every = whole().rank(Alone(rank=0, size=2)).layers, nn.Module()
    assert isinstance(layer.module, GraphLayer)
    own = {*dir(layer.module)} - {*dir(every)} - {name for name, _ in layer.module.named_parameters()}
    assert {name.removeprefix("_").partition("_")[0] for name in own} == {"pipefit"}


def test_every_rank_has_the_values_between_stages_whole() -> None:
    """A stage without a loss returns the layers' whole values on every rank."""
    chain = capture(task(), TOKENS, TOKENS.flatten())
    stage = shard_stage(chain.layers[:5], 2, (TOKENS,), is_first=True, prices=CHEAP)
    expected = layers()[:5](TOKENS)
    for (found,) in in_lockstep(2, lambda group: stage.rank(group)((TOKENS,))):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stored", [0.001, 1.0, 50.0])
def test_the_collectives_that_are_said_are_those_that_happen(stored: float) -> None:
    """The reported collectives of forward and backward occur, with kind, phase and bytes, in any split."""
    chain = capture(task(), TOKENS, TOKENS.flatten())
    stage = shard_stage(chain.layers, 2, (TOKENS,), is_first=True, prices=Prices(stored=stored))
    said = Counter((each.kind, each.phase, 0, each.nbytes) for each in stage.collectives)
    assert heard(stage) == [said, said]


def test_collectives_of_positions_that_are_said_are_those_that_happen() -> None:
    """The reported collectives of a GPT block with sequence parallelism occur: reduce-scatters and
    all-gathers in both directions.
    """
    gpt = build("gpt", layers=1, hidden=16, heads=2, vocabulary=11, sequence=8, dropout=0.0)
    chain = capture(gpt, TOKENS, TOKENS)
    stage = shard_stage(chain.layers, 2, (TOKENS,), is_first=True, sequences=True, prices=Prices(stored=2.0))
    said = Counter((each.kind, each.phase, 0, each.nbytes) for each in stage.collectives)
    dealt = {(kind, phase) for kind, phase, *_ in said}
    assert {
        (kind, phase) for kind in ("reduce_scatter", "all_gather") for phase in ("forward", "backward")
    } <= dealt
    assert heard(stage) == [said, said]


def heard(stage: ShardedStage) -> list[Counter[tuple[str, str, int, int]]]:
    """Return the collectives of every rank."""

    def run(group: LockstepCollectives) -> Counter[tuple[str, str, int, int]]:
        listening = Listening(group)
        (out,) = stage.rank(listening)((TOKENS,))
        listening.phase = "backward"
        out.sum().backward()
        return listening.heard

    return in_lockstep(stage.ranks, run)


def test_two_plans_of_one_stage_are_equal_and_of_another_are_not() -> None:
    """Two plans of one stage have equal digests, and plans of another stage differ, so that ranks that plan
    separately can verify their agreement.
    """
    assert whole().digest == whole().digest != whole(3).digest


def test_training_by_ranks_is_training_of_the_whole() -> None:
    """Three steps of Adam on the parts, joined, give the parameters and state of Adam on the whole."""
    stage, steps = whole(), 3
    model = layers()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        adam.zero_grad()
        F.cross_entropy(model(TOKENS), TOKENS.flatten()).backward()
        adam.step()

    def run(group: LockstepCollectives) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        rank = stage.rank(group)
        named = {
            n: p
            for layer in rank.layers
            for local, p in layer.module.named_parameters()
            if (n := layer.originals[local])
        }
        ours = torch.optim.Adam(dict.fromkeys(named.values()), lr=0.1)
        for _ in range(steps):
            ours.zero_grad()
            rank((TOKENS,), (TOKENS.flatten(),))[0].backward()
            ours.step()
        return named, {name: ours.state[parameter] for name, parameter in named.items()}

    found = in_lockstep(2, run)
    for name, parameter in model.named_parameters():
        shards = [stage.shards(rank)[name] for rank in range(2)]
        assert torch.allclose(assembled(shards, [f[0][name] for f in found]), parameter, rtol=0, atol=1e-11)
        states = [f[1][name] for f in found]
        state = {key: assembled(shards, [one[key] for one in states]) for key in ("exp_avg", "exp_avg_sq")}
        state["step"] = states[0]["step"]
        expected = adam.state[parameter]
        assert expected.keys() == state.keys()
        assert all(torch.allclose(item, state[key], rtol=0, atol=1e-11) for key, item in expected.items())
        local = shards[1].local_state(state)
        assert all(torch.equal(item, found[1][1][name][key]) for key, item in local.items())


def test_state_that_cannot_be_divided_is_refused() -> None:
    """Optimizer state by rows of a matrix, as Adafactor's, cannot be divided and is refused."""
    shard = TensorShard(name="weight", dim=0, ranges=((0, 2),), global_shape=(4, 3))
    with pytest.raises(UsageError, match="row_var of weight"):
        shard.local_state({"row_var": torch.ones(4, 1)})


def test_the_report_says_what_is_divided_and_what_is_not() -> None:
    """The report has the divided shares of bytes and operations, and a reason for each whole value."""
    odd = Task(layers(), batch=lambda size: (TOKENS, TOKENS), loss=None)
    chain = capture(odd, TOKENS)
    shares = shard_stage(chain.layers, 5, (TOKENS,), prices=CHEAP).shares
    assert str(shares).startswith("5 tensor-parallel ranks shard ")
    assert any(
        "linear of 1 " in line and "cannot be split into 5 parts" in line for line in str(shares).splitlines()
    )
    sizes = {name: p.nbytes for name, p in layers().named_parameters()}
    assert shares.parameter_bytes == sum(sizes.values())


@pytest.mark.parametrize("ranks", [0, 1])
def test_a_group_of_one_is_refused(ranks: int) -> None:
    """A group of one rank is refused."""
    with pytest.raises(UsageError, match="at least 2 ranks"):
        whole(ranks)


class Branching(nn.Linear):
    """A layer that branches on a value, which no trace can follow; it notes whether traces record lines."""

    notes: ClassVar[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(not getattr(fx.config, "do_not_emit_stack_traces", False))
        return super().forward(x) if x.sum() > 0 else x


def test_lines_of_code_are_traced_for_a_refusal_alone() -> None:
    """A layer that cannot be traced is refused with its line of code; traces that succeed record no lines."""
    always = not hasattr(fx.config, "do_not_emit_stack_traces")
    chain = capture(replace(task(), module=nn.Sequential(Branching(8, 8))), torch.zeros(2, 8), TOKENS)
    with pytest.raises(UsageError, match=r"test_stage\.py:\d+"):
        shard_stage(chain.layers, 2, (torch.zeros(2, 8),))
    assert (Branching.notes[0], Branching.notes[-1]) == (always, True)


def test_a_divided_parameter_with_hooks_is_refused() -> None:
    """A divided parameter with a hook is refused, because the hook would see a part of the gradient."""
    model = layers()
    model[3].weight.register_hook(lambda gradient: gradient)
    chain = capture(Task(model, batch=task().batch, loss=F.cross_entropy), TOKENS, TOKENS.flatten())
    stage = shard_stage(chain.layers, 2, (TOKENS,), prices=CHEAP)
    with pytest.raises(UsageError, match="has hooks on its gradient"):
        stage.rank(Alone(rank=0, size=2))


@pytest.mark.parametrize(
    "model", [lambda: build("gpt", layers=1, hidden=16, heads=2, vocabulary=11, sequence=8)]
)
def test_mixed_precision_casts_as_the_whole_does(model: Callable[[], Task]) -> None:
    """Under autocast the loss differs by the rounding of bfloat16 alone, and values have the dtypes of the
    whole.
    """
    plain = model()
    mixed = Task(plain.build(), batch=plain.batch, loss=plain.loss, precision="mixed-bfloat16")
    inputs, targets = plain.batch(2)
    chain = capture(mixed, inputs, targets)
    stage = shard_stage(
        chain.layers, 2, (inputs,), chain=chain, targets=(targets,), is_first=True, prices=CHEAP
    )
    seed_torch(1, target="cpu")
    values: tuple[Tensor, ...] = (inputs,)
    for layer in chain.layers:
        values = layer(values)
    expected = chain.loss(values, (targets,))

    def run(group: LockstepCollectives) -> tuple[float, set[torch.dtype]]:
        seed_torch(1, target="cpu")
        rank, given = stage.rank(group), (inputs,)
        for layer in rank.layers:
            given = layer(given)
        return float(rank.loss(given, (targets,))[0].detach()), {given[-1].dtype}

    for loss, types in in_lockstep(2, run):
        assert loss == pytest.approx(float(expected), rel=1e-2)
        assert types == {torch.bfloat16}


class Cast(nn.Module):
    """A linear layer inside its own autocast, and one outside it."""

    def __init__(self, *, enabled: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.enabled = nn.Linear(16, 64), nn.Linear(64, 16), enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            inner = self.up(x)
        return self.down(inner.float().tanh())


def test_an_autocast_inside_a_model_is_entered_by_every_rank() -> None:
    """Every rank enters an autocast inside a model: a divided product has exactly the module's results, which
    differ from those without autocast.
    """
    torch.manual_seed(0)
    model, without, x = Cast(), Cast(enabled=False), torch.randn(4, 16)
    without.load_state_dict(model.state_dict())
    chain = capture(Task(model, batch=lambda size: (x, x), loss=F.mse_loss), x, x)
    stage = shard_stage(chain.layers, 2, (x,), chain=chain, targets=(x,), is_first=True, prices=CHEAP)
    assert stage.shares.divided_flops / stage.shares.flops == 1
    expected, far = (float(F.mse_loss(each(x), x).detach()) for each in (model, without))
    assert expected != pytest.approx(far, rel=1e-5)

    for loss in in_lockstep(2, lambda group: float(stage.rank(group)((x,), (x,))[0].detach())):
        assert loss == pytest.approx(expected, rel=1e-6)
