"""Stages with a parameter shared by separately run pieces, as a tied embedding and head: plain numbers and
exact peaks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.models import build
from pipefit.models.hugging_face import hf
from pipefit.runtime import Trainer, certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, What
from pipefit.schema.grids import Grid, Sharding, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import simulate
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.small_tasks import task_of
from support.step_peaks import step_peaks, too_low

SIZE, MICROBATCHES, STEPS, WIDTH = 2, 3, 2, 16
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

pytestmark = pytest.mark.usefixtures("one_thread")


class Users(nn.Module):
    """A layer with `times` products with another layer's weight, and one product with its own."""

    def __init__(self, shared: nn.Parameter, *, times: int = 1) -> None:
        super().__init__()
        self.own, self.shared, self.times = nn.Linear(WIDTH, WIDTH), shared, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(F.linear(x, self.shared))
        return self.own(x)


class Idle(nn.Linear):
    """A layer that has another layer's weight and does not use it."""

    def __init__(self, unused: nn.Parameter) -> None:
        super().__init__(WIDTH, WIDTH)
        self.unused = unused


def ends() -> list[nn.Module]:
    first, last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    last.weight = first.weight
    return [first, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), last]


def many() -> list[nn.Module]:
    first = nn.Linear(WIDTH, WIDTH)
    shared = first.weight
    return [first, Users(shared), nn.Tanh(), Users(shared, times=2), nn.Tanh(), Users(shared, times=3)]


def several_times() -> list[nn.Module]:
    last = nn.Linear(WIDTH, WIDTH)
    return [Users(last.weight, times=3), nn.Tanh(), Users(last.weight, times=2), last]


def idle() -> list[nn.Module]:
    first = nn.Linear(WIDTH, WIDTH)
    return [Idle(first.weight), first, nn.Tanh(), Idle(first.weight), Users(first.weight), Idle(first.weight)]


def language_model(name: str) -> Task:
    """Build a small language model with one weight for embedding and head."""
    sizes: dict[str, dict[str, Any]] = {
        "gpt": {"layers": 2, "hidden": 16, "heads": 2, "vocabulary": 96, "dropout": 0.0, "tied": True},
        "hf:gpt2": {
            "n_layer": 2,
            "n_embd": 16,
            "n_head": 2,
            "vocab_size": 96,
            "n_positions": 8,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
        "hf:llama": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "vocab_size": 96,
            "tie_word_embeddings": True,
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
        },
    }
    make = partial(hf, name.removeprefix("hf:")) if name.startswith("hf:") else partial(build, name)
    return replace(make(**sizes[name], sequence=8), optimizer=MOMENTUM)


TASKS: dict[str, Callable[[], Task]] = {
    **{
        layers.__name__: partial(task_of, layers, inputs=WIDTH, outputs=WIDTH, optimizer=MOMENTUM)
        for layers in (ends, many, several_times, idle)
    },
    **{name: partial(language_model, name) for name in ("gpt", "hf:gpt2", "hf:llama")},
}
MODELS = "gpt", "hf:gpt2", "hf:llama"


@cache
def profiled(name: str) -> tuple[Task, ModelProfile]:
    task = TASKS[name]()
    return task, profile(task, microbatch_size=(SIZE, 1))


def in_pieces(
    name: str,
    pieces: str,
    schedule: str = "1f1b",
    *,
    data: int = 1,
    shard: Sharding = "none",
    buckets: int = 1,
) -> Plan:
    """Return a plan with one stage of recomputed blocks (all, every other one, or none) and `buckets`
    gradient buckets.
    """
    _, found = profiled(name)
    runs = [*pairwise(found.edges)][:: {"all": 1, "every other": 2, "none": len(found.edges)}[pieces]]
    runs = [] if pieces == "none" else runs
    grid = (
        Grid(devices=tuple(range(data)), data=data, shard=shard, buckets=buckets) if data > 1 else Grid.of(0)
    )
    return Plan(
        profile=found,
        cluster=Cluster.emulated((data, 1 << 30)),
        training=Training(batch_size=SIZE * MICROBATCHES, microbatches=MICROBATCHES, schedule=schedule),
        stages=(Stage(start=0, stop=len(found.layers), grid=grid),),
        decisions=tuple(
            Decision(stage=0, subject=Run(start=start, stop=stop), what=What.RECOMPUTE)
            for start, stop in runs
        ),
    )


def batches(task: Task) -> list[Any]:
    """Return a batch for each step."""
    torch.manual_seed(3)
    return [task.batch(SIZE * MICROBATCHES) for _ in range(STEPS)]


def plain(task: Task, *, slices: int) -> dict[str, Tensor]:
    """Train with a plain loop without blocks, which runs the local batches of a microbatch one after the
    other.
    """
    torch.manual_seed(0)
    module = task.build()
    optimizer = task.optimizer(module.parameters())
    for inputs, targets in batches(task):
        for number in range(MICROBATCHES * slices):
            rows = slice(number * SIZE // slices, (number + 1) * SIZE // slices)
            if isinstance(inputs, dict):
                loss = module(**{key: one[rows] for key, one in inputs.items()}).loss
            else:
                loss = task.loss(module(inputs[rows]), targets[rows])
            (loss / (MICROBATCHES * slices)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(module.state_dict())


NUMBERS = [(n, p, s) for n in TASKS for p in ("all", "every other") for s in ("1f1b", "gpipe")]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "pieces", "schedule"),
    sampled(NUMBERS, often=[case for case in NUMBERS[::3] if "hf:" not in case[0]]),
)
def test_the_numbers_are_bitwise_those_of_plain_training(name: str, pieces: str, schedule: str) -> None:
    """Numbers equal plain training bit by bit: gradients of all users are summed before they are added to
    earlier microbatches.
    """
    task, _ = profiled(name)
    trainer = Trainer(task, in_pieces(name, pieces, schedule), numbers=False)
    for batch in batches(task):
        trainer.step(batch)
    trained, expected = trainer.state_dict(), plain(task, slices=1)
    assert trained.keys() <= expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in trained.items())


GRIDS: list[tuple[str, str, Sharding]] = [
    (n, p, s) for n in ("many", *MODELS) for p in ("all", "none") for s in ("none", "gradients", "parameters")
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "pieces", "shard"),
    sampled(
        GRIDS,
        often=[("many", "all", "gradients"), ("gpt", "all", "parameters"), ("gpt", "none", "gradients")],
    ),
)
def test_replicas_in_buckets_train_like_a_plain_loop(name: str, pieces: str, shard: Sharding) -> None:
    """Replicas in buckets train like a plain loop at every ZeRO level, within the predicted memory."""
    (task, _), plan = profiled(name), in_pieces(name, pieces, data=2, shard=shard, buckets=4)
    trainer = Trainer(task, plan, numbers=False)
    for batch in batches(task):
        trainer.step(batch)
    trained, expected = trainer.state_dict(), plain(task, slices=2)
    assert all(torch.allclose(tensor, expected[key], rtol=1e-4, atol=1e-6) for key, tensor in trained.items())
    dry = certify(task, plan)
    assert dry.peak_bytes == trainer.trace.peak_bytes
    assert not too_low(task, plan)
    assert name not in MODELS or dry.peak_bytes == simulate(plan).peak_bytes


PEAKS = [
    (n, p, s) for n in TASKS for p in ("all", "every other", "none") for s in ("1f1b", "gpipe", "pipedream")
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "pieces", "schedule"),
    sampled(PEAKS, often=[case for case in PEAKS[::5] if "hf:" not in case[0]]),
)
def test_the_peaks_are_known_beforehand(name: str, pieces: str, schedule: str) -> None:
    """Dry run, meter and allocator agree to the byte; the simulator is exact for language models and never
    too low.
    """
    (task, _), plan = profiled(name), in_pieces(name, pieces, schedule)
    found = step_peaks(task, plan, steps=STEPS)
    assert found.dry == found.metered == found.allocated
    assert not too_low(task, plan)
    assert name not in MODELS or found.simulated == found.dry


@pytest.mark.parametrize("name", sampled(MODELS, often=["gpt"]))
def test_blocks_recomputed_by_themselves_need_less_than_the_whole_stage(name: str) -> None:
    """Separately recomputed blocks need less than a recomputed stage: they keep one block's activations."""
    blocks = in_pieces(name, "all")
    whole = Run(start=0, stop=len(blocks.profile.layers))
    decision = Decision(stage=0, subject=whole, what=What.RECOMPUTE)
    assert simulate(blocks).peak_bytes < simulate(replace(blocks, decisions=(decision,))).peak_bytes
