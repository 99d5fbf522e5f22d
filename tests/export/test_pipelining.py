"""Schedules for torch.distributed.pipelining, read by torch itself."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline, schedules

import pipefit
from pipefit.errors import UsageError
from pipefit.export import pipelining_csv, split_points
from pipefit.planner import plan
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, What
from pipefit.schema.grids import Grid
from pipefit.schema.plan import Plan
from support.pipelines import random_profile


def planned(schedule: str, microbatches: int = 5, *, stages: int = 3) -> Plan:
    """Return a plan with one stage per device."""
    cluster = Cluster.emulated((stages, 1 << 30))
    return plan(random_profile(7), cluster, microbatches=microbatches, schedule=schedule, planner="exact")


def read(text: str) -> dict[int, list[schedules._Action | None]]:
    """Return the actions of every rank, as torch reads a file of this text."""
    return {
        rank: [schedules._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(csv.reader(io.StringIO(text)))
    }


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "torchgpipe"])
def test_torch_accepts_the_schedule_and_adds_its_messages(schedule: str) -> None:
    """torch finds every forward and backward once and in a valid order, and adds the messages."""
    made = planned(schedule)
    actions = read(pipelining_csv(made))
    assert schedules._validate_schedule(actions, 3, 3, 5) == {0: 0, 1: 1, 2: 2}
    whole = schedules._add_send_recv({r: list(row) for r, row in actions.items()}, lambda stage: stage, 3)
    assert sum(str(one).endswith("SEND_F4") for row in whole.values() for one in row) == 2


def test_a_stage_that_is_recomputed_in_parts_is_computed_once() -> None:
    """A run inside a stage splits its forward and backward into parts; the file has each once for a
    microbatch.
    """
    made = planned("1f1b")
    stage = max(made.stages, key=lambda one: one.stop - one.start)
    number = made.stages.index(stage)
    run = Decision(stage=number, subject=Run(start=stage.start + 1, stop=stage.stop), what=What.RECOMPUTE)
    recomputed = replace(made, decisions=(run,), prediction=None)
    assert pipelining_csv(recomputed) == pipelining_csv(made)


def test_stages_of_one_device_are_one_rank() -> None:
    """A device with two stages is one row, whose actions name both."""
    made = planned("gpipe", stages=4)
    stages = tuple(replace(stage, grid=Grid.of(n % 2)) for n, stage in enumerate(made.stages))
    rows = pipelining_csv(replace(made, stages=stages, prediction=None)).splitlines()
    assert len(rows) == 2 and "0F0" in rows[0] and "2F0" in rows[0] and "3F0" in rows[1]


def test_what_torch_has_no_schedule_for_is_refused() -> None:
    """An asynchronous schedule is refused by name."""
    with pytest.raises(UsageError, match="asynchronous schedules such as pipedream"):
        pipelining_csv(planned("pipedream"))


class Residual(nn.Module):
    """A block of two modules, whose first layer is inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    """Blocks between an embedding and a head, with a norm before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(Residual() for _ in range(5))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_torch_divides_the_model_at_the_points() -> None:
    """torch's `pipeline` makes stages with the parameters of the plan's; together they compute the model's
    outputs.
    """

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 32, (size, 4)), torch.zeros(size)

    module = Decoder()
    task = pipefit.Task(module, batch=batch, loss=lambda out, _: out.mean())
    made = pipefit.plan(
        task, "emulated:3x64MiB", batch_size=4, microbatches=2, stages=3, data=1, planner="exact"
    )
    names = json.loads(split_points(made))
    spec = {name: SplitPoint[where] for name, where in names.items()}
    tokens, _ = batch(2)
    pipe = pipeline(module, (tokens,), split_spec=spec)
    trainer = pipefit.Trainer(task, made)
    every = trainer.state_dict()
    held = [
        {
            name
            for name in every
            for layer in made.profile.layers[stage.start : stage.stop]
            if name.startswith(f"{layer}.")
        }
        for stage in made.stages
    ]
    assert [set(dict(pipe.get_stage_module(number).named_parameters())) for number in range(3)] == held
    assert torch.equal(pipe(tokens)[0], module(tokens))


def test_a_stage_that_begins_with_a_second_call_has_no_point() -> None:
    """torch identifies modules, not their calls: the plan is refused by name."""
    made = planned("gpipe")
    layers = tuple(f"one{f'@{n}' if n else ''}" for n in range(len(made.profile.layers)))
    again = replace(made, profile=replace(made.profile, layers=layers, blocks=()), prediction=None)
    with pytest.raises(UsageError, match=f"starts with call {made.boundaries[0] + 1} of one, but torch"):
        split_points(again)
