"""The cost rules of `mpress` and the decisions of `joint`, against the paper's table of six tensors."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipefit
from pipefit.capture import Task
from pipefit.planner import Question, joint, solved
from pipefit.planner.baselines.mpress import Technique, TensorCosts, mpress_choice
from pipefit.planner.memory_choices import Menus, Recipe
from pipefit.schema.decisions import Decision, Run, What
from pipefit.schema.layer_costs import Origin
from pipefit.simulator import Simulation
from support.synthetic_models import layer, measurement, profile, training, value, work
from support.tight_questions import INPUT, cluster

# MB; in ms: live interval, recomputation, round trips to the host and over four lanes of NVLink; the choice
PAPER = {
    "t1": (216, 78, 4, 42, 6, "host"),
    "t2": (115, 16, 3, 22, 3, "peers"),
    "t3": (216, 2, 4, 42, 6, "recompute"),
    "t4": (384, 214, 8, 74, 9, "host"),
    "t5": (384, 50, 8, 74, 9, "peers"),
    "t6": (1152, 12, 14, 222, 27, "recompute"),
}
STAGES, FORWARD = 5, 0.8  # the forward's share of a stage's seconds: copies have time at the start of a step
FULL = {"t1"}  # their peers have no spare memory


def costs_of(megabytes: int, interval: float, recompute: float, host: float, peer: float) -> TensorCosts:
    """Convert times in milliseconds to costs."""
    return TensorCosts(
        nbytes=megabytes * 10**6,
        interval_seconds=interval / 1e3,
        recompute_seconds=recompute / 1e3,
        host_seconds=host / 1e3,
        peer_seconds=peer / 1e3,
    )


@pytest.mark.parametrize("name", PAPER)
def test_the_rule_of_mpress_chooses_as_the_paper_does(name: str) -> None:
    """The rule picks the paper's choice for each tensor, from its times."""
    assert mpress_choice(costs_of(*PAPER[name][:-1])) == PAPER[name][-1]


@pytest.mark.parametrize("name", PAPER)
def test_the_rates_of_the_machine_give_the_same_choices(name: str) -> None:
    """Round trips at 10.4 GB/s to the host and 72 GB/s to peers, the rates of the table's first tensor, give
    the same choices.
    """
    megabytes, interval, recompute, _, _, choice = PAPER[name]
    assert (
        mpress_choice(costs_of(megabytes, interval, recompute, 2 * megabytes / 10.4, 2 * megabytes / 72))
        == choice
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PAPER)
def test_the_joint_planner_decides_so(name: str) -> None:
    """In a pipeline with the tensor's live interval, `joint` makes just the table's decision.

    For the first tensor the host link carries 21 ms in every 19.5 ms, as each microbatch moves: peers are 7 %
    faster if they have room; otherwise the host is right.
    """
    assert decided(*PAPER[name][:-1], spare=name not in FULL) == {PAPER[name][-1]}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [name for name in PAPER if PAPER[name][-1] != "recompute"])
def test_the_joint_planner_decides_by_the_costs(name: str) -> None:
    """An offloaded tensor is recomputed over links thirty times slower; one on peers goes to a host that is
    ten times faster when peers have no room.
    """
    megabytes, interval, recompute, host, peer, choice = PAPER[name]
    assert decided(megabytes, interval, recompute, 30 * host, 30 * peer) == {"recompute"}
    if choice == "peers":
        assert decided(megabytes, interval, recompute, host / 10, peer, spare=False) == {"host"}


def decided(
    megabytes: int, interval: float, recompute: float, host: float, peer: float, *, spare: bool = True
) -> set[str]:
    """Return the decision of `joint` in a pipeline of five equal stages, one with a layer that keeps the
    tensor.

    A tensor with a backward sooner than its layer can be recomputed is on the last stage, next to a layer
    whose forward needs the room. Others are on the first stage: their live interval is four forwards and
    backwards of a stage, and its device lacks half of one of five tensors. Milliseconds count as seconds;
    over links to its four peers together a device has the rate of the table.
    """
    last = interval < recompute
    each = interval + recompute if last else interval / (STAGES - 1)
    nbytes, forward = megabytes * 1000, max(recompute, FORWARD * each)
    keeps = layer(
        (value(1),),
        (value(1),),
        storages=(1, nbytes),
        saved=(INPUT, Origin(kind="own", index=1)),
        works=(work(recompute), work(0.0), work(0.0)),
    )
    passes = work(forward - recompute), work(each - forward), work(0.0)
    fills = layer((value(1),), (value(1),), scratch_bytes=nbytes if last else 0, works=passes)
    taken = 0 if spare else (STAGES - 1) * nbytes
    passes = work(forward), work(each - forward), work(0.0)
    other = layer((value(1),), (value(1),), scratch_bytes=taken, works=passes)
    others, own = [other] * (STAGES - 1), [keeps, fills]
    loss = layer((value(1), value(1)), (value(4),), seconds=0.0)
    of = measurement([*others, *own] if last else [*own, *others], loss)
    chain = profile(of, blocks=[1] * (STAGES - 1) + [2] if last else [2] + [1] * (STAGES - 1))
    budget = round((1.5 if last else STAGES - 0.5) * nbytes) + 1000
    there = cluster(
        [budget] * STAGES, host_rate=2 * nbytes / host, peer_rate=2 * nbytes / peer / (STAGES - 1)
    )
    question = Question(profile=chain, cluster=there, training=training("1f1b", 20))
    found = solved(question, joint, name="joint").decisions
    places = {"host" if "host" in str(d.place) else "peers" for d in found if d.what is What.OFFLOAD}
    return places | {d.what.value for d in found if d.what is not What.OFFLOAD}


@pytest.mark.parametrize("seed", range(50))
def test_mpress_never_adds_more_than_any_technique(seed: int) -> None:
    """The rule's choice adds the least time of all available techniques."""
    rng = Random(seed)
    seconds = [rng.choice((None, rng.randrange(10))) for _ in range(3)]
    seconds = seconds if any(s is not None for s in seconds) else [1, None, None]
    interval = rng.randrange(10)
    costs = TensorCosts(
        nbytes=1, interval_seconds=interval, recompute_seconds=seconds[0], host_seconds=seconds[1],
        peer_seconds=seconds[2],
    )  # fmt: skip
    by_hand = {"recompute": seconds[0]} | {
        name: None if s is None else max(0, s - interval)
        for name, s in (("host", seconds[1]), ("peers", seconds[2]))
    }
    added = by_hand[mpress_choice(costs).value]
    assert added is not None and added == min(s for s in by_hand.values() if s is not None)


def test_peers_are_not_taken_for_nothing() -> None:
    """Peers that add no less than recomputation leave their memory to others."""
    costs = TensorCosts(nbytes=1, interval_seconds=0.0, recompute_seconds=0.004, peer_seconds=0.004)
    assert mpress_choice(costs) is Technique.RECOMPUTE


class Adapted(nn.Module):
    """A frozen layer with a trained adapter: autograd does not save the input of the layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Gated(nn.Module):
    """A gated block of such layers after a frozen norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8).requires_grad_(False)
        self.one, self.gate, self.two = Adapted(8, 32), Adapted(8, 32), Adapted(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.two(F.silu(self.gate(y)) * self.one(y))


class Stack(nn.Module):
    """Four such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.last = nn.ModuleList(Gated() for _ in range(4)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return self.last(x)


def test_a_recipe_frees_the_bytes_that_the_simulator_says() -> None:
    """Each recipe of an inner block lets every microbatch in flight hold as many bytes less as it says."""
    task = Task(Stack(), batch=lambda n: (torch.randn(n, 8), torch.randn(n, 8)), loss=F.mse_loss)
    asked = {"microbatches": 4, "schedule": "gpipe", "recompute": "never"}
    plan = pipefit.plan(pipefit.profile(task, microbatch_size=32), "emulated:1x64MiB", **asked)

    def held(recipe: Recipe) -> int:
        decisions = tuple(
            Decision(stage=0, subject=Run(start=a, stop=b), what=What.RECOMPUTE) for a, b in recipe.runs
        )
        peaks = [
            Simulation(
                replace(
                    plan,
                    training=replace(plan.training, microbatches=count, batch_size=32 * count),
                    decisions=decisions,
                )
            ).peak_bytes[0]
            for count in (4, 5)
        ]
        return peaks[1] - peaks[0]

    menus = Menus(Question(profile=plan.profile, cluster=plan.cluster, training=plan.training)).blocks[1:3]
    recipes = [recipe for menu in menus for recipe in menu.recipes[1:]]
    assert len(recipes) >= 2
    assert [recipe.nbytes for recipe in recipes] == [held(Recipe()) - held(recipe) for recipe in recipes]
