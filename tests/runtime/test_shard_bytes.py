"""Bytes of tensor shards: simulator, dry run, meter and allocator agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from random import Random

import pytest
import torch
from torch import Tensor

from pipefit.errors import UsageError
from pipefit.models import build
from pipefit.runtime import certify
from pipefit.runtime.comm import transport
from pipefit.runtime.engine.tensor_groups import without_peers
from pipefit.schema.decisions import Decision, Microbatches, Run, SavedTensors, State, What
from pipefit.schema.devices import parse_place
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.simulator import simulate
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.offload_choices import movable
from support.sharded_stages import MODELS, divided, grid_plan
from support.step_peaks import step_peaks

FEW = [(1, 1), (2, 1), (1, 2), (2, 2)]  # of two samples' sizes, and two ranks
MANY = [*FEW, (3, 1), (1, 4)]

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def profiled(name: str, sizes: tuple[int, ...], tensor: tuple[int, ...]) -> ModelProfile:
    """Return a model's profile at the sizes of all local batches, whole and divided."""
    return profile(divided(name), microbatch_size=sizes, tensor=tensor)


def random_plan(name: str, rng: Random, grids: Sequence[tuple[int, int]] = FEW) -> Plan:
    """Draw up to three stages of random grids on at most eight devices, with some layers recomputed and some
    tensors moved.
    """
    count = rng.choice([1, 2, 3])
    degrees = [(8, 2)]
    while sum(data * tensor for data, tensor in degrees) > 8 or all(tensor == 1 for _, tensor in degrees):
        degrees = [rng.choice(grids) for _ in range(count)]
        if name == "tied":  # stages that share a parameter have as many shards
            degrees = [degrees[0]] * count
    edges = [0, *sorted(rng.sample(range(1, 6), count - 1)), 6]
    schedule = rng.choice(["gpipe", "1f1b"])
    found = profiled(name, (12, 6), (2,)) if grids is FEW else profiled(name, (12, 6, 4), (2, 4))
    plan = grid_plan(found, edges, degrees, microbatches=rng.randint(1, 3), schedule=schedule, rng=rng)
    return decided(plan, rng, recomputes=name != "tied")


def decided(plan: Plan, rng: Random, *, recomputes: bool) -> Plan:
    """Return the plan with random decisions on some stages: a recomputed run, an offloaded saved tensor or
    optimizer state, and state divided by replicas.
    """
    decisions, stages = [], list(plan.stages)
    for number, stage in enumerate(plan.stages):
        if stage.grid.data > 1 and rng.random() < 0.4:
            stages[number] = replace(stage, grid=replace(stage.grid, shard="optimizer"))
        if stage.grid.data == 1 and rng.random() < 0.3:
            layers = State(start=stage.start, stop=rng.randint(stage.start + 1, stage.stop), kind="optimizer")
            decisions.append(
                Decision(stage=number, subject=layers, what=What.OFFLOAD, place=parse_place("host"))
            )
        if recomputes and rng.random() < 0.4:
            start = rng.randrange(stage.start, stage.stop)
            run = Run(start=start, stop=rng.randint(start + 1, stage.stop))
            decisions.append(
                Decision(stage=number, subject=run, what=What.RECOMPUTE, microbatches=Microbatches())
            )
        elif rng.random() < 0.5 and (tensors := movable(plan, number)):
            taken = SavedTensors(tensors=(rng.choice(tensors),))
            decisions.append(
                Decision(stage=number, subject=taken, what=What.OFFLOAD, place=parse_place("host"))
            )
    return replace(plan, stages=tuple(stages), decisions=tuple(decisions))


def check_simulated(name: str, seed: int, grids: Sequence[tuple[int, int]] = FEW) -> None:
    """Compare the peaks of all devices; check an upper bound for two users of a parameter on one stage."""
    plan = random_plan(name, Random(seed), grids)
    simulated, dry = simulate(plan).peak_bytes, certify(divided(name), plan).peak_bytes
    pairs = [pair for shared in plan.measurement.shared for pair in shared.pairs]
    bounds = {
        device
        for stage in plan.stages
        for device in stage.devices
        if any(stage.start <= user and later < stage.stop for user, later in pairs)
    }
    differing = {
        device for device, (one, other) in enumerate(zip(simulated, dry, strict=True)) if one != other
    }
    assert differing <= bounds
    assert all(simulated[device] > dry[device] for device in differing)


@pytest.mark.gallery
@pytest.mark.parametrize(
    ("name", "seed"),
    sampled([(name, seed) for name in MODELS for seed in (0, 1)], often=[("tied", 1)]),
)
def test_the_simulator_s_bytes_are_the_dry_run_s(name: str, seed: int) -> None:
    """The simulator equals the dry run on every device of random stages in grids, recomputed runs and moved
    tensors included.
    """
    check_simulated(name, seed)


def test_a_plan_whose_layers_were_divided_otherwise_is_refused() -> None:
    """A plan whose layers were divided differently, as by another release, is refused, because its bytes
    would be wrong.
    """
    plan = grid_plan(profiled("dropped", (12, 6), (2,)), [0, 3, 6], [(1, 2), (1, 1)])
    others = tuple(replace(m, forms="0a" if m.tensor > 1 else "") for m in plan.profile.measurements)
    with pytest.raises(
        UsageError, match="2 tensor-parallel ranks would shard dropped differently than in its profile"
    ):
        certify(divided("dropped"), replace(plan, profile=replace(plan.profile, measurements=others)))


def test_samples_of_real_data_may_be_taken() -> None:
    """A batch function may index a tensor of real data; the bytes equal those of a random batch."""
    made = divided("still")
    data = made.batch(24)

    def taken(size: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(data[0]), (size,))
        return data[0][chosen], data[1][chosen]

    plan = grid_plan(profiled("still", (12, 6), (2,)), [0, 3, 6], [(1, 2), (2, 1)])
    assert certify(replace(made, batch=taken), plan).peak_bytes == certify(made, plan).peak_bytes


def test_a_stage_without_parameters_may_have_shards() -> None:
    """A stage without parameters may have shards: its ranks have nothing to divide or to update."""
    plan = grid_plan(profiled("dropped", (12, 6), (2,)), [0, 2, 3, 6], [(1, 1), (1, 2), (1, 1)])
    assert simulate(plan).peak_bytes == certify(divided("dropped"), plan).peak_bytes


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("name", MODELS)
def test_the_simulator_s_bytes_are_the_dry_run_s_in_many_plans(name: str, seed: int) -> None:
    """The simulator equals the dry run in more plans, with four ranks and three replicas too."""
    check_simulated(name, seed, MANY)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "seed"), [("dropped", 0), ("normed", 1), ("tied", 2)])
def test_simulator_dry_run_meter_and_allocator_agree(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulator, dry run, meter and allocator agree on the peaks of every rank in both steps, to the byte.

    Peers are absent, because a process that runs all ranks also holds the messages between them.
    """
    monkeypatch.setattr(transport, "Together", lambda plan: without_peers)
    found = step_peaks(divided(name), random_plan(name, Random(seed)))
    assert found.dry == found.metered == found.allocated == found.simulated


@pytest.mark.gallery
@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_models_of_the_zoo_are_simulated_to_the_byte(name: str) -> None:
    """Models of the zoo are simulated to the byte: divided embeddings, heads, losses and convolutions next to
    stages of whole layers.
    """
    task = ZOO[name]()
    found = profile(task, microbatch_size=(4, 2), tensor=2)
    edges = found.edges
    cuts = [0, edges[len(edges) // 2], edges[-1]]
    for degrees in ([(1, 2), (2, 2)], [(1, 2), (1, 1)]):
        plan = grid_plan(found, cuts, degrees, schedule="gpipe")
        assert simulate(plan).peak_bytes == certify(task, plan).peak_bytes


ZOO = {
    "gpt": partial(build, "gpt", layers=2, hidden=64, heads=4, vocabulary=101, sequence=16),
    "unet": partial(build, "unet", depth=1, width=64, convolutions=1, image_size=8, dropout=0.0),
}
