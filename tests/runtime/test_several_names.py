"""Parameters with several names count once in norms, group options, optimizer state, checkpoints and totals,
as in plain training over `module.parameters()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.report.plan import stage_table
from pipefit.runtime import Trainer
from pipefit.schema.cluster import Cluster
from pipefit.schema.fit import Attempt
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.units import format_bytes
from support.known_profiles import profile
from support.shared_parameters import MODELS, Plain, task_of
from support.small_tasks import batch_of

CLIP, STEPS = 0.5, 4


def by_name(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Return options that depend on the name, and so differ between the names of one parameter."""
    return {"weight_decay": 0.3 * (len(name) % 3), "lr": 0.01 * (1 + sum(map(ord, name)) % 7)}


def task(name: str, **options: Any) -> Task:
    return task_of(name, optimizer=partial(torch.optim.AdamW, lr=0.05), groups=by_name, **options)


@lru_cache
def profiled(name: str) -> ModelProfile:
    return profile(task(name), microbatch_size=(4, 2))


def planned(found: ModelProfile, *grids: Grid, **training: Any) -> Plan:
    """Return a plan whose stages are about equal parts of the layers."""
    layers, count = len(found.layers), len(grids)
    edges = [layers * number // count for number in range(count + 1)]
    return Plan(
        profile=found,
        cluster=Cluster.emulated((sum(len(grid.devices) for grid in grids), 1 << 30)),
        training=Training(batch_size=8, microbatches=2, clip_norm=CLIP, **training),
        stages=tuple(
            Stage(start=start, stop=stop, grid=grid)
            for (start, stop), grid in zip(pairwise(edges), grids, strict=True)
        ),
    )


def close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 2e-5) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], tensor, rtol=0, atol=tolerance) for name, tensor in other.items()
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_parameter_with_several_names_is_one(name: str, tmp_path: Path) -> None:
    """A parameter with several names trains as one: two steps on two devices, then, from a checkpoint, two on
    replicas that divide the optimizer's state.
    """
    found, asked = profiled(name), task(name)
    whole = Grid(devices=(0, 1), data=2, shard="optimizer")
    stages = [Grid.of(0), Grid.of(1)][: len(found.layers)]
    before, after = planned(found, *stages), planned(found, whole)
    plain = Plain(asked, CLIP)
    trainer = Trainer(asked, before)
    for step in range(STEPS):
        if step == STEPS // 2:
            trainer.save(tmp_path)
            trainer.finish()
            trainer = Trainer(asked, after)
            trainer.load(tmp_path)
        batch = batch_of(asked, before, step)
        plain.step(batch)
        trainer.step(batch)
        assert close(trainer.state_dict(), plain.state), step


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["a head", "two heads", "kept twice in a sequence", "unused"])
def test_master_weights_of_a_parameter_with_several_names_are_one(name: str) -> None:
    """Master weights of a parameter with several names are equal bit by bit, if no gradients of stages are
    summed in half precision.
    """
    asked = task(name, precision="master-bfloat16")
    found = profile(asked, microbatch_size=4)
    plan = planned(found, Grid.of(0), precision="master-bfloat16")
    plain, trainer = Plain(asked, CLIP), Trainer(asked, plan)
    for step in range(STEPS):
        batch = tuple(tensor.bfloat16() for tensor in batch_of(asked, plan, step))
        plain.step(batch)
        trainer.step(batch)
    state = trainer.state_dict(optimizer=True)
    assert close(trainer.state_dict(), plain.state, 0)
    masters = {key.removeprefix("master/"): copy for key, copy in state.items() if key.startswith("master/")}
    assert masters
    known = {key: copy for key, copy in plain.masters.items() if key in masters}
    assert close({key: masters[key] for key in known}, known, 1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_numbers_of_parameters_count_each_once(name: str) -> None:
    """A parameter with several names counts once for the largest model and in the table of stages."""
    plan, module = planned(profiled(name), Grid.of(0)), MODELS[name]()
    assert Attempt(value=1, plan=plan).parameters == sum(
        parameter.numel() for parameter in module.parameters()
    )
    (row,) = stage_table(plan).rows
    assert row[4] == format_bytes(sum(parameter.nbytes for parameter in module.parameters()))


def _second_tensor(one: nn.Linear, other: nn.Linear) -> None:
    other.weight = nn.Parameter(one.weight.data)


def _overlapping(one: nn.Linear, other: nn.Linear) -> None:
    room = torch.randn(12, 8)
    one.weight, other.weight = nn.Parameter(room[:8]), nn.Parameter(room[4:])


def _buffer(one: nn.Linear, other: nn.Linear) -> None:
    other.register_buffer("seen", one.weight.data)


def _frozen(one: nn.Linear, other: nn.Linear) -> None:
    _second_tensor(one, other)
    one.weight.requires_grad_(False)
    other.weight.requires_grad_(False)


def _side_by_side(one: nn.Linear, other: nn.Linear) -> None:
    room = torch.randn(16, 8)
    one.weight, other.weight = nn.Parameter(room[:8]), nn.Parameter(room[8:])


@pytest.mark.parametrize("tie", [_second_tensor, _overlapping, _buffer])
def test_two_tensors_in_the_same_memory_are_refused_by_name(
    tie: Callable[[nn.Linear, nn.Linear], None],
) -> None:
    """Two parameters that overlap in memory are refused by name: two stages would train them separately."""

    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        tie(module[0], module[2])  # type: ignore[arg-type]
        return module

    with pytest.raises(
        UsageError, match=r"0\.weight and 2\.(weight|seen) of .* two tensors in the same memory"
    ):
        profile(replace(task("a head"), module=build), microbatch_size=2)


@pytest.mark.parametrize("tie", [_frozen, _side_by_side])
def test_memory_that_is_not_trained_twice_may_be_shared(tie: Callable[[nn.Linear, nn.Linear], None]) -> None:
    """Frozen tensors, and parameters without overlap, may share a storage."""

    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        tie(module[0], module[2])  # type: ignore[arg-type]
        return module

    assert len(profile(replace(task("a head"), module=build), microbatch_size=2).layers) == 3
