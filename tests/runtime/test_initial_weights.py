"""Initial weights of workers: those of plain training under the same seed, without a copy of the model in
each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipefit
from pipefit.capture import Task
from pipefit.checkpoints import load_state_dict
from pipefit.runtime.options import Saving
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from support import sharded_stages, worker_memory
from support.gallery_samples import sampled

SEED = 5


def plan_of(task: Task, workers: int) -> Plan:
    """Return layers split as evenly as possible, in two microbatches of two samples."""
    profile = pipefit.profile(task, microbatch_size=2)
    layers = len(profile.layers)
    stages = tuple(
        Stage(start=start, stop=stop, grid=Grid.of(number))
        for number, (start, stop) in enumerate(pairwise(layers * n // workers for n in range(workers + 1)))
    )
    cluster = Cluster.emulated((workers, 1 << 30))
    return Plan(
        profile=profile, cluster=cluster, training=Training(batch_size=4, microbatches=2), stages=stages
    )


@pytest.mark.parametrize(
    "build", sampled([worker_memory.by_hand, worker_memory.Stack], often=[worker_memory.Stack])
)
def test_only_the_first_worker_holds_the_whole_model(build: type, tmp_path: Path) -> None:
    """Only the first worker holds the whole model: of 128 MiB in eight layers, the other three never exceed
    half at their start.
    """
    task = partial(worker_memory.watched, build, str(tmp_path))
    pipefit.train(task, plan_of(task(), 4), steps=1, numbers=False)
    grown = [int((tmp_path / str(rank)).read_text()) for rank in range(4)]
    whole = 8 * worker_memory.WIDE**2 * 4
    assert grown[0] > whole
    assert max(grown[1:]) < grown[0] - whole / 2  # tracing costs the same in all


def test_replicas_that_divide_parameters_hold_their_own(tmp_path: Path) -> None:
    """Each of four replicas that shard all eight layers only holds its two layers at the start."""
    task = partial(worker_memory.watched, worker_memory.by_hand, str(tmp_path))
    profile = pipefit.profile(task(), microbatch_size=(4, 1))
    grid = Grid(devices=tuple(range(4)), data=4, shard="parameters", buckets=4)
    plan = Plan(
        profile=profile,
        cluster=Cluster.emulated((4, 1 << 30)),
        training=Training(batch_size=4, microbatches=1),
        stages=(Stage(start=0, stop=8, grid=grid),),
    )
    pipefit.train(task, plan, steps=1, numbers=False)
    grown = [int((tmp_path / str(rank)).read_text()) for rank in range(4)]
    whole = 8 * worker_memory.WIDE**2 * 4
    assert grown[0] > whole
    assert max(grown[1:]) < grown[0] - whole / 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", worker_memory.BUILDERS)
def test_the_first_weights_are_those_of_plain_training(name: str, tmp_path: Path) -> None:
    """Initial parameters and buffers are plain training's after a step that changes none, and so is the loss,
    which depends on all other tensors.
    """
    task = partial(worker_memory.odd, name)
    losses, _ = pipefit.train(
        task, plan_of(task(), 3), steps=1, seed=SEED, numbers=False, saving=Saving(directory=str(tmp_path))
    )
    torch.manual_seed(SEED)
    module = worker_memory.BUILDERS[name]()
    initial = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    torch.manual_seed(SEED)
    inputs, targets = worker_memory.batch(worker_memory.WIDTH, 4)
    plain = [F.mse_loss(module(x), y) for x, y in zip(inputs.split(2), targets.split(2), strict=True)]
    assert losses == [torch.stack(plain).mean().item()]
    found = load_state_dict(tmp_path)
    assert found.keys() == initial.keys()
    for key, tensor in initial.items():
        if not key.endswith(("running_mean", "running_var", "num_batches_tracked")):  # changed by the step
            assert torch.equal(found[key], tensor), key


def test_a_buffer_in_a_weight_follows_it() -> None:
    """A buffer that shares memory with a parameter does so in every worker, as two updates show."""
    losses, _ = pipefit.train(
        worker_memory.aliased, plan_of(worker_memory.aliased(), 2), steps=2, numbers=False
    )
    torch.manual_seed(0)
    module = worker_memory.sequence_of(worker_memory.Aliased)
    optimizer, plain = worker_memory.sgd(module.parameters()), []
    for step in range(2):
        torch.manual_seed(step)
        inputs, targets = worker_memory.batch(worker_memory.WIDTH, 4)
        parts = [F.mse_loss(module(x), y) / 2 for x, y in zip(inputs.split(2), targets.split(2), strict=True)]
        optimizer.zero_grad()
        torch.autograd.backward(parts)
        optimizer.step()
        plain.append(sum(parts).item())
    assert losses == pytest.approx(plain, rel=1e-6)


GRIDS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[Grid, ...]]] = {
    "replicas": (sharded_stages.still, (Grid(devices=(0, 1), data=2),)),
    "replicas that divide parameters": (
        sharded_stages.still,
        (Grid(devices=(0, 1), data=2, shard="parameters"),),
    ),
    "tensor shards": (sharded_stages.still, (Grid(devices=(0, 1), tensor=2),)),
    "stages that share weights": (worker_memory.tied, (Grid.of(0), Grid.of(1))),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("seeded", [False, True])
def test_a_module_that_exists_is_that_of_the_first_worker(grid: str, seeded: bool) -> None:
    """An existing module is the first worker's: the function that returns it is called after seeding. If its
    weights differ between workers, all load the first one's, as replicas, shards and shared weights require:
    the losses are plain training's.
    """
    layers, grids = GRIDS[grid]
    torch.manual_seed(0 if seeded else SEED)
    module = nn.Sequential(*layers()).double()
    task = partial(worker_memory.existing, layers, seeded=seeded)
    profile = pipefit.profile(task(), microbatch_size=(2, 1), tensor=(1, 2))
    cuts = [0, len(module)] if len(grids) == 1 else [0, 2, len(module)]
    plan = Plan(
        profile=profile,
        cluster=Cluster.emulated((2, 1 << 30)),
        training=Training(batch_size=4, microbatches=2, precision="float64"),
        stages=tuple(
            Stage(start=a, stop=b, grid=grid) for (a, b), grid in zip(pairwise(cuts), grids, strict=True)
        ),
    )
    losses, _ = pipefit.train(task, plan, steps=3, seed=SEED, numbers=False)
    optimizer, plain = worker_memory.slow(module.parameters()), []
    for step in range(3):
        torch.manual_seed(SEED + step)
        inputs, targets = sharded_stages.batch(4)
        optimizer.zero_grad()
        loss = F.mse_loss(module(inputs), targets)
        loss.backward()
        optimizer.step()
        plain.append(loss.item())
    assert losses == pytest.approx(plain, rel=1e-9)
